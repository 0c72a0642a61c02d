"""Moved chunks against their definition."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transformers_llamacpp.chunks import moved_chunks
from transformers_llamacpp.sequence import EMBEDDED
from unit.naive import ids

pytestmark = pytest.mark.once

MESSAGES = [[10 * n + i for i in range(6)] for n in range(1, 8)]
SYSTEM = [1, 2, 3, 4]


def chat(*numbers: int) -> list[int]:
    return [*SYSTEM, *(token for n in numbers for token in MESSAGES[n])]


def chunks(
    old: list[int], new: list[int], start: int = 0, stop: int | None = None, n_min: int = 4
) -> list[tuple[int, int, int]]:
    return moved_chunks(ids(*old), ids(*new), start, len(new) if stop is None else stop, n_min)


def places(old: list[int], new: list[int], p0: int, behind: int, stop: int, n_min: int) -> list[int]:
    """Where `old` has, from `behind` on, the `n_min` tokens that `new` has at `p0`."""
    wanted = new[p0 : p0 + n_min]
    if p0 + n_min > stop or EMBEDDED in wanted:
        return []
    return [at for at in range(behind, len(old)) if old[at : at + n_min] == wanted]


tokens = st.integers(EMBEDDED, 2)


@settings(max_examples=500, deadline=None)
@given(
    old=st.lists(tokens, max_size=25), middle=st.tuples(st.integers(0, 25), st.integers(0, 25)),
    added=st.lists(tokens, max_size=6), start=st.integers(0, 6), end=st.integers(0, 3), n_min=st.integers(1, 5),
)  # fmt: skip
@example(old=[EMBEDDED] * 3, middle=(0, 0), added=[EMBEDDED] * 3, start=0, end=0, n_min=2)
def test_the_definition(
    old: list[int], middle: tuple[int, int], added: list[int], start: int, end: int, n_min: int
) -> None:
    new = [*old[: middle[0]], *added, *old[middle[1] :]]
    stop = len(new) - end
    p0, behind = start, start
    for at, place, n in chunks(old, new, start, stop, n_min):
        while p0 < place:  # nothing was passed over
            assert not places(old, new, p0, behind, stop, n_min)
            p0 += 1
        assert at == places(old, new, place, behind, stop, n_min)[0] and n >= n_min
        assert old[at : at + n] == new[place : place + n] and EMBEDDED not in new[place : place + n]
        assert place + n <= stop
        longer = place + n < stop and at + n < len(old) and old[at + n] == new[place + n] != EMBEDDED
        assert not longer, "it is as long as it can be"
        p0, behind = place + n, at + n
    for rest in range(p0, stop):
        assert not places(old, new, rest, behind, stop, n_min)


def test_the_oldest_messages_are_dropped() -> None:
    assert chunks(chat(0, 1, 2, 3), chat(2, 3), 4) == [(16, 4, 12)]


def test_one_in_the_middle_is_edited() -> None:
    edited = [*chat(0), 91, 92, *chat(2, 3)[4:]]
    assert chunks(chat(0, 1, 2, 3), edited, 10) == [(16, 12, 12)]
    assert chunks(chat(0, 1, 2, 3, 4), [*chat(1), 91, *chat(3)[4:], 92], 4) == [(10, 4, 6), (22, 11, 6)]


def test_chunks_keep_their_order() -> None:
    assert chunks(chat(0, 1), chat(1, 0), 4) == [(10, 4, 6)], "what stood before it cannot follow it"


def test_repeated_tokens() -> None:
    assert chunks([5] * 10, [6, *[5] * 20]) == [(0, 1, 10)]
    assert chunks([*[5] * 4, 7, *[5] * 4], [8, *[5] * 4, *[5] * 4, 9], n_min=4) == [(0, 1, 4), (5, 5, 4)]


def test_too_few_tokens() -> None:
    assert chunks([1, 2, 3], [9, 1, 2, 3]) == []
    assert chunks(chat(0), chat(0)[5:], stop=4, n_min=5) == []
    assert chunks([], []) == []
    assert chunks(chat(0), chat(0), start=10) == []
