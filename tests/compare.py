"""Comparisons that tell a numerical tie from a fault.

The same text decoded in different batch shapes moves F32 logits by up to 0.023 (DESIGN 2.7). Where a law compares
generated tokens, a first difference is accepted only if the two candidates were within `TIE` of each other there; the
tie is reported as a `TieWarning`, and what comes after it is not compared. Anything else is a fault.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from transformers_llamacpp.decoding.numbers import Numbers

TIE = 0.03
SHARE = 30.0
"""A number drawn within 0.001 of a token's share of the probabilities is a tie."""

CLOSE = 2e-3
"""F32 weights, keys and values: measured 1e-4 from PyTorch."""

Gap = Callable[[int], float]


class TieWarning(UserWarning):
    """Two candidates were numerically equal, and one side took the other one."""


def same_tokens(expected: Sequence[int], got: Sequence[int], gap: Gap, what: str = "") -> None:
    """`gap(i)`: how far apart the scores of `expected[i]` and `got[i]` were at index `i`."""
    expected, got = [int(token) for token in expected], [int(token) for token in got]
    if expected == got:
        return
    index = first_difference(expected, got)
    if index == min(len(expected), len(got)):
        raise AssertionError(f"{what}: one stops where the other goes on, at {index}\n  {expected}\n  {got}")
    distance = gap(index)
    if not distance < TIE:
        raise AssertionError(
            f"{what}: token {index} is {got[index]}, not {expected[index]}; the gap between them is {distance:.4f}"
            f"\n  {expected}\n  {got}"
        )
    warnings.warn(
        TieWarning(f"{what}: token {index} is {got[index]} or {expected[index]}, gap {distance:.4f}"), stacklevel=2
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def same_greedy(model: Any, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], what: str = "") -> None:
    """Both are greedy continuations of `prompt`; a cold forward pass of `model` tells the gap."""

    def gap(index: int) -> float:
        logits = cold_logits(model, [*prompt, *expected[:index]])[-1]
        return abs(float(logits[int(expected[index])] - logits[int(got[index])]))

    same_tokens(expected, got, gap, what)


def cold_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of every position, `(len(tokens), vocab)`, computed with nothing in memory."""
    model.forget()
    logits: torch.Tensor = model(torch.tensor([[int(token) for token in tokens]]), use_cache=False).logits[0]
    model.forget()
    return logits


def same_generation(reference: Any, model: Any, ids: torch.Tensor, seed: int | None = None, **kwargs: Any) -> Any:
    """`model.generate` does what transformers' own model with the same weights does; returns `model`'s output.

    All rows, greedy or sampled with `seed`, for which transformers' loop draws as ours does (`one_number_a_row`). Ties are
    judged by the processed scores that transformers' model gave; for sampling by how far the number that was drawn is from
    the other token's share of the probabilities.
    """
    kwargs = {"max_new_tokens": 12, "do_sample": seed is not None, "pad_token_id": 2, "eos_token_id": 2} | kwargs
    kwargs |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    outputs = []
    for each in (reference, model):
        torch.manual_seed(seed or 0)
        with one_number_a_row() if each is reference else nullcontext():
            outputs.append(each.generate(ids, **kwargs))
    expected, got = outputs

    def gap_in(row: int) -> Gap:
        def gap(index: int) -> float:
            scores = expected.scores[index][row].double()
            a, b = (int(out.sequences[row, ids.shape[1] + index]) for out in outputs)
            if seed is None:
                return abs(float(scores[a] - scores[b]))
            torch.manual_seed(seed)
            numbers = Numbers()
            number = [numbers.next(row) for _ in range(index + 1)][-1]
            total = torch.softmax(scores, dim=-1).cumsum(dim=-1)
            begin = float(total[b - 1]) if b else 0.0
            return max(begin - number, number - float(total[b])) * SHARE

        return gap

    assert got.sequences.shape[0] == expected.sequences.shape[0]
    for row in range(expected.sequences.shape[0]):
        rows = [_unpadded(out.sequences[row, ids.shape[1] :].tolist(), kwargs["eos_token_id"]) for out in outputs]
        same_tokens(*rows, gap_in(row), f"row {row}, {kwargs}")
    return got


def _unpadded(tokens: list[int], end: int | list[int] | None) -> list[int]:
    """Up to and including the end token: rows that differ at a tie need not have the same length."""
    ends = end if isinstance(end, list) else [end]
    for index, token in enumerate(tokens):
        if token in ends:
            return tokens[: index + 1]
    return tokens


@contextmanager
def one_number_a_row() -> Iterator[None]:
    """`torch.multinomial` takes one random number for each row, its place in the cumulated probabilities: slowly what
    `decoding/draw.py` does, so that transformers' own loop can be compared token by token."""

    numbers = Numbers()

    def multinomial(probabilities: torch.Tensor, num_samples: int, **_: Any) -> torch.Tensor:
        assert num_samples == 1
        total = probabilities.double().cumsum(dim=-1)
        drawn = torch.tensor([numbers.next(row) for row in range(len(total))], dtype=torch.float64)
        return torch.searchsorted(total, (drawn * total[:, -1])[:, None], right=True)

    original, torch.multinomial = torch.multinomial, multinomial  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.multinomial = original


def same_beams(reference: Any, model: Any, ids: torch.Tensor, seed: int | None = None, **kwargs: Any) -> Any:
    """Beam search ends in the same hypotheses; two of equal score (to 1e-3) may change places. Returns the output."""
    kwargs = {"max_new_tokens": 12, "do_sample": seed is not None, "pad_token_id": 2, "eos_token_id": 2} | kwargs
    kwargs |= {"return_dict_in_generate": True, "output_scores": True}
    outputs = []
    for each in (reference, model):
        torch.manual_seed(seed or 0)
        outputs.append(each.generate(ids, **kwargs))
    expected, got = outputs
    assert got.sequences.shape[0] == expected.sequences.shape[0]
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, atol=0.01, rtol=0)
    for row in range(expected.sequences.shape[0]):
        a, b = (out.sequences[row, ids.shape[1] :].tolist() for out in outputs)
        score, other = (float(out.sequences_scores[row]) for out in outputs)
        if a != b and abs(score - other) > 1e-3:
            raise AssertionError(f"row {row}, {kwargs}: {b}, not {a}; scores {other:.5f} and {score:.5f}")
        if a != b:
            warnings.warn(TieWarning(f"row {row}: two hypotheses of score {score:.5f}"), stacklevel=2)
    return got


@contextmanager
def evaluates(model: Any, tokens: int) -> Iterator[None]:
    """The one `generate()` call inside evaluates exactly so many tokens, prompt and generation together."""
    yield
    assert model.last_stats.evaluated_tokens == tokens, model.last_stats


def close(got: torch.Tensor, expected: torch.Tensor, atol: float = CLOSE) -> None:
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=atol, rtol=0)


def padded(rows: Sequence[list[int]], side: str = "left", fill: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths as `(input_ids, attention_mask)`."""
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        gap, nothing, ones = [fill] * (width - len(row)), [0] * (width - len(row)), [1] * len(row)
        ids.append(gap + row if side == "left" else row + gap)
        mask.append(nothing + ones if side == "left" else ones + nothing)
    return torch.tensor(ids), torch.tensor(mask)
