"""Calls that wait at the same time share decodes: each gets what it would get alone, whatever becomes of the others."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from transformers_llamacpp import scheduler
from transformers_llamacpp.backend import DecodeStatus
from transformers_llamacpp.batch import Batch
from transformers_llamacpp.engine import Engine, Usage, Wanted
from transformers_llamacpp.errors import CacheFullError, ClosedError, DecodeError, GenerationCancelled
from transformers_llamacpp.sequence import Sequence
from transformers_llamacpp.testing import FakeBackend
from unit.naive import expected_logits, job, start_all, together

pytestmark = pytest.mark.once

N_VOCAB = 32


class Slow(FakeBackend):
    """A decode takes a little while, and `seen` says of how many tokens each one was."""

    def __init__(self, seconds: float = 0.002, **options: Any) -> None:
        super().__init__(**options)
        self.seconds = seconds
        self.seen: list[int] = []
        self.before_decode: Callable[[Batch], object] = lambda batch: None

    def decode(self, batch: Batch) -> DecodeStatus:
        self.before_decode(batch)
        status = super().decode(batch)
        self.seen.append(batch.n_tokens)
        time.sleep(self.seconds)
        return status


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, everybody is waited for."""
    monkeypatch.setattr(scheduler, "SHORTEST_WAIT", 3.0)
    monkeypatch.setattr(scheduler, "LONGEST_WAIT", 3.0)


def write(
    engine: Engine, text: list[int], n: int, usage: Usage, backend: FakeBackend, begin: threading.Barrier | None = None
) -> list[int]:
    """A call that begins with `text` and writes `n` tokens, when all have begun; every row is checked."""
    with engine.call():
        [sequence], [done] = start_all(engine, [text], usage, in_call=True)
        assert done is not None and done.logits is not None
        rows = done.logits
        if begin is not None:
            begin.wait(30)
        for _ in range(n):
            np.testing.assert_array_equal(rows[-1], expected_logits(text, backend))
            text = [*text, int(rows[-1].argmax())]
            rows = engine.step([sequence], text[-1:], usage, np.copy)
        engine.release([sequence])
    return text


@pytest.mark.parametrize("n", [2, 5, 8])
@pytest.mark.usefixtures("patient")
def test_steps_share_decodes(n: int) -> None:
    backend = Slow(n_cells=600, n_seq_max=16, n_batch=16)
    engine = Engine(backend, 64)
    usages, begin = [Usage() for _ in range(n)], threading.Barrier(n)
    together(n, lambda index: write(engine, [index, 1, 2], 30, usages[index], backend, begin) and None)
    engine.check()
    assert sum(usage.evaluated_tokens for usage in usages) == backend.decoded_tokens
    assert backend.decodes < 60 < n * 31, "far fewer decodes than calls have steps"
    assert sum(size == n for size in backend.seen) > 25, "nearly always all of them take part"
    assert all(31 <= usage.decode_calls <= 34 for usage in usages)


def test_one_call_alone_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Slow(0, n_cells=200)
    engine = Engine(backend, 64)
    monkeypatch.setattr(engine.scheduler, "decode", None)  # it is not even asked
    write(engine, [1, 2, 3], 20, Usage(), backend)


