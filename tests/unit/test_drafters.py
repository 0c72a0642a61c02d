"""The parts around a draft: schedules, who is asked first, what the pace is told, how an assistant picks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from transformers_llamacpp.decoding.drafting.assistant import AssistantDrafter
from transformers_llamacpp.decoding.drafting.combined import Drafters, PacedDrafter, Schedule
from transformers_llamacpp.decoding.drafting.draft import Draft
from transformers_llamacpp.decoding.drafting.sampler import DraftSampler, usable_processors
from transformers_llamacpp.decoding.numbers import Numbers
from transformers_llamacpp.decoding.text import GrowingText


class Scripted:
    """Drafts what it was given, and notes what it is told."""

    def __init__(self, *drafts: Sequence[int]) -> None:
        self.drafts, self.told, self.limits, self.closed = list(drafts), [], [], 0

    def prepare(self, tokens: list[int]) -> None: ...

    def draft(self, tokens: list[int], limit: int) -> Draft:
        self.limits.append(limit)
        return Draft(list(self.drafts.pop(0)))

    def verified(self, drafted: int, accepted: int) -> None:
        self.told.append((drafted, accepted))

    def close(self) -> None:
        self.closed += 1


class Slow:
    """A pace that allows `most` and notes what it is told."""

    def __init__(self, most: int) -> None:
        self.most, self.rounds, self.plain = most, [], []

    def limit(self, wanted: int) -> int:
        return min(wanted, self.most)

    def observe_plain(self, seconds: float) -> None:
        self.plain.append(seconds)

    def observe(self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float) -> None:
        assert draft_seconds >= 0
        self.rounds.append((drafted, accepted, verify_seconds))


def paced(drafter: Any, most: int = 9, tokens: int = 4, schedule: str = "constant") -> tuple[PacedDrafter, Slow]:
    pace = Slow(most)
    return PacedDrafter(drafter, Schedule(tokens, schedule), pace), pace


def test_the_first_with_an_idea_drafts_and_hears_what_became_of_it() -> None:
    first, second = Scripted([], [7, 8], []), Scripted([1, 2, 3], [])
    (a, pace_a), (b, pace_b) = paced(first), paced(second)
    drafters = Drafters([a, b])
    assert drafters.draft([5], 10).tokens == [1, 2, 3]
    drafters.verified(3, 1, 0.5)
    assert drafters.draft([5], 10).tokens == [7, 8]
    drafters.verified(2, 2, 0.25)
    assert len(drafters.draft([5], 10)) == 0
    drafters.verified(0, 0, 0.125)
    assert (first.told, second.told) == ([(2, 2)], [(3, 1)])
    assert (pace_a.rounds, pace_b.rounds) == ([(2, 2, 0.25)], [(3, 1, 0.5)])
    assert pace_a.plain == pace_b.plain == [0.125]
    drafters.close()
    assert first.closed == second.closed == 1


def test_the_smallest_of_three_limits_counts_and_none_asks_nobody() -> None:
    drafter = Scripted([1], [1], [1])
    for most, room, expected in ((9, 9, 4), (2, 9, 2), (9, 3, 3)):
        one, _ = paced(drafter, most)
        assert len(one.draft([5], room)) == 1
        assert drafter.limits[-1] == expected
    for most, room in ((0, 9), (9, 0)):
        one, _ = paced(drafter, most)
        assert len(Drafters([one]).draft([5], room)) == 0
    assert len(drafter.limits) == 3


def test_schedules_and_what_is_kept_of_them() -> None:
    kept: list[int] = []
    for schedule, expected in (("constant", 4), ("heuristic", 7), ("heuristic_transient", 7)):
        drafter = PacedDrafter(Scripted(), Schedule(4, schedule), Slow(9), kept.append)
        for drafted, accepted in ((4, 4), (6, 6), (8, 3)):
            drafter.verified(drafted, accepted, 0.1)
        drafter.close()
        assert kept.pop() == expected
    lowest = Schedule(1, "heuristic")
    lowest.update(1, 0)
    assert lowest.tokens == 1


class Counter:
    """Reads any text; after token `t` it is sure of `t + 1`, but of 5 it is not."""

    n_ctx, n_vocab = 12, 10

    def __init__(self) -> None:
        self.read_lengths: list[int] = []

    def read(self, tokens: np.ndarray) -> torch.Tensor:
        self.read_lengths.append(len(tokens))
        return self.step(int(tokens[-1]))

    def step(self, token: int) -> torch.Tensor:
        logits = torch.zeros(10)
        logits[(token + 1) % 10] = 1.0 if token == 4 else 20.0
        return logits

    def close(self) -> None: ...


def drafter(threshold: float = 0.4, ends: Sequence[int] = (), keep: bool = False, n_vocab: int = 10) -> AssistantDrafter:
    return AssistantDrafter(Counter(), DraftSampler(n_vocab, [], False, keep, Numbers()), threshold, ends)


def test_a_draft_ends_at_the_limit_at_an_end_token_and_after_the_first_doubt() -> None:
    assert drafter().draft([0], 3).tokens == [1, 2, 3]
    assert drafter().draft([2], 9).tokens == [3, 4, 5]
    assert drafter(threshold=0).draft([2], 6).tokens == [3, 4, 5, 6, 7, 8]
    assert drafter(ends=[4]).draft([2], 9).tokens == [3, 4]


def test_nothing_is_drafted_for_what_cannot_be_read() -> None:
    assert len(drafter().draft([], 3)) == 0
    assert len(drafter().draft([1, 11], 3)) == 0
    assert len(drafter().draft([1] * 12, 3)) == 0
    assert drafter().draft([1] * 10, 9).tokens == [2, 3]


def test_a_long_text_is_read_before_the_draft() -> None:
    one = drafter()
    one.reader.n_ctx = 100  # type: ignore[misc]
    one.prepare([1] * 40)
    one.draft([1] * 40, 1)
    one.prepare([1] * 42)
    assert one.reader.read_lengths == [39, 40]  # type: ignore[attr-defined]


def test_probabilities_are_what_the_tokens_were_drawn_from() -> None:
    draft = drafter(keep=True, n_vocab=12).draft([0], 2)
    assert draft.probabilities is not None
    assert draft.probabilities.shape == (2, 12)
    assert draft.probabilities[:, 10:].sum() == 0  # the target's tokens that the assistant lacks
    torch.testing.assert_close(draft.probabilities.sum(dim=1), torch.ones(2))
    assert drafter(n_vocab=4, threshold=0).draft([2], 2).tokens == [3, 0]  # only the target's tokens are drafted


def test_only_processors_that_remember_nothing_run_on_drafts() -> None:
    class Mine(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise AssertionError("a processor of somebody else's saw a draft")

    class Warper(TemperatureLogitsWarper):
        """Somebody's own, whatever it is called."""

    warm, penalty = TemperatureLogitsWarper(0.5), RepetitionPenaltyLogitsProcessor(5.0)
    assert usable_processors([warm, Mine(), Warper(0.1), penalty]) == [warm, penalty]
    sampler = DraftSampler(4, [penalty], False, False, Numbers())
    logits = torch.tensor([1.0, 0.9, 0.0, 0.0])
    assert sampler.pick([2], logits)[0] == 0
    assert sampler.pick([0], logits)[0] == 1
    assert logits.tolist() == [1.0, pytest.approx(0.9), 0.0, 0.0]


def test_a_growing_text() -> None:
    text = GrowingText(torch.tensor([[1, 2]]))
    views = []
    for token in range(600):
        text.append(token)
        views.append(text.ids)
    assert [view.shape[1] for view in views] == list(range(3, 603))
    assert views[-1][0].tolist() == [1, 2, *range(600)]
    assert views[100][0].tolist() == [1, 2, *range(101)]
