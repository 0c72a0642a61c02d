"""Doing: one lock, one backend, one pool, and the loop that turns jobs into decodes.

The engine knows nothing of tensors, masks, beams or transformers.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from .backend import Backend
from .batch import Job, one_token
from .errors import (
    ClosedError,
    ContextOverflowError,
    InvalidInputError,
    LlamaCppError,
    ModelLoadError,
    UnsupportedFeatureError,
)
from .evaluation import Displaced, Evaluation, Progress, Wanted, plain_step
from .guarded_lock import GuardedLock
from .pool import Held, SequencePool
from .recall import Recall
from .recovery import Recovery
from .registry import Keeping
from .reuse import Reuse
from .saved import Saved, SavedStates
from .scheduler import Scheduler
from .sequence import Sequence, shared_prefix
from .slices import Slices
from .turn import After, Ask, CallersOwn, Read, can_step
from .usage import Usage
from .write_back import WriteBack

if TYPE_CHECKING:
    from .state_folder import StateFolder

logger = logging.getLogger(__name__)

T = TypeVar("T")

__all__ = ["Engine", "Held", "Progress", "Usage", "Wanted"]

TIGHT = Reuse("none", "the rows fit into n_cells only where they share their beginnings, and with known texts they would not")

PLAIN = Wanted()

RECALL_BYTES = 128 << 20
"""Hidden states of earlier texts take at most so much, and never more than `host_cache_bytes`."""

PLAIN_CALLS = 64
"""Calls that want no layers before the context that can record them is given up. Measured on a model of 135 M weights, where
it weighs most: making a context again takes 60 to 110 ms, a decode in one that records nothing 0 to 0.7 ms of 17."""


class Engine:
    """Runs jobs on one backend. All methods may be called from any thread.

    `n_ctx` is the most positions one sequence may hold. `folder`: where saved states go when `host_cache_bytes` are full.
    """

    def __init__(
        self,
        backend: Backend,
        n_ctx: int,
        prefix_reuse: bool = True,
        host_cache_bytes: int = 1 << 30,
        n_sink: int | None = None,
        reuse_min_chunk: int = 0,
        folder: StateFolder | None = None,
    ) -> None:
        self.backend = backend
        self.n_ctx = n_ctx
        keeping = Keeping(prefix_reuse, n_sink, reuse_min_chunk, n_ctx)
        self.pool = SequencePool(backend, keeping, SavedStates(host_cache_bytes, folder))
        if folder is not None and prefix_reuse:
            self.pool.adopt(folder.texts())
        self.recall = Recall(min(host_cache_bytes, RECALL_BYTES) if prefix_reuse else 0)
        self.lock = GuardedLock()
        self.closed = False
        self.scheduler = Scheduler(self.pool, self.lock, self._ready)
        self._slices = Slices(lambda: self.pool.room.pushed_out, lambda: self.scheduler.running > 1)
        self.write_back = WriteBack(self.lock, lambda: not self.scheduler.running, self._copy_ahead)
        self._recovery = Recovery(self.pool, self._run)
        self._plain_calls = 0
        self._held = Held(0, 0, 0, backend.limits.n_cells, 0)

    @contextmanager
    def call(self) -> Iterator[None]:
        """While a `generate()` runs: what no running call uses may leave the buffer."""
        try:
            with self.scheduler.call():  # which gives the lock back where an interrupt comes as it is left
                with self.lock:
                    self._ready()
                yield
        finally:
            if self.scheduler.shared and not self.scheduler.running:
                self.write_back.begin()

    # -- requests -----------------------------------------------------------------------------------------------

    def start(
        self,
        tokens: list[npt.NDArray[np.int32]],
        first_output: list[int],
        usage: Usage,
        beside: list[Sequence] | None = None,
        in_call: bool = False,
        cold: bool = False,
    ) -> list[tuple[Sequence, int | None]]:
        """A sequence for each of the new texts `tokens`, holding the longest prefix that is in memory already.

        `beside`: what the same call goes on with; `in_call`: this is one of the running `call()`s. `cold`: nothing of earlier
        calls is used.

        `first_output[i]`: the first position whose logits are wanted; everything before it may be reused. The second
        item is `None`, or the index `j < i` of a text in the same call that must be evaluated first, because it shares a
        longer prefix; `share` then lets this one start from it.
        """
        with self.lock:
            self._ready()
            busy = beside or []
            alone = self.scheduler.running <= in_call
            if tokens and alone and (cold or not self.pool.keeping.prefix_reuse):
                self.pool.room.empty_buffer()
            self.pool.make_lean(list(zip(tokens, first_output, strict=True)), busy, alone)
            made: list[Sequence] = []
            starts: list[tuple[Sequence, int | None]] = []
            try:
                for index, text in enumerate(tokens):
                    limit = min(first_output[index], len(text) - 1)
                    leader, shared = self._leader(tokens, index, limit)
                    in_memory = 0 if cold or leader is None else self.pool.match(text, limit).length
                    sequence = self.pool.new()
                    made.append(sequence)
                    if leader is not None and shared > in_memory:
                        starts.append((sequence, leader))
                        usage.reuse.append(Reuse("memory", f"the first {shared} tokens are those of row {leader}"))
                        continue
                    usage.reuse.append(TIGHT if cold else self._begin(sequence, text, limit, {*made, *busy}))
                    usage.reused_tokens += len(sequence.tokens)
                    starts.append((sequence, None))
            except BaseException:
                for sequence in made:
                    self.pool.registry.close(sequence)
                raise
            return starts

    def _begin(self, sequence: Sequence, text: npt.NDArray[np.int32], limit: int, busy: set[Sequence]) -> Reuse:
        reuse = self.pool.acquire(sequence, text, limit, busy)
        if moved := self.pool.moving.find_moves(sequence, text, limit, busy):
            found = len(sequence.moves)
            return Reuse("shifted", f"{reuse.reason}; {moved} tokens in {found} chunks stood elsewhere and were moved")
        return reuse

    def new(self) -> Sequence:
        """An empty held sequence."""
        with self.lock:
            self._ready()
            return self.pool.new()

    def share(self, source: Sequence, target: Sequence, length: int, usage: Usage, busy: list[Sequence]) -> int:
        """Let the empty `target` start with the first `length` tokens of `source`; how many it could take."""
        with self.lock:
            self._open(target)
            copied = 0
            if source.resident and length:
                copied = self.pool.copy_prefix(source, target, length, {*busy, source, target})
            usage.reused_tokens += copied
            return copied

    def fork(self, sequence: Sequence, busy: list[Sequence] | None = None) -> Sequence:
        with self.lock:
            self._open(sequence)
            return self.pool.fork(sequence, {*(busy or ()), sequence})

    def truncate(self, sequence: Sequence, length: int) -> None:
        with self.lock:
            self._open(sequence)
            self.pool.truncate(sequence, length)

    def release(self, sequences: list[Sequence]) -> None:
        with self.lock:
            if not self.closed:
                for sequence in sequences:
                    self.pool.release(sequence)

    def discard(self, sequences: list[Sequence]) -> None:
        """Free the cells now; for what nobody will match again, such as beams that lost."""
        with self.lock:
            if not self.closed:
                self.pool.discard(sequences)

    def evaluate(
        self,
        jobs: list[Job],
        usage: Usage,
        wanted: Wanted = PLAIN,
    ) -> None:
        """Store the jobs' tokens and fill in their `logits` (and what else is `wanted`).

        All or nothing: after an exception every sequence holds what it held before. What had been evaluated of a text
        that started empty is kept as an idle sequence, so that asking again goes on from there. `wanted.n_batch`
        makes the decodes smaller than the backend's limit.

        Raises `ContextOverflowError` before anything is decoded, `CacheFullError`, `DecodeError`,
        `GenerationCancelled`, `UnsupportedFeatureError` for layers that cannot be seen, and whatever `progress` raises.
        """
        jobs = [job for job in jobs if len(job.tokens)]
        alone = self.lock.mine or (self.scheduler.alone and self._is_short(jobs, wanted))
        with self.lock:
            self._ready()
            for row, job in enumerate(jobs):
                self._open(job.sequence)
                needed = len(job.sequence) + len(job.tokens)
                if needed > self.n_ctx and self.pool.keeping.n_sink is None:
                    raise ContextOverflowError(needed, self.n_ctx, row if len(jobs) > 1 else None)
                self._check_tokens(job)
            self._choose_context(wanted.layers)
            if alone:
                self._evaluate(jobs, usage, wanted)
                return
        try:
            self._evaluate(jobs, usage, wanted, self.scheduler)
        except Displaced:
            with self._slices.turn(), self.lock:
                self._ready()
                self._choose_context(wanted.layers)
                self._evaluate(jobs, usage, wanted)

    def _is_short(self, jobs: list[Job], wanted: Wanted) -> bool:
        """One decode at most, of which nobody is told: several, and what `progress` does, are more than others can wait for."""
        n_batch = wanted.n_batch or self.backend.limits.n_batch
        return wanted.progress is None and sum(len(job.tokens) for job in jobs) <= n_batch

    def _evaluate(self, jobs: list[Job], usage: Usage, wanted: Wanted, scheduler: Scheduler | None = None) -> None:
        """With a `scheduler` in decodes that other calls share, otherwise with the lock held."""
        before = [len(job.sequence.tokens) for job in jobs]
        lost: dict[int, array[int]] = {}
        away = not all(job.sequence.resident for job in jobs)
        recovery = self._recovery
        try:
            with self._brought_in([job.sequence for job in jobs]), self.lock:
                runs = [recovery.bring_in(job, jobs, lost, usage) for job in jobs]
                if not all(job.sequence.resident for job in jobs):  # a larger context was made, and came up empty
                    recovery.roll_back(jobs, before, lost)
                    runs = [recovery.bring_in(job, jobs, lost, usage) for job in jobs]
            self._run(runs, {job.sequence for job in jobs}, usage, wanted, scheduler)
        except BaseException:
            with self.lock:
                if not self.closed:
                    recovery.roll_back(jobs, before, lost)
                    self.pool.room.trim()
            raise
        if away:
            with self.lock:
                self.pool.room.trim()
        for job, run in zip(jobs, runs, strict=True):
            job.logits, job.embeddings, job.layers = run.logits, run.embeddings, run.layers

    def step(self, sequences: list[Sequence], tokens: list[int], usage: Usage, read: Read[T]) -> T:
        """Store one more token in each of the sequences, in one decode, and answer what `read` makes of the logits
        `(len(sequences), n_vocab)`. All or nothing, as `evaluate`, whose errors it raises.

        `read` may write into what it is given: it is llama.cpp's own buffer, which the next decode overwrites. So `read` is
        called under the engine's lock, on the thread of whichever call decodes, and must keep no view of it, call no model
        and wait for nobody.
        """
        answers: list[T] = []
        self.steps(sequences, tokens, usage, read, answers.append)
        return answers[0]

    def steps(self, sequences: list[Sequence], tokens: list[int], usage: Usage, read: Read[T], after: After[T]) -> None:
        """One `step` after the other: `after` makes the next tokens of what `read` made of the logits, `None` ends it. Each is
        all or nothing. What `after` raises is raised here, and its step counts.

        `after` is called as `read` is: maybe by the thread of another call, for which this call then need not wake up.
        """
        settled = [len(sequence.tokens) for sequence in sequences]
        going: list[int] | None = tokens
        try:
            while going is not None:
                tokens = going
                if not self.scheduler.alone and can_step(self.pool, sequences, tokens):
                    ask = Ask.step(sequences, tokens, usage, threading.get_ident(), read, after)
                    settled = ask.settled
                    self.scheduler.decode(ask)
                    if ask.over:
                        return
                    tokens = ask.tokens or tokens
                    answer = self._step(sequences, tokens, usage, settled, read) if ask.displaced else ask.answer
                else:
                    answer = self._step(sequences, tokens, usage, settled, read)
                settled[:] = [len(sequence.tokens) for sequence in sequences]
                going = after(answer)
        except BaseException as problem:
            with self.lock:
                if not self.closed:
                    self._take_back(sequences, tokens, settled)
            if not isinstance(problem, CallersOwn):
                raise
            error = problem.error
        else:
            return
        raise error

    def _step(self, sequences: list[Sequence], tokens: list[int], usage: Usage, before: list[int], read: Read[T]) -> T:
        """By this thread, for nobody else."""
        with self._brought_in(sequences), self.lock:
            self._ready()
            if any(len(sequence.tokens) > length for sequence, length in zip(sequences, before, strict=True)):
                self._take_back(sequences, tokens, before)  # a decode was interrupted between the books and the answer
            if plain_step(self.pool, sequences, tokens, usage):
                return read(self.backend.logits(len(tokens)))
            jobs = [one_token(*each) for each in zip(sequences, tokens, strict=True)]
            self.evaluate(jobs, usage)
            return read(np.concatenate([job.logits for job in jobs if job.logits is not None]))

    def _brought_in(self, sequences: list[Sequence]) -> AbstractContextManager[None]:
        """Before sequences come back that had to leave for a call that still runs: when it is their turn."""
        away = any(sequence.seq_id is None and sequence.tokens for sequence in sequences)
        return self._slices.turn() if away and not self.scheduler.alone else nullcontext()

    def _take_back(self, sequences: list[Sequence], tokens: list[int], before: list[int]) -> None:
        self._recovery.roll_back([one_token(*each) for each in zip(sequences, tokens, strict=True)], before, {})

    def no_layers(self) -> UnsupportedFeatureError | None:
        """Why `evaluate` cannot give layers of this model; `None` where it can."""
        with self.lock:
            self._ready()
            try:
                self.pool.room.record_layers(True)
            except UnsupportedFeatureError as error:
                return error
            return None

    def save(self, sequence: Sequence) -> list[tuple[int, int, memoryview]]:
        """llama.cpp's state of the sequence in parts, each with its positions `[start, stop)`; what had to leave the memory
        is evaluated again first."""
        with self.lock:
            self._open(sequence)
            if not sequence.resident and sequence.tokens:
                nothing = np.empty(0, np.int32)
                job, length = Job(sequence, nothing, nothing.astype(np.int8)), len(sequence.tokens)
                lost: dict[int, array[int]] = {}
                try:
                    run = self._recovery.bring_in(job, [job], lost, Usage())
                    self._run([run], {sequence}, Usage())
                except BaseException:
                    self._recovery.roll_back([job], [length], lost)
                    raise
            return self.pool.room.copy_of(sequence)

    def adopt(self, tokens: array[int], dropped: int, parts: list[tuple[int, int, memoryview]]) -> Sequence:
        """A held sequence that means `tokens`; the rest is what `save` gave, here or in another process."""
        with self.lock:
            self._ready()
            if len(tokens) - dropped > self.n_ctx:
                raise ContextOverflowError(len(tokens) - dropped, self.n_ctx)
            sequence = self.pool.new()
            sequence.become(array("i", tokens), dropped)
            for start, stop, data in parts:
                sequence.saved = Saved(start, stop, sequence.saved, data)
            return sequence

    # -- life ----------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop all idle sequences and what is known of their hidden states: the next call finds no prefix."""
        with self.lock:
            self._ready()
            self.pool.forget()
            self.recall.clear()

    def held(self) -> Held:
        """What is in memory; while a call is being computed, what was there when somebody last asked. Never waits."""
        with self.lock.without_waiting() as free:
            if free and not self.closed:
                self._ready()
                self._held = self.pool.held()
        return self._held

    def check(self) -> None:
        """Raise `AssertionError` where our books and llama.cpp's memory disagree; for tests."""
        with self.lock:
            if not self.closed:
                self._ready()
                self.pool.check()

    def close(self) -> None:
        """Free native memory after the decode that runs now, if any; idempotent. With `state_dir` the texts go there first."""
        with self.lock:
            if not self.closed:
                try:
                    self.pool.collect()
                    self.pool.room.store_all()
                except LlamaCppError as error:
                    logger.warning("what was in memory is not all in state_dir: %s", error)
                finally:
                    self.closed = True
                    self.backend.close()

    def _copy_ahead(self) -> bool:
        if self.closed or not self.pool.keeping.prefix_reuse:
            return False
        more = self.pool.room.copy_ahead()
        self.scheduler.shared = self.scheduler.shared and more
        return more

    def _ready(self) -> None:
        if self.closed:
            raise ClosedError("the model was closed; load it again with from_pretrained()")
        if self.lock.interrupted:
            self.lock.interrupted = False
            self.pool.repair()
        self.pool.collect()

    def _open(self, sequence: Sequence) -> None:
        self._ready()
        if sequence.closed:
            raise ClosedError(f"{sequence} cannot go on; start again with the whole text")

    # -- inside --------------------------------------------------------------------------------------------------

    def _choose_context(self, layers: tuple[int, ...]) -> None:
        """A context that can record layers is a little slower, and making another one costs as much as many decodes: it
        goes when it was of no use for `PLAIN_CALLS` calls in a row."""
        if layers:
            self._plain_calls = 0
            self.pool.room.record_layers(True)
        elif self.backend.records_layers:
            self._plain_calls += 1
            if self._plain_calls > PLAIN_CALLS:
                self._plain_calls = 0
                with suppress(ModelLoadError):  # the slower one is still there
                    self.pool.room.record_layers(False)

    def _leader(
        self,
        tokens: list[npt.NDArray[np.int32]],
        index: int,
        limit: int,
    ) -> tuple[int | None, int]:
        """The earlier text of this call that shares the longest prefix with `index`, of equals the first."""
        best, length = None, 0
        for other in range(index):
            n = shared_prefix(tokens[other], tokens[index])
            if not n == len(tokens[other]) == len(tokens[index]):  # an equal text shares the answer too
                n = min(n, limit)
                if self.backend.limits.recurrent and n < len(tokens[other]):
                    n = 0  # a state can be shared only whole
            if n > length:
                best, length = other, n
        return best, length

    def _check_tokens(self, job: Job) -> None:
        limits = self.backend.limits
        if job.embeds is not None:
            if job.embeds.shape != (len(job.tokens), limits.n_embd_inp):
                raise InvalidInputError(
                    f"inputs_embeds has vectors of {job.embeds.shape[-1]} numbers; this model takes {limits.n_embd_inp}"
                )
            return
        low, high = int(job.tokens.min()), int(job.tokens.max())
        if low < 0 or high >= limits.n_vocab:
            bad = low if low < 0 else high
            raise InvalidInputError(f"token id {bad} is outside the vocabulary 0 .. {limits.n_vocab - 1}")

    def _run(
        self, jobs: list[Job], busy: set[Sequence], usage: Usage,
        wanted: Wanted = PLAIN,
        scheduler: Scheduler | None = None,
    ) -> None:  # fmt: skip
        Evaluation(self.pool, busy, usage, wanted, self._ready, self.lock, scheduler).run(jobs)
