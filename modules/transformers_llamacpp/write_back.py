"""Copies to host memory that are made while nobody waits for the engine.

Texts that were written side by side lie scattered over the buffer, and llama.cpp copies what is scattered slowly: about half a
millisecond a token where V is stored transposed. The next call would wait for it (see `Room.make_lean`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from .errors import LlamaCppError
from .guarded_lock import GuardedLock

__all__ = ["WriteBack"]

REST = 0.1
"""Seconds without a call before it begins."""

BREATH = 0.001
"""Seconds between two copies, for whoever wants the lock."""

logger = logging.getLogger(__name__)


class WriteBack:
    """`copy()`, under the lock, copies one text and says whether there may be more; `wanted()`: nobody runs."""

    def __init__(self, lock: GuardedLock, wanted: Callable[[], bool], copy: Callable[[], bool]) -> None:
        self._lock, self._wanted, self._copy = lock, wanted, copy
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Calls that ran side by side are over. Never waits; a thread that ends by itself does the rest."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="llama.cpp write-back", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads, or the interpreter ends
                return
            self._thread = thread

    def join(self) -> None:
        """Until it has come to its end; for tests."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        time.sleep(REST)
        try:
            while self._wanted():
                with self._lock.without_waiting() as free:
                    if free and self._wanted() and not self._copy():
                        return
                time.sleep(BREATH)
        except LlamaCppError:
            logger.debug("no copy was made ahead", exc_info=True)
