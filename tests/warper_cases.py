"""Scores and processors for the tests of `decoding/warpers.py`, drawn at random, and transformers' own answer to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from transformers import LogitsProcessorList

from transformers_llamacpp.decoding.warpers import Chain, Scores

INF = float("inf")


@dataclass
class Case:
    """`ids` int64 `(rows, length)`, `scores` float32 `(rows, n_vocab)`, and where the numbers come from."""

    random: np.random.Generator
    ids: torch.Tensor
    scores: torch.Tensor

    @property
    def n_vocab(self) -> int:
        return self.scores.shape[1]

    def tokens(self, n: int) -> list[int]:
        return self.random.integers(0, self.n_vocab, n).tolist()

    def one_of(self, *values: Any) -> Any:
        return values[int(self.random.integers(len(values)))]


STYLES = ("normal", "flat", "peaked", "ties", "equal", "holes", "all holes", "nan", "infinite", "large", "steps")


def scores_of(style: str, random: np.random.Generator, rows: int, n_vocab: int) -> torch.Tensor:
    scores = random.normal(0, 3, (rows, n_vocab))
    if style == "flat":
        scores *= 0.01
    elif style == "peaked":
        scores[:, random.integers(n_vocab)] += 30
    elif style == "ties":
        scores = np.round(scores)
    elif style == "equal":
        scores[:] = 1.5
    elif style == "holes":
        scores[random.random(scores.shape) < 0.7] = -INF
    elif style == "all holes":
        scores[:] = -INF
    elif style == "nan":
        scores[random.random(scores.shape) < 0.1] = np.nan
    elif style == "infinite":
        scores[random.random(scores.shape) < 0.1] = INF
    elif style == "large":
        scores *= 1e4
    elif style == "steps":
        scores = np.round(scores * 4) / 4 + 0.0
    return torch.from_numpy(scores.astype(np.float32))


def case_of(style: str, seed: int, rows: int, n_vocab: int, length: int) -> Case:
    random = np.random.default_rng(seed)
    few = random.integers(0, n_vocab, 4)
    shape = (rows, length)
    repeated = random.random(shape) < 0.7
    ids = np.where(repeated, random.choice(few, shape), random.integers(0, n_vocab, shape))
    return Case(random, torch.from_numpy(ids), scores_of(style, random, rows, n_vocab))


def _kept(case: Case) -> dict[str, Any]:
    return {"min_tokens_to_keep": case.one_of(1, 1, 2, 5), "filter_value": case.one_of(-INF, -INF, -INF, -1e4)}


def _sequences(case: Case) -> dict[tuple[int, ...], float]:
    end = case.ids[0, -2:].tolist()
    singles = {(token,): case.one_of(-2.0, 3.5, -INF) for token in case.tokens(3)}
    ends = {(*end[-n:], token): case.one_of(-1.5, 0.3, -INF) for n in (1, 2) for token in case.tokens(2)}
    return {**singles, **ends, (*case.ids[-1].tolist(), case.tokens(1)[0]): 2.5}


MAKERS: dict[str, Callable[[Any, Case], Any]] = {
    "TemperatureLogitsWarper": lambda cls, case: cls(case.one_of(0.1, 0.7, 1.0, 1.3, 5.0, 1e-5, 1e10)),
    "TopKLogitsWarper": lambda cls, case: cls(case.one_of(1, 2, 5, 40, case.n_vocab, case.n_vocab + 3), **_kept(case)),
    "TopPLogitsWarper": lambda cls, case: cls(case.one_of(0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0), **_kept(case)),
    "MinPLogitsWarper": lambda cls, case: cls(case.one_of(0.0, 1e-35, 0.01, 0.05, 0.5, 1.0), **_kept(case)),
    "TypicalLogitsWarper": lambda cls, case: cls(case.one_of(0.05, 0.5, 0.9, 0.99), **_kept(case)),
    "EpsilonLogitsWarper": lambda cls, case: cls(case.one_of(1e-5, 3e-4, 0.01, 0.3), **_kept(case)),
    "EtaLogitsWarper": lambda cls, case: cls(case.one_of(1e-5, 3e-4, 0.01, 0.3), **_kept(case)),
    "TopHLogitsWarper": lambda cls, case: cls(case.one_of(0.1, 0.4, 0.9, 1.0), filter_value=case.one_of(-INF, -1e4)),
    "RepetitionPenaltyLogitsProcessor": lambda cls, case: cls(
        case.one_of(1.1, 0.8, 2.0), prompt_ignore_length=case.one_of(None, 0, 2, 100)
    ),
    "EncoderRepetitionPenaltyLogitsProcessor": lambda cls, case: cls(case.one_of(1.5, 0.5), case.ids[:, :3].clone()),
    "NoRepeatNGramLogitsProcessor": lambda cls, case: cls(case.one_of(1, 2, 3, 4)),
    "EncoderNoRepeatNGramLogitsProcessor": lambda cls, case: cls(case.one_of(1, 2, 3), case.ids.clone()),
    "SequenceBiasLogitsProcessor": lambda cls, case: cls(_sequences(case)),
    "NoBadWordsLogitsProcessor": lambda cls, case: cls([list(tokens) for tokens in _sequences(case)], case.tokens(1)),
    "MinLengthLogitsProcessor": lambda cls, case: cls(case.ids.shape[1] + case.one_of(0, 1), case.tokens(2)),
    "MinNewTokensLengthLogitsProcessor": lambda cls, case: cls(case.ids.shape[1] - 1, case.one_of(1, 2), case.tokens(1)),
    "ForcedBOSTokenLogitsProcessor": lambda cls, case: cls(case.tokens(1)[0]),
    "ForcedEOSTokenLogitsProcessor": lambda cls, case: cls(case.ids.shape[1] + case.one_of(1, 2), case.tokens(2)),
    "InfNanRemoveLogitsProcessor": lambda cls, case: cls(),
    "ExponentialDecayLengthPenalty": lambda cls, case: cls((case.one_of(0, 1), 1.1), case.tokens(2), case.ids.shape[1] - 1),
    "LogitNormalization": lambda cls, case: cls(),
    "SuppressTokensLogitsProcessor": lambda cls, case: cls([*case.tokens(3), case.n_vocab + 1]),
    "SuppressTokensAtBeginLogitsProcessor": lambda cls, case: cls(case.tokens(2), case.ids.shape[1] + case.one_of(0, 1)),
}
"""How each class is made, with arguments that its constructor takes on every release."""

NAMES = [name for name in MAKERS if hasattr(transformers.generation.logits_process, name)]


def class_of(name: str) -> Any:
    return getattr(transformers.generation.logits_process, name)


def make(name: str, case: Case) -> Any:
    return MAKERS[name](class_of(name), case)


def expected(processors: list[Any], case: Case) -> Any:
    """transformers' own answer, or the exception it raises. Processors that remember something are left as they were."""
    try:
        return LogitsProcessorList(copy.deepcopy(processors))(case.ids, case.scores.clone())
    except Exception as error:
        return error


