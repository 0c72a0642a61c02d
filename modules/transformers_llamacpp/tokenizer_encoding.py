"""The upper part of `LlamaCppTokenizer`: texts to padded batches of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.tokenization_utils_base import BatchEncoding, PaddingStrategy, TruncationStrategy

from .chat_template import encode_marked
from .errors import TokenizerError
from .native.vocab import VocabType
from .token_rows import Affixes, Row, build_row, is_batch, split_pair
from .token_spans import Part, TokenSpans
from .tokenizer_vocabulary import VocabularyTokenizer

__all__ = ["EncodingTokenizer"]


class EncodingTokenizer(VocabularyTokenizer):
    """`__call__`, `encode` and their relatives. See `LlamaCppTokenizer`."""

    add_bos_token: bool
    add_eos_token: bool

    # ---- encoding -----------------------------------------------------------------------------------------------

    def _affixes(self, parts: Sequence[Part] = ()) -> Affixes:
        """Tokens around a text of these `parts`."""
        vocab = self.vocab
        before, after = vocab.affixes
        if self.add_bos_token != vocab.add_bos:
            before = (vocab.bos_id,) if self.add_bos_token and vocab.bos_id is not None else ()
        if self.add_eos_token != vocab.add_eos:
            after = (vocab.eos_id,) if self.add_eos_token and vocab.eos_id is not None else ()
        between = () if vocab.type is VocabType.WPM else before
        if parts and parts[0].text is not None and tuple(parts[0].ids[: len(before)]) == before:
            before = ()  # the text begins with BOS written out
        return Affixes(before, after, between)

    def _parts(self, text: Any, split_into_words: bool, split_special: bool, marked: bool) -> list[Part]:
        if isinstance(text, str):
            if marked:
                return [Part(encode_marked(self, text))]
            return [Part(self.vocab.tokenize(text, False, not split_special), text)]
        if not isinstance(text, (list, tuple)) or not all(isinstance(item, (str, int)) for item in text):
            raise TokenizerError(f"a text is a str, a list of words or a list of token ids, not {type(text).__name__}")
        if not text or isinstance(text[0], int):
            for token in text:
                self.vocab.attr(token)  # refuses an id outside the vocabulary
            return [Part(list(text))]
        if not split_into_words:
            return [Part(self.convert_tokens_to_ids(list(text)))]
        # Words are joined by spaces; vocabularies that put one before every text need no help.
        lead = " " if self.vocab.type is not VocabType.WPM and not self.vocab.adds_space_prefix else ""
        spelled = [word if index == 0 else lead + word for index, word in enumerate(text)]
        return [
            Part(self.vocab.tokenize(word, False, not split_special), word, len(lead) if index else 0, index)
            for index, word in enumerate(spelled)
        ]

    def _encode_plus(
        self,
        text: Any,
        text_pair: Any = None,
        add_special_tokens: bool = True,
        padding_strategy: PaddingStrategy = PaddingStrategy.DO_NOT_PAD,
        truncation_strategy: TruncationStrategy = TruncationStrategy.DO_NOT_TRUNCATE,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: Any = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        verbose: bool = True,
        split_special_tokens: bool | None = None,
        sanitize_control_tokens: bool = False,
        **unknown: Any,
    ) -> BatchEncoding:
        """What `__call__` and `encode` end in. `offset_mapping` holds half-open character spans, see `token_spans`;
        for words they count from the start of the word."""
        if unknown:
            raise TypeError(f"{type(self).__name__} takes no argument {', '.join(sorted(unknown))}")
        batched = is_batch(text, is_split_into_words)
        if batched and text_pair is not None and (isinstance(text_pair, str) or len(text_pair) != len(text)):
            raise TokenizerError("`text` is a batch, so `text_pair` must be a batch of as many texts")
        texts = list(text) if batched else [text]
        pairs = list(text_pair) if batched and text_pair is not None else [text_pair] * len(texts)
        split_special = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        rows = []
        for one, other in zip(texts, pairs, strict=True):
            if batched and other is None:
                one, other = split_pair(one, is_split_into_words)
            first = self._parts(one, is_split_into_words, split_special, sanitize_control_tokens)
            second = None
            if other is not None:
                second = self._parts(other, is_split_into_words, split_special, sanitize_control_tokens)
            row = build_row(
                first,
                second,
                self._affixes(first) if add_special_tokens else Affixes(),
                max_length=max_length,
                strategy=truncation_strategy,
                side=self.truncation_side,
                stride=stride,
            )
            self._eventual_warn_about_too_long_sequence(row.ids, max_length, verbose)
            rows.append(row)
        data: dict[str, Any] = {"input_ids": [row.ids for row in rows]}
        if return_token_type_ids or (return_token_type_ids is None and "token_type_ids" in self.model_input_names):
            data["token_type_ids"] = [row.type_ids for row in rows]
        if return_special_tokens_mask:
            data["special_tokens_mask"] = [row.special for row in rows]
        if return_offsets_mapping:
            data["offset_mapping"] = [self._spans(row, row.ids, 0).offsets for row in rows]
        if return_length:
            data["length"] = [len(row.ids) for row in rows]
        padded = self.pad(
            data,
            padding=padding_strategy.value,
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            padding_side=padding_side,
            return_attention_mask=return_attention_mask,
        )
        data = dict(padded)
        if not rows and return_attention_mask is not False and "attention_mask" in self.model_input_names:
            data["attention_mask"] = []
        if return_overflowing_tokens and not return_tensors:  # rows of different lengths make no tensor
            data["overflowing_tokens"] = [row.overflowing for row in rows]
            data["num_truncated_tokens"] = [row.n_truncated for row in rows]
        left = (padding_side or self.padding_side) == "left"
        spans = [
            self._spans(row, ids, len(ids) - len(row.ids) if left else 0)
            for row, ids in zip(rows, data["input_ids"], strict=True)
        ]
        if not batched and return_tensors is None:
            data = {key: value[0] for key, value in data.items()}
        return BatchEncoding(data, encoding=spans or None, tensor_type=return_tensors)

    def _spans(self, row: Row, ids: list[int], left_pad: int) -> TokenSpans:
        return TokenSpans(self.vocab, ids, row.sources, row.type_ids, left_pad, row.n_sequences)

    def _pad(self, encoded_inputs: Any, *args: Any, padding_side: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """As in transformers, and `offset_mapping` is padded with `(0, 0)`."""
        padded: dict[str, Any] = super()._pad(encoded_inputs, *args, padding_side=padding_side, **kwargs)
        if "offset_mapping" in padded:
            missing = [(0, 0)] * (len(padded["input_ids"]) - len(padded["offset_mapping"]))
            spans = list(padded["offset_mapping"])
            left = (padding_side or self.padding_side) == "left"
            padded["offset_mapping"] = missing + spans if left else spans + missing
        return padded

    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False, **kwargs: Any
    ) -> list[str]:
        ids = self.encode(text, pair, add_special_tokens=add_special_tokens, **kwargs)
        return [self.vocab.text(token) for token in ids]

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        return self._affixes().count(pair)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return list(self._encode_plus(token_ids_0, token_ids_1)["input_ids"])

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return list(self._encode_plus(token_ids_0, token_ids_1, return_token_type_ids=True)["token_type_ids"])

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        if already_has_special_tokens:
            if token_ids_1 is not None:
                raise TokenizerError("ids that already have special tokens are one sequence: pass no token_ids_1")
            skipped = self._skipped()
            return [int(skipped(int(token))) for token in token_ids_0]
        encoded = self._encode_plus(token_ids_0, token_ids_1, return_special_tokens_mask=True)
        return list(encoded["special_tokens_mask"])
