"""Speculative sampling keeps the target's distribution: by its law, and by counting."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from transformers_llamacpp.decoding.drafting.draft import EMPTY, Draft
from transformers_llamacpp.decoding.numbers import Numbers
from transformers_llamacpp.decoding.verify import Chooser

pytestmark = pytest.mark.once

N = 20_000
CHI_SQUARE = {4: 18.5}  # degrees of freedom: 0.001

TARGET = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05])
DRAFTS = {
    "the same": TARGET,
    "flat": torch.full((5,), 0.2),
    "opposite": TARGET.flip(0),
    "without what the target wants most": torch.tensor([0.0, 0.25, 0.25, 0.25, 0.25]),
    "certain": torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]),
}


def chooser(**config: object) -> Chooser:
    return Chooser(SimpleNamespace(**({"do_sample": True} | config)), Numbers())


def count(choose: Chooser, q: torch.Tensor, certain: bool = False) -> tuple[torch.Tensor, float]:
    """How often each token came out, and the share of drafts that was taken."""
    torch.manual_seed(1)
    scores, seen, taken = TARGET.log()[None], torch.zeros(5), 0
    drafted = torch.multinomial(q, N, replacement=True).tolist()
    for token in drafted:
        draft = Draft([token], None if certain else q[None])
        got, accepted = choose.choose(scores, draft, 0)
        assert not accepted or got == token
        seen[got] += 1
        taken += accepted
    return seen, taken / N


@pytest.mark.parametrize("q", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("certain", [False, True])
def test_the_targets_distribution_comes_out(q: torch.Tensor, certain: bool) -> None:
    seen, taken = count(chooser(), q, certain)
    assert float(((seen - N * TARGET) ** 2 / (N * TARGET)).sum()) < CHI_SQUARE[4]
    expected = float((TARGET * q).sum()) if certain else float(torch.minimum(TARGET, q).sum())
    assert taken == pytest.approx(expected, abs=0.02)


def test_an_ensemble_weight_mixes_the_two() -> None:
    q = DRAFTS["flat"]
    mixed = 0.3 * TARGET + 0.7 * q
    seen, taken = count(chooser(assistant_ensemble_weight=0.3), q)
    assert float(((seen - N * mixed) ** 2 / (N * mixed)).sum()) < CHI_SQUARE[4]
    assert taken == pytest.approx(float(torch.minimum(mixed, q).sum()), abs=0.02)


def test_an_ensemble_weight_decides_the_most_probable_token_too() -> None:
    q = torch.tensor([[0.0, 0.0, 0.9, 0.1, 0.0]])
    scores = TARGET.log()[None]
    assert chooser(do_sample=False).choose(scores, Draft([2], q), 0) == (0, False)
    assert chooser(do_sample=False, assistant_ensemble_weight=0.5).choose(scores, Draft([2], q), 0) == (2, True)
    assert chooser(do_sample=False, assistant_ensemble_weight=0.5).choose(scores, Draft([2], q), 1) == (0, False)


def test_greedy_takes_what_it_would_have_chosen() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0]])
    choose = chooser(do_sample=False)
    assert choose.choose(scores, Draft([1, 2]), 0) == (1, True)
    assert choose.choose(scores, Draft([1, 2]), 1) == (1, False)
    assert choose.choose(scores, Draft([1, 2]), 2) == (1, False)
    assert choose.choose(scores, EMPTY, 0) == (1, False)


def test_a_plain_guess_leaves_the_random_numbers_as_they_would_be() -> None:
    scores = TARGET.log()[None]
    torch.manual_seed(4)
    expected = [chooser().choose(scores, EMPTY, 0)[0] for _ in range(50)]
    torch.manual_seed(4)
    assert [chooser().choose(scores, Draft([3]), 0)[0] for _ in range(50)] == expected


def test_a_forbidden_token_never_comes_out() -> None:
    scores = TARGET.log()[None].clone()
    scores[0, 1] = -torch.inf
    torch.manual_seed(0)
    for _ in range(200):
        token, accepted = chooser().choose(scores, Draft([1], DRAFTS["flat"][None]), 0)
        assert token != 1
        assert not accepted
