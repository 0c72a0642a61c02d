"""What is saved of texts: only what is new, what is common once, and what is given up first."""

from __future__ import annotations

import numpy as np
import pytest

from transformers_llamacpp.engine import Engine, Usage
from transformers_llamacpp.saved import Saved
from transformers_llamacpp.sequence import Sequence
from transformers_llamacpp.testing import FakeBackend
from unit.naive import counts, go_on, job, make, say, start_all

pytestmark = pytest.mark.once

TOKEN = 16
"""Bytes the fake saves for a token."""

SYSTEM = [n % 7 for n in range(40)]


class Counting(FakeBackend):
    """`copied`: bytes of all states that were made."""

    copied = 0

    def state_save(self, seq_id: int, partial: bool = False) -> memoryview:
        state = super().state_save(seq_id, partial)
        self.copied += len(state)
        return state


def counting(**backend: int | bool) -> tuple[Engine, Counting]:
    fake = Counting(n_cells=1024, **backend)  # type: ignore[arg-type]
    return Engine(fake, 400), fake


def park(engine: Engine, sequence: Sequence) -> None:
    engine.pool.room.park(sequence)
    engine.pool.room.trim()
    engine.check()


def host_bytes(engine: Engine) -> int:
    return engine.pool.registry.states.host_bytes(engine.pool.sequences)


def chain(sequence: Sequence) -> list[tuple[int, int]]:
    assert sequence.saved is not None
    return [(part.start, part.stop) for part in sequence.saved.chain()]


