"""Who goes on with a cache at the moment, and how it ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from .cache_row import Row
from .engine import Engine
from .errors import ClosedError, InvalidInputError

__all__ = ["CacheLife"]

IN_USE = (
    "another thread goes on with this cache, which one call can do at a time: wait for that call, or give each a copy that was "
    "made before, copy.deepcopy(cache), which shares all cells"
)


class CacheLife:
    """A cache belongs to the thread whose call goes on with it, for as long as the call runs."""

    _engine: Engine
    _rows: list[Row]

    def _begin_life(self) -> None:
        self._closed = False
        self._user: int | None = None
        self._guard = threading.Lock()
        self._finalizer = weakref.finalize(self, _leave_behind, self._engine, self._rows)
        self._finalizer.atexit = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """While a call of this thread goes on with the cache. Raises `InvalidInputError` where another thread does, and then
        nothing has changed."""
        me, outer = threading.get_ident(), None
        try:
            with self._guard:
                self._check_user()
                outer, self._user = self._user, me
            yield
        finally:
            with self._guard:
                if self._user == me and outer is None:
                    self._user = None
            if self._closed and self._user is None:
                self._give_back()

    def close(self) -> None:
        """Give the rows back; idempotent. Any other use afterwards is a `ClosedError`, also in a call of another thread that
        goes on with it now; that gives them back as it ends."""
        with self._guard:
            self._closed = True
            used = self._user not in (None, threading.get_ident())
        if not used:
            self._give_back()

    def _give_back(self) -> None:
        self._engine.release([row.sequence for row in self._rows])
        self._finalizer.detach()  # not before: an interrupt must not lose them
        self._rows.clear()
        self._columns = 0

    def _alive(self) -> None:
        """It can be used, and by this thread."""
        self._open()
        self._check_user()

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("this cache was closed; make a new one with LlamaCppCache(model)")

    def _check_user(self) -> None:
        if self._user not in (None, threading.get_ident()):
            raise InvalidInputError(IN_USE)


def _leave_behind(engine: Engine, rows: Iterable[Row]) -> None:
    engine.pool.release_later([row.sequence for row in rows])
