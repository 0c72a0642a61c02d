"""Server-sent events as OpenAI's clients read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .answers import Answer
from .errors import ApiError
from .job import Done, Gone, Written
from .writer import Piece

__all__ = ["EventStream"]

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

Events = Sequence[Written | Done]

MARK = "\0"
"""Stands for the text in a chunk that is to become a frame; JSON spells it as nothing else."""

quoted = json.encoder.encode_basestring
"""A string as JSON, all characters as they are: what `json.dumps` does with one, without the way there."""


class EventStream(Response):
    """The chunks of an answer whose first events are there already, so that what is wrong with a request was told as a status.
    Whatever ends the response, `stack` is closed."""

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, first: Events, events: AsyncIterator[Events], stack: AsyncExitStack) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(HEADERS)
        self._lines, self._first, self._events, self._stack = _Lines(answer), first, events, stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                if text := self._lines.of(self._first):
                    await send(_body(text))
                async for events in self._events:
                    if text := self._lines.of(events):
                        await send(_body(text))
                end = self._lines.end()
            except ApiError as error:  # the status is out already
                end = _line(error.body())
            except (Gone, OSError):  # nobody reads any more; some servers say so when one writes
                return
            await send({**_body(end), "more_body": False})


class _Lines:
    """From events to lines. Most of them differ in nothing but a piece of text, so that the rest is written once."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._frames: dict[int, tuple[str, str]] = {}

    def of(self, events: Events) -> str:
        return "".join(self._line(event) for event in _joined(events))

    def _line(self, event: Written | Done) -> str:
        if isinstance(event, Written) and not event.reason and not event.piece.tokens:
            frame = self._frames.get(event.index)
            if frame is not None:
                return f"{frame[0]}{quoted(event.piece.text)}{frame[1]}"
        lines = "".join(map(_line, self._answer.chunks(event)))
        if isinstance(event, Written) and event.index not in self._frames and not self._answer.plan.tells_logprobs:
            (chunk,) = self._answer.chunks(Written(event.index, Piece(MARK)))
            begin, _, end = _line(chunk).partition(quoted(MARK))
            self._frames[event.index] = begin, end
        return lines

    def end(self) -> str:
        usage = _line(self._answer.usage_chunk()) if self._answer.include_usage else ""
        return f"{usage}data: [DONE]\n\n"


def _joined(events: Events) -> Iterator[Written | Done]:
    """Pieces of one text that follow each other become one: who comes late gets several tokens at once."""
    last: Written | None = None
    for event in events:
        if isinstance(event, Written) and last is not None and last.index == event.index:
            piece = Piece(last.piece.text + event.piece.text, (*last.piece.tokens, *event.piece.tokens))
            last = Written(event.index, piece, event.reason)
            continue
        if last is not None:
            yield last
            last = None
        if isinstance(event, Written):
            last = event
        else:
            yield event
    if last is not None:
        yield last


def _line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _body(text: str) -> dict[str, Any]:
    # a lone surrogate, which an echoed prompt may have, is nothing that could be sent
    return {"type": "http.response.body", "body": text.encode("utf-8", "replace"), "more_body": True}
