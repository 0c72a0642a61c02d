"""One row of a `LlamaCppCache`: the columns of transformers' padded tensors over the tokens of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .sequence import Sequence

__all__ = ["Bookmark", "Row"]


@dataclass(slots=True)
class Row:
    """`mask`: one byte per column, 0 for padding; `None` while there is none."""

    sequence: Sequence
    mask: bytearray | None = None

    def tokens_in(self, columns: int) -> int:
        """How many tokens the first `columns` columns hold."""
        return columns if self.mask is None else self.mask[:columns].count(1)

    def real(self, columns: int) -> npt.NDArray[np.bool_]:
        """Which of so many columns hold a token."""
        if self.mask is None:
            return np.ones(columns, np.bool_)
        return np.frombuffer(bytes(self.mask), np.uint8).astype(np.bool_)

    def matches(self, columns: int, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_] | None) -> int:
        """How many leading columns of `ids` (and `mask`) are what the first `columns` of this row hold."""
        limit = min(columns, len(ids))
        real = self.real(columns)[:limit]
        stored = np.full(limit, -1, np.int64)
        stored[real] = np.array(self.sequence.tokens[: int(real.sum())], np.int64)
        same = (stored == ids[:limit]) | ~real
        if mask is not None:
            same &= mask[:limit] == real
        return limit if same.all() else int(np.argmin(same))


@dataclass(slots=True)
class Bookmark:
    """See `LlamaCppCache.bookmark`."""

    columns: int
    forks: list[Sequence]
    companion: Bookmark | None
