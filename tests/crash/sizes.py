"""Prompts and batches of every size."""

from __future__ import annotations

import torch

from crash.case import ANSWER, EITHER, case, expected, greedy, load, long, right
from transformers_llamacpp import LlamaCppCache


@case(ANSWER)
def a_prompt_of_one_token() -> None:
    with load() as model:
        right(model, tokens=[70])


@case(ANSWER)
def a_prompt_that_leaves_room_for_one_token() -> None:
    with load(n_ctx=100) as model:
        assert greedy(model, long(99), 10) == expected(tokens=long(99), n=1)


@case("ContextOverflowError", "n_ctx=101", "100")
def a_prompt_as_long_as_the_context() -> None:
    with load(n_ctx=100) as model:
        greedy(model, long(100), 1)


@case(ANSWER)
def a_forward_pass_as_long_as_the_context() -> None:
    with load(n_ctx=100) as model:
        assert model(torch.tensor([long(100)])).logits.shape[1] == 100


@case("ContextOverflowError", "n_ctx=101", "100")
def a_forward_pass_longer_than_the_context() -> None:
    with load(n_ctx=100) as model:
        model(torch.tensor([long(101)]))


@case("ContextOverflowError", "n_ctx", "100000")
def a_prompt_of_a_hundred_thousand_tokens() -> None:
    with load() as model:
        model(torch.tensor([long(100_000)]))


@case("ContextOverflowError", "n_ctx=1001")
def a_continuation_longer_than_the_context() -> None:
    with load(n_ctx=1000) as model:
        cache = LlamaCppCache(model)
        model(torch.tensor([long(990)]), cache=cache)
        try:
            model(torch.tensor([long(11)]), cache=cache)
        finally:
            assert cache.tokens(0) == long(990)
            model(torch.tensor([long(10)]), cache=cache)


@case("CacheFullError", "n_cells", "256")
def a_prompt_longer_than_the_cells() -> None:
    with load(n_ctx=1000, n_cells=256) as model:
        greedy(model, long(300))


@case("CacheFullError", "n_cells")
def more_rows_than_fit_into_the_cells() -> None:
    with load(n_ctx=256, n_cells=256) as model:
        model(torch.tensor([[n, *long(150)] for n in range(5, 8)]))


@case(ANSWER)
def a_full_buffer_can_be_used_again() -> None:
    with load(n_ctx=1000, n_cells=256) as model:
        for _ in range(3):
            try:
                greedy(model, long(300))
            except Exception as error:
                assert type(error).__name__ == "CacheFullError"
        right(model)


@case(ANSWER)
def all_logits_of_a_prompt_longer_than_a_batch() -> None:
    with load(n_ctx=512, n_batch=16, n_ubatch=8) as model, load(n_ctx=512) as other:
        ids = torch.tensor([long(300)])
        torch.testing.assert_close(model(ids).logits, other(ids).logits, atol=0.05, rtol=0)


@case(EITHER)
def three_hundred_rows() -> None:
    with load(n_ctx=512, n_cells=2048) as model:
        ids = torch.tensor([[1, 5 + n % 280, 70] for n in range(300)])
        output = model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output[0, 3:].tolist() == expected(tokens=ids[0].tolist(), n=2)


@case(EITHER)
def three_hundred_beams() -> None:
    with load() as model:
        greedy(model, num_beams=300)


@case(EITHER)
def forty_rows_on_a_recurrent_model() -> None:
    with load("mamba") as model:
        ids = torch.tensor([[1, 5 + n, 70] for n in range(40)])
        output = model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert output[7, 3:].tolist() == expected("mamba", ids[7].tolist(), 2)


@case(ANSWER)
def beams_on_a_recurrent_and_a_hybrid_model() -> None:
    for kind in ("mamba", "hybrid"):
        with load(kind, n_seq_max=2) as model:
            assert len(greedy(model, num_beams=5)) == 4
