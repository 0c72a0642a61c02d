"""Token ids, masks, embeddings and numbers that mean nothing."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessorList

from crash.case import ANSWER, CASES, PROMPT, Case, case, expected, greedy, load, right
from transformers_llamacpp import LlamaCppCache


def bad_token(token: int) -> None:
    def forward() -> None:
        with load() as model:
            model(torch.tensor([[1, token, 5]]))

    def generate() -> None:
        with load() as model:
            greedy(model, [1, 5, token])

    def continued() -> None:
        with load() as model:
            cache = LlamaCppCache(model)
            model(torch.tensor([PROMPT]), cache=cache)
            try:
                model(torch.tensor([[5, token]]), cache=cache)
            finally:
                assert cache.tokens(0) == PROMPT
                right(model)

    for how in (forward, generate, continued):
        CASES[f"token {token} in {how.__name__}"] = Case(how, "InvalidInputError", (str(token), "295"))


for bad in (-1, -100, -(2**31), 296, 2**31 - 1, 2**31, 2**32 + 5, 2**40, 2**63 - 1, -(2**63)):
    bad_token(bad)


@case(ANSWER)
def bad_tokens_under_the_mask() -> None:
    with load() as model:
        ids = torch.tensor([[-100, 2**40, *PROMPT]])
        mask = torch.tensor([[0, 0, *[1] * len(PROMPT)]])
        output = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert output[0, ids.shape[1] :].tolist() == expected()


@case("InvalidInputError", "empty")
def no_tokens() -> None:
    with load() as model:
        model(torch.zeros(1, 0, dtype=torch.long))


@case("InvalidInputError", "empty")
def no_rows() -> None:
    with load() as model:
        model(torch.zeros(0, 3, dtype=torch.long))


@case("Exception")
def generating_from_no_tokens() -> None:
    with load() as model:
        model.generate(torch.zeros(1, 0, dtype=torch.long), max_new_tokens=3, bos_token_id=None)


@case("Exception")
def generating_from_no_rows() -> None:
    with load() as model:
        model.generate(torch.zeros(0, 3, dtype=torch.long), max_new_tokens=3)


@case(ANSWER)
def an_empty_text() -> None:
    with load() as model:
        ids = model.tokenizer("", return_tensors="pt").input_ids
        assert ids.tolist() == [[1]]
        right(model, tokens=[1])


@case("InvalidInputError", "row 0")
def a_mask_of_zeros() -> None:
    with load() as model:
        model(torch.tensor([PROMPT]), attention_mask=torch.zeros(1, len(PROMPT)))


for shape in ((1, 9), (1, 11), (2, 10), (10,), (1, 1, 10), (1, 1, 10, 10)):

    def wrong_mask(shape: tuple[int, ...] = shape) -> None:
        with load() as model:
            model(torch.tensor([PROMPT]), attention_mask=torch.ones(shape))

    CASES[f"a mask of shape {shape}"] = Case(wrong_mask, "InvalidInputError", ("attention_mask",))


for number in ("nan", "inf", "-inf", "1e38"):

    def wild_embeds(number: float = float(number)) -> None:
        with load() as model:
            assert model(inputs_embeds=torch.full((1, 4, 64), number)).logits.shape == (1, 4, 296)
            right(model)

    CASES[f"embeddings of {number}"] = Case(wild_embeds, ANSWER)


@case("InvalidInputError", "63", "64")
def embeddings_of_another_width() -> None:
    with load() as model:
        model(inputs_embeds=torch.zeros(1, 4, 63))


@case(ANSWER)
def embeddings_and_tokens_in_turn() -> None:
    with load() as model:
        for _ in range(3):
            model(inputs_embeds=torch.ones(1, 300, 64)[:, :200])
            right(model)
            model.forget()


for kept in (-1, -(10**9), 10**9, [10], [-11], [2**40], []):

    def keeps(kept: Any = kept) -> None:
        with load() as model:
            keep = kept if isinstance(kept, int) else torch.tensor(kept, dtype=torch.long)
            model(torch.tensor([PROMPT]), logits_to_keep=keep)
            right(model)

    CASES[f"logits_to_keep={kept}"] = Case(keeps, "Exception or answer")

for number in (0, -1, 10**12):

    def generates(number: int = number) -> None:
        with load() as model:
            greedy(model, n=number)

    CASES[f"max_new_tokens={number}"] = Case(generates, "Exception or answer")


@case("Exception")
def a_processor_that_gives_nan() -> None:
    with load() as model:
        nan = LogitsProcessorList([lambda ids, scores: scores * float("nan")])
        try:
            model.generate(torch.tensor([PROMPT]), do_sample=True, max_new_tokens=4, logits_processor=nan)
        finally:
            right(model)
