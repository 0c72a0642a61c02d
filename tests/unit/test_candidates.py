"""Candidates of a step beside each other, and in turn where there is no room, without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from transformers_llamacpp.cache import LlamaCppCache
from transformers_llamacpp.decoding.candidates import Candidates
from transformers_llamacpp.engine import Usage
from transformers_llamacpp.errors import DecodeError
from transformers_llamacpp.rows import Feed
from unit.naive import expected_logits, make


def filled(engine: Any, *texts: list[int]) -> LlamaCppCache:
    cache = LlamaCppCache(SimpleNamespace(engine=engine, config=SimpleNamespace(num_hidden_layers=2)))  # type: ignore[arg-type]
    width = max(map(len, texts))
    ids, mask = np.zeros((len(texts), width), np.int32), np.zeros((len(texts), width), np.bool_)
    for row, text in enumerate(texts):
        ids[row, width - len(text) :], mask[row, width - len(text) :] = text, True
    cache.feed(Feed(ids, None, mask, np.array([width - 1]), len(texts), width), None, Usage())
    return cache


def check(engine: Any, cache: LlamaCppCache, texts: list[list[int]], tokens: list[list[int]], usage: Usage) -> Any:
    candidates = Candidates(engine, cache, [np.array(mine, np.int32) for mine in tokens], usage)
    for row, mine in enumerate(tokens):
        assert candidates.logits[row].shape == (len(mine), 32) and candidates.hidden[row].shape == (len(mine), 4)
        for index, token in enumerate(mine):
            expected = expected_logits([*texts[row], token], engine.backend)
            np.testing.assert_array_equal(candidates.logits[row][index], expected)
            np.testing.assert_array_equal(candidates.hidden[row][index], expected[:4])
    return candidates


@pytest.mark.parametrize("kind", [{}, {"recurrent": True}, {"window": 4}])
@pytest.mark.parametrize("picks", [[0, 0], [2, 1], [1, 0]])
def test_side_by_side(kind: dict[str, Any], picks: list[int]) -> None:
    engine = make(n_seq_max=8, **kind)
    texts = [[1, 2, 3, 4], [5, 6]]
    cache, usage = filled(engine, *texts), Usage()
    for step in range(3):
        tokens = [[7 + step, 8, 9], [10 + step, 11]]
        check(engine, cache, texts, tokens, usage).keep(picks)
        for text, mine, pick in zip(texts, tokens, picks, strict=True):
            text.append(mine[pick])
        engine.check()
        assert [cache.tokens(row) for row in range(2)] == texts and cache.get_seq_length() == 5 + step
    assert usage.decode_calls == 3 and usage.evaluated_tokens == 15
    assert set(engine.pool.sequences) == set(cache.sequences)  # nothing is left of those that lost
    assert cache.column_mask(1).tolist() == [False, False, *[True] * 5]


@pytest.mark.parametrize("limits", [{"n_cells": 8}, {"n_seq_max": 2, "n_seq_limit": 2}])
def test_in_turn(limits: dict[str, int]) -> None:
    engine = make(**limits)
    texts = [[1, 2, 3], [5, 6]]
    cache, usage = filled(engine, *texts), Usage()
    check(engine, cache, texts, [[7, 8, 9], [10]], usage).keep([1, 0])
    assert [cache.tokens(row) for row in range(2)] == [[1, 2, 3, 8], [5, 6, 10]]
    assert usage.decode_calls == 4
    engine.check()


def test_a_failed_decode_changes_nothing() -> None:
    engine = make(n_seq_max=8)
    texts = [[1, 2, 3], [5, 6]]
    cache = filled(engine, *texts)
    engine.backend.fail_next(-3, 2)  # type: ignore[attr-defined]
    with pytest.raises(DecodeError):
        check(engine, cache, texts, [[7, 8], [10, 11]], Usage())
    engine.check()
    assert [cache.tokens(row) for row in range(2)] == texts
    check(engine, cache, texts, [[7, 8], [10, 11]], Usage()).keep([1, 1])
