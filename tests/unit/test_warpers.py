"""Every known processor, alone and in chains, gives what transformers gives, whatever the scores."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import SynthIDTextWatermarkingConfig, WatermarkingConfig

from transformers_llamacpp.decoding.warpers import Chain, Scores
from warper_cases import MAKERS, NAMES, STYLES, Case, case_of, check, class_of, expected, make, same_scores

cases = st.builds(
    case_of,
    style=st.sampled_from(STYLES),
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from((1, 1, 2, 3)),
    n_vocab=st.sampled_from((1, 2, 5, 30, 200, 1000)),
    length=st.sampled_from((1, 2, 3, 12)),
)


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    """NaN and infinities are asked for."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with np.errstate(all="ignore"):
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=50)
@given(case=cases)
def test_alone(name: str, case: Case) -> None:
    check([make(name, case)], case)


@settings(deadline=None, max_examples=250)
@given(case=cases, names=st.lists(st.sampled_from(NAMES), min_size=2, max_size=6))
def test_in_any_order(case: Case, names: list[str]) -> None:
    check([make(name, case) for name in names], case)


@settings(deadline=None, max_examples=40)
@given(
    style=st.sampled_from(STYLES),
    seed=st.integers(0, 2**32 - 1),
    n_vocab=st.sampled_from((4097, 8192, 20011)),
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=4),
)
def test_more_than_one_block(style: str, seed: int, n_vocab: int, names: list[str]) -> None:
    case = case_of(style, seed, 1, n_vocab, 30)
    check([make(name, case) for name in names], case)


LARGE = (
    ("TopKLogitsWarper",),
    ("TopPLogitsWarper",),
    ("MinPLogitsWarper",),
    ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"),
    ("RepetitionPenaltyLogitsProcessor", "TemperatureLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"),
    ("NoRepeatNGramLogitsProcessor", "TypicalLogitsWarper", "EpsilonLogitsWarper"),
    ("TopHLogitsWarper", "EtaLogitsWarper", "LogitNormalization"),
)


@pytest.mark.parametrize("names", LARGE, ids=", ".join)
@pytest.mark.parametrize("n_vocab", [49152, 262144])
@pytest.mark.parametrize("style", ["normal", "steps", "flat", "holes"])
def test_large_vocabularies(names: tuple[str, ...], n_vocab: int, style: str) -> None:
    case = case_of(style, n_vocab, 1, n_vocab, 100)
    check([make(name, case) for name in names], case)


@settings(deadline=None, max_examples=80)
@given(case=cases, share=st.floats(0, 1), keep=st.integers(1, 4))
def test_a_nucleus_of_any_size(case: Case, share: float, keep: int) -> None:
    check([class_of("TopPLogitsWarper")(share, min_tokens_to_keep=keep)], case)


NUDGES = (0.0, 6e-8, -6e-8, 1e-7, -1e-7, 1e-6, -1e-6, 5e-6, -5e-6)
"""How far a setting lies from a number that transformers compares it with, as a part of that."""


@settings(deadline=None, max_examples=60)
@given(
    style=st.sampled_from(("normal", "steps", "flat", "peaked", "holes")),
    seed=st.integers(0, 2**32 - 1),
    n_vocab=st.sampled_from((3, 40, 1000, 5000, 20000)),
    nudge=st.sampled_from(NUDGES),
    top_k=st.booleans(),
)
def test_decisions_within_rounding(style: str, seed: int, n_vocab: int, nudge: float, top_k: bool) -> None:
    """Settings equal to one of transformers' own numbers, or next to it."""
    case = case_of(style, seed, 1, n_vocab, 3)
    before = [class_of("TopKLogitsWarper")(50)] if top_k else []
    scores = expected(before, case)
    finite = int(torch.isfinite(scores).sum())
    if not finite:
        return
    at = int(case.random.integers(min(finite, 100)))  # from the top
    shares = scores.softmax(-1)
    share = float(shares.sort(descending=True)[0][0, at]) * (1 + nudge)
    sums = scores.sort()[0].softmax(-1).cumsum(-1)[0]
    logs = scores.log_softmax(-1)
    surprise = (-logs + (logs * logs.exp()).nansum(-1, keepdim=True)).abs()
    mass = float(scores.gather(-1, surprise.argsort()).softmax(-1).cumsum(-1)[0, at]) * (1 + nudge)
    settings_of = {
        "TopPLogitsWarper": 1 - float(sums[-1 - at]) * (1 + nudge),
        "MinPLogitsWarper": share / float(shares.max()),
        "EpsilonLogitsWarper": share,
        "TypicalLogitsWarper": mass,
    }
    for name, value in settings_of.items():
        if 0 < value < 1:
            check([*before, class_of(name)(value)], case)


@pytest.mark.parametrize("name", NAMES)
def test_this_releases_code_is_known(name: str) -> None:
    case = case_of("normal", 1, 1, 20, 4)
    assert Chain([make(name, case)]).covered, f"{name} is not the code that was read: read it, and add its digest to known.py"


def test_every_processor_that_generate_makes_is_tried_or_left_to_transformers() -> None:
    source = inspect.getsource(transformers.GenerationMixin._get_logits_processor)
    made = set(re.findall(r"(\w+(?:Processor|Warper|Penalty|Normalization))\(", source))
    left = {"UnbatchedClassifierFreeGuidanceLogitsProcessor", "PrefixConstrainedLogitsProcessor"}
    assert made - left <= MAKERS.keys()


@pytest.mark.parametrize(
    "config",
    [WatermarkingConfig(bias=4.0), SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123])],
    ids=["watermark", "synthid"],
)
def test_watermarks(config: Any) -> None:
    case = case_of("normal", 3, 1, 500, 12)
    processors = [
        class_of("TopKLogitsWarper")(50), config.construct_processor(500, "cpu"), class_of("TemperatureLogitsWarper")(0.7),
    ]  # fmt: skip
    assert Chain(processors).covered
    check(processors, case)


