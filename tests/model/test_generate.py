"""`generate()`: rows, beams, return sequences, outputs, and what each of them costs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from compare import evaluates, padded, same_beams, same_generation, same_greedy
from transformers_llamacpp import ContextOverflowError, GenerationCancelled
from transformers_llamacpp.compat import cache_of

PROMPT = [504, 1463, 282, 260, 4469, 7057, 5634, 351]  # The history of the Roman Empire begins with
OTHER = [1604, 3987, 46477, 24, 94]
THIRD = [2683, 359, 253, 30879, 284, 551, 44222, 11173, 30, 504, 1463]
PLAIN = [260, 14465, 282, 7268, 281, 216, 39, 37, 35, 15023, 411, 7810]
IDS = torch.tensor([PROMPT])
P = len(PROMPT)


# -- batches -------------------------------------------------------------------------------------------------------


def test_a_padded_batch_is_what_pytorch_makes_of_it(smollm2_f32: Any, torch_reference: Any) -> None:
    ids, mask = padded([PROMPT, OTHER, THIRD])
    same_generation(torch_reference, smollm2_f32, ids, attention_mask=mask, max_new_tokens=8)
    stats = smollm2_f32.last_stats
    assert stats.prompt_tokens == P + len(OTHER) + len(THIRD)
    assert stats.evaluated_tokens == stats.prompt_tokens + 3 * 7


def test_a_sampled_batch_is_what_pytorch_makes_of_it(smollm2_f32: Any, torch_reference: Any) -> None:
    ids, mask = padded([PROMPT, OTHER])
    same_generation(torch_reference, smollm2_f32, ids, seed=3, attention_mask=mask, max_new_tokens=8, top_k=0)


def test_right_padding_gives_the_rows_alone(smollm2_f32: Any) -> None:
    """Padding on the right is skipped: better than PyTorch, which goes on after it."""
    alone = smollm2_f32.generate(torch.tensor([OTHER]), max_new_tokens=5, do_sample=False)[0, len(OTHER) :].tolist()
    ids = torch.tensor([PROMPT, OTHER + [2] * (P - len(OTHER))])
    mask = torch.tensor([[1] * P, [1] * len(OTHER) + [0] * (P - len(OTHER))])
    output = smollm2_f32.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    assert output[0, P:].tolist() == PLAIN[:5]
    assert output[1, P:].tolist() == alone


def test_rows_that_share_a_prompt_evaluate_it_once(smollm2_f32: Any) -> None:
    with evaluates(smollm2_f32, P + 3 * 4):
        output = smollm2_f32.generate(IDS.repeat(3, 1), max_new_tokens=5, do_sample=False)
    assert smollm2_f32.last_stats.prompt_tokens == 3 * P
    assert output[:, P:].tolist() == [PLAIN[:5]] * 3


def test_more_rows_than_n_seq_max_grow_the_number(load: Any, tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, n_seq_max=2)
    rows = torch.tensor([[1, 60 + i, 70, 80 - i] for i in range(5)])
    together = model.generate(rows, max_new_tokens=4, do_sample=False, eos_token_id=None)
    for row in range(5):
        model.forget()
        alone = model.generate(rows[row : row + 1], max_new_tokens=4, do_sample=False, eos_token_id=None)
        same_greedy(model, rows[row].tolist(), alone[0, 4:].tolist(), together[row, 4:].tolist(), f"row {row}")


# -- beams and return sequences ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5},
        {"num_beams": 2, "early_stopping": True, "eos_token_id": 282},
        {"num_beams": 2, "early_stopping": "never", "eos_token_id": 282, "length_penalty": -1.0},
        {"num_beams": 3, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    ],
    ids=lambda kwargs: "-".join(kwargs),
)
def test_beams(smollm2_f32: Any, torch_reference: Any, kwargs: dict[str, Any]) -> None:
    same_beams(torch_reference, smollm2_f32, IDS, max_new_tokens=8, **kwargs)


def test_beams_of_a_padded_batch(smollm2_f32: Any, torch_reference: Any) -> None:
    ids, mask = padded([PROMPT, OTHER])
    output = same_beams(torch_reference, smollm2_f32, ids, attention_mask=mask, num_beams=2, num_return_sequences=2)
    assert output.sequences.shape[0] == 4


def test_sampled_beams(smollm2_f32: Any, torch_reference: Any) -> None:
    same_beams(torch_reference, smollm2_f32, IDS, seed=5, num_beams=3, top_k=40, max_new_tokens=6)


def test_beams_evaluate_the_prompt_once_and_share_it(smollm2_f32: Any) -> None:
    with evaluates(smollm2_f32, P + 4 * 5):
        smollm2_f32.generate(IDS, num_beams=4, do_sample=False, max_new_tokens=6, eos_token_id=None)
    assert smollm2_f32.last_stats.prompt_tokens == 4 * P
    assert smollm2_f32.last_stats.reused_tokens == 3 * P


def test_beams_fit_where_copies_of_the_prompt_would_not(load: Any, tiny_llama_path: Path) -> None:
    """Four beams of a 200-token prompt in 256 cells."""
    model = load(tiny_llama_path, n_ctx=256, n_cells=256)
    ids = torch.tensor([[1, *(5 + (3 * i) % 280 for i in range(199))]])
    output = model.generate(ids, num_beams=4, do_sample=False, max_new_tokens=6, eos_token_id=None)
    assert output.shape == (1, 206)
    assert model.last_stats.evaluated_tokens == 200 + 4 * 5


def test_return_sequences_evaluate_the_prompt_once(smollm2_f32: Any, torch_reference: Any) -> None:
    output = same_generation(
        torch_reference, smollm2_f32, IDS, seed=2, num_return_sequences=3, top_k=0, max_new_tokens=6
    )
    assert len({tuple(row) for row in output.sequences.tolist()}) == 3
    assert smollm2_f32.last_stats.evaluated_tokens == P + 3 * 5
    assert smollm2_f32.last_stats.reused_tokens == 2 * P


# -- outputs -------------------------------------------------------------------------------------------------------


def test_scores_and_logits_equal_pytorchs(smollm2_f32: Any, torch_reference: Any) -> None:
    kwargs = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 5,
              "do_sample": False, "repetition_penalty": 1.5}  # fmt: skip
    got, expected = smollm2_f32.generate(IDS, **kwargs), torch_reference.generate(IDS, **kwargs)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert len(got.scores) == len(got.logits) == 5
    for name in ("scores", "logits"):
        for mine, theirs in zip(getattr(got, name), getattr(expected, name), strict=True):
            torch.testing.assert_close(mine, theirs, atol=5e-3, rtol=0)


def test_transition_scores_can_be_computed(smollm2_f32: Any) -> None:
    output = smollm2_f32.generate(
        IDS, num_beams=2, do_sample=False, max_new_tokens=5, return_dict_in_generate=True, output_scores=True
    )
    scores = smollm2_f32.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
    assert torch.allclose(scores.sum(dim=1) / 5, output.sequences_scores, atol=1e-3)


def test_hidden_states_of_every_step(smollm2_f32: Any, torch_reference: Any) -> None:
    kwargs = {"return_dict_in_generate": True, "output_hidden_states": True, "max_new_tokens": 4, "do_sample": False}
    got, expected = smollm2_f32.generate(IDS, **kwargs), torch_reference.generate(IDS, **kwargs)
    assert len(got.hidden_states) == 4
    for mine, theirs in zip(got.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(mine[-1], theirs[-1], atol=5e-3, rtol=0)


def test_the_output_has_this_calls_own_stats(smollm2_f32: Any) -> None:
    output = smollm2_f32.generate(IDS, do_sample=False, max_new_tokens=3, return_dict_in_generate=True)
    assert output.stats == smollm2_f32.last_stats
    smollm2_f32.generate(torch.tensor([THIRD]), do_sample=False, max_new_tokens=2)
    assert (output.stats.prompt_tokens, output.stats.new_tokens) == (P, 3)
    assert smollm2_f32.last_stats.prompt_tokens == len(THIRD)
    assert output.stats.prompt_seconds > 0 < output.stats.generate_seconds
    with pytest.raises(AttributeError):
        output.stats.new_tokens = 5


def test_calls_on_two_threads_have_their_own_stats(smollm2_f32: Any) -> None:
    outputs: dict[str, Any] = {}

    def call(name: str, tokens: list[int], n: int) -> None:
        outputs[name] = smollm2_f32.generate(
            torch.tensor([tokens]), do_sample=False, max_new_tokens=n, return_dict_in_generate=True
        )

    threads = [threading.Thread(target=call, args=x) for x in (("a", PROMPT, 6), ("b", THIRD, 9))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (outputs["a"].stats.prompt_tokens, outputs["a"].stats.new_tokens) == (P, 6)
    assert (outputs["b"].stats.prompt_tokens, outputs["b"].stats.new_tokens) == (len(THIRD), 9)
    assert outputs["a"].sequences[0, P:].tolist() == PLAIN[:6]


# -- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_prefill_chunk_size(smollm2_f32: Any, chunk: int) -> None:
    seen: list[tuple[int, int]] = []
    with evaluates(smollm2_f32, P + 4):
        output = smollm2_f32.generate(
            IDS, do_sample=False, max_new_tokens=5, prefill_chunk_size=chunk,
            prompt_progress=lambda done, total: seen.append((done, total)),
        )  # fmt: skip
    assert output[0, P:].tolist() == PLAIN[:5]
    assert seen == [(min(done, P), P) for done in range(chunk, P + chunk, chunk)]


def test_a_prompt_can_be_cancelled_and_asked_again(load: Any, tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, n_batch=32, n_ubatch=32)
    ids = torch.tensor([[1, *(5 + (3 * i) % 280 for i in range(199))]])
    with pytest.raises(GenerationCancelled) as error:
        model.generate(ids, max_new_tokens=3, prompt_progress=lambda done, total: done < 96)
    assert (error.value.evaluated, error.value.total) == (96, 200)
    model.engine.check()
    with evaluates(model, 200 - 96 + 2):
        model.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)


def test_a_forward_pass_in_prompt_progress_is_no_part_of_the_call(load: Any, tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, n_batch=32, n_ubatch=32, type_k="f32", type_v="f32", flash_attn=False)
    ids, other = torch.tensor([[1, *(5 + (3 * i) % 280 for i in range(99))]]), torch.tensor([[1, *range(40, 110)]])
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected, logits = model.generate(ids, **options), model(other).logits
    model.forget()
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        seen.append(done)
        torch.testing.assert_close(model(other, use_cache=False).logits, logits, rtol=0, atol=1e-4)

    assert torch.equal(model.generate(ids, prompt_progress=progress, **options), expected)
    assert seen == [32, 64, 96, 100]
    assert model.last_stats.evaluated_tokens == 100 + 4


def test_token_healing(smollm2_f32: Any, torch_reference: Any) -> None:
    """`The link is <a href="http:` ends in the middle of what the model knows as one token, `://`."""
    tokenizer = smollm2_f32.tokenizer
    text = 'The link is <a href="http:'
    ids = tokenizer(text, return_tensors="pt").input_ids
    kwargs = {"token_healing": True, "tokenizer": tokenizer, "max_new_tokens": 6, "do_sample": False}
    got, expected = (model.generate(ids, **kwargs)[0].tolist() for model in (smollm2_f32, torch_reference))
    assert got == expected
    assert got[: ids.shape[1]] != ids[0].tolist(), "nothing was healed"
    assert tokenizer.decode(got).startswith(text)


def test_a_generation_config_object(smollm2_f32: Any) -> None:
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=282, pad_token_id=2)
    assert smollm2_f32.generate(IDS, config)[0, P:].tolist() == PLAIN[:3]
    assert smollm2_f32.generate(IDS, generation_config=config, eos_token_id=2)[0, P:].tolist() == PLAIN[:4]


def test_no_prompt_starts_from_bos(smollm2_f32: Any, torch_reference: Any) -> None:
    kwargs = {"max_new_tokens": 4, "do_sample": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert smollm2_f32.generate(**kwargs).tolist() == torch_reference.generate(**kwargs).tolist()


def test_use_cache_false_is_slow_and_right(smollm2_f32: Any) -> None:
    output = smollm2_f32.generate(IDS, use_cache=False, do_sample=False, max_new_tokens=4)
    assert output[0, P:].tolist() == PLAIN[:4]


def test_a_prompt_that_leaves_no_room_is_an_error_at_once(smollm2_f32: Any) -> None:
    with pytest.raises(ContextOverflowError, match="n_ctx=2049"):
        smollm2_f32.generate(torch.full((1, 2048), 5), max_new_tokens=1)
    assert cache_of(smollm2_f32(IDS)).get_seq_length() == P


# -- the same bits, warm and cold ----------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [False, True], ids=["nothing held", "caches held"])
def test_without_prefix_reuse_warm_and_cold_are_the_same_bits(load: Any, smollm2_path: Path, held: bool) -> None:
    """Also where the caller still holds a cache, whose cells the next call must not sidestep."""
    model = load(smollm2_path, prefix_reuse=False)  # Q4_1, where other cells move logits by 0.8

    def run() -> Any:
        output = model.generate(
            IDS, do_sample=False, max_new_tokens=8, return_dict_in_generate=True, output_logits=True
        )
        if not held:
            cache_of(output).close()
        return output

    cold = run()
    assert model.last_stats.reused_tokens == 0
    model.generate(torch.tensor([THIRD]), num_beams=3, max_new_tokens=5)
    for _ in range(2):
        warm = run()
        assert (model.last_stats.reused_tokens, model.last_stats.evaluated_tokens) == (0, P + 7)
        assert warm.sequences.tolist() == cold.sequences.tolist()
        assert all(torch.equal(a, b) for a, b in zip(warm.logits, cold.logits, strict=True))


def test_forget_makes_the_next_call_a_cold_one(smollm2_f32: Any) -> None:
    for _ in range(2):
        with evaluates(smollm2_f32, P + 2):
            smollm2_f32.generate(IDS, do_sample=False, max_new_tokens=3)
        smollm2_f32.forget()
