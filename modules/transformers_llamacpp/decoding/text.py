"""Texts that grow token by token."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["GrowingText"]

ROOM = 256


class GrowingText:
    """`ids` are the texts so far, `(rows, length)`: a view that costs nothing and stays valid when tokens are appended."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._length = ids.shape[1]
        self._shown: torch.Tensor | None = None
        self._take(ids, self._length + ROOM)

    def __len__(self) -> int:
        return self._length

    @property
    def ids(self) -> torch.Tensor:
        return self._buffer[:, : self._length]

    @property
    def array(self) -> Any:
        """`ids` as an array of the same memory, for CPU tensors: numpy cuts one for less."""
        return self._array[:, : self._length]  # type: ignore[index]

    def view(self) -> torch.Tensor:
        """`ids` for code of others, which may count on one piece of memory: a copy where there are several rows. What they
        write into it counts, as in transformers, once `newest_again` was called."""
        self._take_back()
        shown = self.ids.contiguous()
        self._shown = None if len(shown) == 1 else shown
        return shown

    def newest_again(self) -> list[int]:
        """The newest token of every row, after code of others has seen the text."""
        self._take_back()
        return self.newest.tolist()  # type: ignore[no-any-return]

    def _take_back(self) -> None:
        if self._shown is not None:
            self._buffer[:, : self._shown.shape[1]] = self._shown
            self._shown = None

    @property
    def newest(self) -> torch.Tensor:
        """The last token of every row, `(rows,)`, not to be kept: a view."""
        return self._buffer[:, self._length - 1]

    def append(self, *tokens: int) -> None:
        """One token for each row."""
        if self._length == self._buffer.shape[1]:
            self._take(self._buffer, 2 * self._length)
        if self._array is None:
            self._buffer[:, self._length] = torch.tensor(tokens, dtype=self._buffer.dtype)
        else:
            for row, token in enumerate(tokens):
                self._array[row, self._length] = token
        self._length += 1

    def _take(self, ids: torch.Tensor, room: int) -> None:
        self._buffer = torch.empty((len(ids), room), dtype=ids.dtype, device=ids.device)
        self._buffer[:, : ids.shape[1]] = ids
        # the same memory: writing a number through torch costs as much as the rest of a step
        self._array = self._buffer.numpy() if ids.device.type == "cpu" else None
