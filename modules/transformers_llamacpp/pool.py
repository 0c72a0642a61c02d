"""The policy: which sequence in memory a new text starts from, and which one has to go.

All methods run under the engine's lock.
"""

from __future__ import annotations

import collections
from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .backend import Backend
from .chunks import moved_chunks
from .errors import CacheFullError, ModelLoadError, StateError, UnsupportedFeatureError
from .memory import Memory
from .reuse import Reuse
from .saved import Saved, SavedStates
from .sequence import EMBEDDED, Sequence, common_prefix
from .tree import PrefixTree

__all__ = ["Keeping", "SequencePool"]

SPARE = 256
"""Cells that may stay in the buffer for nobody while others decode; llama.cpp reads cells in steps of as many."""

PART = 32
"""Common beginnings of fewer tokens are not worth a part of their own."""

CHECKPOINTS = 16
"""Most checkpoints of one text."""

WORDS = {"the KV buffer": "memory", "host memory": "host", "a file of state_dir": "disk"}

LOOK_AT = 8
"""So many texts are looked through for moved chunks, or for parts that a new copy can go on from."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """What is kept, and how. `prefix_reuse=False` matches nothing and keeps nothing idle. `n_sink`, `reuse_min_chunk`: see
    the options of these names."""

    prefix_reuse: bool = True
    n_sink: int | None = None
    reuse_min_chunk: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """`length` tokens of the text can start from `source`; `known` of them were seen before, perhaps in a memory that
    cannot go back there."""

    source: Sequence | None
    length: int
    known: int


class SequencePool:
    """All sequences of one backend, each in the buffer, saved (see `saved.py`), or known by its tokens only."""

    def __init__(self, backend: Backend, keeping: Keeping, states: SavedStates) -> None:
        self.backend = backend
        self.keeping = keeping
        self.states = states
        self.memory = Memory(backend, states)
        self.sequences: list[Sequence] = []
        self._tree: PrefixTree[Sequence] = PrefixTree()
        self._changed: dict[Sequence, None] = {}
        self._clock = 0
        self._dropped: collections.deque[Sequence] = collections.deque()

    # -- what callers do ------------------------------------------------------------------------------------

    def new(self) -> Sequence:
        """An empty held sequence; it takes a sequence id when its first tokens come."""
        sequence = Sequence(self)
        self.sequences.append(sequence)
        return sequence

    def adopt(self, texts: Iterable[tuple[array[int], Saved, list[Saved]]]) -> None:
        """Idle texts that were saved earlier: their tokens, state and checkpoints."""
        for tokens, saved, checkpoints in texts:
            sequence = self.new()
            sequence.saved, sequence.checkpoints, sequence.held = saved, checkpoints, False
            sequence.become(tokens)
            self._touch(sequence)

    def changed(self, sequence: Sequence) -> None:
        """Its text is another one; the tree learns that before it is asked the next time."""
        if self.keeping.prefix_reuse:
            self._changed[sequence] = None

    def match(self, tokens: npt.NDArray[np.int32], limit: int) -> Match:
        """What shares the longest prefix with `tokens`, at most `limit`, that a memory can really start from.

        Among equals an idle one that is used up whole comes first, because taking it over copies nothing.
        """
        best: Sequence | None = None
        length = known = 0
        if not self.keeping.prefix_reuse:
            return Match(None, 0, 0)
        for shared, sequence in self._texts_like(tokens[:limit]):
            known = known or shared
            if shared < length:
                break
            n = self._usable(sequence, shared)
            whole = not sequence.held and n == len(sequence.tokens)
            if n > length or (n == length and n > 0 and whole):
                best, length = sequence, n
        return Match(best, length, known)

    def _texts_like(self, tokens: npt.NDArray[np.int32]) -> Iterable[tuple[int, Sequence]]:
        for sequence in self._changed:
            if sequence.closed or not sequence.tokens:
                self._tree.discard(sequence)
            else:
                self._tree.put(sequence, _text(sequence))
        self._changed.clear()
        return self._tree.matches(tokens)

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
            self._touch(source)
            # of a memory that cannot be rewound, a part comes out of a checkpoint
            rewound = self.backend.limits.stateful and match.length < len(source.tokens)
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
        position = len(source) if whole else n
        if not whole and self.memory.divides and not source.dropped:
            saved = self._part_at(saved, position)
        where = saved.where(position)
        if not self._fill(target, saved, position, source.checkpoints, busy | {source}):
            if not source.is_saved and not source.held:
                self.close(source)
            return None
        target.become(source.tokens[:n], source.dropped if whole else 0)
        target.saved = saved.upto(position)
        target.checkpoints = [c for c in source.checkpoints if c.stop <= n]
        if whole and not source.held:
            self.close(source)
        self.trim()
        return "a file of state_dir" if where == "disk" else "host memory"

    def _part_at(self, saved: Saved, position: int) -> Saved:
        """The shortest chain that holds `position` positions; it ends there where that is worth a cut."""
        last = next(part for part in saved.chain() if part.stop >= position)
        if last.stop == position or position - last.start < PART or last.stop - position < PART:
            return last
        return last.base if self.memory.split(last, position) and last.base is not None else last

    def fork(self, source: Sequence, busy: Collection[Sequence] = ()) -> Sequence:
        """A held copy that shares all cells. A parked one is copied with its state, for free."""
        copy = self.new()
        if source.resident:
            try:
                self._share(source, copy, len(source.tokens), {*busy, source, copy})
            except BaseException:
                self.close(copy)
                raise
        if not copy.resident:
            copy.become(array("i", source.tokens), source.dropped)
            copy.saved, copy.checkpoints = source.saved, list(source.checkpoints)
        return copy

    def copy_prefix(self, source: Sequence, target: Sequence, length: int, busy: Collection[Sequence]) -> int:
        """Let the empty `target` share the first `length` tokens of the resident `source`; how many it could take."""
        self._share(source, target, self._usable(source, length), {*busy})
        return len(target)

    def split_off(self, sequence: Sequence) -> None:
        """Make `sequence` empty and leave what it held as an idle sequence."""
        idle = self.new()
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
        position = self._position(sequence, length)
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
        self.changed(sequence)
        if length == 0 and sequence.resident:
            self.memory.leave(sequence)

    def _position(self, sequence: Sequence, length: int) -> int | None:
        """How many positions hold the first `length` tokens; `None` where some of these were dropped."""
        sinks = self.keeping.n_sink or 0
        if not sequence.dropped or length <= sinks:
            return length
        return length - sequence.dropped if length >= sinks + sequence.dropped else None

    @staticmethod
    def _checkpoint_just(sequence: Sequence, length: int) -> bool:
        return any(c.stop == length for c in sequence.checkpoints)

    def _set_aside(self, sequence: Sequence, length: int) -> None:
        """Park without a state. What it held stays as an idle text, if going back to a checkpoint in it is any use."""
        useful = any(c.stop <= length for c in sequence.checkpoints) and self.keeping.prefix_reuse
        if useful and (sequence.resident or sequence.is_saved):
            idle = self.new()
            self._move(sequence, idle)
            sequence.become(array("i", idle.tokens))
            idle.held = False
            self._touch(idle)
        else:
            self.memory.leave(sequence)
            sequence.saved = None
        self.trim()

    def rewind(self, sequence: Sequence, length: int) -> bool:
        """Let the memory of a resident sequence end at position `length`. False: it cannot go back that far."""
        return self.memory.rewind(sequence, length)

    def release(self, sequence: Sequence) -> None:
        """Make it idle. It is closed at once where nobody could ever match it."""
        if sequence.closed or not sequence.held:
            return
        sequence.held = False
        sequence.moves.clear()
        self._touch(sequence)
        worthless = (
            not self.keeping.prefix_reuse
            or not sequence.tokens
            or sequence.tokens[0] == EMBEDDED
            or not (sequence.resident or sequence.is_saved)
        )
        if worthless or self._is_covered(sequence):
            self.close(sequence)
        self.trim()

    def release_later(self, sequences: Iterable[Sequence]) -> None:
        """For finalizers: may run at any time on any thread, so it only leaves a note for the next call."""
        self._dropped.extend(sequences)

    def collect(self) -> None:
        """Release what finalizers left."""
        while self._dropped:
            self.release(self._dropped.popleft())

    def close(self, sequence: Sequence) -> None:
        if sequence.closed:
            return
        sequence.closed = True
        sequence.held = False
        self.memory.leave(sequence)
        sequence.saved, sequence.checkpoints, sequence.moves = None, [], []
        self.sequences.remove(sequence)
        self.changed(sequence)

    def forget(self) -> None:
        """Close all idle sequences: the next call is a cold one."""
        self.collect()
        for sequence in [s for s in self.sequences if not s.held]:
            self.close(sequence)

    # -- room -------------------------------------------------------------------------------------------------

    def take_id(self, sequence: Sequence, busy: Collection[Sequence]) -> None:
        """Give a sequence id to `sequence`: a free one, an idle sequence's, a new one of a larger context, or that of a
        held sequence outside `busy`. Raises `CacheFullError`.
        """
        if not self.memory.free and not self._evict(busy):
            limits, no_memory = self.backend.limits, None
            try:
                grown = self._grow(busy)
            except ModelLoadError as error:  # nothing changed
                grown, no_memory = False, error
            if not grown and not self._park_held(busy):
                limit = limits.n_seq_limit if no_memory is None else limits.n_seq_max
                reason = "llama.cpp allows" if no_memory is None else f"there is no memory for more ({no_memory}) than"
                raise CacheFullError(
                    f"{len(busy)} sequences are needed at once and {reason} {limit}: use fewer rows, beams or return "
                    "sequences in one call",
                    len(busy),
                    limit,
                ) from no_memory
        sequence.seq_id = self.memory.free.pop()
        self._touch(sequence)

    def make_room(self, busy: Collection[Sequence]) -> bool:
        """Free the cells of one sequence outside `busy`: an idle one, else a held one, whose state is saved."""
        return self._evict(busy) or self._park_held(busy)

    def empty_buffer(self) -> None:
        """Park everything, so that what comes next uses the cells it would use in a new context: equal bits need equal
        cells."""
        for sequence in [s for s in self.sequences if s.resident]:
            self.park(sequence)

    def make_lean(
        self, texts: Iterable[tuple[npt.NDArray[np.int32], int]], busy: Collection[Sequence] = (), alone: bool = False
    ) -> None:
        """Before a call starts: what is not in use moves to host memory. `texts`: its new ones, each with the most it may
        reuse; `busy`: what it goes on with; `alone`: no other call runs, so that held sequences are in nobody's use either.

        A decode reads all cells up to the last one in use, whoever's they are, so that idle texts slow down the others. All
        move, also what a text will go on with: it comes back at once, and its cells then lie at the front. Not worth it for
        up to `SPARE` cells that no text starts from. At most what may be kept is copied; what was used longest ago goes.

        What lies scattered over a buffer that was fuller once moves too, and comes back together.
        """
        resident = [s for s in self.sequences if s.resident]
        used = self._note_span(resident)
        if not self._keeps_states:
            return
        away = [s for s in resident if s not in busy and (alone or not s.held)]
        if sum(map(len, away)) > SPARE:
            sources = [source for source in (self.match(*text).source for text in texts) if source is not None]
            if self._burden(away, sources) > SPARE:
                self._park_all(away, sources)
                used = self._note_span([s for s in resident if s.resident])
        if alone and self.memory.span > 2 * (used + SPARE):
            self.empty_buffer()
        self.trim()

    def _note_span(self, resident: Iterable[Sequence]) -> int:
        """How many cells are in use, at most; what sequences share is counted for each."""
        used = sum(map(len, resident))
        self.memory.span = max(self.memory.span, used)
        return used

    def _park_all(self, away: list[Sequence], sources: list[Sequence]) -> None:
        room = self.states.max_bytes
        for sequence in sorted(away, key=lambda s: (s.held, s in sources, s.last_use), reverse=True):
            if not sequence.held and self.states.folder is None:
                size = self.backend.state_size(self.memory.id_of(sequence))
                if size > self.states.max_bytes:
                    continue
                room -= size
                if room < 0:
                    self.close(sequence)
                    continue
            self.park(sequence)

    @property
    def _keeps_states(self) -> bool:
        return self.states.max_bytes > 0 or self.states.folder is not None

    @staticmethod
    def _burden(idle: Iterable[Sequence], sources: list[Sequence]) -> int:
        """Cells that only idle sequences hold, other than `sources`; what they share counts once."""
        counted, cells = list(sources), 0
        for sequence in idle:
            if sequence in sources or not sequence.tokens:
                continue
            tokens = np.frombuffer(sequence.tokens, np.int32)
            shared = max((common_prefix(other.tokens, tokens, len(tokens)) for other in counted), default=0)
            cells += max(0, len(sequence) - shared)
            counted.append(sequence)
        return cells

    def restore(self, sequence: Sequence, busy: Collection[Sequence]) -> str | None:
        """Bring a saved sequence back, bit for bit, making room for it: "host" or "disk". `None`: it has to be evaluated
        again."""
        saved = sequence.saved
        if saved is None or not sequence.is_saved:
            return None
        where = saved.where(len(sequence))
        back = self._fill(sequence, saved, len(sequence), sequence.checkpoints, {*busy, sequence})
        if back:
            sequence.saved = saved.upto(len(sequence))
            self.trim()
            return where
        sequence.saved = saved if back is None else None
        if sequence.has_embeddings and sequence.is_saved:
            raise CacheFullError(
                f"{len(sequence)} tokens given by inputs_embeds do not fit into {self.backend.limits.n_cells} KV cells "
                f"beside the {len(busy) - 1} other sequences of the call: raise n_cells",
                len(sequence),
                self.backend.limits.n_cells,
            )
        sequence.saved = None
        return None

    def park(self, sequence: Sequence) -> None:
        """Out of the buffer, with its state."""
        if sequence.resident and sequence.tokens:
            sequence.saved = self.memory.save(sequence, self._base(sequence))
        self.memory.leave(sequence)

    def copy_of(self, sequence: Sequence) -> list[tuple[int, int, memoryview]]:
        """Its state in parts, each with its positions; it stays where it is."""
        if not sequence.resident:
            return []
        return [(part.start, part.stop, self.states.read(part)) for part in self.memory.save(sequence, None).chain()]

    def checkpoint(self, sequence: Sequence) -> None:
        """Note the state of a resident sequence whose memory cannot be rewound; at most `CHECKPOINTS` of a text are kept,
        the closer to its end the denser."""
        self.memory.make_checkpoint(sequence)
        checkpoints = sequence.checkpoints
        if len(checkpoints) > CHECKPOINTS:
            end = len(sequence) + 1
            around = zip(checkpoints, checkpoints[1:-1], checkpoints[2:], strict=False)
            gaps = [(after.stop - before.stop) / (end - middle.stop) for before, middle, after in around]
            del checkpoints[1 + gaps.index(min(gaps))]
        self.trim()

    def trim(self) -> None:
        """Come down to what may be kept outside the buffer."""
        self.states.trim(self.sequences, self.close)

    def reset_tokens(self, sequence: Sequence, tokens: array[int]) -> None:
        """After a failure: the sequence means `tokens` again, to be evaluated before its next decode.

        One that holds embeddings cannot be evaluated again: it is closed, so that going on with it is an error.
        """
        self.memory.leave(sequence)
        sequence.saved, sequence.checkpoints = None, [c for c in sequence.checkpoints if c.stop <= len(tokens)]
        sequence.become(tokens)
        if sequence.has_embeddings:
            self.close(sequence)

    # -- moving -----------------------------------------------------------------------------------------------

    def slide(self, sequence: Sequence, n: int, busy: Collection[Sequence]) -> None:
        """StreamingLLM: drop `n` tokens behind the first `n_sink` of a resident sequence; the rest moves up.

        A shift moves a cell for all who share it, so that it first gets cells of its own. Raises `CacheFullError`.
        """
        if sequence.shares:
            self._part_ways(sequence, busy)
        sequence.saved = None
        self.memory.slide(sequence, self.keeping.n_sink or 0, n)

    def _part_ways(self, sequence: Sequence, busy: Collection[Sequence]) -> None:
        tokens, dropped = sequence.tokens, sequence.dropped
        saved = self.memory.save(sequence, sequence.saved if self.memory.divides else None)
        self.memory.leave(sequence)
        sequence.saved = saved
        if not self._fill(sequence, saved, len(tokens) - dropped, [], {*busy, sequence}):
            raise CacheFullError(
                f"{len(sequence)} tokens need cells of their own before they can slide, and the {len(busy)} sequences of the "
                f"call fill the {self.backend.limits.n_cells} KV cells: load the model with n_cells of at least n_ctx for each "
                "row",
                len(sequence) * max(1, len(busy)),
                self.backend.limits.n_cells,
            )

    def find_moves(
        self, sequence: Sequence, tokens: npt.NDArray[np.int32], limit: int, busy: Collection[Sequence]
    ) -> int:
        """Note what of `tokens[len(sequence):limit]` other texts hold at other places, to be moved in when its turn comes;
        how many tokens that are."""
        n_min, start = self.keeping.reuse_min_chunk, len(sequence.tokens)
        if not n_min or not self.backend.limits.can_shift or not self.memory.divides or limit - start < n_min:
            return 0
        best: list[tuple[int, int, int]] = []
        source = None
        for candidate in self._alike(tokens):
            if candidate is sequence or candidate.dropped or not (candidate.resident or candidate.is_saved):
                continue
            found = moved_chunks(np.frombuffer(candidate.tokens, np.int32), tokens, start, limit, n_min)
            if sum(n for *_, n in found) > sum(n for *_, n in best):
                best, source = found, candidate
        if source is None:
            return 0
        copy = source if source.resident else self._loaded(source, {*busy, sequence, source})
        if copy is None:
            return 0
        step = self.backend.limits.n_swa or limit
        if self.memory.free:
            sequence.moves = [
                self.memory.cut_chunk(copy, at + i, at + min(i + step, n), p0 + i)
                for at, p0, n in best
                for i in range(0, n, step)
            ]
        if copy is not source:
            self.close(copy)
        return sum(len(move.tokens) for move in sequence.moves)

    def _alike(self, tokens: npt.NDArray[np.int32]) -> list[Sequence]:
        """Texts that begin like this one, most alike first, and those that were used last."""
        found: list[Sequence] = []
        for _, sequence in self._texts_like(tokens):
            found.append(sequence)
            if len(found) == LOOK_AT:
                return found
        latest = sorted((s for s in self.sequences if s not in found), key=lambda s: s.last_use, reverse=True)
        return [*found, *latest[: LOOK_AT - len(found)]]

    def _loaded(self, source: Sequence, busy: set[Sequence]) -> Sequence | None:
        """A resident copy of a saved text, to be closed soon."""
        copy = self.new()
        assert source.saved is not None
        try:
            if self._fill(copy, source.saved, len(source), [], {*busy, copy}):
                copy.become(array("i", source.tokens))
                return copy
        except CacheFullError:
            pass
        self.close(copy)
        return None

    def move_in(self, sequence: Sequence, busy: Collection[Sequence]) -> bool:
        """Put the next of its `moves` behind what `sequence` holds. False: no room; it has to be evaluated."""
        move = sequence.moves.pop(0)
        assert move.p0 == len(sequence) == len(sequence.tokens)
        if not self._spare_id(busy):
            return False
        while not self.memory.join_chunk(sequence, move):
            if not self.make_room(busy):
                return False
        sequence.append(np.frombuffer(move.tokens, np.int32))
        return True

    # -- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `AssertionError` where the books and llama.cpp's memory disagree."""
        limits = self.backend.limits
        owned = [s.seq_id for s in self.sequences if s.seq_id is not None]
        assert len(owned) == len(set(owned)), f"a sequence id has two owners: {sorted(owned)}"
        assert sorted([*owned, *self.memory.free]) == list(range(limits.n_seq_max)), (owned, self.memory.free)
        for sequence in self.sequences:
            assert not sequence.closed, f"{sequence} is closed and still in the pool"
            if sequence.seq_id is not None:
                stored = self.backend.pos_max(sequence.seq_id) + 1
                assert stored == len(sequence), f"{sequence}: llama.cpp holds {stored} positions"
                assert sequence.saved is None or sequence.saved.stop <= len(sequence), f"{sequence} has a longer copy"
            assert all(c.stop <= len(sequence) for c in sequence.checkpoints), f"{sequence}: checkpoints behind its end"
            if self.keeping.prefix_reuse and sequence not in self._changed and sequence.tokens:
                assert np.array_equal(self._tree.text(sequence), _text(sequence)), f"the tree has another text of {sequence}"
        assert len(self._tree) <= len(self.sequences) + len(self._changed), "the tree knows sequences that are gone"
        for seq_id in self.memory.free:
            assert self.backend.pos_max(seq_id) == -1, f"free sequence id {seq_id} still holds positions"
        held = [s for s in self.sequences if s.held and not s.resident]
        over = self.states.host_bytes(self.sequences) - self.states.host_bytes(held)
        assert over <= self.states.max_bytes, f"{over} bytes of idle states, {self.states.max_bytes} allowed"

    # -- inside -----------------------------------------------------------------------------------------------

    def _touch(self, sequence: Sequence) -> None:
        self._clock += 1
        sequence.last_use = self._clock

    def _usable(self, sequence: Sequence, n: int) -> int:
        """How much of a match of `n` tokens a new text can really start from."""
        if not (sequence.resident or sequence.is_saved):
            return 0
        if n == len(sequence.tokens):
            return n
        if self._position(sequence, n) is None:
            n = self.keeping.n_sink or 0
        if sequence.resident and not self.backend.limits.recurrent and self.memory.can_rewind(sequence, n):
            return n
        if self.memory.divides and not sequence.resident:
            return n
        checkpoint = self.memory.checkpoint_at(sequence, n)
        return 0 if checkpoint is None else checkpoint.stop

    def _hand_over(self, source: Sequence, target: Sequence) -> None:
        """`target` becomes what the idle `source` was."""
        self._move(source, target)
        self.close(source)

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
        self.take_id(target, busy)
        if not source.resident:  # a larger context came up empty
            self.memory.leave(target)
            return
        self.backend.seq_copy(self.memory.id_of(source), self.memory.id_of(target))
        source.shares = target.shares = True
        target.become(array("i", source.tokens), source.dropped)
        target.saved, target.checkpoints = source.saved, list(source.checkpoints)
        position = self._position(source, length)
        if length < len(source.tokens) and (position is None or not self.memory.rewind(target, position)):
            self.memory.leave(target)  # start empty, which is what the caller sees
            position, length = 0, 0
        target.become(target.tokens[:length], source.dropped if position != length else 0)
        target.saved = None if target.saved is None else target.saved.upto(position or 0)
        target.checkpoints = [c for c in target.checkpoints if c.stop <= length]

    def _fill(
        self, target: Sequence, saved: Saved, length: int, checkpoints: list[Saved], busy: set[Sequence]
    ) -> bool | None:
        """Load saved positions into a sequence without an id, making room. `None`: there is none, False: that is impossible
        for another reason; then it has no id.
        """
        busy = busy | {target}
        self.take_id(target, busy)
        done: bool | None = None
        try:
            if saved.base is None or self._spare_id(busy):
                while target.resident:  # not where a larger context came up empty
                    done = self.memory.load(target, saved, length, checkpoints)
                    if done is not None or not self.make_room(busy):
                        break
        finally:
            if not done:
                self.memory.leave(target)
        if done is False:
            self._lost(saved)
        return done

    def _lost(self, saved: Saved) -> None:
        """What this copy was of cannot be restored any more: its file is gone."""
        for sequence in self.sequences:
            if sequence.saved is not None and saved in sequence.saved.chain():
                sequence.saved = None

    def _spare_id(self, busy: Collection[Sequence]) -> bool:
        """See to it that an id is free for a moment. False: none can be had."""
        if self.memory.free:
            return True
        spare = Sequence(self)
        try:
            self.take_id(spare, {*busy, spare})
        except CacheFullError:
            return False
        self.memory.leave(spare)
        return True

    def _base(self, sequence: Sequence) -> Saved | None:
        """The copy that a new one of `sequence` goes on from: its own, or that of a text with the same beginning.

        Small parts nobody shares are left out, and so written again with the new one: few parts, and each token is copied a
        few times only.
        """
        if not self.memory.divides:
            return None
        base, length = sequence.saved, len(sequence)
        if base is None and not sequence.dropped:
            base = self._base_of_others(sequence)
        step = self.backend.limits.n_swa or length
        while base is not None and base.stop < length and len(base) <= length - base.stop and length - base.start <= step:
            part = base
            if any(s is not sequence and s.saved is not None and part in s.saved.chain() for s in self.sequences):
                break
            base = base.base
        return base

    def _base_of_others(self, sequence: Sequence) -> Saved | None:
        best: Saved | None = None
        for looked_at, (shared, other) in enumerate(self._texts_like(_text(sequence))):
            if looked_at == LOOK_AT or shared < PART:
                break
            if other is sequence or other.saved is None or other.dropped:
                continue
            cut = other.saved
            if cut.stop >= shared and not self.backend.limits.n_swa:
                cut = self._part_at(cut, shared)
            found = cut.upto(shared)
            if found is not None and found.stop >= PART and (best is None or found.stop > best.stop):
                best = found
        return best

    def _is_covered(self, sequence: Sequence) -> bool:
        """Another idle sequence in the buffer can stand in for it in every match; a held one may be gone in a moment."""
        if self.backend.limits.stateful or sequence.dropped or sequence.has_embeddings:
            return False
        n = len(sequence.tokens)
        for shared, other in self._texts_like(_text(sequence)):
            if shared < n:
                break
            whole = other.resident and not other.held and not other.dropped and other is not sequence
            if whole and self._usable(other, n) == n:
                return True
        return False

    def _evict(self, busy: Collection[Sequence]) -> bool:
        """Take the idle sequence that was used longest ago out of the buffer; keep its state if there is room for it."""
        idle = [s for s in self.sequences if s.resident and not s.held and s not in busy]
        if not idle:
            return False
        self._note_span(s for s in self.sequences if s.resident)
        victim = min(idle, key=lambda s: s.last_use)
        if self._keeps_states:
            self.park(victim)
            self.trim()
        else:
            self.close(victim)
        return True

    def _park_held(self, busy: Collection[Sequence]) -> bool:
        held = [s for s in self.sequences if s.resident and s.held and s not in busy]
        if not held:
            return False
        self._note_span(s for s in self.sequences if s.resident)
        self.park(min(held, key=lambda s: s.last_use))
        self.trim()
        return True

    def _grow(self, busy: Collection[Sequence]) -> bool:
        """Make a context with more sequence ids. False: llama.cpp allows no more."""
        limit, old = self.backend.limits.n_seq_limit, self.backend.limits.n_seq_max
        if old >= limit:
            return False
        try:
            self.backend.grow(min(limit, max(2 * old, len(busy))))
        except StateError:
            self._came_up_empty()
            return True
        self.memory.free[:0] = range(self.backend.limits.n_seq_max - 1, old - 1, -1)
        return True

    def record_layers(self, on: bool) -> None:
        """See `Backend.record_layers`; what a new context lost is evaluated again when it is needed."""
        try:
            self.backend.record_layers(on)
        except StateError:
            self._came_up_empty()

    def _came_up_empty(self) -> None:
        self.memory.renew()
        for sequence in self.sequences:
            sequence.seq_id, sequence.shares = None, False
        for sequence in [s for s in self.sequences if not s.held and not s.is_saved]:
            self.close(sequence)

    @staticmethod
    def _check_can_evaluate_again(sequence: Sequence, length: int) -> None:
        if EMBEDDED in sequence.tokens[:length]:
            raise UnsupportedFeatureError(
                "this model's memory cannot go back, and positions given by inputs_embeds cannot be evaluated again: "
                "start over with the whole input",
                "crop",
            )


def _text(sequence: Sequence) -> npt.NDArray[np.int32]:
    """Its tokens up to the first position that was given as a vector."""
    tokens = np.array(sequence.tokens, np.int32)
    embedded = np.flatnonzero(tokens == EMBEDDED)
    return tokens[: embedded[0]] if len(embedded) else tokens
