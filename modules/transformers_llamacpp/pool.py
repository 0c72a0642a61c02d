"""The policy: which sequence in memory a new text starts from, and what may be forgotten.

All methods run under the engine's lock. Who has to go for whom is decided in `room.py`.
"""

from __future__ import annotations

import collections
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .backend import Backend
from .errors import CacheFullError, UnsupportedFeatureError
from .memory import Memory
from .moving import Moving
from .registry import Keeping, Registry, text_of
from .reuse import Reuse
from .room import Room
from .saved import Saved, SavedStates
from .sequence import EMBEDDED, Sequence

__all__ = ["Held", "SequencePool"]

WORDS = {"the KV buffer": "memory", "host memory": "host", "a file of state_dir": "disk"}


@dataclass(frozen=True, slots=True)
class Match:
    """`length` tokens of the text can start from `source`; `known` of them were seen before, perhaps in a memory that
    cannot go back there."""

    source: Sequence | None
    length: int
    known: int


@dataclass(frozen=True, slots=True)
class Held:
    """What an engine has in memory: `texts` it knows, `sequences` of them in the KV buffer, the `cells` these use of
    `n_cells` (what several begin with counts once), and the `host_bytes` of saved states."""

    texts: int
    sequences: int
    cells: int
    n_cells: int
    host_bytes: int


