"""Tokens at other positions: a full context that slides, and chunks of other texts that are moved in.

Only memories whose positions can be shifted do this; a shifted key is what it would have been at the new position up to
rounding. What the tokens behind it knew of the text before them stays as it was.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from .chunks import moved_chunks
from .errors import CacheFullError
from .registry import Registry
from .room import LOOK_AT, Room
from .sequence import Sequence

__all__ = ["Moving"]


class Moving:
    """Sliding, and moving in."""

    def __init__(self, registry: Registry, room: Room) -> None:
        self.registry, self.room = registry, room
        self.backend, self.memory, self.keeping = registry.backend, registry.memory, registry.keeping

    def slide(self, sequence: Sequence, busy: Collection[Sequence]) -> None:
        """StreamingLLM (Xiao et al. 2023): drop `n_slide` tokens behind the first `n_sink` of a resident sequence; the rest
        moves up.

        A shift moves a cell for all who share it, so that it first gets cells of its own. Raises `CacheFullError`. What it
        was before stays as an idle text: whoever takes back a few tokens, or asks again, goes on from there.
        """
        if sequence.shares:
            self._part_ways(sequence, busy)
        if self.keeping.prefix_reuse and self.room.keeps_states:
            self._leave_copy(sequence)
        sequence.saved = None
        self.memory.slide(sequence, self.keeping.n_sink or 0, self.keeping.n_slide)

    def _leave_copy(self, sequence: Sequence) -> None:
        if sequence.before is not None:
            self.registry.close(sequence.before)
        sequence.before = copy = self.registry.new()
        copy.saved = self.memory.save(sequence, None)
        copy.become(array("i", sequence.tokens), sequence.dropped)
        copy.held = False
        self.registry.touch(copy)
        self.room.trim()

    def _part_ways(self, sequence: Sequence, busy: Collection[Sequence]) -> None:
        tokens, dropped = sequence.tokens, sequence.dropped
        saved = self.memory.save(sequence, sequence.saved if self.memory.divides else None)
        self.memory.leave(sequence)
        sequence.saved = saved
        if not self.room.fill(sequence, saved, len(tokens) - dropped, [], {*busy, sequence}):
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
        n_min, start, limit = self.keeping.reuse_min_chunk, len(sequence.tokens), min(limit, self.keeping.n_ctx)
        possible = self.backend.limits.can_shift and self.memory.divides and not sequence.dropped
        if not n_min or not possible or limit - start < n_min:
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
        if self.memory.free and self.backend.pos_min(self.memory.id_of(copy)) == 0:  # else a window's layers hold less of it
            sequence.moves = [
                self.memory.cut_chunk(copy, at + i, at + min(i + step, n), p0 + i)
                for at, p0, n in best
                for i in range(0, n, step)
            ]
        if copy is not source:
            self.registry.close(copy)
        return sum(len(move.tokens) for move in sequence.moves)

    def _alike(self, tokens: npt.NDArray[np.int32]) -> list[Sequence]:
        """Texts that begin like this one, most alike first, and those that were used last."""
        found: list[Sequence] = []
        for _, sequence in self.registry.like(tokens):
            found.append(sequence)
            if len(found) == LOOK_AT:
                return found
        latest = sorted((s for s in self.registry.sequences if s not in found), key=lambda s: s.last_use, reverse=True)
        return [*found, *latest[: LOOK_AT - len(found)]]

    def _loaded(self, source: Sequence, busy: set[Sequence]) -> Sequence | None:
        """A resident copy of a saved text, to be closed soon."""
        copy = self.registry.new()
        assert source.saved is not None
        try:
            if self.room.fill(copy, source.saved, len(source), [], {*busy, copy}):
                copy.become(array("i", source.tokens))
                return copy
        except CacheFullError:
            pass
        self.registry.close(copy)
        return None

    def move_in(self, sequence: Sequence, busy: Collection[Sequence]) -> bool:
        """Put the next of its `moves` behind what `sequence` holds. False: no room; it has to be evaluated."""
        move = sequence.moves.pop(0)
        assert move.p0 == len(sequence) == len(sequence.tokens)
        if not self.room.spare_id(busy, grow=False):
            return False
        while not self.memory.join_chunk(sequence, move):
            if not self.room.make_room(busy):
                return False
        sequence.append(np.frombuffer(move.tokens, np.int32))
        return True
