"""What may come between two lines of a call, when other calls share its decodes."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from transformers_llamacpp import scheduler as scheduler_module
from transformers_llamacpp.backend import DecodeStatus
from transformers_llamacpp.batch import Batch
from transformers_llamacpp.engine import Engine, Usage, Wanted
from transformers_llamacpp.errors import DecodeError
from transformers_llamacpp.mix import mixed
from transformers_llamacpp.sequence import Sequence
from transformers_llamacpp.testing import FakeBackend
from transformers_llamacpp.turn import Ask
from unit.naive import expected_logits, job, start_all

pytestmark = pytest.mark.once


class Slow(FakeBackend):
    def __init__(self, seconds: float = 0.002, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds
        self.before: Callable[[Batch], object] = lambda batch: None

    def decode(self, batch: Batch) -> DecodeStatus:
        self.before(batch)
        status = super().decode(batch)
        time.sleep(self.seconds)
        return status


def together(n: int, work: Callable[[int], None], seconds: float = 60) -> None:
    barrier = threading.Barrier(n)
    errors: list[BaseException] = []

    def begin(index: int) -> None:
        try:
            barrier.wait(10)
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=begin, args=(index,), daemon=True) for index in range(n)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(all_threads=True, file=sys.__stderr__)
        raise AssertionError("a call never came back")
    if errors:
        raise errors[0]


def begin(engine: Engine, text: list[int]) -> Sequence:
    [sequence], _ = start_all(engine, [text], Usage(), in_call=True)
    return sequence


def test_after_an_abort_the_books_are_right_at_once() -> None:
    backend = Slow(n_cells=600, n_seq_max=16, n_batch=16)
    engine = Engine(backend, 64)
    served = engine.scheduler._answered
    found: list[BaseException] = []
    armed = threading.Event()

    def watching(now: float, asks: list[Ask]) -> None:
        if armed.is_set() and any(ask.error for ask in asks):
            try:
                engine.pool.check()
            except AssertionError as error:
                found.append(error)
            armed.clear()
        served(now, asks)

    engine.scheduler._answered = watching  # type: ignore[method-assign]

    def work(index: int) -> None:
        with engine.call():
            sequence = begin(engine, [index, 1, 2])
            for turn in range(10):
                if index == 0 and turn == 5:
                    backend.fail_next(2, stored=2)
                    armed.set()
                with contextlib.suppress(DecodeError):
                    engine.step([sequence], [turn], Usage(), np.copy)

    together(3, work)
    assert not found, found





def test_rows() -> None:
    limits = FakeBackend(n_batch=16, n_outputs=4).limits
    engine = Engine(FakeBackend(n_batch=16, n_outputs=4, n_cells=600, n_seq_max=16), 64)
    seqs = [engine.new() for _ in range(6)]
    steps = [Ask.step([s], [1], Usage(), i, np.copy) for i, s in enumerate(seqs[:5])]
    three = np.arange(3, dtype=np.int32)
    batch = Batch(three, None, three, np.zeros(3, np.int32), np.array([0, 0, 1], np.int8), 1)
    prompt = Ask.of_batch(batch, [seqs[5]], [3], Usage(), 9)
    prompt.done = 2
    parts = mixed([prompt, *steps], limits, None)
    assert any(p.ask is prompt for p in parts)


def test_rows_end_to_end() -> None:
    """More streams than a decode has rows; a prompt comes"""
    backend = Slow(0.001, n_cells=900, n_seq_max=32, n_seq_limit=32, n_batch=16, n_outputs=3)
    engine = Engine(backend, 500)
    stop = threading.Event()
    done: list[float] = []

    def work(index: int) -> None:
        if index == 0:
            time.sleep(0.1)
            began = time.monotonic()
            with engine.call():
                begin(engine, [9, 1, 2, 3, 4, 5, 6])
            done.append(time.monotonic() - began)
            stop.set()
            return
        with engine.call():
            sequence = begin(engine, [index, 1, 2])
            n = 0
            while not stop.is_set() and n < 200:
                n += 1
                engine.step([sequence], [n % 30], Usage(), np.copy)
            done.append(n)

    together(12, work, 30)
    assert done[0] < 1, "the prompt is done before any of them has written 200 tokens"


@pytest.mark.parametrize("host", [0, 1 << 20])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_rows_that_share_what_they_begin_with(n: int, host: int) -> None:
    backend = Slow(0.001, n_cells=100, n_seq_max=16, n_batch=16)
    engine = Engine(backend, 90, True, host)

    def work(index: int) -> None:
        text = [index, *([3, 4] * 30)]
        with engine.call():
            first = begin(engine, text)
            rows = [first]
            while len(rows) < 4:
                rows.append(engine.fork(first, rows))
            for turn in range(5):
                tokens = [(turn + r) % 30 for r in range(4)]
                engine.step(rows, tokens, Usage(), np.copy)
                time.sleep(0.01)
            engine.discard(rows)

    together(n, work, 30)
    engine.check()


def test_lock_starvation() -> None:
    backend = Slow(0.005, n_cells=9000, n_seq_max=16, n_batch=8)
    engine = Engine(backend, 5000)
    took: list[Any] = []

    def work(index: int) -> None:
        if index == 2:
            time.sleep(0.1)
            for _ in range(5):
                at = backend.decodes
                began = time.monotonic()
                with engine.call():
                    took.append((backend.decodes - at, time.monotonic() - began))
                    begin(engine, [4, 4, 4])
                took.append((backend.decodes - at, time.monotonic() - began))
            return
        with engine.call():
            begin(engine, [index, *([1, 2] * 600)])

    together(3, work, 60)
    assert max(n for n, _ in took) < 20


def test_alone_prompt_blocks() -> None:
    backend = Slow(0.005, n_cells=9000, n_seq_max=16, n_batch=8)
    engine = Engine(backend, 5000)
    took: list[Any] = []

    def work(index: int) -> None:
        if index == 1:
            time.sleep(0.1)
            at = backend.decodes
            with engine.call():
                begin(engine, [4, 4, 4])
            took.append(backend.decodes - at)
            return
        with engine.call():
            begin(engine, [index, *([1, 2] * 600)])

    together(2, work, 60)
    assert max(took) < 20


def test_progress_that_waits_for_another_call() -> None:
    backend = Slow(0.001, n_cells=9000, n_seq_max=16, n_batch=8)
    engine = Engine(backend, 5000)

    def other() -> None:
        with engine.call():
            begin(engine, [7, 7, 7])

    def progress(done: int, total: int) -> None:
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(3)
        assert not thread.is_alive()

    with engine.call():
        s = engine.new()
        engine.evaluate([job(s, [1, 2] * 20)], Usage(), Wanted(progress=progress))





@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "SHORTEST_WAIT", 1.0)
    monkeypatch.setattr(scheduler_module, "LONGEST_WAIT", 1.0)


@pytest.mark.usefixtures("patient")
def test_innocent_leader() -> None:
    backend = Slow(n_cells=600, n_seq_max=16, n_batch=16)
    engine = Engine(backend, 64)
    got: dict[int, list[int]] = {}

    def before(batch: Batch) -> None:
        if batch.tokens is not None and 31 in batch.tokens.tolist():
            raise MemoryError("of the one with token 31")

    backend.before = before

    def work(index: int) -> None:
        with engine.call():
            sequence = begin(engine, [index, 1, 2])
            for turn in range(20):
                token = 31 if (index == 0 and turn % 4 == 3) else turn
                try:
                    row = engine.step([sequence], [token], Usage(), np.copy)[0]
                    np.testing.assert_array_equal(row, expected_logits(list(sequence.tokens), backend))
                except MemoryError:
                    got.setdefault(index, []).append(turn)

    together(3, work)
    assert list(got) == [0], got
    assert got[0] == [3, 7, 11, 15, 19]
    engine.check()
