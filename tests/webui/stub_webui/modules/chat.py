import copy
import functools
import html

import modules.shared as shared
from jinja2.sandbox import ImmutableSandboxedEnvironment
from modules import utils
from modules.extensions import apply_extensions
from modules.text_generation import generate_reply, get_encoded_length, get_max_prompt_length


@functools.cache
def get_compiled_template(text):
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(text)


def _render(state, messages, **kwargs):
    template = get_compiled_template(state["instruction_template_str"])
    return template.render(messages=messages, bos_token=shared.bos_token, eos_token=shared.eos_token, **kwargs)


def generate_chat_prompt(user_input, state, **kwargs):
    """The history and the question in the model's own template; the oldest turns go when it gets too long."""
    rows = list(kwargs.get("history", state["history"])["internal"])
    while True:
        messages = [{"role": "system", "content": state["custom_system_message"]}] if state["custom_system_message"] else []
        for question, answer in rows:
            messages += [{"role": "user", "content": question}] if question else []
            messages += [{"role": "assistant", "content": answer}] if answer else []
        if kwargs.get("_continue"):
            begun = messages.pop()["content"]
            prompt = _render(state, messages, add_generation_prompt=True) + begun
        else:
            messages.append({"role": "user", "content": user_input})
            prompt = _render(state, messages, add_generation_prompt=True)
        if get_encoded_length(prompt) <= get_max_prompt_length(state):
            return prompt
        if len(rows) <= bool(kwargs.get("_continue")):
            raise ValueError("The question is too long for the context.")
        rows.pop(0)


def get_stopping_strings(state):
    """What stands between one turn and the next: every chat has some, so that every chat is streamed inside."""
    turns = [{"role": "user", "content": "U1"}, {"role": "assistant", "content": "A1"}, {"role": "user", "content": "U2"}]
    between = _render(state, turns, add_generation_prompt=False).partition("A1")[2].partition("U2")[0]
    begin = between.strip()
    return [begin.partition(">")[0] + ">"] if begin.startswith("<") else [between[: between.find(":") + 1]]


def chatbot_wrapper(text, state, regenerate=False, _continue=False, loading_message=True, for_ui=False):
    text = text["text"] if isinstance(text, dict) else text
    history = apply_extensions("history", copy.deepcopy(state["history"]))
    state = apply_extensions("state", state)
    state["add_bos_token"] = False  # the template's business
    before = ""
    if regenerate or _continue:
        text, before = history["internal"][-1]
        before = before if _continue else ""
    else:
        text = apply_extensions("input", text, state, is_chat=True)
        history["internal"].append([text, ""])
        history["visible"].append([html.escape(text), ""])
    if loading_message:
        history["visible"][-1][1] = html.escape(before) + shared.processing_message
        yield history
    known = history if _continue else {"internal": history["internal"][:-1]}
    prompt = generate_chat_prompt(text, state, _continue=_continue, history=known)
    for reply in generate_reply(prompt, state, stopping_strings=get_stopping_strings(state), is_chat=True, for_ui=for_ui):
        if shared.stop_everything:
            break
        answer = before + reply if _continue else reply.lstrip(" ")
        history["internal"][-1] = [text, answer]
        history["visible"][-1] = [html.escape(text), html.escape(answer)]
        if state["stream"]:
            yield history
    history["visible"][-1][1] = apply_extensions("output", history["visible"][-1][1], state, is_chat=True)
    yield history


def generate_chat_reply(text, state, regenerate=False, _continue=False, loading_message=True, for_ui=False):
    if (regenerate or _continue) and not state["history"]["internal"]:
        yield state["history"]
        return
    yield from chatbot_wrapper(text, state, regenerate, _continue, loading_message, for_ui)


def generate_chat_reply_wrapper(text, state, regenerate=False, _continue=False):
    loaded, message = utils.check_model_loaded()
    if not loaded:
        import gradio as gr

        raise gr.Error(message)
    for history in generate_chat_reply(text, state, regenerate, _continue, for_ui=True):
        yield chat_html(history), history


def chat_html(history):
    rows = ""
    for (_, answer), (asked, shown) in zip(history["internal"], history["visible"], strict=True):
        rows += f'<div class="user-message">{asked}</div>'
        rows += f'<div class="assistant-message" data-raw="{html.escape(answer)}">{shown}</div>'
    return f'<div id="chat"><div class="messages">{rows}</div></div>'
