"""`NativeVocab` reads every number llama.cpp answers before it believes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import pytest

import tiny_vocab_gguf
from tokenizer_cases import path
from transformers_llamacpp.errors import ModelLoadError, TokenizerError
from transformers_llamacpp.native.vocab import NativeVocab, open_vocab
from transformers_llamacpp.tokenizer import LlamaCppTokenizer

pytestmark = pytest.mark.once

OVERFLOW = -(2**31)


@pytest.fixture
def long_token(tmp_path: Path) -> Path:
    """An SPM vocabulary with one token of 3,000 bytes."""
    file = tmp_path / "long.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(8)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "é" * 1500]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * 256, gguf.TokenType.USER_DEFINED])
    writer.add_add_space_prefix(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def test_answers_that_do_not_fit_the_first_buffer(long_token: Path) -> None:
    vocab = open_vocab(long_token)
    ids = vocab.tokenize("é" * 3000, add_special=False)
    assert ids == [259, 259]
    assert vocab.piece(259) == b"\xc3\xa9" * 1500
    assert vocab.detokenize(ids) == b"\xc3\xa9" * 3000
    assert LlamaCppTokenizer.from_vocab(vocab).decode(ids) == "é" * 3000


def test_more_tokens_than_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, sizes = open_vocab(path("spm")), []

    def tokenize(_vocab: Any, _data: bytes, _length: int, buffer: Any, size: int, *_flags: bool) -> int:
        sizes.append(size)
        if size < 100:
            return -100
        buffer[:100] = [5] * 100
        return 100

    monkeypatch.setattr(llama_cpp, "llama_tokenize", tokenize)
    assert vocab.tokenize("abc") == [5] * 100 and sizes[-1] == 100 and len(sizes) == 2


@pytest.mark.parametrize("answer", [OVERFLOW, -1_000_000, 1_000_000])
def test_answers_that_mean_nothing(monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
    vocab = open_vocab(path("spm"))
    for name in ("llama_tokenize", "llama_detokenize", "llama_token_to_piece"):
        monkeypatch.setattr(llama_cpp, name, lambda *_: answer)
    with pytest.raises(TokenizerError, match=str(answer)):
        vocab.tokenize("abc")
    with pytest.raises(TokenizerError, match=str(answer)):
        vocab.detokenize([5])
    with pytest.raises(TokenizerError, match=str(answer)):
        vocab.piece(5)


def test_ids_that_are_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = open_vocab(path("spm"))

    def tokenize(_vocab: Any, _data: bytes, _length: int, buffer: Any, *_rest: Any) -> int:
        buffer[0] = -1
        return 1

    monkeypatch.setattr(llama_cpp, "llama_tokenize", tokenize)
    with pytest.raises(TokenizerError, match="no unknown token"):
        vocab.tokenize("abc")


def test_null_pointers() -> None:
    with pytest.raises(ModelLoadError, match="NULL"):
        NativeVocab(None)
    with pytest.raises(ModelLoadError, match="NULL"):
        NativeVocab(0)


def test_a_model_without_vocabulary(tmp_path: Path) -> None:
    vocab = open_vocab(tiny_vocab_gguf.write("none", tmp_path / "none.gguf"))
    assert vocab.texts() == [] and vocab.attrs() == [] and vocab.detokenize([]) == b""
    for call in (lambda: vocab.tokenize("x"), lambda: vocab.text(0), lambda: vocab.attr(0), lambda: vocab.piece(0)):
        with pytest.raises(TokenizerError):
            call()
    assert vocab.bos_id is None and vocab.eog_ids == ()
