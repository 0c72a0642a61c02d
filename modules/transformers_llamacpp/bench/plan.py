"""What is measured: the modes, who takes part in which, and the cases of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["CONTENDERS", "MODES", "Case", "Contender", "Mode", "Settings"]


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of choosing tokens, said twice: for transformers' `generate()` and for llama-cpp-python's `Llama.generate`."""

    label: str
    generate: dict[str, Any]
    llama: dict[str, Any]


_NONE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0, "temp": 1.0}
"""`Llama.generate` filters by default; this is how each filter is switched off."""

MODES = {
    "greedy": Mode("greedy", {"do_sample": False}, _NONE | {"temp": 0.0}),
    "top-k": Mode(
        "top-k 40 + top-p 0.95",
        {"do_sample": True, "top_k": 40, "top_p": 0.95},
        _NONE | {"top_k": 40, "top_p": 0.95},
    ),
    "top-p": Mode("top-p 0.95", {"do_sample": True, "top_k": 0, "top_p": 0.95}, _NONE | {"top_p": 0.95}),
    "min-p": Mode(
        "min-p 0.05 + repetition penalty 1.1",
        {"do_sample": True, "top_k": 0, "top_p": 1.0, "min_p": 0.05, "repetition_penalty": 1.1},
        _NONE | {"min_p": 0.05, "repeat_penalty": 1.1},
    ),
}


@dataclass(frozen=True, slots=True)
class Contender:
    """Who takes part. `greedy_only`, `one_row`: in which cases; `share`: it writes only one token of that many (slow)."""

    label: str
    greedy_only: bool = False
    one_row: bool = False
    share: int = 1

    def takes_part(self, case: Case) -> bool:
        return (case.mode == "greedy" or not self.greedy_only) and (case.rows == 1 or not self.one_row)

    def tokens(self, tokens: int) -> int:
        """How many it writes where the others write `tokens`."""
        return max(2, tokens // self.share)


CONTENDERS = {
    "bare": Contender("bare llama.cpp loop", greedy_only=True),
    "llama-cpp-python": Contender("llama-cpp-python", one_row=True),
    "ours": Contender("transformers-llamacpp"),
    "plain-loop": Contender("… with transformers' loop"),
    "torch": Contender("transformers' GGUF in torch", greedy_only=True, one_row=True, share=4),
}
"""By the name on the command line, in the order of the table: ratios are to the first that took part."""


@dataclass(frozen=True, slots=True)
class Case:
    mode: str
    prompt: int
    """Tokens in the prompt of each row."""
    rows: int

    @property
    def label(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{MODES[self.mode].label}, prompt of {self.prompt:,} tokens, {rows}"


@dataclass(frozen=True, slots=True)
class Settings:
    """One run. `threads`: `None` takes as many as the package does by default."""

    tokens: int = 128
    rounds: int = 5
    modes: Sequence[str] = tuple(MODES)
    prompts: Sequence[int] = (16, 2000)
    rows: Sequence[int] = (1, 4, 8)
    contenders: Sequence[str] = tuple(CONTENDERS)
    threads: int | None = None

    def cases(self) -> list[Case]:
        """Every prompt with the fewest rows, and every number of rows with the shortest prompt: many rows of a long prompt
        would take most of the time, and tell nothing that these do not."""
        few, short = min(self.rows), min(self.prompts)
        shapes = [(prompt, few) for prompt in sorted(set(self.prompts))]
        shapes += [(short, rows) for rows in sorted(set(self.rows) - {few})]
        return [Case(mode, prompt, rows) for mode in self.modes for prompt, rows in shapes]

    @property
    def context(self) -> int:
        """Tokens that one row may have."""
        return max(self.prompts) + self.tokens

    @property
    def cells(self) -> int:
        """KV cells that all rows of a case share."""
        return max(case.rows * (case.prompt + self.tokens) for case in self.cases())
