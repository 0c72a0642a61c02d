"""From what `serve.py` measured to figures, goals and tables."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from clients import Streams

__all__ = ["Cell", "Goal", "as_json", "goals", "show", "show_goals"]

OURS = ("threads", "streamed", "http")
SHARE = 0.9
"""Of the bare decode's tokens per second, from so many streams on."""
FROM = 4


class Cell(NamedTuple):
    phase: str
    streams: int
    contender: str


@dataclass(frozen=True)
class Goal:
    """`values`: one for each round; their median counts, and the worst where `worst`."""

    text: str
    wanted: str
    values: list[float]
    met: bool


def ratios(run: Any, cell: Cell) -> list[float]:
    """Tokens per second in those of the bare decode, for each round."""
    bare = run.cells.get(cell._replace(contender="bare"), [])
    return [one.speed / other.speed for one, other in zip(run.cells[cell], bare, strict=False)]


def steady(streams: Streams) -> float | None:
    """Tokens per second once every stream has had its first one, that one left out."""
    first = streams.first
    if not first or streams.seconds <= max(first):
        return None
    if all(len(times) == 2 for times in streams.times):  # the bare decode: first and last
        return (streams.tokens - len(first)) / (streams.seconds - max(first))
    share = [sum(at > max(first) for at in times) / len(times) for times in streams.times]
    each = streams.tokens / len(first)
    return sum(one * each for one in share) / (streams.seconds - max(first))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many of all do not exceed."""
    found = sorted(values)
    return found[min(len(found) - 1, int(share * len(found)))]


def goals(run: Any) -> Iterator[Goal]:
    for cell in run.cells:
        if cell.contender in OURS and cell.streams >= FROM and (found := ratios(run, cell)):
            text = f"{cell.phase}, {cell.streams} streams, {cell.contender}: tokens/s / bare decode"
            yield Goal(text, f"≥ {SHARE}", found, statistics.median(found) >= SHARE)
    for (name, phase), found in run.stalls.items():
        delays = [felt.delay / batch for felt, batch in found]
        text = f"{phase}, {name}: a {run.args.long:,}-token prompt delays a token by, in batches"
        yield Goal(text, "≤ 1", delays, statistics.median(delays) <= 1)
    for name in OURS:
        cut = [one.cut for cell, found in run.cells.items() if cell.contender == name for one in found]
        cut += [felt.cut for (other, _), found in run.stalls.items() if other == name for felt, _ in found]
        if cut:
            yield Goal(f"{name}: streams cut by others", "0", [float(sum(cut))], not any(cut))


def show(run: Any) -> None:
    args = run.args
    print(f"\n{run.file.name}: {args.threads} threads, {args.tokens} tokens a stream, medians of {args.rounds} rounds\n")
    heads = f"{'tokens/s':>10}{'/ bare':>8}{'from':>7}{'to':>7}{'after first / bare':>20}{'first token, s: p50':>21}{'p95':>7}"
    print(f"{'':30}{heads}")
    last = None
    for cell, found in sorted(run.cells.items(), key=lambda item: (item[0].phase, item[0].streams)):
        if last != cell[:2]:
            print(f"{cell.phase}, {cell.streams} stream{'s' * (cell.streams > 1)}")
        last = cell[:2]
        line = f"  {cell.contender:28}{statistics.median(one.speed for one in found):10.1f}"
        if of := ratios(run, cell):
            line += f"{statistics.median(of):8.3f}{min(of):7.3f}{max(of):7.3f}"
        bare = run.cells.get(cell._replace(contender="bare"), [])
        pairs = [(steady(one), steady(other)) for one, other in zip(found, bare, strict=False)]
        after = [one / other for one, other in pairs if one and other]
        line += f"{statistics.median(after):20.3f}" if after else " " * 20
        if first := [at for one in found for at in one.first]:
            line += f"{percentile(first, 0.5):21.3f}{percentile(first, 0.95):7.3f}"
        print(line.rstrip())
    if run.stalls:
        print(f"\n{args.stall_streams} streams run, and a prompt of {args.long:,} tokens comes; milliseconds, medians")
        print(f"{'':20}{'usual wait':>12}{'longest wait':>14}{'one batch':>11}{'its first token':>17}{'cut':>5}")
    for (name, phase), stalls in run.stalls.items():
        columns = zip(*((felt.usual, felt.gap, batch, felt.first) for felt, batch in stalls), strict=True)
        usual, gap, batch, first = (1000 * statistics.median(values) for values in columns)
        cut = sum(felt.cut for felt, _ in stalls)
        print(f"  {phase + ', ' + name:18}{usual:12.1f}{gap:14.1f}{batch:11.1f}{first:17.1f}{cut:5d}")
    for name, problem in run.left_out.items():
        print(f"\n{name} is left out: {problem}")


def show_goals(name: str, found: Sequence[Goal]) -> None:
    print(f"\n{name + ': goals':72}{'goal':>8}{'median':>9}{'from':>8}{'to':>8}")
    for goal in found:
        values = goal.values
        figures = f"{statistics.median(values):9.3f}{min(values):8.3f}{max(values):8.3f}"
        print(f"{goal.text:72}{goal.wanted:>8}{figures}  {'met' if goal.met else 'missed'}")


def as_json(run: Any, found: Sequence[Goal]) -> dict[str, Any]:
    """Every round."""
    args = run.args
    return {
        "file": run.file.name,
        "machine": {"system": platform.platform(), "logical_cores": os.cpu_count()},
        "settings": {name: str(value) if name == "json" else value for name, value in vars(args).items()},
        "left_out": run.left_out,
        "cases": [
            {
                **cell._asdict(),
                "tokens_per_second": [one.speed for one in rounds],
                "after_first_tokens_per_second": [steady(one) for one in rounds],
                "ratios_to_bare": ratios(run, cell),
                "first_seconds": [one.first for one in rounds],
                "cut": sum(one.cut for one in rounds),
            }
            for cell, rounds in run.cells.items()
        ],
        "stalls": [
            {"contender": name, "phase": phase, "gap": felt.gap, "usual": felt.usual, "first": felt.first, "batch": batch,
             "cut": felt.cut}
            for (name, phase), stalls in run.stalls.items() for felt, batch in stalls
        ],
        "goals": [{"text": goal.text, "wanted": goal.wanted, "values": goal.values, "met": goal.met} for goal in found],
    }  # fmt: skip
