"""Top-p (Holtzman et al. 2019, https://arxiv.org/abs/1904.09751) as transformers' `TopPLogitsWarper` decides it.

transformers sorts all scores upwards, takes the softmax and its running sum in that order, and removes what lies in the
lower `1 - p`. Only the head of that order decides, so only the head is sorted here. The rounding of transformers' sums is
bounded; where the decision lies within that bound, the sums are done as transformers does them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from .peaks import Peaks
from .rows import Batch, Floats, Row

__all__ = ["SOFTMAX_ERROR", "sum_error", "top_p"]

UNIT = 2.0**-24
"""The relative rounding error of one float32 operation."""

LANES = 4
"""Partial sums that torch's vectorised softmax adds up at least (8 with AVX2, 16 with AVX-512)."""

SOFTMAX_ERROR = 8e-6
"""Relative error of a probability without that of the sum: torch's vectorised exp may be off by 20 units in the last place."""


SMALLEST = 1e-6
"""For less of the lower part than this, numbers that float32 cannot tell from 0 would have to be thought of."""


def sum_error(additions: float) -> float:
    """Relative error of a float32 sum, `additions` being the sum of all partial sums, in units of the whole."""
    return UNIT * (additions / LANES + 8)


def top_p(processor: Any, row: Row, batch: Batch) -> bool:
    """`TopPLogitsWarper` on one row; False, and nothing changed, where transformers' own has to decide."""
    share, keep = processor.top_p, processor.min_tokens_to_keep
    if type(share) is not float or type(keep) is not int or keep < 1 or processor.filter_value != -np.inf:
        return False
    below = float(np.float32(1 - share))
    """transformers removes what has a running sum of at most this."""
    found = _sparse_head(row, below, keep) if row.ids is not None else _dense_head(row, below, keep)
    if found is None:
        return False
    ids, values, lowest = found
    if lowest is None:
        lowest, removed_ties = _as_transformers(values if row.ids is not None else row.dense(), row.n_vocab, below, keep)
        if removed_ties:
            return False
        if lowest == -np.inf:
            return True
        if row.ids is None:
            values = row.dense()
            ids = np.flatnonzero(values >= lowest)
            row.set_sparse(ids, values[ids])
            return True
    stays = values >= lowest
    if not stays.all() or row.ids is None:
        row.set_sparse(ids[stays], values[stays])
    return True


def _sparse_head(row: Row, below: float, keep: int) -> tuple[Any, Floats, float | None] | None:
    assert row.ids is not None
    values = row.values
    if not len(values) or not np.isfinite(values.max()):
        return None
    if keep >= len(values):
        return row.ids, values, -np.inf
    if below < SMALLEST:
        return row.ids, values, None
    return row.ids, values, _lowest_kept(np.sort(values), 0.0, 0.0, below, keep)


def _dense_head(row: Row, below: float, keep: int) -> tuple[Any, Floats, float | None] | None:
    values = row.dense()
    peaks = Peaks(values)
    top = peaks.top()
    if not np.isfinite(top):
        return None
    if below < SMALLEST:
        return None, values, None
    probabilities: Floats = torch.softmax(torch.from_numpy(values)[None], dim=-1)[0].numpy()
    of_top = float(probabilities.max())
    n = len(values)
    for part in (4096, 2 * n):
        # what is less probable than `below / n` is surely removed; often so is all that is less than a larger part of it
        ids = peaks.at_least(top + math.log(below / part / of_top))
        of_head = probabilities[ids]
        probabilities[ids] = 0
        of_rest = float(probabilities.sum())
        if of_rest < 0.9 * below * (of_rest + float(of_head.sum())):
            break
        probabilities[ids] = of_head
    else:
        return None, values, None
    head, rest = values[ids], of_rest / of_top
    ordered = np.sort(head)
    lowest = _lowest_kept(ordered, rest, rest * n, below, keep)
    if lowest is None and rest:
        # a finer bound of the ranks: of two terms the smaller one is at most the root of their product
        np.sqrt(probabilities, out=probabilities)
        additions = rest * (len(ids) + 1) + float(probabilities.sum()) ** 2 / of_top / 2
        lowest = _lowest_kept(ordered, rest, additions, below, keep)
    return ids, head, lowest


def _lowest_kept(ordered: Floats, rest: float, additions: float, below: float, keep: int) -> float | None:
    """The smallest score in the nucleus, `None` where it is too close to say.

    `ordered`: the head of the scores, upwards. `rest`: the sum of `exp(score - max)` of all others, none of which is kept.
    `additions`: the sum over these others of the same times their rank from the top.
    """
    n = len(ordered)
    terms = np.exp(ordered.astype(np.float64) - float(ordered[-1]))
    sums = np.cumsum(terms)
    sums += rest
    total = float(sums[-1])
    additions += float((terms * np.arange(n, 0, -1)).sum())
    error = below * (SOFTMAX_ERROR + sum_error(additions / total))
    limit = below * total
    removed = int(np.searchsorted(sums, limit, side="right"))
    slack = error * total
    if removed < n and sums[removed] <= limit + slack and removed < n - keep:
        return None
    before = float(sums[removed - 1]) if removed else rest
    if before >= limit - slack and removed <= n - keep and before > 0:
        return None
    if removed > n - keep:
        removed = n - keep
    if removed < 0 or (removed and ordered[removed - 1] == ordered[removed]):
        return None
    return float(ordered[removed])


def _as_transformers(values: Floats, n_vocab: int, below: float, keep: int) -> tuple[float, bool]:
    """The smallest score that is kept, and whether some of those that tie with it are not.

    The softmax in transformers' order, and so bit for bit its own; the order among ties makes no difference to it.
    """
    ordered = np.full(n_vocab, -np.inf, np.float32)
    ordered[n_vocab - len(values) :] = values
    ordered.sort()
    sums = torch.from_numpy(ordered)[None].softmax(dim=-1).cumsum(dim=-1)[0].numpy()
    removed = int(np.searchsorted(sums, np.float32(below), side="right"))
    removed = min(removed, max(n_vocab - keep, 0))
    if not removed:
        return -np.inf, False
    return float(ordered[removed]), bool(ordered[removed - 1] == ordered[removed])
