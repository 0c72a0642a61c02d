"""Who takes part in the next decode, and with how many tokens. Pure: asks in, parts out."""

from __future__ import annotations

from .backend import Limits
from .turn import Ask, Part

__all__ = ["mixed"]


def mixed(waiting: list[Ask], limits: Limits, portion: int | None) -> list[Part]:
    """The parts of one decode, of asks that wait in this order.

    What is a token or a few for each sequence goes first, oldest first; prompts share what is left, and at most `portion`
    tokens (`None`: as many as the decode takes): half of it for the oldest, the rest for those that need least. The oldest ask
    of all is always among them, and those that cannot share a decode with it are not: hidden states make a row of every
    token, layers want one token of each sequence, and embedding vectors stand alone.
    """
    if not waiting:
        return []
    oldest = waiting[0]
    if oldest.solo:
        return [Part.of(oldest, limits.n_batch, limits.n_outputs)]
    company = [ask for ask in waiting if ask is oldest or _goes_with(oldest, ask)]
    if oldest.plain and all(ask.dense for ask in company):
        company += [ask for ask in waiting if ask not in company and not ask.solo and ask.dense and not _layers(ask)]
    tokens, rows = limits.n_ubatch if _layers(oldest) else limits.n_batch, limits.n_outputs
    parts: list[Part] = []

    def take(ask: Ask, most: int, kept_rows: int = 0) -> int:
        nonlocal tokens, rows
        part = Part.of(ask, min(most, tokens), max(0, rows - kept_rows))
        if part.n:
            parts.append(part)
            tokens -= part.n
            rows -= part.n_outputs
        return part.n

    prompts = sorted((ask for ask in company if not ask.dense), key=lambda ask: ask.born)
    if oldest.dense:
        take(oldest, tokens)
    kept = min(tokens // 4 + 1, sum(ask.left for ask in prompts))
    for ask in company:
        if ask.dense and ask is not oldest:
            take(ask, tokens - kept, 1 if prompts else 0)  # more streams than rows must not keep a prompt from its last one
    if prompts:
        budget = tokens if portion is None else min(tokens, portion)
        shares = {id(ask): 0 for ask in prompts}
        first, *later = prompts
        shares[id(first)] = min(first.left, budget if not later else -(-budget // 2))
        budget -= shares[id(first)]
        for ask in sorted(prompts, key=lambda ask: (ask.left, ask.born)):
            more = min(ask.left - shares[id(ask)], budget)
            shares[id(ask)] += more
            budget -= more
        for ask in prompts:
            take(ask, shares[id(ask)])
    return parts


def _layers(ask: Ask) -> bool:
    return ask.batch is not None and bool(ask.batch.layers)


def _goes_with(oldest: Ask, ask: Ask) -> bool:
    if ask.solo:
        return False
    if _layers(oldest):
        return ask.flat
    if not oldest.plain:
        return ask.dense and not _layers(ask)
    return ask.plain
