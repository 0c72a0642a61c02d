"""The text of one choice, token by token: what may be shown already, where a stop string ends it, what its tokens say."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Piece", "TokenScore", "Writer"]


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token's log-probability as the model had it (temperature 1, before any processor), and the likeliest at its place.
    `offset`: where its text begins, in characters from the beginning of the answer."""

    token: int
    text: bytes
    offset: int
    logprob: float | None = None
    top: tuple[tuple[int, bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """New text, and the tokens of which at least the beginning has been shown now."""

    text: str
    tokens: tuple[TokenScore, ...] = ()


NOTHING = Piece("")


class Writer:
    """`put()` each token, then `end()`. What could be the beginning of a stop string is kept back until that is known, so that
    no part of one is ever shown. `reason`: "" while it is written, then "stop" or "length"."""

    def __init__(
        self, vocab: Any, stops: Sequence[str], ends: frozenset[int], hidden: Any, drop_space: bool, scored: bool = True
    ) -> None:
        """`hidden(token)`: it is not part of the text. `drop_space`: take away the space that the vocabulary puts before the
        first word. `scored`: pieces come with their tokens."""
        self._vocab, self._stops, self._ends, self._hidden = vocab, list(stops), ends, hidden
        self._drop_space = drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._shown = 0
        self._waiting: list[TokenScore] = []
        self._scored = scored
        self._at_once = not (self._stops or scored)
        """Text is shown as soon as it is known, and nobody asks where in it a token begins."""
        self.n_tokens = 0
        self.reason = ""
        self.cut = False
        """A stop string ended it."""

    def put(self, token: int, logprob: float | None = None, top: Sequence[tuple[int, float]] = ()) -> Piece:
        """The next token; ignored once the text has ended."""
        if self.reason:
            return NOTHING
        self.n_tokens += 1
        if token in self._ends:
            return self._finish("stop")
        if self._at_once:
            return NOTHING if self._hidden(token) else Piece(self._decoder.decode(self._bytes(token)))
        if not self._hidden(token):
            data = self._bytes(token)
            if self._scored:
                alternatives = tuple((other, self._vocab.piece(other), value) for other, value in top)
                self._waiting.append(TokenScore(token, data, self._shown + len(self._held), logprob, alternatives))
            self._held += self._decoder.decode(data)
        for stop in self._stops:
            at = self._held.find(stop)
            if at >= 0:
                at = min(found for found in (self._held.find(one) for one in self._stops) if found >= 0)
                self._held = self._held[:at]
                return self._finish("stop", cut=True)
        return self._show(len(self._held) - self._begun())

    def end(self, reason: str = "length") -> Piece:
        """There will be no further token."""
        return NOTHING if self.reason else self._finish(reason)

    def _finish(self, reason: str, cut: bool = False) -> Piece:
        self.reason, self.cut = reason, cut
        if not cut:
            self._held += self._decoder.decode(b"", final=True)
            return self._show(len(self._held), everything=True)
        end = self._shown + len(self._held)
        self._waiting = [score for score in self._waiting if score.offset < end]
        return self._show(len(self._held), everything=True)

    def _show(self, length: int, everything: bool = False) -> Piece:
        text, self._held = self._held[:length], self._held[length:]
        self._shown += len(text)
        ready = [score for score in self._waiting if everything or score.offset < self._shown]
        self._waiting = self._waiting[len(ready) :]
        return Piece(text, tuple(ready))

    def _begun(self) -> int:
        """Characters at the end of what is held that a stop string begins with."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _bytes(self, token: int) -> bytes:
        data: bytes = self._vocab.piece(token)
        if self._drop_space:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return data
