"""Memories that cannot be rewound go back to checkpoints: what is evaluated again, and how many there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transformers_llamacpp import evaluation
from transformers_llamacpp.engine import Engine
from transformers_llamacpp.room import CHECKPOINTS
from unit.naive import counts, go_on, make, say

pytestmark = [
    pytest.mark.once,
    pytest.mark.parametrize("kind", [{"recurrent": True}, {"window": 4}], ids=["recurrent", "window"]),
]

PROMPT = [n % 11 for n in range(30)]


@pytest.fixture(autouse=True)
def every(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "CHECKPOINT_EVERY", 8)


def engine_for(kind: dict[str, Any], **sizes: Any) -> Engine:
    return make(**{"n_cells": 1024, "n_ctx": 300, **kind, **sizes})


def told(engine: Engine, text: list[int]) -> tuple[int, int]:
    """Reused and evaluated tokens of a text that nobody holds afterwards."""
    sequence, usage = say(engine, text)
    engine.release([sequence])
    engine.check()
    return counts(usage)


def test_the_same_prompt_again(kind: dict[str, Any]) -> None:
    engine = engine_for(kind)
    assert told(engine, PROMPT) == (0, 30)
    for _ in range(3):
        assert told(engine, PROMPT) == (29, 1)
        assert told(engine, [*PROMPT, 9]) == (30, 1)


def test_the_prompt_of_a_text_that_went_on(kind: dict[str, Any]) -> None:
    engine = engine_for(kind)
    chat, _ = say(engine, PROMPT)
    for token in range(10):
        go_on(engine, chat, [token])
    assert counts(say(engine, PROMPT)[1]) == (29, 1)
    engine.release([chat])
    assert told(engine, PROMPT) == (29, 1)
    assert told(engine, [*PROMPT, *range(10), 3]) == (40, 1), "the longer one has lost nothing"


def test_a_strict_prefix(kind: dict[str, Any]) -> None:
    engine = engine_for(kind)
    told(engine, PROMPT)
    assert told(engine, PROMPT[:25]) == (24, 1)
    assert told(engine, PROMPT[:20]) == (16, 4)
    assert told(engine, PROMPT[:20]) == (19, 1), "now it is known"


@pytest.mark.parametrize(("at", "reused"), [(0, 0), (7, 0), (8, 8), (15, 8), (23, 16), (29, 29)])
def test_one_token_is_another(kind: dict[str, Any], at: int, reused: int) -> None:
    engine = engine_for(kind)
    told(engine, PROMPT)
    assert told(engine, [*PROMPT[:at], 12, *PROMPT[at + 1 :]]) == (reused, 30 - reused)
    assert told(engine, [*PROMPT[:at], 13, *PROMPT[at + 1 :]]) == (at, 30 - at), "where they parted is a checkpoint then"


def chat_of(engine: Engine, turns: int) -> tuple[list[int], list[int]]:
    """A chat of questions of 9 tokens and answers of 7; where its prompts ended."""
    text, ends = list(PROMPT), []
    for turn in range(turns):
        text += [12 + turn] * 9
        sequence, usage = say(engine, text)
        assert usage.evaluated_tokens == (39 if turn == 0 else 9)
        ends.append(len(text))
        for n in range(7):
            go_on(engine, sequence, [n])
        text += range(7)
        engine.release([sequence])
        engine.check()
    return text, ends


def test_a_regenerated_answer(kind: dict[str, Any]) -> None:
    engine = engine_for(kind)
    text, ends = chat_of(engine, 10)
    for end in ends[:5:-1]:
        assert told(engine, text[:end]) == (end - 1, 1)


def test_an_edited_question(kind: dict[str, Any]) -> None:
    engine = engine_for(kind)
    text, ends = chat_of(engine, 10)
    for end in (ends[9], ends[8], ends[7]):
        begin = end - 9
        assert told(engine, [*text[:begin], 30, 31, 30]) == (begin, 3)


def test_going_back_far_costs_no_more_than_the_gap(kind: dict[str, Any]) -> None:
    """Checkpoints are few, and denser towards the end."""
    engine = engine_for(kind)
    text, ends = chat_of(engine, 10)
    for end in ends:
        reused, evaluated = told(engine, text[:end])
        assert reused + evaluated == end and evaluated <= max(1, (len(text) - end) // 2 + 16)


def test_a_crop(kind: dict[str, Any]) -> None:
    engine = engine_for(kind)
    chat, _ = say(engine, PROMPT)
    chat.truncate(24)
    assert go_on(engine, chat, [9]).evaluated_tokens <= 1
    chat.truncate(20)
    assert go_on(engine, chat, [9]).evaluated_tokens == 5
    chat.truncate(0)
    assert go_on(engine, chat, [9]).evaluated_tokens == 1


def test_there_are_few(kind: dict[str, Any]) -> None:
    engine = engine_for(kind)
    sequence, _ = say(engine, [n % 13 for n in range(290)])
    stops = [c.stop for c in sequence.checkpoints]
    assert len(stops) == CHECKPOINTS and stops == sorted(stops) and stops[-1] == 289
    gaps = np.diff(stops)
    assert gaps[-4:].max() <= 8 < gaps[:6].max(), "the closer to the end the denser"


def test_they_count_as_host_memory(kind: dict[str, Any]) -> None:
    engine = engine_for(kind, host_cache_bytes=1500)
    states = engine.pool.registry.states
    for number in range(4):
        told(engine, [20 + number, *PROMPT])
        assert states.host_bytes(engine.pool.sequences) <= 1500
    assert any(s.checkpoints for s in engine.pool.sequences)


def test_without_host_memory_there_are_none(kind: dict[str, Any]) -> None:
    engine = engine_for(kind, host_cache_bytes=0)
    assert told(engine, PROMPT) == (0, 30)
    assert told(engine, [*PROMPT, 9]) == (30, 1)
    assert told(engine, PROMPT) == (0, 30)


def test_they_survive_parking(kind: dict[str, Any]) -> None:
    engine = engine_for(kind)
    sequence, _ = say(engine, PROMPT)
    engine.pool.room.park(sequence)
    assert counts(say(engine, [*PROMPT[:24], 9])[1]) == (24, 1)
    sequence.truncate(29)
    assert go_on(engine, sequence, [9]).evaluated_tokens == 1


def test_a_checkpoint_without_room(kind: dict[str, Any]) -> None:
    """The cells of a fork are not free, so that going back has to evaluate; nobody is harmed."""
    engine = engine_for(kind, n_cells=10, n_batch=4) if "window" in kind else engine_for(kind, n_cells=30)
    other, _ = say(engine, [12] * 6)
    first, _ = say(engine, PROMPT[:10])
    go_on(engine, first, [1, 2, 3])
    go_on(engine, other, [4])
    copy = engine.fork(first)
    first.truncate(9)
    engine.check()
    for sequence in (first, copy, other):
        go_on(engine, sequence, [5])
