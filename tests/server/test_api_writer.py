"""`Writer` without a model: what of a text may be shown, and when."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as some

from transformers_llamacpp.server.api.answers import spelled
from transformers_llamacpp.server.api.writer import Writer

pytestmark = pytest.mark.once

END = 999


class Bytes:
    """A vocabulary whose tokens are byte strings of the test."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = list(pieces)

    def piece(self, token: int) -> bytes:
        return self.pieces[token]


def write(pieces: Sequence[bytes], stops: Sequence[str] = (), drop_space: bool = False) -> tuple[list[str], Writer]:
    """What is shown after each token, and at the end."""
    writer = Writer(Bytes(pieces), stops, frozenset({END}), lambda token: False, drop_space)
    shown = [writer.put(token).text for token in range(len(pieces))]
    return [*shown, writer.end().text], writer


def expected(text: str, stops: Sequence[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


@given(
    some.lists(some.text("abéß😀", min_size=1, max_size=3), max_size=12),
    some.lists(some.text("abé😀", min_size=1, max_size=4), max_size=3),
    some.integers(1, 4),
)
def test_the_text_up_to_the_first_stop_string(words: list[str], stops: list[str], size: int) -> None:
    text = "".join(words)
    data = text.encode()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]  # characters cut in pieces
    shown, writer = write(pieces, stops)
    # a stop string counts once it is complete: two of them may overlap, and the first to be complete ends the text
    done = ""
    for at in range(len(pieces) + 1):
        done = b"".join(pieces[:at]).decode("utf-8", "ignore")
        if any(stop in done for stop in stops):
            break
    assert "".join(shown) == expected(done, stops)
    assert writer.reason == ("stop" if any(stop in done for stop in stops) else "length")


def test_the_beginning_of_a_stop_string_waits() -> None:
    assert write([b"ab", b"cd", b"e", b"x"], ["cdef"])[0] == ["ab", "", "", "cdex", ""]
    assert write([b"ab", b"cd", b"e", b"f", b"g"], ["cdef"])[0] == ["ab", "", "", "", "", ""]
    assert write([b"ab", b"cd"], ["cdef"])[0] == ["ab", "", "cd"], "it never came"


def test_parts_of_characters_wait() -> None:
    first, second = "é".encode()[:1], "é".encode()[1:]
    assert write([b"a", first, second])[0] == ["a", "", "é", ""]
    assert write([b"a", first])[0] == ["a", "", "\ufffd"], "the rest never came"
    assert spelled(first) == "bytes:\\xc3"


def test_the_space_before_the_first_word() -> None:
    assert write([b" a", b" b"], drop_space=True)[0] == ["a", " b", ""]
    assert write([b" a", b" b"])[0] == [" a", " b", ""]


def test_tokens_come_with_their_text() -> None:
    writer = Writer(Bytes([b"ab", b"cd", b"ef", b"gh"]), ["de"], frozenset({END}), lambda token: False, False)
    found = [writer.put(token, -1.0) for token in range(4)]
    assert [[score.token for score in piece.tokens] for piece in found] == [[0], [1], [], []]
    assert [piece.text for piece in found] == ["ab", "c", "", ""]
    assert writer.n_tokens == 3, "the third completed the stop string, the fourth came too late"


def test_an_end_token_is_no_text() -> None:
    writer = Writer(Bytes([b"ab"]), [], frozenset({END}), lambda token: False, False)
    assert writer.put(0).text == "ab" and writer.put(END).text == ""
    assert writer.reason == "stop" and writer.n_tokens == 2 and writer.put(0).text == ""
