"""What the tokenizer tests share: vocabularies by name, nasty texts, and llama.cpp asked without our code between."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp
from hypothesis import strategies as st

import models
import tiny_vocab_gguf
from transformers_llamacpp.native.vocab import VocabType
from transformers_llamacpp.tokenizer import LlamaCppTokenizer

REAL = ("smollm2", "gemma")
EVERY = (*tiny_vocab_gguf.KINDS, *REAL)
EXACT = tuple(name for name in EVERY if name not in ("wpm", "ugm"))
"""Vocabularies that lose nothing of a text."""

NASTY = [
    "",
    " ",
    "  ",
    "\n",
    "\t\ttabs\tand  double  spaces   ",
    " leading space",
    "trailing space ",
    "Hello, world!",
    "naïve façade Zoë ẞß ﬁ ﬂ Å",
    "e\u0301 a\u0308 combining",
    "你好世界，这是一个测试。",
    "こんにちは 안녕하세요 สวัสดี مرحبا שלום",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🙂",
    "0 12 123 1234 12345 3.14159 1,000,000 ①②",
    "nul\0inside\0",
    "\x7f\x01\x1b[31m",
    "\ufeffbom \u200b zero\u200dwidth \u00a0nbsp \u3000wide \u2028line",
    "don't I'll we've it's 's 't",
    "def f(x):\n    return x  # two\n\n\n\r\n\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_end|> space after a special token",
    "a<|im_end|>b <|im_start|> c",
    "<tool>x</tool> <tool> y [UserDefined][UserDefined] z",
    "</s> <s> <unk> <pad> [CLS] [SEP]",
    "<0x41> <0x0A> ▁ Ġ Ċ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff \uffff",
    "ÿþ\u0080\u009f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    " " * 70,
    "\n" * 35,
    "a b" * 40,
]
SURROGATES = ["\ud800", "a\udfffb", "\ud83d \ude00", "x\udc80" * 5]

ALPHABET = st.one_of(
    st.characters(exclude_categories=["Cs"]),
    st.sampled_from("abcdefgh  \n\t019.,!?'▁ĠéÅ你好🙂\u0301\u200d"),
)
TEXTS = st.lists(
    st.one_of(
        st.text(ALPHABET, max_size=12),
        st.sampled_from([" ", "  ", "the", " the", *tiny_vocab_gguf.CONTROL, *tiny_vocab_gguf.USER_DEFINED]),
    ),
    max_size=6,
).map("".join)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="vocab-")


@functools.cache
def path(name: str) -> Path:
    """The GGUF of a vocabulary of `EVERY`, made once a session."""
    if name == "smollm2":
        return models.smollm2()
    if name == "gemma":
        return models.gemma()
    return tiny_vocab_gguf.write(name, Path(_folder().name) / f"{name}.gguf")


@functools.cache
def tokenizer(name: str) -> LlamaCppTokenizer:
    """Shared: a test that changes its tokenizer makes one of its own."""
    return LlamaCppTokenizer.from_pretrained(path(name))


class Raw:
    """llama.cpp itself."""

    def __init__(self, name: str) -> None:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(str(path(name)).encode(), params)
        assert self.model
        self.vocab: Any = llama_cpp.llama_model_get_vocab(self.model)
        self.n_tokens = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.bos = llama_cpp.llama_vocab_bos(self.vocab)

    def ids(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode("utf-8")
        buffer = (ctypes.c_int32 * (2 * len(data) + 16))()
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), buffer, len(buffer), add_special, parse_special)
        assert count >= 0
        return list(buffer[:count])

    def piece(self, token: int, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(1024)
        count = llama_cpp.llama_token_to_piece(self.vocab, token, buffer, 1024, 0, special)
        assert count >= 0
        return buffer.raw[:count]


@functools.cache
def raw(name: str) -> Raw:
    return Raw(name)


@functools.cache
def _missing_bytes(name: str) -> bytes:
    """Bytes a byte-level vocabulary has no token for: llama.cpp drops them. SmolLM2 lacks a few, for rare planes."""
    tok = tokenizer(name)
    if not tok.vocab.spells_bytes:
        return b""
    known, letters = set(tok.get_vocab()), tiny_vocab_gguf.byte_to_char()
    return bytes(byte for byte, letter in letters.items() if letter not in known)


def as_kept(name: str, text: str) -> str:
    """What the tokens of `text` can give back, for the vocabularies of `EXACT`."""
    tok = tokenizer(name)
    if tok.vocab.type is VocabType.SPM:
        return text.replace("▁", " ")  # SentencePiece spells them alike
    return text.encode().translate(None, _missing_bytes(name)).decode("utf-8", "replace")
