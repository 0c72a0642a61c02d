"""Streaming clients of an OpenAI-like server, for `serve.py`: many in one thread, and as cheap as Python can make them.

What arrives is kept with its time, and read when all streams are over: on a small machine a client that parses while it waits
takes the processor from the server it measures.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

PATIENCE = 600.0
"""Seconds after which a stream counts as hanging."""


@dataclass
class Streams:
    """What `n` streams did that began at the same time. All times are seconds from there."""

    seconds: float
    """Until the last of them had its last token."""
    tokens: int
    """Of all streams."""
    times: list[list[float]] = field(default_factory=list)
    """For each stream, when it got something: each time one token, or several. Empty where nobody watched."""
    cut: int = 0
    """Streams that ended before they had all their tokens."""

    @property
    def first(self) -> list[float]:
        return [times[0] for times in self.times if times]

    @property
    def speed(self) -> float:
        """Tokens of all streams per second, everything counted from the request on."""
        return self.tokens / self.seconds


@dataclass
class Stall:
    """What a long prompt did to streams that were running: seconds. `gap`: the longest wait for a token while the prompt was
    evaluated; `usual`: the median wait before it came; `first`: until the long prompt had its first token."""

    gap: float
    usual: float
    first: float
    cut: int

    @property
    def delay(self) -> float:
        return self.gap - self.usual


def stall(times: Sequence[Sequence[float]], came: float, done: float, cut: int) -> Stall:
    """`times`: of the running streams; `came`, `done`: when the long prompt was sent, and when it had its first token."""
    before, during = [], []
    for mine in times:
        for earlier, later in pairwise(mine):
            if later <= came:
                before.append(later - earlier)
            elif earlier < done:
                during.append(later - earlier)
    if not before or not during:
        raise RuntimeError("the streams were over before the long prompt was: give them more --tokens")
    return Stall(max(during), sorted(before)[len(before) // 2], done - came, cut)


class Stream(asyncio.Protocol):
    """One request whose answer ends with its connection."""

    def __init__(self, request: bytes, watch: int = 0) -> None:
        """`watched` is set after `watch` events."""
        loop = asyncio.get_running_loop()
        self.request, self.watch = request, watch
        self.pieces: list[tuple[float, bytes]] = []
        self.events = 0
        self.over, self.watched = loop.create_future(), loop.create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))
        if self.watch:
            self.events += data.count(b"data: ")
            if self.events >= self.watch and not self.watched.done():
                self.watched.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        for future in (self.over, self.watched):
            if not future.done():
                future.set_result(None)


class Clients:
    """Sends prompts to `/v1/completions` on a port of this machine. `extra`: fields of every request. `exact`: the server says
    by `usage` how many tokens it wrote; else a stream that ended because of its length has had all."""

    def __init__(self, port: int, extra: dict[str, Any], exact: bool) -> None:
        self.port, self.extra, self.exact = port, extra, exact

    def run(self, prompts: Sequence[str], tokens: int) -> Streams:
        return asyncio.run(self._run(prompts, tokens))

    def stall(self, prompts: Sequence[str], long: str, tokens: int, after: int) -> Stall:
        return asyncio.run(self._stall(prompts, long, tokens, after))

    def serve(self, prompts: Sequence[tuple[str, int]], at_once: int) -> None:
        """All of them, `(prompt, tokens)` each, so many at a time."""
        asyncio.run(self._serve(prompts, at_once))

    def post(self, path: str, body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.loads(answer.read())

    async def _run(self, prompts: Sequence[str], tokens: int) -> Streams:
        requests = [self._request(prompt, tokens) for prompt in prompts]
        began = time.perf_counter()
        streams = await asyncio.gather(*map(self._open, requests))
        await asyncio.wait_for(asyncio.gather(*(stream.over for stream in streams)), PATIENCE)
        read = [self._read(stream, tokens) for stream in streams]
        times = [[at - began for at in mine] for mine, _ in read]
        written = sum(count for _, count in read)
        return Streams(max(mine[-1] for mine in times), written, times, sum(count < tokens for _, count in read))

    async def _stall(self, prompts: Sequence[str], long: str, tokens: int, after: int) -> Stall:
        streams = await asyncio.gather(*(self._open(self._request(prompt, tokens), after) for prompt in prompts))
        await asyncio.wait_for(asyncio.gather(*(stream.watched for stream in streams)), PATIENCE)
        came = time.perf_counter()
        late = await self._open(self._request(long, 2))
        await asyncio.wait_for(asyncio.gather(late.over, *(stream.over for stream in streams)), PATIENCE)
        read = [self._read(stream, tokens) for stream in streams]
        cut = sum(count < tokens for _, count in read)
        return stall([mine for mine, _ in read], came, self._read(late, 2)[0][0], cut)

    async def _serve(self, prompts: Sequence[tuple[str, int]], at_once: int) -> None:
        waiting = iter(prompts)

        async def one() -> None:
            for prompt, tokens in waiting:
                stream = await self._open(self._request(prompt, tokens))
                await asyncio.wait_for(stream.over, PATIENCE)
                self._read(stream, tokens)

        await asyncio.gather(*(one() for _ in range(at_once)))

    def _request(self, prompt: str, tokens: int) -> bytes:
        fields = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **self.extra}
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + body

    async def _open(self, request: bytes, watch: int = 0) -> Stream:
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(lambda: Stream(request, watch), "127.0.0.1", self.port)
        return stream

    def _read(self, stream: Stream, tokens: int) -> tuple[list[float], int]:
        """When something of the text came, and how many tokens there were."""
        data = b"".join(piece for _, piece in stream.pieces)
        head, _, body = data.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            status = head.decode().split("\r\n")[0]
            raise RuntimeError(f"the server answered {status}: {body[:500].decode(errors='replace')}")
        if b"transfer-encoding: chunked" in head.lower():
            body = _without_chunks(body)
        lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
        chunks = [json.loads(line) for line in lines if line != "[DONE]"]
        if errors := [chunk["error"] for chunk in chunks if "error" in chunk]:
            raise RuntimeError(f"a stream ended with an error: {errors[0]}")
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        if self.exact:
            count = next((chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")), 0)
        else:
            count = tokens if reasons == ["length"] else sum(bool(chunk["choices"]) for chunk in chunks)
        if reasons == ["stop"]:
            raise RuntimeError(f"a text ended by itself after {count} of {tokens} tokens, so that it shows no speed")
        times = [at for at, piece in stream.pieces if b"data: {" in piece]
        return times, count


def _without_chunks(body: bytes) -> bytes:
    """The payload of a chunked body, of which the end may be missing."""
    found, at = [], 0
    while (line := body.find(b"\r\n", at)) >= 0 and (size := int(body[at:line] or b"0", 16)):
        found.append(body[line + 2 : line + 2 + size])
        at = line + 2 + size + 2
    return b"".join(found)
