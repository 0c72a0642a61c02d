"""Which token comes next, and whether it is the drafted one."""

from __future__ import annotations

from typing import Any

import torch

from .drafting.draft import Draft
from .draw import draw_dense
from .numbers import Numbers

__all__ = ["Chooser"]


class Chooser:
    """Chooses as the call's config says: the most probable token, or a sample.

    Where a draft was sampled, speculative sampling (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, algorithm 1)
    keeps the target's distribution: a drafted token is taken with probability `min(1, p / q)`, and in its place one is
    drawn from what `p` has more than `q`. A plain guess is compared with what would have been chosen without it.

    `assistant_ensemble_weight` (transformers 5.24, https://arxiv.org/abs/2604.07622) verifies drafts against
    `weight * p + (1 - weight) * q` instead of `p`: more is accepted, and the result leans towards the assistant.
    """

    def __init__(self, config: Any, numbers: Numbers) -> None:
        self._numbers = numbers
        self._do_sample = bool(config.do_sample)
        self._weight: float | None = getattr(config, "assistant_ensemble_weight", None)

    @property
    def needs_probabilities(self) -> bool:
        """Whether drafts should bring the distributions they were made from."""
        return (self._do_sample and not self._numbers.seeded) or self._weight is not None

    def choose(self, scores: torch.Tensor, draft: Draft, place: int) -> tuple[int, bool]:
        """The token after `draft.tokens[:place]`, given its processed scores `(1, n_vocab)`; whether it is the drafted one."""
        drafted = draft.tokens[place] if place < len(draft) else -1
        q = None if draft.probabilities is None or drafted < 0 else draft.probabilities[place].to(scores.device)
        if not self._do_sample:
            if q is not None and self._weight is not None:
                scores = self._weight * torch.softmax(scores, dim=-1) + (1 - self._weight) * q
            token = int(scores.argmax())
            return token, token == drafted
        p = torch.softmax(scores, dim=-1)
        if q is None or self._numbers.seeded:  # drafts come and go with the time they take: a seed must not depend on them
            token = draw_dense(p[0].cpu().numpy(), self._numbers.next(0))
            return token, token == drafted
        ratio = p[0, drafted] / q[drafted]
        if self._weight is not None:
            ratio = 1 - self._weight + self._weight * ratio
        if self._numbers.next(0) <= float(ratio):
            return drafted, True
        surplus = torch.clamp(p - q, min=0)
        if float(surplus.sum()) <= torch.finfo(surplus.dtype).tiny:
            surplus = p  # p and q are equal but for rounding
        return draw_dense(surplus[0].cpu().numpy(), self._numbers.next(0)), False
