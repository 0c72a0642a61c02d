"""Drawing a token with one random number: the right distribution, whatever the row looks like."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_llamacpp.decoding.draw import BLOCK, FEW, best, draw, draw_dense
from transformers_llamacpp.decoding.numbers import Numbers, check_seeds
from transformers_llamacpp.decoding.warpers import Scores
from transformers_llamacpp.errors import InvalidInputError

pytestmark = pytest.mark.once

LAST = float(np.nextafter(1.0, 0.0))
"""The largest number a draw may get."""


def exactly(weights: npt.NDArray[np.float64], number: float) -> tuple[int, float]:
    """The token at `number` in the cumulated probabilities, added up exactly, and how far it is from a border."""
    total = np.cumsum(weights / weights.sum())
    token = int(np.searchsorted(total, number, side="right"))
    return token, float(np.abs(total - number).min())


@settings(deadline=None)
@given(
    st.integers(1, 3 * BLOCK) | st.integers(FEW - 2, FEW + 2),
    st.integers(0, 2**32 - 1),
    st.floats(0, LAST),
    st.floats(0.01, 30),
)
def test_the_token_at_that_place(n: int, seed: int, number: float, spread: float) -> None:
    values = (np.random.default_rng(seed).normal(size=n) * spread).astype(np.float32)
    weights = np.exp(values.astype(np.float64) - values.max())
    expected, border = exactly(weights, number)
    for got in (draw(Scores(None, values), number), draw(Scores(np.arange(n) * 3, values), number) // 3):
        assert got == expected or border < 1e-5, (got, expected, border)
    assert draw_dense(weights.astype(np.float32), number) == expected or border < 1e-5


@pytest.mark.parametrize("number", [0.0, 0.3, LAST])
@pytest.mark.parametrize("n", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_what_has_no_probability_is_never_drawn(n: int, number: float) -> None:
    for only in {0, n // 2, n - 1}:
        values = np.full(n, -np.inf, np.float32)
        values[only] = -3.0
        assert draw(Scores(None, values), number) == only
        assert draw(Scores(np.arange(n), values), number) == only
    values = np.zeros(n, np.float32)
    assert draw(Scores(None, values), 0.0) == 0 and draw(Scores(None, values), LAST) == n - 1


@pytest.mark.parametrize("dense", [True, False])
def test_the_distribution(dense: bool) -> None:
    """Chi-square of 20,000 draws; 1 in 10,000 correct generators would fail, and the seed is fixed."""
    values = np.array([1.0, 0.0, -np.inf, 2.0, -1.0, 0.5], np.float32)
    row = Scores(None if dense else np.arange(6), values)
    numbers = Numbers([7])
    drawn = np.bincount([draw(row, numbers.next(0)) for _ in range(20_000)], minlength=6)
    expected = torch.softmax(torch.from_numpy(values).double(), dim=0).numpy() * 20_000
    assert drawn[2] == 0
    seen = expected > 0
    assert ((drawn[seen] - expected[seen]) ** 2 / expected[seen]).sum() < 23.5  # 4 degrees of freedom


@pytest.mark.parametrize("values", [[np.nan, 0.0], [-np.inf, -np.inf], [np.inf, 0.0]])
def test_no_probabilities_are_torchs_own_error(values: list[float]) -> None:
    array = np.array(values, np.float32)
    for row in (Scores(None, array), Scores(np.arange(2), array)):
        with pytest.raises(RuntimeError, match="probability tensor contains either"):
            draw(row, 0.5)
    with pytest.raises(RuntimeError):
        draw(Scores(np.arange(0), np.empty(0, np.float32)), 0.5)


def test_each_row_has_numbers_of_its_own() -> None:
    def several(numbers: Numbers, rows: list[int]) -> list[float]:
        return [numbers.next(row) for row in rows]

    seeded = Numbers([5, 6])
    both = several(seeded, [0, 1, 0, 1])
    assert both[::2] == several(Numbers([5]), [0, 0]) and both[1::2] == several(Numbers([6]), [0, 0])
    assert len(set(both)) == 4 and all(0 <= number < 1 for number in both)
    with pytest.raises(InvalidInputError, match="2 entries for 3 rows"):
        seeded.next(2)
    torch.manual_seed(1)
    mine, before = Numbers(), torch.get_rng_state()
    assert torch.equal(torch.get_rng_state(), before), "nothing is taken before it is needed"
    drawn = several(mine, [1, 0, 1])
    after = torch.get_rng_state()
    torch.manual_seed(1)
    assert drawn == several(Numbers(), [1, 0, 1]) and torch.equal(torch.get_rng_state(), after)
    assert drawn != several(Numbers(), [1, 0, 1])


@pytest.mark.parametrize("seeds", [[], "1", -1, 2**64, [1, True], 1.5, [None]])
def test_seeds_that_are_none(seeds: object) -> None:
    with pytest.raises(InvalidInputError, match="one for each row"):
        check_seeds(seeds)


def test_the_best_of_equals_is_the_first() -> None:
    assert best(Scores(None, np.array([1.0, 2.0, 2.0], np.float32))) == 1
    assert best(Scores(np.array([4, 8, 9]), np.array([1.0, 2.0, 2.0], np.float32))) == 8
