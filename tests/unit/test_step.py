"""One token for each of several sequences: a plain decode where it can be one, and everything else done right too."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from transformers_llamacpp.engine import Engine, Usage
from transformers_llamacpp.errors import CacheFullError, ClosedError, ContextOverflowError, DecodeError, InvalidInputError
from transformers_llamacpp.sequence import Sequence
from unit.naive import A, go_on, logits_of, make, say

pytestmark = pytest.mark.once

KINDS: list[dict[str, Any]] = [{}, {"window": 4}, {"recurrent": True}]
B = [3, 2, 1]


def step(engine: Engine, sequences: list[Sequence], tokens: list[int]) -> Usage:
    """A step whose answer is checked."""
    texts = [[*sequence.tokens, token] for sequence, token in zip(sequences, tokens, strict=True)]
    usage = Usage()
    answer = engine.step(sequences, tokens, usage, np.copy)
    n_sink = engine.pool.keeping.n_sink
    expected = [logits_of(text, engine.backend, engine.n_ctx, n_sink) for text in texts]  # type: ignore[arg-type]
    np.testing.assert_array_equal(answer, expected)
    assert [list(sequence.tokens) for sequence in sequences] == texts
    engine.check()
    return usage


@pytest.mark.parametrize("kind", KINDS)
def test_several_rows_in_one_decode(kind: dict[str, Any]) -> None:
    engine = make(**kind)
    rows = [say(engine, A)[0], say(engine, B)[0]]
    for token in range(4):
        usage = step(engine, rows, [token, 7 - token])
        assert (usage.decode_calls, usage.evaluated_tokens) == (1, 2)


def test_the_reader_sees_the_backends_own_rows() -> None:
    engine = make()
    sequence, _ = say(engine, A)

    def read(logits: npt.NDArray[np.float32]) -> bool:
        mine = engine.backend.logits(1)
        logits[0, 0] = 42.0
        return bool(np.shares_memory(logits, mine)) and float(mine[0, 0]) == 42.0

    assert engine.step([sequence], [1], Usage(), read)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parked", [False, True])
def test_a_reader_that_fails_leaves_nothing_behind(kind: dict[str, Any], parked: bool) -> None:
    engine = make(**kind)
    rows = [say(engine, A)[0], say(engine, B)[0]]
    if parked:
        park(engine, rows[0])

    def fail(logits: npt.NDArray[np.float32]) -> None:
        raise ValueError("a reader")

    with pytest.raises(ValueError, match="a reader"):
        engine.step(rows, [5, 6], Usage(), fail)
    assert [list(row.tokens) for row in rows] == [A, B]
    engine.check()
    step(engine, rows, [5, 6])


@pytest.mark.parametrize(("status", "stored"), [(-1, 0), (-3, 1), (2, 1), (2, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_decode_changes_nothing(status: int, stored: int, kind: dict[str, Any]) -> None:
    engine = make(**kind)
    rows = [say(engine, A)[0], say(engine, B)[0]]
    engine.backend.fail_next(status, stored)  # type: ignore[attr-defined]
    with pytest.raises(DecodeError) as caught:
        engine.step(rows, [5, 6], Usage(), np.copy)
    assert caught.value.status == status
    assert [list(row.tokens) for row in rows] == [A, B]
    engine.check()
    for row in rows:
        go_on(engine, row, [7])


def park(engine: Engine, sequence: Sequence) -> None:
    with engine.lock:
        engine.pool.room.park(sequence)
    assert not sequence.resident


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_left_the_buffer_comes_back(kind: dict[str, Any]) -> None:
    engine = make(**kind)
    rows = [say(engine, A)[0], say(engine, B)[0]]
    park(engine, rows[1])
    step(engine, rows, [5, 6])
    assert rows[1].resident


def test_room_is_made() -> None:
    engine = make(n_cells=16)
    engine.release([say(engine, [9, 9, 9, 9, 9, 8, 8])[0]])
    sequence, _ = say(engine, A)
    for token in range(8):
        step(engine, [sequence], [token])
    with pytest.raises(CacheFullError):
        while True:
            step(engine, [sequence], [1])
    engine.check()


def test_a_full_context_slides_or_is_an_error() -> None:
    engine = make(n_ctx=8, n_sink=1)
    sequence, _ = say(engine, A)
    for token in range(6):
        step(engine, [sequence], [token])
    assert sequence.dropped
    engine = make(n_ctx=8)
    sequence, _ = say(engine, A)
    step(engine, [sequence], [1])
    step(engine, [sequence], [1])
    with pytest.raises(ContextOverflowError, match=r"9 tokens .* context of 8"):
        engine.step([sequence], [1], Usage(), np.copy)
    assert len(sequence) == 8


@pytest.mark.parametrize("token", [-1, 32])
def test_a_token_outside_the_vocabulary(token: int) -> None:
    engine = make()
    sequence, _ = say(engine, A)
    with pytest.raises(InvalidInputError, match=rf"token id {token} is outside the vocabulary 0 \.\. 31"):
        engine.step([sequence], [token], Usage(), np.copy)
    assert list(sequence.tokens) == A


def test_more_rows_than_a_decode_takes() -> None:
    engine = make(n_batch=2, n_seq_max=8, n_cells=100)
    rows = [say(engine, [index, 1])[0] for index in range(5)]
    usage = step(engine, rows, [1, 2, 3, 4, 5])
    assert (usage.decode_calls, usage.evaluated_tokens) == (3, 5)


def test_a_closed_engine() -> None:
    engine = make()
    sequence, _ = say(engine, A)
    engine.close()
    with pytest.raises(ClosedError, match="load it again"):
        engine.step([sequence], [1], Usage(), np.copy)
