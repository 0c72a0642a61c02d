"""Processors that are not transformers' own: what they are, what they get, and what becomes of what they give."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process

from transformers_llamacpp.decoding.warpers import Chain
from warper_cases import Case, case_of, class_of, expected, same_scores


@pytest.fixture
def case() -> Iterator[Case]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield case_of("normal", 4, 2, 5000, 8)
    torch.set_num_threads(threads)


class Spy(LogitsProcessor):
    """Keeps what it gets, itself and as it was then."""

    def __init__(self) -> None:
        self.got: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.got.append((input_ids, scores, scores.clone()))
        return scores


def top_k(k: int = 40) -> Any:
    return class_of("TopKLogitsWarper")(k)


def top_p(share: float = 0.9) -> Any:
    return class_of("TopPLogitsWarper")(share)


def temperature() -> Any:
    return class_of("TemperatureLogitsWarper")(0.7)


@pytest.mark.parametrize("before", [[], [temperature], [top_k], [temperature, top_k, top_p]], ids=len)
def test_a_foreign_processor_sees_the_whole_tensor(case: Case, before: list[Any]) -> None:
    spy, theirs = Spy(), Spy()
    known = [make() for make in before]
    chain = Chain([*known, spy, top_p()])
    assert chain.foreign == [spy] and not chain.covered
    logits = case.scores.numpy().copy()
    found = chain.run(case.ids, logits)
    wanted = LogitsProcessorList([*known, theirs, top_p()])(case.ids, case.scores)
    for mine, their in zip(spy.got[0], theirs.got[0], strict=True):
        assert mine.dtype == their.dtype and torch.equal(mine, their)
    assert spy.got[0][0] is case.ids
    logits[:] = 7  # llama.cpp's next decode; what the spy has kept is its own
    assert torch.equal(spy.got[0][1], spy.got[0][2])
    for row, scores in zip(found, wanted, strict=True):
        same_scores(scores.numpy(), row.dense(case.n_vocab))


def test_what_it_returns_goes_on_and_stays_its_own(case: Case) -> None:
    kept = torch.full((2, case.n_vocab), -3.0)
    kept[:, 10:20] = torch.arange(10.0)

    def replace(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return kept

    before = kept.clone()
    suppress = class_of("SuppressTokensLogitsProcessor")([11])
    chain = Chain([top_k(), replace, suppress, temperature()])
    wanted = expected(list(chain), case)
    same_scores(wanted.numpy(), chain(case.ids, case.scores).numpy())
    assert torch.equal(kept, before)
    assert Chain([top_k(), replace])(case.ids, case.scores) is kept


def test_it_may_change_its_tensor_in_place(case: Case) -> None:
    def cut(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, ::2] = -float("inf")
        return scores

    wanted = expected([temperature(), cut, top_k(3)], case)
    same_scores(wanted.numpy(), Chain([temperature(), cut, top_k(3)])(case.ids, case.scores).numpy())
    first = case.scores.clone()
    given = Chain([cut])(case.ids, first)
    assert given is first, "the first one gets the caller's tensor, as in transformers"


@pytest.mark.parametrize("change", ["double", "half the rows", "gradient"])
def test_whatever_tensor_it_returns(case: Case, change: str) -> None:
    def returns(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if change == "double":
            return scores.double()
        return scores[:1] if change == "half the rows" else scores.clone().requires_grad_()

    processors = [temperature(), returns, top_k(5), class_of("LogitNormalization")()]
    wanted = expected(processors, case).detach()
    found = Chain(processors)(case.ids, case.scores)
    assert found.dtype == wanted.dtype and torch.equal(found.detach(), wanted)
    rows = Chain(processors).run(case.ids, case.scores.numpy().copy())
    for row, scores in zip(rows, wanted.expand(len(case.ids), -1), strict=True):  # one row is for all
        same_scores(scores.float().numpy(), row.dense(case.n_vocab))


def test_more_arguments_are_passed_on_and_missed(case: Case) -> None:
    class Shift(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, by: float) -> torch.Tensor:  # type: ignore[override]
            return scores + by

    chain = Chain([top_k(), Shift()])
    wanted = LogitsProcessorList(chain)(case.ids, case.scores, by=2.0)
    same_scores(wanted.numpy(), chain(case.ids, case.scores, by=2.0).numpy())
    same_scores(wanted[0].numpy(), chain.run(case.ids, case.scores.numpy().copy(), by=2.0)[0].dense(case.n_vocab))
    with pytest.raises(ValueError, match="required parameters"):
        chain.run(case.ids, case.scores.numpy().copy())


def test_a_subclass_is_foreign(case: Case) -> None:
    class Mine(class_of("TopKLogitsWarper")):  # type: ignore[misc]
        pass

    assert len(Chain([Mine(3)]).foreign) == 1
    named = type("TopKLogitsWarper", (class_of("TopKLogitsWarper"),), {})
    assert len(Chain([named(3)]).foreign) == 1


def test_a_processor_with_a_call_of_its_own_is_foreign() -> None:
    processor = top_k()
    processor.__call__ = lambda input_ids, scores: scores
    assert Chain([processor]).foreign == [processor]


def other(self: Any, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + 1


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_class_that_somebody_changed_is_foreign(case: Case, monkeypatch: pytest.MonkeyPatch, wrapped: bool) -> None:
    cls = class_of("TopPLogitsWarper")
    monkeypatch.setattr(cls, "__call__", functools.wraps(cls.__call__)(other) if wrapped else other)
    chain = Chain([top_k(5), top_p()])
    assert len(chain.foreign) == 1
    same_scores(expected(list(chain), case).numpy(), chain(case.ids, case.scores).numpy())
    monkeypatch.undo()
    assert Chain([top_p()]).covered


def test_a_watermark_that_somebody_changed_is_foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = class_of("WatermarkLogitsProcessor")
    watermark = cls(100, "cpu")
    assert Chain([watermark]).covered
    monkeypatch.setattr(cls, "__call__", other)
    assert Chain([watermark]).foreign == [watermark]


def test_a_helper_that_somebody_changed(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = class_of("EncoderNoRepeatNGramLogitsProcessor")(2, case.ids)
    monkeypatch.setattr(logits_process, "_get_generated_ngrams", lambda *_: [1, 2, 3])
    assert Chain([processor]).foreign == [processor]


def test_the_check_is_not_made_again_for_every_token(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = Chain([top_k(), top_p()])
    chain.run(case.ids, case.scores.numpy().copy())

    def never(*_: Any) -> Any:
        raise AssertionError("source read again")

    monkeypatch.setattr(inspect, "getsourcelines", never)
    monkeypatch.setattr(inspect, "signature", never)
    chain.run(case.ids, case.scores.numpy().copy())
    Chain([top_k(), top_p()]).run(case.ids, case.scores.numpy().copy())


@pytest.mark.parametrize("change", ["double", "half", "gradient", "meta"])
def test_other_tensors_go_through_transformers(case: Case, change: str) -> None:
    scores = case.scores.requires_grad_() if change == "gradient" else case.scores
    scores = scores.to("meta") if change == "meta" else scores.to({"double": torch.float64, "half": torch.bfloat16}.get(change))
    ids = case.ids.to(scores.device)
    processors = [temperature(), top_k(5)]
    wanted, found = LogitsProcessorList(processors)(ids, scores), Chain(processors)(ids, scores)
    assert (found.dtype, found.device, found.shape) == (wanted.dtype, wanted.device, wanted.shape)
    assert found.requires_grad == wanted.requires_grad
    if change != "meta":
        assert torch.equal(found, wanted)


def test_scores_that_do_not_lie_in_one_piece(case: Case) -> None:
    wide = torch.randn(2, 3 * case.n_vocab)[:, ::3]
    tall = torch.randn(case.n_vocab, 2).T
    for scores in (wide, tall):
        wanted = LogitsProcessorList([top_p()])(case.ids, scores)
        same_scores(wanted.numpy(), Chain([top_p()])(case.ids, scores).numpy())
        found = Chain([top_p()]).run(case.ids, scores.numpy())
        same_scores(wanted[1].numpy(), found[1].dense(case.n_vocab))
    locked = wide.numpy().copy()
    locked.flags.writeable = False
    Chain([class_of("SuppressTokensLogitsProcessor")([1])]).run(case.ids, locked)
