"""The random numbers of one call."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InvalidInputError

__all__ = ["Numbers", "check_seeds"]


class Numbers:
    """Each row of a call has random numbers of its own, which its seed alone decides: a text is the same alone and in a batch,
    and whatever other threads draw meanwhile. Without seeds one is taken from torch's random numbers when the first number is
    asked for, so that `torch.manual_seed` decides, and a call that does not sample leaves them alone."""

    def __init__(self, seeds: Sequence[int] | None = None) -> None:
        self.seeded = seeds is not None
        self._rows = [random.Random(seed) for seed in seeds or ()]
        self._seed: int | None = None

    def next(self, row: int) -> float:
        """The row's next number, in `[0, 1)`."""
        while row >= len(self._rows):
            if self.seeded:
                raise InvalidInputError(f"seeds has {len(self._rows)} entries for {row + 1} rows or more; each row needs one")
            if self._seed is None:
                self._seed = int(torch.randint(1 << 62, (), device="cpu"))
            self._rows.append(random.Random((self._seed << 20) + len(self._rows)))
        return self._rows[row].random()


def check_seeds(seeds: Any) -> list[int]:
    """`seeds` of `generate()` as a list. Raises `InvalidInputError`."""
    found = list(seeds) if isinstance(seeds, (list, tuple)) else [seeds]
    if not found or not all(isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**64 for seed in found):
        raise InvalidInputError(f"seeds={seeds!r}: whole numbers from 0 to 2**64 - 1 are needed, one for each row")
    return found
