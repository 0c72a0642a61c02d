"""Which text is being written for which browser tab: one at a time for each."""

from __future__ import annotations

import threading

from ..host import ModelHost
from .writing import PageJob

__all__ = ["Sessions"]


class Sessions:
    """By Gradio's session hash, which a browser tab keeps as long as it is open."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._lock = threading.Lock()
        self._running: dict[str, PageJob] = {}

    def begin(self, session: str | None) -> PageJob | None:
        """`None` where the tab has a text that is being written."""
        job = PageJob(self._host.changes)
        with self._lock:
            return job if self._running.setdefault(session or "", job) is job else None

    def end(self, session: str | None) -> None:
        with self._lock:
            self._running.pop(session or "", None)

    def busy(self, session: str | None) -> bool:
        return (session or "") in self._running

    def stop(self, session: str | None) -> None:
        """The stop button; also what a closed tab does."""
        if (job := self._running.get(session or "")) is not None:
            job.end()
