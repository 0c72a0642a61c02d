"""`reuse_min_chunk`: what stood elsewhere in another text is not evaluated again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from transformers_llamacpp.engine import Engine, Usage, Wanted
from transformers_llamacpp.errors import DecodeError
from unit.naive import counts, expected_logits, go_on, ids, job, make, say, start_all

pytestmark = pytest.mark.once

SYSTEM = [1, 2, 3, 4, 5]
MESSAGES = [[10 + n, *[(n + 1) * i % 9 for i in range(7)], 10 + n] for n in range(6)]
PLAIN: list[dict[str, Any]] = [{}, {"window": 4, "swa_full": True}]


def chat(*numbers: int) -> list[int]:
    return [*SYSTEM, *(token for n in numbers for token in MESSAGES[n])]


def moving(**kind: Any) -> Engine:
    return make(**{"reuse_min_chunk": 4, "n_cells": 256, "n_ctx": 100, **kind})


def costs(engine: Engine, text: list[int]) -> tuple[int, int, int]:
    """Tokens reused, moved, evaluated."""
    sequence, usage = say(engine, text)
    engine.release([sequence])
    engine.check()
    reused, evaluated = counts(usage)
    moved = len(text) - reused - evaluated
    assert (usage.reuse == ["shifted"]) == (moved > 0)
    if moved:
        assert f"{moved} tokens in " in usage.reuse[0].reason  # type: ignore[attr-defined]
    return reused, moved, evaluated


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("parked", [False, True])
def test_the_oldest_messages_are_dropped(kind: dict[str, Any], parked: bool) -> None:
    engine = moving(**kind)
    assert costs(engine, chat(0, 1, 2, 3)) == (0, 0, 41)
    if parked:
        engine.pool.room.empty_buffer()
    assert costs(engine, [*chat(1, 2, 3), 9]) == (5, 27, 1)
    assert costs(engine, [*chat(1, 2, 3), 9, 8]) == (33, 0, 1), "and then it is a text as any other"


@pytest.mark.parametrize("kind", PLAIN)
def test_one_in_the_middle_is_edited(kind: dict[str, Any]) -> None:
    engine = moving(**kind)
    costs(engine, chat(0, 1, 2, 3))
    edited = [*chat(0), 20, 21, 22, *MESSAGES[2], *MESSAGES[3], 9]
    assert costs(engine, edited) == (14, 18, 4)


@pytest.mark.parametrize("kind", PLAIN)
def test_several_chunks(kind: dict[str, Any]) -> None:
    engine = moving(**kind)
    costs(engine, chat(0, 1, 2, 3, 4))
    assert costs(engine, [*chat(0, 2, 4), 9]) == (14, 18, 1)


def test_of_several_texts_the_one_with_most() -> None:
    engine = moving()
    costs(engine, chat(0, 1))
    costs(engine, chat(5, 1, 2, 3))
    assert costs(engine, [*chat(1, 2, 3), 9]) == (5, 27, 1)


@pytest.mark.parametrize("kind", PLAIN)
def test_the_text_it_came_from_is_unharmed(kind: dict[str, Any]) -> None:
    engine = moving(**kind)
    old, _ = say(engine, chat(0, 1, 2))
    new, _ = say(engine, [*chat(1, 2), 9])
    for sequence in (old, new, old):
        assert go_on(engine, sequence, [7]).evaluated_tokens == 1
    old.truncate(10)
    go_on(engine, old, [7])
    go_on(engine, new, [6])


def test_few_tokens_are_not_moved() -> None:
    engine = moving(reuse_min_chunk=20)
    costs(engine, chat(0, 1, 2))
    assert costs(engine, [*chat(1, 2), 9]) == (5, 0, 19)
    engine = moving(reuse_min_chunk=0)
    costs(engine, chat(0, 1, 2))
    assert costs(engine, [*chat(1, 2), 9]) == (5, 0, 19)


@pytest.mark.parametrize(
    "kind", [{"can_shift": False}, {"recurrent": True}, {"window": 4}, {"n_seq_limit": 1, "n_seq_max": 1}]
)
def test_memories_that_cannot(kind: dict[str, Any]) -> None:
    engine = moving(**kind)
    costs(engine, chat(0, 1, 2))
    assert costs(engine, [*chat(1, 2), 9])[1] == 0


def test_what_is_asked_for_is_evaluated() -> None:
    engine = moving()
    costs(engine, chat(0, 1, 2, 3))
    _, usage = say(engine, [*chat(2, 3), 9], first_output=16)
    assert counts(usage) == (5, 24 - 5 - 9 - 2), "only what stands before the first answer is moved"


def test_another_text_than_the_one_that_was_begun() -> None:
    engine = moving()
    costs(engine, chat(0, 1, 2, 3))
    [(sequence, _)] = engine.start([ids(*chat(1, 2, 3), 9)], [32], Usage())
    assert sequence.moves and go_on(engine, sequence, [8, 8, 8]).evaluated_tokens == 3
    assert not sequence.moves


def test_without_room_it_is_evaluated() -> None:
    engine = moving(n_cells=64)
    costs(engine, chat(0, 1, 2, 3))
    held = start_all(engine, [[6] * 20], Usage())[0][0]
    reused, moved, evaluated = costs(engine, [*chat(1, 2, 3), 9])
    assert reused + moved + evaluated == 33
    assert go_on(engine, held, [1]).evaluated_tokens == 1


def test_no_larger_context_is_made_in_the_middle_of_a_call() -> None:
    """It might come up empty, and the rows of the call would have to begin again."""
    engine = moving(n_seq_max=3)
    costs(engine, chat(0, 1, 2, 3))
    usage = Usage()
    engine.backend.fail_grow(lost=True)  # type: ignore[attr-defined]
    texts = [[*chat(1, 2, 3), 9], [20] * 5, [21] * 5]
    _, jobs = start_all(engine, texts, usage)
    engine.check()
    for text, done in zip(texts, jobs, strict=True):
        assert done is not None and done.logits is not None
        np.testing.assert_array_equal(done.logits[-1], expected_logits(text, engine.backend))  # type: ignore[arg-type]
    assert counts(usage) == (5, 38) and engine.backend.limits.n_seq_max == 3


def test_a_failure_in_between() -> None:
    engine = moving()
    costs(engine, chat(0, 1, 2, 3))
    text = [*chat(1), 20, 21, *MESSAGES[3], 9]
    [(sequence, _)] = engine.start([ids(*text)], [len(text) - 1], Usage())
    rest = job(sequence, text[len(sequence.tokens) :])
    engine.backend.fail_next(-3)  # type: ignore[attr-defined]
    with pytest.raises(DecodeError):
        engine.evaluate([rest], Usage(), Wanted(prompt=True))
    engine.check()
    engine.evaluate([rest], Usage(), Wanted(prompt=True))
    assert list(sequence.tokens) == text
    go_on(engine, sequence, [7])


def done_meanwhile(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for the whole prompt"


def test_others_go_on_meanwhile() -> None:
    """Between two decodes of such a prompt nobody has to wait for its end, and `progress` may wait for others."""
    engine = moving(n_batch=4, n_seq_max=8)
    costs(engine, chat(0, 1, 2, 3))
    text = [*chat(1), *[20, 21] * 8, *MESSAGES[3], 9]
    other, decodes = engine.new(), 0

    def somebody() -> None:
        with engine.call():
            go_on(engine, other, [7, 8, 9])

    def progress(evaluated: int, total: int) -> None:
        nonlocal decodes
        decodes += 1
        assert 0 < evaluated <= total == 17 and not engine.lock.mine
        done_meanwhile(somebody)

    with engine.call():
        [(sequence, _)] = engine.start([ids(*text)], [len(text) - 1], Usage(), in_call=True)
        assert len(sequence.moves) == 2
        done, usage = job(sequence, text[len(sequence.tokens) :]), Usage()
        engine.evaluate([done], usage, Wanted(prompt=True, progress=progress))
    assert counts(usage)[1] == 17 and usage.decode_calls == decodes == 5 and len(other) == 15
    assert done.logits is not None and list(sequence.tokens) == text
    np.testing.assert_array_equal(done.logits[-1], expected_logits(text, engine.backend))  # type: ignore[arg-type]
    engine.check()


def test_a_call_that_needs_the_room_meanwhile() -> None:
    """What was moved in comes back, and the rest is moved in behind it."""
    engine = moving(n_batch=4, n_seq_max=8, n_cells=72)
    costs(engine, chat(0, 1, 2, 3))
    text = [*chat(1), *[20, 21] * 8, *MESSAGES[3], 9]

    def somebody() -> None:
        with engine.call():
            engine.release([say(engine, [25] * 50)[0]])

    with engine.call():
        [(sequence, _)] = engine.start([ids(*text)], [len(text) - 1], Usage(), in_call=True)
        done = job(sequence, text[len(sequence.tokens) :])
        engine.evaluate([done], Usage(), Wanted(prompt=True, progress=lambda *_: done_meanwhile(somebody)))
        assert list(sequence.tokens) == text and done.logits is not None
    np.testing.assert_array_equal(done.logits[-1], expected_logits(text, engine.backend))  # type: ignore[arg-type]
    engine.check()


def test_vectors_move_nowhere() -> None:
    engine = moving(reuse_min_chunk=2)
    for _ in range(2):
        starts = engine.start([ids(*[-1] * 6)], [5], Usage())
        assert not starts[0][0].moves
