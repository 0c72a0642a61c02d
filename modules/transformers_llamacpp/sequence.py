"""A sequence: which tokens llama.cpp holds, or will hold again, under one sequence id.

It is memory and nothing else: who wants it is a request's business (`cache.py`, `modeling.py`), whether it may stay is the
pool's (`pool.py`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .pool import SequencePool
    from .saved import Saved

__all__ = ["EMBEDDED", "Move", "Sequence", "common_prefix", "shared_prefix"]

EMBEDDED = -1
"""Stands in `tokens` for a position that was given as an embedding vector; it equals nothing, not even itself."""


@dataclass(slots=True)
class Move:
    """Tokens that another text held at other positions, and that go to `[p0, p0 + len(tokens))`: `state` is llama.cpp's
    memory of them, at the positions from `source` on."""

    p0: int
    tokens: array[int]
    source: int
    state: memoryview


class Sequence:
    """The tokens of one llama.cpp sequence, made by a `SequencePool` and changed through it.

    `tokens` is the text so far. The sequence is *resident* while it owns a `seq_id`: then llama.cpp holds exactly `tokens`
    at positions `[0, len)`. Otherwise it is *parked*: the tokens are known, and so may be the `saved` state; the engine
    brings it back, from the state or by evaluating the tokens again, before its next decode.

    `len(sequence)` is the number of positions it holds. That is the length of its text, less the `dropped` tokens: with
    StreamingLLM those behind the first `n_sink` leave the memory when it is full, and the rest moves up.

    `held` is true while somebody may go on with it; an idle one waits to be reused as a prefix, or to be evicted.

    `saved` copies leading positions: of a parked sequence all of them and perhaps what it held behind its end, of a resident
    one as many as were saved before and still are what it holds. `checkpoints`, shortest first, are what a memory that
    cannot be rewound is rewound with. `branch`: where another text went another way, a place worth a checkpoint. `moves`:
    what is to be moved in while the rest is evaluated. `shares`: other sequences may share its cells. `before`: the idle
    text that it was before it dropped tokens the last time.
    """

    __slots__ = (
        "_pool", "before", "branch", "checkpoints", "closed", "dropped", "held", "last_use", "moves", "saved", "seq_id",
        "shares", "tokens",
    )  # fmt: skip

    def __init__(self, pool: SequencePool) -> None:
        self._pool = pool
        self.tokens: array[int] = array("i")
        self.dropped = 0
        self.seq_id: int | None = None
        self.saved: Saved | None = None
        self.checkpoints: list[Saved] = []
        self.moves: list[Move] = []
        self.branch = 0
        self.before: Sequence | None = None
        self.shares = False
        self.held = True
        self.closed = False
        self.last_use = 0

    def __len__(self) -> int:
        return len(self.tokens) - self.dropped

    def __repr__(self) -> str:
        where = f"seq_id={self.seq_id}" if self.resident else ("saved" if self.is_saved else "parked")
        gone = f" of {len(self.tokens)}" if self.dropped else ""
        closed = ", closed" if self.closed else ""
        return f"Sequence({len(self)}{gone} tokens, {where}{', held' if self.held else ''}{closed})"

    @property
    def resident(self) -> bool:
        return self.seq_id is not None

    @property
    def is_saved(self) -> bool:
        """Parked, and it can come back without being evaluated."""
        return self.seq_id is None and self.is_copied

    @property
    def is_copied(self) -> bool:
        """All of it is saved, whether it is in the buffer as well or not."""
        return self.saved is not None and self.saved.stop >= len(self)

    def append(self, tokens: npt.NDArray[np.int32]) -> None:
        """llama.cpp has stored these behind what there was."""
        self.tokens.frombytes(np.ascontiguousarray(tokens).tobytes())
        self._pool.changed(self)

    def append_one(self, token: int) -> None:
        """The same for a single one."""
        self.tokens.append(token)
        self._pool.changed(self)

    def become(self, tokens: array[int], dropped: int = 0) -> None:
        """It means `tokens` now."""
        self.tokens, self.dropped = tokens, dropped
        self._pool.changed(self)

    @property
    def has_embeddings(self) -> bool:
        """True where a position came from `inputs_embeds`: such a sequence cannot be evaluated again from its tokens."""
        return EMBEDDED in self.tokens

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on. Raises `IndexError` if there are fewer."""
        self._pool.truncate(self, length)

    def fork(self) -> Sequence:
        """A held copy that shares all cells; either can go on without the other noticing."""
        return self._pool.fork(self)

    def release(self) -> None:
        """Nobody goes on with it; it stays a candidate for prefix reuse. Idempotent."""
        self._pool.release(self)

    def close(self) -> None:
        """Free its cells now. Idempotent."""
        self._pool.discard([self])


def shared_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Length of the longest common prefix of two token arrays; `EMBEDDED` equals nothing."""
    n = min(len(a), len(b))
    different = np.flatnonzero((a[:n] != b[:n]) | (a[:n] == EMBEDDED))
    return int(different[0]) if len(different) else n


def common_prefix(a: array[int], b: npt.NDArray[np.int32], limit: int) -> int:
    """The same for a sequence's `tokens`, at most `limit`."""
    n = min(len(a), len(b), limit)
    if n <= 0 or a[0] != b[0]:
        return 0
    return shared_prefix(np.frombuffer(a, np.int32, n), b)  # a view of this call only: an array cannot grow while one is held
