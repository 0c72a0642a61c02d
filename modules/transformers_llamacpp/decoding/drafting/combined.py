"""Several drafters for one text, each at its own pace."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from .draft import EMPTY, Draft, Drafter

__all__ = ["Drafters", "PacedDrafter", "Pacing", "Schedule"]


class Pacing(Protocol):
    """See `pace.Pace`."""

    def limit(self, wanted: int) -> int: ...
    def observe_plain(self, seconds: float) -> None: ...
    def observe(self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float) -> None: ...


class Schedule:
    """transformers' `num_assistant_tokens_schedule`: how many tokens a drafter wants to draft next.

    "constant"; or "heuristic" and "heuristic_transient": 2 more after a draft that was taken whole, else 1 less.
    """

    def __init__(self, tokens: int, schedule: str) -> None:
        self.tokens, self._changes = tokens, schedule != "constant"

    def update(self, drafted: int, accepted: int) -> None:
        if self._changes and drafted:
            self.tokens = self.tokens + 2 if accepted == drafted else max(1, self.tokens - 1)


class PacedDrafter:
    """A drafter, how many tokens it is to draft, and the pace that says whether that pays.

    `keep(tokens)` is told at the end what the schedule came to.
    """

    def __init__(
        self, drafter: Drafter, schedule: Schedule, pace: Pacing, keep: Callable[[int], None] | None = None
    ) -> None:
        self._drafter, self._schedule, self._pace, self._keep = drafter, schedule, pace, keep
        self._seconds = 0.0

    def draft(self, tokens: list[int], limit: int) -> Draft:
        limit = min(limit, self._pace.limit(min(limit, self._schedule.tokens)))
        if limit < 1:
            return EMPTY
        self._drafter.prepare(tokens)
        started = time.perf_counter()
        draft = self._drafter.draft(tokens, limit)
        self._seconds = time.perf_counter() - started
        return draft

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:
        """The draft was verified in a forward pass that took so long."""
        self._drafter.verified(drafted, accepted)
        self._schedule.update(drafted, accepted)
        self._pace.observe(drafted, accepted, self._seconds, seconds)

    def plain_step(self, seconds: float) -> None:
        self._pace.observe_plain(seconds)

    def close(self) -> None:
        self._drafter.close()
        if self._keep is not None:
            self._keep(self._schedule.tokens)


class Drafters:
    """Asks each in turn; the first that has an idea drafts. An n-gram costs nothing, so it comes before a model."""

    def __init__(self, drafters: list[PacedDrafter]) -> None:
        self._drafters = drafters
        self._last: PacedDrafter | None = None

    def draft(self, tokens: list[int], limit: int) -> Draft:
        for drafter in self._drafters if limit > 0 else ():
            draft = drafter.draft(tokens, limit)
            if len(draft):
                self._last = drafter
                return draft
        self._last = None
        return EMPTY

    def verified(self, drafted: int, accepted: int, seconds: float) -> None:
        """What came of the last draft, and how long the forward pass took that verified it (or made one token)."""
        if self._last is not None:
            self._last.verified(drafted, accepted, seconds)
            return
        for drafter in self._drafters:
            drafter.plain_step(seconds)

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()
