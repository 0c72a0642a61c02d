"""Text that has to follow a grammar: a JSON schema, or GBNF. llguidance says which tokens may come next."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import llguidance
import numpy as np
import torch
from llguidance.gbnf_to_lark import any_to_lark
from transformers import LogitsProcessor

from ...native.vocab import TokenAttr
from .errors import ApiError

__all__ = ["Constraint", "check_grammar", "grammar_of"]

JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way of writing white space: a small model that may choose writes it without end."""

_tokenizers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def grammar_of(request: Any) -> str | None:
    """llguidance's grammar for `response_format` or `grammar_string`, `None` where neither asks for one. Raises `ApiError`."""
    wanted = request.response_format
    constrains = wanted is not None and wanted.type != "text"
    if constrains and request.grammar_string:
        raise ApiError(400, "grammar_string and response_format: one of them", "grammar_string", "invalid_value")
    if request.grammar_string:
        try:
            return str(llguidance.LLMatcher.grammar_from_lark(any_to_lark(request.grammar_string)))
        except Exception as error:  # the parser of GBNF raises what comes to hand
            raise ApiError(400, f"grammar_string: {error}", "grammar_string", "invalid_value") from None
    if not constrains:
        return None
    schema: Any = {"type": "object"}
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise ApiError(400, "response_format.json_schema is missing", "response_format.json_schema", "missing_field")
        schema = wanted.json_schema.schema_
        schema = {"not": {}} if schema is False else {} if schema is True else schema
    try:
        return str(llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON))
    except ValueError as error:
        raise ApiError(400, f"response_format: {error}", "response_format", "invalid_value") from None


def check_grammar(grammar: str, model: Any, name: str) -> None:
    """Compiles once, so that a grammar that cannot be is told before anything is computed. Raises `ApiError`."""
    matcher = _matcher(grammar, model)
    if matcher.is_error():
        raise ApiError(400, f"{name}: {matcher.get_error().splitlines()[0]}", name, "invalid_value")


class Constraint(LogitsProcessor):  # type: ignore[misc]
    """Leaves each row the tokens that may come next after what it wrote behind a prompt of `start` tokens.

    What a row wrote is read from its text each time, so that beams may change places and drafts may be given up.
    """

    def __init__(self, grammar: str, model: Any, start: int) -> None:
        self._grammar, self._model, self._start = grammar, model, start
        self._ends = frozenset(_ends(model))
        self._rows: list[tuple[Any, list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        while len(self._rows) < len(scores):
            self._rows.append((_matcher(self._grammar, self._model), []))
        allowed = np.stack([self._allowed(row, text) for row, text in enumerate(input_ids[:, self._start :].tolist())])
        return scores.masked_fill(~torch.from_numpy(allowed[:, : scores.shape[1]]), -torch.inf)

    def _allowed(self, row: int, text: list[int]) -> Any:
        matcher, seen = self._rows[row]
        if not self._ends.isdisjoint(text):  # it has ended, and padding follows
            return np.ones(_bits(self._model), np.bool_)
        known = 0
        while known < min(len(seen), len(text)) and seen[known] == text[known]:
            known += 1
        if known < len(seen):
            matcher.rollback(len(seen) - known)
        matcher.consume_tokens(text[known:])
        seen[known:] = text[known:]
        if matcher.is_error():
            raise ApiError(500, f"the grammar cannot be followed any further: {matcher.get_error().splitlines()[0]}",
                           code="grammar_failed")  # fmt: skip
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: _bits(self._model)].astype(np.bool_)


def _bits(model: Any) -> int:
    return int(model.config.vocab_size)


def _ends(model: Any) -> list[int]:
    ends = model.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or [])


def _matcher(grammar: str, model: Any) -> Any:
    return llguidance.LLMatcher(_tokenizer(model), grammar, log_level=0)


def _tokenizer(model: Any) -> Any:
    """llguidance's view of the vocabulary, made once for a model: it takes a second for the largest."""
    with _lock:
        if model not in _tokenizers:
            words = _Words(model)
            wrapper = llguidance.TokenizerWrapper(words)
            _tokenizers[model] = llguidance.LLTokenizer(
                wrapper, n_vocab=_bits(model), eos_token=_ends(model) or None, slices=llguidance.LLTokenizer.json_slices()
            )
        return _tokenizers[model]


class _Words:
    """What `llguidance.TokenizerWrapper` wants to know: the bytes of every token. 0xFF marks those that are no text."""

    def __init__(self, model: Any) -> None:
        vocab = model.native.vocab
        special = TokenAttr.CONTROL | TokenAttr.UNKNOWN | TokenAttr.UNUSED
        marks = (b"\xff" if vocab.attr(token) & special else b"" for token in range(vocab.n_tokens))
        self.tokens = [mark + vocab.piece(token) for token, mark in enumerate(marks)]
        self.tokens += [b""] * (_bits(model) - len(self.tokens))
        self.special_token_ids = [token for token in range(vocab.n_tokens) if vocab.attr(token) & special]
        ends = _ends(model)
        self.eos_token_id = ends[0] if ends else vocab.n_tokens - 1
        self.bos_token_id = vocab.bos_id
        self._vocab = vocab

    def __call__(self, text: Any) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return list(self._vocab.tokenize(text, add_special=False, parse_special=False))