class SequencePool:
    """All sequences of one backend, each in the buffer, saved (see `saved.py`), or known by its tokens only."""

    def __init__(self, backend: Backend, keeping: Keeping, states: SavedStates) -> None:
        self.registry = Registry(self, backend, keeping, states)
        self.room = Room(self.registry)
        self.moving = Moving(self.registry, self.room)
        self._dropped: collections.deque[Sequence] = collections.deque()

    @property
    def sequences(self) -> list[Sequence]:
        return self.registry.sequences

    @property
    def keeping(self) -> Keeping:
        return self.registry.keeping

    @property
    def backend(self) -> Backend:
        return self.registry.backend

    @property
    def memory(self) -> Memory:
        return self.registry.memory

    def held(self) -> Held:
        sequences = self.registry.sequences
        resident = [sequence for sequence in sequences if sequence.resident]
        texts = sum(1 for sequence in sequences if sequence.tokens)
        saved = SavedStates.host_bytes(sequences)
        return Held(texts, len(resident), self.room.cells_of(resident), self.backend.limits.n_cells, saved)

    # -- what callers do ------------------------------------------------------------------------------------

    def new(self) -> Sequence:
        """An empty held sequence; it takes a sequence id when its first tokens come."""
        return self.registry.new()

    def changed(self, sequence: Sequence) -> None:
        """Its text is another one."""
        self.registry.changed(sequence)

    def make_lean(
        self, texts: list[tuple[npt.NDArray[np.int32], int]], busy: Collection[Sequence] = (), alone: bool = False
    ) -> None:
        """See `Room.make_lean`; `texts`: the new ones of the call, each with the most it may reuse."""

        def sources() -> list[Sequence]:
            return [source for source in (self.match(*text).source for text in texts) if source is not None]

        self.room.make_lean([text[:limit] for text, limit in texts], sources, busy, alone)

    def adopt(self, texts: Iterable[tuple[array[int], Saved, list[Saved]]]) -> None:
        """Idle texts that were saved earlier: their tokens, state and checkpoints. Of those that are longer than this context
        only parts are of use."""
        for tokens, whole, checkpoints in texts:
            saved = whole.upto(self.keeping.n_ctx)
            if saved is None:
                continue
            tokens = tokens[: saved.stop]
            sequence = self.registry.new()
            sequence.saved, sequence.held = saved, False
            sequence.checkpoints = [c for c in checkpoints if c.stop <= saved.stop]
            sequence.become(tokens)
            self.registry.touch(sequence)

    def match(self, tokens: npt.NDArray[np.int32], limit: int) -> Match:
        """What shares the longest prefix with `tokens`, at most `limit`, that a memory can really start from.

        Among equals an idle one that is used up whole comes first, because taking it over copies nothing.
        """
        best: Sequence | None = None
        length = known = 0
        if not self.keeping.prefix_reuse:
            return Match(None, 0, 0)
        for shared, sequence in self.registry.like(tokens[:limit]):
            known = known or shared
            if shared < length or (shared == length and len(sequence.tokens) > shared):
                break  # of those who share as much, the ones that end there come first
            n = self._usable(sequence, shared)
            whole = not sequence.held and n == len(sequence.tokens)
            if n > length or (n == length and n > 0 and whole):
                best, length = sequence, n
        return Match(best, length, known)

    def acquire(
        self, sequence: Sequence, tokens: npt.NDArray[np.int32], limit: int, busy: Collection[Sequence] = ()
    ) -> Reuse:
        """Let the empty `sequence` start with the longest prefix of `tokens` in memory, at most `limit`.

        An idle sequence that is a prefix as a whole is taken over. Everything else is forked, because somebody may still
        go on with what comes after the shared part.
        """
        tries = {*busy, sequence}
        while True:
            match = self.match(tokens, limit)
            sequence.branch = match.known
            if match.source is None:
                return self._nothing(match, len(tokens))
            source = match.source
            self.registry.touch(source)
            rewound = match.length < len(source.tokens) and not self._can_cut(source, match.length)
            try:
                source_was = self._start_from(source, sequence, match.length, tries)
            except CacheFullError:  # no sequence id for a copy beside its source: evaluating needs one less
                return Reuse("none", "no sequence id was free for a copy of the known text: raise n_seq_max")
            if source_was is not None:
                left = f"{match.length} of {len(tokens)} tokens were in {source_was}"
                if match.known > match.length:
                    left += f"; {match.known} are known, but the memory of this model cannot go back there"
                return Reuse("checkpoint" if rewound else WORDS[source_was], left)
            if source.resident or source.is_saved:
                return Reuse("none", f"no room in the {self.backend.limits.n_cells} KV cells for the known text's state")

    def _nothing(self, match: Match, n: int) -> Reuse:
        if not self.keeping.prefix_reuse:
            return Reuse("none", "prefix_reuse=False")
        if not match.known:
            return Reuse("none", f"no text that is still kept begins like these {n} tokens")
        return Reuse(
            "none",
            f"{match.known} of {n} tokens are known, but the memory of this model cannot go back there and no checkpoint of "
            "them is left",
        )

    def _start_from(self, source: Sequence, target: Sequence, n: int, busy: set[Sequence]) -> str | None:
        """Where the first `n` tokens came from; `None` where that failed, and `target` is empty."""
        if source.resident:
            if not source.held and n == len(source.tokens):
                self._hand_over(source, target)
            else:
                self._share(source, target, n, busy | {source})
            return "the KV buffer" if target.resident else None
        saved = source.saved
        assert saved is not None
        whole = n == len(source.tokens)
        position = len(source) if whole else self.keeping.position(source, n)
        assert position is not None
        if not whole and self.memory.divides and not source.dropped:
            saved = self.room.part_at(saved, position)
        where = saved.where(position)
        if not self.room.fill(target, saved, position, source.checkpoints, busy | {source}):
            if not source.is_saved and not source.held:
                self.registry.close(source)
            return None
        target.become(source.tokens[:n], n - position)
        target.saved = saved.upto(position)
        target.checkpoints = [c for c in source.checkpoints if c.stop <= n]
        if whole and not source.held:
            self.registry.close(source)
        self.room.trim()
        return "a file of state_dir" if where == "disk" else "host memory"

    def fork(self, source: Sequence, busy: Collection[Sequence] = ()) -> Sequence:
        """A held copy that shares all cells. A parked one is copied with its state, for free."""
        copy = self.registry.new()
        if source.resident:
            try:
                self._share(source, copy, len(source.tokens), {*busy, source, copy})
            except BaseException:
                self.registry.close(copy)
                raise
        if not copy.resident:
            copy.become(array("i", source.tokens), source.dropped)
            copy.saved, copy.checkpoints = source.saved, list(source.checkpoints)
        return copy

    def copy_prefix(self, source: Sequence, target: Sequence, length: int, busy: Collection[Sequence]) -> int:
        """Let the empty `target` share the first `length` tokens of the resident `source`; how many it could take."""
        self._share(source, target, self._usable(source, length), {*busy})
        return len(target.tokens)

    def split_off(self, sequence: Sequence) -> None:
        """Make `sequence` empty and leave what it held as an idle sequence."""
        idle = self.registry.new()
        self._move(sequence, idle)
        self.release(idle)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens of the text from `length` on.

        Where the memory cannot go back (recurrent state, cells a sliding window has dropped, tokens a full context slid
        away), the sequence is parked with the tokens it keeps, and these are evaluated again before its next decode, from
        the last checkpoint on: slower, never wrong.
        """
        if not 0 <= length <= len(sequence.tokens):
            raise IndexError(f"cannot truncate {len(sequence.tokens)} tokens to {length}")
        if length == len(sequence.tokens):
            return
        position = self.keeping.position(sequence, length)
        if sequence.resident:
            if position is None or not self.memory.rewind(sequence, position):
                self._check_can_evaluate_again(sequence, length)
                self._set_aside(sequence, length)
        elif position is None or (length and self.backend.limits.stateful and not self._checkpoint_just(sequence, length)):
            self._check_can_evaluate_again(sequence, length)
            self._set_aside(sequence, length)
        # else the saved state keeps its tail, which is cut when the sequence comes back
        if position is None or position == length:
            sequence.dropped = 0
        sequence.checkpoints = [c for c in sequence.checkpoints if c.stop <= length]
        if sequence.saved is not None and (sequence.resident or length == 0):
            sequence.saved = sequence.saved.upto(position or 0)
        del sequence.tokens[length:]
        self.registry.changed(sequence)
        if length == 0:
            self.memory.leave(sequence)
            self.room.trim()

    @staticmethod
    def _checkpoint_just(sequence: Sequence, length: int) -> bool:
        return any(c.stop == length for c in sequence.checkpoints)

    def _set_aside(self, sequence: Sequence, length: int) -> None:
        """Park without a state. What it held stays as an idle text, if going back to a checkpoint in it is any use."""
        useful = any(c.stop <= length for c in sequence.checkpoints) and self.keeping.prefix_reuse
        if useful and (self._holds_all(sequence) or sequence.is_saved):
            idle = self.registry.new()
            self._move(sequence, idle)
            sequence.become(array("i", idle.tokens))
            idle.held = False
            self.registry.touch(idle)
        else:
            self.memory.leave(sequence)
            sequence.saved = None
        self.room.trim()

    def _holds_all(self, sequence: Sequence) -> bool:
        """It is resident, and going back did not fail half way."""
        return sequence.resident and self.backend.pos_max(self.memory.id_of(sequence)) == len(sequence) - 1

    def rewind(self, sequence: Sequence, length: int) -> bool:
        """Let the memory of a resident sequence end at position `length`. False: it cannot go back that far."""
        return self.memory.rewind(sequence, length)

    def release(self, sequence: Sequence) -> None:
        """Make it idle. It is closed at once where nobody could ever match it."""
        if sequence.closed or not sequence.held:
            return
        sequence.held = False
        sequence.moves.clear()
        self.registry.touch(sequence)
        worthless = (
            not self.keeping.prefix_reuse
            or not sequence.tokens
            or sequence.tokens[0] == EMBEDDED
            or not (sequence.resident or sequence.is_saved)
        )
        if worthless or self._is_covered(sequence):
            self.registry.close(sequence)
        self.room.trim()

    def release_later(self, sequences: Iterable[Sequence]) -> None:
        """For finalizers: may run at any time on any thread, so it only leaves a note for the next call."""
        self._dropped.extend(sequences)

    def collect(self) -> None:
        """Release what finalizers left."""
        while self._dropped:
            self.release(self._dropped[0])  # an interrupt must not lose it
            self._dropped.popleft()

    def discard(self, sequences: Iterable[Sequence]) -> None:
        """Close them; what only they needed in host memory is free again."""
        for sequence in sequences:
            self.registry.close(sequence)
        self.room.trim()

    def forget(self) -> None:
        """Close all idle sequences: the next call is a cold one."""
        self.collect()
        for sequence in [s for s in self.sequences if not s.held]:
            self.registry.close(sequence)

    def reset_tokens(self, sequence: Sequence, tokens: array[int]) -> None:
        """After a failure: the sequence means `tokens` again, to be evaluated before its next decode.

        One that holds embeddings cannot be evaluated again: it is closed, so that going on with it is an error.
        """
        self.memory.leave(sequence)
        sequence.saved, sequence.checkpoints = None, [c for c in sequence.checkpoints if c.stop <= len(tokens)]
        sequence.become(tokens)
        if sequence.has_embeddings:
            self.registry.close(sequence)

    def repair(self) -> None:
        """After an interrupt in the middle of anything: where the books are wrong, the buffer is emptied and they are written
        anew. What was in it and is kept by somebody is evaluated again; what was saved is what it was."""
        self.registry.renew_tree()
        try:
            self.check()
        except Exception:
            self.registry.rebuild()
            for sequence in list(self.sequences):
                lost = not sequence.is_saved and (sequence.has_embeddings or not sequence.held)
                if lost or (not sequence.tokens and not sequence.held):
                    self.registry.close(sequence)
            self.room.trim()

    def check(self) -> None:
        """Raise `AssertionError` where the books and llama.cpp's memory disagree."""
        self.registry.check()
        backend, free = self.backend, self.memory.free
        owned = [s.seq_id for s in self.sequences if s.seq_id is not None]
        assert len(owned) == len(set(owned)), f"a sequence id has two owners: {sorted(owned)}"
        assert sorted([*owned, *free]) == list(range(backend.limits.n_seq_max)), (owned, free)
        for sequence in self.sequences:
            if sequence.seq_id is not None:
                stored = backend.pos_max(sequence.seq_id) + 1
                assert stored == len(sequence), f"{sequence}: llama.cpp holds {stored} positions"
                assert sequence.saved is None or sequence.saved.stop <= len(sequence), f"{sequence} has a longer copy"
            assert all(c.stop <= len(sequence) for c in sequence.checkpoints), f"{sequence}: checkpoints behind its end"
        for seq_id in free:
            assert backend.pos_max(seq_id) == -1, f"free sequence id {seq_id} still holds positions"
        states = self.registry.states
        held = [s for s in self.sequences if s.held and not s.resident]
        over = states.host_bytes(self.sequences) - states.host_bytes(held)
        assert over <= states.max_bytes, f"{over} bytes of idle states, {states.max_bytes} allowed"

    def _usable(self, sequence: Sequence, n: int) -> int:
        """How much of a match of `n` tokens a new text can really start from."""
        if not (sequence.resident or sequence.is_saved):
            return 0
        if n == len(sequence.tokens):
            return n
        if self.keeping.position(sequence, n) is None:
            n = self.keeping.n_sink or 0
        if self._can_cut(sequence, n):
            return n
        checkpoint = self.memory.checkpoint_at(sequence, n)
        return 0 if checkpoint is None else checkpoint.stop

    def _can_cut(self, sequence: Sequence, n: int) -> bool:
        """A text can start from just the first `n` positions, without a checkpoint."""
        limits = self.backend.limits
        if sequence.resident:
            return not limits.recurrent and self.memory.can_rewind(sequence, n)
        return self.memory.divides or not (limits.stateful or limits.n_swa)

    def _hand_over(self, source: Sequence, target: Sequence) -> None:
        """`target` becomes what the idle `source` was."""
        self._move(source, target)
        self.registry.close(source)

    def _move(self, source: Sequence, target: Sequence) -> None:
        target.seq_id, source.seq_id = source.seq_id, None
        target.saved, source.saved = source.saved, None
        target.checkpoints, source.checkpoints = source.checkpoints, list(source.checkpoints)
        target.shares, source.shares = source.shares, False
        target.become(source.tokens, source.dropped)
        source.become(array("i"))

    def _share(self, source: Sequence, target: Sequence, length: int, busy: Collection[Sequence]) -> None:
        if length == 0:
            return
        self.room.take_id(target, busy)
        if not source.resident:  # a larger context came up empty
            self.memory.leave(target)
            return
        self.backend.seq_copy(self.memory.id_of(source), self.memory.id_of(target))
        source.shares = target.shares = True
        target.become(array("i", source.tokens), source.dropped)
        target.saved, target.checkpoints = source.saved, list(source.checkpoints)
        position = self.keeping.position(source, length)
        cut = length < len(source.tokens)
        back = not cut or (position is not None and self.memory.rewind(target, position))
        if not back or not self.memory.own_window(target):
            self.memory.leave(target)  # start empty, which is what the caller sees
            position, length = 0, 0
        target.become(target.tokens[:length], source.dropped if position != length else 0)
        target.saved = None if target.saved is None else target.saved.upto(position or 0)
        target.checkpoints = [c for c in target.checkpoints if c.stop <= length]

    def _is_covered(self, sequence: Sequence) -> bool:
        """Another idle sequence in the buffer can stand in for it in every match; a held one may be gone in a moment."""
        if self.backend.limits.stateful or sequence.dropped or sequence.has_embeddings:
            return False
        n = len(sequence.tokens)
        for shared, other in self.registry.like(text_of(sequence)):
            if shared < n:
                break
            whole = other.resident and not other.held and not other.dropped and other is not sequence
            if whole and self._usable(other, n) == n:
                return True
        return False

    @staticmethod
    def _check_can_evaluate_again(sequence: Sequence, length: int) -> None:
        if EMBEDDED in sequence.tokens[:length]:
            raise UnsupportedFeatureError(
                "this model's memory cannot go back, and positions given by inputs_embeds cannot be evaluated again: "
                "start over with the whole input",
                "crop",
            )
