"""Lines for people: what a text cost, what went wrong, what is loaded, what a load will take."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ...reuse import Reuse
from ..api.errors import without_folders
from ..host import ModelHost
from .estimate import Estimate, Facts
from .load import Task
from .writing import Progress

__all__ = [
    "badge_html", "error_html", "estimate_html", "facts_html", "note_html", "notes_html", "prompt_of", "status_html",
    "task_html", "tiles_of",
]  # fmt: skip

FINISH = {"stopped": "stopped", "length": "cut at the longest answer", "context": "the context is full"}
MIB = 1 << 20


def status_html(progress: Progress) -> str:
    """The line under a text: prompt progress, then speed, then the statistics of the finished one."""
    if progress.finish:
        facts = _facts(progress) + ([FINISH[progress.finish]] if progress.finish in FINISH else [])
        return f'<div class="line">{"".join(f"<span>{escape(fact)}</span>" for fact in facts)}</div>'
    if progress.new_tokens:
        rate = progress.new_tokens / progress.seconds if progress.seconds > 0 else 0.0
        leading = "<span>the leading beam</span>" if progress.leading else ""
        return f'<div class="line"><span>{_count(progress.new_tokens)}</span><span>{rate:.1f} tokens/s</span>{leading}</div>'
    if not progress.total:
        return '<div class="line"><span>Waiting for the model</span></div>'
    share = progress.evaluated / progress.total
    return (
        f'<div class="line"><span>Reading the prompt: {progress.evaluated:,} of {progress.total:,} tokens</span>'
        f'<progress max="1" value="{share:.3f}" aria-label="Reading the prompt"></progress></div>'
    )


def _facts(progress: Progress) -> list[str]:
    stats = progress.stats
    if stats is None:
        return [f"{progress.evaluated:,} of {progress.total:,} prompt tokens evaluated"]
    found = [
        _count(stats.new_tokens),
        f"{_rate(stats):.1f} tokens/s",
        f"prompt {stats.prompt_tokens:,}: {stats.reused_tokens:,} reused, "
        f"{stats.prompt_tokens - stats.reused_tokens:,} evaluated in {stats.prompt_seconds:.2f} s",
    ]
    if stats.drafted_tokens:
        found.append(f"{stats.accepted_tokens:,} of {stats.drafted_tokens:,} drafted accepted")
    return found


def _rate(stats: object) -> float:
    seconds: float = stats.generate_seconds  # type: ignore[attr-defined]
    new: int = stats.new_tokens  # type: ignore[attr-defined]
    return new / seconds if seconds > 0 else 0.0


def _count(tokens: int) -> str:
    return f"{tokens:,} token{'s' * (tokens != 1)}"


def tiles_of(progress: Progress) -> list[tuple[str, str, str]]:
    """The numbers of a text, for `pictures.tiles_html`."""
    stats = progress.stats
    if stats is None:
        rate = progress.new_tokens / progress.seconds if progress.seconds > 0 else 0.0
        return [(f"{rate:.1f}", "tokens/s", "so far"), (f"{progress.new_tokens:,}", "tokens written", "")]
    share = f"{100 * stats.accepted_tokens / stats.drafted_tokens:.0f} %" if stats.drafted_tokens else "–"
    drafts = f"{stats.accepted_tokens:,} of {stats.drafted_tokens:,}" if stats.drafted_tokens else "nothing was drafted"
    per = stats.new_tokens / stats.decode_calls if stats.decode_calls else 0.0
    return [
        (f"{_rate(stats):.1f}", "tokens/s", f"{stats.new_tokens:,} in {stats.generate_seconds:.1f} s"),
        (f"{stats.reused_tokens:,}", "prompt tokens reused", f"of {stats.prompt_tokens:,}"),
        (f"{stats.prompt_tokens - stats.reused_tokens:,}", "evaluated", f"in {stats.prompt_seconds:.2f} s"),
        (share, "of drafts accepted", drafts),
        (f"{stats.decode_calls:,}", "decodes", f"{per:.2f} tokens each, {stats.evaluated_tokens:,} evaluated in all"),
    ]


def prompt_of(progress: Progress) -> tuple[int, int, str]:
    """Reused, evaluated, and why, for `pictures.prompt_html`."""
    stats = progress.stats
    if stats is None:
        return 0, progress.evaluated, ""
    reuse: Reuse = stats.reuse
    return stats.reused_tokens, stats.prompt_tokens - stats.reused_tokens, reuse.reason


def error_html(error: object) -> str:
    """Without folders: where files lie is the business of who runs the server."""
    text = without_folders(str(error)) or type(error).__name__
    return f'<div class="note bad" role="alert">{escape(text)}</div>'


def note_html(text: str, kind: str = "") -> str:
    """`kind`: "busy", "good", or ""."""
    return f'<div class="note {kind}" role="status">{escape(text)}</div>'


def notes_html(notes: Sequence[str]) -> str:
    return "".join(note_html(note) for note in notes)


def task_html(task: Task, verb: str) -> str:
    """A task that runs: what it does, and how far it is."""
    what = f"{verb} {task.what}".strip()
    return (
        f'<div class="note busy" role="status">{escape(what)} ({task.seconds:.1f} s)'
        f'<progress max="1" value="{task.share:.3f}" aria-label="{escape(verb)}"></progress></div>'
    )


def badge_html(host: ModelHost) -> str:
    """Which model answers, for the header."""
    kind, text = "bad", "no model"
    if host.loading:
        kind, text = "busy", f"loading {host.loading}"
    elif host.name:
        kind, text = "good", host.name.removesuffix(".gguf")
    return f'<span class="badge {kind}" title="{escape(text)}"><span>{escape(text)}</span></span>'


def facts_html(facts: Facts) -> str:
    """What a file says about itself, in a line."""
    parts = [
        facts.name, f"{facts.architecture} {facts.kind}".strip(), f"{facts.parameters / 1e6:,.0f} M parameters",
        f"{facts.file_bytes / MIB:,.0f} MiB",
        f"trained for {facts.n_ctx_train:,} tokens",
        "chat template" if facts.has_template else "no chat template: use the Completion tab",
    ]  # fmt: skip
    return f'<div class="line">{"".join(f"<span>{escape(part)}</span>" for part in parts)}</div>'


def estimate_html(estimate: Estimate, draft: Estimate | None, free: int | None) -> str:
    """A bar of what is needed, and of what is free where that is known (bytes)."""
    total = estimate.total + (draft.total if draft else 0)
    parts = [("weights", estimate.weights), ("KV cells", estimate.cells), ("compute", estimate.compute)]
    if draft:
        parts.append(("draft model", draft.total))
    bar = "".join(f'<i class="m{n}" style="width:{100 * size / max(1, total):.1f}%"></i>' for n, (_, size) in enumerate(parts))
    legend = "".join(f'<span class="m{n}">{name} {_size(size)}</span>' for n, (name, size) in enumerate(parts))
    more = "" if estimate.exact else " and its recurrent state"
    verdict = ""
    if free is not None:
        fits = total <= free
        verdict = f'<p class="{"good" if fits else "bad"}">{_size(free)} are free{"" if fits else ": it will not fit"}</p>'
    return (
        f'<div class="estimate"><p><b>About {_size(total)}</b>{more} for {estimate.n_cells:,} cells</p>'
        f'<div class="bar">{bar}</div><div class="legend">{legend}</div>{verdict}</div>'
    )


def _size(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / MIB:,.0f} MiB"
