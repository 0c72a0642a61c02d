"""The API's own logits processors, against their definitions."""

from __future__ import annotations

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from transformers_llamacpp.server.api.processors import LogitBias, RangePenalty, WrittenPenalty

pytestmark = pytest.mark.once

TEXT = torch.tensor([[3, 3, 1, 1, 4], [3, 3, 2, 2, 2]])


def scores() -> torch.Tensor:
    return torch.linspace(-2, 2, 12).reshape(2, 6)


def test_presence_and_frequency() -> None:
    changed = WrittenPenalty(presence=0.5, frequency=0.25, start=2)(TEXT, scores())
    expected = scores()
    expected[0, 1] -= 0.5 + 2 * 0.25
    expected[0, 4] -= 0.5 + 0.25
    expected[1, 2] -= 0.5 + 3 * 0.25
    assert torch.allclose(changed, expected), "the prompt does not count"
    assert torch.equal(WrittenPenalty(0.5, 0.25, start=5)(TEXT, scores()), scores()), "nothing is written yet"


def test_bias() -> None:
    before = scores()
    changed = LogitBias({2: -100.0, 5: 1.5})(TEXT, before)
    assert torch.equal(before, scores()), "what it was given stays"
    assert torch.allclose(changed - before, torch.tensor([0, 0, -100.0, 0, 0, 1.5]).expand(2, -1), atol=1e-4)


def test_a_penalty_over_the_end_of_the_text() -> None:
    whole, ranged = RepetitionPenaltyLogitsProcessor(1.5), RangePenalty(1.5, 2)
    assert torch.equal(ranged(TEXT, scores()), whole(TEXT[:, -2:], scores()))
    assert not torch.equal(ranged(TEXT, scores()), whole(TEXT, scores()))
