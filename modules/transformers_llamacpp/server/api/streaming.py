"""Server-sent events as OpenAI's clients read them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .answers import Answer
from .errors import ApiError
from .job import Gone

__all__ = ["EventStream"]

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """The chunks of an answer whose first event is there already, so that what is wrong with a request was told as a status.
    Whatever ends the response, `stack` is closed."""

    def __init__(self, answer: Answer, first: Any, events: AsyncIterator[Any], stack: AsyncExitStack) -> None:
        super().__init__(_lines(answer, first, events), media_type="text/event-stream", headers=HEADERS)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._stack:
            await super().__call__(scope, receive, send)


async def _lines(answer: Answer, first: Any, events: AsyncIterator[Any]) -> AsyncIterator[str]:
    try:
        for chunk in answer.chunks(first):
            yield _line(chunk)
        async for event in events:
            for chunk in answer.chunks(event):
                yield _line(chunk)
        if answer.include_usage:
            yield _line(answer.usage_chunk())
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status is out already
        yield _line(error.body())
    except Gone:
        return


def _line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
