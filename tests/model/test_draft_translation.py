"""Drafts between two vocabularies: the same text on both sides, whatever was written and wherever it was cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenizer_cases import NASTY, TEXTS, tokenizer
from transformers_llamacpp.decoding.drafting import translation
from transformers_llamacpp.decoding.drafting.translation import Translator

pytestmark = pytest.mark.once

PAIRS = [("smollm2", "gemma"), ("gemma", "smollm2"), ("smollm2", "spm"), ("spm", "smollm2"), ("gemma", "spm")]
"""Target and assistant. SmolLM2 adds no BOS and spells bytes; Gemma adds one; "spm" puts a space before each text too."""

STORY = (
    "def area(r: float) -> float:\n    return 3.14159 * r ** 2  # π r²\n\n\n"
    "Zoë's 👩‍👩‍👧 said: “naïve” 你好，世界!\n\n\tdone — 𝔘𝔫𝔦 end  \n x 我们都喜欢吃苹果。\r\n"
    "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\nIt is 12345.67 🙂🙂.<|im_end|>\n"
)
FAST = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def pair(names: tuple[str, str]) -> tuple[Any, Any, Translator]:
    target, assistant = (tokenizer(name) for name in names)
    return target, assistant, Translator(target, assistant)


def bos(tok: Any) -> list[int]:
    return tok.encode("")


def text_of(tok: Any, ids: list[int]) -> str:
    n = len(bos(tok))
    assert ids[:n] == bos(tok)
    return tok.decode(ids[n:])


@pytest.mark.parametrize("names", PAIRS)
def test_every_beginning_of_a_text_is_the_same_text(names: tuple[str, str]) -> None:
    target, assistant, translator = pair(names)
    tokens = target.encode(STORY * 3)
    for length in range(len(bos(target)), len(tokens) + 1):
        complete = target.decode(tokens[len(bos(target)) : length]).rstrip("\ufffd")
        assert text_of(assistant, translator.to_assistant(tokens[:length])) == complete
    assert complete == STORY * 3


@pytest.mark.parametrize("names", PAIRS)
def test_in_pieces_as_in_one_but_for_odd_cuts(names: tuple[str, str]) -> None:
    """Nearly always it is how the assistant's own tokenizer cuts the whole text."""
    target, assistant, translator = pair(names)
    tokens = target.encode(STORY * 4)
    equal = 0
    for length in range(1, len(tokens) + 1):
        whole = target.decode(tokens[len(bos(target)) : length]).rstrip("\ufffd")
        equal += translator.to_assistant(tokens[:length]) == bos(assistant) + assistant.encode(whole, add_special_tokens=False)
    assert equal >= 0.97 * len(tokens)


@pytest.mark.parametrize("names", PAIRS)
def test_what_was_answered_changes_near_its_end_only(names: tuple[str, str]) -> None:
    target, _, translator = pair(names)
    tokens, before = target.encode(STORY * 3), list[int]()
    for length in range(1, len(tokens) + 1):
        answer = translator.to_assistant(tokens[:length])
        kept = next((i for i, (a, b) in enumerate(zip(before, answer, strict=False)) if a != b), len(before))
        assert len(before) - kept <= 16
        before = answer


class Counting:
    """A tokenizer that remembers how much it was asked to do."""

    def __init__(self, tok: Any) -> None:
        self.tok, self.calls, self.longest = tok, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tok, name)

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        self.calls, self.longest = self.calls + 1, max(self.longest, len(text))
        return self.tok.encode(text, **kwargs)

    def decode(self, ids: list[int], **kwargs: Any) -> str:
        self.calls, self.longest = self.calls + 1, max(self.longest, len(ids))
        return self.tok.decode(ids, **kwargs)


