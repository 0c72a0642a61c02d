"""Hidden states, as far as llama.cpp gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .errors import UnsupportedFeatureError

__all__ = ["ONLY_LAST", "LastHiddenState", "at_column"]

ONLY_LAST = 'output_hidden_states="last" asked for the last one only, hidden_states[-1]'


class LastHiddenState(tuple):  # type: ignore[type-arg]
    """`hidden_states` of an output: `n_layer + 1` entries as in transformers, of which the last one is there.

    `hidden_states[-1]` is float32 `(batch, length, hidden_size)`, llama.cpp's last-layer output after the final norm, equal
    to transformers' `hidden_states[-1]`. Any other entry raises `UnsupportedFeatureError` with the `reason`; no zeros
    stand in for it.
    """

    _n_layer: int
    _reason: str

    def __new__(cls, last: torch.Tensor, n_layer: int, reason: str = ONLY_LAST) -> LastHiddenState:
        self = super().__new__(cls, (last,))
        self._n_layer, self._reason = n_layer, reason
        return self

    def __len__(self) -> int:
        return self._n_layer + 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            position = range(len(self))[index]
            if position == self._n_layer:
                return super().__getitem__(0)
            raise UnsupportedFeatureError(f"hidden state {position} of {len(self)}: {self._reason}", "output_hidden_states")
        return tuple(self[position] for position in range(len(self))[index])

    def __iter__(self) -> Iterator[Any]:
        return iter([self[position] for position in range(len(self))])

    def __reduce__(self) -> Any:
        return (LastHiddenState, (self[-1], self._n_layer, self._reason))


def at_column(hidden_states: Any, column: int) -> Any:
    """Of the hidden states of several columns those of one, `(batch, 1, hidden_size)` each."""
    only = slice(column, column + 1 or None)
    if isinstance(hidden_states, LastHiddenState):
        return LastHiddenState(hidden_states[-1][:, only], len(hidden_states) - 1, hidden_states._reason)
    return tuple(layer[:, only] for layer in hidden_states)
