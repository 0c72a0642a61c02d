"""What a case is, and what most cases do: load a tiny model, ask it something, compare with the usual answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import models
from transformers_llamacpp import LlamaCppConfig, LlamaCppForCausalLM

ANSWER = "answer"
EITHER = "either"  # a right answer, or any error of the package's own

PROMPT = [1, 70, 120, 200, 31, 77, 78, 250, 99, 14]


@dataclass(frozen=True)
class Case:
    run: Callable[[], None]
    expect: str
    """`ANSWER`, `EITHER`, or the name of an exception class."""
    says: tuple[str, ...] = ()
    """What the message must contain: the numbers, the option that cures it."""
    at_exit: bool = False
    """The end of the interpreter is part of the case."""


CASES: dict[str, Case] = {}


def case(expect: str, *says: str, at_exit: bool = False) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__.replace("_", " ")] = Case(function, expect, says, at_exit)
        return function

    return register


def long(n: int) -> list[int]:
    """A prompt of `n` tokens."""
    return [1, *(5 + (7 * i) % 280 for i in range(n - 1))]


def load(kind: str = "llama", **options: Any) -> LlamaCppForCausalLM:
    options = {"n_ctx": 256, "n_threads": 1} | options
    return LlamaCppForCausalLM.from_pretrained(models.tiny(kind), quantization_config=LlamaCppConfig(**options))


def greedy(model: LlamaCppForCausalLM, tokens: list[int] = PROMPT, n: int = 4, **kwargs: Any) -> list[int]:
    kwargs = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": n} | kwargs
    output = model.generate(torch.tensor([tokens]), **kwargs)
    return output[0, len(tokens) :].tolist()


def expected(kind: str = "llama", tokens: list[int] = PROMPT, n: int = 4) -> list[int]:
    """The answer of a model loaded with nothing unusual."""
    with load(kind, n_ctx=512) as model:
        return greedy(model, tokens, n)


def right(model: LlamaCppForCausalLM, kind: str = "llama", tokens: list[int] = PROMPT, n: int = 4) -> None:
    got, want = greedy(model, tokens, n), expected(kind, tokens, n)
    assert got == want, f"{got} is not {want}"
    model.engine.check()
