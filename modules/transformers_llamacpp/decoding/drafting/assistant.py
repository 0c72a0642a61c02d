"""Drafts of an assistant model: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
https://arxiv.org/abs/2211.17192.

The assistant is asked one forward pass at a time, without a `generate()` of its own. It keeps its place in the text: what
it drafted and what was taken of it is in its cache already.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...cache import LlamaCppCache
from ...engine import Usage
from ...rows import Feed
from .draft import EMPTY, Draft
from .sampler import DraftSampler

__all__ = ["AssistantDrafter", "LlamaCppReader", "Reader"]


class Reader(Protocol):
    """An assistant as a drafter sees it: something that reads a text and says what comes next."""

    @property
    def n_ctx(self) -> int:
        """The most tokens it can read."""
        ...

    @property
    def n_vocab(self) -> int:
        """It reads ids below this."""
        ...

    def read(self, tokens: npt.NDArray[np.int32]) -> torch.Tensor:
        """The logits after `tokens`, float32 `(n_vocab,)` on the CPU. What it read before is a prefix of them or not; only
        the difference costs anything."""
        ...

    def step(self, token: int) -> torch.Tensor:
        """The logits after one more token."""
        ...

    def close(self) -> None: ...


MUCH = 16
"""New tokens that are read before a draft rather than with it."""


@dataclass(slots=True)
class AssistantDrafter:
    """A `Drafter` that asks a model.

    A draft ends with `limit` tokens, with an end token, or with the first token the model gave less than `threshold`
    (transformers' `assistant_confidence_threshold`). Where the text is longer than the assistant can read, or has a token
    that its vocabulary lacks, nothing is drafted any more.
    """

    reader: Reader
    sampler: DraftSampler
    threshold: float
    ends: Collection[int]
    _known: int = 0

    def prepare(self, tokens: list[int]) -> None:
        if len(tokens) - self._known > MUCH and self._can_read(tokens):
            self.reader.read(np.array(tokens[:-1], np.int32))
            self._known = len(tokens) - 1

    def _can_read(self, tokens: list[int]) -> bool:
        return 0 < len(tokens) < self.reader.n_ctx and max(tokens) < self.reader.n_vocab

    def draft(self, tokens: list[int], limit: int) -> Draft:
        if not self._can_read(tokens):
            return EMPTY
        limit = min(limit, self.reader.n_ctx - len(tokens))
        text, drafted = list(tokens), []
        distributions: list[torch.Tensor] = []
        logits = self.reader.read(np.array(tokens, np.int32))
        self._known = len(tokens)
        while True:
            token, confidence, probabilities = self.sampler.pick(text, logits)
            drafted.append(token)
            text.append(token)
            if probabilities is not None:
                distributions.append(probabilities)
            if len(drafted) >= limit or confidence < self.threshold or token in self.ends:
                return Draft(drafted, torch.stack(distributions) if distributions else None)
            logits = self.reader.step(token)

    def verified(self, drafted: int, accepted: int) -> None:
        """What was taken is in the next text, and the reader finds it in its cache."""

    def close(self) -> None:
        self.reader.close()


class LlamaCppReader:
    """Reads with a `LlamaCppForCausalLM`, in a cache of its own that starts from what that model still has in memory."""

    def __init__(self, model: Any) -> None:
        self._cache = LlamaCppCache(model)
        self._bookmark: Any = None
        self.n_ctx: int = model.engine.n_ctx
        self.n_vocab: int = model.config.vocab_size

    def read(self, tokens: npt.NDArray[np.int32]) -> torch.Tensor:
        cache = self._cache
        if cache.get_seq_length():
            known = cache.matches(tokens[None].astype(np.int64), None)
            cache.go_back(min(known, len(tokens) - 1), self._bookmark)
            self._bookmark = None
        logits = self._feed(tokens[cache.get_seq_length() :])
        self._bookmark = cache.bookmark()
        return logits

    def step(self, token: int) -> torch.Tensor:
        return self._feed(np.array([token], np.int32))

    def _feed(self, tokens: npt.NDArray[np.int32]) -> torch.Tensor:
        n = len(tokens)
        logits, _ = self._cache.feed(Feed(tokens[None], None, None, np.array([n - 1]), 1, n), None, Usage())
        return torch.from_numpy(logits[0, 0])

    def close(self) -> None:
        self._cache.drop(self._bookmark)
        self._bookmark = None
        self._cache.close()
