"""What a draft is, and who makes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["EMPTY", "Draft", "Drafter"]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Tokens that may follow the text; an empty draft is false.

    `probabilities`: float32 `(len(tokens), n_vocab)`, row `i` the distribution `tokens[i]` was sampled from; `None` where
    the draft is a plain guess, which is verified as if it had been certain (a point mass). Treat both as read-only.
    """

    tokens: list[int]
    probabilities: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)


EMPTY = Draft([])
"""No idea what comes next."""


class Drafter(Protocol):
    """Guesses how one text goes on. Made for one text, used by one thread."""

    def prepare(self, tokens: list[int]) -> None:
        """Read what is new in `tokens`, if that is much: what a prompt costs must not look like the cost of a draft."""
        ...

    def draft(self, tokens: list[int], limit: int) -> Draft:
        """At most `limit` (>= 1) tokens that may follow `tokens`.

        `tokens` is the whole text so far. From call to call it only grows: by drafted tokens that were accepted and
        by others. Drafters keep their own place in it; the list itself stays the caller's.
        """
        ...

    def verified(self, drafted: int, accepted: int) -> None:
        """The first `accepted` of the last draft's `drafted` tokens were taken."""
        ...

    def close(self) -> None:
        """Give back what was needed for drafting. Idempotent; nothing is drafted afterwards."""
        ...
