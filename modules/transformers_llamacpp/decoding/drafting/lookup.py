"""Prompt lookup: the text goes on as it did the last time it stood here.

Saxena 2023, "Prompt Lookup Decoding", https://github.com/apoorvumang/prompt-lookup-decoding; transformers'
`prompt_lookup_num_tokens` and `max_matching_ngram_size`. Copies, edits and code repeat themselves, and a guess made
from the text costs nothing but its verification.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from ...errors import InvalidInputError
from .draft import EMPTY, Draft

__all__ = ["PromptLookup"]

RECENT = 16
"""Places of the same n-gram that are compared, besides its first."""

BACKWARDS = 64
"""Tokens that a place is compared with the end of the text, at most."""

SHORT, TRUST = 2, 2
"""A draft is at most `TRUST` times as long as the context agrees, or `SHORT`: a word occurs in many places, a passage that is
being copied in one. Measured on edits of short texts: half of the drafted tokens, nearly all of the accepted ones."""

BITS = 32
"""Of a token id in the key of an n-gram."""


class PromptLookup:
    """A `Drafter` that drafts what followed an earlier occurrence of the text's last tokens.

    The longest n-gram that occurred before wins, from `max_ngram` tokens down to one. Of its places, the `RECENT` last
    ones and the first, the one whose context agrees furthest backwards is continued (looking at `BACKWARDS` tokens);
    of equals the last. The longer the agreement, the longer the draft, up to `num_tokens`. A draft ends where the text
    does, unless the text has become periodic: where the last period was seen twice, it goes on for as many tokens as
    wanted ("abab" drafts "abababab").

    Every token is indexed once, with `max_ngram` dictionary writes; a draft looks at a bounded number of places however
    long the text is. Memory: up to about 150 bytes for each token and length of n-gram, less where n-grams repeat.

    Args:
        num_tokens: most tokens of a draft.
        max_ngram: longest n-gram that is looked for.

    Raises:
        InvalidInputError: either is below 1.
    """

    def __init__(self, num_tokens: int, max_ngram: int) -> None:
        for name, value in (("prompt_lookup_num_tokens", num_tokens), ("max_matching_ngram_size", max_ngram)):
            if not isinstance(value, int):
                raise InvalidInputError(f"{name}={value!r} is no whole number")
        if num_tokens < 1:
            raise InvalidInputError(
                f"prompt_lookup_num_tokens={num_tokens}: drafts need room for 1 token or more; leave it out (None) to "
                "decode without prompt lookup"
            )
        if max_ngram < 1:
            raise InvalidInputError(f"max_matching_ngram_size={max_ngram}: at least 1 token has to match; leave it out for 2")
        self.num_tokens, self.max_ngram = num_tokens, max_ngram
        self.close()

    def close(self) -> None:
        self._text = array("i")
        # For n-grams of n + 1 tokens, by the position of their last token: where the same one ended before (-1: nowhere)
        # and where it ended first. Only n-grams that something follows are in here.
        self._last: list[dict[int, int]] = [{} for _ in range(self.max_ngram)]
        self._previous = [array("i") for _ in range(self.max_ngram)]
        self._first = [array("i") for _ in range(self.max_ngram)]
        self._ends: list[int] = []
        """Keys of the n-grams that end the text, the shortest first."""

    def prepare(self, tokens: list[int]) -> None:
        """Indexing is cheap wherever it is counted."""

    def draft(self, tokens: list[int], limit: int) -> Draft:
        if len(tokens) < len(self._text):
            raise InvalidInputError(
                f"a text of {len(self._text)} tokens cannot become one of {len(tokens)}: make a new PromptLookup for it"
            )
        self._read(tokens[len(self._text) :])
        found = self._find()
        if found is None:
            return EMPTY
        place, agreement = found
        trusted = max(SHORT, TRUST * agreement)
        return Draft(self._continue(place, agreement, min(limit, self.num_tokens, trusted)))

    def verified(self, drafted: int, accepted: int) -> None:
        """What came of a draft is in the next text."""

    def _read(self, tokens: Iterable[int]) -> None:
        text, ends, longest = self._text, self._ends, self.max_ngram
        rows = list(zip(self._last, self._previous, self._first, strict=True))
        for token in tokens:
            position = len(text) - 1
            for (last, previous, first), key in zip(rows, ends, strict=False):
                place = last.get(key, -1)
                previous.append(place)
                first.append(position if place < 0 else first[place])
                last[key] = position
            for row in range(len(ends), longest if position >= 0 else 0):
                rows[row][1].append(-1)
                rows[row][2].append(-1)
            letter = token & ((1 << BITS) - 1)
            ends = [letter, *(key << BITS | letter for key in ends[: longest - 1])]
            text.append(token)
        self._ends = ends

    def _find(self) -> tuple[int, int] | None:
        """`(position, agreement)`: where the end of the text stood before, and how many tokens back it is the same."""
        for row in reversed(range(len(self._ends))):
            place = self._last[row].get(self._ends[row], -1)
            if place < 0:
                continue
            places = [place]
            while len(places) < RECENT and (place := self._previous[row][place]) >= 0:
                places.append(place)
            if (first := self._first[row][places[0]]) < places[-1]:
                places.append(first)
            agreements = [self._agreement(place, row + 1) for place in places]
            best = max(range(len(places)), key=agreements.__getitem__)  # the first of equals, which is the last place
            return places[best], agreements[best]
        return None

    def _agreement(self, place: int, known: int) -> int:
        """How many tokens up to `place` equal those that end the text; `known` of them do."""
        text, end = self._text, len(self._text) - 1
        n, most = known, min(max(BACKWARDS, known), place + 1)
        while n < most and text[place - n] == text[end - n]:
            n += 1
        return n

    def _continue(self, place: int, agreement: int, limit: int) -> list[int]:
        tokens = list(self._text[place + 1 : place + 1 + limit])
        period = len(self._text) - 1 - place
        if agreement >= period:
            tokens.extend(tokens[index % period] for index in range(len(tokens), limit))
        return tokens