@pytest.mark.parametrize("options", [
    {"n_cells": 600, "n_seq_max": 16}, {"n_cells": 90, "n_seq_max": 3, "n_seq_limit": 3}, {"n_cells": 90, "n_seq_max": 16},
    {"n_cells": 90, "n_seq_max": 3, "n_seq_limit": 4, "recurrent": True}, {"n_cells": 120, "n_seq_max": 3, "window": 5},
    {"n_cells": 120, "n_seq_max": 16, "window": 5, "swa_full": True},
], ids=["room", "few ids", "few cells", "recurrent", "window", "full window"])  # fmt: skip
@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 20])
def test_everything_at_once(options: dict[str, Any], host_cache_bytes: int) -> None:
    """Prompts, steps, drafts that are taken back, forks; where the room is for two or three, calls push each other out."""
    backend = Slow(0.0003, n_batch=8, n_outputs=8, **options)
    engine = Engine(backend, 60, True, host_cache_bytes)
    n = 6

    def talk(index: int) -> None:
        draw, usage = random.Random(index), Usage()
        text = [index % 3, 1, 2]
        for _ in range(4):
            with engine.call():
                text = [*text[:20], *(draw.randrange(N_VOCAB) for _ in range(draw.randint(1, 9)))]
                [sequence], [done] = start_all(engine, [text], usage, in_call=True)
                assert done is not None and done.logits is not None
                np.testing.assert_array_equal(done.logits[-1], expected_logits(text, backend))
                for turn in range(6):
                    if turn == 3:
                        copy = engine.fork(sequence)
                        engine.discard([sequence])
                        sequence = copy
                    if turn % 2:
                        text.append(draw.randrange(N_VOCAB))
                        row = engine.step([sequence], text[-1:], usage, np.copy)[0]
                    else:  # a draft of three, of which two are taken
                        drafted = [draw.randrange(N_VOCAB) for _ in range(3)]
                        asked = job(sequence, drafted, [0, 1, 2])
                        engine.evaluate([asked], usage)
                        assert asked.logits is not None
                        for at in range(3):
                            expected = expected_logits([*text, *drafted[: at + 1]], backend)
                            np.testing.assert_array_equal(asked.logits[at], expected)
                        text += drafted[:2]
                        if not backend.limits.recurrent:
                            engine.truncate(sequence, len(text))
                        else:
                            text.append(drafted[2])
                        row = asked.logits[len(drafted) - 1 if backend.limits.recurrent else 1]
                    np.testing.assert_array_equal(row, expected_logits(text, backend))
                    assert list(sequence.tokens) == text
                engine.release([sequence])

    together(n, talk)
    engine.check()
    engine.forget()
    assert engine.pool.sequences == [] and backend.cells == []


def test_what_is_wrong_with_one_call_is_nothing_to_the_others() -> None:
    backend = Slow(n_cells=600, n_seq_max=16, n_batch=16)
    engine = Engine(backend, 64)
    written, wrong = [0] * 4, []

    def work(index: int) -> None:
        if index:
            write(engine, [index, 1, 2], 40, Usage(), backend)
            written[index] = 1
            return
        with engine.call():
            [sequence], _ = start_all(engine, [[9, 9, 9]], Usage(), in_call=True)
            for _ in range(8):
                def bad(rows: npt.NDArray[np.float32]) -> None:
                    raise ZeroDivisionError

                with pytest.raises(ZeroDivisionError):
                    engine.step([sequence], [1], Usage(), bad)
                assert list(sequence.tokens) == [9, 9, 9], "all or nothing"
                row = engine.step([sequence], [2], Usage(), np.copy)[0]
                np.testing.assert_array_equal(row, expected_logits([9, 9, 9, 2], backend))
                engine.truncate(sequence, 3)
                wrong.append(1)

    together(4, work)
    assert written == [0, 1, 1, 1] and len(wrong) == 8
    engine.check()


@pytest.mark.parametrize("status", [-1, -3, 2, 1])
def test_a_decode_that_fails(status: int) -> None:
    """Aborted, all of them know; invalid, each is tried alone; without room for all, there is room for each."""
    backend = Slow(n_cells=600, n_seq_max=16, n_batch=16)
    engine = Engine(backend, 64)
    failures: list[int] = []

    def work(index: int) -> None:
        text, usage = [index, 1, 2], Usage()
        with engine.call():
            [sequence], _ = start_all(engine, [text], usage, in_call=True)
            for turn in range(25):
                if index == 0 and turn in (5, 12, 18):
                    backend.fail_next(status, stored=status != 1)
                try:
                    row = engine.step([sequence], [turn], usage, np.copy)[0]
                except DecodeError as error:
                    assert error.status == status
                    failures.append(index)
                    row = engine.step([sequence], [turn], usage, np.copy)[0]
                text.append(turn)
                np.testing.assert_array_equal(row, expected_logits(text, backend))
                assert list(sequence.tokens) == text
            engine.release([sequence])

    together(4, work)
    engine.check()
    assert bool(failures) == (status == 2) or len(failures) <= 3, "a failure of all is no failure of each"