def test_parking_a_chat_after_each_turn_copies_what_is_new() -> None:
    """Small parts are joined as the digits of a binary counter are, so that each token is copied a few times at most."""
    engine, fake = counting()
    sequence, _ = say(engine, SYSTEM)
    costs, parts = [], []
    for turn in range(10):
        assert go_on(engine, sequence, [turn] * 10).evaluated_tokens == 10
        fake.copied = 0
        park(engine, sequence)
        costs.append(fake.copied // TOKEN)
        parts.append(len(chain(sequence)))
        assert host_bytes(engine) == len(sequence) * TOKEN
    assert costs == [50, 10, 20, 10, 40, 10, 20, 10, 130, 10]
    assert parts == [1, 2, 2, 3, 2, 3, 3, 4, 1, 2]


def test_a_window_that_keeps_its_cells_is_saved_by_windows() -> None:
    engine, fake = counting(window=5, swa_full=True)
    sequence, _ = say(engine, SYSTEM)
    park(engine, sequence)
    assert chain(sequence) == [(start, start + 5) for start in range(0, 40, 5)]
    fake.copied = 0
    go_on(engine, sequence, [1, 2])
    park(engine, sequence)
    assert fake.copied == 2 * TOKEN and chain(sequence)[-1] == (40, 42)
    go_on(engine, sequence, [3] * 4)
    park(engine, sequence)
    assert chain(sequence)[-2:] == [(40, 42), (42, 46)], "together they would be longer than a window"
    sequence.truncate(41)
    assert go_on(engine, sequence, [9]).evaluated_tokens == 1


@pytest.mark.parametrize("kind", [{"recurrent": True}, {"window": 5}])
def test_what_cannot_be_cut_is_one_part(kind: dict[str, int | bool]) -> None:
    engine, _ = counting(**kind)
    sequence, _ = say(engine, SYSTEM)
    for _ in range(3):
        go_on(engine, sequence, [1] * 10)
        park(engine, sequence)
        assert chain(sequence) == [(0, len(sequence))]


@pytest.mark.parametrize("tail", [5, 60])
def test_a_common_beginning_is_stored_once(tail: int) -> None:
    engine, fake = counting()
    for number in range(20):
        sequence, _ = say(engine, [*SYSTEM, *[10 + number] * tail])
        engine.release([sequence])
        park(engine, sequence)
    assert host_bytes(engine) == (len(SYSTEM) + 20 * tail) * TOKEN
    fake.copied = 0
    for number in range(20):  # more than there are ids
        assert counts(say(engine, [*SYSTEM, *[10 + number] * tail, 9])[1]) == (len(SYSTEM) + tail, 1)
    assert fake.copied <= 20 * TOKEN, "only what is new is copied"


def test_a_short_beginning_is_no_part_of_its_own() -> None:
    engine, _ = counting()
    for number in range(2):
        sequence, _ = say(engine, [1, 2, 3, *[10 + number] * 40])
        park(engine, sequence)
        assert chain(sequence) == [(0, 43)]


def test_both_forks_keep_what_was_saved_of_them() -> None:
    engine, fake = counting()
    first, _ = say(engine, SYSTEM)
    park(engine, first)
    second = engine.fork(first)
    for number, sequence in enumerate((first, second)):
        go_on(engine, sequence, [20 + number] * 3)
        fake.copied = 0
        park(engine, sequence)
        assert fake.copied == 3 * TOKEN
    assert host_bytes(engine) == (len(SYSTEM) + 6) * TOKEN


def test_what_was_cropped_is_not_believed() -> None:
    engine, _ = counting()
    sequence, _ = say(engine, SYSTEM)
    park(engine, sequence)
    sequence.truncate(20)
    assert chain(sequence) == [(0, 40)], "a parked one keeps its tail"
    go_on(engine, sequence, [9] * 5)
    assert sequence.saved is None
    park(engine, sequence)
    assert chain(sequence) == [(0, 25)]
    assert go_on(engine, sequence, [1]).evaluated_tokens == 1


def test_what_was_used_longest_ago_goes_first_and_from_its_end() -> None:
    engine = make(n_cells=256, n_ctx=100, host_cache_bytes=1 << 20)
    kept = []
    for number in range(3):
        sequence, _ = say(engine, [*SYSTEM, *[10 + number] * 20])
        engine.release([sequence])
        park(engine, sequence)
        kept.append(sequence)
    states = engine.pool.registry.states
    for left in (2, 1):
        states.max_bytes = (len(SYSTEM) + left * 20) * TOKEN
        engine.pool.room.trim()
        assert [s.closed for s in kept] == [True] * (3 - left) + [False] * left
        assert host_bytes(engine) == states.max_bytes, "what they had in common stays for the others"
    engine.check()


def test_of_a_resident_text_only_the_copy_is_given_up() -> None:
    engine = make(n_cells=256, n_ctx=100)
    old, _ = say(engine, SYSTEM)
    park(engine, old)
    engine.release([old])
    new, _ = say(engine, [1, 1, 1])
    park(engine, new)
    go_on(engine, new, [2])
    assert new.saved is not None
    engine.pool.registry.states.max_bytes = len(SYSTEM) * TOKEN
    engine.pool.room.trim()
    assert new.saved is None and new.resident and old.is_saved


def test_a_held_text_outside_the_buffer_is_never_given_up() -> None:
    engine = make(n_cells=64, n_ctx=60, host_cache_bytes=0)
    texts = [[n] * 30 for n in range(4)]
    held = start_all(engine, texts[:1], Usage())[0][0]
    idle = start_all(engine, texts[1:2], Usage())[0][0]
    park(engine, held)
    engine.release([idle])
    park(engine, idle)
    assert held.is_saved and idle.closed and host_bytes(engine) == 30 * TOKEN
    engine.release([held])
    assert held.closed and host_bytes(engine) == 0


def test_vectors_stay_bit_for_bit() -> None:
    engine = make(n_cells=64)
    sequence = engine.new()
    done = job(sequence, [-1] * 3)
    done.embeds = np.ones((3, 4), np.float32)
    engine.evaluate([done], Usage())
    park(engine, sequence)
    usage = Usage()
    engine.evaluate([job(sequence, [5])], usage)
    assert usage.evaluated_tokens == 1


def test_chains() -> None:
    first = Saved(0, 4, None, memoryview(b"abcd"))
    second = Saved(4, 6, first, memoryview(b"ef"))
    assert second.chain() == [first, second] and len(second) == 2
    assert [second.upto(n) for n in (3, 4, 5, 6, 9)] == [None, first, first, second, second]
    second.data = None
    assert second.where(4) == "host" and second.where(5) == "disk"
