"""One call's tokens through `llama_decode`: batches, retries, checkpoints, moved chunks, a sliding context.

Runs under the engine's lock; what must hold after a failure is the engine's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .backend import DecodeStatus
from .batch import Job, Piece, plan
from .errors import CacheFullError, DecodeError, GenerationCancelled
from .pool import SequencePool
from .reuse import Reuse
from .sequence import EMBEDDED, Move, Sequence

__all__ = ["Evaluation", "Progress", "Usage", "Wanted", "plain_step"]

CHECKPOINT_EVERY = 256
"""Tokens of a prompt between two checkpoints of a memory that cannot be rewound."""

ABORTED = "llama_decode was aborted by the abort callback"

Progress = Callable[[int, int], object]
"""`progress(evaluated, total)` after every decode of a prompt; an answer that is `False` cancels the call."""

Rows = list[npt.NDArray[np.float32]]


@dataclass(slots=True)
class Usage:
    """What one request cost; counted by the engine, reset by nobody. `reuse`: how each of its texts began."""

    evaluated_tokens: int = 0
    reused_tokens: int = 0
    decode_calls: int = 0
    reuse: list[Reuse] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call wants beside logits. `prompt`: its texts may be gone back to, so that checkpoints are worth it."""

    embeddings: bool = False
    progress: Progress | None = None
    n_batch: int | None = None
    layers: tuple[int, ...] = ()
    prompt: bool = False


class Evaluation:
    """`busy`: the sequences of the call, which stay in the buffer. `ready` raises where the model was closed meanwhile."""

    def __init__(
        self, pool: SequencePool, busy: set[Sequence], usage: Usage, wanted: Wanted, ready: Callable[[], None]
    ) -> None:
        self.pool, self.busy, self.usage, self.wanted, self.ready = pool, busy, usage, wanted, ready
        self.done = self.total = 0

    def run(self, jobs: list[Job]) -> None:
        """Store the tokens of resident sequences and fill in the jobs' answers."""
        self.total = sum(len(job.tokens) - sum(len(m.tokens) for m in job.sequence.moves) for job in jobs)
        answers = [_Answer() for _ in jobs]
        at = [self._move_in(job, answer) for job, answer in zip(jobs, answers, strict=True)]
        while any(begin < len(job.tokens) for job, begin in zip(jobs, at, strict=True)):
            parts, owners = [], []
            for index, job in enumerate(jobs):
                if at[index] < len(job.tokens):
                    stop = min(len(job.tokens), at[index] + self._room(job.sequence))
                    parts.append(_slice(job, at[index], stop))
                    owners.append(answers[index])
                    at[index] = stop
            self._decode(parts, owners)
        for job, answer in zip(jobs, answers, strict=True):
            job.logits, job.layers = _joined(answer.logits), _joined(answer.layers)
            job.embeddings = _joined(answer.hidden) if self.wanted.embeddings else None

    def _room(self, sequence: Sequence) -> int:
        """Positions that are free in a sequence; a full one slides first."""
        n_ctx = self.pool.keeping.n_ctx
        if len(sequence) >= n_ctx and self.pool.keeping.n_sink is not None:
            self.pool.moving.slide(sequence, self.busy)
        return n_ctx - len(sequence)

    def _move_in(self, job: Job, answer: _Answer) -> int:
        """Evaluate what comes before each moved chunk, and put the chunk behind it; how many of the tokens are done."""
        sequence, at = job.sequence, 0
        first = len(sequence.tokens)
        while sequence.moves:
            before, n = sequence.moves[0].p0 - first, len(sequence.moves[0].tokens)
            if not _moves(job, sequence.moves[0], before):  # another text than the one that was begun
                self.total += sum(len(move.tokens) for move in sequence.moves)
                sequence.moves.clear()
                return at
            if before > at:
                self._decode([_slice(job, at, before)], [answer])
            if not self.pool.moving.move_in(sequence, self.busy):
                self.total += n + sum(len(move.tokens) for move in sequence.moves)
                sequence.moves.clear()
                return before
            at = before + n
        return at

    def _decode(self, jobs: list[Job], answers: list[_Answer]) -> None:
        limits, wanted = self.pool.backend.limits, self.wanted
        size = min(limits.n_ubatch if wanted.layers else limits.n_batch, wanted.n_batch or limits.n_batch)
        # the order in which llama.cpp computes the tokens of a batch is known for those of one sequence, and for one token
        # of each of several where there is no state
        alone = bool(wanted.layers) and (limits.recurrent or any(len(job.tokens) > 1 for job in jobs))
        if wanted.prompt and limits.stateful:
            self._mark(jobs)
        for batch, pieces in plan(jobs, size, limits.n_outputs, wanted.embeddings, alone):
            batch.layers = wanted.layers if batch.n_outputs else ()
            while (status := self.pool.backend.decode(batch)) is DecodeStatus.NO_SLOT:
                if not self.pool.room.make_room(self.busy):
                    raise self._full(batch.n_tokens)
            if status is DecodeStatus.ABORTED:
                raise DecodeError(ABORTED, 2)
            self.usage.decode_calls += 1
            self.usage.evaluated_tokens += batch.n_tokens
            self.done += batch.n_tokens
            for piece in pieces:
                _store(jobs[piece.index], piece)
            if batch.n_outputs:
                self._collect(batch.n_outputs, jobs, pieces, answers)
            for piece in pieces:
                if piece.stop in jobs[piece.index].marks:
                    self.pool.room.checkpoint(jobs[piece.index].sequence)
            if wanted.progress is not None:
                if wanted.progress(self.done, self.total) is False:
                    raise GenerationCancelled(self.done, self.total)
                self.ready()  # the callback may have closed the model

    def _mark(self, jobs: list[Job]) -> None:
        """Where checkpoints are made: where the call began, where texts are known to part, every so many tokens, and before
        the last token, so that the same prompt again costs one."""
        for job in jobs:
            n, first = len(job.tokens), len(job.sequence)
            if n < 2 or job.embeds is not None:
                continue
            if first:
                self.pool.room.checkpoint(job.sequence)
            places = {*range(CHECKPOINT_EVERY - first % CHECKPOINT_EVERY, n, CHECKPOINT_EVERY), n - 1}
            if 0 < job.sequence.branch - first < n:
                places.add(job.sequence.branch - first)
            job.marks = tuple(sorted(places))

    def _full(self, n: int) -> CacheFullError:
        limits, used = self.pool.backend.limits, sum(len(sequence) for sequence in self.busy)
        return CacheFullError(
            f"{n} more tokens do not fit: {len(self.busy)} sequences with {used} tokens fill the {limits.n_cells} KV cells. "
            "Load the model with a larger n_cells, or use fewer or shorter rows.",
            used + n,
            limits.n_cells,
        )

    def _collect(self, n: int, jobs: list[Job], pieces: list[Piece], answers: list[_Answer]) -> None:
        backend = self.pool.backend
        _copy(backend.logits(n), pieces, [answer.logits for answer in answers], jobs)
        if self.wanted.embeddings:
            _copy(backend.embeddings(n), pieces, [answer.hidden for answer in answers])
        if self.wanted.layers:
            _copy(backend.layers(n), pieces, [answer.layers for answer in answers])