def test_too_little_room_is_told_to_whom_it_concerns() -> None:
    backend = Slow(n_cells=40, n_seq_max=8, n_batch=8)
    engine = Engine(backend, 64)
    done = [0] * 4

    def work(index: int) -> None:
        if index:
            write(engine, [index, 1, 2], 20, Usage(), backend)
        else:
            with engine.call():
                sequence = engine.new()
                with pytest.raises(CacheFullError, match="n_cells"):
                    engine.evaluate([job(sequence, list(range(30)) + list(range(20)))], Usage())
                assert not sequence.tokens
                engine.release([sequence])
        done[index] = 1

    together(4, work)
    assert done == [1] * 4
    engine.check()


def test_calls_that_do_not_fit_together_take_turns() -> None:
    """And do not push each other out at every token."""
    backend = Slow(0.001, n_cells=64, n_seq_max=8, n_batch=8)
    engine = Engine(backend, 64)
    pushes: list[float] = []
    park = engine.pool.room.park

    def counting(sequence: Sequence) -> None:
        pushes.append(sequence.held)
        park(sequence)

    engine.pool.room.park = counting  # type: ignore[method-assign]
    together(3, lambda index: write(engine, [index, 1, 2], 50, Usage(), backend) and None)
    assert 1 <= sum(pushes) < 15, "150 tokens, of which 64 fit"
    engine.check()


@pytest.mark.usefixtures("patient")
def test_a_long_prompt_comes_in_portions_between_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PORTION", 4)
    monkeypatch.setattr(scheduler, "PROMPT_SECONDS", 0.0)
    backend = Slow(n_cells=600, n_seq_max=16, n_batch=32, n_outputs=16)
    engine = Engine(backend, 256)
    begun, read = threading.Barrier(3), threading.Event()
    prompt = [index % N_VOCAB for index in range(100)]
    steps = [0, 0, 0]

    def work(index: int) -> None:
        with engine.call():
            if index == 0:
                begun.wait(30)
                sequence = engine.new()
                asked = job(sequence, prompt)
                engine.evaluate([asked], Usage())
                read.set()
                assert asked.logits is not None
                np.testing.assert_array_equal(asked.logits[-1], expected_logits(prompt, backend))
            else:
                [sequence], _ = start_all(engine, [[index, 1]], Usage(), in_call=True)
                begun.wait(30)
                while not read.is_set() and steps[index] < 200:
                    engine.step([sequence], [steps[index] % N_VOCAB], Usage(), np.copy)
                    steps[index] += 1
            engine.release([sequence])

    together(3, work)
    assert max(backend.seen) <= 4 + 2, "a portion and the steps"
    assert min(steps[1:]) >= 20, "a step for nearly every portion"


@pytest.mark.usefixtures("patient")
def test_who_comes_while_a_prompt_is_read_is_let_in() -> None:
    """A call that began alone does not keep the model to itself until its prompt is read; and its callback may wait for the
    other one."""
    backend = Slow(0.005, n_cells=600, n_seq_max=16, n_batch=4)
    engine = Engine(backend, 256)
    reading, written = threading.Event(), threading.Event()

    def progress(evaluated: int, total: int) -> bool:
        reading.set()
        return evaluated < 40 or written.wait(30)

    def work(index: int) -> None:
        with engine.call():
            if not index:
                sequence = engine.new()
                engine.evaluate([job(sequence, [1] * 100)], Usage(), Wanted(progress=progress))
                engine.release([sequence])
                return
        assert reading.wait(30)
        write(engine, [2, 3], 3, Usage(), backend)
        written.set()

    together(2, work)
    engine.check()


