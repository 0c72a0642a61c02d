"""From what sequences want to what `llama_decode` takes.

A `Job` is one sequence with new tokens; `plan` cuts a list of jobs into `Batch`es that respect the limits of one
decode. Pure: numpy in, numpy out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .sequence import Sequence

__all__ = ["Batch", "Job", "Piece", "one_token", "plan", "tokens_batch"]


@dataclass(slots=True)
class Batch:
    """Arguments of one decode; all arrays have length `n_tokens`.

    `tokens` is int32 of shape `(n,)`, or `embeds` float32 of shape `(n, n_embd_inp)`, never both. `outputs` is int8: 1
    where logits (and embeddings, if `want_embeddings`) are computed.
    """

    tokens: npt.NDArray[np.int32] | None
    embeds: npt.NDArray[np.float32] | None
    positions: npt.NDArray[np.int32]
    seq_ids: npt.NDArray[np.int32]
    outputs: npt.NDArray[np.int8]
    n_outputs: int
    want_embeddings: bool = False
    layers: tuple[int, ...] = ()
    """Of these layers the inputs are recorded at the outputs; ascending numbers from 0 on."""

    @property
    def n_tokens(self) -> int:
        return len(self.positions)


@dataclass(slots=True)
class Job:
    """New tokens for one sequence.

    `tokens`: int32 `(n,)`; -1 stands for a position given by `embeds` (float32 `(n, n_embd_inp)`). `outputs`: int8
    `(n,)`, 1 where logits are wanted. After `Engine.evaluate`: `logits` float32 `(number of outputs, n_vocab)` and, if
    asked for, `embeddings` float32 `(number of outputs, n_embd)`; both are the caller's to keep.

    `scored`: int8 `(n,)`, 1 at those outputs whose logits are kept; `None` keeps all. llama.cpp gives the hidden state
    of output rows only, so whoever wants those of a long text asks for a row at every token, but not for its logits.

    `marks`: numbers of tokens, ascending, after which a batch ends.

    `layers`, if asked for: float32 `(number of outputs, number of layers, width)`, what went into these layers.
    """

    sequence: Sequence
    tokens: npt.NDArray[np.int32]
    outputs: npt.NDArray[np.int8]
    embeds: npt.NDArray[np.float32] | None = None
    scored: npt.NDArray[np.int8] | None = None
    marks: tuple[int, ...] = ()
    logits: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    embeddings: npt.NDArray[np.float32] | None = field(default=None, repr=False)
    layers: npt.NDArray[np.float32] | None = field(default=None, repr=False)


def one_token(sequence: Sequence, token: int) -> Job:
    """A token whose logits are wanted."""
    return Job(sequence, np.array([token], np.int32), np.ones(1, np.int8))


@dataclass(slots=True)
class Piece:
    """The part `[start, stop)` of `jobs[index]` that goes into one batch."""

    index: int
    start: int
    stop: int
    n_outputs: int


def plan(
    jobs: list[Job], n_batch: int, n_outputs: int, want_embeddings: bool = False, alone: bool = False
) -> Iterator[tuple[Batch, list[Piece]]]:
    """Yield batches of at most `n_batch` tokens and `n_outputs` rows with logits, with the pieces each is made of.

    Jobs are taken in order; one that does not fit continues in the next batch. Tokens and embeddings never share a batch.
    Positions are read from the sequences when a batch is yielded, so each batch must be stored before the next one is
    asked for.

    `alone`: no two jobs share a batch.
    """
    index, start = 0, 0
    while index < len(jobs):
        pieces: list[Piece] = []
        room, rows = n_batch, n_outputs
        with_embeds = jobs[index].embeds is not None
        while index < len(jobs) and room > 0 and (jobs[index].embeds is not None) == with_embeds:
            job = jobs[index]
            stop = min(len(job.tokens), start + room, *(mark for mark in job.marks if mark > start))
            wanted = int(np.count_nonzero(job.outputs[start:stop]))
            if wanted > rows:
                # cut before the first row that has no place any more
                stop = start + int(np.flatnonzero(job.outputs[start:stop])[rows])
                wanted = rows
            if stop > start:
                pieces.append(Piece(index, start, stop, wanted))
            room -= stop - start
            rows -= wanted
            if stop < len(job.tokens):
                start = stop
                break
            index, start = index + 1, 0
            if alone and pieces:
                break
        yield _batch(jobs, pieces, with_embeds, want_embeddings), pieces


def tokens_batch(tokens: list[int], positions: list[int], seq_ids: list[int]) -> Batch:
    """One token for each of several sequences, all of them outputs."""
    n = len(tokens)
    arrays = (np.array(values, np.int32) for values in (tokens, positions, seq_ids))
    token, position, seq_id = arrays
    return Batch(token, None, position, seq_id, np.ones(n, np.int8), n)


def _batch(jobs: list[Job], pieces: list[Piece], with_embeds: bool, want_embeddings: bool) -> Batch:
    n = sum(piece.stop - piece.start for piece in pieces)
    tokens = None if with_embeds else np.empty(n, np.int32)
    embeds: list[npt.NDArray[np.float32]] = []
    positions, seq_ids, outputs = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.int8)
    at = 0
    for piece in pieces:
        job = jobs[piece.index]
        end = at + piece.stop - piece.start
        if tokens is None:
            assert job.embeds is not None
            embeds.append(job.embeds[piece.start : piece.stop])
        else:
            tokens[at:end] = job.tokens[piece.start : piece.stop]
        first = len(job.sequence)
        positions[at:end] = np.arange(first, first + end - at, dtype=np.int32)
        assert job.sequence.seq_id is not None, "the engine brings a sequence in before it plans"
        seq_ids[at:end] = job.sequence.seq_id
        outputs[at:end] = job.outputs[piece.start : piece.stop]
        at = end
    return Batch(
        tokens=tokens,
        embeds=np.ascontiguousarray(np.concatenate(embeds), dtype=np.float32) if with_embeds else None,
        positions=positions,
        seq_ids=seq_ids,
        outputs=outputs,
        n_outputs=sum(piece.n_outputs for piece in pieces),
        want_embeddings=want_embeddings,
    )
