"""Room: who has to leave the buffer or host memory for whom, and how what left comes back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable

import numpy as np
import numpy.typing as npt

from .errors import CacheFullError, ModelLoadError, StateError
from .registry import Registry, text_of
from .saved import Saved
from .sequence import Sequence, shared_prefix

__all__ = ["LOOK_AT", "Room"]

SPARE = 256
"""Cells that may stay in the buffer for nobody while others decode; llama.cpp reads cells in steps of as many."""

PART = 32
"""Common beginnings of fewer tokens are not worth a part of their own."""

CHECKPOINTS = 16
"""Most checkpoints of one text."""

AHEAD = 1024
"""Tokens of the longest text that is copied ahead: nobody should wait long for a copy that may not be needed."""

LOOK_AT = 8
"""So many texts are looked through for moved chunks, or for parts that a new copy can go on from."""


class Room:
    """Takes sequences out of the buffer and brings them back. Those of the call that needs the room are its `busy` ones."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.backend, self.memory, self.states = registry.backend, registry.memory, registry.states
        self.sequences = registry.sequences
        self.pushed_out = -math.inf
        """When a sequence that somebody goes on with last had to leave for another call (`time.perf_counter`)."""

    def part_at(self, saved: Saved, position: int, tail: int | None = None) -> Saved:
        """The shortest chain that holds `position` positions; it ends there where that is worth a cut: not for a beginning of
        less than `PART`, nor for a rest of less than `tail` (by default as many)."""
        last = next(part for part in saved.chain() if part.stop >= position)
        if last.stop == position or position - last.start < PART or last.stop - position < (PART if tail is None else tail):
            return last
        return last.base if self.memory.split(last, position) and last.base is not None else last

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
        self.registry.touch(sequence)

    def make_room(self, busy: Collection[Sequence]) -> bool:
        """Free the cells of one sequence outside `busy`: an idle one, else a held one, whose state is saved."""
        return self._evict(busy) or self._park_held(busy)

    def empty_buffer(self) -> None:
        """Park everything, so that what comes next uses the cells it would use in a new context: equal bits need equal
        cells."""
        for sequence in [s for s in self.sequences if s.resident]:
            self.park(sequence)

    def make_lean(
        self,
        texts: list[npt.NDArray[np.int32]],
        sources: Callable[[], list[Sequence]],
        busy: Collection[Sequence] = (),
        alone: bool = False,
    ) -> None:
        """Before a call starts: what is not in use moves to host memory. `sources` says what its new `texts` will start from;
        `busy`: what it goes on with; `alone`: no other call runs, so that held sequences are in nobody's use either.

        A decode reads all cells up to the last one in use, whoever's they are, so that idle texts slow down the others. Not
        worth it for up to `SPARE` cells that no text can use, and a sixteenth of the longest text more; what a text starts from
        stays, unless it is longer by more than that. At most what may be kept is copied; what was used longest ago goes.

        What lies scattered over a buffer that was fuller once moves too, and comes back together: one short text in the last
        cells costs as much as a full buffer. Not while another call holds cells, but while several begin.
        """
        resident = [s for s in self.sequences if s.resident]
        used = self._note_span(resident)
        if not self.keeps_states:
            return
        away = [s for s in resident if s not in busy and (alone or not s.held)]
        spare = SPARE + max([*map(len, texts), *map(len, busy)], default=0) // 16
        if sum(map(len, away)) > spare and self._burden(away, texts) > spare:
            wanted = sources()
            self._park_all([s for s in away if s not in wanted or self._burden([s], texts) > spare], wanted)
            used = self._note_span([s for s in resident if s.resident])
        if self.memory.span > 2 * (used + SPARE):
            others = (s for s in resident if s.resident and s.held and s.tokens and s not in busy)
            if alone or not any(others):
                self.empty_buffer()
        self.trim()

    def _note_span(self, resident: Iterable[Sequence]) -> int:
        """How many cells are in use."""
        used = self.cells_of(resident)
        self.memory.span = max(self.memory.span, used)
        return used

    def cells_of(self, resident: Iterable[Sequence]) -> int:
        """Cells that these hold; what several begin with counts once."""
        return self._burden(resident, [])

    def _park_all(self, away: list[Sequence], sources: list[Sequence]) -> None:
        room = self.states.max_bytes
        for sequence in sorted(away, key=lambda s: (s.held, s in sources, s.last_use), reverse=True):
            if not sequence.held and self.states.folder is None:
                size = self._size(sequence)
                if size > self.states.max_bytes:
                    continue
                room -= size
                if room < 0:
                    self.registry.close(sequence)
                    continue
            self.park(sequence)

    def _size(self, sequence: Sequence) -> int:
        """Bytes of a copy; llama.cpp goes through all cells to tell."""
        if sequence.saved is not None and sequence.is_copied and self.memory.divides:
            return sum(len(part.data or b"") for part in sequence.saved.chain())
        return self.backend.state_size(self.memory.id_of(sequence))

    @property
    def keeps_states(self) -> bool:
        return self.states.max_bytes > 0 or self.states.folder is not None

    @staticmethod
    def _burden(idle: Iterable[Sequence], texts: list[npt.NDArray[np.int32]]) -> int:
        """Cells of idle sequences that no text of the call can use; what several hold counts once."""
        counted, cells = list(texts), 0
        for sequence in idle:
            tokens = np.array(sequence.tokens, np.int32)
            cells += max(0, len(sequence) - max((shared_prefix(other, tokens) for other in counted), default=0))
            counted.append(tokens)
        return cells

    def restore(self, sequence: Sequence, busy: Collection[Sequence]) -> str | None:
        """Bring a saved sequence back, bit for bit, making room for it: "host" or "disk". `None`: it has to be evaluated
        again."""
        saved = sequence.saved
        if saved is None or not sequence.is_saved:
            return None
        where = saved.where(len(sequence))
        back = self.fill(sequence, saved, len(sequence), sequence.checkpoints, {*busy, sequence}, share=True)
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
            self._save(sequence, leaving=True)
        self.memory.leave(sequence)

    def _save(self, sequence: Sequence, leaving: bool = False) -> None:
        base = self._base(sequence)
        sequence.saved = self.memory.save(sequence, base, self._cut(sequence, base), leaving)

    def copy_ahead(self, least: int = PART) -> bool:
        """While no call runs: copy the text of `least` tokens or more that was used last, as `park` would, at the cost of those
        that were used longest ago, and leave it in the buffer. False: there is none left that is worth it, or no room for its
        copy."""
        if self.states.max_bytes <= 0 or not self.memory.divides:
            return False
        left = [s for s in self.sequences if s.resident and not s.is_copied and least <= len(s) <= AHEAD]
        if not left:
            return False
        sequence = max(left, key=lambda s: s.last_use)
        if not self.states.make_room(self._size(sequence), sequence, self.sequences, self.registry.close):
            return False
        self._save(sequence)
        self.trim()
        return sequence.is_copied

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

    def store_all(self) -> None:
        """Before the memory is freed: what is known goes to `state_dir`, for the process that comes next."""
        if self.states.folder is None or not self.registry.keeping.prefix_reuse:
            return
        texts = [s for s in self.sequences if s.tokens and not s.dropped and not s.has_embeddings]
        for sequence in texts:
            self.park(sequence)
        self.states.store(sequence for sequence in texts if sequence.is_saved)

    def trim(self) -> None:
        """Come down to what may be kept outside the buffer."""
        self.states.trim(self.sequences, self.registry.close)

    def fill(
        self, target: Sequence, saved: Saved, length: int, checkpoints: list[Saved], busy: set[Sequence], share: bool = False
    ) -> bool | None:
        """Load saved positions into a sequence without an id, making room; into cells of its own, or with `share` into those
        that another one has of the same copy. `None`: there is none, False: that is impossible
        for another reason; then it has no id.
        """
        busy = busy | {target}
        self.take_id(target, busy)
        done: bool | None = None
        try:
            if saved.base is None or self.spare_id(busy):
                while target.resident:  # not where a larger context came up empty
                    held = self._share_saved(target, saved, length) if share else 0
                    done = self.memory.load(target, saved, length, checkpoints, held)
                    if done is not None or not self.make_room(busy):
                        break
        finally:
            if not done:
                self.memory.leave(target)
        if done is False:
            self._lost(saved)
        return done

    def _share_saved(self, target: Sequence, saved: Saved, length: int) -> int:
        """Let the empty `target` share what another resident sequence holds of the same copy; how many positions. Rows that
        shared their beginning need not fit into the buffer any other way."""
        if not self.memory.divides:
            return 0
        best, shared = None, 0
        mine = {id(part) for part in saved.chain() if part.stop <= length}
        for other in self.sequences:
            if other is not target and other.resident and other.saved is not None:
                common = max((part.stop for part in other.saved.chain() if id(part) in mine), default=0)
                if common > shared:
                    best, shared = other, common
        if best is not None:
            self.memory.copy_beginning(best, target, shared)
        return shared

    def _lost(self, saved: Saved) -> None:
        """What this copy was of cannot be restored any more: its file is gone."""
        for sequence in [s for s in self.sequences if s.saved is not None and saved in s.saved.chain()]:
            sequence.saved = None
            if not sequence.held and not sequence.resident:
                self.registry.close(sequence)

    def spare_id(self, busy: Collection[Sequence], grow: bool = True) -> bool:
        """See to it that an id is free for a moment. False: none can be had. `grow=False`: not in a larger context, which may
        come up empty."""
        if self.memory.free:
            return True
        if not grow:
            return self.make_room(busy)
        spare = Sequence(self.registry.pool)
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
        if (base is None or sequence.shares) and not sequence.dropped:
            other = self._base_of_others(sequence)
            if other is not None and (base is None or other.stop > base.stop):
                base = other
        step = self.backend.limits.n_swa or length
        while base is not None and base.stop < length and len(base) <= length - base.stop and length - base.start <= step:
            part = base
            if any(s is not sequence and s.saved is not None and part in s.saved.chain() for s in self.sequences):
                break
            base = base.base
        return base

    def _cut(self, sequence: Sequence, base: Saved | None) -> int:
        """Where a new copy is worth a cut: what another text begins with too ends there, so that it can share the part."""
        if self.memory.divides and not sequence.dropped:
            for shared, other in self.registry.like(text_of(sequence)):
                if other is not sequence:
                    # rows that share cells come back sharing them, or may not fit any more
                    least = 1 if sequence.shares else PART
                    worth = shared < len(sequence) and shared - (0 if base is None else base.stop) >= least
                    return shared if worth else 0
        return 0

    def _base_of_others(self, sequence: Sequence) -> Saved | None:
        best: Saved | None = None
        looked_at = 0
        for shared, other in self.registry.like(text_of(sequence)):
            if looked_at == LOOK_AT or shared < PART or (best is not None and best.stop >= shared):
                break
            if other is sequence or other.saved is None or other.dropped:
                continue
            looked_at += 1
            cut = other.saved
            if cut.stop >= shared and not self.backend.limits.n_swa:
                cut = self.part_at(cut, shared, 1)
            found = cut.upto(shared)
            if found is not None and found.stop >= PART and (best is None or found.stop > best.stop):
                best = found
        return best

    def _evict(self, busy: Collection[Sequence]) -> bool:
        """Take the idle sequence that was used longest ago out of the buffer; keep its state if there is room for it."""
        idle = [s for s in self.sequences if s.resident and not s.held and s not in busy]
        if not idle:
            return False
        self._note_span(s for s in self.sequences if s.resident)
        victim = min(idle, key=lambda s: s.last_use)
        if self.keeps_states:
            self.park(victim)
            self.trim()
        else:
            self.registry.close(victim)
        return True

    def _park_held(self, busy: Collection[Sequence]) -> bool:
        held = [s for s in self.sequences if s.resident and s.held and s not in busy]
        if not held:
            return False
        self._note_span(s for s in self.sequences if s.resident)
        self.park(min(held, key=lambda s: s.last_use))
        self.trim()
        self.pushed_out = time.perf_counter()
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
            self.registry.close(sequence)
