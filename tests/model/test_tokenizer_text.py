"""Decoding, streaming and character offsets."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.stopping_criteria import StopStringCriteria

from tokenizer_cases import EVERY, EXACT, NASTY, TEXTS, as_kept, tokenizer
from transformers_llamacpp.errors import TokenizerError
from transformers_llamacpp.native.vocab import MATCHED_WHOLE
from transformers_llamacpp.token_spans import align

FAST = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
STORY = "Zoë's 👩‍👩‍👧 said: “naïve” 你好，世界!\n\n\tdone — 𝔘𝔫𝔦 end  \n x"


FORGETS = "self.token_cache[-1:]" not in inspect.getsource(TextStreamer.put)
"""Releases before 5.24 decode each line on its own, and SentencePiece drops the space a line begins with."""


class Collect(TextStreamer):
    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.chunks: list[str] = []

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.chunks.append(text)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_streaming_token_by_token_gives_the_text_of_one_decode(name: str, skip: bool) -> None:
    tok = tokenizer(name)
    for text in [STORY, *NASTY]:
        ids = tok.encode(text)
        streamer = Collect(tok, skip_special_tokens=skip)
        for token in ids:
            streamer.put(torch.tensor([token]))
        streamer.end()
        streamed, whole = "".join(streamer.chunks), tok.decode(ids, skip_special_tokens=skip)
        if FORGETS and tok.vocab.adds_space_prefix:
            streamed, whole = (re.sub(r"(?<=\n) *", "", one) for one in (streamed, whole))
        assert streamed == whole, (name, text)
        if name in EXACT:
            assert not any("\ufffd" in chunk for chunk in streamer.chunks), "half a character was shown"


def test_iterator_streamer() -> None:
    tok = tokenizer("gemma")
    ids = tok.encode(STORY)
    streamer = TextIteratorStreamer(tok, timeout=20, skip_special_tokens=True)

    def produce() -> None:
        for token in ids:
            streamer.put(torch.tensor([token]))
        streamer.end()

    thread = threading.Thread(target=produce)
    thread.start()
    assert "".join(streamer) == tok.decode(ids, skip_special_tokens=True) == STORY
    thread.join()


@pytest.mark.parametrize("name", EXACT)
def test_a_longer_decode_only_adds_to_a_shorter_one(name: str) -> None:
    tok = tokenizer(name)
    ids = tok.encode(STORY)
    whole = tok.decode(ids)
    for length in range(len(ids) + 1):
        assert whole.startswith(tok.decode(ids[:length]).rstrip("\ufffd"))


@pytest.mark.parametrize("name", EVERY)
def test_decode_takes_what_transformers_gives(name: str) -> None:
    tok = tokenizer(name)
    ids = tok.encode("the brown fox")
    text = tok.decode(ids)
    assert tok.decode(torch.tensor(ids)) == text
    assert tok.decode(torch.tensor([ids, ids])) == [text, text]
    assert tok.batch_decode([ids, ids[:1]]) == [text, tok.decode(ids[:1])]
    assert tok.decode([]) == ""
    assert tok.decode(ids[-1]) == tok.decode(ids[-1:])
    assert isinstance(tok.decode(torch.tensor(ids[-1])), str)
    with pytest.raises(TypeError, match="skip_specials"):
        tok.decode(ids, skip_specials=True)


def test_clean_up_is_off_unless_asked_for() -> None:
    tok = tokenizer("smollm2")
    ids = tok.encode("a . b , c 's")
    assert tok.decode(ids) == "a . b , c 's"
    assert tok.decode(ids, clean_up_tokenization_spaces=True) == "a. b, c's"


def test_tokens_to_string_and_back() -> None:
    for name in EXACT:
        tok = tokenizer(name)
        assert tok.convert_tokens_to_string(tok.tokenize(STORY)) == STORY
        assert tok.convert_tokens_to_string([]) == ""
    tok = tokenizer("smollm2")
    assert tok.convert_tokens_to_string(["Ġthe", "no such token", "<|im_end|>"]) == " theno such token<|im_end|>"


@pytest.mark.parametrize("name", EXACT)
def test_offsets_cut_the_text_without_gap_or_overlap(name: str) -> None:
    tok = tokenizer(name)

    def check(text: str) -> None:
        encoded = tok(text, return_offsets_mapping=True)
        spans = encoded["offset_mapping"]
        assert len(spans) == len(encoded["input_ids"])
        assert "".join(text[start:end] for start, end in spans) == text
        body = tok.encode(text, add_special_tokens=False)
        for token, (start, end) in zip(body, align(tok.vocab, text, body), strict=True):
            if tok.vocab.attr(token) & MATCHED_WHOLE:
                assert text[start:end] == tok.vocab.text(token)

    for text in NASTY:
        check(text)
    FAST(given(TEXTS.map(lambda text: as_kept(name, text)))(check))()


def test_offsets_where_the_vocabulary_changes_the_text() -> None:
    text = "Héllo  WORLD, 你 caf\u0301e 12?"
    tok = tokenizer("wpm")
    encoded = tok(text, return_offsets_mapping=True)
    spans = encoded["offset_mapping"]
    tokens = tok.convert_ids_to_tokens(encoded["input_ids"])
    assert spans[0] == spans[-1] == (0, 0)
    assert [text[a:b] for (a, b), token in zip(spans, tokens, strict=True) if token == "▁world"] == ["WORLD"]
    assert [text[a:b] for (a, b), token in zip(spans, tokens, strict=True) if token == "▁12"] == ["12"]
    assert [a for a, _ in spans[1:-1]] == sorted(a for a, _ in spans[1:-1])
    ugm = tokenizer("ugm")
    text = "the   H fox"
    encoded = ugm(text, return_offsets_mapping=True, add_special_tokens=False)
    found = [
        (token, text[a:b])
        for token, (a, b) in zip(
            ugm.convert_ids_to_tokens(encoded["input_ids"]), encoded["offset_mapping"], strict=True
        )
    ]
    assert ("<unk>", "H") in found and found[-1][1].strip() in ("fox", "x")


@FAST
@given(TEXTS)
def test_offsets_never_leave_the_text(text: str) -> None:
    for name in ("wpm", "ugm"):
        encoded = tokenizer(name)(text, return_offsets_mapping=True)
        assert len(encoded["offset_mapping"]) == len(encoded["input_ids"])
        assert all(0 <= start <= end <= len(text) for start, end in encoded["offset_mapping"])


def test_encodings_answer_where_characters_went() -> None:
    tok = tokenizer("gemma")
    encoded = tok(["Hello é 😀 world", "x"], padding=True)
    assert encoded.is_fast
    assert encoded.char_to_token(0, 0) == 1 and encoded.char_to_token(0, 9) == 4
    assert encoded.token_to_chars(0, 3).start == 7 and encoded.token_to_chars(0, 0) is None
    n_pad = len(encoded["input_ids"][0]) - 2
    assert encoded.char_to_token(1, 0) == n_pad + 1, "padding on the left moves the tokens"
    assert encoded.sequence_ids(1) == [None] * (n_pad + 1) + [0]
    assert encoded.tokens(0)[:2] == ["<bos>", "Hello"]
    pair = tok("a b", "c d")
    assert pair.sequence_ids() == [None, 0, 0, None, 1, 1]
    words = tok(["Hello", "world's", "end"], is_split_into_words=True)
    assert words.word_ids()[0] is None and sorted({w for w in words.word_ids() if w is not None}) == [0, 1, 2]
    span = words.word_to_tokens(1)
    assert tok.decode(words["input_ids"][span.start : span.end]) == " world's"
    assert (words.word_to_chars(2).start, words.word_to_chars(2).end) == (0, 3)


@pytest.mark.parametrize("name", ["smollm2", "spm", "bpe-qwen2"])
def test_stop_strings_of_generate(name: str) -> None:
    tok = tokenizer(name)
    if name != "smollm2" and not hasattr(StopStringCriteria, "_get_stop_string_matching_mode"):
        with pytest.raises(ValueError, match="unusual characters"):  # é is two tokens: too much before 5.24
            StopStringCriteria(tok, ["world é"])
        return
    stops = StopStringCriteria(tok, ["world é"])
    for text, stopped in (("hello world é", True), ("hello world", False), ("the é", False)):
        assert bool(stops(torch.tensor([tok.encode(text)]), None)) is stopped


def test_unknown_argument_of_a_call_is_an_error() -> None:
    with pytest.raises(TypeError, match="return_offset_mapping"):
        tokenizer("smollm2")("x", return_offset_mapping=True)
    with pytest.raises(TokenizerError, match="list of words"):
        tokenizer("smollm2")(5)


def test_printing_stays_short() -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print(tokenizer("gemma"))
    assert len(out.getvalue()) < 600 and "262144" in out.getvalue()
