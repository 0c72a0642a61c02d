"""Which token comes next: the most probable one, or a sample.

`torch.multinomial` draws an exponential number for every token of the vocabulary, which takes longer than the decode of a
small model. Here one uniform number picks a place in the cumulated probabilities, tokens in the order of their ids: the
same distribution, and for one random number the same token, whether the row is dense or holds only the tokens that the
processors left.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .warpers import Few, Scores

__all__ = ["best", "draw", "draw_dense"]

FEW = 256

BLOCK = 512
"""Probabilities that are added up together before one of them is looked for."""


def best(row: Scores) -> int:
    """The most probable token; of equals the one with the smallest id, which is 0 where none is left."""
    if isinstance(row, Few):
        numbers = row.numbers
        return row.tokens[numbers.index(max(numbers))] if numbers else 0
    if not len(row.values):
        return 0
    place = int(row.values.argmax())
    return place if row.ids is None else int(row.ids[place])


def draw(row: Scores, number: float) -> int:
    """A token with the probability that the softmax of the row's scores gives it; `number` is in `[0, 1)`.

    Raises torch's own `RuntimeError` where these are no probabilities (`nan`, `inf`, or no token left).
    """
    if isinstance(row, Few):
        return row.tokens[_draw_few(row.numbers, number)]
    if row.ids is None:
        return draw_dense(torch.softmax(torch.from_numpy(row.values), dim=-1).numpy(), number)
    if len(row.ids) <= FEW:
        return int(row.ids[_draw_few(row.values.tolist(), number)])
    values = row.values.astype(np.float64)
    highest = values.max(initial=-np.inf)
    if not np.isfinite(highest):
        return _refused(torch.softmax(torch.from_numpy(row.values), dim=-1))
    total = np.cumsum(np.exp(values - highest))
    return int(row.ids[_place(total, number * total[-1])])


def _draw_few(values: list[float], number: float) -> int:
    """The same without numpy, whose functions a decode has driven out of the processor's cache."""
    highest = max(values, default=-math.inf)
    if not math.isfinite(highest):
        return _refused(torch.softmax(torch.tensor(values), dim=-1))
    total = 0.0
    sums = [total := total + math.exp(value - highest) for value in values]
    if math.isnan(total):
        return _refused(torch.softmax(torch.tensor(values), dim=-1))
    place = bisect_right(sums, number * total)
    return place if place < len(sums) else bisect_left(sums, total)


def draw_dense(weights: npt.NDArray[np.float32], number: float) -> int:
    """A token with a probability proportional to its weight; `weights` is `(n_vocab,)`."""
    whole = len(weights) // BLOCK
    sums = weights[: whole * BLOCK].reshape(whole, BLOCK).sum(axis=1)
    total = np.cumsum(np.append(sums, weights[whole * BLOCK :].sum()), dtype=np.float64)
    if not (np.isfinite(total[-1]) and total[-1] > 0):
        return _refused(torch.from_numpy(weights))
    goal = number * total[-1]
    block = _place(total, goal)
    within = np.cumsum(weights[block * BLOCK : (block + 1) * BLOCK], dtype=np.float64)
    # the block was added up in another order: what is left of the goal may lie behind its end by a rounding
    return block * BLOCK + _place(within, min(goal - (total[block - 1] if block else 0.0), within[-1]))


def _place(total: npt.NDArray[np.float64], goal: float) -> int:
    """The first entry whose cumulated weight is above the goal; where the goal is the whole, the last with any weight."""
    place = int(np.searchsorted(total, goal, side="right"))
    return place if place < len(total) else int(np.searchsorted(total, total[-1], side="left"))


def _refused(weights: torch.Tensor) -> Any:
    """torch refuses it, with the words that users of transformers know."""
    return int(torch.multinomial(weights if len(weights) else torch.tensor([math.nan]), 1))