@settings(deadline=None, max_examples=60)
@given(case=cases, starts=st.lists(st.integers(0, 5), min_size=3, max_size=3))
def test_padding_that_the_penalty_ignores(case: Case, starts: list[int]) -> None:
    cls = class_of("RepetitionPenaltyLogitsProcessor")
    rows = len(case.ids)
    try:
        penalty = cls(1.4, prompt_ignore_length=torch.tensor(starts[:rows]))
    except ValueError:
        return  # this release takes one number for all rows
    check([penalty], case)
    check([class_of("TopKLogitsWarper")(10), penalty], case)
    check([cls(1.4, prompt_ignore_length=torch.tensor([1] * (rows + 1)))], case)


@settings(deadline=None, max_examples=40)
@given(case=cases, beams=st.integers(1, 3))
def test_processors_of_the_prompt_under_beams(case: Case, beams: int) -> None:
    processors = [
        class_of("EncoderNoRepeatNGramLogitsProcessor")(2, case.ids.clone()),
        class_of("EncoderRepetitionPenaltyLogitsProcessor")(1.3, case.ids.clone()),
    ]
    many = Case(case.random, case.ids.repeat_interleave(beams, 0), case.scores.repeat_interleave(beams, 0))
    check(processors, many)


@settings(deadline=None, max_examples=60)
@given(case=cases, outside=st.sampled_from((0, 1, 1000, -1)))
def test_ids_that_are_not_in_the_vocabulary(case: Case, outside: int) -> None:
    case.ids[:, 0] = case.n_vocab + outside if outside >= 0 else outside
    check([class_of("NoRepeatNGramLogitsProcessor")(1)], case)
    check([class_of("RepetitionPenaltyLogitsProcessor")(1.2)], case)
    check([class_of("TopKLogitsWarper")(3), class_of("RepetitionPenaltyLogitsProcessor")(1.2)], case)


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("TopKLogitsWarper", {"top_k": 3, "filter_value": -7.0}),
    ("TopKLogitsWarper", {"filter_value": float("nan")}),
    ("TopPLogitsWarper", {"top_p": 0.3}),
    ("TopPLogitsWarper", {"min_tokens_to_keep": 0}),
    ("MinPLogitsWarper", {"min_p": 2.0}),
    ("TemperatureLogitsWarper", {"temperature": -1.0}),
    ("TemperatureLogitsWarper", {"temperature": 0.0}),
    ("TemperatureLogitsWarper", {"temperature": float("inf")}),
    ("TemperatureLogitsWarper", {"temperature": torch.tensor(0.5)}),
    ("RepetitionPenaltyLogitsProcessor", {"penalty": -2.0}),
    ("SuppressTokensLogitsProcessor", {"suppress_tokens": torch.tensor([1, -1, 400])}),
    ("MinLengthLogitsProcessor", {"min_length": 100}),
    ("ForcedBOSTokenLogitsProcessor", {"bos_token_id": -1}),
    ("EtaLogitsWarper", {"epsilon": torch.tensor(0.2)}),
    ("TypicalLogitsWarper", {"mass": 0.2}),
    ("TopHLogitsWarper", {"top_n": 4}),
]


@pytest.mark.parametrize(("name", "changes"), CHANGES, ids=str)
@pytest.mark.parametrize("length", [1, 6])
def test_attributes_are_read_when_they_are_used(name: str, changes: dict[str, Any], length: int) -> None:
    case = case_of("normal", 5, 2, 60, length)
    processor = make(name, case)
    chain = Chain([processor])
    chain.run(case.ids, case.scores.numpy().copy())
    for attribute, value in changes.items():
        setattr(processor, attribute, value)
    check([processor], case)
    check([class_of("TopKLogitsWarper")(20), processor], case)
    same_scores(expected([processor], case).numpy(), chain(case.ids, case.scores).numpy())


def test_a_list_that_grows() -> None:
    case = case_of("normal", 2, 1, 100, 5)
    chain = Chain()
    assert isinstance(chain, transformers.LogitsProcessorList) and chain.covered
    assert chain(case.ids, case.scores) is case.scores
    for name in ("RepetitionPenaltyLogitsProcessor", "TopKLogitsWarper", "LogitNormalization"):
        chain.append(make(name, case))
        same_scores(expected(list(chain), case).numpy(), chain(case.ids, case.scores).numpy())
    chain[1] = class_of("TopKLogitsWarper")(1)
    found = chain.run(case.ids, case.scores.numpy().copy())[0]
    assert found.ids is not None and len(found.ids) == 1


def test_truncated_scores_are_sparse_and_dense_ones_are_views() -> None:
    case = case_of("normal", 2, 1, 60000, 5)
    logits = case.scores.numpy().copy()
    assert np.shares_memory(Chain([class_of("TemperatureLogitsWarper")(0.7)]).run(case.ids, logits)[0].values, logits)
    for name, value in (("TopKLogitsWarper", 40), ("TopPLogitsWarper", 0.9), ("MinPLogitsWarper", 0.1)):
        found = Chain([class_of(name)(value)]).run(case.ids, case.scores.numpy().copy())[0]
        assert found.ids is not None and len(found.ids) < 30000


def test_candidates_as_a_dense_row() -> None:
    dense = np.arange(4, dtype=np.float32)
    assert Scores(None, dense).dense(4) is dense
    sparse = Scores(np.array([1, 3]), np.array([0.5, 2.0], np.float32))
    assert sparse.dense(5).tolist() == [-np.inf, 0.5, -np.inf, 2.0, -np.inf]
