"""`FakeBackend`: llama.cpp's memory without llama.cpp, for tests of this package and of yours.

Its logits are a function of the tokens really stored for a sequence, position by position, so that a wrong, missing or
doubled cell changes them. It counts cells, refuses what a recurrent memory refuses, drops what a sliding window drops,
and fails when told to.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from .backend import DecodeStatus, Limits
from .batch import Batch, tokens_batch
from .errors import DecodeError, ModelLoadError, StateError

__all__ = ["FakeBackend", "fake_logits", "fake_token"]


@dataclass(slots=True)
class _Cell:
    token: int
    position: int
    owners: set[int] = field(default_factory=set)


def fake_logits(tokens: List[int], n_vocab: int) -> npt.NDArray[np.float32]:
    """What the fake answers after `tokens`: `(n_vocab,)`, equal for equal texts and for nothing else."""
    digest = hashlib.blake2b(np.asarray(tokens, np.int64).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(n_vocab, np.float32)


def fake_token(embeds: npt.NDArray[np.float32] | None, index: int) -> int:
    """The number under which the fake stores the vector `embeds[index]`; it is no token id."""
    assert embeds is not None
    return int.from_bytes(hashlib.blake2b(embeds[index].tobytes(), digest_size=4).digest(), "little") + (1 << 32)


class FakeBackend:
    """A `Backend` in plain Python.

    `window` > 0: a decode silently drops cells that no later token attends to, unless `swa_full`, and a saved state holds
    only the last `window` positions. `recurrent`: the memory is one state per sequence; only whole sequences can be
    removed. A shift moves shared cells for all who share them.
    """

    def __init__(
        self,
        n_vocab: int = 32,
        n_cells: int = 64,
        n_batch: int = 8,
        n_seq_max: int = 4,
        n_seq_limit: int = 16,
        n_outputs: int = 8,
        window: int = 0,
        recurrent: bool = False,
        swa_full: bool = False,
        can_shift: bool = True,
    ) -> None:
        self._limits = Limits(
            n_vocab=n_vocab, n_embd=4, n_embd_inp=4, n_layer=2, n_ctx_train=n_cells, n_cells=n_cells, n_batch=n_batch,
            n_ubatch=n_batch, n_seq_max=n_seq_max, n_seq_limit=n_seq_limit, n_outputs=n_outputs, n_swa=window,
            recurrent=recurrent, swa_full=swa_full, can_shift=can_shift and not recurrent and (swa_full or not window),
        )  # fmt: skip
        self.cells: list[_Cell] = []
        self.decodes = 0
        self.decoded_tokens = 0
        self.closed = False
        self._rows = np.empty((n_outputs, n_vocab), np.float32)
        self._n_rows = 0
        self.records_layers = False
        self.remade = 0
        self._layers: tuple[int, ...] = ()
        self._failure: tuple[int, int] | None = None
        self._grow_failure: bool | None = None

    @property
    def limits(self) -> Limits:
        return self._limits

    def fail_next(self, status: int, stored: int = 0) -> None:
        """The next decode stores `stored` tokens, and then returns `status` (1, 2) or raises (below 0)."""
        self._failure = (status, stored)

    def fail_grow(self, lost: bool) -> None:
        """The next `grow` finds no memory and changes nothing, or makes a context that comes up empty (`lost`)."""
        self._grow_failure = lost

    def text(self, seq_id: int) -> list[int]:
        """The tokens stored for a sequence, by position."""
        return [cell.token for cell in self._of(seq_id)]

    def decode(self, batch: Batch) -> DecodeStatus:
        assert not self.closed
        assert 0 < batch.n_tokens <= self._limits.n_batch and batch.n_outputs <= self._limits.n_outputs
        assert batch.n_outputs == int(np.count_nonzero(batch.outputs))
        self._rows.fill(np.nan)  # whoever kept a view of the last answer now sees it
        self._n_rows = 0
        self._layers = batch.layers
        if batch.layers:
            assert self.records_layers and list(batch.layers) == sorted(set(batch.layers))
            assert len(set(batch.seq_ids.tolist())) in (1, batch.n_tokens), "llama.cpp may reorder these tokens"
        self._check(batch)
        if len(self.cells) + batch.n_tokens > self._limits.n_cells:
            return DecodeStatus.NO_SLOT
        status, stored = self._failure or (0, batch.n_tokens)
        self._failure = None
        for index in range(min(stored, batch.n_tokens)):
            seq_id = int(batch.seq_ids[index])
            token = int(batch.tokens[index]) if batch.tokens is not None else fake_token(batch.embeds, index)
            self.cells.append(_Cell(token, int(batch.positions[index]), {seq_id}))
            if batch.outputs[index]:
                self._rows[self._n_rows] = fake_logits(self._seen(seq_id), self._limits.n_vocab)
                self._n_rows += 1
        self._slide()
        if status < 0:
            raise DecodeError(f"told to fail with {status}", status)
        if status == 0:
            self.decodes += 1
            self.decoded_tokens += batch.n_tokens
        return DecodeStatus(status)

    def decode_tokens(self, tokens: list[int], positions: list[int], seq_ids: list[int]) -> DecodeStatus:
        return self.decode(tokens_batch(tokens, positions, seq_ids))

    def rest(self) -> None:
        """Nothing is kept for threads."""

    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]:
        assert n_outputs == self._n_rows, f"{n_outputs} rows asked for, {self._n_rows} computed"
        return self._rows[:n_outputs]

    def embeddings(self, n_outputs: int) -> npt.NDArray[np.float32]:
        return self.logits(n_outputs)[:, : self._limits.n_embd]

    def layers(self, n_outputs: int) -> npt.NDArray[np.float32]:
        """Of layer `i`: the last hidden state plus `i + 1`."""
        return self.embeddings(n_outputs)[:, None] + np.array(self._layers, np.float32)[:, None] + 1

    def record_layers(self, on: bool) -> None:
        if on != self.records_layers:
            self.records_layers, self.remade = on, self.remade + 1
            lost, self._grow_failure = self._grow_failure, None
            if lost:
                self.clear()
                raise StateError("told to come up empty")

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        first, last = self.pos_min(seq_id), self.pos_max(seq_id)
        p0, p1 = max(p0, 0), p1 if p1 >= 0 else last + 1
        if self._limits.recurrent and p0 <= last and not (p0 <= first and p1 > last):
            return False
        self._drop(seq_id, lambda position: p0 <= position < p1)
        return True

    def seq_copy(self, source: int, target: int) -> None:
        assert self.pos_max(target) == -1, f"sequence {target} is not empty"
        for cell in self.cells:
            if source in cell.owners:
                cell.owners.add(target)

    def seq_join(self, source: int, target: int) -> None:
        assert self.pos_max(target) + 1 == self.pos_min(source), "the parts do not follow each other"
        for cell in self.cells:
            if source in cell.owners:
                cell.owners.add(target)

    def seq_shift(self, seq_id: int, p0: int, delta: int) -> None:
        assert self._limits.can_shift and delta
        for cell in self.cells:
            if seq_id in cell.owners and cell.position >= p0:
                cell.position += delta

    def pos_min(self, seq_id: int) -> int:
        return min((cell.position for cell in self._of(seq_id)), default=-1)

    def pos_max(self, seq_id: int) -> int:
        return max((cell.position for cell in self._of(seq_id)), default=-1)

    def clear(self) -> None:
        self.cells.clear()

    @property
    def fingerprint(self) -> dict[str, int | str]:
        return {"architecture": "fake", "n_vocab": self._limits.n_vocab, "recurrent": self._limits.recurrent}

    def state_size(self, seq_id: int) -> int:
        return len(self.state_save(seq_id))

    def state_save(self, seq_id: int, partial: bool = False) -> memoryview:
        cells = self._of(seq_id)
        cells = cells[-self._limits.n_swa :] if self._limits.n_swa else cells
        return memoryview(np.array([(c.token, c.position) for c in cells], np.int64).tobytes())

    def state_load(self, seq_id: int, state: memoryview | bytes, partial: bool = False) -> bool:
        assert partial or self.pos_max(seq_id) == -1, f"sequence {seq_id} is not empty"
        self._drop(seq_id, lambda position: True)
        rows = np.frombuffer(state, np.int64).reshape(-1, 2)
        if len(self.cells) + len(rows) > self._limits.n_cells:
            return False
        self.cells.extend(_Cell(int(token), int(position), {seq_id}) for token, position in rows)
        return True

    def grow(self, n_seq_max: int) -> None:
        assert self._limits.n_seq_max < n_seq_max <= self._limits.n_seq_limit
        lost, self._grow_failure = self._grow_failure, None
        if lost is False:
            raise ModelLoadError("told to find no memory")
        if lost:
            self.clear()
        self._limits = replace(self._limits, n_seq_max=n_seq_max)
        if lost:
            raise StateError("told to come up empty")

    def close(self) -> None:
        self.closed = True

    def _of(self, seq_id: int) -> list[_Cell]:
        return sorted((c for c in self.cells if seq_id in c.owners), key=lambda c: c.position)

    def _seen(self, seq_id: int) -> list[int]:
        """What the newest token attends to. A cell that a window should still hold and does not is a -2."""
        held = {cell.position: cell.token for cell in self._of(seq_id)}
        last = max(held)
        first = max(0, last + 1 - self._limits.n_swa) if self._limits.n_swa else 0
        return [last, *(held.get(position, -2) for position in range(first, last + 1))]

    def _check(self, batch: Batch) -> None:
        """What llama.cpp refuses before it stores anything."""
        follows = {seq_id: self.pos_max(seq_id) + 1 for seq_id in range(self._limits.n_seq_max)}
        for seq_id, position in zip(batch.seq_ids.tolist(), batch.positions.tolist(), strict=True):
            if follows.get(seq_id) != position:
                raise DecodeError(f"position {position} of sequence {seq_id} is not {follows.get(seq_id)}", -1)
            follows[seq_id] += 1
        for token in [] if batch.tokens is None else batch.tokens.tolist():
            if not 0 <= token < self._limits.n_vocab:
                raise DecodeError(f"token {token} is outside the vocabulary", -1)

    def _drop(self, seq_id: int, where: Callable[[int], bool]) -> None:
        for cell in self.cells:
            if seq_id in cell.owners and where(cell.position):
                cell.owners.discard(seq_id)
        self.cells = [cell for cell in self.cells if cell.owners]

    def _slide(self) -> None:
        if not self._limits.n_swa or self._limits.swa_full:
            return
        for seq_id in {owner for cell in self.cells for owner in cell.owners}:
            oldest = self.pos_max(seq_id) + 1 - self._limits.n_swa
            self._drop(seq_id, functools.partial(operator.gt, oldest))
