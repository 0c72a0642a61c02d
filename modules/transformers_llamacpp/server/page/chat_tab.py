"""The tab with the chat: what is on it, and what each control does to the conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from ...errors import LlamaCppError
from ..host import ModelHost
from .conversation import Conversation
from .engine_tab import EngineTab
from .methods import request_fields
from .parameters import QUICK, Parameters
from .sessions import Sessions
from .texts import error_html, note_html, status_html
from .writing import Progress, as_request, chat_text_of, write

__all__ = ["ChatTab", "bubbles", "tree_html"]

PLACEHOLDER = """
<div class="empty"><h2>Ask something</h2>
<p>Enter sends, Shift+Enter makes a new line, Esc stops. Every message can be edited; every version is kept.</p></div>
"""
LATEX = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": r"\[", "right": r"\]", "display": True},
    {"left": r"\(", "right": r"\)", "display": False},
]
SLOW: dict[str, Any] = {**QUICK, "queue": True, "concurrency_limit": None}
# "multiple": by itself Gradio drops an Enter that comes just before it has closed the event of the last answer.
ANSWERING = {**SLOW, "trigger_mode": "multiple"}


class ChatTab:
    """Every browser tab has a `Conversation` of its own; the chatbot only shows it: Gradio changes what goes through there."""

    def __init__(self, host: ModelHost, sessions: Sessions) -> None:
        self.host, self.sessions = host, sessions
        self.conversation = gr.State(Conversation)
        self.chatbot = gr.Chatbot(
            elem_id="chat", show_label=False, placeholder=PLACEHOLDER, buttons=["copy", "copy_all"], editable="all",
            latex_delimiters=LATEX, reasoning_tags=[("<think>", "</think>")], height="100%", group_consecutive_messages=False,
        )  # fmt: skip
        self.status = gr.HTML("", elem_id="status")
        self.prompt = gr.Textbox(
            elem_id="prompt", show_label=False, label="Message", placeholder="Message", container=False, lines=1, max_lines=8,
            submit_btn=True, autofocus=True,
        )  # fmt: skip
        with gr.Row(elem_id="actions", elem_classes="actions"):
            self.regenerate = _action("Regenerate", "regenerate")
            self.go_on = _action("Continue", "continue")
            self.undo = _action("Undo", "undo")
            self.clear = _action("New chat", "clear")
            self.inspect = _action("Tokens", "inspect")
            self.as_text = _action("As raw text", "as-text")
            self.export = _action("Save chat", "export")
            self.load = gr.Button("Open chat", size="sm", elem_id="import")
        self.saved = gr.Textbox(visible="hidden", elem_id="saved-chat", label="Saved chat")

    def tree(self) -> Any:
        """What `page.js` makes the buttons for versions and branches of, and what they call; outside of the tabs, so that it
        is always there."""
        self._tree = gr.HTML(
            tree_html(Conversation()), elem_id="tree", js_on_load="window.chatTree = (what) => trigger('select', what);"
        )
        return self._tree

    def wire(self, parameters: Parameters, engine: EngineTab) -> None:
        self.parameters, self.engine = parameters, engine
        settings = [parameters.system, parameters.template, *parameters.components]
        buttons = [self.regenerate, self.go_on, self.undo, self.clear, self.inspect, self.as_text, self.export]
        shown = [self.conversation, self.chatbot, self.status, self.prompt, self._tree, *buttons]
        outputs = [*shown, *engine.outputs]
        self.prompt.submit(self._send, [self.prompt, self.conversation, *settings], outputs, **ANSWERING)
        self.regenerate.click(self._again, [self.conversation, *settings], outputs, **ANSWERING)
        self.go_on.click(self._continue, [self.conversation, *settings], outputs, **ANSWERING)
        self.chatbot.edit(self._edit, [self.conversation, *settings], outputs, **ANSWERING)
        self.prompt.stop(self.stop, None, None, **QUICK)
        self.undo.click(self._undo, [self.conversation], shown, **QUICK)
        self.clear.click(lambda: self._idle(Conversation(), ""), None, shown, **QUICK)
        self._tree.select(self._walk, [self.conversation], shown, **QUICK)
        self.export.click(self._saved, [self.conversation], self.saved, **QUICK).then(
            None, [self.saved], None, js="(text) => window.saveChat(text)", **QUICK
        )
        self.load.click(None, None, None, js="() => window.openChat()", **QUICK)

    # -- writing -------------------------------------------------------------------------------------------------------

    def _send(self, request: gr.Request, text: str, conversation: Conversation, *settings: Any) -> Iterator[Any]:
        if not text.strip():
            yield {self.prompt: gr.skip()}
            return

        def ask() -> None:
            conversation.add("user", text)

        yield from self._answer(conversation, ask, settings, request, text)

    def _again(self, request: gr.Request, conversation: Conversation, *settings: Any) -> Iterator[Any]:
        yield from self._answer(conversation, conversation.up_to_question, settings, request)

    def _continue(self, request: gr.Request, conversation: Conversation, *settings: Any) -> Iterator[Any]:
        yield from self._answer(conversation, lambda: None, settings, request, go_on=conversation.ends_with_answer)

    def _edit(self, request: gr.Request, event: gr.EditData, conversation: Conversation, *settings: Any) -> Iterator[Any]:
        """A question that is edited is asked again; an answer is what it was edited to."""
        at = event.index[0] if isinstance(event.index, (list, tuple)) else event.index
        if self.sessions.busy(request.session_hash):
            yield {self.chatbot: bubbles(conversation)}
        elif conversation.messages()[at]["role"] == "user":
            yield from self._answer(conversation, lambda: conversation.edit(at, event.value), settings, request)
        else:
            conversation.edit(at, event.value)
            yield self._idle(conversation, "")

    def _answer(
        self, conversation: Conversation, change: Any, settings: Sequence[Any], request: gr.Request, text: str | None = None,
        go_on: bool = False,
    ) -> Iterator[Any]:  # fmt: skip
        """`change` makes the conversation end with what is to be answered; without an answer nothing has changed, and `text`
        goes back into the box. `go_on`: its end is an answer, which goes on."""
        job = self.sessions.begin(request.session_hash)
        if job is None:  # one answer at a time in a tab
            yield {self.prompt: gr.skip()}
            return
        mark, status, progress = conversation.mark(), "", Progress()
        drawn: list[float] = []
        begun = conversation.messages()[-1]["content"].rstrip() if go_on else ""
        added = go_on
        try:
            change()
            fields, top = self._fields(conversation, settings, go_on)
            yield self._busy(conversation, fields, text is not None)
            for progress in write(self.host, "chat", fields, top, job):
                if progress.text:
                    if not added:
                        conversation.add("assistant", "")
                        added = True
                    conversation.write(begun + progress.text)
                status = status_html(progress)
                if not progress.finish:
                    yield {self.chatbot: bubbles(conversation), self.status: status, **self.engine.shown(progress, job, drawn)}
        except GeneratorExit:
            raise
        except BaseException as error:
            status = error_html(error)
            if not isinstance(error, LlamaCppError):  # what nobody foresaw belongs in the log too
                yield self._idle(conversation, status)
                raise
        finally:
            job.end()
            self.sessions.end(request.session_hash)
        lost = not added
        if lost:
            conversation.restore(mark)
        last = self.engine.shown(progress, job, []) if progress.finish else {}
        yield {**self._idle(conversation, status, text if lost else None), **last}

    def _fields(self, conversation: Conversation, settings: Sequence[Any], go_on: bool) -> tuple[dict[str, Any], int]:
        system, template, *arrived = settings
        values = self.parameters.values(arrived)
        head = [{"role": "system", "content": system}] if system and system.strip() else []
        fields = {"messages": [*head, *conversation.messages()], **request_fields(values, self.host.sources())}
        if go_on:
            fields["continue_"] = True
        if template:
            fields["instruction_template_str"] = template
        return fields, values["top_logprobs"]

    def stop(self, request: gr.Request) -> None:
        """Ends what is being written for this browser tab."""
        self.sessions.stop(request.session_hash)

    # -- walking about -------------------------------------------------------------------------------------------------

    def _undo(self, conversation: Conversation) -> Any:
        """Takes the last question back into the text box."""
        text = conversation.take_back()
        return self._idle(conversation, "", text)

    def _walk(self, request: gr.Request, event: gr.EventData, conversation: Conversation) -> Any:
        """The buttons at the messages: another version, a branch; and a file that was opened."""
        what = dict(event._data or {})
        if self.sessions.busy(request.session_hash):
            return {self.status: gr.skip()}
        try:
            if what["op"] == "switch":
                conversation.switch(int(what["at"]), int(what["step"]))
            elif what["op"] == "branch":
                conversation.branch(int(what["at"]))
            elif what["op"] == "resume":
                conversation.resume()
            elif what["op"] == "open":
                conversation = Conversation.from_json(json.loads(what["text"]))
        except (LlamaCppError, KeyError, ValueError, TypeError) as error:
            message = str(error) if isinstance(error, LlamaCppError) else "this is no saved conversation"
            return self._idle(conversation, error_html(message))
        note = "What you write next goes on from here; what came after it is kept." if what["op"] == "branch" else ""
        return self._idle(conversation, note_html(note) if note else "")

    def _saved(self, conversation: Conversation) -> str:
        return json.dumps(conversation.to_json(), ensure_ascii=False, indent=1)

    def raw(self, conversation: Conversation, system: str, template: str) -> str:
        """The conversation as the model reads it. Raises `LlamaCppError`."""
        messages = conversation.messages()
        head = [{"role": "system", "content": system}] if system and system.strip() else []
        fields: dict[str, Any] = {"messages": [*head, *messages]}
        if conversation.ends_with_answer:
            fields["continue_"] = True
        if template:
            fields["instruction_template_str"] = template
        return chat_text_of(self.host, as_request("chat", fields))

    # -- what is shown -------------------------------------------------------------------------------------------------

    def _busy(self, conversation: Conversation, fields: dict[str, Any], empty: bool) -> dict[Any, Any]:
        box = {"submit_btn": False, "stop_btn": True}
        return {
            **self._buttons(False, False),
            self.conversation: conversation,
            self.chatbot: bubbles(conversation),
            self.status: status_html(Progress()),
            self.prompt: gr.Textbox(value="", **box) if empty else gr.Textbox(**box),
            self._tree: tree_html(conversation),
            **self.engine.begun("/v1/chat/completions", fields),
        }

    def _idle(self, conversation: Conversation, status: str, text: str | None = None) -> dict[Any, Any]:
        """Everything at rest; `text` is put into the text box, `None` leaves what the user types meanwhile."""
        box = {"submit_btn": True, "stop_btn": False}
        return {
            **self._buttons(len(conversation) > 0, conversation.ends_with_answer),
            self.conversation: conversation,
            self.chatbot: bubbles(conversation),
            self.status: status,
            self.prompt: gr.Textbox(**box) if text is None else gr.Textbox(value=text, **box),
            self._tree: tree_html(conversation),
        }

    def _buttons(self, something: bool, answer: bool) -> dict[Any, Any]:
        whole = (self.regenerate, self.go_on, self.undo, self.clear, self.as_text, self.export)
        found = {one: gr.Button(interactive=something) for one in whole}
        return found | {self.inspect: gr.Button(interactive=answer)}


def _action(label: str, name: str) -> Any:
    return gr.Button(label, size="sm", elem_id=name, interactive=False)


def bubbles(conversation: Conversation) -> list[dict[str, Any]]:
    """Messages for the chatbot. As typed parts: Gradio takes the indentation and the tabs out of plain strings."""
    return [
        {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]}
        for message in conversation.messages()
    ]


def tree_html(conversation: Conversation) -> str:
    """What `page.js` reads: of each message its version and how many there are, and how many ways go on from the end."""
    versions = json.dumps(conversation.versions())
    return f'<div id="tree-data" data-versions="{versions}" data-after="{conversation.hidden_after()}"></div>'
