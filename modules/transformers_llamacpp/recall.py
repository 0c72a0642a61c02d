"""What is still known of hidden states: vectors that were computed once, found again by the text they belong to.

The hidden state of a token depends on the tokens up to it and on nothing else, so the text is the key, whichever
sequence holds it now. Contrastive search compares with every earlier token; without this it could reuse no prefix.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from .sequence import EMBEDDED, shared_prefix

__all__ = ["Recall"]


class Recall:
    """Texts and one vector per token, at most `max_bytes` of them; those used longest ago go first. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._texts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]] = []
        self._lock = threading.Lock()

    def match(self, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32] | None:
        """The vectors of the longest known prefix of `tokens`, float32 `(n, n_embd)`, read-only; `None` for none."""
        with self._lock:
            best, length = -1, 0
            for index, (text, _) in enumerate(self._texts):
                n = shared_prefix(text, tokens)
                if n > length:
                    best, length = index, n
            if best < 0:
                return None
            self._texts.append(self._texts.pop(best))
            return self._texts[-1][1][:length]

    def remember(self, tokens: npt.NDArray[np.int32], vectors: npt.NDArray[np.float32]) -> None:
        """Keep a copy of `vectors[i]` for token `i`. A text that continues a known one takes its place.

        Positions given by `inputs_embeds` (-1) and what follows them belong to no text and are left out.
        """
        unknown = np.flatnonzero(tokens == EMBEDDED)
        n = int(unknown[0]) if len(unknown) else len(tokens)
        if n == 0 or vectors[:n].nbytes > self.max_bytes:
            return
        kept, text = vectors[:n].copy(), tokens[:n].copy()
        kept.setflags(write=False)
        with self._lock:
            if any(shared_prefix(old, text) == n for old, _ in self._texts):
                return
            self._texts = [(old, its) for old, its in self._texts if shared_prefix(old, text) < len(old)]
            self._texts.append((text, kept))
            while sum(its.nbytes for _, its in self._texts) > self.max_bytes:
                del self._texts[0]

    def clear(self) -> None:
        with self._lock:
            self._texts.clear()
