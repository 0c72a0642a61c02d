"""Lines of a stream without a model: a frame around a text is the chunk that JSON would make of it."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from transformers_llamacpp.server.api.answers import Answer, ChatAnswer, CompletionAnswer
from transformers_llamacpp.server.api.job import Written
from transformers_llamacpp.server.api.mail import PostOffice
from transformers_llamacpp.server.api.plan import Plan
from transformers_llamacpp.server.api.prompts import Prompt
from transformers_llamacpp.server.api.streaming import _Lines
from transformers_llamacpp.server.api.writer import Piece, TokenScore

pytestmark = pytest.mark.once

TEXTS = ["a", 'quo"te\\', "line\nend\t\0", "é😀\u2028", " "]


def chunks(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.strip().split("\n\n")]


@pytest.mark.parametrize("kind", [ChatAnswer, CompletionAnswer])
@pytest.mark.parametrize("usage", [False, True])
def test_a_frame_is_what_json_makes(kind: type[Answer], usage: bool) -> None:
    def answer() -> Answer:
        made = kind(Plan([Prompt([1], "x")], [5], {}, n=2, rows=2), "model", usage)
        made._head = {"id": "x", "created": 1, "model": "model"}
        return made

    framed, plain = _Lines(answer()), answer()
    for at, text in enumerate(TEXTS):
        event = Written(at % 2, Piece(text))
        assert chunks(framed.of([event])) == list(plain.chunks(event))
    last = Written(0, Piece("z"), "stop")
    assert chunks(framed.of([last])) == list(plain.chunks(last))


def test_who_comes_late_gets_all_tokens_in_one_chunk() -> None:
    plan = Plan([Prompt([1], "x")], [5], {}, logprobs=0, tells_logprobs=True)
    pieces = [Piece(text, (TokenScore(at, text.encode(), at, -1.0),)) for at, text in enumerate("abc")]
    (chunk,) = chunks(_Lines(CompletionAnswer(plan, "model")).of([Written(0, piece) for piece in pieces]))
    (choice,) = chunk["choices"]
    assert choice["text"] == "abc" and choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2] and choice["logprobs"]["token_logprobs"] == [-1.0] * 3


def test_nothing_posted_is_lost() -> None:
    """From several threads to several readers, each in its order."""

    async def run() -> list[list[int]]:
        office = PostOffice()
        inboxes = [office.inbox() for _ in range(4)]
        threads = [threading.Thread(target=lambda box=box: [box.put(n) for n in range(2000)]) for box in inboxes]

        async def read(box: Any) -> list[int]:
            found: list[int] = []
            while len(found) < 2000:
                found += await box.take()
            return found

        for thread in threads:
            thread.start()
        return await asyncio.wait_for(asyncio.gather(*map(read, inboxes)), 60)

    assert asyncio.run(run()) == [list(range(2000))] * 4
