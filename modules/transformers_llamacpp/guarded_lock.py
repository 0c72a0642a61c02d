"""The engine's lock, which knows whether what it guards was left in the middle."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

__all__ = ["GuardedLock"]


class GuardedLock:
    """A reentrant lock. `interrupted`: an exception that may come between any two lines (`KeyboardInterrupt`, `SystemExit`)
    left it, so that the books it guards may be half written."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.interrupted = False

    @property
    def mine(self) -> bool:
        """The calling thread holds it."""
        # what threading.Condition asks too; an owner noted here would be one more place for an interrupt to come between
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]

    def __enter__(self) -> GuardedLock:
        self._lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception):
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
        finally:
            self._lock.release()
