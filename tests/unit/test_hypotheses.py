"""The finished texts of a beam search, without a model."""

from __future__ import annotations

import pytest
import torch

from transformers_llamacpp.decoding.beams import DiversityPenalty
from transformers_llamacpp.decoding.hypotheses import Hypotheses, best_of, to_tensors


def make(size: int = 2, penalty: float = 1.0, early: bool | str = False) -> Hypotheses:
    return Hypotheses(size, penalty, early, max_new_tokens=10)


def tokens(hypotheses: Hypotheses) -> list[tuple[int, ...]]:
    return [one.tokens for one in best_of([hypotheses], 9)]


def test_the_worst_goes() -> None:
    group = make()
    for total, text in [(-4.0, (1, 2)), (-1.0, (3,)), (-9.0, (4,)), (-3.0, (5, 6))]:
        group.add(total, text, text)
    assert tokens(group) == [(3,), (5, 6)]
    assert [one.score for one in best_of([group], 2)] == [-1.0, -1.5]


def test_equals() -> None:
    group = make()
    for text in [(1,), (2,), (3,)]:
        group.add(-1.0, text, ())
    assert tokens(group) == [(2,), (1,)]  # a full list takes no equal; the last one that came in is first


@pytest.mark.parametrize(
    ("penalty", "early", "best", "length", "done"),
    [
        (1.0, True, -0.1, 3, True),
        (1.0, False, -2.9, 3, False),
        (1.0, False, -3.0, 3, True),
        (1.0, "never", -3.0, 3, False),  # over ten tokens it could still reach -0.3
        (1.0, "never", -10.0, 3, True),
        (-1.0, "never", -0.4, 3, True),  # longer would be worse: -1.2
        (0.0, False, -1.0, 3, True),
    ],
)
def test_done(penalty: float, early: bool | str, best: float, length: int, done: bool) -> None:
    group = make(penalty=penalty, early=early)
    group.update_done(best, length)
    assert not group.done  # nothing has ended yet
    for text in [(1,), (2,)]:
        group.add(-1.0, text, ())
    group.update_done(best, length)
    assert group.done == done


def test_tensors() -> None:
    group = make()
    group.add(-1.0, (7, 8, 2), (0, 0, 1))
    group.add(-1.0, (9, 2), (1, 0))
    prompts = torch.tensor([[5, 6], [5, 6]])
    sequences, scores, beams = to_tensors(prompts, best_of([group], 2), pad=0)
    assert sequences.tolist() == [[5, 6, 7, 8, 2], [5, 6, 9, 2, 0]]
    assert beams.tolist() == [[0, 0, 1], [1, 0, -1]]
    assert scores.tolist() == pytest.approx([-1 / 3, -0.5])


def test_best_of_all_groups() -> None:
    first, second = make(), make()
    first.add(-3.0, (1,), ())
    second.add(-1.0, (2,), ())
    second.add(-4.0, (3,), ())
    assert [one.tokens for one in best_of([first, second], 2)] == [(2,), (1,)]


def test_the_penalty_counts_earlier_groups_of_the_same_text() -> None:
    penalty = DiversityPenalty(0.5, num_beams=4, num_beam_groups=2)
    current = torch.tensor([1, 1, 9, 9, 2, 3, 9, 9])  # of later groups nothing is read
    zeros = torch.zeros(4, 10)
    assert torch.equal(penalty(torch.empty(4, 0), zeros, current, 0), zeros)
    got = penalty(torch.empty(4, 0), zeros, current, 1)
    assert got[0].tolist() == got[1].tolist() == [0, -1.0, *[0] * 8]
    assert got[2].tolist() == got[3].tolist() == [0, 0, -0.5, -0.5, *[0] * 6]
