"""What several calls want of one `llama_decode`: put together, stored in the books, and given back to each.

Runs under the engine's lock. Who decodes, and when, is `scheduler.py`'s business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .backend import DecodeStatus
from .batch import Batch, tokens_batch
from .errors import CacheFullError, DecodeError
from .pool import SequencePool
from .sequence import EMBEDDED, Sequence
from .usage import Usage

__all__ = ["After", "Ask", "CallersOwn", "Part", "Read", "can_step", "cells_full", "serve"]

ABORTED = "llama_decode was aborted by the abort callback"

T = TypeVar("T")

Read = Callable[[npt.NDArray[np.float32]], T]

After = Callable[[T], list[int] | None]
"""From what was read to the next tokens; `None` where the caller has to look itself."""


class CallersOwn(Exception):
    """Raised by an `After`: `error` comes from the call's own code, and goes to nobody else, whatever it is."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class Ask:
    """The tokens one call wants decoded next, and what came of it.

    Either a `step`, one token for each of `sequences` whose logits `read` makes something of while they are still in
    llama.cpp's buffer (`answer`), and which `after` may turn into the next step; or a `batch`, `counts[i]` of whose tokens are
    of `sequences[i]`, in this order, with copies of the rows in `logits`, `hidden` and `layers`. `scored`: int8, the outputs
    whose logits are kept; `None`: all.

    `done` of its tokens are stored, and in the books. `displaced`: it cannot go on, because a sequence had to leave the
    buffer, or because the decode it was in failed; the call has to see for itself. `solo`: it shares its decodes with nobody.

    `settled`, of steps: how long the texts were when the last of them was complete. `over`: `after` wants no other.
    """

    __slots__ = (
        "after", "answer", "batch", "born", "busy", "caller", "counts", "displaced", "done", "error", "finished", "hidden",
        "layers", "logits", "n_tokens", "over", "read", "scored", "sequences", "settled", "solo", "tokens", "usage", "wake",
    )  # fmt: skip

    def __init__(self, sequences: list[Sequence], usage: Usage, caller: int) -> None:
        self.sequences, self.usage, self.caller = sequences, usage, caller
        self.busy: Collection[Sequence] = sequences
        """All sequences of the call: no room is made at their cost."""
        self.tokens: list[int] | None = None
        self.read: Read[Any] | None = None
        self.after: After[Any] | None = None
        self.settled: list[int] = []
        self.batch: Batch | None = None
        self.counts: list[int] = []
        self.scored: npt.NDArray[np.int8] | None = None
        self.solo = False
        self.n_tokens = self.done = 0
        self.born = 0
        self.answer: Any = None
        self.logits: list[npt.NDArray[np.float32]] = []
        self.hidden: list[npt.NDArray[np.float32]] = []
        self.layers: list[npt.NDArray[np.float32]] = []
        self.error: BaseException | None = None
        self.finished = self.displaced = self.over = False
        self.wake = threading.Lock()
        self.wake.acquire()

    @classmethod
    def step(
        cls, sequences: list[Sequence], tokens: list[int], usage: Usage, caller: int, read: Read[Any],
        after: After[Any] | None = None,
    ) -> Ask:  # fmt: skip
        ask = cls(sequences, usage, caller)
        ask.tokens, ask.n_tokens, ask.read, ask.after = tokens, len(tokens), read, after
        ask.settled = [len(sequence.tokens) for sequence in sequences]
        return ask

    @classmethod
    def of_batch(
        cls, batch: Batch, sequences: list[Sequence], counts: list[int], usage: Usage, caller: int,
        scored: npt.NDArray[np.int8] | None = None, solo: bool = False,
    ) -> Ask:  # fmt: skip
        ask = cls(sequences, usage, caller)
        ask.batch, ask.counts, ask.scored, ask.n_tokens = batch, counts, scored, batch.n_tokens
        ask.solo = solo or batch.embeds is not None
        return ask

    @property
    def left(self) -> int:
        return self.n_tokens - self.done

    @property
    def dense(self) -> bool:
        """Every token is an output: no prompt, whose tokens can come in any portions."""
        return self.batch is None or self.batch.n_outputs == self.n_tokens

    @property
    def flat(self) -> bool:
        """One token for each of several sequences, all of them outputs."""
        return self.batch is None or (self.dense and len(self.counts) == self.n_tokens)

    @property
    def plain(self) -> bool:
        """Logits are all that is wanted."""
        return self.batch is None or not (self.batch.want_embeddings or self.batch.layers)

    def go_on(self) -> None:
        """The next step, where this one is complete and `after` has one. Raises what `after` does; the step counts then."""
        if self.after is None or self.left:
            return
        self.settled[:] = [len(sequence.tokens) for sequence in self.sequences]
        tokens = self.after(self.answer)
        if tokens is None:
            self.over = True
        else:
            self.tokens, self.done, self.answer = tokens, 0, None

    def resident(self) -> bool:
        """Whether what has to be in the buffer is there."""
        return all(sequence.seq_id is not None and not sequence.closed for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class Part:
    """The next `n` tokens of `ask`, with `n_outputs` rows."""

    ask: Ask
    n: int
    n_outputs: int

    @classmethod
    def of(cls, ask: Ask, most: int, rows: int) -> Part:
        """As many as there are, at most `most` tokens and `rows` outputs; `n` may be 0."""
        n = min(ask.left, most)
        if ask.batch is None:
            n = n if n == ask.left and n <= rows else 0  # a step is one decode
            return cls(ask, n, n)
        outputs = ask.batch.outputs[ask.done : ask.done + n]
        wanted = int(np.count_nonzero(outputs))
        if wanted > rows:
            n, wanted = int(np.flatnonzero(outputs)[rows]), rows
        return cls(ask, n, wanted)

    def spans(self) -> list[tuple[Sequence, int, int]]:
        """Whose tokens these are: sequence, and which tokens `[start, stop)` of the ask's."""
        ask, begin, end = self.ask, self.ask.done, self.ask.done + self.n
        if ask.batch is None:
            return [(sequence, at, at + 1) for at, sequence in enumerate(ask.sequences)]
        found, at = [], 0
        for sequence, count in zip(ask.sequences, ask.counts, strict=True):
            start, stop = max(at, begin), min(at + count, end)
            if start < stop:
                found.append((sequence, start, stop))
            at += count
        return found


def can_step(pool: SequencePool, sequences: list[Sequence], tokens: list[int]) -> bool:
    """Whether a decode of a token for each of them is all there is to do: nothing has to be brought back, to slide or to be
    refused."""
    n_ctx, limits = pool.keeping.n_ctx, pool.backend.limits
    if not 0 < len(tokens) <= min(limits.n_batch, limits.n_outputs) or pool.backend.records_layers:
        return False
    for sequence, token in zip(sequences, tokens, strict=True):
        if sequence.seq_id is None or sequence.closed or len(sequence) >= n_ctx or not 0 <= token < limits.n_vocab:
            return False
    return True


def serve(pool: SequencePool, parts: list[Part], busy: Collection[Sequence]) -> bool:
    """One decode of all parts; their asks go on by as much. `busy`: sequences that no room is made at the cost of.

    False: there is no room, and nothing was stored. Raises `DecodeError`, after which part of it may be stored: the books say
    what counts.
    """
    backend = pool.backend
    if all(part.ask.batch is None for part in parts):
        tokens = [token for part in parts for token in part.ask.tokens or ()]
        owners = [sequence for part in parts for sequence in part.ask.sequences]
        positions, seq_ids = [len(one) for one in owners], [pool.memory.id_of(one) for one in owners]

        def decode() -> DecodeStatus:
            return backend.decode_tokens(tokens, positions, seq_ids)
    else:
        batch = _merged(pool, parts)

        def decode() -> DecodeStatus:
            return backend.decode(batch)

    while (status := decode()) is DecodeStatus.NO_SLOT:
        if not pool.room.make_room(busy):
            return False
    if status is DecodeStatus.ABORTED:
        raise DecodeError(ABORTED, 2)
    for part in parts:
        _store(part)
    layers = () if all(part.ask.batch is None for part in parts) else batch.layers
    _give(pool, parts, layers)
    return True


def cells_full(pool: SequencePool, n: int, busy: Collection[Sequence]) -> CacheFullError:
    limits, used = pool.backend.limits, sum(len(sequence) for sequence in busy)
    return CacheFullError(
        f"{n} more tokens do not fit: {len(busy)} sequences with {used} tokens fill the {limits.n_cells} KV cells. "
        "Load the model with a larger n_cells, or use fewer or shorter rows.",
        used + n,
        limits.n_cells,
    )


def _merged(pool: SequencePool, parts: list[Part]) -> Batch:
    """One batch of all parts. Sequence ids are those of now: a sequence may have been out of the buffer meanwhile."""
    batches = [_slice(pool, part) for part in parts]
    if len(batches) == 1:
        return batches[0]
    tokens = [batch.tokens for batch in batches]
    layers = sorted({layer for batch in batches for layer in batch.layers})
    return Batch(
        tokens=np.concatenate([one for one in tokens if one is not None]),
        embeds=None,
        positions=np.concatenate([batch.positions for batch in batches]),
        seq_ids=np.concatenate([batch.seq_ids for batch in batches]),
        outputs=np.concatenate([batch.outputs for batch in batches]),
        n_outputs=sum(batch.n_outputs for batch in batches),
        want_embeddings=any(batch.want_embeddings for batch in batches),
        layers=tuple(layers),
    )


def _slice(pool: SequencePool, part: Part) -> Batch:
    ask = part.ask
    if ask.batch is None:
        positions = [len(one) for one in ask.sequences]
        return tokens_batch(list(ask.tokens or ()), positions, [pool.memory.id_of(one) for one in ask.sequences])
    whole, begin, end = ask.batch, ask.done, ask.done + part.n
    spans = part.spans()
    ids = [pool.memory.id_of(sequence) for sequence, _, _ in spans]
    return Batch(
        tokens=None if whole.tokens is None else whole.tokens[begin:end],
        embeds=None if whole.embeds is None else whole.embeds[begin:end],
        positions=whole.positions[begin:end],
        seq_ids=np.repeat(np.array(ids, np.int32), [stop - start for _, start, stop in spans]),
        outputs=whole.outputs[begin:end],
        n_outputs=part.n_outputs,
        want_embeddings=whole.want_embeddings,
        layers=whole.layers if part.n_outputs else (),
    )


def _store(part: Part) -> None:
    """llama.cpp holds these tokens now; so do the books."""
    ask = part.ask
    if ask.batch is None:
        for sequence, token in zip(ask.sequences, ask.tokens or (), strict=True):
            sequence.append_one(token)
    else:
        for sequence, start, stop in part.spans():
            given = ask.batch.tokens
            sequence.append(np.full(stop - start, EMBEDDED, np.int32) if given is None else given[start:stop])
    ask.usage.decode_calls += 1
    ask.usage.evaluated_tokens += part.n


def _give(pool: SequencePool, parts: list[Part], recorded: tuple[int, ...]) -> None:
    """To each its rows: `read` sees them where they are, all others get copies. Who has them is `done`, whatever interrupts
    the rest: nothing is read twice."""
    backend, total = pool.backend, sum(part.n_outputs for part in parts)
    if not total:
        for part in parts:
            part.ask.done += part.n
        return
    logits = backend.logits(total)
    batches = [part.ask.batch for part in parts]
    hidden = backend.embeddings(total) if any(one is not None and one.want_embeddings for one in batches) else None
    layers = backend.layers(total) if recorded else None
    at = 0
    for part in parts:
        ask, rows = part.ask, slice(at, at + part.n_outputs)
        at += part.n_outputs
        if ask.batch is None:
            try:
                ask.answer = None if ask.read is None else ask.read(logits[rows])
            except Exception as error:  # of one call, and of no other
                ask.error = error
        elif part.n_outputs:
            mine = [None if one is None else one[rows] for one in (hidden, layers)]
            _copy(ask, part, logits[rows], mine[0], mine[1], recorded)
        ask.done += part.n


Rows = npt.NDArray[np.float32]


def _copy(ask: Ask, part: Part, logits: Rows, hidden: Rows | None, layers: Rows | None, recorded: tuple[int, ...]) -> None:
    batch = ask.batch
    assert batch is not None
    if ask.scored is None:
        ask.logits.append(logits.copy())
    else:
        here = slice(ask.done, ask.done + part.n)
        kept = ask.scored[here][batch.outputs[here] != 0] != 0
        if kept.any():
            ask.logits.append(logits[kept])  # indexing by a mask copies
    if hidden is not None and batch.want_embeddings:
        ask.hidden.append(hidden.copy())
    if layers is not None and batch.layers:
        same = recorded == batch.layers
        ask.layers.append(layers if same else layers[:, [recorded.index(one) for one in batch.layers]])
