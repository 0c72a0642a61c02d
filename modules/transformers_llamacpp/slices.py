"""Calls that do not fit into the buffer together take turns, long enough that the changing costs little."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Slices"]

WORTH = 20
"""A turn lasts so many times as long as it took to bring its call's sequences in."""

SHORTEST, LONGEST = 0.05, 2.0
"""Seconds; bounds of that."""

POLL = 0.005
"""Seconds between two looks."""


class Slices:
    """First come, first served. `pushed_out`: when a running call last lost its place (`time.perf_counter`); `others`:
    whether other calls run."""

    def __init__(self, pushed_out: Callable[[], float], others: Callable[[], bool]) -> None:
        self._pushed_out, self._others = pushed_out, others
        self._order: deque[object] = deque()
        self._seconds = SHORTEST

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until those in the buffer had their time; inside the block the caller brings itself in. Not under the engine's
        lock."""
        me = object()
        try:
            self._order.append(me)
            # however many new calls push others out meanwhile
            latest = time.perf_counter() + LONGEST * len(self._order)
            while self._others() and (now := time.perf_counter()) < latest:
                if self._order[0] is me and now >= self._pushed_out() + self._seconds:
                    break
                time.sleep(POLL)
            began = time.perf_counter()
            yield
            self._seconds = min(max(WORTH * (time.perf_counter() - began), SHORTEST), LONGEST)
        finally:
            if me in self._order:
                self._order.remove(me)
