"""`TypicalLogitsWarper`: Meister et al. 2022, https://arxiv.org/abs/2202.00666."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from .nucleus import SOFTMAX_ERROR, sum_error
from .rows import Batch, Row
from .truncating import cuts, finite_top, keep_only

__all__ = ["typical"]


def typical(processor: Any, row: Row, batch: Batch) -> bool:
    """Keeps the tokens whose surprise is closest to the entropy, on one row; False as in `truncating.py`."""
    mass, keep = processor.mass, processor.min_tokens_to_keep
    if type(mass) is not float or not 0 < mass < 1 or type(keep) is not int or keep < 1 or not cuts(processor):
        return False
    if not finite_top(row):
        return False
    if row.ids is None:
        logs: Any = torch.log_softmax(row.tensor(), dim=-1)[0].numpy()
    else:
        logs = row.values.astype(np.float64) - float(row.values.max())
        logs -= math.log(float(np.exp(logs).sum()))
    shares = np.exp(logs)
    entropy = -float((np.maximum(logs, -80) * shares).sum())
    distances = np.abs(logs + entropy)
    edge = _edge(distances, shares, mass, row.n_vocab)
    if edge is None:
        edge = _edge_of_all(distances, row, mass)
    if edge is None:
        return False
    near = np.abs(distances - distances[edge]) <= 4e-6 * (1 + entropy)
    if (logs[near] != logs[edge]).any():
        return False
    kept = np.flatnonzero(distances <= distances[edge])
    if len(kept) < keep:
        return row.ids is not None and keep >= len(row.ids)
    keep_only(row, kept, row.values[kept])
    return True


def _edge(distances: Any, shares: Any, mass: float, n_vocab: int) -> int | None:
    """Where the last token that is kept is, looking at as few of the closest as there have to be; `None`: too close to say."""
    error = SOFTMAX_ERROR + sum_error(n_vocab)
    if n_vocab > 32768:
        # roundings taken to be independent, 16 standard deviations; and terms too small to change a partial sum at all
        lost = float((shares * (shares < 1.5e-8)).sum())
        error = SOFTMAX_ERROR + min(sum_error(n_vocab), 1e-6 * math.sqrt(n_vocab / 8) + lost)
    width = 2.0
    while True:
        ids = np.flatnonzero(distances <= width)
        if float(shares[ids].sum()) > mass + error:
            break
        if width > 1e4:
            return None
        width *= 2
    order = ids[np.argsort(distances[ids], kind="stable")]
    sums = np.cumsum(shares[order], dtype=np.float64) / float(shares.sum())
    return _crossing(order, sums, mass, error)


def _edge_of_all(distances: Any, row: Row, mass: float) -> int | None:
    """The same by transformers' own sums, over all tokens in its order but for what lies equally close."""
    if distances.dtype == np.float32:
        # bits of floats that are not negative sort as they do; one sort of whole numbers is much faster than `argsort`
        keys = distances.view(np.uint32).astype(np.uint64) << np.uint64(32)
        keys |= np.arange(len(keys), dtype=np.uint64)
        keys.sort()
        order: Any = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    else:
        order = np.argsort(distances)
    ordered = np.full(row.n_vocab, -np.inf, np.float32)
    ordered[: len(order)] = row.values[order]
    sums = torch.from_numpy(ordered)[None].softmax(dim=-1).cumsum(dim=-1)[0].numpy()
    return _crossing(order, sums[: len(order)], mass, 1e-6)


def _crossing(order: Any, sums: Any, mass: float, error: float) -> int | None:
    last = int(np.searchsorted(sums, mass))
    if last >= len(sums) or np.abs(sums[max(last - 1, 0) : last + 1] - mass).min() <= error:
        return None
    return int(order[last])
