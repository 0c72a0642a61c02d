"""Copies that are made while nobody waits: the next call finds them, and nobody notices otherwise."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from transformers_llamacpp.engine import Engine, Usage
from transformers_llamacpp.room import AHEAD
from transformers_llamacpp.sequence import Sequence
from transformers_llamacpp.state_folder import StateFolder
from unit.naive import at_once, say, start_all
from unit.test_saved import TOKEN, Counting
from unit.test_steps import Writing

pytestmark = pytest.mark.once

LONG = 300


class Copying(Counting):
    """`saves`: how many states were made, or asked for their size."""

    saves = 0

    def state_save(self, seq_id: int, partial: bool = False) -> memoryview:
        self.saves += 1
        return super().state_save(seq_id, partial)


def texts(n: int, length: int = LONG) -> list[list[int]]:
    return [[index, *((at * 7 + index) % 30 for at in range(length - 1))] for index in range(n)]


def written(engine: Engine, n: int = 4, length: int = LONG) -> None:
    """Calls that run side by side."""
    at_once([Writing(engine, text, 10).run for text in texts(n, length)])


def engine_of(host: int = 1 << 24, folder: StateFolder | None = None, **options: Any) -> tuple[Engine, Copying]:
    backend = Copying(**{"n_cells": 20000, "n_seq_max": 16, "n_batch": 64} | options)
    return Engine(backend, 10000, True, host, folder=folder), backend


def saved(engine: Engine) -> int:
    return sum(s.saved is not None and s.saved.stop == len(s) for s in engine.pool.sequences)


def test_the_next_call_copies_nothing() -> None:
    engine, backend = engine_of()
    written(engine)
    engine.write_back.join()
    assert saved(engine) == 4 and all(s.resident for s in engine.pool.sequences), "copied, and still there"
    copied = backend.saves
    assert copied >= 4
    say(engine, [31] * 20)
    assert backend.saves == copied
    assert sum(not s.resident for s in engine.pool.sequences) == 4, "they have left the buffer"
    engine.check()
    for text in texts(4):
        usage = Usage()
        engine.release(start_all(engine, [[*text, 1]], usage)[0])
        assert usage.reused_tokens == LONG, "and come back"


def test_calls_one_after_the_other_leave_it_to_the_next() -> None:
    engine, _ = engine_of()
    for text in texts(3):
        Writing(engine, text, 5).run()
    assert engine.write_back._thread is None
    assert saved(engine) == 2, "each has made the one before it leave"
    assert engine.pool.room.copy_ahead() and saved(engine) == 3
    assert not engine.pool.room.copy_ahead()


def test_a_call_comes_first() -> None:
    engine, _ = engine_of()
    inside, go = threading.Event(), threading.Event()

    def waiting() -> None:
        with engine.call():
            inside.set()
            go.wait(30)

    thread = threading.Thread(target=waiting)
    thread.start()
    inside.wait(30)
    written(engine)
    engine.write_back.begin()
    engine.write_back.join()
    assert saved(engine) == 0
    go.set()
    thread.join()
    engine.write_back.join()
    assert saved(engine) == 4, "the last one to leave sees to it"


@pytest.mark.parametrize(
    ("host", "options", "length"),
    [(0, {}, LONG), (1000, {}, LONG), (1 << 24, {"recurrent": True}, LONG), (1 << 24, {}, AHEAD + 1), (1 << 24, {}, 8)],
)
def test_what_is_not_worth_it(host: int, options: dict[str, Any], length: int) -> None:
    """No host memory, or too little; states of a size of their own; long texts, for which one would wait; short ones."""
    engine, _ = engine_of(host, **options)
    written(engine, 4, length)
    engine.write_back.join()
    assert saved(engine) == 0
    engine.check()


def test_held_texts_too() -> None:
    """A cache that somebody keeps has to leave for the next call as well."""
    engine, backend = engine_of()
    held: list[Sequence] = []
    at_once([lambda text=text: held.extend(start_all(engine, [text], Usage())[0]) for text in texts(4)])
    while engine.pool.room.copy_ahead():
        pass
    backend.saves = 0
    say(engine, [31] * 20)
    assert backend.saves == 0 and not any(sequence.resident for sequence in held)
    engine.check()


@pytest.mark.parametrize("folder", [False, True])
def test_where_host_memory_is_full_the_oldest_leave_as_they_would_for_the_next_call(folder: bool, tmp_path: Path) -> None:
    engine, backend = engine_of(TOKEN * (5 * LONG + 100), folder=StateFolder(tmp_path, {"a": 1}, 1 << 24) if folder else None)
    old = texts(9)[4:]
    for text in old:
        engine.release([say(engine, text)[0]])
    engine.release([say(engine, [31] * 60)[0]])
    assert saved(engine) == 5
    held, _ = say(engine, old[0])  # brought back, and kept by somebody
    engine.pool.room.park(held)
    written(engine, 3)
    engine.write_back.join()
    assert all(s.is_copied for s in engine.pool.sequences if s.resident)
    assert engine.pool.registry.states.host_bytes(engine.pool.sequences) <= engine.pool.registry.states.max_bytes
    assert held.is_saved and held.saved is not None and held.saved.where(len(held)) == "host"
    backend.saves = 0
    say(engine, [30] * 20)
    assert backend.saves == 0
    known = {tuple(text) for text in old if any(list(s.tokens[:LONG]) == text for s in engine.pool.sequences)}
    assert known == {tuple(text) for text in (old if folder else [old[0], old[4]])}
    engine.check()


def test_a_closed_engine() -> None:
    engine, _ = engine_of()
    written(engine)
    engine.close()
    engine.write_back.join()
    assert saved(engine) == 0
