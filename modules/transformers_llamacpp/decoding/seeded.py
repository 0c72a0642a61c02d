"""Draws that a seed decides, whatever else the process draws at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from ..errors import InvalidInputError, UnsupportedFeatureError

__all__ = ["LogitsObserver", "SeededDraw", "check_seeds"]


class SeededDraw(LogitsProcessor):  # type: ignore[misc]
    """Goes last: draws the next token of each row itself and leaves it the only one, so that it does not matter what the loop
    draws with (torch's generator belongs to the whole process, and another thread may take numbers out of it at any time).

    The numbers are a function of a row's seed, the place in its text and the token alone: Philox 4x64 (Salmon et al. 2011),
    `argmax(p / e)` with an exponential number `e` for each token, which is a draw from `p`. Hence a text is the same alone and
    in a batch, with drafts and without, and where rounding moves the probabilities a little, the draw seldom changes.
    """

    def __init__(self, seeds: Sequence[int], start: int) -> None:
        """`seeds`: one in `[0, 2**64)` for each row. `start`: columns of the prompt."""
        self.seeds, self._start = list(seeds), start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`scores` `(rows, n_vocab)` become 0 at the token drawn and `-inf` elsewhere."""
        if len(self.seeds) != len(scores):
            raise InvalidInputError(f"seeds has {len(self.seeds)} entries for {len(scores)} rows; one for each is needed")
        place = input_ids.shape[1] - self._start
        probabilities = torch.softmax(scores.float(), dim=-1).cpu().numpy()
        tokens = [
            int(np.argmax(row / _exponential(seed, place, len(row))))
            for seed, row in zip(self.seeds, probabilities, strict=True)
        ]
        chosen = torch.full_like(scores, -torch.inf)
        chosen[torch.arange(len(scores)), torch.tensor(tokens)] = 0
        return chosen


def _exponential(seed: int, place: int, n: int) -> Any:
    numbers = np.random.Generator(np.random.Philox(key=np.array([seed, place], np.uint64))).standard_exponential(n, np.float32)
    return np.maximum(numbers, np.finfo(np.float32).tiny)  # a zero would win whatever its probability


def check_seeds(seeds: Any, config: Any) -> list[int]:
    """`seeds` of `generate()` as a list. Raises `InvalidInputError`, and `UnsupportedFeatureError` for sampled beams."""
    found = list(seeds) if isinstance(seeds, (list, tuple)) else [seeds]
    if not found or not all(isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**64 for seed in found):
        raise InvalidInputError(f"seeds={seeds!r}: whole numbers from 0 to 2**64 - 1 are needed, one for each row")
    if config.do_sample and (config.num_beams or 1) > 1:
        raise UnsupportedFeatureError(
            "sampled beams draw from all beams at once, so that no seed of a row decides: leave out seeds, or do_sample",
            "seeds",
        )
    return found


class LogitsObserver(LogitsProcessor):  # type: ignore[misc]
    """Goes first: shows the model's logits to `observe` before anything changes them."""

    def __init__(self, observe: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._observe = observe

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._observe(input_ids, scores)
        return scores
