"""One text for the page, written on a thread of its own by what answers requests to the API, as an iterator of progress."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from transformers import LogitsProcessor

from ...decoding.observer import LogitsObserver
from ...errors import InvalidInputError, LlamaCppError
from .. import chat
from ..api.errors import ApiError, model_gone, without_folders
from ..api.job import Done, Written
from ..api.plan import Plan, make_plan
from ..api.prompts import chat_prompt, chat_text, completion_prompts
from ..api.schemas import ChatRequest, CompletionRequest
from ..api.work import Part
from ..chat import INTERVAL
from ..host import ModelHost
from ..limits import ServeOptions
from .cells import Cells, look
from .trace import Streamed, Trace

__all__ = ["PageJob", "Progress", "as_request", "chat_text_of", "write"]

LOOK_EVERY = 0.4
"""Seconds between two looks at the KV cells."""


@dataclass(frozen=True, slots=True)
class Progress(chat.Progress):
    """The same for a text of the page. `evaluated`, `total`: tokens of the prompt that were and must be evaluated, what is
    reused not counted; `seconds` since the first token. `leading`: the text is that of the beam that leads now."""

    leading: bool = False


class PageJob:
    """What `api/job.py` is for a request: `stop()` ends the text within one decode. Any thread may call it."""

    def __init__(self, change: int) -> None:
        self.change = change
        self.stop = threading.Event()
        self.stopped = False
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cut = False
        """The context, not the caller, limits the text."""
        self.reason = ""
        self.trace: Trace | None = None
        self.cells: Cells | None = None

    def end(self) -> None:
        self.stopped = True
        self.stop.set()

    def check_model(self) -> None:
        """Raises `ApiError` where it was not the user who ended it."""
        if self.stop.is_set() and not self.stopped:
            raise model_gone()

    def post(self, event: Any) -> None:
        self.events.put(event)


def as_request(kind: str, fields: Mapping[str, Any]) -> Any:
    """A request to the API, checked as one. `kind`: "chat" or "completion". Raises `InvalidInputError` that names the field."""
    try:
        return (ChatRequest if kind == "chat" else CompletionRequest)(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInputError(f"{'.'.join(map(str, first['loc'][:2]))}: {first['msg']}") from None


def write(host: ModelHost, kind: str, fields: Mapping[str, Any], top: int, job: PageJob) -> Generator[Progress]:
    """Runs the request; `top`: alternatives to keep for each token. Closing the iterator, or `job.end()`, ends the call.

    Raises `LlamaCppError`, with what the page is to say.
    """
    request = as_request(kind, fields)
    thread = threading.Thread(target=_work, args=(host, kind, request, top, job), daemon=True)
    thread.start()
    progress, first = Progress(), 0.0
    try:
        while not progress.finish:
            progress = _gather(progress, job)
            if progress.new_tokens:
                first = first or time.monotonic() - INTERVAL
                progress = replace(progress, seconds=time.monotonic() - first)
            yield progress
    finally:
        if not progress.finish:
            job.end()  # nobody listens any more
        thread.join()


def _work(host: ModelHost, kind: str, request: Any, top: int, job: PageJob) -> None:
    try:
        with host.use(job.stop, job.change) as model:
            prompts = [chat_prompt(model, request)] if kind == "chat" else completion_prompts(model, request)
            plan = make_plan(request, model, prompts, ServeOptions(chat_templates=True), default_tokens=request.max_tokens)
            job.cut = plan.max_tokens[0] < request.max_tokens
            if plan.beams and top:
                plan.logprobs = top
        _PagePart(host, job, plan, top).run()
    except BaseException as error:
        job.post(error)


def _gather(progress: Progress, job: PageJob) -> Progress:
    """Waits for the next event, then takes all that come within `INTERVAL`. Raises what the thread raised."""
    until = None
    while True:
        try:
            # Never without a timeout: on Windows Ctrl-C cannot interrupt such a wait.
            event = job.events.get(timeout=0.2 if until is None else max(0.0, until - time.monotonic()))
        except queue.Empty:
            if until is None:
                continue
            return progress
        until = until or time.monotonic() + INTERVAL
        if isinstance(event, BaseException):
            raise _told(event) from event
        progress = _after(progress, event, job)
        if progress.finish:
            return progress


def _after(progress: Progress, event: Any, job: PageJob) -> Progress:
    if isinstance(event, Written):
        job.reason = event.reason or job.reason
        text = event.piece.text if progress.leading else progress.text + event.piece.text
        return replace(progress, text=text, leading=False)
    if isinstance(event, Done):
        ended = "end" if job.reason == "stop" else "context" if job.cut else "length"
        finish = "stopped" if job.stopped else ended
        return replace(progress, finish=finish, stats=event.stats, new_tokens=event.written, leading=False)
    return replace(progress, **event)


def _told(error: BaseException) -> BaseException:
    """What the page says: a sentence without folders for what was foreseen, the error itself for what was not."""
    if isinstance(error, ApiError):
        return LlamaCppError(error.message)
    if isinstance(error, (ValueError, TypeError, NotImplementedError)) and not isinstance(error, LlamaCppError):
        return LlamaCppError(without_folders(str(error)))
    return error


class _PagePart(Part):
    """A part of a request of which the page sees everything."""

    def __init__(self, host: ModelHost, job: PageJob, plan: Plan, top: int) -> None:
        super().__init__(host, job, plan, 0, range(1))  # type: ignore[arg-type]  # a job of the page has what a part needs
        self._job, self._top, self._looked = job, top, 0.0

    def _watch(self, model: Any, arguments: dict[str, Any]) -> None:
        trace = self._job.trace = Trace(self._top, model.native.vocab.piece)
        length = len(self.prompt.ids)

        def prompt_progress(evaluated: int, total: int) -> bool:
            self._say(model, evaluated=evaluated, total=total)
            return not self._job.stop.is_set()

        arguments["prompt_progress"] = prompt_progress
        if self.plan.beams:
            arguments["logits_processor"].append(_Leading(model, length, lambda **what: self._say(model, **what)))
            return
        arguments["streamer"] = Streamed(
            arguments["streamer"], trace, length, lambda tokens: self._say(model, new_tokens=tokens)
        )
        if self._top:
            arguments["observe_logits"] = trace.observe
            if arguments.get("guidance_scale") not in (None, 1):
                arguments["logits_processor"].append(LogitsObserver(trace.observe_guided))

    def _post(self, row: int, piece: Any, reason: str) -> None:
        if self.plan.beams and self._job.trace is not None:
            for score in piece.tokens:
                self._job.trace.put_scored(score.token, score.logprob, [(other, value) for other, _, value in score.top])
        super()._post(row, piece, reason)

    def _say(self, model: Any, **what: Any) -> None:
        self._job.post(what)
        if time.monotonic() - self._looked > LOOK_EVERY:
            self._looked = time.monotonic()
            self._job.cells = look(model.engine) or self._job.cells


class _Leading(LogitsProcessor):  # type: ignore[misc]
    """Shows the text of the first row, which is the beam that leads, and changes nothing."""

    def __init__(self, model: Any, length: int, say: Callable[..., None]) -> None:
        self._tokenizer, self._length, self._say = model.tokenizer, length, say
        self._said = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens = input_ids.shape[1] - self._length
        if tokens > 0 and time.monotonic() - self._said > INTERVAL:
            self._said = time.monotonic()
            text = self._tokenizer.decode(input_ids[0, self._length :], skip_special_tokens=True)
            self._say(text=text, leading=True, new_tokens=tokens)
        return scores


def chat_text_of(host: ModelHost, request: Any) -> str:
    """The text that the chat `request` becomes. Raises `LlamaCppError`."""
    with host.use(threading.Event()) as model:
        try:
            return str(chat_text(model, request))
        except ApiError as error:
            raise _told(error) from error
