"""The scores of one text while processors work on them: dense, or the few tokens that are not at -inf."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Batch", "Few", "Floats", "Ids", "Row", "Scores"]

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class Scores:
    """The scores of one row after processing.

    `ids is None`: `values` is dense, float32 `(n_vocab,)`. Else `ids`, int64 `(n,)`, are ascending, `values`, float32 `(n,)`,
    are their scores, and every other token is at -inf. A token among `ids` may be at -inf too.
    """

    ids: Ids | None
    values: Floats

    def dense(self, n_vocab: int) -> Floats:
        """float32 `(n_vocab,)`: a new array, or `values` itself where that is dense."""
        if self.ids is None:
            return self.values
        scores = np.full(n_vocab, -np.inf, np.float32)
        scores[self.ids] = self.values
        return scores


class Few(Scores):
    """Scores of few tokens, as Python's own numbers; arrays are made of them only for those who ask."""

    __slots__ = ("numbers", "tokens")

    def __init__(self, tokens: list[int], numbers: list[float]) -> None:
        self.tokens, self.numbers = tokens, numbers

    @property
    def ids(self) -> Ids:  # type: ignore[override]
        return np.array(self.tokens, np.int64)

    @property
    def values(self) -> Floats:  # type: ignore[override]
        return np.array(self.numbers, np.float32)


class Row:
    """The scores of one row between two processors.

    As `Scores`, and: `divisor` is a temperature that dense `values` are still to be divided by, because a truncation that
    follows leaves few to divide. `owned`: dense `values` may be overwritten; sparse ones always may.
    """

    __slots__ = ("divisor", "ids", "index", "n_vocab", "owned", "values")

    def __init__(self, index: int, values: Floats, owned: bool) -> None:
        self.index, self.n_vocab = index, len(values)
        self.divisor: np.float32 | None = None
        self.set_dense(values, owned)

    def set_dense(self, values: Floats, owned: bool) -> None:
        self.ids: Ids | None = None
        self.values, self.owned = values, owned

    def set_sparse(self, ids: Ids, values: Floats) -> None:
        """Every token but `ids` (ascending) is at -inf. `values` are already divided."""
        self.ids, self.values, self.owned, self.divisor = ids, values, True, None

    def dense(self) -> Floats:
        """All scores; not to be written to."""
        if self.ids is not None:
            self.set_dense(Scores(self.ids, self.values).dense(self.n_vocab), True)
        if self.divisor is not None:
            divisor, self.divisor = self.divisor, None
            np.divide(self.writable(), divisor, out=self.values)
        return self.values

    def writable(self) -> Floats:
        """All scores; the row's own, to be changed in place."""
        values = self.dense()
        if not self.owned:
            self.values, self.owned = values.copy(), True
        return self.values

    def tensor(self) -> torch.Tensor:
        """All scores, float32 `(1, n_vocab)`; not to be written to."""
        return torch.from_numpy(self.dense())[None]

    def ban(self, tokens: Ids) -> None:
        """-inf for `tokens`, all of them in the vocabulary."""
        if not len(tokens):
            return
        if self.ids is None:
            # before a division or after it, -inf is -inf
            if not self.owned:
                self.values, self.owned = self.values.copy(), True
            self.values[tokens] = -np.inf
        else:
            stays = np.isin(self.ids, tokens, invert=True)
            self.ids, self.values = self.ids[stays], self.values[stays]

    def candidates(self) -> Scores:
        return Scores(self.ids, self.values if self.ids is not None else self.dense())


class Batch:
    """All rows of one step. `input_ids` is int64 `(rows, length)`, on whatever device; looked at only by those that ask."""

    def __init__(self, input_ids: Any, rows: list[Row], n_vocab: int, seen: npt.NDArray[np.bool_]) -> None:
        self._input_ids, self.rows, self.n_vocab = input_ids, rows, n_vocab
        self.seen = seen
        """Scratch, bool `(n_vocab,)`: all False between two uses."""

    @property
    def length(self) -> int:
        """Tokens of each text so far."""
        return int(self._input_ids.shape[1])

    @functools.cached_property
    def input_ids(self) -> torch.Tensor:
        """The texts on the CPU, int64 `(rows, length)`."""
        given = self._input_ids
        ids: torch.Tensor = torch.from_numpy(given) if isinstance(given, np.ndarray) else given
        return ids.to("cpu", torch.int64)

    @functools.cached_property
    def ids(self) -> Ids:
        """The same as an array."""
        if isinstance(self._input_ids, np.ndarray) and self._input_ids.dtype == np.int64:
            return self._input_ids
        return self.input_ids.numpy()

    def fits(self, tokens: Ids) -> bool:
        """All of `tokens` are in the vocabulary."""
        return not tokens.size or int(tokens.view(np.uint64).max()) < self.n_vocab

    def tensor(self) -> torch.Tensor:
        """All scores, float32 `(rows, n_vocab)`, in memory that nothing else refers to."""
        scores = np.empty((len(self.rows), self.n_vocab), np.float32)
        for row in self.rows:
            self.write(row, scores[row.index])
        return torch.from_numpy(scores)

    @staticmethod
    def write(row: Row, into: Floats) -> None:
        if row.ids is not None:
            into.fill(-np.inf)
            into[row.ids] = row.values
        elif row.divisor is not None:
            np.divide(row.values, row.divisor, out=into)
        elif into is not row.values:
            into[:] = row.values

    def delegate_row(self, processor: Any, row: Row) -> None:
        """One row through transformers' own object, which looks at no other row."""
        before = row.tensor()
        after = processor(self.input_ids[row.index : row.index + 1], before)
        row.set_dense(after[0].float().numpy(), after is not before)
