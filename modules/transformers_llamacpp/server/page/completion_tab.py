"""The tab with a raw text that the model goes on with: no template, no roles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from ...errors import LlamaCppError
from ..host import ModelHost
from .chat_tab import ANSWERING, ChatTab
from .conversation import Conversation
from .engine_tab import EngineTab
from .methods import request_fields
from .parameters import QUICK, Parameters
from .sessions import Sessions
from .texts import error_html, status_html
from .writing import Progress, write

__all__ = ["CompletionTab"]


class CompletionTab:
    """The text goes on in place. `before` is the text as it was before the newest completion."""

    def __init__(self, host: ModelHost, sessions: Sessions) -> None:
        self.host, self.sessions = host, sessions
        self.before = gr.State("")
        self.text = gr.Textbox(
            elem_id="raw", show_label=False, label="Text", lines=16, max_lines=10_000, container=False, interactive=True,
            placeholder="Write the beginning of a text; Ctrl+Enter lets the model go on. Special tokens are read as such.",
        )  # fmt: skip
        self.status = gr.HTML("", elem_id="raw-status")
        with gr.Row(elem_classes="actions", elem_id="raw-actions"):
            self.run = gr.Button("Go on", size="sm", variant="primary", elem_id="raw-run")
            self.stop = gr.Button("Stop", size="sm", elem_id="raw-stop", interactive=False)
            self.again = gr.Button("Again", size="sm", elem_id="raw-again", interactive=False)
            self.undo = gr.Button("Undo", size="sm", elem_id="raw-undo", interactive=False)

    def wire(self, parameters: Parameters, engine: EngineTab, chat: ChatTab, tabs: Any) -> None:
        self.parameters, self.engine, self.chat, self.tabs = parameters, engine, chat, tabs
        shown = [self.text, self.before, self.status, self.run, self.stop, self.again, self.undo]
        outputs = [*shown, *engine.outputs]
        self.run.click(self._run, [self.text, *parameters.components], outputs, **ANSWERING)
        self.again.click(self._run, [self.before, *parameters.components], outputs, **ANSWERING)
        self.stop.click(self._stop, None, None, **QUICK)
        self.undo.click(lambda before: {**self._idle(before, before, ""), self.undo: gr.Button(interactive=False)},
                        [self.before], shown, **QUICK)  # fmt: skip
        chat.as_text.click(
            self._from_chat, [chat.conversation, parameters.system, parameters.template],
            [self.text, self.status, chat.status, tabs], **QUICK,
        )  # fmt: skip

    def _run(self, request: gr.Request, text: str, *arrived: Any) -> Iterator[Any]:
        job = self.sessions.begin(request.session_hash)
        if job is None:
            yield {self.status: gr.skip()}
            return
        status, progress = "", Progress()
        drawn: list[float] = []
        try:
            fields, top = self._fields(text, arrived)
            yield {**self._busy(text), **self.engine.begun("/v1/completions", fields)}
            for progress in write(self.host, "completion", fields, top, job):
                status = status_html(progress)
                if not progress.finish:
                    shown = {self.text: text + progress.text, self.status: status}
                    yield {**shown, **self.engine.shown(progress, job, drawn)}
        except GeneratorExit:
            raise
        except BaseException as error:
            status = error_html(error)
            if not isinstance(error, LlamaCppError):
                yield self._idle(text + progress.text, text, status)
                raise
        finally:
            job.end()
            self.sessions.end(request.session_hash)
        last = self.engine.shown(progress, job, []) if progress.finish else {}
        yield {**self._idle(text + progress.text, text, status), **last}

    def _stop(self, request: gr.Request) -> None:
        self.sessions.stop(request.session_hash)

    def _fields(self, text: str, arrived: Sequence[Any]) -> tuple[dict[str, Any], int]:
        values = self.parameters.values(arrived)
        fields = {"prompt": text, **request_fields(values, self.host.sources())}
        model = self.host.model
        if model is not None and model.native.vocab.add_bos and text.startswith(model.tokenizer.bos_token):
            fields["add_bos_token"] = False  # a rendered chat has it already: its template writes it
        return fields, values["top_logprobs"]

    def _from_chat(self, conversation: Conversation, system: str, template: str) -> dict[Any, Any]:
        try:
            text = self.chat.raw(conversation, system, template)
        except LlamaCppError as error:
            return {self.chat.status: error_html(error)}
        return {self.text: text, self.status: "", self.tabs: gr.Tabs(selected="completion")}

    def _busy(self, text: str) -> dict[Any, Any]:
        return {
            self.text: gr.Textbox(value=text, interactive=False),
            self.before: text,
            self.status: status_html(Progress()),
            self.run: gr.Button(interactive=False),
            self.stop: gr.Button(interactive=True),
            self.again: gr.Button(interactive=False),
            self.undo: gr.Button(interactive=False),
        }

    def _idle(self, text: str, before: str, status: str) -> dict[Any, Any]:
        return {
            self.text: gr.Textbox(value=text, interactive=True),
            self.before: before,
            self.status: status,
            self.run: gr.Button(interactive=True),
            self.stop: gr.Button(interactive=False),
            self.again: gr.Button(interactive=bool(before)),
            self.undo: gr.Button(interactive=text != before),
        }
