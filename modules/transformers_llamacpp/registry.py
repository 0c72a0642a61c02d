"""All sequences of one backend: which there are, what their texts are, which were used last.

Runs under the engine's lock, as everything the pool is made of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .backend import Backend
from .memory import Memory
from .saved import SavedStates
from .sequence import EMBEDDED, Sequence
from .tree import PrefixTree

if TYPE_CHECKING:
    from .pool import SequencePool

__all__ = ["Keeping", "Registry", "text_of"]


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept, and how. `prefix_reuse=False` matches nothing and keeps nothing idle. `n_sink`, `reuse_min_chunk`: see
    the options of these names. `n_ctx`: positions a sequence may hold."""

    prefix_reuse: bool = True
    n_sink: int | None = None
    reuse_min_chunk: int = 0
    n_ctx: int = 1 << 31

    def marks(self, slid: bool) -> dict[str, int | bool | None]:
        """What the file of a state says beside the model: where chunks may have moved it is not exact, and what slid belongs to
        its sinks."""
        names = [*(["moved_chunks"] if self.reuse_min_chunk else []), *(["n_sink", "n_ctx"] if slid else [])]
        return {name: value for name, value in self.all_marks().items() if name in names}

    def all_marks(self) -> dict[str, int | bool | None]:
        return {"moved_chunks": self.reuse_min_chunk > 0, "n_sink": self.n_sink, "n_ctx": self.n_ctx}

    @property
    def n_slide(self) -> int:
        """Tokens that a full context drops at once: a quarter of what slides, so that a key is moved three times at most and
        the model always sees three quarters."""
        return max(1, (self.n_ctx - (self.n_sink or 0)) // 4)

    def position(self, sequence: Sequence, length: int) -> int | None:
        """How many positions hold the first `length` tokens of a text. `None`: some of them were dropped, or more than would
        have been dropped by then."""
        if not sequence.dropped or length <= (self.n_sink or 0):
            return length
        return length - sequence.dropped if length >= self.n_ctx + sequence.dropped - self.n_slide else None


class Registry:
    """Sequences are made and closed here; `pool` is what they ask for everything else."""

    def __init__(self, pool: SequencePool, backend: Backend, keeping: Keeping, states: SavedStates) -> None:
        self.pool = pool
        self.backend = backend
        self.keeping = keeping
        self.states = states
        self.memory = Memory(backend, states)
        self.sequences: list[Sequence] = []
        self._tree: PrefixTree[Sequence] = PrefixTree()
        self._changed: dict[Sequence, None] = {}
        self._clock = 0

    def new(self) -> Sequence:
        """An empty held sequence; it takes a sequence id when its first tokens come."""
        sequence = Sequence(self.pool)
        self.sequences.append(sequence)
        return sequence

    def changed(self, sequence: Sequence) -> None:
        """Its text is another one; the tree learns that before it is asked the next time."""
        if self.keeping.prefix_reuse:
            self._changed[sequence] = None

    def like(self, tokens: npt.NDArray[np.int32]) -> Iterator[tuple[int, Sequence]]:
        """`(shared, sequence)`, those whose texts share most with `tokens` first; nothing may change meanwhile."""
        for sequence in self._changed:
            if sequence.closed or not sequence.tokens:
                self._tree.discard(sequence)
            else:
                self._tree.put(sequence, text_of(sequence))
        self._changed.clear()
        return self._tree.matches(tokens)

    def close(self, sequence: Sequence) -> None:
        if sequence.closed:
            return
        sequence.closed = True
        sequence.held = False
        self.memory.leave(sequence)
        sequence.saved, sequence.checkpoints, sequence.moves = None, [], []
        self.sequences.remove(sequence)
        self.changed(sequence)

    def touch(self, sequence: Sequence) -> None:
        self._clock += 1
        sequence.last_use = self._clock

    def renew_tree(self) -> None:
        """The tree follows from the texts; one that may be half written is made anew."""
        self._tree, self._changed = PrefixTree(), {}
        for sequence in self.sequences:
            self.changed(sequence)

    def rebuild(self) -> None:
        """Empty the buffer, and believe of the sequences only what they mean and what was saved of them."""
        self.backend.clear()
        self.memory.renew()
        self.sequences[:] = [sequence for sequence in self.sequences if not sequence.closed]
        for sequence in self.sequences:
            sequence.seq_id, sequence.shares = None, False
            sequence.moves.clear()
            sequence.checkpoints = [c for c in sequence.checkpoints if c.stop <= len(sequence)]
            if not sequence.is_saved:
                sequence.saved, sequence.dropped = None, 0

    def check(self) -> None:
        """Raise `AssertionError` where the tree has another text of a sequence than the sequence."""
        for sequence in self.sequences:
            assert not sequence.closed, f"{sequence} is closed and still in the pool"
            if self.keeping.prefix_reuse and sequence not in self._changed and sequence.tokens:
                assert np.array_equal(self._tree.text(sequence), text_of(sequence)), f"the tree has another text of {sequence}"
        assert len(self._tree) <= len(self.sequences) + len(self._changed), "the tree knows sequences that are gone"


def text_of(sequence: Sequence) -> npt.NDArray[np.int32]:
    """Its tokens up to the first position that was given as a vector."""
    tokens = np.array(sequence.tokens, np.int32)
    embedded = np.flatnonzero(tokens == EMBEDDED)
    return tokens[: embedded[0]] if len(embedded) else tokens
