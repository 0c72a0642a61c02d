"""The side of the page with the ways of decoding: presets, a method, and the controls that this method reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import gradio as gr

from ...errors import LlamaCppError
from ...options import option, options_in
from ..host import ModelHost
from .controls import control, shown_value, value_of
from .methods import CALL_OPTIONS, GROUPS, checked, default_of, notes
from .presets import Presets
from .texts import error_html, note_html, notes_html

__all__ = ["Parameters"]

QUICK: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
FIRST_PRESET = "Balanced"
AS_LOADED = ("as loaded", "")
NO_TEMPLATE = ("none", "")


class Parameters:
    """`components` are in the order of `CALL_OPTIONS`: give them to an event as inputs, and `values()` what arrives."""

    def __init__(self, host: ModelHost, presets: Presets) -> None:
        self.host, self.presets = host, presets
        self._groups: list[Any] = []
        self._by_name: dict[str, Any] = {}
        self._heading()
        self._chat()
        self._method()
        self.components = [self._by_name[entry.name] for entry in CALL_OPTIONS]

    # -- what is shown -------------------------------------------------------------------------------------------------

    def _heading(self) -> None:
        with gr.Column(elem_classes="card", elem_id="presets"):
            self.preset = gr.Dropdown(
                self.presets.names(), value=FIRST_PRESET, label="Preset", allow_custom_value=True, elem_id="preset",
                info="Choose one; or type a name, and save what is set below.",
            )  # fmt: skip
            with gr.Row(elem_classes="buttons"):
                self.save = gr.Button("Save", size="sm", elem_id="preset-save")
                self.delete = gr.Button("Delete", size="sm", elem_id="preset-delete")
            self.preset_status = gr.HTML("", elem_id="preset-status")

    def _chat(self) -> None:
        system, template = options_in("chat")
        title = f"{system.label} and {template.label.lower()}"
        with gr.Accordion(title, open=False, elem_classes="card", elem_id="chat-options"):
            self.system = control(system)
            self.template = control(template, choices=[NO_TEMPLATE])

    def _method(self) -> None:
        with gr.Column(elem_classes="card", elem_id="parameters"):
            self._by_name["method"] = control(option("method"))
            self.notes = gr.HTML("", elem_id="notes")
            for group in GROUPS:
                shown = group.shown("sampling")
                if group.title:
                    with gr.Accordion(group.title, open=not group.folded, visible=shown, elem_id=f"group-{group.name}") as made:
                        self._controls(group.options)
                else:
                    with gr.Column(visible=shown, elem_id=f"group-{group.name}") as made:
                        self._controls(group.options)
                self._groups.append(made)
            self.context = gr.HTML("", elem_id="context-line")

    def _controls(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            choices = [AS_LOADED] if entry.name == "draft_model" else None
            self._by_name[entry.name] = control(entry, default_of(entry), choices)

    # -- what it does --------------------------------------------------------------------------------------------------

    def wire(self) -> None:
        method = self._by_name["method"]
        method.change(self._show_groups, [method], self._groups, **QUICK)
        noted = [self._by_name[name] for name in (
            "method", "guidance_scale", "negative_prompt", "speculation", "draft_model", "dola_layers", "num_beams",
            "num_beam_groups",
        )]  # fmt: skip
        for one in noted:
            one.change(self._notes, self.components, self.notes, trigger_mode="always_last", **QUICK)
        after = [*self.components, *self._groups, self.preset_status]
        self.preset.select(self._load, [self.preset], after, **QUICK)
        changed = [self.preset, self.preset_status]
        self.save.click(self._save, [self.preset, *self.components], changed, **QUICK)
        self.delete.click(self._delete, [self.preset], changed, **QUICK)

    def values(self, arrived: Sequence[Any]) -> dict[str, Any]:
        """Raises `OptionError`."""
        return checked({entry.name: value_of(entry, value) for entry, value in zip(CALL_OPTIONS, arrived, strict=True)})

    def model_changed(self) -> dict[Any, Any]:
        """What depends on the model that is loaded."""
        model, names = self.host.model, list(self.host.sources())
        found = list(_templates(model))
        drafts = [AS_LOADED, *((name, name) for name in names)]
        return {
            self.template: gr.Dropdown(found or [NO_TEMPLATE], value=found[0][1] if found else ""),
            self._by_name["draft_model"]: gr.Dropdown(drafts),
            self.context: self._context(model),
        }

    @property
    def of_model(self) -> list[Any]:
        return [self.template, self._by_name["draft_model"], self.context]

    def _show_groups(self, method: str) -> list[Any]:
        return [gr.update(visible=group.shown(method)) for group in GROUPS]

    def _notes(self, *arrived: Any) -> str:
        try:
            model = self.host.model
            has_draft = getattr(model, "assistant_model", None) is not None
            n_sink = None if model is None else model.quantization_config.n_sink
            return notes_html(notes(self.values(arrived), has_draft, n_sink))
        except LlamaCppError as error:
            return error_html(error)

    def _context(self, model: Any) -> str:
        if model is None:
            return ""
        n_sink = model.quantization_config.n_sink
        full = "the text ends" if n_sink is None else f"the text goes on: the first {n_sink} tokens stay, the oldest others go"
        length = model.config.max_position_embeddings
        return f'<p class="nothing">Context: {length:,} tokens. When it is full, {full} (Model → Streaming context).</p>'

    def _load(self, name: str) -> list[Any]:
        try:
            values, status = self.presets.load(name), ""
        except LlamaCppError as error:
            return [gr.skip() for _ in (*self.components, *self._groups)] + [error_html(error)]
        shown = [shown_value(entry, values[entry.name]) for entry in CALL_OPTIONS]
        return [*shown, *self._show_groups(values["method"]), status]

    def _save(self, name: str | None, *arrived: Any) -> tuple[Any, str]:
        try:
            name = self.presets.save(name or "", self.values(arrived))
        except LlamaCppError as error:
            return gr.skip(), error_html(error)
        return gr.Dropdown(self.presets.names(), value=name), note_html(f"Saved as {name}.", "good")

    def _delete(self, name: str | None) -> tuple[Any, str]:
        try:
            self.presets.delete(name or "")
        except LlamaCppError as error:
            return gr.skip(), error_html(error)
        return gr.Dropdown(self.presets.names(), value=FIRST_PRESET), note_html(f"{name} is deleted.", "good")


def _templates(model: Any) -> Iterator[tuple[str, str]]:
    """`(shown, value)`; the value is the name of one of several, or "" for the one there is."""
    template = None if model is None else model.tokenizer.chat_template
    if isinstance(template, dict):
        yield from ((name, name) for name in sorted(template, key=lambda name: (name != "default", name)))
    elif template:
        yield "of the GGUF", ""
