"""When two vocabularies are one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from transformers_llamacpp.decoding.drafting.vocabularies import same_vocabulary, vocabulary_difference

pytestmark = pytest.mark.once

WORDS = [b"word %d" % i for i in range(500)]


@dataclass
class Vocabulary:
    """Like `NativeVocab`; counts what is read."""

    words: list[bytes]
    read: list[int] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return len(self.words)

    def piece(self, token: int) -> bytes:
        self.read.append(token)
        return self.words[token]


def changed(token: int) -> list[bytes]:
    return [*WORDS[:token], b"another", *WORDS[token + 1 :]]


def test_equal_ones() -> None:
    assert same_vocabulary(WORDS, list(WORDS)) and same_vocabulary(WORDS, WORDS)
    assert same_vocabulary(Vocabulary(WORDS), tuple(WORDS))


@pytest.mark.parametrize("token", [0, 4])
def test_the_first_ids_are_special(token: int) -> None:
    assert same_vocabulary(WORDS, changed(token))


@pytest.mark.parametrize("token", [5, 6, 499])
def test_any_other_difference_counts(token: int) -> None:
    assert (
        vocabulary_difference(WORDS, changed(token)) == f"token {token} is {WORDS[token]!r} in one and b'another' in the other"
    )
    assert not same_vocabulary(changed(token), WORDS)


def test_padding_is_not_compared() -> None:
    assert same_vocabulary(WORDS, [*WORDS, *[b"[PAD]"] * 128])
    assert same_vocabulary([*WORDS, *[b"[PAD]"] * 128], WORDS)
    assert vocabulary_difference(WORDS, [*WORDS, *[b"[PAD]"] * 129]) == "one has 500 tokens and the other 629"


def test_one_is_itself_without_a_look() -> None:
    one = Vocabulary(WORDS)
    assert same_vocabulary(one, one) and not one.read


def test_different_ones_are_told_apart_at_once() -> None:
    one, other = Vocabulary(WORDS), Vocabulary(WORDS[::-1])
    assert not same_vocabulary(one, other) and len(one.read) == len(other.read) == 1
    assert not same_vocabulary(one, Vocabulary([*WORDS, *WORDS])) and len(one.read) == 1


def test_empty_ones() -> None:
    assert same_vocabulary([], []) and same_vocabulary([], WORDS[:3])
