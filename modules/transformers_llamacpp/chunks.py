"""Which parts of a new text an old one holds at other places."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .sequence import shared_prefix

__all__ = ["moved_chunks"]

BASE = np.uint64(0x9E3779B97F4A7C15)


def moved_chunks(
    old: npt.NDArray[np.int32], new: npt.NDArray[np.int32], start: int, stop: int, n_min: int
) -> list[tuple[int, int, int]]:
    """`(at, p0, n)`: `old[at : at + n] == new[p0 : p0 + n]`, with `n >= n_min`.

    Chunks lie in `new[start:stop]`, and follow each other in both texts; each is as long as it can be.
    """
    found: list[tuple[int, int, int]] = []
    if min(len(old) - start, stop - start) < n_min:
        return found
    size = max(len(old), stop)
    places: dict[int, list[int]] = {}
    for at, value in enumerate(_hashes(old, n_min, size).tolist()):
        places.setdefault(value, []).append(at)
    hashes = _hashes(new[:stop], n_min, size).tolist()
    p0, behind = start, start
    while p0 + n_min <= stop:
        for at in places.get(hashes[p0], ()):
            if at >= behind and np.array_equal(old[at : at + n_min], new[p0 : p0 + n_min]):
                n = shared_prefix(old[at:], new[p0:stop])
                if n < n_min:  # vectors, which equal nothing
                    continue
                found.append((at, p0, n))
                p0, behind = p0 + n, at + n
                break
        else:
            p0 += 1
    return found


def _hashes(tokens: npt.NDArray[np.int32], n: int, size: int) -> npt.NDArray[np.uint64]:
    """A number for each `n` tokens in a row: equal for equal ones in texts of up to `size` tokens, and rarely for others."""
    if len(tokens) < n:
        return np.empty(0, np.uint64)
    powers = BASE ** np.arange(size + 1, dtype=np.uint64)
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * powers[: len(tokens)]
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms)])
    windows = sums[n:] - sums[:-n]
    return windows * powers[size - np.arange(len(windows))]  # wherever it starts, all are compared at the same power
