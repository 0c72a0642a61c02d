"""One request of the webui, on its way through `generate_reply` to `generate()` and back.

The webui hands `generate()` nothing but its arguments, runs it in a thread of its own, and answers every failure with an
empty text. A `WebuiCall` travels along as one of the logits processors: it tells the model that nobody listens any more,
and tells the caller what went wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from ..request import GenerateStats

__all__ = ["Feed", "NobodyListens", "WebuiCall", "current_call", "split_criteria", "take_call"]

GROW = 256
"""Tokens a streamed text has room for beyond what it holds, when it grows."""


class WebuiCall(LogitsProcessor):
    """`stopped()` is asked between decodes. `error` is what `generate()` raised, `stats` what it did; `done(stats, ways)` is
    called at its end, which may be after that of the request. `feed` is what was streamed, `ways` how the text is written.
    Where `is_told`, its maker tells `error`."""

    def __init__(
        self, stop_event: threading.Event | None = None, done: Callable[[GenerateStats, str], None] | None = None
    ) -> None:
        self._stop_event = stop_event
        self._done = done
        self._closed = False
        self.is_told = done is not None
        self.ways = ""
        self.began = False
        self._ended = threading.Event()
        self.error: BaseException | None = None
        self.stats: GenerateStats | None = None
        self.feed: Feed | None = None

    def finish(self, stats: GenerateStats) -> GenerateStats:
        if self.feed is not None and not stats.new_tokens:  # a reader who leaves ends the call without a result
            stats = replace(stats, new_tokens=self.feed.new_tokens)
        self.stats = stats
        if self._done is not None:
            self._done(stats, self.ways)
        return stats

    def close(self) -> None:
        """Nobody listens any more: a decode that runs is the last one."""
        self._closed = True

    def leave(self, limit: float = 10.0) -> None:
        """Close, and wait for the decode that runs: a `generate()` that is still on its way draws from the random numbers of
        the next one."""
        self.close()
        if self.began:
            self._ended.wait(limit)

    def end(self) -> None:
        """`generate()` has returned."""
        self._ended.set()

    def stopped(self) -> bool:
        return self._closed or (self._stop_event is not None and self._stop_event.is_set())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def __deepcopy__(self, memo: dict[int, Any]) -> WebuiCall:
        """The webui copies what a request consists of, and this is the request."""
        return self

    def __repr__(self) -> str:
        return f"WebuiCall(stopped={self.stopped()})"


class NobodyListens(StoppingCriteria):
    """Ends a call whose request is over: the webui itself notices that between two tokens it streams, so not with beams, and
    not where it waits for the whole answer."""

    def __init__(self, call: WebuiCall) -> None:
        self._call = call

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return torch.full((input_ids.shape[0],), self._call.stopped(), device=input_ids.device, dtype=torch.bool)


current_call: ContextVar[WebuiCall | None] = ContextVar("transformers_llamacpp_webui_call", default=None)


def take_call(arguments: dict[str, Any]) -> WebuiCall:
    """Out of `logits_processor`; a fresh one where `generate()` was called by something else than the webui."""
    processors = arguments.get("logits_processor") or ()
    found = [one for one in processors if isinstance(one, WebuiCall)]
    if found:
        arguments["logits_processor"] = LogitsProcessorList([one for one in processors if one not in found])
    return found[0] if found else WebuiCall()


def split_criteria(criteria: Iterable[Any] | None) -> tuple[list[Callable[[torch.Tensor], None]], StoppingCriteriaList]:
    """The callbacks of criteria that are there to stream, and the criteria that are left.

    The webui streams from a stopping criterion with a `callback_func`. Criteria are also called with texts that are given
    up again (beams, and in transformers' loops unverified drafts), so that a reader would see them.
    """
    callbacks, others = [], StoppingCriteriaList()
    for criterion in criteria or ():
        callback = getattr(criterion, "callback_func", None)
        if callback is None:
            others.append(criterion)
        else:
            callbacks.append(callback)
    return callbacks, others


class Feed:
    """A streamer for the webui's callbacks, which take the whole text so far as int64 `(length,)`.

    `hidden`: end tokens that the webui does not know as such, and would show.
    """

    def __init__(self, callbacks: list[Callable[[torch.Tensor], None]], hidden: frozenset[int]) -> None:
        self._callbacks, self._hidden = callbacks, hidden
        self._ids = torch.empty(0, dtype=torch.int64)
        self._length = 0
        self._prompt_seen = False
        self.new_tokens = 0

    def put(self, value: torch.Tensor) -> None:
        """transformers' streamers get the prompt first, then each token."""
        tokens = value.reshape(-1)
        if self._length + len(tokens) > len(self._ids):
            grown = torch.empty(self._length + len(tokens) + max(GROW, self._length), dtype=torch.int64)
            grown[: self._length] = self._ids[: self._length]  # the old one stays as it is for who still reads it
            self._ids = grown
        self._ids[self._length : self._length + len(tokens)] = tokens
        self._length += len(tokens)
        self.new_tokens += len(tokens) if self._prompt_seen else 0
        if self._prompt_seen and not (len(tokens) == 1 and int(tokens[0]) in self._hidden):
            self.show(self._ids[: self._length])
        self._prompt_seen = True

    def show(self, text: torch.Tensor) -> None:
        for callback in self._callbacks:
            callback(text)

    def end(self) -> None:
        """Nothing is kept back."""
