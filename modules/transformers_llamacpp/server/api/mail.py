"""From the threads that write to the event loop that sends: one wake-up for all that is there by then."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

__all__ = ["Inbox", "PostOffice"]

GATHER = 0.001
"""Seconds that the loop waits for more where texts are decoded together: their threads choose tokens one after the other, and
what the loop does in between keeps them from the next decode."""


class PostOffice:
    """Shared by all jobs of an application. Waking a loop is a system call, after which the loop's thread and the caller's
    compete for the interpreter; texts that are decoded together come together, and so one of them wakes it for all.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._full: deque[Inbox] = deque()
        self._called = False
        self._together = False
        """Several texts had something the last time."""

    def inbox(self) -> Inbox:
        """A new one, on the loop's thread."""
        self._loop = asyncio.get_running_loop()
        return Inbox(self)

    def announce(self, inbox: Inbox) -> None:
        """From any thread: there is something in it."""
        self._full.append(inbox)
        if not self._called:
            self._called = True
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the server is down
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        if self._together:
            assert self._loop is not None
            self._loop.call_later(GATHER, self._hand_out)
        else:
            self._hand_out()

    def _hand_out(self) -> None:
        self._called = False  # first: who comes from now on calls again
        inboxes: set[Inbox] = set()
        while self._full:
            inboxes.add(self._full.popleft())
        for inbox in inboxes:
            inbox.wake()
        self._together = len(inboxes) > 1


class Inbox:
    """The events of one job, for one reader, who takes all that have come."""

    def __init__(self, office: PostOffice) -> None:
        self._office = office
        self._events: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, event: Any) -> None:
        """From any thread."""
        self._events.append(event)
        self._office.announce(self)

    def wake(self) -> None:
        """On the loop's thread."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[Any]:
        """Everything that has come, at least one event."""
        while not self._events:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        events = self._events
        return [events.popleft() for _ in range(len(events))]
