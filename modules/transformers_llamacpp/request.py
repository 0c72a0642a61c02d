"""A request: what one `generate()` call wants and what it has cost so far.

Kept in a context variable, so that calls on several threads, and a call inside a call, each have their own.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .engine import Progress, Usage
from .reuse import Reuse

NOTHING = Reuse("none", "nothing was generated yet")

__all__ = ["GenerateStats", "Request", "current_request"]


@dataclass(frozen=True, slots=True)
class GenerateStats:
    """What one `generate()` call did. Tokens are counted over all rows, padding left out.

    `prompt_tokens = reused_tokens + (tokens of the prompt that were evaluated)`; `evaluated_tokens` counts prompt and
    generation; `new_tokens` counts generated tokens up to and including the end token. With guidance the first three
    count both sides. `drafted_tokens` were guessed and checked, `accepted_tokens` of them taken; what an assistant model
    evaluates for its guesses is counted nowhere else. Seconds are wall time; `generate_seconds` starts when the prompt
    is done.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    evaluated_tokens: int = 0
    new_tokens: int = 0
    decode_calls: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_seconds: float = 0.0
    generate_seconds: float = 0.0
    reuse: Reuse = NOTHING
    """Where the beginning of the first row came from: "memory" (the KV buffer), "host" (host memory), "disk" (`state_dir`),
    "shifted" (moved chunks), "checkpoint" (of a memory that cannot be rewound), or "none". `reuse.reason` says why, and why
    not more."""


@dataclass(slots=True)
class Request:
    """Mutable while the call runs; `stats()` at its end."""

    prompt_progress: Progress | None = None
    usage: Usage = field(default_factory=Usage)
    started: float = field(default_factory=time.perf_counter)
    prompt_done: float | None = None
    prompt_tokens: int = 0
    prompt_evaluated: int = 0
    given: Any = None
    """The passed-in cache."""
    mask: Any = None
    """The attention mask of the input, passed in or made from its padding."""
    negative: tuple[Any, Any] = (None, None)
    """The negative prompts and their attention mask, as they were passed."""
    cold: bool = False
    """Nothing of earlier calls may be reused: the rows fit into the cells only where they share what they begin with."""
    cells_full: Any = None
    """The criterion that ends a beam search when the KV cells are full (`decoding/room.py`), where they may get full."""
    numbers: Any = None
    """The random numbers that sampling draws with (`decoding/numbers.py`)."""
    n_batch: int | None = None
    input_length: int = 0
    caches: list[Any] = field(default_factory=list)
    """Caches that `generate()` made itself."""
    generation_config: Any = None
    tokenizer: Any = None
    """The caller's, for what transformers hands no tokenizer to when the decoding function is ours."""
    hidden_known: list[int] | None = None
    """For each row, the leading tokens of the prompt whose hidden states need no evaluation."""
    observe_logits: Any = None
    """Shown the model's logits of every step."""
    guidance: Any = None
    """The unconditional side of the call (`decoding/guidance.py`)."""
    want_layers: tuple[int, ...] = ()
    """The layers whose inputs a decoding method wants from the next forward pass, at the columns whose logits it wants."""
    layers: list[npt.NDArray[np.float32]] | None = None
    """The answer: for each of them float32 `(rows, kept columns, width)`."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def prompt_finished(self, tokens: int) -> None:
        """The first forward pass is done; `tokens` is what all rows hold now."""
        self.prompt_done = time.perf_counter()
        self.prompt_tokens = tokens
        self.prompt_evaluated = self.usage.evaluated_tokens

    def stats(self, new_tokens: int) -> GenerateStats:
        end = time.perf_counter()
        prompt_done = end if self.prompt_done is None else self.prompt_done
        return GenerateStats(
            prompt_tokens=self.prompt_tokens,
            reused_tokens=self.prompt_tokens - self.prompt_evaluated,
            evaluated_tokens=self.usage.evaluated_tokens,
            new_tokens=new_tokens,
            decode_calls=self.usage.decode_calls,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            prompt_seconds=prompt_done - self.started,
            generate_seconds=end - prompt_done,
            reuse=self._reuse(),
        )

    def _reuse(self) -> Reuse:
        for reuse in self.usage.reuse:
            return reuse
        if self.prompt_tokens > self.prompt_evaluated:
            return Reuse("memory", "the cache that was passed in was in the KV buffer")
        return Reuse("none", "nothing was evaluated")


def outside(progress: Progress | None) -> Progress | None:
    """`progress`, to be called as if no `generate()` ran: a forward pass made there is no part of that call."""
    if progress is None:
        return None

    def called(evaluated: int, total: int) -> object:
        token = current_request.set(None)
        try:
            return progress(evaluated, total)
        finally:
            current_request.reset(token)

    return called


current_request: ContextVar[Request | None] = ContextVar("transformers_llamacpp_request", default=None)
