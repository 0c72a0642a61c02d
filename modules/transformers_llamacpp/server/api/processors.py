"""Logits processors for the fields that transformers has no processor for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

__all__ = ["LogitBias", "RangePenalty", "WrittenPenalty"]


class LogitBias(LogitsProcessor):  # type: ignore[misc]
    """Adds a number to the scores of some tokens. `bias`: token id -> number; ids in `[0, n_vocab)`."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = torch.tensor(list(bias), dtype=torch.int64)
        self._values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_add(1, self._ids, self._values.to(scores.dtype).expand(len(scores), -1))


class WrittenPenalty(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's presence and frequency penalties, over what was written after the prompt of `start` tokens:
    `score -= presence * (count > 0) + frequency * count`."""

    def __init__(self, presence: float, frequency: float, start: int) -> None:
        self._presence, self._frequency, self._start = presence, frequency, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = input_ids[:, self._start :]
        if not written.shape[1]:
            return scores
        changed = scores.clone()
        for row, tokens in enumerate(written):  # of the vocabulary, only what was written: it is much the smaller part
            known, counts = torch.unique(tokens, return_counts=True)
            changed[row, known] -= self._presence + self._frequency * counts.to(scores.dtype)
        return changed


class RangePenalty(LogitsProcessor):  # type: ignore[misc]
    """The repetition penalty over the last `length` tokens only."""

    def __init__(self, penalty: float, length: int) -> None:
        self._penalty, self._length = RepetitionPenaltyLogitsProcessor(penalty), length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self._penalty(input_ids[:, -self._length :], scores)
        return changed
