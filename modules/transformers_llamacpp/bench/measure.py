"""Runs the cases: one contender computes at a time, in turn, so that noise hits all of them alike."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from ..errors import LlamaCppError
from ..native import default_threads
from .plan import CONTENDERS, Case, Settings
from .process import Process
from .prompts import prompts
from .runs import Run

__all__ = ["WITH_TORCH", "YARDSTICKS", "Measured", "Participant", "Say", "measure"]

WARM_UP = 8
"""Tokens each contender writes before the first round of a case."""

WITH_TORCH = "bare + torch"

YARDSTICKS = {
    WITH_TORCH: ("torch", "transformers"),
    "bare + model class": ("torch", "transformers.modeling_utils", "transformers.generation.utils"),
}
"""The bare loop once more, not for its speed, in a process that has imported these: what memory is held against. Whatever is a
`PreTrainedModel` needs the second."""


@dataclass(slots=True)
class Participant:
    """One contender's process. `problem`: why it is left out, from when it occurred on."""

    ready_seconds: float | None = None
    peak_bytes: int | None = None
    busy: bool = False
    problem: str | None = None


class Say(Protocol):
    """Told before each step what comes: what for, and the step itself."""

    def __call__(self, what: str, step: str = "", /) -> None: ...


def silent(what: str, step: str = "") -> None:
    """No progress."""


@dataclass(slots=True)
class Measured:
    """Everything of one run. `runs[case][name]` has one entry for each round; who failed in a case is not in it."""

    file: Path
    settings: Settings
    threads: int
    participants: dict[str, Participant] = field(default_factory=dict)
    runs: dict[Case, dict[str, list[Run]]] = field(default_factory=dict)


def measure(file: Path, settings: Settings, say: Say = silent) -> Measured:
    """Measure `file` (a GGUF) as `settings` say.

    A contender that cannot be loaded, or fails, is left out from there on; `participants` has its reason.

    Raises `ModelLoadError` where `file` has no vocabulary to make prompts with, `LlamaCppError` where nobody is left.
    """
    threads = settings.threads or default_threads()
    measured = Measured(file, settings, threads)
    cases = settings.cases()
    texts = {(case.prompt, case.rows): prompts(file, case.prompt, case.rows) for case in cases}
    with contextlib.ExitStack() as stack:
        processes: dict[str, Process] = {}
        for name in settings.contenders:
            if any(CONTENDERS[name].takes_part(case) for case in cases):
                say("loading", name)
                participant = measured.participants[name] = Participant()
                with _problem_of(participant):
                    processes[name] = stack.enter_context(contextlib.closing(_start(name, measured)))
                    participant.ready_seconds = processes[name].ready_seconds
        for number, case in enumerate(cases):
            head = f"[{number + 1}/{len(cases)}] {case.label}"
            _run_case(case, texts[case.prompt, case.rows], processes, measured, partial(say, head))
        for name, process in processes.items():
            participant = measured.participants[name]
            if participant.problem is None:
                participant.busy = process.busy
                with _problem_of(participant):
                    participant.peak_bytes = process.peak_bytes()
    if not any(measured.runs.values()):
        reasons = "; ".join(participant.problem or "" for participant in measured.participants.values())
        raise LlamaCppError(f"nothing was measured: {reasons or 'none of the contenders takes part in any of the cases'}")
    if measured.participants.keys() >= {"bare", "ours"} and "greedy" in settings.modes:
        say("the memory of a bare loop beside torch")
        _measure_memory(texts, measured)
    return measured


def _start(name: str, measured: Measured, imports: tuple[str, ...] = ()) -> Process:
    settings = measured.settings
    return Process(name, measured.file, settings.context, settings.cells, max(settings.rows), measured.threads, imports)


@contextlib.contextmanager
def _problem_of(participant: Participant) -> Iterator[None]:
    try:
        yield
    except LlamaCppError as error:
        participant.problem = " ".join(str(error).split())


def _run_case(
    case: Case, texts: list[list[int]], processes: dict[str, Process], measured: Measured, say: Callable[[str], None]
) -> None:
    """A warm-up of each contender, then the rounds; another one begins each time."""
    settings, participants = measured.settings, measured.participants
    names = [name for name in processes if CONTENDERS[name].takes_part(case)]
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for number in range(settings.rounds + 1):
        shift = number % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            if participants[name].problem is not None:
                continue
            say(f"round {number} of {settings.rounds}, {name}" if number else f"warm-up, {name}")
            tokens = CONTENDERS[name].tokens(settings.tokens)
            with _problem_of(participants[name]):
                run = processes[name].run(case.mode, texts, tokens if number else min(tokens, WARM_UP))
                if number:
                    runs[name].append(run)
    measured.runs[case] = {name: done for name, done in runs.items() if len(done) == settings.rounds}


def _measure_memory(texts: dict[tuple[int, int], list[list[int]]], measured: Measured) -> None:
    for name, modules in YARDSTICKS.items():
        participant = measured.participants[name] = Participant()
        with _problem_of(participant), contextlib.closing(_start("bare", measured, modules)) as process:
            participant.ready_seconds = process.ready_seconds
            for case in measured.settings.cases():
                if case.mode == "greedy":
                    process.run(case.mode, texts[case.prompt, case.rows], measured.settings.tokens)
            participant.peak_bytes = process.peak_bytes()
