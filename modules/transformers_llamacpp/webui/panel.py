"""What the panel shows: its sections, made from the option table, and lines about the model that is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

from ..errors import LlamaCppError
from ..options import Option, option, options_in
from .arguments import resting
from .settings import LOAD_NAMES, Settings

__all__ = ["SECTIONS", "Panel", "Section", "control", "from_control", "stats_line", "status_html"]


@dataclass(frozen=True, slots=True)
class Section:
    """A group of controls; `folded`: shown closed."""

    title: str
    note: str
    options: tuple[Option, ...]
    folded: bool = False


SECTIONS = (
    Section(
        "Contrastive search", "Sets do_sample, top_k and penalty_alpha so that it really runs.", options_in("contrastive"),
    ),
    Section(
        "CFG", "A guidance_scale or a negative prompt in the webui's own settings goes before these.", options_in("guidance"),
    ),
    Section("Speculative decoding", "", options_in("speculation")),
    Section("Beams and more", "", (*options_in("beams"), *options_in("other")), True),
    Section(
        "Context", "Holds from the next load on. streaming-llm in the Model tab sets 4 sinks and chunks of 32 where these "
        "are 0.", tuple(option(name) for name in LOAD_NAMES if not name.startswith("lora_")), True,
    ),
    Section("LoRA", "Holds from the next load on.", options_in("adapter"), True),
)  # fmt: skip


class Panel:
    """What the controls do. `model()` is the model that is loaded or `None`, `failure()` why the last load failed or "",
    `load()` loads the model again. Answers are sentences for people."""

    def __init__(
        self, settings: Settings, model: Callable[[], Any], failure: Callable[[], str], load: Callable[[], None]
    ) -> None:
        self.settings = settings
        self._model, self._failure, self._load = model, failure, load

    def value(self, entry: Option) -> Any:
        """What its control shows."""
        return control(entry, self.settings[entry.name])["value"]

    def values(self) -> list[Any]:
        """Those of all controls, in the order of `SECTIONS`."""
        return [self.value(entry) for section in SECTIONS for entry in section.options]

    def change(self, entry: Option, value: Any) -> str:
        """A control was set to `value`: from now on for the page and the API."""
        try:
            value, model = from_control(entry, value), self._model()
            if value == self.settings[entry.name]:
                return ""
            if entry.name == "draft_model" and value and model is not None:
                model.draft(value)  # what cannot draft is told now, and not in the middle of an answer
            self.settings.set(**{entry.name: value})
        except LlamaCppError as error:
            return f"**{entry.label} stays {self.settings[entry.name]!r}.** {error}"
        if entry.name in LOAD_NAMES:
            return f"{entry.label} holds from the next load on."
        return resting(self.settings.call())

    def save(self) -> str:
        try:
            return f"Saved to {self.settings.save()}."
        except LlamaCppError as error:
            return f"**Not saved.** {error}"

    def revert(self) -> list[Any]:
        self.settings.revert()
        return self.values()

    def reset(self) -> list[Any]:
        self.settings.reset()
        return self.values()

    def reload(self) -> Iterator[str]:
        """Load the model again, so that options of the load hold."""
        if self._model() is None and not self._failure():
            yield "No model is loaded with this loader: choose it in the Model tab."
            return
        yield "Loading …"
        try:
            self._load()
            yield "Loaded."
        except Exception as error:  # the webui's own, too: whatever it is, the page has to say it
            yield f"**Not loaded.** {self._failure() or error}"

    def status(self) -> str:
        return status_html(self._model(), self._failure())


def control(entry: Option, value: Any) -> dict[str, Any]:
    """How an option is set: `kind` is "checkbox", "radio", "slider", "number", "model" or "text", the rest are the arguments
    of such a control. A number has no empty state, so that 0 stands for an option without a value."""
    label = f"{entry.label} ({entry.unit})" if entry.unit and entry.unit not in entry.label.lower() else entry.label
    common = {"label": label, "info": entry.help}
    if entry.kind is bool:
        return {"kind": "checkbox", "value": bool(value), **common}
    if entry.choices:
        return {"kind": "radio", "choices": list(entry.choices), "value": value, **common}
    if entry.name == "draft_model":
        return {"kind": "model", "value": value, **common}
    if entry.kind is str:
        return {"kind": "text", "value": value or "", "max_lines": 4 if entry.name == "negative_prompt" else 1, **common}
    if entry.minimum is not None and entry.maximum is not None and entry.maximum - entry.minimum <= 4096:
        ends = {"minimum": entry.minimum, "maximum": entry.maximum, "step": entry.step}
        return {"kind": "slider", **ends, "value": value, **common}
    return {"kind": "number", "precision": 0 if entry.kind is int else None, "value": value or 0, **common}


def from_control(entry: Option, value: Any) -> Any:
    """The option's value from that of its control."""
    if value in (None, "", "None", 0) and entry.default is None:
        return None
    if value is None or (entry.name == "draft_model" and value == "None"):
        return entry.default
    return value


