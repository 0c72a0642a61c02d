"""From texts to rows of token ids: truncation, pairs, and the tokens a vocabulary puts around a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.tokenization_utils_base import TruncationStrategy

from .token_spans import Part

__all__ = ["Affixes", "Row", "build_row", "is_batch", "split_pair", "truncation_plan"]


@dataclass(frozen=True)
class Affixes:
    """Tokens put around a row: `before first after`, and for a pair `before first after between second after`."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    between: tuple[int, ...] = ()

    def count(self, pair: bool) -> int:
        return len(self.before) + len(self.after) * (2 if pair else 1) + (len(self.between) if pair else 0)


@dataclass
class Row:
    """One encoded row before padding. Lists are as long as `ids`; `sources` see `TokenSpans`."""

    ids: list[int] = field(default_factory=list)
    special: list[int] = field(default_factory=list)
    type_ids: list[int] = field(default_factory=list)
    sources: list[tuple[int, list[Part], range] | None] = field(default_factory=list)
    overflowing: list[int] = field(default_factory=list)
    n_truncated: int = 0
    n_sequences: int = 1

    def add_special(self, tokens: Sequence[int], sequence: int) -> None:
        self.ids.extend(tokens)
        self.special.extend([1] * len(tokens))
        self.type_ids.extend([sequence] * len(tokens))
        self.sources.extend([None] * len(tokens))

    def add_sequence(self, sequence: int, parts: list[Part], tokens: list[int], used: range) -> None:
        self.ids.extend(tokens[used.start : used.stop])
        self.special.extend([0] * len(used))
        self.type_ids.extend([sequence] * len(used))
        self.sources.append((sequence, parts, used))


def truncation_plan(
    n_first: int, n_second: int, excess: int, strategy: TruncationStrategy, side: str
) -> tuple[range, range]:
    """Which tokens of two sequences stay when `excess` must go. Fewer go where the strategy leaves nothing to take."""
    take_first = take_second = 0
    if excess > 0 and strategy == TruncationStrategy.ONLY_FIRST:
        take_first = excess
    elif excess > 0 and strategy == TruncationStrategy.ONLY_SECOND:
        take_second = excess
    elif excess > 0 and strategy == TruncationStrategy.LONGEST_FIRST:
        longer = min(abs(n_first - n_second), excess)
        half, odd = divmod(excess - longer, 2)
        take_first, take_second = half + odd, half
        if n_first >= n_second:
            take_first += longer
        else:
            take_first, take_second = half, half + odd + longer
    take_first, take_second = min(take_first, n_first), min(take_second, n_second)
    if side == "left":
        return range(take_first, n_first), range(take_second, n_second)
    return range(n_first - take_first), range(n_second - take_second)


def build_row(
    first: list[Part],
    second: list[Part] | None,
    affixes: Affixes,
    *,
    max_length: int | None,
    strategy: TruncationStrategy,
    side: str,
    stride: int,
) -> Row:
    """Put one row together. With truncation to `max_length` the added tokens stay and the text goes."""
    tokens = [token for part in first for token in part.ids]
    others = [token for part in second or () for token in part.ids]
    row = Row(n_sequences=1 if second is None else 2)
    excess = 0
    if max_length is not None and strategy != TruncationStrategy.DO_NOT_TRUNCATE:
        excess = len(tokens) + len(others) + affixes.count(second is not None) - max_length
    keep, keep_others = truncation_plan(len(tokens), len(others), excess, strategy, side)
    row.n_truncated = len(tokens) - len(keep) + len(others) - len(keep_others)
    if (len(keep) < len(tokens) and second is None) or strategy == TruncationStrategy.ONLY_FIRST:
        row.overflowing = _overflow(tokens, keep, stride, side)
    elif strategy == TruncationStrategy.ONLY_SECOND:
        row.overflowing = _overflow(others, keep_others, stride, side)
    row.add_special(affixes.before, 0)
    row.add_sequence(0, first, tokens, keep)
    row.add_special(affixes.after, 0)
    if second is not None:
        row.add_special(affixes.between, 1)
        row.add_sequence(1, second, others, keep_others)
        row.add_special(affixes.after, 1)
    return row


def _overflow(tokens: list[int], keep: range, stride: int, side: str) -> list[int]:
    """What was cut off, with `stride` tokens of what was kept."""
    if len(keep) == len(tokens):
        return []
    if side == "left":
        return tokens[: keep.start + stride]
    return tokens[max(0, keep.stop - stride) :]


def is_batch(text: Any, split_into_words: bool) -> bool:
    """Whether `text` is several inputs: a list of texts, of pairs, of id lists, or of word lists."""
    if not isinstance(text, (list, tuple)):
        return False
    if not text:
        return not split_into_words
    return isinstance(text[0], (list, tuple)) or (isinstance(text[0], str) and not split_into_words)


def split_pair(text: Any, split_into_words: bool) -> tuple[Any, Any]:
    """(text, None), or the two texts of a pair given as one element of a batch: `("question", "answer")`, and with
    words only a tuple of two lists."""
    if split_into_words:
        pair = isinstance(text, tuple) and len(text) == 2 and isinstance(text[0], (list, tuple))
    else:
        pair = isinstance(text, (list, tuple)) and len(text) == 2 and not isinstance(text[0], int)
    return (text[0], text[1]) if pair else (text, None)
