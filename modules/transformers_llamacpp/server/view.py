"""How options become controls, and progress, errors and messages become what the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import gradio as gr

from ..errors import OptionError
from ..options import Option
from .chat import Message, Progress
from .host import ModelHost

__all__ = ["badge_html", "bubbles", "control", "error_html", "note_html", "status_html", "value_of"]

FINISH = {"stopped": "stopped", "length": "cut at the longest answer", "context": "the context is full"}


def control(entry: Option, value: Any = None) -> Any:
    """The control for an option: a slider where the range is small, a number where it is open.

    Gradio's number field has no empty state, so 0 stands for an option that is not set.
    """
    value = entry.default if value is None else value
    label = f"{entry.label} ({entry.unit})" if entry.unit and entry.unit not in entry.label.lower() else entry.label
    common = {"label": label, "info": entry.help, "elem_id": f"option-{entry.name}"}
    if entry.default is None:
        return gr.Number(value or 0, precision=0, minimum=0, **common)
    if entry.minimum is not None and entry.maximum is not None and entry.maximum - entry.minimum <= 1000:
        return gr.Slider(entry.minimum, entry.maximum, value, step=entry.step or 0.01, **common)
    return gr.Number(value, precision=0 if entry.kind is int else None, minimum=entry.minimum, **common)


def value_of(entry: Option, value: Any) -> Any:
    """A value from the page in the option's type. Raises `OptionError` when it is outside its range."""
    if value is None or (entry.default is None and not value):
        return entry.default
    value = entry.kind(value)
    wrong = entry.check(value)
    if wrong:
        raise OptionError(wrong, entry.name)
    return value


def bubbles(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for the chatbot. As typed parts: Gradio takes the indentation and the tabs out of plain strings."""
    return [
        {"role": message["role"], "content": [{"type": "text", "text": message["content"]}]} for message in messages
    ]


def status_html(progress: Progress) -> str:
    """The line under the chat: prompt progress, then speed, then the statistics of the finished answer."""
    if progress.finish:
        facts = _facts(progress) + ([FINISH[progress.finish]] if progress.finish in FINISH else [])
        return f'<div class="line">{"".join(f"<span>{escape(fact)}</span>" for fact in facts)}</div>'
    if progress.new_tokens:
        rate = progress.new_tokens / progress.seconds if progress.seconds > 0 else 0.0
        return f'<div class="line"><span>{progress.new_tokens} tokens</span><span>{rate:.1f} tokens/s</span></div>'
    if not progress.total:
        return '<div class="line"><span>Waiting for the model</span></div>'
    share = progress.evaluated / progress.total
    return (
        f'<div class="line"><span>Reading the prompt: {progress.evaluated:,} of {progress.total:,} tokens</span>'
        f'<progress max="1" value="{share:.3f}"></progress></div>'
    )


def _facts(progress: Progress) -> list[str]:
    stats = progress.stats
    if stats is None:
        return [f"{progress.evaluated:,} of {progress.total:,} prompt tokens evaluated"]
    rate = stats.new_tokens / stats.generate_seconds if stats.generate_seconds > 0 else 0.0
    return [
        f"{stats.new_tokens:,} tokens",
        f"{rate:.1f} tokens/s",
        f"prompt {stats.prompt_tokens:,}: {stats.reused_tokens:,} reused, "
        f"{stats.prompt_tokens - stats.reused_tokens:,} evaluated in {stats.prompt_seconds:.2f} s",
    ]


def error_html(error: object) -> str:
    return f'<div class="note bad" role="alert">{escape(str(error) or type(error).__name__)}</div>'


def note_html(text: str, kind: str) -> str:
    """`kind`: "busy" or "good"."""
    return f'<div class="note {kind}">{escape(text)}</div>'


def badge_html(host: ModelHost) -> str:
    """Which model answers, for the header."""
    kind, text = "bad", "no model"
    if host.loading:
        kind, text = "busy", f"loading {host.loading}"
    elif host.name:
        kind, text = "good", host.name.removesuffix(".gguf")
    return f'<span class="badge {kind}" title="{escape(text)}"><span>{escape(text)}</span></span>'
