"""Log-probabilities as the model has them: of what is being written, and of a text that is there already."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ...cache import LlamaCppCache
from ...errors import GenerationCancelled

__all__ = ["Recorder", "text_scores"]

Scores = tuple[float, list[tuple[int, float]]]
"""A token's log-probability, and the likeliest tokens at its place with theirs."""

CHUNK = 64
"""Tokens of a text that are evaluated at once: a row of scores for each is as long as the vocabulary."""


class Recorder:
    """`observe_logits` of `generate()`: keeps the distribution at each place until the token there is known."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._places: dict[int, torch.Tensor] = {}

    def observe(self, input_ids: torch.Tensor, logits: torch.Tensor) -> None:
        self._places[input_ids.shape[1]] = torch.log_softmax(logits.float(), dim=-1)

    def take(self, place: int, row: int, token: int) -> Scores | None:
        """Of `token`, the one after `place` tokens. `None` where the loop showed no distribution."""
        rows = self._places.get(place)
        return None if rows is None else _scores(rows[row], token, self._top)

    def forget(self, place: int) -> None:
        """The tokens after `place` are known in all rows."""
        for known in [one for one in self._places if one <= place]:
            del self._places[known]


def text_scores(model: Any, ids: Sequence[int], top: int, stop: threading.Event, first: int = 1) -> list[Scores]:
    """Of the tokens `ids[first:]`, each after those before it. Setting `stop` ends it between two decodes with
    `GenerationCancelled`."""
    found: list[Scores] = []
    cache = LlamaCppCache(model)
    try:
        for begin in range(0, len(ids) - 1, CHUNK):
            if stop.is_set():
                raise GenerationCancelled(begin, len(ids))
            end = min(begin + CHUNK, len(ids) - 1)
            kept = range(max(begin, first - 1), end)
            columns = torch.tensor([place - begin for place in kept] or [end - begin - 1])
            logits = model(
                torch.tensor([list(ids[begin:end])]), attention_mask=torch.ones(1, end, dtype=torch.int64),
                past_key_values=cache, logits_to_keep=columns,
            ).logits[0]  # fmt: skip
            for row, place in enumerate(kept):
                found.append(_scores(torch.log_softmax(logits[row], dim=-1), ids[place + 1], top))
        return found
    finally:
        cache.close()
        model.engine.backend.rest()  # as generate() does at its end


def _scores(row: torch.Tensor, token: int, top: int) -> Scores:
    if not top:
        return float(row[token]), []
    values, tokens = torch.topk(row, min(top, len(row)))
    return float(row[token]), list(zip(tokens.tolist(), values.tolist(), strict=True))
