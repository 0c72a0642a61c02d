"""What one contender did once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Measurable", "Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """One answer to a batch of prompts, from an empty memory. Both times start with the call that is given the token ids.

    `first_seconds` ends when the caller has the first token of every row: the prompts are evaluated, and one token of each is
    chosen. `seconds` ends when it has the last one, which is not evaluated any more.
    """

    first_seconds: float
    seconds: float
    answer: list[list[int]]
    """The new tokens of each row."""

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.answer))

    @property
    def speed(self) -> float:
        """Tokens of all rows per second, the first of each row and its time left out."""
        return (self.new_tokens - len(self.answer)) / (self.seconds - self.first_seconds)


class Measurable(Protocol):
    """A contender, in a process of its own."""

    def run(self, mode: str, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        """Choose exactly `tokens` tokens after each of the prompts, which have equal lengths, knowing nothing of them before.

        `mode` is one of `plan.MODES`. No end token ends a row.
        """
        ...
