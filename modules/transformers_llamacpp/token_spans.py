"""Which characters of a text each token stands for."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .native.vocab import HIDDEN, MATCHED_WHOLE, VocabType

if TYPE_CHECKING:
    from .native.vocab import NativeVocab

__all__ = ["Part", "TokenSpans", "align"]

Span = tuple[int, int]
_SURROGATE = re.compile("[\ud800-\udfff]")


def align(vocab: NativeVocab, text: str, ids: Sequence[int]) -> list[Span]:
    """Half-open character spans of `ids`, which `vocab.tokenize(text, add_special=False)` gave.

    Where the vocabulary keeps every byte (BPE, SentencePiece, RWKV) the spans follow one another without overlap and
    `"".join(text[a:b] for a, b in spans) == text`; a character spread over several tokens belongs to the first of
    them, and the others have empty spans. Vocabularies that change the text (BERT lowers case, T5 merges spaces) are
    aligned letter by letter; a span is then the part of the text the token came from, as near as can be told.
    """
    known = _SURROGATE.sub("\ufffd", text)
    if vocab.type is VocabType.SPM:
        known = known.replace("▁", " ")  # SentencePiece spells both alike
    data = known.encode("utf-8")
    ends = _exact(vocab, data, ids)
    if ends is None:
        return _loose(vocab, text, ids)
    if len(data) == len(text):  # ASCII: bytes are characters
        return ends
    starts_character = (np.frombuffer(data, dtype=np.uint8) & 0xC0) != 0x80
    characters = np.concatenate(([0], np.cumsum(starts_character))).tolist()
    return [(characters[start], characters[end]) for start, end in ends]


def _exact(vocab: NativeVocab, data: bytes, ids: Sequence[int]) -> list[Span] | None:
    """Byte spans, or `None` when the pieces do not spell the text."""
    prefix = vocab.adds_space_prefix
    after_special, position = True, 0
    spans: list[Span] = []
    for token in ids:
        piece, whole = vocab.piece(token), bool(vocab.attr(token) & MATCHED_WHOLE)
        if prefix and after_special and not whole and piece.startswith(b" "):
            piece = piece[1:]
        after_special = whole
        start = position
        if not data.startswith(piece, start):
            while data[start : start + 1].isspace():  # a few special tokens swallow the spaces beside them
                start += 1
            if not data.startswith(piece, start):
                return None
        position = start + len(piece)
        spans.append((start, position))
    return spans if not data[position:].strip() else None


def _fold(text: str) -> str:
    """What is left of `text` by any normalisation: lower-case letters without accents, no spaces."""
    decomposed = unicodedata.normalize("NFKD", text).lower()
    return "".join(c for c in decomposed if not c.isspace() and unicodedata.category(c) not in ("Mn", "Cc", "Cf"))


def _loose(vocab: NativeVocab, text: str, ids: Sequence[int]) -> list[Span]:
    origin = [index for index, character in enumerate(text) for _ in _fold(character)]
    folded = "".join(map(_fold, text))
    spans: list[Span] = []
    unknown: list[int] = []  # tokens whose text is not known until the next one that is
    position = end = 0

    def settle(until: int) -> None:
        between = text[end:until]
        start = end + len(between) - len(between.lstrip())
        stop = max(start, until - (len(between) - len(between.rstrip())))
        for nth, index in enumerate(unknown):
            spans[index] = (start, stop) if nth == 0 else (stop, stop)
        unknown.clear()

    for index, token in enumerate(ids):
        piece = _fold(vocab.piece(token).decode("utf-8", "ignore"))
        found = folded.find(piece, position) if piece else -1
        if found < 0:
            spans.append((end, end))
            if vocab.attr(token) & HIDDEN:
                unknown.append(index)
            continue
        start = origin[found]
        settle(start)
        position = found + len(piece)
        end = origin[position - 1] + 1
        spans.append((start, end))
    settle(len(text))
    return spans


class Part:
    """Tokens that came from one piece of text: `text[lead:]` is what the caller gave.

    `text` is `None` where the caller gave ids. `word` is the index of the word with `is_split_into_words`.
    """

    __slots__ = ("ids", "lead", "text", "word")

    def __init__(self, ids: list[int], text: str | None = None, lead: int = 0, word: int | None = None) -> None:
        self.ids = ids
        self.text = text
        self.lead = lead
        self.word = word

    def spans(self, vocab: NativeVocab) -> list[Span]:
        if self.text is None:
            return [(0, 0)] * len(self.ids)
        spans = align(vocab, self.text, self.ids)
        if not self.lead:
            return spans
        return [(max(0, start - self.lead), max(0, end - self.lead)) for start, end in spans]


class TokenSpans:
    """One row of a `BatchEncoding` seen from the text: the part of `tokenizers.Encoding` that `BatchEncoding` uses.

    Spans are worked out when first asked for. Indices count the padded row, as they do in transformers. Words are known
    only with `is_split_into_words=True`.
    """

    def __init__(
        self,
        vocab: NativeVocab,
        ids: list[int],
        sources: list[tuple[int, list[Part], range] | None],
        type_ids: list[int],
        left_pad: int,
        n_sequences: int,
    ) -> None:
        """`sources` has one entry for each stretch of the row: `None` for one added token, else (sequence, its parts,
        which of its tokens)."""
        self._vocab: NativeVocab | None = vocab
        self._sources = sources
        self._left_pad = left_pad
        self._found: tuple[list[Span], list[int | None], list[int | None]] | None = None
        self.ids = ids
        self.type_ids = type_ids
        self.n_sequences = n_sequences
        self.overflowing: list[TokenSpans] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __getstate__(self) -> dict[str, object]:
        self._find()  # a pickled row must not drag the vocabulary along
        tokens = self.tokens
        return {**self.__dict__, "_vocab": None, "_sources": [], "_tokens": tokens}

    def _find(self) -> tuple[list[Span], list[int | None], list[int | None]]:
        if self._found is None:
            assert self._vocab is not None
            spans: list[Span] = [(0, 0)] * self._left_pad
            words: list[int | None] = [None] * self._left_pad
            sequences: list[int | None] = [None] * self._left_pad
            for source in self._sources:
                if source is None:
                    spans.append((0, 0))
                    words.append(None)
                    sequences.append(None)
                    continue
                sequence, parts, used = source
                every = [(span, part.word) for part in parts for span in part.spans(self._vocab)]
                spans.extend(span for span, _ in every[used.start : used.stop])
                words.extend(word for _, word in every[used.start : used.stop])
                sequences.extend([sequence] * len(used))
            right_pad = len(self.ids) - len(spans)
            self._found = (
                spans + [(0, 0)] * right_pad,
                words + [None] * right_pad,
                sequences + [None] * right_pad,
            )
        return self._found

    @property
    def offsets(self) -> list[Span]:
        """Half-open character spans; `(0, 0)` for added tokens and padding."""
        return self._find()[0]

    @property
    def word_ids(self) -> list[int | None]:
        return self._find()[1]

    words = word_ids

    @property
    def sequence_ids(self) -> list[int | None]:
        return self._find()[2]

    @property
    def tokens(self) -> list[str]:
        stored: list[str] | None = self.__dict__.get("_tokens")
        if stored is not None:
            return stored
        assert self._vocab is not None
        return [self._vocab.text(token) for token in self.ids]

    @property
    def special_tokens_mask(self) -> list[int]:
        return [int(sequence is None) for sequence in self.sequence_ids]

    @property
    def attention_mask(self) -> list[int]:
        real = sum(1 if source is None else len(source[2]) for source in self._sources)
        return [int(self._left_pad <= index < self._left_pad + real) for index in range(len(self.ids))]

    def char_to_token(self, char_pos: int, sequence_index: int = 0) -> int | None:
        for token, ((start, end), sequence) in enumerate(zip(self.offsets, self.sequence_ids, strict=True)):
            if sequence == sequence_index and start <= char_pos < end:
                return token
        return None

    def token_to_chars(self, token_index: int) -> Span | None:
        return None if self.sequence_ids[token_index] is None else self.offsets[token_index]

    def token_to_sequence(self, token_index: int) -> int | None:
        return self.sequence_ids[token_index]

    def token_to_word(self, token_index: int) -> int | None:
        return self.word_ids[token_index]

    def char_to_word(self, char_pos: int, sequence_index: int = 0) -> int | None:
        token = self.char_to_token(char_pos, sequence_index)
        return None if token is None else self.word_ids[token]

    def word_to_tokens(self, word_index: int, sequence_index: int = 0) -> Span | None:
        found = [
            token
            for token, (word, sequence) in enumerate(zip(self.word_ids, self.sequence_ids, strict=True))
            if word == word_index and sequence == sequence_index
        ]
        return (found[0], found[-1] + 1) if found else None

    def word_to_chars(self, word_index: int, sequence_index: int = 0) -> Span | None:
        tokens = self.word_to_tokens(word_index, sequence_index)
        return None if tokens is None else (self.offsets[tokens[0]][0], self.offsets[tokens[1] - 1][1])
