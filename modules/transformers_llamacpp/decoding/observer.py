"""A look at the model's logits on their way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import LogitsProcessor

__all__ = ["LogitsObserver"]


class LogitsObserver(LogitsProcessor):  # type: ignore[misc]
    """Shows `observe` the scores as they are at its place, in front of the others the model's own, and changes nothing."""

    def __init__(self, observe: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self._observe = observe

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._observe(input_ids, scores)
        return scores
