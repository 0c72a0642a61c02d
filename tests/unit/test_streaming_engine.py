"""`n_sink`: a full context slides, and nobody else notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformers_llamacpp.engine import Engine, Usage
from transformers_llamacpp.errors import CacheFullError, DecodeError, UnsupportedFeatureError
from transformers_llamacpp.sequence import Sequence
from transformers_llamacpp.state_folder import StateFolder
from unit.naive import counts, go_on, held, job, logits_of, make, say, start_all

pytestmark = pytest.mark.once

KINDS: list[dict[str, Any]] = [{}, {"window": 4, "swa_full": True}]
both = pytest.mark.parametrize("kind", KINDS, ids=["plain", "window"])
TEXT = [n * n % 23 for n in range(80)]
N_CTX, N_SINK, N_SLIDE = 20, 3, 4


def streaming(**options: Any) -> Engine:
    return make(**{"n_ctx": N_CTX, "n_sink": N_SINK, "n_cells": 256, **options})


def in_memory(engine: Engine, sequence: Sequence) -> list[int]:
    assert sequence.seq_id is not None
    return engine.backend.text(sequence.seq_id)  # type: ignore[attr-defined]


@both
def test_token_by_token(kind: dict[str, Any]) -> None:
    engine = streaming(**kind)
    sequence, _ = say(engine, TEXT[:N_CTX])
    for token in TEXT[N_CTX:]:
        assert go_on(engine, sequence, [token]).evaluated_tokens == 1
        assert in_memory(engine, sequence) == held(list(sequence.tokens), N_CTX, N_SINK)
    assert list(sequence.tokens) == TEXT and len(sequence) <= N_CTX


@both
@pytest.mark.parametrize("length", [N_CTX, N_CTX + 1, N_CTX + N_SLIDE, N_CTX + N_SLIDE + 1, 80])
def test_in_one_go(kind: dict[str, Any], length: int) -> None:
    engine = streaming(**kind)
    usage = Usage()
    [sequence], [done] = start_all(engine, [TEXT[:length]], usage, [0])
    assert counts(usage) == (0, length) and done is not None
    wanted = [logits_of(TEXT[: n + 1], engine.backend, N_CTX, N_SINK) for n in range(length)]  # type: ignore[arg-type]
    np.testing.assert_array_equal(done.logits, wanted)
    assert in_memory(engine, sequence) == held(TEXT[:length], N_CTX, N_SINK)


@both
def test_rows_slide_each_at_its_time(kind: dict[str, Any]) -> None:
    engine = streaming(**kind)
    texts = [TEXT[:10], TEXT[5:24], [*TEXT[:10], *TEXT[40:70]], TEXT[3:23]]
    sequences, _ = start_all(engine, texts, Usage())
    for token in range(12):
        jobs = [job(sequence, [token]) for sequence in sequences]
        engine.evaluate(jobs, Usage())
        engine.check()
        for text, done in zip(texts, jobs, strict=True):
            text.append(token)
            np.testing.assert_array_equal(done.logits, [logits_of(text, engine.backend, N_CTX, N_SINK)])  # type: ignore[arg-type]


@both
def test_forks_do_not_notice(kind: dict[str, Any]) -> None:
    engine = streaming(**kind)
    first, _ = say(engine, TEXT[:N_CTX])
    second = engine.fork(first)
    third = engine.fork(first)
    go_on(engine, first, [1])
    assert in_memory(engine, second) == in_memory(engine, third) == TEXT[:N_CTX]
    third.truncate(10)
    for sequence in (third, second, first):
        for token in range(9):
            assert go_on(engine, sequence, [token]).evaluated_tokens == 1


@both
def test_beams_slide_together(kind: dict[str, Any]) -> None:
    engine = streaming(**kind)
    beams = [say(engine, TEXT[:15])[0]]
    beams += [engine.fork(beams[0]) for _ in range(3)]
    for step in range(12):
        jobs = [job(beam, [step + number]) for number, beam in enumerate(beams)]
        engine.evaluate(jobs, Usage())
        for done in jobs:
            text = list(done.sequence.tokens)
            np.testing.assert_array_equal(done.logits, [logits_of(text, engine.backend, N_CTX, N_SINK)])  # type: ignore[arg-type]
        kept = [engine.fork(beams[n], beams) for n in (0, 0, 1, 3)]
        engine.discard(beams)
        beams = kept
        engine.check()


@both
def test_the_twin_of_a_text_that_slid(kind: dict[str, Any]) -> None:
    engine = streaming(**kind)
    usage = Usage()
    sequences, jobs = start_all(engine, [TEXT[:50]] * 2, usage)
    assert jobs[1] is None and counts(usage) == (50, 50)
    assert [list(s.tokens) for s in sequences] == [TEXT[:50]] * 2
    for sequence in sequences:
        go_on(engine, sequence, [1] * 7)


@both
@pytest.mark.parametrize("where", ["buffer", "host", "disk"])
def test_a_chat_that_slid_goes_on_where_it_was(kind: dict[str, Any], where: str, tmp_path: Path) -> None:
    folder = None
    if where == "disk":
        folder = StateFolder(tmp_path, make(**kind).backend.fingerprint, 1 << 20)
    engine = streaming(folder=folder, host_cache_bytes=0 if folder else 1 << 20, **kind)
    sequence, _ = say(engine, TEXT[:50])
    engine.release([sequence])
    if where != "buffer":
        engine.pool.room.park(sequence)
        engine.pool.room.trim()
    _, usage = say(engine, [*TEXT[:50], 9])
    assert counts(usage) == (50, 1) and usage.reuse == [{"buffer": "memory"}.get(where, where)]


@both
@pytest.mark.parametrize("parked", [False, True])
def test_a_crop_that_stays_behind_the_last_slide(kind: dict[str, Any], parked: bool) -> None:
    engine = streaming(**kind)
    sequence, _ = say(engine, TEXT[: N_CTX + N_SLIDE])
    if parked:
        engine.pool.room.park(sequence)
    sequence.truncate(N_CTX + 1)
    assert go_on(engine, sequence, [9]).evaluated_tokens == 1
    sequence.truncate(N_CTX)
    assert go_on(engine, sequence, [8]).evaluated_tokens == 1


@both
def test_a_crop_across_a_slide(kind: dict[str, Any]) -> None:
    """Drafts are taken back; what the text was before it slid is still there."""
    engine = streaming(**kind)
    sequence, _ = say(engine, TEXT[: N_CTX - 1])
    for _ in range(3):
        go_on(engine, sequence, [5, 6, 7])
        sequence.truncate(N_CTX - 1)
        assert go_on(engine, sequence, [5]).evaluated_tokens == 1
        sequence.truncate(N_CTX - 1)
    sequence.truncate(2)
    assert go_on(engine, sequence, [9]).evaluated_tokens <= 3


@both
def test_a_match_in_the_middle_of_a_text_that_slid(kind: dict[str, Any]) -> None:
    engine = streaming(**kind, host_cache_bytes=1 << 20)
    sequence, _ = say(engine, TEXT[:50])
    engine.release([sequence])
    engine.pool.room.park(sequence)
    _, usage = say(engine, [*TEXT[:49], 9])
    assert counts(usage) == (49, 1)
    cold, usage = say(streaming(**kind), [*TEXT[:30], 9])
    assert counts(usage) == (0, 31)
    warm, usage = say(engine, [*TEXT[:30], 9])
    assert usage.reused_tokens >= N_SINK
    assert held(list(warm.tokens), N_CTX, N_SINK) == held(list(cold.tokens), N_CTX, N_SINK)


@both
def test_a_failure_after_a_slide(kind: dict[str, Any]) -> None:
    engine = streaming(**kind)
    sequence, _ = say(engine, TEXT[:N_CTX])
    for status in (-1, -3, 2):
        engine.backend.fail_next(status, 0)  # type: ignore[attr-defined]
        with pytest.raises(DecodeError):
            engine.evaluate([job(sequence, [1] * 6)], Usage())
        engine.check()
        assert list(sequence.tokens) == TEXT[:N_CTX]
    go_on(engine, sequence, [1] * 6)


def test_without_sinks_and_with_a_context_of_few_tokens() -> None:
    for n_ctx, n_sink in ((4, 0), (4, 3), (8, 0)):
        engine = streaming(n_ctx=n_ctx, n_sink=n_sink)
        sequence, _ = say(engine, TEXT[:30])
        for token in range(9):
            go_on(engine, sequence, [token])
        assert len(sequence) <= n_ctx


def test_cells_for_all_rows_are_needed() -> None:
    engine = streaming(n_cells=30, n_seq_max=2)
    first, _ = say(engine, TEXT[:N_CTX])
    second = engine.fork(first)
    with pytest.raises(CacheFullError, match="need cells of their own"):
        engine.evaluate([job(first, [1]), job(second, [2])], Usage())
    engine.check()
    assert list(first.tokens) == list(second.tokens) == TEXT[:N_CTX]
    for sequence in (first, second):
        go_on(engine, sequence, [3])


def test_vectors_that_slid_away_do_not_come_back() -> None:
    engine = streaming()
    sequence = engine.new()
    done = job(sequence, [-1] * 10)
    done.embeds = np.ones((10, 4), np.float32)
    engine.evaluate([done], Usage())
    engine.evaluate([job(sequence, TEXT[:15])], Usage())
    engine.check()
    with pytest.raises(UnsupportedFeatureError):
        sequence.truncate(12)
    engine.evaluate([job(sequence, [1])], Usage())
    engine.check()
