from functools import partial

import gradio as gr
from modules import chat, shared, ui
from modules.text_generation import stop_everything_event
from modules.utils import gradio

MARK = "() => { document.getElementById('chat').parentNode.classList.%s('_generating'); return [] }"


def create_ui():
    shared.gradio["Chat input"] = gr.State()
    shared.gradio["history"] = gr.State({"internal": [], "visible": [], "metadata": {}})
    with gr.Tab("Chat", elem_id="chat-tab"):
        shared.gradio["html_display"] = gr.HTML(chat.chat_html({"internal": [], "visible": []}))
        shared.gradio["textbox"] = gr.MultimodalTextbox(label="", elem_id="chat-input")
        with gr.Row():
            shared.gradio["Stop"] = gr.Button("Stop", elem_id="stop")
            shared.gradio["Generate"] = gr.Button("Send", elem_id="Generate", variant="primary")
            shared.gradio["Regenerate"] = gr.Button("Regenerate", elem_id="Regenerate")
            shared.gradio["Continue"] = gr.Button("Continue", elem_id="Continue")
            shared.gradio["Start new chat"] = gr.Button("New chat", elem_id="new-chat-btn")
        shared.gradio["mode"] = gr.Radio(["instruct"], value="instruct", label="Mode")


def create_event_handlers():
    outputs = gradio("html_display", "history")

    def gathered(event):
        return event(ui.gather_interface_values, gradio(shared.input_elements), gradio("interface_state"))

    def chatting(chain, **kwargs):
        call = partial(chat.generate_chat_reply_wrapper, **kwargs)
        chain = chain.then(lambda: None, None, None, js=MARK % "add")  # gradio 4: nothing follows a script alone
        chain = chain.then(call, gradio("Chat input", "interface_state"), outputs, show_progress="hidden")
        return chain.then(None, None, None, js=MARK % "remove")

    def take(text):
        return text, {"text": "", "files": []}

    for event in (shared.gradio["Generate"].click, shared.gradio["textbox"].submit):
        chatting(gathered(event).then(take, gradio("textbox"), gradio("Chat input", "textbox"), show_progress="hidden"))
    chatting(gathered(shared.gradio["Regenerate"].click), regenerate=True)
    chatting(gathered(shared.gradio["Continue"].click), _continue=True)
    shared.gradio["Stop"].click(stop_everything_event, None, None, queue=False)
    shared.gradio["Start new chat"].click(start_new_chat, None, outputs, show_progress="hidden")


def start_new_chat():
    history = {"internal": [], "visible": [], "metadata": {}}
    return chat.chat_html(history), history
