"""Steps one after the other that the call which decodes makes for all: each call gets what it gets alone, and its errors."""

from __future__ import annotations

import ctypes
import random
import threading
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from transformers_llamacpp.engine import Engine, Usage
from transformers_llamacpp.errors import CacheFullError, ContextOverflowError, DecodeError, InvalidInputError
from transformers_llamacpp.sequence import Sequence
from unit.naive import at_once, expected_logits, logits_of, say, start_all
from unit.test_scheduler import Slow

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("patient")]

N_VOCAB = 32


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, everybody is waited for."""
    from transformers_llamacpp import scheduler

    monkeypatch.setattr(scheduler, "SHORTEST_WAIT", 3.0)
    monkeypatch.setattr(scheduler, "LONGEST_WAIT", 3.0)


class Writing:
    """A call that writes `n` tokens after `text`: the likeliest one each time. `threads`: who made its steps."""

    def __init__(self, engine: Engine, text: list[int], n: int) -> None:
        self.engine, self.text, self.n = engine, list(text), n
        self.usage, self.threads = Usage(), Counter[int]()
        self.begin: threading.Barrier | None = None
        self.fails_after: int | None = None
        self.odd: dict[int, int] = {}
        """Tokens to go on with in place of the likeliest ones, by how many are left."""

    def run(self) -> None:
        with self.engine.call():
            [sequence], [done] = start_all(self.engine, [self.text], self.usage, in_call=True)
            assert done is not None and done.logits is not None
            try:
                if self.begin is not None:
                    self.begin.wait(30)
                tokens = self.after(done.logits[-1:].copy())
                if tokens is not None:
                    self.engine.steps([sequence], tokens, self.usage, np.copy, self.after)
            finally:
                self.length = len(sequence)
                self.engine.release([sequence])

    def after(self, rows: npt.NDArray[np.float32]) -> list[int] | None:
        self.threads[threading.get_ident()] += 1
        expected = logits_of(self.text, self.engine.backend, self.engine.n_ctx, self.engine.pool.keeping.n_sink)  # type: ignore[arg-type]
        np.testing.assert_array_equal(rows, [expected])
        if self.n == self.fails_after:
            raise ValueError("after")
        if not self.n:
            return None
        self.n -= 1
        self.text.append(self.odd.get(self.n, int(rows[0].argmax())))
        return self.text[-1:]


def engine_of(**options: Any) -> tuple[Engine, Slow]:
    backend = Slow(**{"n_cells": 900, "n_seq_max": 16, "n_batch": 16} | options)
    return Engine(backend, 90), backend


@pytest.mark.parametrize("n", [2, 5, 8])
def test_one_thread_makes_the_steps_of_all(n: int) -> None:
    engine, backend = engine_of()
    calls = [Writing(engine, [index, 1, 2], 20) for index in range(n)]
    barrier = threading.Barrier(n)
    for one in calls:
        one.begin = barrier
    at_once([one.run for one in calls])
    assert all(len(one.text) == 23 and one.length == 23 for one in calls)
    assert all(one.usage.evaluated_tokens == 3 + 20 and one.usage.decode_calls <= 22 for one in calls)
    shared = [size for size in backend.seen if size == n]
    assert len(shared) >= 19, "all went together"
    made = sum((one.threads for one in calls), Counter())
    assert max(made.values()) >= n * 18, "and hardly a thread woke up for them"
    engine.check()


def test_different_lengths() -> None:
    engine, _ = engine_of()
    calls = [Writing(engine, [index, 1, 2], 3 * index) for index in range(8)]
    at_once([one.run for one in calls])
    assert [one.length for one in calls] == [3 + 3 * index for index in range(8)]
    assert all(one.usage.evaluated_tokens == one.length for one in calls)
    engine.check()


@pytest.mark.parametrize("culprit", [0, 1, 3])
def test_who_fails_afterwards_fails_alone_and_keeps_its_step(culprit: int) -> None:
    engine, _ = engine_of()
    calls = [Writing(engine, [index, 1, 2], 12) for index in range(4)]
    calls[culprit].fails_after = 5
    failed = []

    def guarded() -> None:
        with pytest.raises(ValueError, match="after"):
            calls[culprit].run()
        failed.append(calls[culprit].length)

    at_once([guarded if index == culprit else one.run for index, one in enumerate(calls)])
    assert failed == [3 + 7]
    assert all(one.length == 15 for index, one in enumerate(calls) if index != culprit)
    engine.check()


def test_who_fails_reading_takes_its_step_back() -> None:
    engine, _ = engine_of()
    good = Writing(engine, [9, 1, 2], 12)
    lengths = []

    def bad() -> None:
        seen = []

        def read(logits: npt.NDArray[np.float32]) -> int:
            seen.append(0)
            if len(seen) == 4:
                raise ValueError("reading")
            return int(logits[0].argmax())

        with engine.call():
            [sequence], _ = start_all(engine, [[1, 2, 3]], Usage(), in_call=True)
            with pytest.raises(ValueError, match="reading"):
                engine.steps([sequence], [5], Usage(), read, lambda token: [token])
            lengths.append(len(sequence))
            engine.release([sequence])

    at_once([good.run, bad])
    assert lengths == [3 + 3] and good.length == 15
    engine.check()


def test_a_context_that_gets_full() -> None:
    engine, _ = engine_of()
    calls = [Writing(engine, [0, 1, 2], 100), Writing(engine, [1, 1, 2], 50)]

    def full() -> None:
        with pytest.raises(ContextOverflowError):
            calls[0].run()

    at_once([full, calls[1].run])
    assert [one.length for one in calls] == [90, 53]
    engine.check()


def test_a_context_that_slides() -> None:
    backend = Slow(n_cells=900, n_seq_max=16, n_batch=16)
    engine = Engine(backend, 24, n_sink=2)
    calls = [Writing(engine, [index, 1, 2], 60) for index in range(3)]
    at_once([one.run for one in calls])
    assert all(len(one.text) == 63 for one in calls)
    engine.check()


def test_a_token_that_is_none() -> None:
    engine, _ = engine_of()
    calls = [Writing(engine, [index, 1, 2], 20) for index in range(3)]
    calls[1].odd = {9: N_VOCAB}

    def wrong() -> None:
        with pytest.raises(InvalidInputError, match="token id 32"):
            calls[1].run()

    at_once([calls[0].run, wrong, calls[2].run])
    assert [one.length for one in calls] == [23, 3 + 10, 23]
    engine.check()


def test_calls_that_do_not_fit_together_take_turns() -> None:
    engine, _ = engine_of(n_cells=100)
    calls = [Writing(engine, [index, 1, 2], 60) for index in range(3)]
    at_once([one.run for one in calls])
    assert all(one.length == 63 for one in calls)
    engine.check()


@pytest.mark.parametrize(("status", "stored"), [(-1, 0), (-3, 2), (2, 1)])
def test_a_decode_that_fails(status: int, stored: int) -> None:
    """One that is aborted is aborted for all; else each call makes its step alone."""
    engine, backend = engine_of()
    calls = [Writing(engine, [index, 1, 2], 20) for index in range(4)]
    backend.before_decode = lambda batch: len(backend.seen) == 10 and backend.fail_next(status, stored)
    errors = []

    def guarded(one: Writing) -> None:
        try:
            one.run()
        except DecodeError as error:
            errors.append(error.status)

    at_once([lambda one=one: guarded(one) for one in calls])
    assert errors == ([2] * len(errors) if status == 2 else [status] * len(errors)) and len(errors) <= 4
    assert all(one.length == 23 for one in calls) or errors
    engine.check()


def test_on_the_main_thread_no_steps_of_others_are_made() -> None:
    """For there an interrupt comes between any two lines."""
    engine, _ = engine_of()
    mine, other = Writing(engine, [0, 1, 2], 30), Writing(engine, [1, 1, 2], 30)
    mine.begin = other.begin = threading.Barrier(2)
    thread = threading.Thread(target=other.run)
    thread.start()
    mine.run()
    thread.join(30)
    assert mine.length == other.length == 33
    assert threading.main_thread().ident not in other.threads


def test_what_a_signal_raises_on_the_main_thread_is_raised_there() -> None:
    """A timeout's handler raises an ordinary exception wherever the main thread is: also in a decode that it makes for all."""
    for when in (8, 12, 16, 20):
        engine, backend = engine_of()
        mine, others = Writing(engine, [0, 1, 2], 30), [Writing(engine, [index, 1, 2], 30) for index in (1, 2)]
        for one in (mine, *others):
            one.begin = threading.Barrier(3) if one is mine else mine.begin
        raised: list[int] = []

        def handler(batch: Any, backend: Any = backend, raised: list[int] = raised, when: int = when) -> None:
            if threading.current_thread() is threading.main_thread() and len(backend.seen) >= when and not raised:
                raised.append(1)
                raise TimeoutError("too long")

        backend.before_decode = handler
        threads = [threading.Thread(target=one.run) for one in others]
        for thread in threads:
            thread.start()
        try:
            mine.run()
        except TimeoutError:
            assert raised
        else:
            assert not raised, "swallowed"
        for thread in threads:
            thread.join(30)
        assert [one.length for one in others] == [33, 33]
        engine.check()


