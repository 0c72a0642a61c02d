"""The hidden states a text has had so far, as contrastive search looks at them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["HiddenHistory"]


class HiddenHistory:
    """Directions of one row's hidden states: unit vectors, float32 `(n, n_embd)`, in one buffer that doubles when full.

    4 bytes x `n_embd` per token; a step reads the buffer once and copies nothing.
    """

    def __init__(self, n_embd: int, capacity: int = 256) -> None:
        self._buffer = np.empty((max(1, capacity), n_embd), np.float32)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def units(self) -> npt.NDArray[np.float32]:
        """`(n, n_embd)`: a view, valid until the next `append`."""
        return self._buffer[: self._length]

    def append(self, vectors: npt.NDArray[np.float32]) -> None:
        """Take in the hidden states of the next tokens, `(m, n_embd)`, of any length."""
        needed = self._length + len(vectors)
        if needed > len(self._buffer):
            larger = np.empty((max(needed, 2 * len(self._buffer)), self._buffer.shape[1]), np.float32)
            larger[: self._length] = self.units
            self._buffer = larger
        self._buffer[self._length : needed] = unit(vectors)
        self._length = needed

    def similarity(self, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """For each of `(k, n_embd)`, the largest cosine with any token so far, float32 `(k,)` in [-1, 1].

        The degeneration penalty of Su et al. 2022, https://arxiv.org/abs/2202.06417, equation 5.
        """
        return (self.units @ unit(vectors).T).max(axis=0)


def unit(vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Scaled to length 1; zero stays zero."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(length, np.finfo(np.float32).tiny)
