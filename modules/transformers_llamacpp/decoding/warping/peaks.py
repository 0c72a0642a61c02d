"""The largest of many scores, without sorting or copying them."""

from __future__ import annotations

import numpy as np

from .rows import Floats, Ids

__all__ = ["Peaks", "largest"]

SMALL = 4096
"""Up to here one pass over everything costs no more than the bookkeeping that avoids it."""

MEDIUM = 65536
"""Up to here comparing everything costs no more than choosing among the blocks."""


class Peaks:
    """The maxima of interleaved blocks of `values`, float32 `(n,)`: block `j` is `values[j::n_blocks]`. By default there are
    none in what is small or medium.

    The maximum over rows of a matrix is one vector operation after the other, so this is the cheapest pass over the
    scores that there is; what is above a threshold lies in the few blocks whose maximum is. NaN is a maximum.
    """

    def __init__(self, values: Floats, n_blocks: int = 0) -> None:
        self.values = values
        if not n_blocks and len(values) > MEDIUM:
            n_blocks = 2048 if len(values) > 131072 else 1024
        self.n_blocks = n_blocks
        if self.n_blocks:
            whole = len(values) // n_blocks * n_blocks
            self.blocks, self.rest = values[:whole].reshape(-1, n_blocks), values[whole:]
            self.maxima: Floats = np.maximum.reduce(self.blocks, axis=0)
        else:
            self.rest = self.maxima = values

    def top(self) -> float:
        """The maximum; NaN if there is one."""
        top = self.maxima.max()
        if self.n_blocks and len(self.rest):
            top = np.maximum(top, self.rest.max())
        return float(top)

    def at_least(self, threshold: float) -> Ids:
        """The indices, ascending, of the values that are not below `threshold`, no NaN among the values."""
        if not self.n_blocks or len(self.values) <= MEDIUM:
            return (self.values >= threshold).nonzero()[0]
        columns = (self.maxima >= threshold).nonzero()[0]
        if len(columns) * 8 > self.n_blocks:
            return (self.values >= threshold).nonzero()[0]
        found = (self.blocks.take(columns, axis=1) >= threshold).ravel().nonzero()[0]
        block = found // len(columns)
        found += block * (self.n_blocks - len(columns))
        found += (columns - np.arange(len(columns)))[found - block * self.n_blocks]
        if not len(self.rest):
            return found
        return np.concatenate((found, (self.rest >= threshold).nonzero()[0] + self.blocks.size))


def largest(values: Floats, k: int, slack: float = 0.0) -> Ids | None:
    """The indices, ascending, of at least the `k` largest values and all that tie with them, as far as they are above -inf;
    with `slack`, also those that are lower by that part of the smallest of them. Mostly a few more. `None`: there is a NaN.
    """
    n = len(values)
    if not n:
        return np.zeros(0, np.int64)
    if n <= SMALL or k * 16 > n:
        at = max(n - k, 0)
        parted = np.partition(values, (at, n - 1))  # NaN is partitioned to the end
        bound, top, peaks = float(parted[at]), float(parted[-1]), Peaks(values) if n <= SMALL else None
    else:
        n_blocks = 2048 if n > 131072 else 1024
        while n_blocks < 4 * k:
            n_blocks *= 2
        peaks = Peaks(values, min(n_blocks, n // 4))
        maxima = peaks.maxima.copy()
        maxima.partition(len(maxima) - k)
        bound = float(maxima[-k])
        top = peaks.top()
    if np.isnan(top):
        return None
    if bound == -np.inf:
        return np.flatnonzero(values > -np.inf)
    if slack:
        bound -= abs(bound) * slack + 1e-30
    return np.flatnonzero(values >= bound) if peaks is None else peaks.at_least(bound)
