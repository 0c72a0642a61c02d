"""`TopHLogitsWarper`: Potraghloo et al. 2025, https://arxiv.org/abs/2509.02510."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .peaks import largest
from .rows import Batch

__all__ = ["top_h"]


def top_h(processor: Any, batch: Batch) -> bool:
    """Only the 100 largest scores are looked at; these go through transformers' own arithmetic, so that every rounding is its
    own. False, and nothing changed, for NaN, and where a tie is cut."""
    if type(processor.top_n) is not int or processor.top_n < 1 or processor.filter_value != -np.inf or not batch.rows:
        return False
    n = min(processor.top_n, batch.n_vocab)
    tops = np.full((len(batch.rows), n), -np.inf, np.float32)
    found = []
    for row in batch.rows:
        values = row.values if row.ids is not None else row.dense()
        at = largest(values, n)
        if at is None or not len(at):
            return False
        ordered = np.sort(values[at])[::-1]
        tops[row.index, : min(n, len(ordered))] = ordered[:n]
        found.append((at, values[at], ordered))
    distribution = torch.distributions.Categorical(logits=torch.from_numpy(tops))
    shares = distribution.probs
    limit = (distribution.entropy() * processor.top_h).unsqueeze(-1)
    chosen = torch.cumsum(-shares * torch.log(shares), dim=-1) <= limit
    chosen[:, 0] = True
    kept = []
    for (at, values, ordered), picks in zip(found, chosen.numpy(), strict=True):
        count = int(picks.sum())
        if count > len(ordered) or not picks[:count].all():
            return False
        lowest = ordered[count - 1]
        if not np.isfinite(ordered[0]) or (count < len(ordered) and ordered[count] == lowest):
            return False
        kept.append((at[values >= lowest], values[values >= lowest]))
    for row, (at, values) in zip(batch.rows, kept, strict=True):
        row.set_sparse(at if row.ids is None else row.ids[at], values)
    return True