def test_a_cancelled_prompt_leaves_the_others_alone() -> None:
    backend = Slow(n_cells=600, n_seq_max=16, n_batch=8)
    engine = Engine(backend, 64)

    def work(index: int) -> None:
        if index:
            write(engine, [index, 1, 2], 30, Usage(), backend)
            return
        with engine.call():
            for _ in range(5):
                sequence = engine.new()
                with pytest.raises(GenerationCancelled):
                    wanted = Wanted(progress=lambda evaluated, _: evaluated < 16)
                    engine.evaluate([job(sequence, list(range(30)))], Usage(), wanted)
                assert not sequence.tokens
                engine.release([sequence])

    together(3, work)
    engine.check()


def test_a_slow_call_is_not_waited_for() -> None:
    backend = Slow(0.001, n_cells=600, n_seq_max=16)
    engine = Engine(backend, 200)
    ended: dict[int, float] = {}

    def work(index: int) -> None:
        with engine.call():
            [sequence], _ = start_all(engine, [[index, 1]], Usage(), in_call=True)
            for turn in range(100 if index else 5):
                engine.step([sequence], [turn % N_VOCAB], Usage(), np.copy)
                if not index:
                    time.sleep(0.2)
            ended[index] = time.perf_counter()
            engine.release([sequence])

    together(3, work)
    assert max(ended[1], ended[2]) < ended[0], "a hundred tokens while the other wrote five"


@pytest.mark.usefixtures("patient")
def test_an_interrupted_leader_takes_nobody_with_it() -> None:
    """`KeyboardInterrupt` in the decode of the thread that leads: the others go on, and nothing is wrong."""
    backend = Slow(n_cells=600, n_seq_max=16, n_batch=16)
    engine = Engine(backend, 64)
    count, interrupted = [0], []

    def before(batch: Batch) -> None:
        count[0] += 1
        if count[0] % 7 == 0:
            raise KeyboardInterrupt

    backend.before_decode = before

    def work(index: int) -> None:
        text, usage = [index, 1, 2], Usage()
        with engine.call():
            sequence: Sequence | None = None
            while len(text) < 40:
                try:
                    if sequence is None:
                        [sequence], _ = start_all(engine, [text], usage, in_call=True)
                    token = len(text) % N_VOCAB
                    row = engine.step([sequence], [token], usage, np.copy)[0]
                except KeyboardInterrupt:
                    interrupted.append(index)
                    continue
                text.append(token)
                np.testing.assert_array_equal(row, expected_logits(text, backend))
                assert list(sequence.tokens) == text

    together(4, work)
    engine.check()
    assert len(interrupted) >= 5


def test_closing_is_one_clear_error_for_all() -> None:
    backend = Slow(n_cells=600, n_seq_max=16, n_batch=16)
    engine = Engine(backend, 2000)
    told = []

    def work(index: int) -> None:
        if not index:
            time.sleep(0.1)
            engine.close()
            return
        with pytest.raises(ClosedError):
            write(engine, [index, 1, 2], 500, Usage(), backend)
        told.append(index)

    together(5, work)
    assert sorted(told) == [1, 2, 3, 4]


@pytest.mark.usefixtures("patient")
def test_layers_and_hidden_states_take_part() -> None:
    backend = Slow(n_cells=600, n_seq_max=16, n_batch=16)
    engine = Engine(backend, 200)

    def work(index: int) -> None:
        wanted = [Wanted(), Wanted(embeddings=True), Wanted(layers=(0, 1)), Wanted(layers=(1,))][index]
        alone = Engine(FakeBackend(n_cells=600, n_seq_max=16, n_batch=16), 200)
        text, usage = [index, 1], Usage()
        other = alone.new()
        with engine.call():
            sequence = engine.new()
            for turn in range(40):
                tokens = [index, 1] if turn == 0 else [turn % N_VOCAB]
                asked, same = job(sequence, tokens), job(other, tokens)
                engine.evaluate([asked], usage, wanted)
                alone.evaluate([same], Usage(), wanted)
                for name in ("logits", "embeddings", "layers"):
                    found, expected = getattr(asked, name), getattr(same, name)
                    assert (found is None) == (expected is None)
                    if found is not None and expected is not None:
                        np.testing.assert_array_equal(found, expected)
                text += tokens
            engine.release([sequence])

    together(4, work)
    engine.check()
    assert sum(size > 1 for size in backend.seen) > 30
