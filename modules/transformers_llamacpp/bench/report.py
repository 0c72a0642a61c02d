"""From what was measured to figures: medians, ratios, and everything as JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import LlamaCppError
from ..native.library import system_info
from .measure import Measured
from .plan import MODES, Case
from .runs import Run

__all__ = ["FIGURES", "as_json", "check_writable", "median", "ratios", "reference", "write_json"]

FIGURES: Mapping[str, Callable[[Run], float]] = {
    "tokens_per_second": lambda run: run.speed,
    "first_seconds": lambda run: run.first_seconds,
    "whole_seconds": lambda run: run.seconds,
}
"""See `Run`: generation without the prompt and the first token, the prompt with the first token, the whole call."""

LIBRARIES = ("llama-cpp-python", "transformers", "torch", "numpy")


def median(measured: Measured, case: Case, name: str, figure: str) -> float:
    """The median of the rounds."""
    return statistics.median(map(FIGURES[figure], measured.runs[case][name]))


def ratios(measured: Measured, case: Case, name: str, other: str, figure: str) -> list[float]:
    """`name / other` for each round, where the two followed each other closely; empty where one of them did not take part, or
    where the whole calls of two cannot be compared because one writes fewer tokens."""
    runs, of = measured.runs.get(case, {}), FIGURES[figure]
    if name not in runs or other not in runs:
        return []
    mine, theirs = runs[name], runs[other]
    if figure == "whole_seconds" and mine[0].new_tokens != theirs[0].new_tokens:
        return []
    return [of(one) / of(another) for one, another in zip(mine, theirs, strict=True)]


def reference(measured: Measured, case: Case) -> str | None:
    """What the others of a case are held against: the first that took part."""
    return next(iter(measured.runs[case]), None)


def as_json(measured: Measured) -> dict[str, Any]:
    """Every round, the medians, the ratios of each two, and what they were measured on; numbers and strings only."""
    settings = measured.settings
    return {
        "file": measured.file.name,
        "file_bytes": measured.file.stat().st_size,
        "machine": _machine(),
        "versions": {"transformers-llamacpp": _own_version(), "python": platform.python_version()}
        | {name: metadata.version(name) for name in LIBRARIES},
        "settings": {
            "tokens": settings.tokens,
            "rounds": settings.rounds,
            "threads": measured.threads,
            "n_ctx": settings.context,
            "n_cells": settings.cells,
        },
        "participants": {
            name: {
                "ready_seconds": one.ready_seconds,
                "peak_bytes": one.peak_bytes,
                "busy_between_turns": one.busy,
                "problem": one.problem,
            }
            for name, one in measured.participants.items()
        },
        "cases": [_case(measured, case) for case in measured.runs],
    }


def check_writable(path: Path) -> None:
    """Raises `LlamaCppError` where `path` cannot be written: at once, not after half an hour. What it holds is kept."""
    _write(path, "", "a")


def write_json(path: Path, content: Any) -> None:
    """Raises `LlamaCppError` where `path` cannot be written."""
    _write(path, json.dumps(content, indent=1) + "\n", "w")


def _write(path: Path, text: str, mode: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise LlamaCppError(f"{path} cannot be written: {error.strerror or error}") from None


def _case(measured: Measured, case: Case) -> dict[str, Any]:
    runs = measured.runs[case]
    return {
        "mode": case.mode,
        "mode_label": MODES[case.mode].label,
        "prompt_tokens": case.prompt,
        "rows": case.rows,
        "contenders": {
            name: {
                "new_tokens": done[0].new_tokens,
                "answer": done[0].answer,
                "rounds": [{figure: of(run) for figure, of in FIGURES.items()} for run in done],
                "medians": {figure: median(measured, case, name, figure) for figure in FIGURES},
                "median_ratios": {
                    other: {
                        figure: statistics.median(found)
                        for figure in FIGURES
                        if (found := ratios(measured, case, name, other, figure))
                    }
                    for other in runs
                    if other != name
                },
            }
            for name, done in runs.items()
        },
    }


def _own_version() -> str:
    """Also where the package was never installed."""
    return str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])


def _machine() -> dict[str, Any]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "logical_cores": os.cpu_count(),
        "llama_cpp": system_info().strip(),
        "omp_settings": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))},
    }


def _processor() -> str:
    """Its name, where the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
