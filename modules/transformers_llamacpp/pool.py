"""The policy: which sequence in memory a new text starts from, and which one has to go.

All methods run under the engine's lock.
"""

from __future__ import annotations

import collections
from array import array
from collections.abc import Collection, Iterable
from collections.abc import Sequence as List

import numpy as np
import numpy.typing as npt

from .backend import Backend
from .errors import CacheFullError, ModelLoadError, StateError, UnsupportedFeatureError
from .sequence import EMBEDDED, Sequence, common_prefix

__all__ = ["SequencePool"]

SPARE = 256
"""Idle tokens that may stay in the buffer while others decode; llama.cpp reads cells in steps of as many."""


class SequencePool:
    """All sequences of one backend.

    `prefix_reuse=False` matches nothing and keeps nothing idle. `host_cache_bytes` bounds the saved states of idle
    sequences; those of held ones are always kept, because losing them would lose a caller's work.
    """

    def __init__(self, backend: Backend, prefix_reuse: bool = True, host_cache_bytes: int = 1 << 30) -> None:
        self.backend = backend
        self.prefix_reuse = prefix_reuse
        self.host_cache_bytes = host_cache_bytes
        self.sequences: list[Sequence] = []
        self._free = list(range(backend.limits.n_seq_max - 1, -1, -1))
        self._clock = 0
        self._dropped: collections.deque[Sequence] = collections.deque()

    # -- what callers do ------------------------------------------------------------------------------------

    def new(self) -> Sequence:
        """An empty held sequence; it takes a sequence id when its first tokens come."""
        sequence = Sequence(self)
        self.sequences.append(sequence)
        return sequence

    def match(self, tokens: npt.NDArray[np.int32], limit: int) -> tuple[Sequence | None, int]:
        """The resident or saved sequence that shares the longest prefix with `tokens`, and its length (at most `limit`).

        Among equals an idle one that is used up whole comes first, because taking it over copies nothing.
        """
        best: Sequence | None = None
        length = 0
        if not self.prefix_reuse:
            return None, 0
        for sequence in self.sequences:
            if not sequence.resident and (sequence.state is None or sequence.held):
                continue
            n = common_prefix(sequence.tokens, tokens, limit)
            n = self._usable(sequence, n)
            if n > length or (n == length and n > 0 and not sequence.held and n == len(sequence)):
                best, length = sequence, n
        return best, length

    def acquire(
        self, sequence: Sequence, tokens: npt.NDArray[np.int32], limit: int, busy: Collection[Sequence] = ()
    ) -> int:
        """Let the empty `sequence` start with the longest prefix of `tokens` in memory; its length, at most `limit`.

        An idle sequence that is a prefix as a whole is taken over. Everything else is forked, because somebody may still
        go on with what comes after the shared part.
        """
        source, n = self.match(tokens, limit)
        if source is None or n == 0:
            return 0
        self._touch(source)
        try:
            if not source.resident and not source.held and n < len(source):
                return self._start_from_saved(source, sequence, n, {*busy, sequence, source})
            if not source.resident and not self._revive(source, {*busy, sequence, source}):
                return 0
            if not source.held and n == len(source):
                sequence.seq_id, sequence.tokens = source.seq_id, source.tokens
                source.seq_id, source.tokens = None, array("i")
                self.close(source)
            else:
                self._share(source, sequence, n, {*busy, sequence, source})
        except CacheFullError:
            return 0  # no sequence id for a copy beside its source: evaluating needs one less
        return len(sequence)

    def fork(self, source: Sequence, busy: Collection[Sequence] = ()) -> Sequence:
        """A held copy that shares all cells. A parked one is copied with its state, for free."""
        copy = self.new()
        if source.resident:
            try:
                self._share(source, copy, len(source), {*busy, source, copy})
            except BaseException:
                self.close(copy)
                raise
        if not copy.resident:
            copy.tokens, copy.state = array("i", source.tokens), source.state
        return copy

    def copy_prefix(self, source: Sequence, target: Sequence, length: int, busy: Collection[Sequence]) -> int:
        """Let the empty `target` share the first `length` tokens of the resident `source`; how many it could take."""
        self._share(source, target, self._usable(source, length), busy)
        return len(target)

    def split_off(self, sequence: Sequence) -> None:
        """Make `sequence` empty and leave what it held as an idle sequence."""
        idle = self.new()
        idle.seq_id, idle.tokens = sequence.seq_id, sequence.tokens
        sequence.seq_id, sequence.tokens = None, array("i")
        self.release(idle)

    def truncate(self, sequence: Sequence, length: int) -> None:
        """Forget the tokens from `length` on.

        Where the memory cannot go back (recurrent state, cells a sliding window has dropped), the sequence is parked with
        the tokens it keeps, and these are evaluated again before its next decode: slower, never wrong.
        """
        if not 0 <= length <= len(sequence):
            raise IndexError(f"cannot truncate {len(sequence)} tokens to {length}")
        if length == len(sequence):
            return
        if sequence.resident:
            if not self.rewind(sequence, length):
                self._check_can_evaluate_again(sequence, length)
                self._leave(sequence)
        elif length == 0:
            sequence.state = None
        elif self.backend.limits.recurrent or self.backend.limits.n_swa:
            self._check_can_evaluate_again(sequence, length)
            sequence.state = None  # it stands behind the last token, and cannot go back
        # else the saved state keeps its tail, which is cut when the sequence comes back
        del sequence.tokens[length:]
        if length == 0 and sequence.resident:
            self._leave(sequence)

    def rewind(self, sequence: Sequence, length: int) -> bool:
        """Let the memory of a resident sequence end at `length`. False: it cannot go back that far."""
        return self._can_rewind(sequence, length) and self.backend.seq_remove(self._id(sequence), length, -1)

    def release(self, sequence: Sequence) -> None:
        """Make it idle. It is closed at once where nobody could ever match it."""
        if sequence.closed or not sequence.held:
            return
        sequence.held = False
        self._touch(sequence)
        worthless = (
            not self.prefix_reuse
            or not sequence.tokens
            or sequence.tokens[0] == EMBEDDED
            or (not sequence.resident and sequence.state is None)
        )
        if worthless or self._is_covered(sequence):
            self.close(sequence)
        self._trim_host()

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
        self._leave(sequence)
        sequence.state = None
        self.sequences.remove(sequence)

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
        if not self._free and not self._evict(busy):
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
        sequence.seq_id = self._free.pop()
        self._touch(sequence)

    def make_room(self, busy: Collection[Sequence]) -> bool:
        """Free the cells of one sequence outside `busy`: an idle one, else a held one, whose state is saved."""
        return self._evict(busy) or self._park_held(busy)

    def empty_buffer(self) -> None:
        """Park everything, so that what comes next uses the cells it would use in a new context: equal bits need equal
        cells."""
        for sequence in [s for s in self.sequences if s.resident]:
            self.park(sequence)

    def make_lean(self, texts: Iterable[tuple[npt.NDArray[np.int32], int]]) -> None:
        """Before new texts start (each with the most it may reuse): what idles in the buffer moves to host memory.

        A decode reads all cells up to the last one in use, whoever's they are, so that idle texts slow down the others. All
        move, also what a text will go on with: it comes back at once, and its cells then lie at the front. Not worth it for
        up to `SPARE` cells that no text starts from. At most `host_cache_bytes` are copied; what was used longest ago goes.
        """
        if not self.host_cache_bytes or self.backend.limits.n_swa:
            return
        idle = [s for s in self.sequences if s.resident and not s.held]
        if sum(map(len, idle)) <= SPARE:
            return
        sources = [source for source in (self.match(*text)[0] for text in texts) if source is not None]
        if self._burden(idle, sources) <= SPARE:
            return
        room = self.host_cache_bytes
        for sequence in sorted(idle, key=lambda s: (s in sources, s.last_use), reverse=True):
            size = self.backend.state_size(self._id(sequence))
            if size > self.host_cache_bytes:
                continue
            room -= size
            if room < 0:
                self.close(sequence)
            else:
                self.park(sequence)
        self._trim_host()

    @staticmethod
    def _burden(idle: Iterable[Sequence], sources: List[Sequence]) -> int:
        """Cells that only idle sequences hold, other than `sources`; what they share counts once."""
        counted, cells = list(sources), 0
        for sequence in idle:
            if sequence in sources or not sequence.tokens:
                continue
            tokens = np.frombuffer(sequence.tokens, np.int32)
            cells += len(tokens) - max((common_prefix(other.tokens, tokens, len(tokens)) for other in counted), default=0)
            counted.append(sequence)
        return cells

    def restore(self, sequence: Sequence, busy: Collection[Sequence]) -> bool:
        """Bring a saved sequence back, bit for bit, making room for it. False: it has to be evaluated again."""
        if sequence.state is None:
            return False
        if self._revive(sequence, busy):
            return True
        if sequence.has_embeddings:
            raise CacheFullError(
                f"{len(sequence)} tokens given by inputs_embeds do not fit into {self.backend.limits.n_cells} KV cells "
                f"beside the {len(busy) - 1} other sequences of the call: raise n_cells",
                len(sequence),
                self.backend.limits.n_cells,
            )
        sequence.state = None
        return False

    def park(self, sequence: Sequence) -> None:
        """Out of the buffer, with its state."""
        if sequence.resident and sequence.tokens:
            sequence.state = self.backend.state_save(self._id(sequence))
        self._leave(sequence)

    def reset_tokens(self, sequence: Sequence, tokens: array[int]) -> None:
        """After a failure: the sequence means `tokens` again, to be evaluated before its next decode.

        One that holds embeddings cannot be evaluated again: it is closed, so that going on with it is an error.
        """
        self._leave(sequence)
        sequence.state = None
        sequence.tokens = tokens
        if sequence.has_embeddings:
            self.close(sequence)

    # -- checks -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `AssertionError` where the books and llama.cpp's memory disagree."""
        limits = self.backend.limits
        owned = [s.seq_id for s in self.sequences if s.seq_id is not None]
        assert len(owned) == len(set(owned)), f"a sequence id has two owners: {sorted(owned)}"
        assert sorted([*owned, *self._free]) == list(range(limits.n_seq_max)), (owned, self._free)
        for sequence in self.sequences:
            assert not sequence.closed, f"{sequence} is closed and still in the pool"
            if sequence.seq_id is not None:
                stored = self.backend.pos_max(sequence.seq_id) + 1
                assert stored == len(sequence), f"{sequence}: llama.cpp holds {stored} positions"
                assert sequence.state is None, f"{sequence} is resident and saved"
        for seq_id in self._free:
            assert self.backend.pos_max(seq_id) == -1, f"free sequence id {seq_id} still holds positions"
        saved = sum(len(s.state) for s in self.sequences if s.state is not None and not s.held)
        assert saved <= self.host_cache_bytes, f"{saved} bytes of idle states, {self.host_cache_bytes} allowed"

    # -- inside -----------------------------------------------------------------------------------------------

    @staticmethod
    def _id(sequence: Sequence) -> int:
        assert sequence.seq_id is not None
        return sequence.seq_id

    def _touch(self, sequence: Sequence) -> None:
        self._clock += 1
        sequence.last_use = self._clock

    def _can_rewind(self, sequence: Sequence, length: int) -> bool:
        """Sliding windows drop old cells silently: what the next token attends to must still be there."""
        window = self.backend.limits.n_swa
        if window == 0 or length == 0:
            return True
        return 0 <= self.backend.pos_min(self._id(sequence)) <= max(0, length - window)

    def _usable(self, sequence: Sequence, n: int) -> int:
        """How much of a match of length `n` a fork can really start from."""
        if n == len(sequence):
            return n
        limits = self.backend.limits
        if limits.recurrent or (not sequence.resident and limits.n_swa):
            return 0
        return n if not sequence.resident or self._can_rewind(sequence, n) else 0

    def _share(self, source: Sequence, target: Sequence, length: int, busy: Collection[Sequence]) -> None:
        if length == 0:
            return
        self.take_id(target, busy)
        if not source.resident:  # a larger context came up empty
            self._leave(target)
            return
        self.backend.seq_copy(self._id(source), self._id(target))
        target.tokens = array("i", source.tokens)
        self.truncate(target, length)
        if not target.resident:  # the memory refused: start empty, which is what the caller sees
            target.tokens = array("i")

    def _revive(self, sequence: Sequence, busy: Collection[Sequence]) -> bool:
        state = sequence.state
        if state is None:
            return False
        self.take_id(sequence, busy)
        try:
            while not self.backend.state_load(self._id(sequence), state):
                if not self.make_room(busy):
                    self._leave(sequence)
                    return False
        except BaseException:
            self._leave(sequence)
            raise
        sequence.state = None
        if not self.backend.seq_remove(self._id(sequence), len(sequence), -1):  # it was truncated while it was away
            self._leave(sequence)
            return False
        return True

    def _start_from_saved(self, source: Sequence, target: Sequence, n: int, busy: Collection[Sequence]) -> int:
        """Let the empty `target` begin with the first `n` tokens of an idle text in host memory, which stays there."""
        state = source.state
        assert state is not None
        self.take_id(target, busy)
        try:
            while not self.backend.state_load(self._id(target), state):
                if not self.make_room(busy):
                    self._leave(target)
                    return 0
        except BaseException:
            self._leave(target)
            raise
        if not self.backend.seq_remove(self._id(target), n, -1):
            self._leave(target)
            return 0
        target.tokens = source.tokens[:n]
        return n

    def _leave(self, sequence: Sequence) -> None:
        """Give the sequence id back, with all its cells."""
        if sequence.seq_id is None:
            return
        if not self.backend.seq_remove(sequence.seq_id, -1, -1):
            raise StateError(f"llama.cpp refused to drop the whole sequence {sequence.seq_id}")
        self._free.append(sequence.seq_id)
        sequence.seq_id = None
        if not any(s.resident for s in self.sequences):
            # an empty buffer starts at its first cell again, so that equal calls use equal cells
            self.backend.clear()
            self._free.sort(reverse=True)

    def _is_covered(self, sequence: Sequence) -> bool:
        """Another idle sequence in the buffer can stand in for it in every match; a held one may be gone in a moment."""
        if self.backend.limits.recurrent or self.backend.limits.n_swa:
            return False
        tokens = np.frombuffer(sequence.tokens, np.int32) if sequence.tokens else np.empty(0, np.int32)
        n = len(tokens)
        return any(
            other is not sequence
            and other.resident
            and not other.held
            and len(other) >= n
            and common_prefix(other.tokens, tokens, n) == n
            for other in self.sequences
        )

    def _evict(self, busy: Collection[Sequence]) -> bool:
        """Take the idle sequence that was used longest ago out of the buffer; keep its state if there is room for it."""
        idle = [s for s in self.sequences if s.resident and not s.held and s not in busy]
        if not idle:
            return False
        victim = min(idle, key=lambda s: s.last_use)
        if self.host_cache_bytes:
            self.park(victim)
            self._trim_host()
        else:
            self.close(victim)
        return True

    def _trim_host(self) -> None:
        saved = sorted((s for s in self.sequences if s.state and not s.held), key=lambda s: s.last_use)
        total = sum(len(s.state or b"") for s in saved)
        # one that is larger than everything allowed goes first: it would only take the others with it
        saved.sort(key=lambda s: len(s.state or b"") <= self.host_cache_bytes)
        for sequence in saved:
            if total <= self.host_cache_bytes:
                break
            total -= len(sequence.state or b"")
            self.close(sequence)

    def _park_held(self, busy: Collection[Sequence]) -> bool:
        held = [s for s in self.sequences if s.resident and s.held and s not in busy]
        if not held:
            return False
        self.park(min(held, key=lambda s: s.last_use))
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
        self._free = [*range(self.backend.limits.n_seq_max - 1, old - 1, -1), *self._free]
        return True

    def record_layers(self, on: bool) -> None:
        """See `Backend.record_layers`; what a new context lost is evaluated again when it is needed."""
        try:
            self.backend.record_layers(on)
        except StateError:
            self._came_up_empty()

    def _came_up_empty(self) -> None:
        self._free = list(range(self.backend.limits.n_seq_max - 1, -1, -1))
        for sequence in self.sequences:
            sequence.seq_id = None
        for sequence in [s for s in self.sequences if not s.held and s.state is None]:
            self.close(sequence)

    @staticmethod
    def _check_can_evaluate_again(sequence: Sequence, length: int) -> None:
        if EMBEDDED in sequence.tokens[:length]:
            raise UnsupportedFeatureError(
                "this model's memory cannot go back, and positions given by inputs_embeds cannot be evaluated again: "
                "start over with the whole input",
                "crop",
            )
