"""Batches: padding, truncation, pairs, words, masks, and the special tokens around a row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithPadding
from transformers.tokenization_utils_base import TruncationStrategy

from tokenizer_cases import EVERY, path, raw, tokenizer
from transformers_llamacpp.errors import TokenizerError, UnsupportedFeatureError
from transformers_llamacpp.token_rows import truncation_plan
from transformers_llamacpp.tokenizer import LlamaCppTokenizer

TEXTS = ["the quick brown fox", "hello", "", "你好 world and more words"]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", EVERY)
def test_padding(name: str, side: str) -> None:
    tok = tokenizer(name)
    if tok.pad_token is None:
        pytest.fail("every vocabulary here has EOS, and so a padding token")
    rows = [tok(text)["input_ids"] for text in TEXTS]
    longest = max(map(len, rows))
    batch = tok(TEXTS, padding=True, padding_side=side, return_tensors="pt", return_special_tokens_mask=True)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == torch.int64
    assert batch.input_ids.shape == batch.attention_mask.shape == (len(TEXTS), longest)
    for row, ids, mask, special in zip(
        rows, batch.input_ids.tolist(), batch.attention_mask.tolist(), batch.special_tokens_mask.tolist(), strict=True
    ):
        pad = longest - len(row)
        expected = [tok.pad_token_id] * pad + row if side == "left" else row + [tok.pad_token_id] * pad
        assert ids == expected
        assert mask == ([0] * pad + [1] * len(row) if side == "left" else [1] * len(row) + [0] * pad)
        assert all(special[i] for i in range(longest) if not mask[i])


def test_padding_is_on_the_left_unless_asked_otherwise() -> None:
    tok = tokenizer("smollm2")
    assert tok.padding_side == "left"
    batch = tok(["a b c d", "a"], padding=True)
    assert batch["attention_mask"][1] == [0, 0, 0, 1]
    assert tok("a", padding="max_length", max_length=5)["attention_mask"] == [0, 0, 0, 0, 1]
    assert len(tok("a", padding=True, pad_to_multiple_of=8)["input_ids"]) == 8
    right = LlamaCppTokenizer.from_pretrained(path("smollm2"), padding_side="right")
    assert right(["a b c d", "a"], padding=True)["attention_mask"][1] == [1, 0, 0, 0]


def test_offsets_and_spans_are_padded_too() -> None:
    tok = tokenizer("smollm2")
    for side in ("left", "right"):
        batch = tok(["a b c", "a"], padding=True, padding_side=side, return_offsets_mapping=True)
        expected = [(0, 0), (0, 0), (0, 1)] if side == "left" else [(0, 1), (0, 0), (0, 0)]
        assert batch["offset_mapping"][1] == expected
        assert batch.encodings[1].offsets == expected
        assert batch.encodings[1].attention_mask == batch["attention_mask"][1]


@pytest.mark.parametrize("kind", ["pt", "np", None])
def test_tensors(kind: str | None) -> None:
    tok = tokenizer("gemma")
    one, many = tok("hello", return_tensors=kind), tok(["hello"], return_tensors=kind)
    if kind is None:
        assert many["input_ids"] == [one["input_ids"]]
        return
    assert isinstance(one.input_ids, torch.Tensor if kind == "pt" else np.ndarray)
    assert one.input_ids.shape == many.input_ids.shape == (1, 2)
    assert tok.encode("hello", return_tensors=kind, add_special_tokens=False).shape == (1, 1)
    empty = tokenizer("smollm2")("", return_tensors=kind)
    assert empty.input_ids.shape == empty.attention_mask.shape == (1, 0)


def test_empty_batch_and_empty_text() -> None:
    tok = tokenizer("smollm2")
    assert dict(tok([])) == {"input_ids": [], "attention_mask": []}
    assert dict(tok("")) == {"input_ids": [], "attention_mask": []}
    assert dict(tok([""])) == {"input_ids": [[]], "attention_mask": [[]]}
    assert tok.batch_decode([]) == []


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gemma", "wpm", "ugm", "smollm2"])
def test_truncation_keeps_the_special_tokens(name: str, side: str) -> None:
    tok = LlamaCppTokenizer.from_pretrained(path(name), truncation_side=side)
    text = "the quick brown fox and the lazy dog"
    full, body = tok.encode(text), tok.encode(text, add_special_tokens=False)
    around = tok.num_special_tokens_to_add()
    assert len(full) == len(body) + around
    cut = tok(text, truncation=True, max_length=around + 3)["input_ids"]
    kept = body[-3:] if side == "left" else body[:3]
    assert cut == [*full[: full.index(body[0])], *kept, *full[full.index(body[0]) + len(body) :]]
    assert tok(text, max_length=around + 3)["input_ids"] == cut, "max_length alone truncates, as in transformers"
    assert tok(text, truncation=True, max_length=999)["input_ids"] == full
    rest = tok(text, truncation=True, max_length=around + 3, stride=1, return_overflowing_tokens=True)
    assert rest["num_truncated_tokens"] == len(body) - 3
    assert rest["overflowing_tokens"] == (body[: len(body) - 3 + 1] if side == "left" else body[2:])


@pytest.mark.parametrize("n_first", range(6))
@pytest.mark.parametrize("n_second", range(6))
def test_longest_first_takes_from_the_longer(n_first: int, n_second: int) -> None:
    for excess in range(n_first + n_second + 3):
        lengths = [n_first, n_second]
        for _ in range(excess):  # the definition: one token at a time from the longer sequence
            if max(lengths):
                lengths[0 if lengths[0] >= lengths[1] else 1] -= 1
        first, second = truncation_plan(n_first, n_second, excess, TruncationStrategy.LONGEST_FIRST, "right")
        assert len(first) + len(second) == sum(lengths)
        assert abs(len(first) - lengths[0]) <= 1 and abs(len(second) - lengths[1]) <= 1


def test_pairs() -> None:
    tok = tokenizer("wpm")
    cls, sep = tok.cls_token_id, tok.sep_token_id
    one, two = tok.encode("hello", add_special_tokens=False), tok.encode("the world", add_special_tokens=False)
    encoded = tok("hello", "the world", return_token_type_ids=True, return_special_tokens_mask=True)
    assert encoded["input_ids"] == [cls, *one, sep, *two, sep]
    assert encoded["token_type_ids"] == [0] * (len(one) + 2) + [1] * (len(two) + 1)
    assert encoded["special_tokens_mask"] == [1, *[0] * len(one), 1, *[0] * len(two), 1]
    assert tok([("hello", "the world")])["input_ids"] == [encoded["input_ids"]]
    assert tok(["hello"], ["the world"])["input_ids"] == [encoded["input_ids"]]
    assert tok.encode("hello", "the world") == encoded["input_ids"]
    assert tok.build_inputs_with_special_tokens(one, two) == encoded["input_ids"]
    assert tok.create_token_type_ids_from_sequences(one, two) == encoded["token_type_ids"]
    assert tok.get_special_tokens_mask(one, two) == encoded["special_tokens_mask"]
    assert (
        tok.get_special_tokens_mask(encoded["input_ids"], already_has_special_tokens=True)
        == (encoded["special_tokens_mask"])
    )
    assert tok.num_special_tokens_to_add(pair=True) == 3
    short = tok("hello", "the world", truncation="only_second", max_length=len(one) + 4)["input_ids"]
    assert short == [cls, *one, sep, two[0], sep]
    with pytest.raises(TokenizerError, match="batch"):
        tok(["hello", "x"], ["one"])
    gemma = tokenizer("gemma")
    assert gemma("a", "b")["input_ids"] == [2, *gemma.encode("a")[1:], 2, *gemma.encode("b")[1:]]


@pytest.mark.parametrize("name", ["smollm2", "gemma", "spm", "bpe-qwen2", "rwkv"])
def test_words_are_the_text_joined_by_spaces(name: str) -> None:
    tok = tokenizer(name)
    words = ["the", "quick", "brown", "fox's", "你好"]
    encoded = tok(words, is_split_into_words=True, add_special_tokens=False, return_offsets_mapping=True)
    assert tok.decode(encoded["input_ids"]) == " ".join(words)
    found: dict[int, str] = {}
    for word, (start, end) in zip(encoded.word_ids(), encoded["offset_mapping"], strict=True):
        found[word] = found.get(word, "") + words[word][start:end]
    assert list(found.values()) == words
    batch = tok([words, ["x"]], is_split_into_words=True, add_special_tokens=False)
    assert batch["input_ids"][0] == encoded["input_ids"] and batch["input_ids"][1] == tok.encode(
        "x", add_special_tokens=False
    )


def test_ids_instead_of_text() -> None:
    tok = tokenizer("gemma")
    assert tok([5, 6])["input_ids"] == [2, 5, 6]
    assert tok([[5, 6], [7]], add_special_tokens=False)["input_ids"] == [[5, 6], [7]]
    assert tok.encode([5, 6], add_special_tokens=False) == [5, 6]
    assert tok([2, 5])["input_ids"] == [2, 2, 5], "only BOS written in a text counts as there already"


def test_pad_and_collator() -> None:
    tok = tokenizer("smollm2")
    features = [dict(tok(text)) for text in ("one two three", "one")]
    batch = DataCollatorWithPadding(tok)(features)
    assert batch["attention_mask"].tolist()[1][0] == 0 and batch["input_ids"].shape[0] == 2


@pytest.mark.parametrize("name", EVERY)
def test_special_tokens_are_what_llama_cpp_hides(name: str) -> None:
    tok, native = tokenizer(name), raw(name)
    hidden = {t for t in range(native.n_tokens) if native.piece(t, True) and not native.piece(t, False)}
    named = {getattr(tok, f"{key}_id") for key in tok.special_tokens_map}
    assert set(tok.all_special_ids) == hidden | named
    assert tok.convert_ids_to_tokens(tok.all_special_ids) == tok.all_special_tokens
    assert set(tok.additional_special_tokens_ids) == hidden - named
    assert tok.extra_special_tokens == tok.additional_special_tokens
    assert tok.decode(tok.all_special_ids, skip_special_tokens=True) == ""
    assert tok.convert_ids_to_tokens(tok.all_special_ids, skip_special_tokens=True) == []


def test_names_of_special_tokens() -> None:
    smol, gemma = tokenizer("smollm2"), tokenizer("gemma")
    assert (smol.bos_token_id, smol.eos_token_id, smol.pad_token_id, smol.unk_token_id) == (1, 2, 2, 0)
    assert (smol.eos_token, smol.pad_token) == ("<|im_end|>", "<|im_end|>")
    assert (gemma.bos_token_id, gemma.eos_token_id, gemma.pad_token_id, gemma.unk_token_id) == (2, 1, 0, 3)
    assert tokenizer("bpe-gpt-2").pad_token_id == tokenizer("bpe-gpt-2").eos_token_id, "no padding token: EOS"
    assert tokenizer("bpe-gpt-2").unk_token_id is None
    assert smol.model_max_length == 8192 and gemma.model_max_length == 32768
    assert "gpt2" in type(smol).__name__.lower() and "llama" in type(gemma).__name__.lower()
    own = LlamaCppTokenizer.from_pretrained(path("smollm2"), pad_token="<|endoftext|>", model_max_length=7)
    assert (own.pad_token_id, own.model_max_length) == (0, 7)
    own.pad_token_id = 5
    assert own.pad_token == smol.convert_ids_to_tokens(5)
    own.additional_special_tokens = ["Ġthe"]
    the = own.convert_tokens_to_ids("Ġthe")
    assert the in own.all_special_ids and own.decode([the], skip_special_tokens=True) == ""
    with pytest.raises(TypeError, match="padding_sides"):
        LlamaCppTokenizer.from_pretrained(path("smollm2"), padding_sides="left")


def test_the_vocabulary_is_fixed() -> None:
    tok = LlamaCppTokenizer.from_pretrained(path("smollm2"))
    assert tok.add_tokens(["Ġthe"]) == 0
    assert tok.add_special_tokens({"pad_token": "<|endoftext|>"}) == 0 and tok.pad_token_id == 0
    with pytest.raises(UnsupportedFeatureError, match="new-token"):
        tok.add_tokens(["new-token"])
    assert len(tok) == 49152


def test_bos_and_eos_can_be_switched() -> None:
    off = LlamaCppTokenizer.from_pretrained(path("gemma"), add_bos_token=False, add_eos_token=True)
    assert off.encode("hello") == [*tokenizer("gemma").encode("hello")[1:], 1]
    on = LlamaCppTokenizer.from_pretrained(path("smollm2"), add_bos_token=True)
    assert on.encode("hello") == [1, *tokenizer("smollm2").encode("hello")]