def check(processors: list[Any], case: Case) -> None:
    """Both ways of asking a chain give what transformers gives."""
    wanted = expected(processors, case)
    before = case.scores.clone()
    if isinstance(wanted, Exception):
        for ask in (_run, _call):
            try:
                ask(processors, case)
            except type(wanted):
                continue
            raise AssertionError(f"transformers raises {wanted!r}")
    else:
        for ask in (_run, _call):
            same_scores(wanted.numpy(), ask(processors, case), str(processors))
    assert torch.equal(before.nan_to_num(7.0), case.scores.nan_to_num(7.0)), "the scores were changed"


def _run(processors: list[Any], case: Case) -> Any:
    found = Chain(copy.deepcopy(processors)).run(case.ids, case.scores.numpy().copy())
    for candidates in found:
        well_formed(candidates, case.n_vocab)
    return np.stack([candidates.dense(case.n_vocab) for candidates in found])


def _call(processors: list[Any], case: Case) -> Any:
    found = Chain(copy.deepcopy(processors))(case.ids, case.scores)
    assert found.dtype == torch.float32 and found.shape == case.scores.shape
    return found.numpy()


def well_formed(candidates: Scores, n_vocab: int) -> None:
    assert candidates.values.dtype == np.float32
    if candidates.ids is None:
        assert candidates.values.shape == (n_vocab,)
        return
    assert candidates.ids.dtype == np.int64 and candidates.ids.shape == candidates.values.shape
    assert (np.diff(candidates.ids) > 0).all()
    assert ((candidates.ids >= 0) & (candidates.ids < n_vocab)).all()


def same_scores(wanted: Any, found: Any, what: str = "") -> None:
    """The same tokens kept (and the same NaN), and probabilities within 1e-6."""
    np.testing.assert_array_equal(np.isneginf(wanted), np.isneginf(found), err_msg=what)
    np.testing.assert_array_equal(np.isnan(wanted), np.isnan(found), err_msg=what)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=2e-6, err_msg=what)
    of_wanted, of_found = (torch.softmax(torch.from_numpy(np.array(scores)), dim=-1) for scores in (wanted, found))
    assert torch.allclose(of_found, of_wanted, rtol=0, atol=1e-6, equal_nan=True), what
