"""A function with a callback becomes an iterator: it runs in a thread of its own and hands over through a queue."""

from queue import Queue
from threading import Thread

import modules.shared as shared
from modules.logging_colors import logger


class StopNowException(Exception):
    """Thrown into the thread, at its next callback, once nobody wants any more."""


class Iteratorize:
    def __init__(self, func, args=None, kwargs=None, callback=None):
        self.queue = Queue()
        self.end = object()
        self.stop_now = False
        self.thread = Thread(target=self._run, args=(func, args or [], kwargs or {}))
        self.thread.start()

    def _run(self, func, args, kwargs):
        try:
            func(*args, callback=self._put, **kwargs)
        except StopNowException:
            pass
        except Exception:
            logger.exception("The thread that generates failed")
        self.queue.put(self.end)

    def _put(self, value):
        if self.stop_now or shared.stop_everything:
            raise StopNowException
        self.queue.put(value)

    def __iter__(self):
        return self

    def __next__(self):
        value = self.queue.get()
        if value is self.end:
            raise StopIteration
        return value

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stop_now = True  # and nobody waits for the thread
