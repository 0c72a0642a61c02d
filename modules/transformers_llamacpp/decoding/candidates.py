"""Several possible next tokens for each row of a cache, tried side by side; one of each row is kept.

The candidates of a row are forks of its sequence (`llama_memory_seq_cp`): they share the cells of everything before,
and cost one cell each.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import numpy as np
import numpy.typing as npt

from ..batch import Job
from ..cache import LlamaCppCache
from ..engine import Engine, Usage, Wanted
from ..errors import CacheFullError
from ..sequence import Sequence

__all__ = ["Candidates"]

Floats = npt.NDArray[np.float32]
_NONE: Floats = np.empty((0, 0, 0), np.float32)


class Candidates:
    """Decodes `tokens[row]`, int32 `(k,)`, as alternatives for the next column of `cache`; `k` may differ by row.

    All go into one `llama_decode`. Where the forks find no room (KV cells, sequence ids), the candidates of a row take
    turns in its own sequence instead: more decodes, the same numbers.

    `logits[row]` is float32 `(k, n_vocab)`, `hidden[row]` the last hidden state, float32 `(k, n_embd)`, and `states[row]`
    what goes into `layers`, float32 `(k, len(layers), width)`. Then `keep` must be called. After an exception the cache
    is what it was.
    """

    def __init__(
        self,
        engine: Engine,
        cache: LlamaCppCache,
        tokens: List[npt.NDArray[np.int32]],
        usage: Usage,
        layers: tuple[int, ...] = (),
    ) -> None:
        self._engine, self._cache, self._tokens, self._usage, self._layers = engine, cache, tokens, usage, layers
        self._rows = cache.sequences
        self._forks: list[list[Sequence]] | None = None
        try:
            self._side_by_side()
        except CacheFullError:
            self._in_turn()

    def _side_by_side(self) -> None:
        engine = self._engine
        forks: list[list[Sequence]] = []
        try:
            busy = list(self._rows)
            for row, tokens in zip(self._rows, self._tokens, strict=True):
                forks.append([row])
                for _ in range(len(tokens) - 1):
                    forks[-1].append(engine.fork(row, busy))
                    busy.append(forks[-1][-1])
            jobs = [
                [_one(fork, token) for fork, token in zip(mine, tokens, strict=True)]
                for mine, tokens in zip(forks, self._tokens, strict=True)
            ]
            everything = [job for mine in jobs for job in mine]
            engine.evaluate(everything, self._usage, Wanted(embeddings=True, layers=self._layers))
        except BaseException:
            engine.discard([fork for mine in forks for fork in mine[1:]])
            raise
        self._forks = forks
        self._take(jobs)

    def _in_turn(self) -> None:
        engine = self._engine
        jobs: list[list[Job]] = [[] for _ in self._rows]
        for turn in range(max(map(len, self._tokens))):
            now = [
                (row, _one(self._rows[row], tokens[turn]))
                for row, tokens in enumerate(self._tokens)
                if turn < len(tokens)
            ]
            engine.evaluate([job for _, job in now], self._usage, Wanted(embeddings=True, layers=self._layers))
            for row, job in now:
                engine.truncate(job.sequence, len(job.sequence.tokens) - 1)
                jobs[row].append(job)
        self._take(jobs)

    def _take(self, jobs: list[list[Job]]) -> None:
        self.logits, self.hidden = [_logits(mine) for mine in jobs], [_hidden(mine) for mine in jobs]
        self.states = [np.concatenate([job.layers for job in mine if job.layers is not None] or [_NONE]) for mine in jobs]

    def keep(self, picks: List[int]) -> None:
        """Row `i` goes on with `tokens[i][picks[i]]`; the others are forgotten, and their cells are free at once."""
        if self._forks is None:
            again = [_one(row, self._tokens[i][picks[i]]) for i, row in enumerate(self._rows)]
            self._engine.evaluate(again, self._usage)
            self._cache.advance(self._rows)
            return
        kept, lost = [], []
        for forks, pick in zip(self._forks, picks, strict=True):
            kept.append(forks[pick])
            lost += forks[:pick] + forks[pick + 1 :]
        self._cache.advance(kept)
        self._engine.discard(lost)


def _one(sequence: Sequence, token: np.int32 | int) -> Job:
    return Job(sequence, np.array([token], np.int32), np.ones(1, np.int8))


def _logits(jobs: list[Job]) -> Floats:
    return np.concatenate([job.logits for job in jobs if job.logits is not None])


def _hidden(jobs: list[Job]) -> Floats:
    return np.concatenate([job.embeddings for job in jobs if job.embeddings is not None])
