"""Prompt lookup: what is found, what is drafted, and what it costs."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformers_llamacpp.decoding.drafting import lookup
from transformers_llamacpp.decoding.drafting.draft import EMPTY, Draft
from transformers_llamacpp.decoding.drafting.lookup import PromptLookup
from transformers_llamacpp.errors import InvalidInputError

pytestmark = pytest.mark.once

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=80)


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts as long as wanted, however short the agreement: what follows is then all of a draft's content."""
    monkeypatch.setattr(lookup, "TRUST", 1 << 20)


@pytest.mark.parametrize(("agreement", "length"), [(1, 2), (2, 4), (3, 6), (4, 8), (5, 9), (6, 9)])
def test_the_longer_the_agreement_the_longer_the_draft(
    monkeypatch: pytest.MonkeyPatch, agreement: int, length: int
) -> None:
    shared, after = list(range(10, 10 + agreement)), list(range(100, 120))
    text = [1, *shared, *after, 2, *shared]
    monkeypatch.setattr(lookup, "TRUST", 2)
    assert PromptLookup(9, 3).draft(text, 50).tokens == after[:length]



def drafted(text: list[int], num_tokens: int = 5, max_ngram: int = 3, limit: int = 100) -> list[int]:
    return PromptLookup(num_tokens, max_ngram).draft(text, limit).tokens


def naive(text: list[int], num_tokens: int, max_ngram: int) -> list[int]:
    """The same by looking at everything."""
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        ends = [end for end in range(n - 1, len(text) - 1) if text[end - n + 1 : end + 1] == text[-n:]]
        if not ends:
            continue
        chosen = [*ends[-lookup.RECENT :], ends[0]]
        agreement = {end: shared_end(text[: end + 1], text) for end in chosen}
        best = max(chosen, key=lambda end: (agreement[end], end))
        draft, period = text[best + 1 :][:num_tokens], len(text) - 1 - best
        while len(draft) < num_tokens and agreement[best] >= period:
            draft.append(draft[-period])
        return draft
    return []


def shared_end(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), lookup.BACKWARDS) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


@given(TEXTS, st.integers(1, 12), st.integers(1, 5))
def test_as_a_scan_of_everything(text: list[int], num_tokens: int, max_ngram: int) -> None:
    assert drafted(text, num_tokens, max_ngram) == naive(text, num_tokens, max_ngram)


@given(TEXTS, st.integers(1, 4), st.data())
def test_in_pieces_as_in_one(text: list[int], max_ngram: int, data: st.DataObject) -> None:
    pieces, length = PromptLookup(6, max_ngram), 0
    while length < len(text):
        length = data.draw(st.integers(length + 1, len(text)))
        assert pieces.draft(text[:length], 6).tokens == drafted(text[:length], 6, max_ngram)
        assert pieces.draft(text[:length], 6).tokens == drafted(text[:length], 6, max_ngram)  # asked again
        pieces.verified(6, 0)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60), st.integers(1, 4))
def test_what_is_drafted_followed_the_longest_ngram(text: list[int], max_ngram: int) -> None:
    draft = drafted(text, 1, max_ngram)
    joined = [text[i : i + n] for n in range(1, max_ngram + 1) for i in range(len(text) - n)]
    known = [n for n in range(1, max_ngram + 1) if text[-n:] in joined]
    assert bool(draft) == bool(known)
    if known:
        assert any(text[i : i + known[-1] + 1] == text[-known[-1] :] + draft for i in range(len(text)))


def test_the_longest_ngram_wins() -> None:
    assert drafted([1, 2, 3, 70, 9, 3, 80, 2, 3]) == [70, 9, 3, 80, 2]
    assert drafted([1, 2, 3, 70, 9, 3, 80, 2, 3], max_ngram=1, num_tokens=1) == [70]  # it agrees further backwards
    assert drafted([1, 2, 3, 4]) == []


def test_context_decides_and_then_the_last_place() -> None:
    assert drafted([5, 1, 60, 6, 1, 61, 7, 1, 62, 6, 1], 1, max_ngram=1) == [61]
    assert drafted([5, 1, 60, 6, 1, 61, 7, 1, 62, 9, 1], 1, max_ngram=1) == [62]


def test_the_first_place_is_looked_at_however_many_follow() -> None:
    text = [7, 8, 1, 60, *[9, 1, 61] * (2 * lookup.RECENT), 7, 8, 1]
    assert drafted(text, 2, max_ngram=1) == [60, 9]


def test_a_period_goes_on() -> None:
    assert drafted([1, 2, 1, 2, 1, 2], 7) == [1, 2, 1, 2, 1, 2, 1]
    assert drafted([4, 4], 5) == [4] * 5
    assert drafted([1, 2, 3, 1], 7) == [2, 3, 1]  # seen once: it may be a period or not


def test_limits() -> None:
    text = [*range(20), 0]
    assert drafted(text, 5, limit=3) == [1, 2, 3]
    assert drafted(text, 5) == [1, 2, 3, 4, 5]
    assert drafted([3]) == [] and drafted([]) == []


def test_bad_values() -> None:
    with pytest.raises(InvalidInputError, match="prompt_lookup_num_tokens=0"):
        PromptLookup(0, 2)
    with pytest.raises(InvalidInputError, match="max_matching_ngram_size=0"):
        PromptLookup(1, 0)
    shrunk = PromptLookup(2, 2)
    shrunk.draft([1, 2, 3], 1)
    with pytest.raises(InvalidInputError, match="make a new PromptLookup"):
        shrunk.draft([1, 2], 1)


def test_closed_twice() -> None:
    one = PromptLookup(2, 2)
    one.draft([1, 1], 1)
    one.close()
    one.close()


def test_a_draft_is_false_when_empty() -> None:
    assert not EMPTY and len(EMPTY) == 0 and Draft([1]) and Draft([1]).probabilities is None


def test_a_long_prompt_is_indexed_fast_and_small() -> None:
    rng = random.Random(0)
    text = [rng.randrange(49152) for _ in range(30_000)]  # nothing repeats: the most memory
    start = time.process_time()
    one = PromptLookup(10, 3)
    one.draft(text, 10)
    first = time.process_time() - start
    start = time.process_time()
    for token in text[:1000]:
        text.append(token)
        one.draft(text, 10)
    later = time.process_time() - start
    assert first < 0.5 and later < 0.5, (first, later)  # 0.1 s and 0.01 s where nothing else runs
    tracemalloc.start()
    kept = PromptLookup(10, 3)
    kept.draft(text, 10)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size / len(text) < 3 * 200


def test_a_draft_does_not_look_at_the_whole_text() -> None:
    text = [1, 2] * 50_000
    one = PromptLookup(10, 2)
    one.draft(text, 10)
    start = time.process_time()
    for _ in range(100):
        one.draft(text, 10)
    assert time.process_time() - start < 0.2
