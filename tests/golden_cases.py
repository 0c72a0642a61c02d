"""The recorded outputs of transformers 4.46.3 that the tests of the decoding methods compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"


def open_cases(*modes: str) -> list[dict[str, Any]]:
    """Cases of `open.json`: one prompt, 64 tokens."""
    cases = json.loads((FOLDER / "open.json").read_text(encoding="utf-8"))["cases"]
    return [case for case in cases if case["mode"] in modes]


def decoding_cases(word: str) -> list[dict[str, Any]]:
    """Cases of `decoding.json` whose name begins with `word`: batches, end tokens, processors, constraints."""
    cases = json.loads((FOLDER / "decoding.json").read_text(encoding="utf-8"))["cases"]
    return [case for case in cases if case["name"].split()[0] == word]


def dola_cases() -> tuple[int, list[dict[str, Any]]]:
    """The seed, and the cases of `dola.json`: one prompt, 24 tokens."""
    recorded = json.loads((FOLDER / "dola.json").read_text(encoding="utf-8"))
    return recorded["seed"], recorded["cases"]


def open_id(case: dict[str, Any]) -> str:
    return f"{case['mode']}-{case['prompt'][:9]!r}"


def decoding_id(case: dict[str, Any]) -> str:
    return str(case["name"])
