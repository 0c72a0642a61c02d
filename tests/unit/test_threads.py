"""Several threads on one engine: every answer is right, and the books are too."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from transformers_llamacpp.engine import Engine, Usage, Wanted
from transformers_llamacpp.errors import ClosedError, GenerationCancelled
from transformers_llamacpp.testing import FakeBackend
from unit.naive import expected_logits, job, start_all

pytestmark = pytest.mark.once

THREADS = 6


def run(work: Callable[[int], None]) -> None:
    """`work(0 .. THREADS - 1)` at once; what one raises is raised here."""
    barrier = threading.Barrier(THREADS)

    def begin(index: int) -> None:
        barrier.wait(10)
        work(index)

    with ThreadPoolExecutor(THREADS) as executor:
        for future in [executor.submit(begin, index) for index in range(THREADS)]:
            future.result(60)


@pytest.mark.parametrize(
    "kind", [{}, {"window": 5}, {"recurrent": True}], ids=["plain", "window", "recurrent"]
)
@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 20])
def test_conversations_side_by_side(kind: dict[str, int], host_cache_bytes: int) -> None:
    """Cells and ids for two or three of them: they push each other out and come back all the time."""
    backend = FakeBackend(n_cells=96, n_seq_max=2, n_seq_limit=4, n_batch=4, **kind)  # type: ignore[arg-type]
    engine = Engine(backend, 64, True, host_cache_bytes)
    totals = [Usage() for _ in range(THREADS)]

    def talk(index: int) -> None:
        rng = random.Random(index)
        text = [index % 2, 1, 2]
        for turn in range(6):
            text = [*text, *(rng.randrange(4) for _ in range(3))]
            [sequence], [done] = start_all(engine, [text], totals[index])
            assert done is not None and done.logits is not None
            np.testing.assert_array_equal(done.logits[-1], expected_logits(text, backend))
            copy = engine.fork(sequence) if turn % 2 else sequence
            for _ in range(2):
                text.append(rng.randrange(4))
                done = job(copy, text[-1:])
                engine.evaluate([done], totals[index])
                assert done.logits is not None
                np.testing.assert_array_equal(done.logits[-1], expected_logits(text, backend))
            if copy is not sequence:
                engine.pool.release_later([copy])  # as a finalizer does, on any thread
            engine.release([sequence])
            engine.check()

    run(talk)
    engine.check()
    assert sum(usage.evaluated_tokens for usage in totals) == backend.decoded_tokens
    assert sum(usage.decode_calls for usage in totals) >= backend.decodes, "several may share one"
    engine.forget()
    assert engine.pool.sequences == [] and backend.cells == []


def test_one_cancelled_call_leaves_the_others_alone() -> None:
    backend = FakeBackend(n_cells=400, n_batch=2)
    engine = Engine(backend, 64)

    def work(index: int) -> None:
        text = [index, *range(20)]
        for _ in range(5):
            sequence = engine.new()
            done = job(sequence, text)
            if index % 2:
                with pytest.raises(GenerationCancelled):
                    engine.evaluate([done], Usage(), Wanted(progress=lambda evaluated, _: evaluated < 6))
                assert len(sequence) == 0
            else:
                engine.evaluate([done], Usage())
                assert done.logits is not None
                np.testing.assert_array_equal(done.logits[-1], expected_logits(text, backend))
            engine.release([sequence])

    run(work)
    engine.check()


def test_closing_under_the_others_is_one_clear_error() -> None:
    engine = Engine(FakeBackend(n_cells=400, n_batch=2), 64)
    closing = threading.Event()

    def work(index: int) -> None:
        try:
            for turn in range(2000):
                if index == 0 and turn == 5:
                    engine.close()
                    closing.set()
                [sequence], _ = start_all(engine, [[index, turn % 7, 3, 4]], Usage())
                engine.release([sequence])
        except ClosedError:
            assert closing.wait(10)
        else:
            raise AssertionError("the engine was closed, and nobody said so")

    run(work)
