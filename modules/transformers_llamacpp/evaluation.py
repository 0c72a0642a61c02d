"""One call's tokens through `llama_decode`: batches, checkpoints, moved chunks, a sliding context.

What must hold after a failure is the engine's business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .backend import DecodeStatus
from .batch import Batch, Job, Piece, plan
from .errors import ClosedError, DecodeError, GenerationCancelled, LlamaCppError
from .guarded_lock import GuardedLock
from .pool import SequencePool
from .sequence import Move, Sequence
from .turn import ABORTED, Ask, Part, can_step, cells_full, serve
from .usage import Usage

if TYPE_CHECKING:
    from .scheduler import Scheduler

__all__ = ["Displaced", "Evaluation", "Progress", "Wanted", "plain_step"]

CHECKPOINT_EVERY = 256
"""Tokens of a prompt between two checkpoints of a memory that cannot be rewound."""

Progress = Callable[[int, int], object]
"""`progress(evaluated, total)` after every decode of a prompt; an answer that is `False` cancels the call."""

Rows = list[npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call wants beside logits. `prompt`: its texts may be gone back to, so that checkpoints are worth it."""

    embeddings: bool = False
    progress: Progress | None = None
    n_batch: int | None = None
    layers: tuple[int, ...] = ()
    prompt: bool = False


class Displaced(LlamaCppError):
    """A sequence of the call had to leave the buffer for another call, and only a call of its own brings it back. Raised where
    the books are right; it never leaves the engine."""


class Evaluation:
    """`busy`: the sequences of the call, which stay in the buffer. `ready` raises where the model was closed meanwhile.

    Without a `scheduler` it runs under the engine's `lock`; with one it must not, and other calls take part in its decodes.
    """

    def __init__(
        self, pool: SequencePool, busy: set[Sequence], usage: Usage, wanted: Wanted, ready: Callable[[], None],
        lock: GuardedLock, scheduler: Scheduler | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.busy, self.usage, self.wanted, self.ready = pool, busy, usage, wanted, ready
        self.lock, self.scheduler = lock, scheduler
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
            with self.lock:
                self._bring_back([sequence])
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
            with self.lock:
                self._bring_back([sequence])
                moved = self.pool.moving.move_in(sequence, self.busy)
            if not moved:
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
            with self.lock:
                self._bring_back([job.sequence for job in jobs])
                self._mark(jobs)
        batches = plan(jobs, size, limits.n_outputs, wanted.embeddings, alone)
        while (found := self._next(batches, jobs, alone)) is not None:
            ask, pieces = found
            self.done += ask.n_tokens
            _collect(ask, pieces, answers)
            for piece in pieces:
                if piece.stop in jobs[piece.index].marks:
                    with self.lock:
                        self._bring_back([jobs[piece.index].sequence])
                        self.pool.room.checkpoint(jobs[piece.index].sequence)
            if wanted.progress is not None:
                if wanted.progress(self.done, self.total) is False:
                    raise GenerationCancelled(self.done, self.total)
                with self.lock:
                    self.ready()  # the callback may have closed the model

    def _next(
        self, batches: Iterator[tuple[Batch, list[Piece]]], jobs: list[Job], alone: bool
    ) -> tuple[Ask, list[Piece]] | None:
        """Decode one more batch; `None` after the last one."""
        with self.lock:
            self._bring_back([job.sequence for job in jobs])
            batch, pieces = next(batches, (None, []))
            if batch is None:
                return None
            batch.layers = self.wanted.layers if batch.n_outputs else ()
            ask = self._ask(batch, pieces, jobs, alone)
            if self.scheduler is None:
                self._alone(ask)
                return ask, pieces
        ends = [(job.sequence, len(job.sequence.tokens)) for job in jobs]
        self.scheduler.decode(ask)
        if ask.displaced:
            with self.lock:
                known = sum(len(sequence.tokens) for sequence, _ in ends)
                if known != sum(length for _, length in ends) + ask.done:
                    raise Displaced  # interrupted in the middle: what is in the books is not what was decoded
                self._bring_back(ask.sequences)
                self._alone(ask)
        return ask, pieces

    def _ask(self, batch: Batch, pieces: list[Piece], jobs: list[Job], alone: bool) -> Ask:
        mine = [jobs[piece.index] for piece in pieces]
        scored = None
        if any(job.scored is not None for job in mine):
            parts = [
                (job.outputs if job.scored is None else job.scored)[piece.start : piece.stop]
                for job, piece in zip(mine, pieces, strict=True)
            ]
            scored = np.concatenate(parts)
        counts = [piece.stop - piece.start for piece in pieces]
        sequences = [job.sequence for job in mine]
        solo = alone or bool(self.wanted.layers and batch.n_outputs < batch.n_tokens)
        ask = Ask.of_batch(batch, sequences, counts, self.usage, threading.get_ident(), scored, solo)
        ask.busy = self.busy
        return ask

    def _alone(self, ask: Ask) -> None:
        """What is left of the ask, in a decode of its own; lock held."""
        if self.scheduler is not None and ask.batch is not None and ask.batch.layers:
            self.pool.room.record_layers(True)  # another call may have done without
            self._bring_back(ask.sequences)
        part = Part.of(ask, ask.left, ask.n_tokens)
        if not serve(self.pool, [part], self.busy):
            raise cells_full(self.pool, part.n, self.busy)

    def _bring_back(self, sequences: list[Sequence]) -> None:
        """Where calls share decodes, another one may have needed the room; lock held."""
        if self.scheduler is None:
            return
        self.ready()
        for sequence in sequences:
            if sequence.closed:
                raise ClosedError(f"{sequence} cannot go on; start again with the whole text")
            if sequence.resident:
                continue
            if not sequence.tokens:
                self.pool.room.take_id(sequence, self.busy)
            elif self.pool.room.restore(sequence, self.busy) is None:
                raise Displaced
        if not all(sequence.resident for sequence in sequences):
            raise Displaced

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


def plain_step(pool: SequencePool, sequences: list[Sequence], tokens: list[int], usage: Usage) -> bool:
    """That decode; lock held. False: it is not all there is to do, or there is no room; nothing was stored."""
    if not can_step(pool, sequences, tokens):
        return False
    positions = [len(sequence) for sequence in sequences]
    status = pool.backend.decode_tokens(tokens, positions, [pool.memory.id_of(sequence) for sequence in sequences])
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


def _collect(ask: Ask, pieces: list[Piece], answers: list[_Answer]) -> None:
    """To each job the rows of its pieces."""
    batch = ask.batch
    assert batch is not None
    for found, into, scored in (
        (_joined(ask.logits), [answer.logits for answer in answers], ask.scored),
        (_joined(ask.hidden), [answer.hidden for answer in answers], None),
        (_joined(ask.layers), [answer.layers for answer in answers], None),
    ):
        if found is None:
            continue
        at = begin = 0
        for piece in pieces:
            end = begin + piece.stop - piece.start
            n = piece.n_outputs
            if scored is not None:
                n = int(np.count_nonzero(scored[begin:end][batch.outputs[begin:end] != 0]))
            if n:
                into[piece.index].append(found[at : at + n])
            at, begin = at + n, end


def _joined(parts: Rows) -> npt.NDArray[np.float32] | None:
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
