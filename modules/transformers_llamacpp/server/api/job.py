"""One request on its way: it may wait, run, be given up by its client, or lose its model."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from .errors import ApiError, model_gone
from .mail import Inbox

__all__ = ["Done", "Gone", "Job", "Written"]


class Written:
    """An event of a job: a piece of text of choice `index`; `reason` is set with the last one."""

    __slots__ = ("index", "piece", "reason")

    def __init__(self, index: int, piece: Any, reason: str = "") -> None:
        self.index, self.piece, self.reason = index, piece, reason


class Done:
    """The last event of a part of prompt `number`: what `generate()` did (`None` where it did not come to an end), and the
    tokens that were written."""

    __slots__ = ("number", "prompt_tokens", "stats", "written")

    def __init__(self, number: int, prompt_tokens: int, stats: Any, written: int) -> None:
        self.number, self.prompt_tokens, self.stats, self.written = number, prompt_tokens, stats, written


class Gone(Exception):
    """The client went away."""


class Job:
    """`stop` ends everything that runs for the request within one decode. `change`: which model it was written for."""

    def __init__(self, change: int, inbox: Inbox) -> None:
        self.change = change
        self.inbox = inbox
        self.stop = threading.Event()
        self.given_up = False
        self.closing = False
        self.stopped = False
        self.waiting: set[asyncio.Task[None]] = set()
        """Parts that wait for their turn."""

    def give_up(self) -> None:
        """Nobody listens any more. On the loop's thread."""
        self.given_up = True
        self.stop.set()
        for task in self.waiting:
            task.cancel()
        self.inbox.put(Gone())

    def finish_early(self) -> None:
        """Somebody wants the text as far as it is."""
        self.stopped = True
        self.stop.set()

    def close(self) -> None:
        """The server ends."""
        self.closing = True
        self.stop.set()

    @property
    def lost_model(self) -> bool:
        """`stop` was set by who changed the model."""
        return self.stop.is_set() and not self.given_up and not self.stopped

    def check_model(self) -> None:
        """Raises `ApiError` when the model was taken away."""
        if self.lost_model:
            raise model_gone() if not self.closing else ApiError(503, "the server is shutting down", code="shutting_down")

    def post(self, event: Any) -> None:
        """From any thread."""
        self.inbox.put(event)
