"""Hidden states: as contrastive search compares them, as they are remembered, and as the engine gives them."""

from __future__ import annotations

import numpy as np
import pytest

from transformers_llamacpp.batch import Job
from transformers_llamacpp.decoding.history import HiddenHistory
from transformers_llamacpp.engine import Usage, Wanted
from transformers_llamacpp.recall import Recall
from unit.naive import expected_logits, make


def vectors(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 8)).astype(np.float32)


def test_similarity_is_the_largest_cosine() -> None:
    history, all_of_them, tried = HiddenHistory(8, capacity=2), vectors(11), vectors(3, seed=1)
    for part in np.split(all_of_them, [1, 2, 6, 6]):
        history.append(part)
    assert len(history) == 11
    expected = [max(float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a in all_of_them) for b in tried]
    np.testing.assert_allclose(history.similarity(tried), expected, rtol=1e-5)
    np.testing.assert_allclose(history.similarity(all_of_them[3:4] * 1e9), [1.0], rtol=1e-5)


def test_a_zero_vector_is_like_nothing() -> None:
    history = HiddenHistory(8)
    history.append(np.zeros((1, 8), np.float32))
    assert history.similarity(vectors(1)).tolist() == [0.0]


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_recall_finds_the_longest_prefix() -> None:
    recall, known = Recall(1 << 20), vectors(4)
    recall.remember(ids(1, 2, 3, 4), known)
    recall.remember(ids(1, 2, 9), vectors(3, seed=2))
    found = recall.match(ids(1, 2, 3, 7, 8))
    assert found is not None
    np.testing.assert_array_equal(found, known[:3])
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0
    assert recall.match(ids(2, 1)) is None and recall.match(ids()) is None
    recall.clear()
    assert recall.match(ids(1, 2)) is None


def test_a_longer_text_takes_the_place_of_its_beginning() -> None:
    recall = Recall(6 * 32)
    recall.remember(ids(1, 2, 3), vectors(3))
    recall.remember(ids(1, 2, 3, 4, 5, 6), vectors(6))
    recall.remember(ids(1, 2), vectors(2, seed=5))  # known already
    found = recall.match(ids(1, 2, 3, 4, 5, 6))
    assert found is not None and len(found) == 6


def test_recall_is_bounded() -> None:
    recall = Recall(5 * 32)
    recall.remember(ids(1, 1, 1, 1, 1, 1), vectors(6))  # more than everything
    assert recall.match(ids(1)) is None
    recall.remember(ids(1, 1), vectors(2))
    recall.remember(ids(2, 2), vectors(2))
    recall.match(ids(1))
    recall.remember(ids(3, 3), vectors(2))
    assert recall.match(ids(2)) is None and recall.match(ids(1)) is not None and recall.match(ids(3)) is not None


def test_what_stands_for_embeddings_is_no_text() -> None:
    recall = Recall(1 << 20)
    recall.remember(ids(-1, 4), vectors(2))
    recall.remember(ids(5, -1, 4), vectors(3))
    assert recall.match(ids(-1, 4)) is None
    found = recall.match(ids(5, -1, 4))
    assert found is not None and len(found) == 1


def test_rows_for_hidden_states_only_keep_no_logits() -> None:
    engine = make(n_batch=3)
    text = np.array([5, 6, 7, 8, 9], np.int32)
    outputs, scored = np.ones(5, np.int8), np.array([0, 1, 0, 0, 1], np.int8)
    job = Job(engine.new(), text, outputs, scored=scored)
    engine.evaluate([job], Usage(), Wanted(embeddings=True))
    assert job.logits is not None and job.embeddings is not None
    for row, end in enumerate((2, 5)):
        np.testing.assert_array_equal(job.logits[row], expected_logits(text[:end].tolist(), engine.backend))
    assert job.embeddings.shape == (5, 4)
    none = Job(engine.new(), text, outputs, scored=np.zeros(5, np.int8))
    engine.evaluate([none], Usage(), Wanted(embeddings=True))
    assert none.logits is None and none.embeddings is not None
