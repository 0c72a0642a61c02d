"""The short way behind a top-k keeps what transformers keeps, on vocabularies large enough for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from transformers_llamacpp.decoding.warpers import Chain
from transformers_llamacpp.decoding.warping import short
from transformers_llamacpp.decoding.warping.rows import Row

IDS = torch.tensor([[1, 2, 3]])


def row_of(style: str, seed: int, n: int) -> npt.NDArray[np.float32]:
    draw = np.random.default_rng(seed)
    values = draw.normal(size=n) * draw.choice([0.1, 2.0, 8.0])
    if style == "tail":
        values = draw.gumbel(size=n) * 2.5
    if style == "ties":
        values = np.round(values * 2) / 2
    if style == "one":
        values[draw.integers(n)] += 60
    if style == "banned":
        values[draw.random(n) < draw.choice([0.5, 0.99, 0.999])] = -np.inf
    if style == "sorted":
        values = np.sort(values)
    if style == "equal":
        values[:] = 1.0
    return values.astype(np.float32)


@settings(deadline=None, max_examples=150)
@given(
    style=st.sampled_from(("tail", "tail", "normal", "ties", "one", "banned", "sorted", "equal")),
    seed=st.integers(0, 2**32 - 1),
    n=st.sampled_from((4097, 9000, 49152, 70001)),
    k=st.sampled_from((1, 2, 40, 40, 100, 256, 257, 5000)),
    temperature=st.sampled_from((None, None, 0.3, 1.7, 1)),
    tail=st.lists(st.sampled_from(("p", "min_p", "p 2", "min_p 2", "p all")), max_size=3),
)
def test_as_transformers(style: str, seed: int, n: int, k: int, temperature: Any, tail: list[str]) -> None:
    warpers: list[Any] = [] if temperature is None else [TemperatureLogitsWarper(float(temperature))]
    warpers.append(TopKLogitsWarper(k))
    kinds = {
        "p": lambda: TopPLogitsWarper(0.9), "min_p": lambda: MinPLogitsWarper(0.05), "p all": lambda: TopPLogitsWarper(1.0),
        "p 2": lambda: TopPLogitsWarper(0.2, min_tokens_to_keep=2),
        "min_p 2": lambda: MinPLogitsWarper(0.9, min_tokens_to_keep=2),
    }  # fmt: skip
    warpers += [kinds[name]() for name in tail]
    chain = Chain(warpers)
    for step in range(3):  # where a step begins to look depends on the one before
        values = row_of(style, seed + step, n)
        expected = LogitsProcessorList(warpers)(IDS, torch.from_numpy(values[None].copy()))[0].numpy()
        [got] = chain.run(IDS, values[None].copy())
        np.testing.assert_array_equal(got.dense(n), expected)


@pytest.mark.parametrize("style", ["tail", "normal", "one"])
def test_the_short_way_is_taken(style: str) -> None:
    """What is compared above is not the longer way."""
    tail = short.ShortTail([TemperatureLogitsWarper(0.7), TopKLogitsWarper(40), TopPLogitsWarper(0.95), MinPLogitsWarper(0.01)])
    assert tail.begin == 0
    taken = [tail.cut(Row(0, row_of(style, seed, 49152), True)) for seed in range(20)]
    assert sum(cut is not None for cut in taken) > 15
    assert short.ShortTail([TopPLogitsWarper(0.9)]).begin == 1
    assert short.ShortTail([TopPLogitsWarper(0.9), TopKLogitsWarper(4), TopPLogitsWarper(0.9)]).begin == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_goes_the_longer_way(bad: float) -> None:
    values = row_of("tail", 1, 49152)
    values[77] = bad
    assert short.ShortTail([TopKLogitsWarper(40)]).cut(Row(0, values, True)) is None
    assert short.ShortTail([TopKLogitsWarper(40, filter_value=-5.0)]).cut(Row(0, row_of("tail", 1, 49152), True)) is None
