"""The engine's lock, which knows whether what it guards was left in the middle."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from .errors import LlamaCppError

__all__ = ["GuardedLock"]

GLANCE, GLANCES = 0.00005, 100
"""Seconds between two looks at who waits, and the most such looks."""


class GuardedLock:
    """A reentrant lock. `interrupted`: an exception that may come between any two lines (`KeyboardInterrupt`, what a signal's
    handler raises) left it, so that the books it guards may be half written."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: deque[int] = deque()
        self.interrupted = False

    @property
    def mine(self) -> bool:
        """The calling thread holds it."""
        # what threading.Condition asks too; an owner noted here would be one more place for an interrupt to come between
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def __enter__(self) -> GuardedLock:
        inside = self.mine
        try:
            if not self._lock.acquire(blocking=False):
                self._wait()
            return self
        except BaseException:  # between having it and the block that gives it back
            if not inside:
                self.let_go()
            raise

    def _wait(self) -> None:
        try:
            self._waiting.append(0)
            self._lock.acquire()
        finally:
            if self._waiting:
                self._waiting.pop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None and not issubclass(kind, LlamaCppError):
                self.interrupted = True
        finally:
            self._lock.release()

    def let_others(self) -> None:
        """For one who takes it again and again, and does not hold it now: those who wait come first. Python's locks go to
        whoever asks first after they are free, which is the one who gave it back."""
        for _ in range(GLANCES):
            if not self._waiting:
                return
            time.sleep(GLANCE)

    def let_go(self) -> None:
        """Where the calling thread must not hold it: what an interrupt left with it is given back."""
        while self.mine:
            self.interrupted = True
            self._lock.release()

    @contextmanager
    def without_waiting(self) -> Iterator[bool]:
        """Whether the lock was free; it is held inside the block then."""
        if not self._lock.acquire(blocking=False):
            yield False
            return
        try:
            yield True
        except BaseException as error:
            self.interrupted = self.interrupted or not isinstance(error, LlamaCppError)
            raise
        finally:
            self._lock.release()
