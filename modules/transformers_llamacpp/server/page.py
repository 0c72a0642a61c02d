"""The chat page: what is on it, and what each control does. What the model does is in `chat.py` and `host.py`."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from ..errors import LlamaCppError
from ..options import option, options_in
from .chat import Message, Progress, answer
from .host import ModelHost
from .view import badge_html, bubbles, control, error_html, note_html, status_html, value_of

__all__ = ["FOLDER", "Page"]

FOLDER = Path(__file__).parent
LOAD_OPTIONS = tuple(option(name) for name in ("n_ctx", "n_gpu_layers", "n_threads"))
SAMPLING = options_in("sampling")

PLACEHOLDER = """
<div class="empty"><h2>Ask something</h2>
<p>Enter sends, Shift+Enter makes a new line, Esc stops.</p></div>
"""
LATEX = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": r"\[", "right": r"\]", "display": True},
    {"left": r"\(", "right": r"\)", "display": False},
]


class Page:
    """Builds the Blocks of the page on a `ModelHost`. Every browser tab has a history and a stop event of its own."""

    def __init__(self, host: ModelHost) -> None:
        self.host = host
        self._running: dict[str, threading.Event] = {}
        with gr.Blocks(title="transformers_llamacpp", analytics_enabled=False, fill_width=True) as self.blocks:
            self.history = gr.State([])  # the chatbot only shows it: Gradio changes what goes through there
            self._header()
            with gr.Row(elem_id="main", equal_height=False):
                with gr.Column(scale=3, elem_id="chat-side"):
                    self._chat_side()
                with gr.Column(scale=1, min_width=320, elem_id="settings"):
                    self._model_panel()
                    self._chat_panel()
            self._wire()

    # -- what is on the page -------------------------------------------------------------------------------------------

    def _header(self) -> None:
        with gr.Row(elem_id="header"):
            gr.HTML("<h1>transformers<span>_</span>llamacpp</h1>", elem_id="brand")
            self.badge = gr.HTML(badge_html(self.host), elem_id="badge")
            gr.HTML(
                '<a href="#settings" class="jump">Settings</a>'
                '<button id="theme" type="button" title="Light or dark" aria-label="Light or dark">&#9680;</button>',
                elem_id="links",
            )

    def _chat_side(self) -> None:
        self.chatbot = gr.Chatbot(
            elem_id="chat",
            show_label=False,
            placeholder=PLACEHOLDER,
            buttons=["copy", "copy_all"],
            latex_delimiters=LATEX,
            reasoning_tags=[("<think>", "</think>")],
            height="100%",
        )
        self.status = gr.HTML("", elem_id="status")
        self.prompt = gr.Textbox(
            elem_id="prompt",
            show_label=False,
            label="Message",
            placeholder="Message",
            container=False,
            lines=1,
            max_lines=8,
            submit_btn=True,
            autofocus=True,
        )
        with gr.Row(elem_id="actions"):
            self.regenerate = gr.Button("Regenerate", size="sm", elem_id="regenerate", interactive=False)
            self.undo = gr.Button("Undo", size="sm", elem_id="undo", interactive=False)
            self.clear = gr.Button("Clear", size="sm", elem_id="clear", interactive=False)

    def _model_panel(self) -> None:
        with gr.Accordion("Model", open=not self.host.name, elem_id="model-panel"):
            self.file = gr.Dropdown(label="File", info=f"GGUF files in {self.host.model_dir}", elem_id="file")
            self.load_controls = [control(entry, self.host.options.get(entry.name)) for entry in LOAD_OPTIONS]
            with gr.Row():
                self.rescan = gr.Button("Rescan", size="sm", elem_id="rescan")
                self.load = gr.Button("Load", size="sm", variant="primary", elem_id="load")
            self.load_status = gr.HTML("", elem_id="load-status")

    def _chat_panel(self) -> None:
        with gr.Accordion("Chat", open=True):
            self.system = gr.Textbox(
                label="System prompt",
                info="Goes before the conversation; empty leaves it to the model's template.",
                lines=2,
                max_lines=8,
                elem_id="system",
            )
        with gr.Accordion("Sampling", open=True):
            self.sampling_controls = [control(entry) for entry in SAMPLING]

    def _wire(self) -> None:
        settings = [self.system, *self.sampling_controls]
        outputs = [
            self.history, self.chatbot, self.status, self.prompt, self.regenerate, self.undo, self.clear, self.badge,
        ]  # fmt: skip
        quick: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        slow: dict[str, Any] = {**quick, "queue": True, "concurrency_limit": None}
        # "multiple": by itself Gradio drops an Enter that comes just before it has closed the event of the last answer.
        answering = {**slow, "trigger_mode": "multiple"}
        self.prompt.submit(self._send, [self.prompt, self.history, *settings], outputs, **answering)
        self.regenerate.click(self._again, [self.history, *settings], outputs, **answering)
        self.prompt.stop(self._stop, None, None, **quick)
        self.undo.click(self._undo, [self.history], outputs, **quick)
        self.clear.click(lambda: self._idle([], ""), None, outputs, **quick)
        self.rescan.click(lambda: gr.Dropdown(choices=list(self.host.sources())), None, self.file, **quick)
        loading = {**slow, "concurrency_limit": 1}
        shown = [self.load_status, self.load, self.badge]
        self.load.click(self._load, [self.file, *self.load_controls], shown, **loading)
        self.blocks.load(self._opened, None, [self.badge, self.load_status, self.file, *self.load_controls], **quick)
        self.blocks.unload(self._stop)

    # -- the chat ------------------------------------------------------------------------------------------------------

    def _send(self, request: gr.Request, text: str, history: list[Message], *settings: Any) -> Iterator[Any]:
        if text.strip():
            yield from self._answer([*history, {"role": "user", "content": text}], settings, request)
        else:
            yield {self.prompt: gr.skip()}

    def _again(self, request: gr.Request, history: list[Message], *settings: Any) -> Iterator[Any]:
        yield from self._answer(_up_to_question(history), settings, request)

    def _undo(self, history: list[Message]) -> Any:
        """Takes the last question back into the text box."""
        *rest, question = _up_to_question(history)
        return self._idle(rest, "", question["content"])

    def _stop(self, request: gr.Request) -> None:
        """The stop button; also what a closed tab does."""
        stop = self._running.get(request.session_hash or "")
        if stop is not None:
            stop.set()

    def _answer(self, messages: list[Message], settings: Sequence[Any], request: gr.Request) -> Iterator[Any]:
        """`messages` ends with a question. One that gets no answer goes back into the text box, so nothing is lost."""
        session, stop = request.session_hash or "", threading.Event()
        if self._running.setdefault(session, stop) is not stop:  # one answer at a time in a tab
            yield {self.prompt: gr.skip()}
            return
        shown, status = messages, ""
        yield self._busy(messages)
        try:
            system, *values = settings
            head = [{"role": "system", "content": system}] if system and system.strip() else []
            sampling = {entry.name: value_of(entry, value) for entry, value in zip(SAMPLING, values, strict=True)}
            with self.host.use(stop) as model:
                for progress in answer(model, [*head, *messages], sampling, stop):
                    if progress.text:
                        shown = [*messages, {"role": "assistant", "content": progress.text}]
                    status = status_html(progress)
                    if not progress.finish:
                        yield {self.chatbot: bubbles(shown), self.status: status}
        except GeneratorExit:
            raise
        except BaseException as error:
            status = error_html(error)
            if not isinstance(error, LlamaCppError):  # what nobody foresaw belongs in the log too
                yield self._idle(shown, status)
                raise
        finally:
            stop.set()
            del self._running[session]
        if shown is messages:
            yield self._idle(messages[:-1], status, messages[-1]["content"])
        else:
            yield self._idle(shown, status)

    def _busy(self, messages: list[Message]) -> dict[Any, Any]:
        return {
            **self._buttons(False),
            self.history: messages,
            self.chatbot: bubbles(messages),
            self.status: status_html(Progress()),
            self.prompt: gr.Textbox(value="", submit_btn=False, stop_btn=True),
        }

    def _idle(self, messages: list[Message], status: str, text: str | None = None) -> dict[Any, Any]:
        """Everything at rest; `text` is put into the text box, `None` leaves what the user types meanwhile."""
        prompt = {"submit_btn": True, "stop_btn": False}
        return {
            **self._buttons(bool(messages)),
            self.history: messages,
            self.chatbot: bubbles(messages),
            self.status: status,
            self.prompt: gr.Textbox(**prompt) if text is None else gr.Textbox(value=text, **prompt),
        }

    def _buttons(self, interactive: bool) -> dict[Any, Any]:
        buttons = (self.regenerate, self.undo, self.clear)
        return {self.badge: badge_html(self.host), **{one: gr.Button(interactive=interactive) for one in buttons}}

    # -- the model -----------------------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        """What a page that is opened later has to show: the model may have changed since the server started."""
        names = list(self.host.sources())
        value = self.host.name if self.host.name in names else next(iter(names), None)
        error = error_html(self.host.error) if self.host.error else ""
        options = [self.host.options.get(entry.name, entry.default) or 0 for entry in LOAD_OPTIONS]
        return badge_html(self.host), error, gr.Dropdown(choices=names, value=value), *options

    def _load(self, name: str | None, *values: Any) -> Iterator[Any]:
        """Loads in a thread and reports once in a while; a failed load stays readable where the button is."""
        failure: list[BaseException] = []
        thread = threading.Thread(target=self._load_quietly, args=(name, values, failure), daemon=True)
        began = time.monotonic()
        thread.start()
        thread.join(0.3)
        while thread.is_alive():
            note = note_html(f"Loading {name}: {time.monotonic() - began:.1f} s", "busy")
            yield {
                self.load_status: note,
                self.load: gr.Button("Loading", interactive=False),
                self.badge: badge_html(self.host),
            }
            thread.join(0.3)
        seconds = time.monotonic() - began
        yield {
            self.load_status: error_html(failure[0]) if failure else note_html(f"Loaded in {seconds:.1f} s", "good"),
            self.load: gr.Button("Load", interactive=True),
            self.badge: badge_html(self.host),
        }

    def _load_quietly(self, name: str | None, values: Sequence[Any], failure: list[BaseException]) -> None:
        try:
            options = {entry.name: value_of(entry, value) for entry, value in zip(LOAD_OPTIONS, values, strict=True)}
            self.host.load(name or "", options)
        except BaseException as error:  # it belongs to the page, not to this thread
            failure.append(error)


def _up_to_question(history: Sequence[Message]) -> list[Message]:
    """The conversation without what came after the last question."""
    last = max(index for index, message in enumerate(history) if message["role"] == "user")
    return list(history[: last + 1])
