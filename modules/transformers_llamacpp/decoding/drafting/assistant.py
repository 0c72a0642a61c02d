"""Drafts of an assistant model: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding",
https://arxiv.org/abs/2211.17192.

The assistant is asked one forward pass at a time, without a `generate()` of its own. It keeps its place in the text: what
it drafted and what was taken of it is in its cache already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ...batch import Job
from ...engine import Engine, Usage
from ...errors import CacheFullError
from ...rows import Feed, feed
from ...sequence import Sequence, common_prefix
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
    """Reads with a `LlamaCppForCausalLM`, in a sequence of its own that starts from what that model still has in memory.

    Where the memory cannot be rewound (recurrent states, sliding windows) a copy by reference is kept of what was read, and
    a draft that came to nothing is gone back from.
    """

    def __init__(self, model: Any) -> None:
        self._engine: Engine = model.engine
        self._sequence: Sequence | None = None
        self._read: Sequence | None = None
        limits = self._engine.backend.limits
        # what does not fit is not drafted, rather than an error; a context that slides has no end
        slides = self._engine.pool.keeping.n_sink is not None
        self.n_ctx = 1 << 31 if slides else min(self._engine.n_ctx, limits.n_cells)
        self.n_vocab = limits.n_vocab

    def read(self, tokens: npt.NDArray[np.int32]) -> torch.Tensor:
        engine = self._engine
        self._go_back(tokens)
        new = tokens[0 if self._sequence is None else len(self._sequence.tokens) :]
        n = len(new)
        answer = feed(engine, [self._sequence], Feed(new[None], None, None, np.array([n - 1]), 1, n), Usage())
        self._sequence = answer.sequences[0]
        limits = engine.backend.limits
        if limits.stateful:
            with contextlib.suppress(CacheFullError):  # then going back means reading again
                self._read = engine.fork(self._sequence, [self._sequence])
        return torch.from_numpy(answer.logits[0, 0])

    def step(self, token: int) -> torch.Tensor:
        assert self._sequence is not None, "a text is read before anything is added to it"
        job = Job(self._sequence, np.array([token], np.int32), np.ones(1, np.int8))
        self._engine.evaluate([job], Usage())
        assert job.logits is not None
        return torch.from_numpy(job.logits[0])

    def close(self) -> None:
        self._engine.discard([one for one in (self._read,) if one is not None])
        self._engine.release([one for one in (self._sequence,) if one is not None])
        self._sequence = self._read = None

    def _go_back(self, tokens: npt.NDArray[np.int32]) -> None:
        """Keep what `tokens` begins with, all but its last token at most."""
        sequence, engine = self._sequence, self._engine
        if sequence is None:
            return
        known = common_prefix(sequence.tokens, tokens, len(tokens) - 1)
        if self._read is not None:
            read = self._read.tokens
            if known < len(sequence.tokens) and common_prefix(read, tokens, len(tokens) - 1) == len(read):
                engine.discard([sequence])
                self._sequence = sequence = self._read
                known = len(sequence.tokens)
            else:
                engine.discard([self._read])
            self._read = None
        engine.truncate(sequence, known)
