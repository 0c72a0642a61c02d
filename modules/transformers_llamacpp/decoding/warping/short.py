"""The end of a chain behind a top-k: what that leaves is so little that Python's own numbers cost less than arrays.

A decode drives everything else out of the processor's cache, so that the first use of each numpy or torch function after it
takes many times as long as it seems to. The decisions are those of `truncating.py` and `nucleus.py`, with the same bounds.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np

from .nucleus import SMALLEST, SOFTMAX_ERROR, sum_error
from .peaks import SMALL, Peaks
from .rows import Few, Floats, Ids, Row, Scores
from .truncating import SLACK, cuts

__all__ = ["ShortTail"]

MOST = 256
"""Tokens that a top-k may leave."""

NAMES = ("TopPLogitsWarper", "MinPLogitsWarper")


class ShortTail:
    """`[temperature], top-k, then top-p and min-p in any order`, up to the end of a chain of known processors."""

    def __init__(self, processors: list[Any]) -> None:
        names = [type(one).__name__ for one in processors]
        last = len(names)
        while last and names[last - 1] in NAMES:
            last -= 1
        self._depth = 8.0
        self.begin = len(names)
        """The first processor that this does; the number of processors where it does none."""
        if last and names[last - 1] == "TopKLogitsWarper":
            self.begin = last - 1
            self._temperature = processors[last - 2] if last > 1 and names[last - 2] == "TemperatureLogitsWarper" else None
            self.begin -= self._temperature is not None
            self._top_k, self._rest = processors[last - 1], processors[last:]

    def cut(self, row: Row) -> Scores | None:
        """What is left of the row, which stays as it is. `None` where the longer way has to be gone."""
        found = self._candidates(row)
        if found is None:
            return None
        ids, scores, order = found
        for processor in self._rest:
            cut = _top_p if type(processor).__name__ == "TopPLogitsWarper" else _min_p
            first = cut(processor, [scores[index] for index in order], row.n_vocab) if cuts(processor) else None
            if first is None:
                return None
            order = order[first:]
        order.sort()
        return Few([ids[index] for index in order], [scores[index] for index in order])

    def _candidates(self, row: Row) -> tuple[list[int], list[float], list[int]] | None:
        """Tokens, their scores, and the places of the `top_k` among them, the least probable first."""
        k, values = self._top_k.top_k, row.values
        if type(k) is not int or not 0 < k <= MOST or row.ids is not None or not cuts(self._top_k) or len(values) <= SMALL:
            return None
        divisor = row.divisor
        if self._temperature is not None:
            temperature = self._temperature.temperature
            if divisor is not None or type(temperature) not in (float, int) or not 1e-3 <= temperature <= 1e3:
                return None
            divisor = np.float32(temperature)
        slack = 0.0 if divisor is None else SLACK
        at = self._as_deep_as_last(values, k, slack)
        if at is None:
            at = _at_least_top(values, k, slack)
        if at is None:
            return None
        found = values[at]
        if divisor is not None:
            found /= divisor
        ids, scores = at.tolist(), found.tolist()
        order = sorted(range(len(ids)), key=scores.__getitem__)
        least = scores[order[-k]]
        depth = scores[order[-1]] - scores[order[-min(2 * k, len(order))]]
        self._depth = (depth if len(order) >= 2 * k else depth * 1.25 + 0.5) * float(1.0 if divisor is None else divisor)
        return ids, scores, order[bisect_left(order, least, key=scores.__getitem__) :]

    def _as_deep_as_last(self, values: Floats, k: int, slack: float) -> Ids | None:
        """What `_at_least_top` finds, where the `k`-th largest lies about as far below the largest as in the last step; as few
        passes and calls as there can be."""
        top = float(values.max())
        if not abs(top) < 1e30:
            return None
        bound = top - self._depth
        at: Ids = (values >= bound).nonzero()[0]
        if not k <= len(at) <= 2 * MOST or (slack and not _reaches(values[at], k, slack, bound)):
            return None
        return at


def _at_least_top(values: Floats, k: int, slack: float) -> Ids | None:
    """Where the `k` largest are, what ties with them, and all that are lower by no more than the part `slack`; mostly some
    more. `None`: that is not to be had like this."""
    peaks = Peaks(values)
    if not abs(peaks.top()) < 1e30:
        return None
    bound = float(np.partition(Peaks(values, 4 * MOST).maxima, -k)[-k])
    if not abs(bound) < 1e30:
        return None
    at = peaks.at_least(bound - abs(bound) * slack - 1e-30)
    return at if len(at) <= 4 * MOST else None


def _reaches(found: Floats, k: int, slack: float, bound: float) -> bool:
    """Whether what is close to the `k`-th largest is all above the bound, too."""
    least = float(np.partition(found, -k)[-k])
    return least - abs(least) * slack - 1e-30 > bound


def _top_p(processor: Any, ordered: list[float], n_vocab: int) -> int | None:
    """How many of the scores, which ascend, are removed; `None` where it is too close to say."""
    share, keep, n = processor.top_p, processor.min_tokens_to_keep, len(ordered)
    if type(share) is not float or type(keep) is not int or keep < 1:
        return None
    below = float(np.float32(1 - share))
    if keep >= n:
        return 0
    if below < SMALLEST:
        return None
    top = ordered[-1]
    sums, total, additions = [], 0.0, 0.0
    for place, score in enumerate(ordered):
        term = math.exp(score - top)
        total += term
        additions += term * (n - place)
        sums.append(total)
    limit = below * total
    slack = below * (SOFTMAX_ERROR + sum_error(additions / total)) * total
    removed = bisect_right(sums, limit)
    if removed < n - keep and sums[removed] <= limit + slack:
        return None
    before = sums[removed - 1] if removed else 0.0
    if removed <= n - keep and before > 0 and before >= limit - slack:
        return None
    removed = min(removed, n - keep)
    return None if removed and ordered[removed - 1] == ordered[removed] else removed


def _min_p(processor: Any, ordered: list[float], n_vocab: int) -> int | None:
    """The same for min-p."""
    share, keep = processor.min_p, processor.min_tokens_to_keep
    if type(share) not in (float, int) or keep != 1:
        return None
    if not 1e-30 < share <= 1:
        return 0 if share == 0 else None
    top, log = ordered[-1], math.log(share)
    margin = 2e-5 + 4e-7 * (abs(top) - log)
    low, high = bisect_left(ordered, top + log - margin), bisect_left(ordered, top + log + margin)
    return low if low == high or ordered[low] == top else None
