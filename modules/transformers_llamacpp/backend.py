"""The narrow interface between the engine and llama.cpp.

`native.context.NativeBackend` speaks to the real library, `testing.FakeBackend` stands in for it in tests. Nothing above
this line knows ctypes, and nothing below it knows what a prompt, a cache or a beam is.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .batch import Batch

__all__ = ["Backend", "DecodeStatus", "Limits"]


class DecodeStatus(enum.Enum):
    """What `llama_decode` said, where the caller can do something about it. Everything else is a `DecodeError`."""

    OK = 0
    NO_SLOT = 1
    """No KV cells for the batch; nothing was stored, and a retry after making room is fine."""
    ABORTED = 2
    """An abort callback stopped it; part of the batch may be stored."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one context can do; read from llama.cpp after it was made, not from what was asked for."""

    n_vocab: int
    n_embd: int
    n_embd_inp: int
    n_layer: int
    n_ctx_train: int
    n_cells: int
    """KV cells shared by all sequences."""
    n_batch: int
    """Most tokens in one decode."""
    n_ubatch: int
    """Most tokens that are computed at once."""
    n_seq_max: int
    """Sequence ids are `0 .. n_seq_max - 1`."""
    n_seq_limit: int
    """The most `n_seq_max` may grow to."""
    n_outputs: int
    """Most rows with logits in one decode."""
    n_swa: int
    """Width of the model's sliding window, 0 for none. A saved state holds no older positions of such layers."""
    swa_full: bool
    """Cells behind the window are kept in the buffer."""
    recurrent: bool
    """The memory has a state that cannot be rewound (recurrent and hybrid models)."""
    can_shift: bool
    """Positions can be moved (`seq_shift`)."""

    @property
    def stateful(self) -> bool:
        """What has been overwritten cannot be gone back to, but for a checkpoint (`state_save(partial=True)`)."""
        return self.recurrent or (self.n_swa > 0 and not self.swa_full)


class Backend(Protocol):
    """llama.cpp as the engine sees it. Not thread-safe: the engine calls it under its lock."""

    @property
    def limits(self) -> Limits: ...

    def decode(self, batch: Batch) -> DecodeStatus:
        """Store the batch and compute the rows it asks for.

        A batch with `layers` holds at most `n_ubatch` tokens, of one sequence or one for each sequence.
        Raises `DecodeError` for everything that is not a `DecodeStatus`; part of the batch may then be stored.
        """
        ...

    def decode_tokens(self, tokens: list[int], positions: list[int], seq_ids: list[int]) -> DecodeStatus:
        """`decode` of one token for each of several sequences, all of them outputs, with as little as possible around it: after
        each decode the weights have driven what Python needs out of the processor's cache."""
        ...

    def rest(self) -> None:
        """The calling thread decodes no more for a while: what is kept for it alone may go. From any thread, at any time."""
        ...

    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]:
        """`(n_outputs, n_vocab)` in batch order. A view: valid until the next call of any method."""
        ...

    def embeddings(self, n_outputs: int) -> npt.NDArray[np.float32]:
        """`(n_outputs, n_embd)`, the last layer's output, in batch order. A view, valid as `logits`."""
        ...

    def layers(self, n_outputs: int) -> npt.NDArray[np.float32]:
        """`(n_outputs, len(batch.layers), width)`, the inputs of those layers, in batch order; the caller's to keep.

        Raises `UnsupportedFeatureError` where the decode did not show them.
        """
        ...

    @property
    def records_layers(self) -> bool:
        """Whether decodes may ask for `layers`."""
        ...

    def record_layers(self, on: bool) -> None:
        """Make a context whose decodes may ask for `layers`, or one that is faster; all that is held stays held.

        Raises `UnsupportedFeatureError` where this model's layers cannot be seen, `ModelLoadError` where there is no
        memory (nothing changed then), and `StateError` as `grow` does: the new context is empty.
        """
        ...

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        """Forget the positions `[p0, p1)` (`p1 < 0`: to the end). False: refused, and nothing changed."""
        ...

    def seq_copy(self, source: int, target: int) -> None:
        """`target`, which must be empty, shares all cells of `source`."""
        ...

    def seq_join(self, source: int, target: int) -> None:
        """`target`, whose positions end where those of `source` begin, shares all cells of `source` too."""
        ...

    def seq_shift(self, seq_id: int, p0: int, delta: int) -> None:
        """Move all positions from `p0` on by `delta`, in place: a cell that other sequences share moves for them too.

        `p0 + delta` must be free and follow what stands before it. Only where `limits.can_shift`.
        """
        ...

    def pos_min(self, seq_id: int) -> int:
        """The first position still held in every layer, -1 where the sequence is empty."""
        ...

    def pos_max(self, seq_id: int) -> int:
        """The last position held, -1 where the sequence is empty."""
        ...

    def clear(self) -> None:
        """Forget all sequences; the cells are as in a new context."""
        ...

    @property
    def fingerprint(self) -> dict[str, int | str]:
        """What a saved state depends on beside the tokens; a state goes only into a backend with an equal one."""
        ...

    def state_size(self, seq_id: int) -> int:
        """Bytes that `state_save` would give, without copying them."""
        ...

    def state_save(self, seq_id: int, partial: bool = False) -> memoryview:
        """The sequence's KV cells or recurrent state, as it would be needed to go on; positions are part of it.

        `partial`: only what cannot be rewound, the recurrent state or the cells of the window. Raises `StateError`.
        """
        ...

    def state_load(self, seq_id: int, state: memoryview | bytes, partial: bool = False) -> bool:
        """Restore into the empty `seq_id`, bit for bit. False: no room; then `seq_id` is empty.

        `partial`: into a sequence that holds at least the positions the state was saved at; what it cannot be rewound
        from is replaced, and `seq_remove` of what comes after must follow.
        """
        ...

    def grow(self, n_seq_max: int) -> None:
        """Make a context with that many sequence ids; all that is held stays held, cells stay shared.

        Raises `ModelLoadError` where there is no memory (nothing changed then), and `StateError` where the new context came
        up empty.
        """
        ...

    def close(self) -> None:
        """Free native memory; idempotent. No other method may be called afterwards."""
        ...
