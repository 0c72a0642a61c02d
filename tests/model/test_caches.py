"""Caches that a caller keeps, and the reuse of prefixes that nobody asked for."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from compare import evaluates, same_greedy
from transformers_llamacpp import ClosedError, InvalidInputError, LlamaCppCache
from transformers_llamacpp.compat import CACHE_NAME, cache_of

PROMPT = [504, 1463, 282, 260, 4469, 7057, 5634, 351]  # The history of the Roman Empire begins with
PLAIN = [260, 14465, 282, 7268, 281, 216, 39, 37, 35, 15023, 411, 7810]
MORE = [2683, 359, 253, 30879, 284]
IDS = torch.tensor([PROMPT])
P = len(PROMPT)


def generate(model: Any, tokens: list[int], n: int, **kwargs: Any) -> list[int]:
    kwargs = {"eos_token_id": None, "pad_token_id": 0} | kwargs
    output = model.generate(torch.tensor([tokens]), max_new_tokens=n, do_sample=False, **kwargs)
    return output[0, len(tokens) :].tolist()


def prefilled(model: Any, tokens: list[int]) -> LlamaCppCache:
    return cache_of(model(torch.tensor([tokens]), logits_to_keep=1))


def cold(model: Any, tokens: list[int], n: int) -> list[int]:
    model.forget()
    return generate(model, tokens, n)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_the_whole_history_under_both_names(smollm2_f32: Any, name: str) -> None:
    cache = prefilled(smollm2_f32, PROMPT)
    with evaluates(smollm2_f32, len(MORE) + 3):
        got = generate(smollm2_f32, [*PROMPT, *MORE], 4, **{name: cache})
    assert cache.get_seq_length() == P + len(MORE) + 3
    same_greedy(smollm2_f32, [*PROMPT, *MORE], cold(smollm2_f32, [*PROMPT, *MORE], 4), got, "whole history")


def test_only_the_new_tokens_and_a_mask_of_the_whole_length(smollm2_f32: Any) -> None:
    cache = prefilled(smollm2_f32, PROMPT)
    mask = torch.ones(1, P + len(MORE), dtype=torch.long)
    with evaluates(smollm2_f32, len(MORE) + 3):
        got = generate(smollm2_f32, MORE, 4, past_key_values=cache, attention_mask=mask)
    assert cache.tokens(0)[: P + len(MORE)] == [*PROMPT, *MORE]
    same_greedy(smollm2_f32, [*PROMPT, *MORE], cold(smollm2_f32, [*PROMPT, *MORE], 4), got, "new tokens only")


def test_an_edited_history(smollm2_f32: Any) -> None:
    """A message was changed: what still fits stays, the rest is evaluated."""
    cache = prefilled(smollm2_f32, [*PROMPT, *MORE])
    edited = [*PROMPT[:5], 5, 6, 7, *MORE]
    with evaluates(smollm2_f32, len(edited) - 5 + 3):
        got = generate(smollm2_f32, edited, 4, past_key_values=cache)
    assert cache.tokens(0)[: len(edited)] == edited
    same_greedy(smollm2_f32, edited, cold(smollm2_f32, edited, 4), got, "edited")


@pytest.mark.parametrize("keep", [3, P], ids=["shorter", "the same"])
def test_a_history_that_is_not_longer_than_the_cache(smollm2_f32: Any, keep: int) -> None:
    cache = prefilled(smollm2_f32, PROMPT)
    with evaluates(smollm2_f32, 1 + 3):
        got = generate(smollm2_f32, PROMPT[:keep], 4, past_key_values=cache)
    same_greedy(smollm2_f32, PROMPT[:keep], cold(smollm2_f32, PROMPT[:keep], 4), got, f"first {keep}")


def test_a_returned_cache_goes_on_for_several_turns(smollm2_f32: Any) -> None:
    tokens, cache = list(PROMPT), None
    for turn in range(3):
        output = smollm2_f32.generate(
            torch.tensor([tokens]), max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=2,
            return_dict_in_generate=True, **({} if cache is None else {CACHE_NAME: cache}),
        )  # fmt: skip
        if turn:
            assert cache_of(output) is cache
            assert output.stats.evaluated_tokens == 1 + len(MORE) + 3
        cache = cache_of(output)
        tokens = [*output.sequences[0].tolist(), *MORE]
    assert cache.tokens(0) == tokens[: -1 - len(MORE)]


def test_a_copied_prefill_serves_many_questions(smollm2_f32: Any) -> None:
    """Transformers' own recipe for a shared system prompt."""
    prefill = prefilled(smollm2_f32, PROMPT)
    for question in ([5, 6], [7, 8, 9], MORE):
        mine = copy.deepcopy(prefill)
        with evaluates(smollm2_f32, len(question) + 3):
            got = generate(smollm2_f32, [*PROMPT, *question], 4, past_key_values=mine)
        assert prefill.tokens(0) == PROMPT
        mine.close()
        smollm2_f32.forget()
        same_greedy(
            smollm2_f32, [*PROMPT, *question], cold(smollm2_f32, [*PROMPT, *question], 4), got, str(question)
        )


