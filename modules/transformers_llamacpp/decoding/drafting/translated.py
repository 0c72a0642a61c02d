"""Drafts of an assistant with another vocabulary: Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative
Decoding Algorithms for Heterogeneous Vocabularies", https://arxiv.org/abs/2502.05202.

The text goes over as text: the target's tokens are decoded and encoded for the assistant, its draft is decoded and encoded
back. What comes back is a plain guess, also where the target samples: verifying a guess needs no probabilities to keep
the target's distribution.
"""

from __future__ import annotations

from .draft import EMPTY, Draft, Drafter
from .translation import Translator

__all__ = ["TranslatedDrafter"]


class TranslatedDrafter:
    """A `Drafter` around the assistant's own; `limit` counts the assistant's tokens and bounds the target's."""

    def __init__(self, drafter: Drafter, translator: Translator) -> None:
        self._drafter, self._translator = drafter, translator

    def prepare(self, tokens: list[int]) -> None:
        self._drafter.prepare(self._translator.to_assistant(tokens))

    def draft(self, tokens: list[int], limit: int) -> Draft:
        theirs = self._translator.to_assistant(tokens)
        if not theirs:
            return EMPTY
        drafted = self._drafter.draft(theirs, limit)
        if not len(drafted):
            return EMPTY
        return Draft(self._translator.to_target(tokens, drafted.tokens)[:limit])

    def verified(self, drafted: int, accepted: int) -> None:
        """Counted in the target's tokens, which say nothing about the assistant's."""

    def close(self) -> None:
        self._drafter.close()
