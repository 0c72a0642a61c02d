"""What the routes share, and how a request runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Request

from ..host import ModelHost
from ..limits import ServeOptions
from .errors import ApiError, as_api_error
from .gate import Gate
from .job import Done, Gone, Job, Written
from .mail import PostOffice
from .metrics import Metrics

__all__ = ["ApiState", "state_of"]

T = TypeVar("T")


class ApiState:
    """One for an application. `jobs` are the requests that are being answered."""

    def __init__(self, host: ModelHost, options: ServeOptions) -> None:
        self.host, self.options = host, options
        self.gate = Gate(options.limits.parallel, options.limits.max_queue)
        self.metrics = Metrics(host, self.gate)
        self.jobs: set[Job] = set()
        self._office = PostOffice()
        self._pool = ThreadPoolExecutor(options.limits.parallel, thread_name_prefix="generate")
        self._short = ThreadPoolExecutor(4, thread_name_prefix="tokenize")

    def check_model(self, name: str | None) -> None:
        """A model that is there, but not loaded, does not answer under another's name. Raises `ApiError`."""
        if name and name != self.host.name and name in self.host.sources():
            raise ApiError(
                404, f"the model {name!r} is not loaded" + (f", but {self.host.name!r} is" if self.host.name else ""),
                "model", "model_not_loaded",
            )  # fmt: skip

    @asynccontextmanager
    async def job(self, request: Request) -> AsyncIterator[Job]:
        """A job that is given up when the client goes away, or when the block is left. Raises `ApiError` (429)."""
        self.gate.admit()
        job = Job(self.host.changes, self._office.inbox())
        self.jobs.add(job)
        watcher = asyncio.create_task(_watch(request, job))
        try:
            yield job
        finally:
            watcher.cancel()
            self.jobs.discard(job)
            job.give_up()

    async def quickly(self, job: Job, work: Callable[[Any], T]) -> T:
        """`work(model)` in a thread: tokenizing and the like. Raises what it raises."""

        def using() -> T:
            with self.host.use(job.stop, job.change) as model:
                return work(model)

        return await asyncio.get_running_loop().run_in_executor(self._short, using)

    async def events(self, job: Job, parts: list[Any]) -> AsyncIterator[list[Written | Done]]:
        """Runs the parts, each when it is its turn; their events as they come, the last of each a `Done`. What came while
        nobody looked is given at once.

        Raises `ApiError`, and `Gone` when nobody listens any more.
        """
        for part in parts:
            task = asyncio.create_task(self._turn(job, part))
            job.waiting.add(task)
            task.add_done_callback(job.waiting.discard)
        began, first, left = time.monotonic(), True, len(parts)
        while left:
            found: list[Written | Done] = []
            problem: BaseException | None = None
            for event in await job.inbox.take():
                if isinstance(event, BaseException):
                    problem = event
                    break
                if isinstance(event, Done):
                    left -= 1
                    self.metrics.count(event)
                elif first:
                    first = False
                    self.metrics.first_token.observe(time.monotonic() - began)
                found.append(event)
            if found and not isinstance(problem, Gone):
                yield found
            if isinstance(problem, Gone):
                self.metrics.cancelled.inc()
                raise problem
            if problem is not None:
                raise as_api_error(problem) from problem

    async def _turn(self, job: Job, part: Any) -> None:
        try:
            async with self.gate.turn():
                job.waiting.discard(asyncio.current_task())  # type: ignore[arg-type]
                await asyncio.get_running_loop().run_in_executor(self._pool, part.run)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            job.post(error)

    def stop_all(self) -> None:
        """Every text ends where it is."""
        for job in self.jobs:
            job.finish_early()

    def end_all(self) -> None:
        """Every request ends with an error, because the server does. On the loop's thread."""
        for job in self.jobs:
            job.close()

    def shut_down(self) -> None:
        for pool in (self._pool, self._short):
            pool.shutdown(wait=False, cancel_futures=True)


async def _watch(request: Request, job: Job) -> None:
    """The body was read, so that what comes next is that the client went away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    job.give_up()


def state_of(request: Request) -> ApiState:
    state: ApiState = request.app.state.api
    return state
