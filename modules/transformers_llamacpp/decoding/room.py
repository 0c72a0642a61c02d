"""How far a call can go before the KV cells are full.

A text takes one cell for each token; what rows share they store once. The prompts of a call share as far as `rows.py` lets
rows start from each other, and beams share what they had in common before they parted. Everything else in the buffer gives
way, so that all of `n_cells` is the call's.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import StoppingCriteria

from ..cache import LlamaCppCache
from ..errors import CacheFullError
from ..sequence import EMBEDDED, Sequence, shared_prefix

__all__ = ["CellsFull", "Lineage", "Room", "Sharing", "Texts", "cells_of", "read_texts"]

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int32]


class Sharing(enum.Enum):
    """What rows that start in one call share, see `rows.py` and `Engine.start`."""

    PREFIX = "what they begin with"
    WHOLE = "a text that is the beginning of the other as a whole: states and windows cannot be cut"
    EQUAL = "equal texts only: the hidden states of all tokens are wanted, and shared ones have none"


def cells_of(texts: List[Tokens], sharing: Sharing = Sharing.PREFIX) -> int:
    """KV cells of texts that are evaluated in one call. A text starts from the one before it that shares most with it, and is
    evaluated at least at its last token, unless both are equal."""
    cells = 0
    for index, text in enumerate(texts):
        cells += len(text) - max((_shared(leader, text, sharing) for leader in texts[:index]), default=0)
    return cells


def _shared(leader: Tokens, text: Tokens, sharing: Sharing) -> int:
    n = shared_prefix(leader, text)
    if n == len(leader) == len(text):
        return n
    n = min(n, len(text) - 1)
    whole = n == len(leader)
    return n if sharing is Sharing.PREFIX or (sharing is Sharing.WHOLE and whole) else 0


@dataclass(slots=True)
class Texts:
    """The rows of an input: `tokens[row]` is what has to be evaluated, padding left out and `EMBEDDED` for a vector; `held`
    are the sequences of a passed-in cache, which they go on from."""

    tokens: list[Tokens]
    held: list[Sequence] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, of the input or of the cache, whichever has more rows: one of them is repeated."""
        new, past = [len(text) for text in self.tokens], [len(sequence) for sequence in self.held] or [0]
        n_rows = max(len(new), len(past))
        return [new[row * len(new) // n_rows] + past[row * len(past) // n_rows] for row in range(n_rows)]

    @property
    def starting(self) -> list[Tokens]:
        """The texts that start in this call; beams and return sequences are evaluated once and share what they have."""
        return [] if self.held else self.tokens

    @property
    def unshared(self) -> int:
        """Cells of rows that go on from a cache, if they shared none."""
        return sum(self.lengths) if self.held else 0

    def going_on(self, n_cells: int) -> int:
        """Cells of the cache's rows and of what each of them gets.

        A row that had to leave the buffer comes back with cells of its own, or, where there is no room for them, by
        evaluating what it does not share.
        """
        if not self.held:
            return 0
        cells, inside = 0, list[Tokens]()
        for sequence in sorted(self.held, key=lambda one: not one.resident):
            text = np.array(sequence.tokens, np.int32)
            copied = not sequence.resident and sequence.is_saved and cells + len(text) <= n_cells
            cells += len(text) - (0 if copied else max((shared_prefix(other, text) for other in inside), default=0))
            inside.append(text)
        repeats, copies = max(1, len(self.tokens) // len(self.held)), max(1, len(self.held) // len(self.tokens))
        return cells + copies * sum(len(text) for text in self.tokens[::repeats])


def read_texts(inputs: torch.Tensor, mask: torch.Tensor | None, cache: LlamaCppCache | None = None) -> Texts:
    """`inputs`: ids `(rows, length)` or embeddings `(rows, length, width)`; with a mask that is wider, only what is new."""
    n_rows, n_columns = inputs.shape[:2]
    past = 0 if cache is None else cache.get_seq_length()
    real, start = np.ones((n_rows, n_columns), np.bool_), min(past, n_columns)
    if mask is not None and mask.ndim == 2 and mask.shape[0] == n_rows and mask.shape[1] >= n_columns:
        real = mask[:, -n_columns:].cpu().numpy() != 0
        start = start if mask.shape[1] == n_columns else 0
    ids = np.full((n_rows, n_columns), EMBEDDED, np.int32)
    if inputs.ndim == 2:
        ids = inputs.cpu().numpy().astype(np.int32)
    tokens = [row[start:][known[start:]] for row, known in zip(ids, real, strict=True)]
    return Texts(tokens, cache.sequences if cache is not None and past else [])


@dataclass(frozen=True, slots=True)
class Room:
    """`prompts` of `n_cells` KV cells go to the prompts; each step may take `rows` more, those of guidance included."""

    n_cells: int
    prompts: int
    rows: int

    @property
    def steps(self) -> int:
        """New tokens for which there are cells, if no two rows share any. Raises `CacheFullError` where there is not one."""
        if self.prompts + self.rows > self.n_cells:
            needed = self.prompts + self.rows
            raise CacheFullError(
                f"the prompts take {self.prompts} KV cells and a new token of each row {self.rows} more, and there are "
                f"n_cells={self.n_cells}. Load the model with LlamaCppConfig(n_cells={needed}) or more, or use fewer or "
                "shorter rows.",
                needed,
                self.n_cells,
            )
        return (self.n_cells - self.prompts) // self.rows


class Lineage:
    """Which row each beam was before: beams share the cells up to where they parted, whatever their tokens are.

    `families` groups of rows never take each other's place, such as the beams of each text.
    """

    def __init__(self, families: int) -> None:
        self._families = families
        self._parents: list[npt.NDArray[np.intp]] = []

    def reordered(self, parents: List[int]) -> None:
        """Before the next token is stored row `i` becomes what `parents[i]` was."""
        self._parents.append(np.array(parents, np.intp))

    def cells(self, steps: int, rows: int) -> int:
        """Cells behind the prompts, `steps` tokens after them, of all rows there are now."""
        alive, cells = np.arange(rows), 0
        if len(self._parents) > steps:
            alive = np.unique(self._parents[steps])
        for step in range(steps, 0, -1):
            if len(alive) == self._families:  # one ancestor each, and so it stays
                return cells + step * self._families
            cells += len(alive)
            alive = np.unique(self._parents[step - 1][alive])
        return cells


class CellsFull(StoppingCriteria):  # type: ignore[misc]
    """Ends a beam search when the cells are full: the beams' common tokens take no more than one cell, so nobody can say
    beforehand when. `wanted`: the new tokens after which the search ends anyway; `sides` is 2 with guidance.

    transformers asks before the beams that lost have given back their cells; so it may end a little before the last cell.
    """

    def __init__(self, room: Room, families: int, sides: int, wanted: int) -> None:
        self.lineage = Lineage(families)
        self._room, self._sides, self._wanted = room, sides, wanted
        self._stored = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        room, stored = self._room, self._stored
        self._stored += 1
        full = room.prompts + room.rows * (stored + 1) > room.n_cells  # as if no cell were shared: costs nothing
        if full:
            beams = self.lineage.cells(stored, room.rows // self._sides)
            full = room.prompts + self._sides * beams + room.rows > room.n_cells
        if full and stored + 1 < self._wanted:
            logger.warning(
                "generation stopped after %d new tokens, where %d beams have filled the KV cells (n_cells=%d); %d were allowed",
                stored + 1, room.rows // self._sides, room.n_cells, self._wanted,
            )  # fmt: skip
        return torch.full((input_ids.shape[0],), full, dtype=torch.bool, device=input_ids.device)
