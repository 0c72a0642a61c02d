"""A conversation of the page: what is shown, and that nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from transformers_llamacpp.errors import InvalidInputError
from transformers_llamacpp.server.page.conversation import Conversation

pytestmark = pytest.mark.once


def told(*texts: str) -> Conversation:
    """Questions and answers in turn."""
    made = Conversation()
    for at, text in enumerate(texts):
        made.add("assistant" if at % 2 else "user", text)
    return made


def texts(conversation: Conversation) -> list[str]:
    return [message["content"] for message in conversation.messages()]


def test_a_plain_conversation() -> None:
    conversation = told("q1", "a1", "q2")
    assert conversation.messages()[1] == {"role": "assistant", "content": "a1"}
    assert len(conversation) == 3 and not conversation.ends_with_answer
    conversation.add("assistant", "")
    conversation.write("a2")
    assert texts(conversation) == ["q1", "a1", "q2", "a2"] and conversation.ends_with_answer
    assert conversation.versions() == [(1, 1)] * 4


def test_an_answer_written_again_stands_beside_the_old_one() -> None:
    conversation = told("q1", "a1")
    conversation.up_to_question()
    assert texts(conversation) == ["q1"] and conversation.hidden_after() == 1
    conversation.add("assistant", "a1'")
    assert conversation.versions() == [(1, 1), (2, 2)]
    conversation.switch(1, -1)
    assert texts(conversation) == ["q1", "a1"]
    conversation.switch(1, -1)
    assert texts(conversation) == ["q1", "a1'"], "it goes round"


def test_an_edited_question_keeps_what_followed_the_old_one() -> None:
    conversation = told("q1", "a1", "q2", "a2")
    conversation.edit(0, "Q1")
    assert texts(conversation) == ["Q1"] and conversation.versions() == [(2, 2)]
    conversation.add("assistant", "A1")
    conversation.switch(0, 1)
    assert texts(conversation) == ["q1", "a1", "q2", "a2"]


def test_branches() -> None:
    conversation = told("q1", "a1", "q2", "a2")
    conversation.branch(1)
    assert texts(conversation) == ["q1", "a1"] and conversation.hidden_after() == 1
    conversation.add("user", "other")
    assert texts(conversation) == ["q1", "a1", "other"] and conversation.versions()[2] == (2, 2)
    conversation.switch(2, -1)
    assert texts(conversation) == ["q1", "a1", "q2", "a2"]
    conversation.branch(1)
    conversation.resume()
    assert texts(conversation)[2] == "other", "the newest way"
    conversation.branch(-1)
    assert texts(conversation) == [] and conversation.hidden_after() == 1


def test_a_question_is_taken_back() -> None:
    conversation = told("q1", "a1", "q2", "a2")
    assert conversation.take_back() == "q2"
    assert texts(conversation) == ["q1", "a1"]
    assert conversation.take_back() == "q1"
    assert texts(conversation) == []
    with pytest.raises(InvalidInputError):
        conversation.take_back()
    with pytest.raises(InvalidInputError):
        conversation.up_to_question()


def test_what_came_to_nothing_never_was() -> None:
    conversation = told("q1", "a1")
    before = json.dumps(conversation.to_json())
    mark = conversation.mark()
    conversation.add("user", "q2")
    conversation.restore(mark)
    conversation.edit(0, "Q1")
    conversation.add("assistant", "A1")
    conversation.restore(mark)
    conversation.up_to_question()
    conversation.restore(mark)
    assert json.dumps(conversation.to_json()) == before and conversation.versions() == [(1, 1), (1, 1)]


def test_to_a_file_and_back() -> None:
    conversation = told("q1", "a1", "q2", "a2")
    conversation.edit(0, "Q1")
    conversation.add("assistant", "Ä1\n\t\"")
    again = Conversation.from_json(json.loads(json.dumps(conversation.to_json())))
    assert again.messages() == conversation.messages() and again.versions() == conversation.versions()
    again.switch(0, 1)
    assert texts(again) == ["q1", "a1", "q2", "a2"]
    plain = Conversation.from_json([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
    assert texts(plain) == ["x", "y"]


FIRST = {"role": "", "content": "", "parent": None, "chosen": None}


@pytest.mark.parametrize(
    "data",
    [
        None, 5, {}, {"messages": []}, {"messages": [{}]}, [{"role": "tool", "content": "x"}], [{"role": "user", "content": 5}],
        {"messages": [FIRST, {"role": "user", "content": "x", "parent": 7, "chosen": None}]},
        {"messages": [{**FIRST, "chosen": 3}]},
        {"messages": [FIRST, {"role": "user", "content": "x", "parent": "0", "chosen": None}]},
    ],
)  # fmt: skip
def test_files_that_are_none(data: Any) -> None:
    with pytest.raises(InvalidInputError, match="no saved conversation"):
        Conversation.from_json(data)


def test_places_that_are_not_there() -> None:
    for what in (lambda c: c.edit(2, "x"), lambda c: c.switch(5, 1), lambda c: c.branch(2)):
        with pytest.raises(InvalidInputError, match="there are 2"):
            what(told("q", "a"))
