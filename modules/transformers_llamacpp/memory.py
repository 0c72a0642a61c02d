"""The mechanics of one backend's memory: sequence ids, saving and restoring, going back, moving.

Nothing here decides: who has to go, what is worth keeping and what a text starts from is the pool's business. A method that
needs room answers that there is none, and the pool makes some.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from .backend import Backend
from .errors import StateError
from .saved import Saved, SavedStates
from .sequence import Move, Sequence

__all__ = ["Memory"]


class Memory:
    """`free`: sequence ids that nobody owns; `span`: the most cells in use at once since the buffer was last empty, so
    that those in use now may lie scattered over as many."""

    def __init__(self, backend: Backend, states: SavedStates) -> None:
        self.backend = backend
        self.states = states
        self.free = list(range(backend.limits.n_seq_max - 1, -1, -1))
        self.span = 0

    @property
    def divides(self) -> bool:
        """Positions can be saved and restored in ranges."""
        limits = self.backend.limits
        return not limits.stateful and limits.n_seq_max > 1

    # -- ids --------------------------------------------------------------------------------------------------

    @staticmethod
    def id_of(sequence: Sequence) -> int:
        assert sequence.seq_id is not None
        return sequence.seq_id

    def leave(self, sequence: Sequence) -> None:
        """Give the sequence id back, with all its cells."""
        if sequence.seq_id is None:
            return
        self._empty(sequence.seq_id)
        self.free.append(sequence.seq_id)
        sequence.seq_id, sequence.shares = None, False
        if len(self.free) == self.backend.limits.n_seq_max:
            # an empty buffer starts at its first cell again, so that equal calls use equal cells
            self.backend.clear()
            self.free.sort(reverse=True)
            self.span = 0

    def renew(self) -> None:
        """A new context came up empty."""
        self.free = list(range(self.backend.limits.n_seq_max - 1, -1, -1))
        self.span = 0

    def _empty(self, seq_id: int) -> None:
        if not self.backend.seq_remove(seq_id, -1, -1):
            raise StateError(f"llama.cpp refused to drop the whole sequence {seq_id}")

    @contextmanager
    def _scratch(self) -> Iterator[int]:
        """A free id that is empty again afterwards."""
        seq_id = self.free[-1]
        try:
            yield seq_id
        finally:
            self._empty(seq_id)

    def own_window(self, sequence: Sequence) -> bool:
        """Give a copy a window of its own. False: there is no room, and it is empty.

        llama.cpp takes no cell back that several sequences hold, though it lie behind the windows of all of them; a buffer
        that holds little more than the windows would be full of such cells.
        """
        seq_id, limits = self.id_of(sequence), self.backend.limits
        if not limits.n_swa or limits.swa_full:
            return True
        behind = self.backend.pos_max(seq_id) + 1 - self.backend.pos_min(seq_id) - limits.n_swa
        if behind <= limits.n_swa // 4:  # few enough to wait until more come together
            return True
        return self.backend.state_load(seq_id, self.backend.state_save(seq_id, partial=True), partial=True)

    # -- going back -------------------------------------------------------------------------------------------

    def can_rewind(self, sequence: Sequence, length: int) -> bool:
        """Sliding windows lose old positions silently: what the next token attends to must still be there."""
        window = self.backend.limits.n_swa
        if window == 0 or length == 0:
            return True
        return 0 <= self.backend.pos_min(self.id_of(sequence)) <= max(0, length - window)

    def rewind(self, sequence: Sequence, length: int) -> bool:
        """Let the memory of a resident sequence end at position `length`. False: it cannot go back just there."""
        seq_id = self.id_of(sequence)
        if self.can_rewind(sequence, length) and self.backend.seq_remove(seq_id, length, -1):
            return True
        checkpoint = self.checkpoint_at(sequence, length)
        if checkpoint is None or checkpoint.stop != length:
            return False
        return self._take_checkpoint(sequence, checkpoint)

    @staticmethod
    def checkpoint_at(sequence: Sequence, length: int) -> Saved | None:
        """The last checkpoint of at most `length` positions."""
        return max((c for c in sequence.checkpoints if c.stop <= length), key=lambda c: c.stop, default=None)

    def _take_checkpoint(self, sequence: Sequence, checkpoint: Saved) -> bool:
        seq_id = self.id_of(sequence)
        try:
            data = self.states.read(checkpoint)
        except StateError:  # its file is gone
            sequence.checkpoints.remove(checkpoint)
            return False
        if not self.backend.state_load(seq_id, data, partial=True):
            self._empty(seq_id)  # what was there is lost in part; whoever asked evaluates again
            return False
        return self.backend.seq_remove(seq_id, checkpoint.stop, -1) and (
            self.backend.pos_max(seq_id) == checkpoint.stop - 1
        )

    def make_checkpoint(self, sequence: Sequence) -> None:
        """Note the state of a memory that cannot be rewound, where that is not known yet."""
        length = len(sequence)
        if any(c.stop == length for c in sequence.checkpoints):
            return
        data = self.backend.state_save(self.id_of(sequence), partial=True)
        sequence.checkpoints.append(Saved(0, length, None, data, partial=True))
        sequence.checkpoints.sort(key=lambda c: c.stop)

    # -- saving -----------------------------------------------------------------------------------------------

    def save(self, sequence: Sequence, base: Saved | None, cut: int = 0, leaving: bool = False) -> Saved:
        """A copy of all positions of a resident sequence that goes on from `base`, a copy of its first ones; a part ends at
        `cut`. `leaving`: it leaves the buffer next, so that it need not stay whole."""
        length, limits = len(sequence), self.backend.limits
        seq_id = self.id_of(sequence)
        step = limits.n_swa or length
        whole = not self.divides or (limits.n_swa and self.backend.pos_min(seq_id) > 0)
        start = 0 if base is None else base.stop
        if base is not None and start == length and not whole:
            return base
        if not whole and not self.free and leaving and start and length - start <= step:
            return Saved(start, length, base, self._cut_out(seq_id, start, length, length))
        if whole or ((base is not None or cut or step < length) and not self.free):
            return Saved(0, length, None, self.backend.state_save(seq_id))
        while start < length:
            stop = min(start + step, length, cut if cut > start else length)
            base = Saved(start, stop, base, self._range(seq_id, start, stop, length))
            start = stop
        assert base is not None
        return base

    def _range(self, seq_id: int, start: int, stop: int, length: int) -> memoryview:
        if start == 0 and stop == length:
            return self.backend.state_save(seq_id)
        with self._scratch() as scratch:
            self.backend.seq_copy(seq_id, scratch)
            return self._cut_out(scratch, start, stop, length)

    def _cut_out(self, scratch: int, start: int, stop: int, length: int) -> memoryview:
        if stop < length and not self.backend.seq_remove(scratch, stop, -1):
            raise StateError(f"llama.cpp refused to cut off the positions from {stop} on")
        if start and not self.backend.seq_remove(scratch, 0, start):
            raise StateError(f"llama.cpp refused to cut off the positions before {start}")
        return self.backend.state_save(scratch)

    def split(self, part: Saved, at: int) -> bool:
        """Make two parts of one, in place: everybody who has it then has both. False: there is no room for that now."""
        if part.data is None or not self.free or not part.start < at < part.stop:
            return False
        halves = []
        for start, stop in ((part.start, at), (at, part.stop)):
            with self._scratch() as scratch:
                if not self.backend.state_load(scratch, part.data):
                    return False
                if self.backend.pos_min(scratch) != part.start:
                    return False  # a window's layers hold less of it
                halves.append(self._cut_out(scratch, start if start > part.start else 0, stop, part.stop))
        part.base = Saved(part.start, at, part.base, halves[0])
        part.start, part.data, part.file = at, halves[1], None
        return True

    # -- restoring --------------------------------------------------------------------------------------------

    def copy_beginning(self, source: Sequence, target: Sequence, length: int) -> None:
        """The empty `target` shares the first `length` positions of `source`; only of a memory that `divides`."""
        seq_id = self.id_of(target)
        self.backend.seq_copy(self.id_of(source), seq_id)
        source.shares = target.shares = True
        if length < len(source) and not self.backend.seq_remove(seq_id, length, -1):
            raise StateError(f"llama.cpp refused to cut off the positions from {length} on")

    def load(
        self, sequence: Sequence, saved: Saved, length: int, checkpoints: list[Saved], held: int = 0
    ) -> bool | None:
        """Fill a sequence that has an id with the first `length` positions, of which it has `held` already.

        `None`: no room for them, and nothing changed; False: they cannot be restored.
        """
        seq_id = self.id_of(sequence)
        parts = [part for part in saved.chain() if part.start < length]
        try:
            for part in parts:
                if part.stop <= held:
                    continue
                data = self.states.read(part)
                if not self._load_part(seq_id, part, data):
                    self._empty(seq_id)
                    return None
        except StateError:
            self._empty(seq_id)
            return False
        mine, sequence.checkpoints = sequence.checkpoints, checkpoints
        try:
            back = parts[-1].stop == length or self.rewind(sequence, length)
        finally:
            sequence.checkpoints = mine
        if not back:
            self._empty(seq_id)
        return back

    def _load_part(self, seq_id: int, part: Saved, data: memoryview) -> bool:
        """False: no room."""
        if part.start == 0:
            return self.backend.state_load(seq_id, data)
        with self._scratch() as scratch:
            if not self.backend.state_load(scratch, data):
                return False
            if self.backend.pos_min(scratch) != part.start:
                raise StateError(f"the saved positions {part.start} to {part.stop} are not complete")
            self.backend.seq_join(scratch, seq_id)
        return True

    # -- moving -----------------------------------------------------------------------------------------------

    def cut_chunk(self, sequence: Sequence, start: int, stop: int, p0: int) -> Move:
        """A copy of the positions `[start, stop)` of a resident sequence, to be moved to those from `p0` on."""
        state = self._range(self.id_of(sequence), start, stop, len(sequence))
        return Move(p0, array("i", sequence.tokens[start:stop]), start, state)

    def join_chunk(self, sequence: Sequence, move: Move) -> bool:
        """Put a chunk behind what a resident sequence holds. False: no room for it."""
        with self._scratch() as scratch:
            if not self.backend.state_load(scratch, move.state):
                return False
            if move.p0 != move.source:
                self.backend.seq_shift(scratch, move.source, move.p0 - move.source)
            self.backend.seq_join(scratch, self.id_of(sequence))
        return True

    def slide(self, sequence: Sequence, n_sink: int, n: int) -> None:
        """Drop the `n` positions behind the first `n_sink`; what follows moves up. Its cells must be its own."""
        seq_id = self.id_of(sequence)
        if not self.backend.seq_remove(seq_id, n_sink, n_sink + n):
            raise StateError(f"llama.cpp refused to drop the positions {n_sink} to {n_sink + n}")
        self.backend.seq_shift(seq_id, n_sink + n, -n)
        sequence.become(sequence.tokens, sequence.dropped + n)