def plain_step(pool: SequencePool, sequences: list[Sequence], tokens: list[int], usage: Usage) -> bool:
    """One decode of a token for each of them, where that is all there is to do. False: something has to be brought back, to
    slide, to be refused or to make room; nothing was stored."""
    backend, n_ctx = pool.backend, pool.keeping.n_ctx
    limits = backend.limits
    if not 0 < len(tokens) <= min(limits.n_batch, limits.n_outputs) or backend.records_layers:
        return False
    positions, seq_ids = [], []
    for sequence, token in zip(sequences, tokens, strict=True):
        position = len(sequence)
        if sequence.seq_id is None or sequence.closed or position >= n_ctx or not 0 <= token < limits.n_vocab:
            return False
        positions.append(position)
        seq_ids.append(sequence.seq_id)
    status = backend.decode_tokens(tokens, positions, seq_ids)
    if status is DecodeStatus.NO_SLOT:
        return False
    if status is DecodeStatus.ABORTED:
        raise DecodeError(ABORTED, 2)
    for sequence, token in zip(sequences, tokens, strict=True):
        sequence.append_one(token)
    usage.decode_calls += 1
    usage.evaluated_tokens += len(tokens)
    return True


@dataclass(slots=True)
class _Answer:
    logits: Rows = field(default_factory=list)
    hidden: Rows = field(default_factory=list)
    layers: Rows = field(default_factory=list)


def _slice(job: Job, start: int, stop: int) -> Job:
    if start == 0 and stop == len(job.tokens):
        return job
    embeds = None if job.embeds is None else job.embeds[start:stop]
    scored = None if job.scored is None else job.scored[start:stop]
    return Job(job.sequence, job.tokens[start:stop], job.outputs[start:stop], embeds, scored)


def _moves(job: Job, move: Move, begin: int) -> bool:
    """Whether the job's tokens from `begin` on are those of `move`, and only to be stored."""
    stop = begin + len(move.tokens)
    same = job.embeds is None and begin >= 0 and np.array_equal(job.tokens[begin:stop], np.frombuffer(move.tokens, np.int32))
    return same and not job.outputs[begin:stop].any()


def _store(job: Job, piece: Piece) -> None:
    if job.embeds is not None:
        job.sequence.append(np.full(piece.stop - piece.start, EMBEDDED, np.int32))
    else:
        job.sequence.append(job.tokens[piece.start : piece.stop])


def _copy(
    rows: npt.NDArray[np.float32], pieces: list[Piece], into: list[Rows], jobs: list[Job] | None = None
) -> None:
    """Copy each piece's rows out of the backend's buffer; with `jobs`, only those that are `scored`."""
    at = 0
    for piece in pieces:
        if not piece.n_outputs:
            continue
        mine = rows[at : at + piece.n_outputs]
        at += piece.n_outputs
        scored = None if jobs is None else jobs[piece.index].scored
        if scored is None:
            into[piece.index].append(mine.copy())
            continue
        assert jobs is not None
        kept = scored[piece.start : piece.stop][jobs[piece.index].outputs[piece.start : piece.stop] != 0] != 0
        if kept.any():
            into[piece.index].append(mine[kept])  # indexing by a mask copies


def _joined(parts: Rows) -> npt.NDArray[np.float32] | None:
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
