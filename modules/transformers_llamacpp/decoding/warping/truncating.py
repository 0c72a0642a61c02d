"""transformers' processors that keep some tokens and put the others at -inf, one row at a time.

Each function takes transformers' own object, whose attributes are read at every step, and one row. It answers False, with
the row's scores as they were, where only transformers' own code can say what it would have done: another filter value,
attributes of other types, NaN or no finite maximum, a decision that lies within rounding.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from .nucleus import SOFTMAX_ERROR, sum_error
from .peaks import Peaks, largest
from .rows import Batch, Floats, Ids, Row

__all__ = ["cuts", "epsilon", "eta", "finite_top", "keep_only", "min_p", "temperature", "top_k"]

SLACK = 5e-7
"""Scores that differ by more than this part of themselves still differ after a division in float32."""


def temperature(processor: Any, row: Row, batch: Batch) -> bool:
    if type(processor.temperature) not in (float, int):
        return False
    divisor = np.float32(processor.temperature)
    if row.ids is not None and 0 < divisor < np.inf:
        row.values = row.values / divisor
    elif row.ids is None and row.divisor is None and 1e-3 <= divisor <= 1e3:
        row.divisor = divisor
    else:
        np.divide(row.writable(), divisor, out=row.values)
    return True


def top_k(processor: Any, row: Row, batch: Batch) -> bool:
    k = processor.top_k
    if type(k) is not int or k < 1 or not cuts(processor):
        return False
    if row.ids is not None:
        ids, values = row.ids, row.values
        if np.isnan(values).any():
            return False
    else:
        if k >= row.n_vocab:
            return not np.isnan(row.dense().max())
        found = largest(row.values, k, SLACK if row.divisor is not None else 0.0)
        if found is None:
            return False
        ids, values = found, row.values[found]
        if row.divisor is not None:
            if len(values) and not np.abs(values).max() < 1e30:  # the division could make ties of what lies far apart
                row.dense()
                return top_k(processor, row, batch)
            values = values / row.divisor
    if len(ids) > k:
        stays = values >= np.partition(values, len(values) - k)[len(values) - k]
        ids, values = ids[stays], values[stays]
    row.set_sparse(ids, values)
    return True


def min_p(processor: Any, row: Row, batch: Batch) -> bool:
    """Nguyen et al. 2024, https://arxiv.org/abs/2407.01082: the threshold in logits is that of the maximum plus `log(min_p)`;
    no softmax."""
    share, keep = processor.min_p, processor.min_tokens_to_keep
    if type(share) not in (float, int) or type(keep) is not int or keep < 1 or not cuts(processor):
        return False
    if not 1e-30 < share <= 1:
        return share == 0  # below 0 is nothing, NaN included
    peaks = Peaks(row.values) if row.ids is None else None
    top = row.values.max(initial=-np.inf) if peaks is None else peaks.top()
    if not np.isfinite(top):
        return False
    scale = 1.0 if row.divisor is None else float(row.divisor)
    log = math.log(share)
    margin = 2e-5 + 4e-7 * (abs(float(top)) / scale - log)
    low, high = float(top) + scale * (log - margin), float(top) + scale * (log + margin)
    ids = peaks.at_least(low) if peaks is not None else np.flatnonzero(row.values >= low)
    values = row.values[ids]
    if ((values < high) & (values < top)).any():
        scores = row.tensor() if row.ids is None else torch.from_numpy(row.candidates().dense(row.n_vocab))[None]
        probabilities = torch.softmax(scores, dim=-1)[0].numpy()
        ids = np.flatnonzero(probabilities >= np.float32(share) * probabilities.max())
        values = scores[0].numpy()[ids]
        if len(ids) < keep:
            return False
        row.set_sparse(ids, values)
        return True
    if len(ids) < keep:
        if row.ids is not None and keep >= len(row.ids):
            return True
        more = _clear_top(row, keep, 2 * margin)
        if more is None:
            return False
        ids, values = more, row.values[more]
    keep_only(row, ids, values)
    return True


def epsilon(processor: Any, row: Row, batch: Batch) -> bool:
    """Hewitt et al. 2022, https://arxiv.org/abs/2210.15191."""
    cut = processor.epsilon
    return type(cut) is float and _at_least(processor, row, cut, 0.0)


