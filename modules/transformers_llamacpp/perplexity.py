"""Perplexity of a text, in pieces small enough for any vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .cache import LlamaCppCache
from .errors import InvalidInputError

__all__ = ["perplexity", "windows"]

PIECE = 64
"""Tokens whose logits are in memory at once: with 262,144 entries each, 64 MiB."""


def windows(length: int, size: int) -> Iterator[tuple[int, int, int]]:
    """`(begin, first, end)`: see tokens `[begin, end)`, score `[first, end)`. Every token but the first is scored once.

    Windows overlap by half, so that a scored token has at least half a window before it (the first window aside).
    """
    begin, first = 0, 1
    while first < length:
        end = min(begin + size, length)
        yield begin, first, end
        begin, first = begin + size // 2, end


def perplexity(model: Any, text: str, window: int = 512) -> tuple[float, int]:
    """`exp` of the mean negative log-likelihood per token, and the number of tokens it was taken over.

    Raises `InvalidInputError` for a text of less than two tokens, or a window that is not between 2 and `n_ctx`.
    """
    n_ctx = model.config.max_position_embeddings
    if not 2 <= window <= n_ctx:
        raise InvalidInputError(f"a window of {window} tokens is not between 2 and n_ctx={n_ctx}")
    ids = model.tokenizer(text, return_tensors="pt")["input_ids"]
    length = int(ids.shape[1])
    if length < 2:
        raise InvalidInputError(f"the text has {length} tokens; perplexity needs at least 2")
    total = sum(_loss(model, ids, *span) for span in windows(length, window))
    return math.exp(total / (length - 1)), length - 1


@torch.no_grad()
def _loss(model: Any, ids: torch.Tensor, begin: int, first: int, end: int) -> float:
    """The summed negative log-likelihood of tokens `[first, end)`, seen after `[begin, first)`."""
    cache, total = LlamaCppCache(model), 0.0
    try:
        if first - 1 > begin:  # what is only seen needs no logits
            model(ids[:, begin : first - 1], past_key_values=cache, logits_to_keep=1)
        for start in range(first - 1, end - 1, PIECE):
            stop = min(start + PIECE, end - 1)
            logits = model(ids[:, start:stop], past_key_values=cache).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, start + 1 : stop + 1], reduction="sum"))
    finally:
        cache.close()
    return total
