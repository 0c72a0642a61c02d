"""What is known of a text besides the text: each token's probability and its rivals', and when it came."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Alternative", "Streamed", "Token", "Trace"]


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that could have stood at a place. `probability`: as the model has it; `guided`: as guidance makes it."""

    text: str
    probability: float
    guided: float | None = None
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the text; `alternatives` has itself in it too, the likeliest first. `changed`: without guidance another token
    would have been the likeliest."""

    text: str
    probability: float | None = None
    guided: float | None = None
    alternatives: tuple[Alternative, ...] = ()
    changed: bool = False


class Trace:
    """Filled on the thread that generates, read on others. `top`: alternatives for each token, 0 for none."""

    def __init__(self, top: int, piece: Callable[[int], bytes]) -> None:
        self.top, self._piece = top, piece
        self.tokens: list[Token] = []
        self.times: list[float] = []
        """When each token came, in seconds of `time.perf_counter()`."""
        self.started = time.perf_counter()
        self._plain: dict[int, torch.Tensor] = {}
        self._guided: dict[int, torch.Tensor] = {}

    def observe(self, input_ids: torch.Tensor, logits: torch.Tensor) -> None:
        """`observe_logits` of `generate()`: the distribution for the token after `input_ids`."""
        self._plain[input_ids.shape[1]] = torch.softmax(logits[0].float(), dim=-1)

    def observe_guided(self, input_ids: torch.Tensor, scores: torch.Tensor) -> None:
        self._guided[input_ids.shape[1]] = torch.softmax(scores[0].float(), dim=-1)

    def put(self, place: int, token: int) -> None:
        """The token after `place` others is certain."""
        plain, guided = self._plain.get(place), self._guided.get(place)
        self.times.append(time.perf_counter())
        self.tokens.append(Token(self._text(token)) if plain is None else self._token(token, plain, guided))
        for kept in (self._plain, self._guided):  # what comes after `place` may be a draft's, and is shown again
            for known in [one for one in kept if one <= place]:
                del kept[known]

    def put_scored(self, token: int, logprob: float | None, top: Sequence[tuple[int, float]]) -> None:
        """A token whose alternatives somebody else has found."""
        probability = None if logprob is None else float(torch.tensor(logprob).exp())
        found = [(other, float(torch.tensor(value).exp()), None) for other, value in top]
        if probability is not None and token not in [other for other, *_ in found]:
            found.append((token, probability, None))
        self.tokens.append(Token(self._text(token), probability, None, self._alternatives(found, token)))

    def _token(self, token: int, plain: torch.Tensor, guided: torch.Tensor | None) -> Token:
        deciding = plain if guided is None else guided
        ids = torch.topk(deciding, min(self.top, len(deciding))).indices.tolist()
        best = ids[0]
        if guided is not None:  # what was likely before guidance is what it is to be compared with
            without = torch.topk(plain, min(self.top, len(plain))).indices.tolist()
            best = without[0]
            ids = list(dict.fromkeys([*ids, *without]))
        changed = guided is not None and best != ids[0]
        if token not in ids:
            ids.append(token)
        found = [(other, float(plain[other]), None if guided is None else float(guided[other])) for other in ids]
        value = None if guided is None else float(guided[token])
        return Token(self._text(token), float(plain[token]), value, self._alternatives(found, token), changed)

    def _alternatives(self, found: Sequence[tuple[int, float, float | None]], token: int) -> tuple[Alternative, ...]:
        made = [Alternative(self._text(other), plain, guided, other == token) for other, plain, guided in found]
        return tuple(sorted(made, key=lambda one: -(one.probability if one.guided is None else one.guided)))

    def _text(self, token: int) -> str:
        return self._piece(token).decode("utf-8", "replace")


class Streamed:
    """A streamer in front of `streamer`: tells the trace which token stands where, and `came` that there is one more."""

    def __init__(self, streamer: Any, trace: Trace, length: int, came: Callable[[int], None]) -> None:
        self._streamer, self._trace, self._place, self._came = streamer, trace, length, came
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            for token in value.reshape(-1).tolist():
                self._trace.put(self._place, token)
                self._place += 1
            self._came(len(self._trace.tokens))
        self._prompt_seen = True
        self._streamer.put(value)

    def end(self) -> None:
        self._streamer.end()
