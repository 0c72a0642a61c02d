"""What the terminal shows: progress, and a table at most 100 columns wide."""

from __future__ import annotations

import shutil
import statistics
import sys
import textwrap
from collections.abc import Iterator

from .measure import YARDSTICKS, Measured
from .plan import CONTENDERS, Case
from .report import FIGURES, median, ratios, reference

__all__ = ["Progress", "table"]

WIDTH = 100

NAME = 30
"""Width of the first column."""

EXPLANATION = (
    "tokens/s: of all rows, without prompt and first token. first token: seconds from the call until\n"
    "every row has one. ratio: to the first line of a block, median of the ratios within each round."
)


class Progress:
    """`with Progress() as say: say("a case", "a step")`: to stderr. On a terminal each step is written over the one before;
    elsewhere every case is a line, without its steps."""

    def __init__(self) -> None:
        self.over = sys.stderr.isatty()
        self.last = ""

    def __enter__(self) -> Progress:
        return self

    def __call__(self, what: str, step: str = "", /) -> None:
        if self.over:
            width = shutil.get_terminal_size().columns - 1
            text = f"{what}: {step}" if step else what
            print(f"\r{text[:width]:{width}}", end="", file=sys.stderr, flush=True)
        elif what != self.last:
            print(what, file=sys.stderr, flush=True)
        self.last = what

    def __exit__(self, *exc: object) -> None:
        if self.over:
            self("")
            print("\r", end="", file=sys.stderr, flush=True)


def table(measured: Measured) -> str:
    settings = measured.settings
    threads = "1 thread" if measured.threads == 1 else f"{measured.threads} threads"
    lines = [
        f"{measured.file.name}: {threads}, {settings.tokens} new tokens a row, medians of {settings.rounds}",
        "",
        f"{'':{NAME}}{'tokens/s':>12}{'ratio':>8}{'first token':>15}{'ratio':>8}{'whole call':>14}{'ratio':>8}",
    ]
    for case in measured.runs:
        lines += ["", case.label, *_block(measured, case)]
    lines += ["", *EXPLANATION.split("\n"), *_fewer(measured), "", *_processes(measured)]
    return "\n".join(lines)


def _block(measured: Measured, case: Case) -> Iterator[str]:
    first = reference(measured, case)
    for name in measured.runs[case]:
        line = f"  {CONTENDERS[name].label:{NAME - 2}}"
        few = measured.runs[case][name][0].new_tokens < case.rows * measured.settings.tokens
        for figure, width, unit in zip(FIGURES, (12, 15, 14), ("", " s", " s"), strict=True):
            if few and figure == "whole_seconds":
                continue
            line += f"{_number(median(measured, case, name, figure)) + unit:>{width}}"
            found = ratios(measured, case, name, first, figure) if first not in (None, name) else []
            line += f"{statistics.median(found):8.3f}" if found else " " * 8
        yield line.rstrip()


def _fewer(measured: Measured) -> Iterator[str]:
    """Who writes fewer tokens than the others, and so has no whole call that could be compared."""
    tokens = measured.settings.tokens
    for name in dict.fromkeys(name for runs in measured.runs.values() for name in runs):
        if (few := CONTENDERS[name].tokens(tokens)) < tokens:
            yield f"{CONTENDERS[name].label} is slow and writes {few} tokens only."


def _number(value: float) -> str:
    """Three or four digits that count."""
    return f"{value:.{sum(value < limit for limit in (1000, 100, 10, 0.1))}f}"


def _processes(measured: Measured) -> Iterator[str]:
    yield f"{'':{NAME}}{'ready after':>14}{'peak memory':>21}"
    left_out, busy = [], []
    for name, one in measured.participants.items():
        label = name.replace("bare", CONTENDERS["bare"].label) if name in YARDSTICKS else CONTENDERS[name].label
        if one.ready_seconds is not None:
            memory = f"{one.peak_bytes / 1e6:,.0f} MB" if one.peak_bytes is not None else ""
            yield f"  {label:{NAME - 2}}{one.ready_seconds:>12.1f} s{memory:>21}".rstrip()
        if one.problem is not None:
            left_out += textwrap.wrap(f"left out: {one.problem}", WIDTH, break_on_hyphens=False)
        if one.busy:
            busy.append(label)
    if left_out:
        yield ""
        yield from left_out
    if busy:
        yield ""
        yield f"Still computing after their turns, so that they slowed the others: {', '.join(busy)}."
        yield "With OpenMP that is OMP_WAIT_POLICY=active or a large GOMP_SPINCOUNT in the environment."