def test_beams_from_a_prefilled_cache(smollm2_f32: Any) -> None:
    plain = smollm2_f32.generate(IDS, num_beams=3, do_sample=False, max_new_tokens=5)
    smollm2_f32.forget()
    cache = prefilled(smollm2_f32, PROMPT[:-1])
    with evaluates(smollm2_f32, 1 + 3 * 4):
        got = smollm2_f32.generate(IDS, num_beams=3, do_sample=False, max_new_tokens=5, past_key_values=cache)
    assert got.tolist() == plain.tolist()
    assert cache.batch_size == 3


def test_a_cache_is_never_taken_away(load: Any, tiny_llama_path: Path) -> None:
    """256 cells, six caches of 100 tokens each: most have to leave the buffer, and all come back right."""
    model = load(tiny_llama_path, n_ctx=256, n_cells=256)
    texts = [[1, *(5 + (i * (3 + n)) % 280 for i in range(99))] for n in range(6)]
    caches = [cache_of(model(torch.tensor([text]), logits_to_keep=1)) for text in texts]
    for text, cache in zip(texts, caches, strict=True):
        assert cache.tokens(0) == text
        got = model(torch.tensor([[9, 10]]), cache=cache).logits[0]
        expected = model(torch.tensor([[*text, 9, 10]]), use_cache=False).logits[0, -2:]
        torch.testing.assert_close(got, expected, atol=0.02, rtol=0)


@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 30])
def test_a_conversation_that_left_the_buffer_comes_back(
    load: Any, tiny_llama_path: Path, host_cache_bytes: int
) -> None:
    model = load(tiny_llama_path, n_ctx=256, n_cells=256, host_cache_bytes=host_cache_bytes)
    texts = [[1, *(5 + (i * (3 + n)) % 280 for i in range(149))] for n in range(3)]
    first = [generate(model, text, 4) for text in texts]
    again = [generate(model, text, 4) for text in texts]
    if host_cache_bytes:
        assert model.last_stats.reused_tokens == 149, "the state was not kept"
    for text, a, b in zip(texts, first, again, strict=True):
        same_greedy(model, text, a, b)


def test_a_closed_cache_says_so_and_its_text_stays_for_reuse(smollm2_f32: Any) -> None:
    cache = prefilled(smollm2_f32, PROMPT)
    cache.close()
    cache.close()
    with pytest.raises(ClosedError):
        smollm2_f32(torch.tensor([MORE]), cache=cache)
    with evaluates(smollm2_f32, 1 + 1):
        generate(smollm2_f32, PROMPT, 2)


def test_a_cache_that_was_dropped_stays_for_reuse(smollm2_f32: Any) -> None:
    prefilled(smollm2_f32, PROMPT)
    gc.collect()
    with evaluates(smollm2_f32, 1 + 1):
        generate(smollm2_f32, PROMPT, 2)


