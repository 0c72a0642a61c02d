"""`batch.plan`: every token once, in order, at its position, within the limits of one decode."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_llamacpp.batch import Job, plan

pytestmark = pytest.mark.once


@dataclass
class Text:
    """Stands in for a `Sequence`: all that `plan` reads."""

    seq_id: int | None
    tokens: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.tokens)


def make_job(seq_id: int, stored: int, length: int, outputs: set[int], embeds: bool = False) -> Job:
    text: Any = Text(seq_id, array("i", [7] * stored))
    wanted = np.array([i in outputs for i in range(length)], np.int8)
    tokens = np.arange(100 * seq_id, 100 * seq_id + length, dtype=np.int32)
    vectors = np.repeat(tokens[:, None], 3, axis=1).astype(np.float32) if embeds else None
    return Job(text, np.full(length, -1, np.int32) if embeds else tokens, wanted, vectors)


def run(jobs: list[Job], n_batch: int, n_outputs: int) -> list[Any]:
    """All batches, each stored before the next is asked for."""
    batches = []
    for batch, pieces in plan(jobs, n_batch, n_outputs):
        batches.append((batch, pieces))
        for piece in pieces:
            jobs[piece.index].sequence.tokens.extend([7] * (piece.stop - piece.start))
    return batches


def test_one_batch_for_all_rows_where_they_fit() -> None:
    jobs = [make_job(3, 5, 2, {1}), make_job(1, 0, 3, {0, 2})]
    [(batch, pieces)] = run(jobs, 8, 8)
    assert batch.tokens.tolist() == [300, 301, 100, 101, 102]
    assert batch.positions.tolist() == [5, 6, 0, 1, 2]
    assert batch.seq_ids.tolist() == [3, 3, 1, 1, 1]
    assert batch.outputs.tolist() == [0, 1, 1, 0, 1]
    assert batch.n_outputs == 3 and batch.embeds is None and batch.n_tokens == 5
    assert [(p.index, p.start, p.stop, p.n_outputs) for p in pieces] == [(0, 0, 2, 1), (1, 0, 3, 2)]


def test_a_job_goes_on_in_the_next_batch() -> None:
    batches = run([make_job(0, 1, 5, {4}), make_job(1, 0, 2, {1})], 3, 8)
    assert [b.tokens.tolist() for b, _ in batches] == [[0, 1, 2], [3, 4, 100], [101]]
    assert [b.positions.tolist() for b, _ in batches] == [[1, 2, 3], [4, 5, 0], [1]]
    assert [b.n_outputs for b, _ in batches] == [0, 1, 1]


def test_rows_with_logits_are_limited_on_their_own() -> None:
    batches = run([make_job(0, 0, 6, {1, 2, 5})], 8, 2)
    assert [b.tokens.tolist() for b, _ in batches] == [[0, 1, 2, 3, 4], [5]]
    assert [b.n_outputs for b, _ in batches] == [2, 1]


def test_embeddings_and_tokens_never_share_a_batch() -> None:
    jobs = [make_job(0, 0, 1, {0}), make_job(1, 2, 2, {1}, embeds=True), make_job(2, 0, 1, {0})]
    batches = run(jobs, 8, 8)
    assert [(b.tokens is None, b.embeds is None) for b, _ in batches] == [
        (False, True),
        (True, False),
        (False, True),
    ]
    embeds = batches[1][0].embeds
    assert embeds.dtype == np.float32 and embeds.flags.c_contiguous and embeds.shape == (2, 3)
    assert embeds[:, 0].tolist() == [100.0, 101.0]
    assert batches[1][0].positions.tolist() == [2, 3]


def test_no_jobs_no_batches() -> None:
    assert run([], 4, 4) == []


def test_a_sequence_that_was_not_brought_in_is_found_before_the_decode() -> None:
    stray = make_job(0, 0, 1, {0})
    stray.sequence.seq_id = None
    with pytest.raises(AssertionError, match="brings a sequence in"):
        run([stray], 4, 4)


@st.composite
def job_lists(draw: st.DrawFn) -> list[Job]:
    jobs = []
    for seq_id in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 9))
        outputs = draw(st.sets(st.integers(0, length - 1)))
        jobs.append(make_job(seq_id, draw(st.integers(0, 3)), length, outputs, draw(st.booleans())))
    return jobs


@settings(deadline=None, max_examples=150)
@given(job_lists(), st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_every_token_once_in_order_within_the_limits(
    jobs: list[Job], n_batch: int, n_outputs: int, want_embeddings: bool
) -> None:
    stored = [len(j.sequence.tokens) for j in jobs]
    seen: list[list[tuple[int, int, int]]] = [[] for _ in jobs]
    for batch, pieces in plan(jobs, n_batch, n_outputs, want_embeddings):
        assert 0 < batch.n_tokens <= n_batch and batch.n_outputs <= n_outputs
        assert batch.n_outputs == int(batch.outputs.sum()) == sum(p.n_outputs for p in pieces)
        assert (batch.tokens is None) != (batch.embeds is None)
        assert batch.want_embeddings is want_embeddings
        assert batch.positions.dtype == batch.seq_ids.dtype == np.int32 and batch.outputs.dtype == np.int8
        values = batch.tokens if batch.tokens is not None else batch.embeds[:, 0]
        at = 0
        for piece in pieces:
            sequence = jobs[piece.index].sequence
            for _ in range(piece.start, piece.stop):
                assert batch.seq_ids[at] == sequence.seq_id and batch.positions[at] == len(sequence.tokens)
                seen[piece.index].append((int(values[at]), int(batch.positions[at]), int(batch.outputs[at])))
                sequence.tokens.append(7)
                at += 1
        assert at == batch.n_tokens
    for index, job in enumerate(jobs):
        first = 100 * index
        assert [value for value, _, _ in seen[index]] == list(range(first, first + len(job.tokens)))
        assert [p for _, p, _ in seen[index]] == list(range(stored[index], stored[index] + len(job.tokens)))
        assert [o for _, _, o in seen[index]] == job.outputs.tolist()
