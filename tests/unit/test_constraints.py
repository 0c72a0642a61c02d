"""Progress through constraints, without a model."""

from __future__ import annotations

import pytest

from transformers_llamacpp.decoding.constraints import DisjunctiveConstraint, PhrasalConstraint, Progress, from_words
from transformers_llamacpp.errors import InvalidInputError


def test_a_phrase_step_by_step() -> None:
    progress = Progress([PhrasalConstraint([1, 2, 3])])
    assert progress.helpful_tokens() == [1] and progress.steps == 0 and not progress.completed
    one = progress.after(1)
    assert one.helpful_tokens() == [2] and one.steps == 1
    assert progress.steps == 0  # unchanged
    assert one.after(9).steps == 0 and one.after(9).helpful_tokens() == [1]
    done = one.after(2).after(3)
    assert done.completed and done.steps == 3 and done.helpful_tokens() == []
    assert done.after(1) is done


def test_a_broken_phrase_does_not_begin_again_with_the_token_that_broke_it() -> None:
    assert Progress([PhrasalConstraint([1, 2])]).after_all([1, 1, 2]).steps == 0


def test_words_with_a_common_beginning_keep_their_progress() -> None:
    progress = Progress([DisjunctiveConstraint([[1, 2], [1, 3, 4]])]).after(1)
    assert progress.helpful_tokens() == [2, 3]
    assert progress.after(2).completed
    assert progress.after(3).helpful_tokens() == [4] and progress.after(3).steps == 2
    assert progress.after(3).after(4).completed


def test_constraints_in_any_order() -> None:
    progress = Progress([PhrasalConstraint([1, 2]), DisjunctiveConstraint([[5], [6]]), PhrasalConstraint([7])])
    assert progress.helpful_tokens() == [1, 5, 6, 7]
    text = progress.after_all([7, 0, 6])
    assert text.helpful_tokens() == [1] and text.steps == 4  # each complete one counts as the longest
    assert text.after(1).helpful_tokens() == [2] and text.after(1).steps == 5
    assert text.after_all([1, 2]).completed


def test_one_at_a_time() -> None:
    progress = Progress([PhrasalConstraint([1, 2]), PhrasalConstraint([3, 4])]).after(1)
    assert progress.helpful_tokens() == [2]
    broken = progress.after(3)
    assert sorted(broken.helpful_tokens()) == [1, 3] and broken.steps == 0


def test_the_same_word_twice_must_occur_twice() -> None:
    progress = Progress(from_words([[1], [1]]))
    assert not progress.after(1).completed and progress.after_all([1, 1]).completed


class Leaky:
    """As the old library's: its copies share the list that `update` appends to."""

    seqlen = 2

    def __init__(self) -> None:
        self.words, self.so_far = [[1, 2], [1, 3]], list[int]()

    def next(self) -> list[int]:
        n = len(self.so_far)
        return [word[n] for word in self.words if len(word) > n and word[:n] == self.so_far]

    def advance(self) -> list[int] | None:
        return self.next() or None

    def does_advance(self, token_id: int) -> bool:
        return token_id in self.next()

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        stepped = self.does_advance(token_id)
        if stepped:
            self.so_far.append(token_id)
        else:
            self.so_far = []
        return stepped, self.so_far in self.words, not stepped

    def remaining(self) -> int:
        return 2 - len(self.so_far)

    def copy(self, stateful: bool = False) -> Leaky:
        new = Leaky()
        if stateful:
            new.so_far = self.so_far
        return new


def test_objects_whose_copies_share_state() -> None:
    progress = Progress([Leaky()]).after(1)
    assert progress.after(2).completed and progress.after(3).completed


def test_an_object_that_contradicts_itself() -> None:
    class Wrong(Leaky):
        def update(self, token_id: int) -> tuple[bool, bool, bool]:
            return False, False, False

        def copy(self, stateful: bool = False) -> Wrong:
            return Wrong()

    with pytest.raises(InvalidInputError, match=r"does_advance\(1\) says yes"):
        Progress([Wrong()]).after(1)


def test_protocol_of_ours() -> None:
    phrase = PhrasalConstraint([4, 5])
    assert (phrase.seqlen, phrase.remaining(), phrase.advance(), phrase.completed) == (2, 2, 4, False)
    assert phrase.update(4) == (True, False, False) and phrase.advance() == 5 and phrase.remaining() == 1
    assert phrase.copy(stateful=True).advance() == 5 and phrase.copy().advance() == 4
    assert phrase.update(5) == (True, True, False) and phrase.advance() is None and phrase.remaining() == 0
    phrase.reset()
    assert phrase.update(9) == (False, False, True)
    choice = DisjunctiveConstraint([[1, 2, 3], [4]])
    assert choice.advance() == [1, 4] and choice.seqlen == 3
    assert choice.update(4) == (True, True, False) and choice.remaining() == 0


@pytest.mark.parametrize("words", [None, [], [[]], [3], "ab", [[1], 2], [[1.5]], [[-1]], [[[1], 2]], [[[]]]])
def test_words_that_are_none(words: object) -> None:
    with pytest.raises(InvalidInputError):
        from_words(words)


def test_a_word_that_begins_another() -> None:
    with pytest.raises(InvalidInputError, match="leave the longer one out"):
        DisjunctiveConstraint([[1, 2], [1, 2, 3]])
    assert DisjunctiveConstraint([[1, 2], [1, 2]]).advance() == [1]