def status_html(model: Any, failure: str = "") -> str:
    """What is loaded, what the last answer cost, what is in memory."""
    if failure:
        return _lines([("Not loaded", failure)])
    if model is None:
        return _lines([("Model", "none is loaded with this loader: choose it in the Model tab")])
    try:
        held = model.engine.held()
    except LlamaCppError as error:
        return _lines([("Model", str(error))])
    stats = model.last_stats
    lines = [
        ("Model", f"{model.native.path.name}, {model.config.max_position_embeddings:,} tokens"),
        (
            "Memory",
            f"{held.texts:,} known text{'s' * (held.texts != 1)}, {held.sequences} in the KV buffer ({held.cells:,} of "
            f"{held.n_cells:,} cells), {held.host_bytes / 2**20:,.0f} MiB of states in host memory",
        ),
    ]
    if stats.decode_calls:
        rate = stats.new_tokens / stats.generate_seconds if stats.generate_seconds > 0 else 0.0
        lines += [
            (
                "Last answer",
                f"{stats.new_tokens:,} tokens, {rate:.1f} tokens/s, {stats.decode_calls:,} decodes, "
                f"{stats.evaluated_tokens:,} tokens evaluated",
            ),
            ("Last prompt", _prompt(stats)),
            ("Drafts", _drafts(stats)),
        ]
    draft = model.assistant_model
    lines.append(("Draft model", draft.native.path.name if draft is not None else "none chosen at loading"))
    return _lines(lines)


def stats_line(stats: Any, ways: str = "") -> str:
    """What an answer cost, for the log. Rows that are written side by side are counted together."""
    if stats.prompt_tokens:
        source = f" ({stats.reuse})" if stats.reused_tokens and stats.reuse != "none" else ""
        parts = [f"prompt {stats.prompt_tokens} tokens, {stats.reused_tokens} reused{source}", f"{stats.new_tokens} new tokens"]
    else:
        parts = ["ended before its prompt was read", "0 new tokens"]
    parts.append(f"{stats.decode_calls} decodes of {stats.evaluated_tokens} tokens")
    if stats.drafted_tokens:
        parts.append(f"{stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted")
    return "; ".join([*parts, *([ways] if ways else [])])


def _prompt(stats: Any) -> str:
    if not stats.prompt_tokens:
        return "not read to its end"
    return (
        f"{stats.prompt_tokens:,} tokens, {stats.reused_tokens:,} reused, the rest evaluated in {stats.prompt_seconds:.2f} s "
        f"({stats.reuse.reason})"
    )


def _drafts(stats: Any) -> str:
    if not stats.drafted_tokens:
        return "none in the last answer"
    share = 100 * stats.accepted_tokens / stats.drafted_tokens
    return f"{stats.accepted_tokens:,} of {stats.drafted_tokens:,} drafted tokens accepted ({share:.0f} %)"


def _lines(lines: list[tuple[str, str]]) -> str:
    rows = "".join(
        f'<tr><th style="text-align:left;padding-right:1em;vertical-align:top;white-space:nowrap">{escape(name)}</th>'
        f"<td>{escape(text)}</td></tr>"
        for name, text in lines
    )
    return f'<table class="llamacpp-hf-status">{rows}</table>'