def test_generates_own_cache_is_closed_unless_returned(smollm2_f32: Any) -> None:
    generate(smollm2_f32, PROMPT, 3)
    held = [sequence for sequence in smollm2_f32.engine.pool.sequences if sequence.held]
    assert held == []
    output = smollm2_f32.generate(IDS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert cache_of(output).tokens(0) == [*PROMPT, *PLAIN[:2]]


def test_a_returned_cache_survives_other_calls(smollm2_f32: Any) -> None:
    output = smollm2_f32.generate(IDS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    for n in range(3):
        generate(smollm2_f32, [n + 5, *MORE], 3)
    cache = cache_of(output)
    with evaluates(smollm2_f32, 5):
        rest = generate(smollm2_f32, output.sequences[0].tolist(), 5, past_key_values=cache)
    assert rest == PLAIN[3:8]


# -- a chat --------------------------------------------------------------------------------------------------------


def test_a_second_chat_turn_evaluates_only_what_is_new(smollm2_f32: Any) -> None:
    """The new message and the template around it, never the history."""
    tokenizer = smollm2_f32.tokenizer
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]

    def prompt() -> list[int]:
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]

    first = prompt()
    answer = generate(smollm2_f32, first, 60, eos_token_id=2)
    assert answer[-1] == 2, "the answer should have ended"
    chat.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    chat.append({"role": "user", "content": "And of Italy?"})
    second = prompt()
    assert second[: len(first) + len(answer)] == [*first, *answer]
    new = len(second) - len(first) - len(answer)  # a newline, the message, the template
    assert new < 25
    with evaluates(smollm2_f32, 1 + new + 2):  # the end token itself was never evaluated
        generate(smollm2_f32, second, 3)
    assert smollm2_f32.last_stats.reused_tokens == len(first) + len(answer) - 1


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_swa", "tiny_mamba", "tiny_hybrid"])
@pytest.mark.parametrize("way", [{"num_beams": 2}, {"num_beams": 3, "num_return_sequences": 2}])
def test_a_cache_of_beams_goes_on(request: pytest.FixtureRequest, name: str, way: dict[str, int]) -> None:
    """It has more rows than the next input; each text goes on from the row that knows it best."""
    model = request.getfixturevalue(name)
    call = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **way}
    cache = LlamaCppCache(model)
    text = [40, 41, 42, 43, 44, 45]
    first = model.generate(torch.tensor([text]), past_key_values=cache, **call).tolist()
    assert model.generate(torch.tensor([text]), past_key_values=cache, **call).tolist() == first
    turn = [*first[-1], 50, 51]
    got = model.generate(torch.tensor([turn]), past_key_values=cache, **call).tolist()
    cache.close()
    model.forget()
    assert got == model.generate(torch.tensor([turn]), **call).tolist()


def test_a_cache_of_return_sequences_goes_on_with_any_of_them(tiny_llama: Any) -> None:
    call = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    cache = LlamaCppCache(tiny_llama)
    torch.manual_seed(2)
    samples = tiny_llama.generate(
        torch.tensor([[40, 41, 42]]), past_key_values=cache, do_sample=True, num_return_sequences=3, **call
    ).tolist()
    assert len({tuple(text) for text in samples}) == 3
    for text in (samples[2], samples[1]):
        turn = [*text, 60]
        got = tiny_llama.generate(torch.tensor([turn]), past_key_values=cache, do_sample=False, **call).tolist()
        assert got == tiny_llama.generate(torch.tensor([turn]), do_sample=False, **call).tolist()
    cache.close()


def test_a_mask_that_fits_neither_the_text_nor_what_is_new(tiny_llama: Any) -> None:
    cache = LlamaCppCache(tiny_llama)
    tiny_llama(torch.tensor([[40, 41, 42, 43]]), past_key_values=cache)
    with pytest.raises(InvalidInputError, match=r"attention_mask has 9 columns; .* needs 2 .* or 6"):
        tiny_llama.generate(
            torch.tensor([[50, 51]]), attention_mask=torch.ones((1, 9), dtype=torch.long), past_key_values=cache,
            max_new_tokens=2,
        )  # fmt: skip
    cache.close()
