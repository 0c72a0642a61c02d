"""Before a call's decodes and after one that failed: what it goes on with is in the buffer, and the books are right."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .batch import Job
from .errors import UnsupportedFeatureError
from .pool import SequencePool
from .reuse import Reuse
from .sequence import Sequence
from .usage import Usage

__all__ = ["Recovery"]

WHERE = {"host": "host memory", "disk": "state_dir"}

Run = Callable[[list[Job], set[Sequence], Usage], None]


class Recovery:
    """Under the engine's lock. `run` evaluates jobs whose sequences are in the buffer."""

    def __init__(self, pool: SequencePool, run: Run) -> None:
        self.pool, self._run = pool, run

    def bring_in(self, job: Job, jobs: list[Job], lost: dict[int, array[int]], usage: Usage) -> Job:
        """Make the job's sequence resident. Where its tokens must be evaluated again, they go in front of the new ones."""
        sequence = job.sequence
        if sequence.resident:
            return Job(sequence, job.tokens, job.outputs, job.embeds, job.scored)
        busy = {other.sequence for other in jobs}
        if (where := self.pool.room.restore(sequence, busy)) is not None:
            usage.reuse.append(Reuse(where, f"{len(sequence)} tokens of the cache were in {WHERE[where]}"))
            return Job(sequence, job.tokens, job.outputs, job.embeds, job.scored)
        history = sequence.tokens
        if sequence.has_embeddings:
            raise UnsupportedFeatureError(
                "positions given by inputs_embeds had to leave the memory and cannot be evaluated again: start over "
                "with the whole input",
                "inputs_embeds",
            )
        if len(history) == 0:
            self.pool.room.take_id(sequence, busy)
            return Job(sequence, job.tokens, job.outputs, job.embeds, job.scored)
        if job.embeds is not None:
            self._evaluate_history(sequence, busy, lost, usage)
            return Job(sequence, job.tokens, job.outputs, job.embeds, job.scored)
        known = self._begin_again(sequence, busy, lost, usage)
        reused = len(sequence.tokens)
        again = np.zeros(len(known) - reused, np.int8)
        tokens, outputs = np.concatenate([known[reused:], job.tokens]), np.concatenate([again, job.outputs])
        scored = None if job.scored is None else np.concatenate([again, job.scored])
        return Job(sequence, tokens, outputs, scored=scored)

    def _evaluate_history(
        self, sequence: Sequence, busy: set[Sequence], lost: dict[int, array[int]], usage: Usage
    ) -> None:
        """Tokens and embeddings cannot share a batch, so a parked history is evaluated on its own before embeddings."""
        rest = self._begin_again(sequence, busy, lost, usage)[len(sequence.tokens) :]
        self._run([Job(sequence, rest, np.zeros(len(rest), np.int8))], busy, usage)

    def _begin_again(
        self, sequence: Sequence, busy: set[Sequence], lost: dict[int, array[int]], usage: Usage
    ) -> npt.NDArray[np.int32]:
        """Let a parked sequence start anew with what memory has of its text, which is the answer."""
        history = sequence.tokens
        lost[id(sequence)] = history
        sequence.become(array("i"))
        known = np.array(history, np.int32)
        usage.reuse.append(self.pool.acquire(sequence, known, len(known), busy))
        if not sequence.resident:
            self.pool.room.take_id(sequence, busy)
        return known

    def roll_back(self, jobs: list[Job], before: list[int], lost: dict[int, array[int]]) -> None:
        """Law 2: whatever happened, what llama.cpp holds and what we believe are made equal first."""
        for job, length in zip(jobs, before, strict=True):
            sequence = job.sequence
            sequence.moves.clear()
            if sequence.closed:
                continue
            if sequence.resident and not self.pool.rewind(sequence, len(sequence)):  # what was stored only in part
                history = lost.pop(id(sequence), None) or sequence.tokens[:length]
                self.pool.reset_tokens(sequence, history)
            elif id(sequence) in lost:
                self.pool.reset_tokens(sequence, lost.pop(id(sequence)))
            elif length == 0 and sequence.tokens and sequence.resident:
                self.pool.split_off(sequence)
            else:
                try:
                    self.pool.truncate(sequence, min(length, len(sequence.tokens)))
                except UnsupportedFeatureError:  # embeddings in a memory that cannot go back: nobody may go on with it
                    self.pool.registry.close(sequence)
                    del sequence.tokens[length:]

