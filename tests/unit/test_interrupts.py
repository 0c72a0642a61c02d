"""Ctrl-C between any two lines: whatever was half written, the next call finds books that are right."""

from __future__ import annotations

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import transformers_llamacpp
from transformers_llamacpp import room
from transformers_llamacpp.engine import Engine, Usage
from transformers_llamacpp.errors import ClosedError
from unit.naive import go_on, job, make, say

pytestmark = pytest.mark.once

HERE = str(Path(transformers_llamacpp.__file__).parent)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full window": {"window": 5, "swa_full": True},
    "window": {"window": 5},
    "recurrent": {"recurrent": True},
    "sliding": {"n_sink": 2, "n_ctx": 24},
}


class Interrupt:
    """Raises `kind` at the `n`-th line that the package's own code runs."""

    def __init__(self, n: int, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.left, self.kind = n, kind

    def __enter__(self) -> Interrupt:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def trace(self, frame: FrameType, event: str, argument: object) -> Any:
        ours = frame.f_code.co_filename.startswith(HERE) and "testing.py" not in frame.f_code.co_filename
        if ours and event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise self.kind
        return self.trace if ours else None


def chat(engine: Engine, seed: int) -> None:
    """A little of everything."""
    draw = random.Random(seed)
    for _ in range(3):
        shared = [1, 2, 3, 4, 5][: draw.randint(0, 5)]
        text = [*shared, *draw.choices(range(8), k=draw.randint(1, 8))]
        sequence, _ = say(engine, text)
        fork = engine.fork(sequence)
        engine.evaluate([job(fork, [1, 2]), job(sequence, [3])], Usage())
        engine.truncate(fork, draw.randint(0, len(fork.tokens)))
        if fork.tokens:
            engine.evaluate([job(fork, [4])], Usage())
            engine.step([fork, sequence], [4, 5], Usage(), np.copy)
        engine.discard([fork])
        engine.release([sequence])


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("kind", KINDS)
def test_a_line_at_random(kind: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """`TimeoutError`: as the handler of a signal raises it."""
    monkeypatch.setattr(room, "SPARE", 4)
    draw = random.Random(kind)
    options = {"n_cells": 64, "n_seq_max": 3, "n_ctx": 30, **KINDS[kind]}
    engine = make(**options, host_cache_bytes=2000)
    kept, _ = say(engine, [6, 6, 5, 5])
    for seed in range(150):
        known = list(kept.tokens)
        with pytest.raises(error), Interrupt(draw.randint(1, 1500), error):
            while True:
                chat(engine, seed)
        with engine.lock:  # callers give back what they hold in a `finally`; here nobody could
            mine = [s for s in engine.pool.sequences if s.held and s is not kept]
        engine.check()
        engine.release(mine)
        engine.check()
        assert list(kept.tokens) == known
        if not seed % 10:
            go_on(engine, kept, [seed % 8])
            engine.truncate(kept, len(known))
        chat(engine, seed)  # all answers are checked
    engine.close()
    with pytest.raises(ClosedError):
        engine.forget()


def test_whoever_is_interrupted_in_a_call_does_not_keep_the_lock() -> None:
    """Wherever it is, in one that begins and ends as well: the lock is left by Python code, too."""
    engine = make(n_cells=64)

    def free() -> bool:
        with engine.lock.without_waiting() as mine:
            return mine

    interrupted, n = True, 0
    while interrupted:
        interrupted, n = False, n + 1
        try:
            with Interrupt(n), engine.call():
                pass
        except KeyboardInterrupt:
            interrupted = True
        with ThreadPoolExecutor(1) as executor:
            assert executor.submit(free).result(10), f"at line {n}"
    assert n > 30
    say(engine, [1, 2, 3])
