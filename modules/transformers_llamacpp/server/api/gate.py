"""How many texts are written at once, and how many requests may wait for their turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .errors import ApiError

__all__ = ["Gate"]


class Gate:
    """First come, first served. Belongs to one event loop."""

    def __init__(self, parallel: int, max_queue: int) -> None:
        self._free = asyncio.Semaphore(parallel)
        self._parallel, self._max_queue = parallel, max_queue
        self.running = self.waiting = 0

    def admit(self) -> None:
        """Raises `ApiError` (429) where as many wait as may."""
        if self.running >= self._parallel and self.waiting >= self._max_queue:
            raise ApiError(
                429, f"{self.running} texts are being written and {self.waiting} wait: try again later",
                headers={"retry-after": "2"},
            )  # fmt: skip

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._free.release()
