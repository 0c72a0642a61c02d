"""Which tokens would repeat an n-gram."""

from __future__ import annotations

import numpy as np

from .rows import Ids

__all__ = ["ends_with", "repeating"]


def repeating(ids: Ids, size: int) -> Ids:
    """The tokens, int64, that followed the last `size - 1` of `ids`, int64 `(length,)`, wherever these occurred before."""
    length = len(ids)
    if length < size:
        return ids[:0]
    found = np.flatnonzero(ids[size - 2 : length - 1] == ids[-1]) if size > 1 else np.arange(length)
    for back in range(2, size):
        found = found[ids[found + size - 1 - back] == ids[-back]]
    return ids[found + size - 1]


def ends_with(ids: Ids, prefixes: Ids) -> Ids:
    """Which of `prefixes`, int64 `(n, size)`, are the end of `ids`, which are at least as many: indices, ascending."""
    size = prefixes.shape[1]
    found = np.flatnonzero(prefixes[:, -1] == ids[-1]) if size else np.arange(len(prefixes))
    for back in range(2, size + 1):
        found = found[prefixes[found, -back] == ids[-back]]
    return found
