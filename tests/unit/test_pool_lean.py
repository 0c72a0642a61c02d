"""Idle texts leave the buffer before others start, and come back without being evaluated."""

from __future__ import annotations

import pytest

from transformers_llamacpp import room
from transformers_llamacpp.engine import Engine, Usage
from unit.naive import counts, go_on, job, make, say

pytestmark = pytest.mark.once

CHATS = [[n, *range(10, 22), n, n] for n in range(4)]
SYSTEM = list(range(1, 9))


@pytest.fixture(autouse=True)
def spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "SPARE", 4)


def turn(engine: Engine, text: list[int]) -> Usage:
    sequence, usage = say(engine, text)
    engine.release([sequence])
    engine.check()
    return usage


def resident(engine: Engine) -> int:
    """Cells in use."""
    return len(engine.backend.cells)  # type: ignore[attr-defined]


def test_chats_that_take_turns_do_not_pay_for_each_other() -> None:
    engine = make(n_cells=256)
    for text in CHATS:
        turn(engine, text)
        assert resident(engine) == len(text)
    for number in range(3):
        for text in CHATS:
            text += [30, 31 - number]
            assert counts(turn(engine, text)) == (len(text) - 2, 2)
            assert resident(engine) == len(text)


def test_a_shared_beginning_is_taken_from_host_memory_and_stays_there() -> None:
    engine = make(n_cells=256)
    first, second, third = ([*SYSTEM, *[n] * 12] for n in (20, 21, 22))
    turn(engine, first)
    turn(engine, second)  # forked from what is resident
    turn(engine, [30] * 10)
    assert resident(engine) == 10
    assert counts(turn(engine, third)) == (len(SYSTEM), 12)
    assert resident(engine) == len(third)  # of the first one only the beginning came back
    assert counts(turn(engine, [*first, 5])) == (len(first), 1)
    assert counts(turn(engine, [*second, 5])) == (len(second), 1)


def test_held_texts_stay_while_another_call_may_use_them() -> None:
    engine = make(n_cells=256)
    held, _ = say(engine, CHATS[0])
    with engine.call():
        turn(engine, CHATS[1])
        turn(engine, CHATS[2])
        assert held.resident
        assert resident(engine) == len(CHATS[0]) + len(CHATS[2])
    turn(engine, CHATS[1])
    assert not held.resident and resident(engine) == len(CHATS[1])
    assert go_on(engine, held, [9]).evaluated_tokens == 1


def test_where_calls_begin_together_a_short_text_does_not_stay_in_the_last_cells() -> None:
    """llama.cpp reads all cells up to the last one in use, so that it would slow all of them down."""
    engine = make(n_cells=256, n_seq_max=8)
    with engine.call():
        long = [say(engine, [n] * 16)[0] for n in range(5)]
        last, _ = say(engine, [9, 8, 8, 8])
    engine.release([*long[1:], last])
    text = [9, 7, 7, 7]  # begins like the last one, which is therefore not worth a copy
    with engine.call():
        turn(engine, text)  # while another call holds its cells
        assert long[0].resident and last.resident
    engine.release([long[0]])
    with engine.call():  # a call that begins as well, and holds nothing yet
        assert counts(turn(engine, [*text, 6])) == (4, 1)
        assert not last.resident and engine.pool.memory.span < 16
    assert counts(turn(engine, [9, 8, 8, 8, 6])) == (4, 1)


def test_few_tokens_are_not_worth_it() -> None:
    engine = make(n_cells=256)
    turn(engine, [1, 2, 3])
    turn(engine, [4, 5, 6])
    assert resident(engine) == 6


def test_without_room_in_host_memory_they_stay() -> None:
    engine = make(n_cells=256, host_cache_bytes=10)
    turn(engine, CHATS[0])
    turn(engine, CHATS[1])
    assert {tuple(s.tokens) for s in engine.pool.sequences if s.resident} == {tuple(CHATS[0]), tuple(CHATS[1])}


def test_recurrent_states_come_back_whole() -> None:
    engine = make(n_cells=256, recurrent=True)
    for text in CHATS:
        turn(engine, text)
    assert counts(turn(engine, [*CHATS[0], 9])) == (len(CHATS[0]), 1)


def test_what_is_shared_counts_once() -> None:
    """Beams that lost share nearly everything with the text that goes on: copying them all would not pay."""
    engine = make(n_cells=256, n_seq_max=8)
    trunk, _ = say(engine, CHATS[0])
    beams = [engine.fork(trunk) for _ in range(3)]
    for number, beam in enumerate(beams):
        engine.evaluate([job(beam, [20 + number])], Usage())
    engine.release([trunk, *beams])
    assert counts(turn(engine, [*CHATS[0], 20, 9])) == (len(CHATS[0]) + 1, 1)
    assert all(not s.is_saved for s in engine.pool.sequences)


def test_no_more_is_copied_than_host_memory_takes() -> None:
    size = 16 * len(CHATS[0])
    engine = make(n_cells=256, host_cache_bytes=2 * size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "SPARE", 1000)
        for text in CHATS:
            turn(engine, text)
    turn(engine, [30] * 5)
    assert [list(s.tokens) for s in engine.pool.sequences if s.is_saved] == CHATS[2:]
