"""The speed this package is held to: `transformers-llamacpp bench` on the two models of the tests, and which goals are met.

    python benchmarks/speed.py                              # everything, which takes long
    python benchmarks/speed.py --modes greedy --rows 1      # options are those of `transformers-llamacpp bench`

Contenders take turns within one run, and a ratio is taken within each round: ratios of one run can be compared with other runs;
seconds cannot.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "modules"), str(ROOT / "tests")]

import models  # noqa: E402
from transformers_llamacpp import cli  # noqa: E402
from transformers_llamacpp.bench.measure import YARDSTICKS, Measured, measure  # noqa: E402
from transformers_llamacpp.bench.plan import Case  # noqa: E402
from transformers_llamacpp.bench.report import as_json, check_writable, ratios, write_json  # noqa: E402
from transformers_llamacpp.bench.table import Progress, table  # noqa: E402
from transformers_llamacpp.errors import LlamaCppError  # noqa: E402

MODELS = {"smollm2": models.smollm2_q4_0, "gemma": models.gemma}


@dataclass(frozen=True)
class Goal:
    """`ours / other` in all cases that `holds_for`: at least, or at most, `bound`."""

    text: str
    other: str
    figure: str
    bound: float
    at_most: bool
    holds_for: Callable[[Case], bool]

    def met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound

    def wanted(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.bound:g}"


SPEED, FIRST = "tokens_per_second", "first_seconds"
GOALS = (
    Goal("tokens/s / bare loop", "bare", SPEED, 0.97, False, lambda case: case.mode == "greedy" and case.rows == 1),
    Goal("tokens/s / llama-cpp-python", "llama-cpp-python", SPEED, 1.0, False, lambda case: case.mode != "greedy"),
    Goal("tokens/s / bare decode", "bare", SPEED, 0.9, False, lambda case: case.rows == 8),
    Goal("first token / bare loop", "bare", FIRST, 1.03, True, lambda case: case.prompt == 2000 and case.rows == 1),
    Goal("tokens/s / transformers' GGUF", "torch", SPEED, 3.0, False, lambda case: case.mode == "greedy"),
)
MEMORY = 1.1
"""Most peak memory, in that of a bare loop in a process that has imported as much."""


def goals(measured: Measured) -> Iterator[tuple[str, str, list[float], bool]]:
    """What was measured of the goals: text, bound, the ratio of each round, whether their median is within it."""
    for goal in GOALS:
        for case in filter(goal.holds_for, measured.runs):
            if values := ratios(measured, case, "ours", goal.other, goal.figure):
                text = f"{case.mode}, {case.prompt} tokens, {case.rows}: {goal.text}"
                yield text, goal.wanted(), values, goal.met(statistics.median(values))
    peaks = {name: participant.peak_bytes for name, participant in measured.participants.items()}
    for name in YARDSTICKS:
        if (mine := peaks.get("ours")) and (theirs := peaks.get(name)):
            value = mine / theirs
            yield f"peak memory / {name}", f"≤ {MEMORY}", [value], value <= MEMORY


def show(name: str, measured: Measured) -> list[dict[str, Any]]:
    found = [*goals(measured)]
    print(f"\n{name + ', mode, prompt, rows: ours / other':60}{'goal':>8}{'median':>9}{'of':>8}{'to':>7}")
    for text, wanted, values, met in found:
        median = statistics.median(values)
        print(f"{text:60}{wanted:>8}{median:9.3f}{min(values):8.3f}{max(values):7.3f}{'' if met else '  missed'}")
    keys = ("text", "wanted", "ratios", "met")
    return [dict(zip(keys, goal, strict=True)) for goal in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, with commas between (default %(default)s)")
    mine, rest = parser.parse_known_args()
    unknown = set(mine.models.split(",")) - MODELS.keys()
    if unknown:
        parser.error(f"--models: {', '.join(sorted(unknown))} is not one of {', '.join(MODELS)}")
    options = cli.build_parser().parse_args(["bench", "the models of the tests", *rest])
    settings = cli.bench_settings(options)
    if options.json is not None:
        check_writable(options.json)
    everything = {}
    for name in mine.models.split(","):
        with Progress() as say:
            measured = measure(MODELS[name](), settings, say)
        print(table(measured))
        everything[name] = as_json(measured) | {"goals": show(name, measured)}
        print()
    if options.json is not None:
        write_json(options.json, everything)


if __name__ == "__main__":
    try:
        main()
    except (LlamaCppError, models.MissingModelError) as error:
        sys.exit(f"speed.py: {error}")