@pytest.mark.parametrize("names", PAIRS)
def test_work_does_not_grow_with_the_text(names: tuple[str, str]) -> None:
    target, assistant = (Counting(tokenizer(name)) for name in names)
    translator = Translator(target, assistant)  # type: ignore[arg-type]
    tokens = target.tok.encode(STORY * 8)
    translator.to_assistant(tokens[:300])
    calls = []
    for length in range(301, len(tokens)):
        target.calls = assistant.calls = target.longest = assistant.longest = 0
        answer = translator.to_assistant(tokens[:length])
        assert target.longest <= translation.LONG + translation.ANCHOR + 8, "tokens decoded"
        assert assistant.longest <= 600, "characters encoded"
        calls.append(target.calls + assistant.calls)
        translator.to_target(tokens[:length], answer[-3:])
        assert max(target.longest, assistant.longest) <= 600
        assert target.calls + assistant.calls <= calls[-1] + 40
    assert max(calls) <= 60 and sum(calls) <= 6 * len(calls)


@pytest.mark.parametrize("names", [("smollm2", "gemma"), ("gemma", "smollm2"), ("spm", "smollm2"), ("smollm2", "spm")])
def test_a_right_guess_is_translated_right(names: tuple[str, str]) -> None:
    """The assistant goes on as the text does: its draft is what the target's own tokens are."""
    target, assistant, translator = pair(names)
    text = "The quick brown fox jumps over the lazy dog. Then it sleeps for 12 hours, and so on.\n\tdef f(x): return x\n" * 3
    tokens, theirs = target.encode(text), assistant.encode(text)
    right = wrong = 0
    for length in range(len(bos(target)), len(tokens)):
        known = translator.to_assistant(tokens[:length])
        if theirs[: len(known)] != known:
            continue
        draft = translator.to_target(tokens[:length], theirs[len(known) : len(known) + 6])
        same = sum(1 for _ in itertools.takewhile(lambda ab: ab[0] == ab[1], zip(draft, tokens[length:], strict=False)))
        right, wrong = right + same, wrong + len(draft) - same
        assert text.startswith(target.decode(tokens[len(bos(target)) : length] + draft).rstrip("\ufffd"))
    assert right > 100 and wrong < 0.35 * right


@pytest.mark.parametrize("names", PAIRS)
def test_half_a_character_is_continued(names: tuple[str, str]) -> None:
    target, assistant, translator = pair(names)
    for text in ("Oh 🙂 yes", "𝔘𝔫𝔦", "x 你好"):
        tokens = target.encode(text)
        for length in range(len(bos(target)) + 1, len(tokens)):
            known = translator.to_assistant(tokens[:length])
            said = target.decode(tokens[len(bos(target)) : length]).rstrip("\ufffd")
            assert text_of(assistant, known) == said
            theirs = assistant.encode("\n" + text[len(said) :], add_special_tokens=False)[
                len(assistant.encode("\n")) - len(bos(assistant)) :
            ]
            draft = translator.to_target(tokens[:length], theirs)
            if target.decode(tokens[len(bos(target)) : length]) != said:
                assert draft == tokens[length:]
            assert not draft or target.decode(tokens[len(bos(target)) : length] + draft) == text


@pytest.mark.parametrize("names", PAIRS)
def test_half_a_character_is_not_drafted(names: tuple[str, str]) -> None:
    target, assistant, translator = pair(names)
    tokens = target.encode("so:")
    translator.to_assistant(tokens)
    theirs = assistant.encode("so: 𝔘𝔫", add_special_tokens=False)[len(assistant.encode("so:", add_special_tokens=False)) :]
    for length in range(len(theirs)):
        draft = translator.to_target(tokens, theirs[:length])
        written = target.decode(tokens[len(bos(target)) :] + draft)
        assert "so: 𝔘𝔫".startswith(written) and len(written) >= 3


def test_the_end_is_the_end() -> None:
    target, assistant, translator = pair(("smollm2", "gemma"))
    tokens = target.encode("That is all")
    dot = assistant.encode(".", add_special_tokens=False)
    end = assistant.eos_token_id
    assert translator.to_target(tokens, [*dot, end, *dot]) == [*target.encode("."), target.eos_token_id]
    assert translator.to_target(tokens, [end]) == [target.eos_token_id]
    assert translator.to_target(tokens, []) == []
    target.eos_token = None
    try:
        assert Translator(target, assistant).to_target(tokens, [*dot, end]) == target.encode(".")
    finally:
        target.eos_token = "<|im_end|>"