def eta(processor: Any, row: Row, batch: Batch) -> bool:
    """As `epsilon`, with a threshold that falls where the distribution is flat."""
    cut = processor.epsilon
    if not isinstance(cut, torch.Tensor) or cut.ndim or cut.dtype != torch.float32 or not finite_top(row):
        return False
    values = row.values if row.ids is not None else row.dense()
    distances = values - values.max()
    np.maximum(distances, -80, out=distances)
    weights = np.exp(distances)
    total = float(weights.sum())
    distances *= weights
    entropy = math.log(total) - float(distances.sum()) / total
    limit = float(cut)
    flat = math.sqrt(limit) * math.exp(-entropy)
    if flat > limit * 1.001:
        return _at_least(processor, row, limit, 0.0)
    return _at_least(processor, row, min(limit, flat), 2e-5 + 4e-6 * entropy)


def cuts(processor: Any) -> bool:
    return type(processor.filter_value) in (float, int) and processor.filter_value == -math.inf


def finite_top(row: Row) -> bool:
    return len(row.values) > 0 and bool(np.isfinite(row.values.max()))


def keep_only(row: Row, at: Ids, values: Floats) -> None:
    """`at` indexes the row's own values, which may still be without their division."""
    if row.ids is not None:
        at = row.ids[at]
    elif row.divisor is not None:
        values = values / row.divisor
    row.set_sparse(at, values)


def _clear_top(row: Row, k: int, gap: float) -> Ids | None:
    """Where in the row's values the `k` most probable are; `None` where the next one is closer than `gap`, or where float32 may
    have no probability for all of them."""
    if k >= len(row.values):
        return None
    found = largest(row.values, k + 1)
    if found is None or len(found) <= k:
        return None
    scale = 1.0 if row.divisor is None else float(row.divisor)
    values = np.sort(row.values[found])
    lowest = values[-k]
    if not lowest - values[-k - 1] > gap * scale or values[-1] - lowest > 80 * scale:
        return None
    return found[row.values[found] >= lowest]


def _at_least(processor: Any, row: Row, cut: float, error: float) -> bool:
    """Keeps what is at least as probable as `cut`, which may be off by `error` times itself, and the `min_tokens_to_keep`
    largest."""
    keep = processor.min_tokens_to_keep
    if not 0 < cut < 1 or type(keep) is not int or keep < 1 or not cuts(processor) or not finite_top(row):
        return False
    exact = not error
    if row.ids is None:
        shares: Any = torch.softmax(row.tensor(), dim=-1)[0].numpy()
    else:
        shares = np.exp(row.values.astype(np.float64) - float(row.values.max()))
        shares /= shares.sum()
        error += SOFTMAX_ERROR + sum_error(len(shares) * 4)
        if exact and (np.abs(shares - cut) <= error * cut).any():
            whole = torch.from_numpy(row.candidates().dense(row.n_vocab))[None]
            shares, error = torch.softmax(whole, dim=-1)[0].numpy()[row.ids], 0.0
    if error and (np.abs(shares - cut) <= error * cut).any():
        return False
    kept = np.flatnonzero(shares >= np.float32(cut))
    if len(kept) < keep:
        if row.ids is not None and keep >= len(row.ids):
            return True
        tops = largest(row.values, keep)
        if tops is None:
            return False
        if len(tops) > keep:
            values = row.values[tops]
            tops = tops[values >= np.partition(values, len(values) - keep)[len(values) - keep]]
        kept = np.union1d(kept, tops)
    keep_only(row, kept, row.values[kept])
    return True