class Interrupt(BaseException):
    """As a signal's handler would raise it."""


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_interrupted_nobody_else_gets_a_wrong_token(seed: int) -> None:
    """Every row is checked as it comes; a call that was in another one's hands at that moment may be told so."""
    draw = random.Random(seed)
    engine, backend = engine_of()
    calls = [Writing(engine, [index, 1, 2], 40) for index in range(4)]
    when = draw.randrange(3, 30)
    armed: list[Any] = []
    ended: list[str] = []

    def interrupt(batch: Any) -> None:
        if len(backend.seen) == when and not armed:  # on the thread that decodes: it meets it wherever it is a moment later
            armed.append(batch)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Interrupt))

    backend.before_decode = interrupt

    def guarded(one: Writing) -> None:
        try:
            one.run()
        except Interrupt:
            ended.append("interrupted")
        except DecodeError as error:
            assert "was interrupted; call generate() again" in str(error)
            ended.append("told")
        else:
            assert one.length == 43
            ended.append("done")

    at_once([lambda one=one: guarded(one) for one in calls])
    assert Counter(ended)["interrupted"] == 1 and Counter(ended)["told"] <= 1
    engine.check()
    with engine.lock:
        assert not engine.lock.interrupted or engine.pool.check() is None


@pytest.mark.parametrize("seed", range(20))
def test_anything_at_once(seed: int) -> None:
    """Calls of all lengths come and go, some fail, and the buffer holds three quarters of them."""
    draw = random.Random(seed)
    options = draw.choice([{}, {"window": 6}, {"n_cells": 160}, {"recurrent": True}])
    engine, _ = engine_of(**{"seconds": 0.0005} | options)

    def user(user_seed: int) -> None:
        mine = random.Random(user_seed)
        for _ in range(4):
            one = Writing(engine, mine.choices(range(N_VOCAB), k=mine.randint(1, 12)), mine.randint(0, 40))
            if mine.random() < 0.2:
                one.fails_after = mine.randint(0, one.n)
                with pytest.raises((ValueError, CacheFullError)):
                    one.run()
            else:
                one.run()

    at_once([lambda index=index: user(seed * 100 + index) for index in range(5)])
    engine.check()


def test_a_call_alone() -> None:
    engine, backend = engine_of()
    one = Writing(engine, [1, 2, 3], 10)
    one.run()
    assert one.length == 13 and backend.seen == [3] + [1] * 10
    sequence, _ = say(engine, [4, 5])
    found: list[Sequence] = []
    engine.steps([sequence], [6], Usage(), np.copy, lambda rows: found.append(rows))
    np.testing.assert_array_equal(found[0], [expected_logits([4, 5, 6], backend)])