def test_special_tokens_go_by_their_text() -> None:
    target, assistant, translator = pair(("smollm2", "gemma"))
    tokens = target.encode("<|im_start|>user\nHi")
    assert text_of(assistant, translator.to_assistant(tokens)) == "<|im_start|>user\nHi"
    letters = assistant.encode("!<|im_end|>\n", add_special_tokens=False)
    assert translator.to_target(tokens, letters) == target.encode("!<|im_end|>\n")  # one token again
    dot = assistant.encode(".", add_special_tokens=False)
    turn = assistant.convert_tokens_to_ids("<start_of_turn>")
    assert turn in assistant.all_special_ids
    assert translator.to_target(tokens, [*dot, turn, *dot]) == target.encode(".")  # SmolLM2 has no such token
    same = Translator(assistant, assistant)
    text = assistant.encode("<start_of_turn>user\nHi")
    assert same.to_assistant(text) == text
    assert same.to_target(text, [*dot, turn, assistant.eos_token_id]) == [*dot, turn, assistant.eos_token_id]


def test_bos_is_each_ones_own() -> None:
    target, assistant, translator = pair(("gemma", "spm"))
    assert target.bos_token_id == 2 and assistant.bos_token_id == 1
    assert translator.to_assistant(target.encode("Hi")) == assistant.encode("Hi")
    assert translator.to_assistant(target.encode("Hi", add_special_tokens=False)) == assistant.encode("Hi")
    assert translator.to_assistant([]) == translator.to_assistant([2]) == [1]


def test_a_seam_that_would_merge() -> None:
    target, assistant, translator = pair(("smollm2", "gemma"))
    tokens = target.encode("I say hel")
    lo = assistant.encode("lo there", add_special_tokens=False)
    draft = translator.to_target(tokens, lo)
    assert target.decode(tokens + draft) == "I say hello there" and draft == target.encode("lo there")
    tokens = [*target.encode("I say"), *target.encode(" ")]
    draft = translator.to_target(tokens, assistant.encode("hello", add_special_tokens=False))
    assert target.decode(tokens + draft) == "I say hello"


def test_another_text_begins_all_over() -> None:
    target, assistant, translator = pair(("smollm2", "gemma"))
    for text in (STORY * 3, STORY[5:] * 2, "Hi", "", STORY):
        assert text_of(assistant, translator.to_assistant(target.encode(text))) == text


@pytest.mark.parametrize("names", PAIRS)
@FAST
@given(TEXTS | st.sampled_from(NASTY), st.data())
def test_any_text(names: tuple[str, str], text: str, data: st.DataObject) -> None:
    target, assistant, translator = pair(names)
    text = text.replace("▁", "_")  # SentencePiece takes it for a space
    tokens = target.encode(text)
    said = target.decode(tokens[len(bos(target)) :])
    answer = translator.to_assistant(tokens)
    canonical = assistant.decode(assistant.encode(said.rstrip("\ufffd"), add_special_tokens=False))
    assert text_of(assistant, answer) == canonical
    draft = data.draw(st.lists(st.integers(0, len(assistant) - 1), max_size=6))
    assert all(0 <= token < len(target) for token in translator.to_target(tokens, draft))


@pytest.mark.parametrize("names", PAIRS)
@FAST
@given(data=st.data())
def test_any_ids(names: tuple[str, str], data: st.DataObject) -> None:
    target, assistant, translator = pair(names)
    tokens = data.draw(st.lists(st.integers(-1, len(target)), max_size=90))
    for length in range(0, len(tokens) + 1, 9):
        answer = translator.to_assistant(tokens[:length])
        assert all(0 <= token < len(assistant) for token in answer)
        translator.to_target(tokens[:length], data.draw(st.lists(st.integers(-1, len(assistant)), max_size=4)))


def test_bytes_that_are_no_text_are_settled_too() -> None:
    target, assistant, translator = pair(("smollm2", "gemma"))
    odd = target.encode("𝔘")[-1]
    tokens = [*target.encode("Well "), *[odd] * 600, *target.encode(" yes")]
    counting = Counting(target)
    translator = Translator(counting, assistant)  # type: ignore[arg-type]
    for length in range(1, len(tokens) + 1):
        counting.longest = 0
        answer = translator.to_assistant(tokens[:length])
        assert counting.longest <= translation.STUCK + translation.ANCHOR + 1
    assert assistant.decode(answer).endswith(" yes")
