"""The oracle beside the engine: it keeps plain token lists, shares nothing, and evaluates everything."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as List
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from transformers_llamacpp.batch import Job
from transformers_llamacpp.engine import Engine, Usage, Wanted
from transformers_llamacpp.sequence import Sequence, shared_prefix
from transformers_llamacpp.state_folder import StateFolder
from transformers_llamacpp.testing import FakeBackend, fake_logits


def expected_logits(text: List[int], backend: FakeBackend) -> npt.NDArray[np.float32]:
    """What a model that saw exactly `text` answers, worked out from the text alone."""
    window = backend.limits.n_swa
    seen = text[max(0, len(text) - window) :] if window else text
    return fake_logits([len(text) - 1, *seen], backend.limits.n_vocab)


def held(text: List[int], n_ctx: int, n_sink: int | None) -> list[int]:
    """What a context of `n_ctx` positions has of `text`: before a token for which there is no place, `n_slide` tokens behind
    the first `n_sink` go."""
    text = list(text)
    if n_sink is not None:
        n_slide = max(1, (n_ctx - n_sink) // 4)
        while len(text) > n_ctx:
            del text[n_sink : n_sink + n_slide]
    return text


def logits_of(text: List[int], backend: FakeBackend, n_ctx: int, n_sink: int | None) -> npt.NDArray[np.float32]:
    return expected_logits(held(text, n_ctx, n_sink), backend)


@dataclass
class NaiveRow:
    """`text` is what the fake stores: token ids, and `fake_token` numbers for vectors."""

    text: list[int]


@dataclass
class NaiveEngine:
    """`evaluated` counts what an engine without any memory would have decoded by now."""

    evaluated: int = 0
    rows: list[NaiveRow] = field(default_factory=list)

    def new(self, text: List[int] = ()) -> NaiveRow:
        self.rows.append(NaiveRow(list(text)))
        return self.rows[-1]

    def attempt(self, rows: List[NaiveRow], new: List[List[int]]) -> None:
        """A call that evaluates, whether or not it comes to its end."""
        self.evaluated += sum(len(row.text) + len(tokens) for row, tokens in zip(rows, new, strict=True))

    def append(self, row: NaiveRow, tokens: List[int]) -> None:
        row.text.extend(tokens)

    def truncate(self, row: NaiveRow, length: int) -> None:
        del row.text[length:]

    def fork(self, row: NaiveRow) -> NaiveRow:
        return self.new(row.text)

    def drop(self, row: NaiveRow) -> None:
        self.rows = [other for other in self.rows if other is not row]


def ids(*tokens: int) -> npt.NDArray[np.int32]:
    return np.array(tokens, np.int32)


def job(sequence: Sequence, tokens: List[int], outputs: List[int] | None = None) -> Job:
    """`outputs` are indices into `tokens`; by default the last one."""
    wanted = np.zeros(len(tokens), np.int8)
    wanted[[len(tokens) - 1] if outputs is None else list(outputs)] = 1
    return Job(sequence, np.array(tokens, np.int32), wanted)


def start_all(
    engine: Engine, texts: List[List[int]], usage: Usage, first_output: List[int] | None = None,
    beside: list[Sequence] | None = None, in_call: bool = False,
) -> tuple[list[Sequence], list[Job | None]]:  # fmt: skip
    """Begin `texts` and evaluate what is left of them, wave by wave as the model does.

    A job is `None` where an equal text of the same call has the answer already.
    """
    arrays = [np.array(text, np.int32) for text in texts]
    firsts = list(first_output or [len(text) - 1 for text in texts])
    starts = engine.start(arrays, firsts, usage, beside, in_call)
    sequences = [sequence for sequence, _ in starts]
    jobs: list[Job | None] = [None] * len(texts)
    try:
        depths: list[int] = []
        for i, (_, leader) in enumerate(starts):
            assert leader is None or leader < i
            depths.append(0 if leader is None else depths[leader] + 1)
        _wave(engine, texts, firsts, sequences, jobs, [i for i, depth in enumerate(depths) if not depth], usage)
        for depth in range(1, max(depths, default=0) + 1):
            _follow(engine, texts, arrays, firsts, starts, jobs, [i for i, d in enumerate(depths) if d == depth], usage)
    except BaseException:
        engine.release(sequences)
        raise
    return sequences, jobs


def _follow(
    engine: Engine, texts: List[List[int]], arrays: list[npt.NDArray[np.int32]], firsts: List[int],
    starts: List[tuple[Sequence, int | None]], jobs: list[Job | None], late: List[int], usage: Usage,
) -> None:  # fmt: skip
    sequences, rest = [sequence for sequence, _ in starts], []
    for i in late:
        leader = starts[i][1]
        assert leader is not None
        shared = shared_prefix(arrays[leader], arrays[i])
        twin = shared == len(texts[i]) == len(texts[leader]) and firsts[i] == firsts[leader]
        limit = len(texts[i]) if twin else min(shared, firsts[i], len(texts[i]) - 1)
        copied = engine.share(sequences[leader], sequences[i], limit, usage, sequences)
        assert copied <= limit
        if copied < len(texts[i]):
            rest.append(i)
    _wave(engine, texts, firsts, sequences, jobs, rest, usage)


def _wave(
    engine: Engine, texts: List[List[int]], firsts: List[int], sequences: list[Sequence],
    jobs: list[Job | None], chosen: List[int], usage: Usage,
) -> None:  # fmt: skip
    now = []
    for i in chosen:
        done = len(sequences[i].tokens)
        assert done <= firsts[i] and done < len(texts[i]), (
            "at least one token, and all wanted rows, left to evaluate"
        )
        assert list(sequences[i].tokens) == list(texts[i][:done])
        jobs[i] = job(sequences[i], texts[i][done:], list(range(firsts[i] - done, len(texts[i]) - done)))
        now.append(jobs[i])
    if now:
        engine.evaluate([j for j in now if j is not None], usage, Wanted(prompt=True))


A = [1, 2, 3, 4, 5, 6]


def make(
    n_ctx: int = 60, prefix_reuse: bool = True, host_cache_bytes: int = 1 << 20,
    n_sink: int | None = None, reuse_min_chunk: int = 0, folder: StateFolder | None = None, **backend: Any
) -> Engine:  # fmt: skip
    return Engine(FakeBackend(**backend), n_ctx, prefix_reuse, host_cache_bytes, n_sink, reuse_min_chunk, folder)


def say(engine: Engine, text: list[int], first_output: int | None = None) -> tuple[Sequence, Usage]:
    """Start one text, evaluate what is left, check the answer."""
    usage = Usage()
    firsts = None if first_output is None else [first_output]
    [sequence], [done] = start_all(engine, [text], usage, firsts)
    assert done is not None and done.logits is not None
    n_sink = engine.pool.keeping.n_sink
    np.testing.assert_array_equal(done.logits[-1], logits_of(text, engine.backend, engine.n_ctx, n_sink))  # type: ignore[arg-type]
    engine.check()
    return sequence, usage


def go_on(engine: Engine, sequence: Sequence, tokens: list[int]) -> Usage:
    usage = Usage()
    done = job(sequence, tokens)
    text = [*sequence.tokens, *tokens]
    engine.evaluate([done], usage)
    assert done.logits is not None
    n_sink = engine.pool.keeping.n_sink
    np.testing.assert_array_equal(done.logits[-1], logits_of(text, engine.backend, engine.n_ctx, n_sink))  # type: ignore[arg-type]
    engine.check()
    return usage


def counts(usage: Usage) -> tuple[int, int]:
    return usage.reused_tokens, usage.evaluated_tokens


def together(n: int, work: Callable[[int], None]) -> None:
    """`work(0 .. n - 1)` at once; what one raises is raised here."""
    barrier = threading.Barrier(n)

    def begin(index: int) -> None:
        barrier.wait(10)
        work(index)

    with ThreadPoolExecutor(n) as executor:
        for future in [executor.submit(begin, index) for index in range(n)]:
            future.result(60)


def at_once(works: List[Callable[[], object]]) -> None:
    """All of them; what one raises is raised here."""
    together(len(works), lambda index: works[index]() and None)
