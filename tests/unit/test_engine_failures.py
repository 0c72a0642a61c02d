"""Wrong input, failed decodes, cancelled calls, closed engines: nothing may have happened."""

from __future__ import annotations

from typing import Any

import pytest

from transformers_llamacpp.engine import Usage, Wanted
from transformers_llamacpp.errors import (
    ClosedError,
    ContextOverflowError,
    DecodeError,
    GenerationCancelled,
    InvalidInputError,
)
from unit.naive import A, counts, go_on, ids, job, make, say

pytestmark = pytest.mark.once


def test_a_text_longer_than_n_ctx() -> None:
    engine = make(n_ctx=8)
    sequence, _ = say(engine, A)
    with pytest.raises(ContextOverflowError, match=r"9 tokens .* context of 8.*n_ctx=9") as caught:
        engine.evaluate([job(sequence, [1, 2, 3])], Usage())
    assert (caught.value.needed, caught.value.n_ctx, caught.value.row) == (9, 8, None)
    with pytest.raises(ContextOverflowError, match=r"\(row 1\)") as caught:
        engine.evaluate([job(engine.new(), [1]), job(sequence, [1, 2, 3])], Usage())
    assert caught.value.row == 1 and engine.backend.decoded_tokens == 6  # type: ignore[attr-defined]


@pytest.mark.parametrize("token", [-1, 32])
def test_a_token_outside_the_vocabulary(token: int) -> None:
    engine = make()
    with pytest.raises(InvalidInputError, match=rf"token id {token} is outside the vocabulary 0 \.\. 31"):
        engine.evaluate([job(engine.new(), [3, token])], Usage())


def test_what_was_evaluated_of_a_new_text_is_kept() -> None:
    engine = make(n_batch=4)
    text = list(range(14))

    def progress(evaluated: int, total: int) -> object:
        assert total == 14
        return evaluated < 8

    sequence = engine.new()
    with pytest.raises(GenerationCancelled, match="after 8 of 14") as caught:
        engine.evaluate([job(sequence, text)], Usage(), Wanted(progress=progress))
    assert (caught.value.evaluated, caught.value.total) == (8, 14)
    assert len(sequence) == 0 and sequence.held
    engine.check()
    assert counts(say(engine, text)[1]) == (8, 6)


@pytest.mark.parametrize(("status", "stored"), [(-1, 0), (-3, 3), (2, 3), (2, 0)])
@pytest.mark.parametrize("kind", [{}, {"window": 4}, {"recurrent": True}])
def test_a_failed_decode_changes_nothing(status: int, stored: int, kind: dict[str, Any]) -> None:
    engine = make(**kind)
    first, second = say(engine, A)[0], say(engine, [3, 2, 1])[0]
    engine.backend.fail_next(status, stored)  # type: ignore[attr-defined]
    with pytest.raises(DecodeError) as caught:
        engine.evaluate([job(first, [7, 8]), job(second, [9, 9])], Usage())
    assert caught.value.status == status
    assert list(first.tokens) == A and list(second.tokens) == [3, 2, 1]
    engine.check()
    go_on(engine, first, [7])
    go_on(engine, second, [9])


def test_no_room_for_one_decode_is_tried_again_after_making_room() -> None:
    engine = make()
    engine.release([say(engine, A)[0]])
    engine.backend.fail_next(1)  # type: ignore[attr-defined]
    _, usage = say(engine, [9, 9])
    assert counts(usage) == (0, 2)


def test_closing_the_model_from_a_callback() -> None:
    engine = make(n_batch=2)
    with pytest.raises(ClosedError):
        engine.evaluate([job(engine.new(), A)], Usage(), Wanted(progress=lambda *_: engine.close()))


def test_a_closed_engine() -> None:
    engine = make()
    sequence, _ = say(engine, A)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.start([ids(1)], [0], Usage()),
        lambda: engine.evaluate([job(sequence, [1])], Usage()),
        lambda: engine.fork(sequence),
        lambda: engine.truncate(sequence, 0),
        lambda: engine.forget(),
        lambda: engine.new(),
    ):
        with pytest.raises(ClosedError, match="load it again"):
            call()
    engine.release([sequence])
    engine.discard([sequence])
    engine.check()
