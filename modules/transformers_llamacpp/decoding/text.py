"""One text that grows token by token."""

from __future__ import annotations

import torch

__all__ = ["GrowingText"]

ROOM = 256


class GrowingText:
    """`ids` is the text so far, int64 `(1, length)`: a view that costs nothing and stays valid when tokens are appended."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._length = ids.shape[1]
        self._buffer = torch.empty((1, self._length + ROOM), dtype=ids.dtype, device=ids.device)
        self._buffer[:, : self._length] = ids

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> torch.Tensor:
        return self._buffer[:, : self._length]

    def append(self, token: int) -> None:
        if self._length == self._buffer.shape[1]:
            larger = torch.empty((1, 2 * self._length), dtype=self._buffer.dtype, device=self._buffer.device)
            larger[:, : self._length] = self._buffer
            self._buffer = larger
        self._buffer[0, self._length] = token
        self._length += 1
