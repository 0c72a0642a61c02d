"""Token ids are llama.cpp's own, for every kind of vocabulary and every text."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tokenizer_cases import EVERY, EXACT, NASTY, REAL, SURROGATES, TEXTS, as_kept, path, raw, tokenizer
from transformers_llamacpp.errors import TokenizerError
from transformers_llamacpp.native.vocab import VocabType, open_vocab

FAST = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def same_as_llama_cpp(name: str, text: str) -> None:
    tok, native = tokenizer(name), raw(name)
    for parse in (True, False):
        for add in (True, False):
            expected = native.ids(text, add, parse)
            plain = native.ids(text, False, parse)
            if add and expected != plain and plain[:1] == expected[:1] == [native.bos]:
                expected = expected[1:]  # BOS is written in the text: llama.cpp doubles it, we do not
            found = tok(text, add_special_tokens=add, split_special_tokens=not parse)
            assert found["input_ids"] == expected, (name, text, add, parse)
            assert found["attention_mask"] == [1] * len(expected)
            assert tok.encode(text, add_special_tokens=add, split_special_tokens=not parse) == expected


@pytest.mark.parametrize("name", EVERY)
def test_nasty_texts(name: str) -> None:
    for text in NASTY:
        same_as_llama_cpp(name, text)


@pytest.mark.parametrize("name", EVERY)
def test_any_text(name: str) -> None:
    @FAST
    @given(TEXTS)
    def check(text: str) -> None:
        same_as_llama_cpp(name, text)

    check()


@pytest.mark.parametrize("name", EVERY)
def test_special_tokens_of_the_vocabulary_in_text(name: str) -> None:
    tok = tokenizer(name)
    for token in tok.all_special_tokens[:40]:
        for text in (token, f"a{token}b", f"{token} x", f" {token}{token}", f"x {token}\n"):
            same_as_llama_cpp(name, text)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("text", SURROGATES)
def test_lone_surrogates_count_as_replacement_characters(name: str, text: str) -> None:
    tok = tokenizer(name)
    replaced = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    assert tok.encode(text) == raw(name).ids(replaced, True, True)
    if name in EXACT:  # BERT drops the character, as its own tokenizer does
        offsets = tok(text, return_offsets_mapping=True)["offset_mapping"]
        assert "".join(text[start:end] for start, end in offsets) == text


@pytest.mark.parametrize("name", EXACT)
def test_decoding_gives_the_text_back(name: str) -> None:
    tok = tokenizer(name)

    def check(text: str) -> None:
        kept = as_kept(name, text)
        assert tok.decode(tok.encode(text, add_special_tokens=False)) == kept
        plain = tok.encode(text, split_special_tokens=True)
        if name == "rwkv":  # its longest match knows no special tokens, and finds them in plain text too
            kept = kept.replace("<s>", "")
        assert tok.decode(plain, skip_special_tokens=True) == kept

    for text in NASTY:
        check(text)
    FAST(given(TEXTS)(check))()


def test_bert_and_t5_give_back_what_their_vocabulary_keeps() -> None:
    assert (
        tokenizer("wpm").decode(tokenizer("wpm").encode("Hello, world!"), skip_special_tokens=True) == "hello , world !"
    )
    ugm = tokenizer("ugm")
    assert ugm.decode(ugm.encode("the  brown fox"), skip_special_tokens=True) == "the brown fox"


@pytest.mark.parametrize("name", EVERY)
def test_every_id_has_a_string_that_leads_back(name: str) -> None:
    tok = tokenizer(name)
    tokens = tok.convert_ids_to_tokens(list(range(len(tok))))
    assert len(tokens) == raw(name).n_tokens == tok.vocab_size
    assert all(isinstance(token, str) and token for token in tokens)
    assert tok.convert_tokens_to_ids(tokens) == list(range(len(tok)))
    assert tok.get_vocab() == {token: index for index, token in enumerate(tokens)}
    assert tok.convert_ids_to_tokens(3) == tokens[3] and tok._convert_id_to_token(3) == tokens[3]


@pytest.mark.parametrize("name", EVERY)
def test_pieces_are_llama_cpps(name: str) -> None:
    vocab, native = tokenizer(name).vocab, raw(name)
    for token in range(0, vocab.n_tokens, 1 + vocab.n_tokens // 3000):
        for special in (True, False):
            expected = native.piece(token, special)
            if expected or not special:
                assert vocab.token_to_piece(token, special) == expected
        assert vocab.is_eog(token) == (token in vocab.eog_ids)


@pytest.mark.parametrize("name", EVERY)
def test_ids_outside_the_vocabulary_are_an_error_with_the_numbers(name: str) -> None:
    tok = tokenizer(name)
    for token in (-1, -100, len(tok), 2**31 - 1):
        for call in (tok.decode, tok.convert_ids_to_tokens, tok.vocab.piece, tok.vocab.attr, tok.vocab.is_eog):
            with pytest.raises(TokenizerError, match=str(len(tok))):
                call(token)
        with pytest.raises(TokenizerError, match=str(token)):
            tok([token])


def test_plain_text_finds_the_token_that_spells_it() -> None:
    tok = tokenizer("smollm2")
    assert tok.convert_tokens_to_ids(" the") == tok.convert_tokens_to_ids("Ġthe") == tok.get_vocab()["Ġthe"]
    assert tok.convert_tokens_to_ids("no such token") == tok.unk_token_id
    assert tokenizer("spm").convert_tokens_to_ids(" the") == tokenizer("spm").get_vocab()["▁the"]
    assert tokenizer("rwkv").convert_tokens_to_ids("no such token") is None


@pytest.mark.parametrize("name", REAL)
def test_detokenize_is_the_inverse_on_ordinary_text(name: str) -> None:
    vocab = open_vocab(path(name))
    ids = vocab.tokenize("Grüße, 世界! It costs 12 €.", add_special=False, parse_special=False)
    assert vocab.detokenize(ids).decode() == "Grüße, 世界! It costs 12 €."
    assert vocab.type is (VocabType.BPE if name == "smollm2" else VocabType.SPM)
    vocab.close()
