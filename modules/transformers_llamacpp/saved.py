"""What left the KV buffer: copies of it in host memory or on disk, in parts that texts share.

Saving a text saves what is new since it was last saved, and a prompt that many texts begin with once: a copy is a chain of
parts, each for a range of positions, and chains of texts with a common beginning have common parts. Where the memory cannot
be cut into ranges (recurrent states, windows that dropped cells) a copy is one part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import StateError
from .sequence import Sequence

if TYPE_CHECKING:
    from .state_folder import StateFolder

__all__ = ["Saved", "SavedStates"]

RETRY = 60.0
"""Seconds in which nothing is written to a folder that refused."""

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Saved:
    """llama.cpp's memory of the positions `[start, stop)`, and of those before it in `base`.

    `partial`: a checkpoint, that is only what cannot be rewound, as it was after `stop` positions. The bytes are in host
    memory (`data`) or on disk (`file`), for a moment in both.
    """

    start: int
    stop: int
    base: Saved | None = None
    data: memoryview | None = None
    file: Path | None = None
    partial: bool = False

    def __len__(self) -> int:
        return self.stop - self.start

    def chain(self) -> list[Saved]:
        """All parts, those of the first positions first."""
        parts: list[Saved] = []
        part: Saved | None = self
        while part is not None:
            parts.append(part)
            part = part.base
        return parts[::-1]

    def upto(self, length: int) -> Saved | None:
        """The longest chain of these parts that holds at most `length` positions."""
        part: Saved | None = self
        while part is not None and part.stop > length:
            part = part.base
        return part

    def where(self, length: int) -> str:
        """Where the first `length` positions come from: "disk" if any of them does, else "host"."""
        return "disk" if any(part.data is None for part in self.chain() if part.start < length) else "host"


def parts_of(sequence: Sequence) -> list[Saved]:
    """Everything saved of a sequence, checkpoints included."""
    chain = sequence.saved.chain() if sequence.saved is not None else []
    return [*chain, *sequence.checkpoints]


Close = Callable[[Sequence], None]


class SavedStates:
    """Keeps what is saved within `max_bytes` of host memory: what was used longest ago goes to `folder`, or away.

    The state of a held sequence that is not in the buffer is never given up, whatever it takes.
    """

    def __init__(self, max_bytes: int, folder: StateFolder | None = None) -> None:
        self.max_bytes = max_bytes
        self.folder = folder
        self._retry_at = 0.0

    def read(self, part: Saved) -> memoryview:
        """The bytes of a part. Raises `StateError` where its file is gone or damaged."""
        if part.data is not None:
            return part.data
        if self.folder is None or part.file is None:
            raise StateError(f"the positions {part.start} to {part.stop} are saved nowhere")
        return self.folder.read(part)

    @staticmethod
    def host_bytes(sequences: Iterable[Sequence]) -> int:
        """Bytes in host memory; what several texts share counts once."""
        parts = {id(part): part for sequence in sequences for part in parts_of(sequence)}
        return sum(len(part.data) for part in parts.values() if part.data is not None)

    def trim(self, sequences: list[Sequence], close: Close) -> None:
        """Come down to `max_bytes`. `close` is called for idle sequences that lost what they need."""
        self._come_down(self.max_bytes, sequences, close)

    def make_room(self, size: int, sequence: Sequence, sequences: list[Sequence], close: Close) -> bool:
        """Whether `size` more bytes fit, after texts that nobody holds, that are not in the buffer and that were used longer
        ago than `sequence` have left."""

        def older(users: list[Sequence]) -> bool:
            return not any(one.resident or one.held or one.last_use >= sequence.last_use for one in users)

        if size > self.max_bytes:
            return False
        self._come_down(self.max_bytes - size, sequences, close, older)
        return self.host_bytes(sequences) + size <= self.max_bytes

    def _come_down(
        self, most: int, sequences: list[Sequence], close: Close, may_go: Callable[[list[Sequence]], bool] | None = None
    ) -> None:
        """To `most` bytes, as far as those whose users `may_go` say so."""
        total = self.host_bytes(sequences)
        if total <= most:
            return
        users: dict[int, list[Sequence]] = {}
        parts: dict[int, Saved] = {}
        for sequence in sequences:
            for part in parts_of(sequence):
                users.setdefault(id(part), []).append(sequence)
                parts[id(part)] = part

        def order(part: Saved) -> tuple[bool, bool, int, int]:
            """First what a lone text cannot keep anyway, then what the buffer holds too, then what was used longest ago,
            from its end."""
            mine = users[id(part)]
            fits = len(part.data or b"") <= self.max_bytes
            needed = part.partial or any(not s.resident for s in mine)
            return fits, needed, max(s.last_use for s in mine), -part.stop

        for part in sorted(parts.values(), key=order):
            if total <= most:
                return
            if part.data is None or (may_go is not None and not may_go(users[id(part)])):
                continue
            size, mine = len(part.data), [s for s in users[id(part)] if not s.closed]
            if part.partial and not self._spill(part, mine):
                for sequence in mine:
                    sequence.checkpoints = [c for c in sequence.checkpoints if c is not part]
            elif not part.partial and any(not sequence.resident for sequence in mine) and not self._spill(part, mine):
                if any(sequence.held and not sequence.resident for sequence in mine):
                    continue
                for sequence in mine:
                    if not sequence.resident:
                        close(sequence)
            total -= size
            self._give_up(part, mine)

    def store(self, sequences: Iterable[Sequence]) -> None:
        """Write all that is saved of these to the folder, what was used last at the end."""
        for sequence in sorted(sequences, key=lambda one: one.last_use):
            for part in parts_of(sequence):
                self._spill(part, [sequence])

    @staticmethod
    def _give_up(part: Saved, users: list[Sequence]) -> None:
        """Its bytes leave host memory: what is on disk can be read again, from what the buffer holds a new copy is made."""
        if part.file is not None:
            part.data = None
            return
        for sequence in users:
            while sequence.saved is not None and part in sequence.saved.chain():
                sequence.saved = sequence.saved.base

    def _spill(self, part: Saved, users: list[Sequence]) -> bool:
        """Write a part to the folder. False: there is none, or it has no place. Files may vanish, so that what could not be
        evaluated again is not trusted to them."""
        if part.file is not None:
            return True
        if self.folder is None or time.monotonic() < self._retry_at:
            return False
        if not users or any(sequence.has_embeddings for sequence in users):
            return False
        sequence = max(users, key=len)  # a parked one that was truncated has forgotten some of the text
        if len(part.data or b"") > self.folder.max_bytes:
            return False
        try:
            part.file = self.folder.write(part, sequence.tokens, sequence.dropped)
        except StateError as error:
            logger.warning("%s; nothing is written to state_dir for %d seconds", error, RETRY)
            self._retry_at = time.monotonic() + RETRY
            return False
        return True
