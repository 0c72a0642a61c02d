"""The tab with the model: which file, how it is loaded, what that will take, and what else the hub has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from ...errors import LlamaCppError
from ...options import option
from ..host import ModelHost
from .controls import control, shown_value, value_of
from .estimate import estimate, facts_of, free_memory
from .hub import Hub
from .load import LOAD_GROUPS, LOAD_OPTIONS, Task, fetch_task, load_options, load_task
from .parameters import QUICK
from .texts import error_html, estimate_html, facts_html, note_html, task_html

__all__ = ["ModelTab"]

LOADING: dict[str, Any] = {**QUICK, "queue": True, "concurrency_limit": 1}
NO_DRAFT = ("none", "")
REPORT = 0.25
"""Seconds between two reports of a task."""


class ModelTab:
    """The model is everybody's; what a browser tab has chosen and not loaded yet is its own."""

    def __init__(self, host: ModelHost, hub: Hub) -> None:
        self.host, self.hub = host, hub
        self._load_task: Task | None = None
        with gr.Row(elem_classes="cards", equal_height=False):
            with gr.Column():
                with gr.Column(elem_classes="card", elem_id="load-card"):
                    gr.HTML("<h2>Load a model</h2>")
                    self._choice()
                    self._buttons()
                with gr.Column(elem_classes="card", elem_id="hub-card"):
                    self._hub()
            with gr.Column(elem_classes="card", elem_id="load-options"):
                gr.HTML("<h2>How it is loaded</h2>")
                self._options()

    # -- what is shown -------------------------------------------------------------------------------------------------

    def _choice(self) -> None:
        self.file = gr.Dropdown(label="Model", info=f"The GGUF files in {self.host.model_dir.name}", elem_id="file")
        self.facts = gr.HTML("", elem_id="facts")
        self.estimate = gr.HTML("", elem_id="estimate")

    def _options(self) -> None:
        made: dict[str, Any] = {}
        draft = option("draft_model")
        self.draft = gr.Dropdown([NO_DRAFT], value="", label=draft.label, elem_id="load-draft", info=draft.help)
        self.draft_tokens = control(option("num_assistant_tokens"))
        self.draft_tokens.elem_id = "load-draft-tokens"
        for title, entries, folded in LOAD_GROUPS:
            if not title:
                made |= {entry.name: control(entry, self._known(entry)) for entry in entries}
                continue
            with gr.Accordion(title, open=not folded):
                made |= {entry.name: control(entry, self._known(entry)) for entry in entries}
        self.controls = [made[entry.name] for entry in LOAD_OPTIONS]

    def _buttons(self) -> None:
        with gr.Row(elem_classes="buttons"):
            self.load = gr.Button("Load", variant="primary", elem_id="load")
            self.cancel = gr.Button("Stop", elem_id="load-stop", interactive=False)
            self.unload = gr.Button("Unload", elem_id="unload")
            self.rescan = gr.Button("Rescan", elem_id="rescan")
        self.load_status = gr.HTML("", elem_id="load-status")

    def _hub(self) -> None:
        gr.HTML("<h2>Download from the Hugging Face hub</h2>")
        self.repo = gr.Textbox(label="Repository", placeholder="OWNER/NAME-GGUF", elem_id="hub-repo", max_lines=1,
                               info="Its GGUF files go into the model folder.")  # fmt: skip
        self.remote = gr.Dropdown([], label="File", elem_id="hub-file", visible=False)
        with gr.Row(elem_classes="buttons"):
            self.listing = gr.Button("List files", elem_id="hub-list")
            self.fetch = gr.Button("Download", variant="primary", elem_id="hub-fetch", interactive=False)
            self.fetch_stop = gr.Button("Stop", elem_id="hub-stop", interactive=False)
        self.hub_status = gr.HTML("", elem_id="hub-status")
        self.fetching = gr.State(None)

    def _known(self, entry: Any) -> Any:
        return self.host.options.get(entry.name, self.host.defaults.get(entry.name))

    # -- wiring --------------------------------------------------------------------------------------------------------

    def wire(self, changed: Any, changed_outputs: Sequence[Any]) -> None:
        """`changed()` says what the rest of the page shows of another model, for `changed_outputs`."""
        self._changed = changed
        judged = [self.file, self.draft, *self.controls]
        for one in judged:
            one.change(self._judge, judged, [self.facts, self.estimate], trigger_mode="always_last", **QUICK)
        self.rescan.click(self._names, [self.file, self.draft], [self.file, self.draft], **QUICK)
        outputs = [self.load_status, self.load, self.cancel, self.unload, *changed_outputs]
        self.load.click(self._load, [self.file, self.draft, self.draft_tokens, *self.controls], outputs, **LOADING)
        self.cancel.click(self._cancel, None, None, **QUICK)
        self.unload.click(self._unload, None, outputs, **LOADING)
        listed = [self.remote, self.hub_status, self.fetch]
        self.listing.click(self._list, [self.repo], listed, **{**LOADING, "concurrency_limit": 4})
        self.repo.submit(self._list, [self.repo], listed, **{**LOADING, "concurrency_limit": 4})
        fetched = [self.hub_status, self.fetch, self.fetch_stop, self.fetching, self.file, self.draft]
        self.fetch.click(self._fetch, [self.repo, self.remote, self.file, self.draft], fetched, **LOADING)
        self.fetch_stop.click(lambda task: task and task.stop.set(), [self.fetching], None, **QUICK)

    @property
    def opening(self) -> list[Any]:
        return [self.load_status, self.file, self.draft, *self.controls]

    def opened(self) -> dict[Any, Any]:
        """What a page that is opened later has to show: the model may have changed since the server started."""
        names = list(self.host.sources())
        value = self.host.name if self.host.name in names else next(iter(names), None)
        shown = {self.load_status: error_html(self.host.error) if self.host.error else ""}
        shown[self.file] = gr.Dropdown(names, value=value)
        shown[self.draft] = gr.Dropdown([NO_DRAFT, *((name, name) for name in names)], value="")
        for one, entry in zip(self.controls, LOAD_OPTIONS, strict=True):
            known = self._known(entry)
            shown[one] = shown_value(entry, entry.default if known is None else known)
        return shown

    # -- what happens --------------------------------------------------------------------------------------------------

    def _values(self, arrived: Sequence[Any]) -> dict[str, Any]:
        return {entry.name: value_of(entry, value) for entry, value in zip(LOAD_OPTIONS, arrived, strict=True)}

    def _judge(self, name: str | None, draft: str | None, *arrived: Any) -> tuple[str, str]:
        """What the file is, and what it will take."""
        sources = self.host.sources()
        try:
            if name not in sources:
                return "", note_html("Choose a model." if sources else "The model folder is empty: download one below.")
            options = {**self.host.defaults, **load_options(self._values(arrived))}
            facts = facts_of(sources[name])
            beside = estimate(facts_of(sources[draft]), options) if draft in sources else None
            return facts_html(facts), estimate_html(estimate(facts, options), beside, free_memory())
        except LlamaCppError as error:
            return "", error_html(error)

    def _names(self, name: str | None, draft: str | None) -> tuple[Any, Any]:
        names = list(self.host.sources())
        drafts = [NO_DRAFT, *((one, one) for one in names)]
        kept = name if name in names else next(iter(names), None)
        return gr.Dropdown(names, value=kept), gr.Dropdown(drafts, value=draft if draft in names else "")

    def _load(self, name: str | None, draft: str | None, tokens: float | None, *arrived: Any) -> Iterator[Any]:
        try:
            values = self._values(arrived)
        except LlamaCppError as error:
            yield {self.load_status: error_html(error)}
            return
        task = self._load_task = load_task(self.host, name or "", values, draft or "", int(tokens or 0))
        yield from self._watched(task, "Loading")
        yield self._loaded(error_html(task.error) if task.error else note_html(f"Loaded in {task.seconds:.1f} s.", "good"))

    def _unload(self) -> Iterator[Any]:
        task = Task(lambda task: self.host.unload() or "")  # type: ignore[func-returns-value]
        yield from self._watched(task, "Unloading")
        yield self._loaded(error_html(task.error) if task.error else note_html("No model is loaded now; its memory is free."))

    def _watched(self, task: Task, verb: str) -> Iterator[Any]:
        busy = {self.load: gr.Button(interactive=False), self.unload: gr.Button(interactive=False)}
        yield {**busy, self.cancel: gr.Button(interactive=True), self.load_status: task_html(task, verb)}
        while task.running(REPORT):
            yield {self.load_status: task_html(task, verb), **self._changed()}

    def _loaded(self, status: str) -> dict[Any, Any]:
        return {
            self.load_status: status,
            self.load: gr.Button(interactive=True),
            self.unload: gr.Button(interactive=True),
            self.cancel: gr.Button(interactive=False),
            **self._changed(),
        }

    def _cancel(self) -> None:
        if (task := self._load_task) is not None:
            task.stop.set()

    def _list(self, repo: str) -> tuple[Any, str, Any]:
        try:
            found = self.hub.files(repo or "")
        except LlamaCppError as error:
            return gr.Dropdown([], value=None, visible=False), error_html(error), gr.Button(interactive=False)
        choices = [(f"{file.name} ({file.size / 2**20:,.0f} MiB)", file.name) for file in found]
        return gr.Dropdown(choices, value=found[0].name, visible=True), "", gr.Button(interactive=True)

    def _fetch(self, repo: str, file: str, name: str | None, draft: str | None) -> Iterator[Any]:
        task = fetch_task(self.hub, self.host, repo or "", file or "")
        busy = {self.fetch: gr.Button(interactive=False), self.fetch_stop: gr.Button(interactive=True), self.fetching: task}
        yield {**busy, self.hub_status: task_html(task, "Downloading")}
        while task.running(REPORT):
            yield {self.hub_status: task_html(task, "Downloading")}
        done = {self.fetch: gr.Button(interactive=True), self.fetch_stop: gr.Button(interactive=False), self.fetching: None}
        if task.error:
            yield {**done, self.hub_status: error_html(task.error)}
            return
        choice, drafts = self._names(task.result, draft)
        note = note_html(f"{task.result} is in the model folder, and chosen for loading.", "good")
        yield {**done, self.hub_status: note, self.file: choice, self.draft: drafts}
