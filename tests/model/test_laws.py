"""The laws of DESIGN 2.2, on every kind of memory: plain attention, sliding windows, recurrent, hybrid.

Keys, values and weights are F32 here, so that logits move by less than `CLOSE` between any two ways of computing them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compare import cold_logits, evaluates, same_greedy
from transformers_llamacpp import LlamaCppCache, LlamaCppError
from transformers_llamacpp.compat import cache_of

KINDS = (
    "smollm2_f32",
    pytest.param("gemma_f32", marks=pytest.mark.once),  # slow, and to transformers no other than SmolLM2
    "tiny_llama",
    "tiny_swa",
    "tiny_mamba",
    "tiny_hybrid",
)
STATES = ("tiny_mamba", "tiny_hybrid")  # a state stands behind the last token and cannot go back
CLOSE = 0.02
TEXT = "The history of the Roman Empire begins with the founding of a small town on seven hills"
MORE = " and ends, as all that is large must end, in many small towns"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(request: pytest.FixtureRequest, kind: str) -> Any:
    return request.getfixturevalue(kind)


@pytest.fixture
def prompt(model: Any) -> list[int]:
    return model.tokenizer(TEXT).input_ids


@pytest.fixture
def more(model: Any) -> list[int]:
    return model.tokenizer(MORE, add_special_tokens=False).input_ids


def generate(model: Any, tokens: list[int], n: int, **kwargs: Any) -> list[int]:
    """`n` greedy tokens, no end token."""
    kwargs = {"max_new_tokens": n, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | kwargs
    output = model.generate(torch.tensor([tokens]), **kwargs)
    return (output if isinstance(output, torch.Tensor) else output.sequences)[0, len(tokens) :].tolist()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=CLOSE, rtol=0)


# -- tokens[:reused] + remaining == prompt, len(remaining) >= 1 ----------------------------------------------------


def test_a_cold_prompt_is_evaluated_whole(model: Any, prompt: list[int]) -> None:
    with evaluates(model, len(prompt) + 4):
        generate(model, prompt, 5)
    stats = model.last_stats
    assert (stats.prompt_tokens, stats.reused_tokens, stats.new_tokens) == (len(prompt), 0, 5)


def test_a_known_prompt_is_evaluated_from_its_last_token(model: Any, kind: str, prompt: list[int]) -> None:
    first = generate(model, prompt, 5)
    again = generate(model, prompt, 5)
    same_greedy(model, prompt, first, again, "the same prompt again")
    stats = model.last_stats
    assert stats.prompt_tokens == len(prompt)
    assert stats.evaluated_tokens == stats.prompt_tokens - stats.reused_tokens + 4
    if kind in STATES:
        assert 0 <= stats.reused_tokens <= len(prompt) - 1
    else:
        assert stats.reused_tokens == len(prompt) - 1


def test_a_prompt_that_branches_off_reuses_what_is_shared(
    model: Any, kind: str, prompt: list[int], more: list[int]
) -> None:
    generate(model, prompt, 5)
    shared = len(prompt) - 3
    other = [*prompt[:shared], *more]
    assert other[shared] != prompt[shared]
    got = generate(model, other, 5)
    stats = model.last_stats
    assert stats.evaluated_tokens == len(other) - stats.reused_tokens + 4
    assert stats.reused_tokens == shared or (kind in STATES and stats.reused_tokens < shared)
    model.forget()
    same_greedy(model, other, generate(model, other, 5), got, "branched off")


def test_a_longer_prompt_evaluates_only_what_is_new(model: Any, prompt: list[int], more: list[int]) -> None:
    """A second chat turn, on every kind of memory: the history is never evaluated again."""
    answer = generate(model, prompt, 6)
    longer = [*prompt, *answer, *more]
    with evaluates(model, 1 + len(more) + 4):  # the answer's last token was never evaluated
        got = generate(model, longer, 5)
    assert model.last_stats.reused_tokens == len(prompt) + len(answer) - 1
    model.forget()
    same_greedy(model, longer, generate(model, longer, 5), got, "second turn")


def test_a_conversation_waits_unharmed_while_another_one_runs(model: Any, prompt: list[int], more: list[int]) -> None:
    answer = generate(model, prompt, 4)
    generate(model, [*more, *prompt], 4)
    with evaluates(model, 1 + len(more) + 3):
        generate(model, [*prompt, *answer, *more], 4)


def test_two_branches_of_a_conversation_both_stay(tiny_llama: Any) -> None:
    """Branching off must not cut what the first branch may go on with."""
    prompt = tiny_llama.tokenizer(TEXT).input_ids
    answer = generate(tiny_llama, prompt, 6)
    generate(tiny_llama, [*prompt[:-4], 70, 71, 72], 6)
    with evaluates(tiny_llama, 1 + 1 + 2):
        generate(tiny_llama, [*prompt, *answer, 80], 3)


# -- len(sequence) == llama_memory_seq_pos_max + 1 -----------------------------------------------------------------


def test_the_books_are_right_after_every_operation(model: Any, prompt: list[int], more: list[int]) -> None:
    cache = LlamaCppCache(model)
    assert cache.get_seq_length() == 0
    steps = [
        lambda: model(torch.tensor([prompt]), cache=cache),
        lambda: cache.batch_repeat_interleave(3),
        lambda: model(torch.tensor([more[:2], more[1:3], more[2:4]]), cache=cache),
        lambda: cache.reorder_cache(torch.tensor([2, 2, 0])),
        lambda: model(torch.tensor([[5], [6], [7]]), cache=cache),
        lambda: cache.truncate(len(prompt) - 2),
        lambda: model(torch.tensor([[8], [9], [10]]), cache=cache),
        lambda: cache.batch_select_indices(torch.tensor([1])),
        lambda: model(torch.tensor([[11]]), cache=cache),
    ]
    lengths = []
    for step in steps:
        step()
        model.engine.check()
        assert set(cache.row_lengths(1)) == {cache.get_seq_length()}
        lengths.append(cache.get_seq_length())
    p = len(prompt)
    assert lengths == [p, p, p + 2, p + 2, p + 3, p - 2, p - 1, p - 1, p]
    assert cache.tokens(0) == [*prompt[: p - 2], 9, 11]
    cache.reset()
    model.engine.check()
    assert cache.get_seq_length() == 0
    cache.close()


@pytest.mark.parametrize("bad", ["too long", "token", "mask"])
def test_a_failed_call_leaves_the_cache_where_it_was(model: Any, prompt: list[int], more: list[int], bad: str) -> None:
    cache = LlamaCppCache(model)
    model(torch.tensor([prompt]), cache=cache)
    ids = torch.tensor([more])
    broken: dict[str, dict[str, torch.Tensor]] = {
        "too long": {"input_ids": torch.tensor([[5] * 2048])},
        "token": {"input_ids": torch.tensor([[*more, model.config.vocab_size]])},
        "mask": {"input_ids": ids, "attention_mask": torch.ones(1, 3)},
    }
    with pytest.raises(LlamaCppError):
        model(**broken[bad], cache=cache)
    model.engine.check()
    assert cache.tokens(0) == prompt
    close(model(ids, cache=cache).logits[0], cold_logits(model, [*prompt, *more])[len(prompt) :])
    cache.close()


def test_check_sees_a_memory_that_was_tampered_with(load: Any, tiny_llama_path: Path) -> None:
    """The check that runs after every test can fail."""
    model = load(tiny_llama_path)
    cache = LlamaCppCache(model)
    model(torch.tensor([[1, 5, 6, 7, 8]]), cache=cache)
    model.engine.check()
    sequence = next(s for s in model.engine.pool.sequences if s.seq_id is not None)
    assert model.engine.backend.seq_remove(sequence.seq_id, 3, -1)
    with pytest.raises(AssertionError):
        model.engine.check()
    model.close()


# -- crop(k) then re-append == never having cropped ----------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 7, -1], ids=["almost all gone", "half", "last token gone"])
def test_cropping_and_appending_again_changes_nothing(
    model: Any, prompt: list[int], more: list[int], keep: int
) -> None:
    whole = [*prompt, *more]
    keep = keep % len(whole)
    cache = LlamaCppCache(model)
    before = model(torch.tensor([whole]), cache=cache).logits[0]
    cache.truncate(keep)
    assert cache.get_seq_length() == keep
    assert cache.tokens(0) == whole[:keep]
    after = model(torch.tensor([whole[keep:]]), cache=cache).logits[0]
    assert cache.tokens(0) == whole
    close(after, before[keep:])
    cache.close()


def test_cropping_beyond_the_sliding_window(load: Any, tiny_swa_path: Path) -> None:
    """`swa_full=False` drops cells that have left the window of 16: a silent hole if nobody looks.

    One sequence and small batches, so that only 256 cells are kept for the layers with a window.
    """
    model = load(tiny_swa_path, swa_full=False, n_seq_max=1, n_batch=32, n_ubatch=32)
    tokens = [1, *(3 + (7 * i) % 250 for i in range(599))]
    cold = cold_logits(model, tokens)
    cache = LlamaCppCache(model)
    model(torch.tensor([tokens]), cache=cache)
    for keep in (599, 590, 400, 120, 40, 1):
        cache.truncate(keep)
        close(model(torch.tensor([tokens[keep:]]), cache=cache).logits[0], cold[keep:])
    cache.close()
    assert generate(model, tokens[:40], 3) == cold_greedy(model, tokens[:40], 3)  # and by prefix reuse


def cold_greedy(model: Any, tokens: list[int], n: int) -> list[int]:
    model.forget()
    return generate(model, tokens, n)


# -- resumed generation == one-shot generation ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["whole history", "new token only", "no cache"])
def test_resumed_generation_is_one_shot_generation(model: Any, kind: str, prompt: list[int], how: str) -> None:
    at_once = generate(model, prompt, 10)
    model.forget()
    ids = torch.tensor([prompt])
    first = model.generate(
        ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True
    )
    cache = cache_of(first)
    if how == "no cache":
        cache.close()
        with evaluates(model, 6):
            rest = generate(model, first.sequences[0].tolist(), 6)
    elif how == "whole history":
        with evaluates(model, 6):
            rest = generate(model, first.sequences[0].tolist(), 6, past_key_values=cache)
    else:
        mask = torch.ones_like(first.sequences)
        with evaluates(model, 6):
            rest = generate(model, first.sequences[0, -1:].tolist(), 6, past_key_values=cache, attention_mask=mask)
    cache.close()
    same_greedy(model, prompt, at_once, [*first.sequences[0, len(prompt) :].tolist(), *rest], how)


# -- batched rows == the same rows alone ---------------------------------------------------------------------------


def test_batched_rows_are_the_rows_alone(model: Any, prompt: list[int], more: list[int]) -> None:
    texts = [prompt, prompt[:5], [*prompt[:9], *more]]
    alone = []
    for text in texts:
        model.forget()
        alone.append(generate(model, text, 6))
    model.forget()
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    output = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert model.last_stats.prompt_tokens == sum(map(len, texts))
    for row, text in enumerate(texts):
        same_greedy(model, text, alone[row], output[row, width:].tolist(), f"row {row}")


# -- assisted greedy == plain greedy -------------------------------------------------------------------------------


def test_prompt_lookup_is_plain_greedy(model: Any, prompt: list[int]) -> None:
    text = [*prompt, *prompt[1:9]]  # something to look up
    plain = generate(model, text, 10)
    model.forget()
    assisted = generate(model, text, 10, prompt_lookup_num_tokens=3)
    same_greedy(model, text, plain, assisted, "prompt lookup")
    assert model.last_stats.evaluated_tokens >= len(text)


def test_an_assistant_changes_nothing_but_the_cost(smollm2_f32: Any, load: Any, smollm2_q4_0_path: Path) -> None:
    prompt = smollm2_f32.tokenizer(TEXT).input_ids
    plain = generate(smollm2_f32, prompt, 12)
    smollm2_f32.forget()
    assistant = load(smollm2_q4_0_path)
    assisted = generate(smollm2_f32, prompt, 12, assistant_model=assistant)
    same_greedy(smollm2_f32, prompt, plain, assisted, "assistant")
    assert smollm2_f32.last_stats.decode_calls < 12


# -- decode(encode(text)) == text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [TEXT, "naïve café — 東京 👩‍👩‍👧", "  two  spaces\tand a tab\n", "1234567 x=[1,2]"])
def test_decoding_gives_the_text_back(model: Any, text: str) -> None:
    ids = model.tokenizer(text, add_special_tokens=False).input_ids
    assert model.tokenizer.decode(ids) == text
