"""How an option becomes a Gradio control, and what a control says an option."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gradio as gr

from ...errors import OptionError
from ...options import Option

__all__ = ["LINES", "control", "shown_value", "value_of"]

LINES = {"system_prompt": 2, "negative_prompt": 2, "stop": 2}
"""Texts of several lines."""

AUTO = ("auto", "on", "off")
WIDEST_SLIDER = 1000


def control(entry: Option, value: Any = None, choices: Sequence[tuple[str, str]] | None = None) -> Any:
    """A slider where the range is small, a number where it is open, and so on. `choices`: `(shown, value)`, of a text that is
    one of several.

    Gradio's number field has no empty state, so 0 stands for an option that is not set.
    """
    label = f"{entry.label} ({entry.unit})" if entry.unit and entry.unit not in entry.label.lower() else entry.label
    unset = " 0: the default." if entry.default is None and entry.kind is int else ""
    common: dict[str, Any] = {"label": label, "info": entry.help + unset, "elem_id": f"option-{entry.name}"}
    value = shown_value(entry, entry.default if value is None else value)
    if choices is not None:
        return gr.Dropdown(list(choices), value=value, **common)
    if entry.choices:
        return (gr.Radio if len(entry.choices) <= 4 else gr.Dropdown)(list(entry.choices), value=value, **common)
    if entry.kind is bool and entry.default is None:
        return gr.Radio(list(AUTO), value=value, **common)
    if entry.kind is bool:
        return gr.Checkbox(value, **common)
    if entry.kind is str:
        return gr.Textbox(value, lines=LINES.get(entry.name, 1), max_lines=8, **common)
    if entry.default is None:
        return gr.Number(value, precision=0, **common)
    if entry.minimum is not None and entry.maximum is not None and entry.maximum - entry.minimum <= WIDEST_SLIDER:
        return gr.Slider(entry.minimum, entry.maximum, value, step=entry.step or 0.01, **common)
    # Without its ends, outside of which Gradio would not call us: the option table says what is wrong.
    return gr.Number(value, precision=0 if entry.kind is int else None, **common)


def shown_value(entry: Option, value: Any) -> Any:
    """An option's value as its control shows it."""
    if entry.kind is bool and entry.default is None:
        return AUTO[0] if value is None else AUTO[1] if value else AUTO[2]
    if entry.kind is int and entry.default is None:
        return value or 0
    return value


def value_of(entry: Option, value: Any) -> Any:
    """A control's value in the option's type. Raises `OptionError` when it is outside its range."""
    if entry.kind is bool and entry.default is None:
        return {"on": True, "off": False}.get(value)
    if value is None or (entry.default is None and not value):
        return entry.default
    try:
        value = entry.kind(value)
    except (TypeError, ValueError):
        raise OptionError(f"{entry.label}: {value!r} is no {entry.kind.__name__}", entry.name) from None
    if wrong := entry.check(value):
        raise OptionError(wrong, entry.name)
    return value
