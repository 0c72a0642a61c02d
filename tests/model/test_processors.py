"""Every logits processor that `generate()` makes from its options: the same tokens as transformers' PyTorch model."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation import SynthIDTextWatermarkingConfig, WatermarkDetector, WatermarkingConfig

from compare import same_generation

PROMPT = [504, 1463, 282, 260, 4469, 7057, 5634, 351]  # The history of the Roman Empire begins with
PLAIN = [260, 14465, 282, 7268, 281, 216, 39, 37, 35, 15023, 411, 7810]  # its greedy continuation
END = 7268  # an end token that plain greedy meets early

GREEDY: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[14465], [282, 7268]]},
    "sequence_bias": {"sequence_bias": {(260,): -5.0, (282, 7268): -10.0}},
    "min_length": {"min_length": len(PROMPT) + 8, "eos_token_id": END},
    "min_new_tokens": {"min_new_tokens": 8, "eos_token_id": END},
    "forced_bos_token_id": {"forced_bos_token_id": 5, "inputs": [[504]]},  # looks at texts of one token only
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 1.9)},
    "suppress_tokens": {"suppress_tokens": [260, 7268]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [260]},
    "remove_invalid_values": {"remove_invalid_values": True, "bad_words_ids": [[260]]},
    "renormalize_logits": {"renormalize_logits": True},
    "guidance_scale": {"guidance_scale": 1.5},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")},
}
SAMPLED: dict[str, dict[str, Any]] = {
    "do_sample": {"top_k": 0},
    "temperature": {"temperature": 0.6, "top_k": 0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7, "top_k": 0},
    "min_p": {"min_p": 0.2, "top_k": 0},
    "top_h": {"top_h": 0.4, "top_k": 0},
    "typical_p": {"typical_p": 0.5, "top_k": 0},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02, "top_k": 0},
    "eta_cutoff": {"eta_cutoff": 0.02, "top_k": 0},
    "all together": {
        "temperature": 1.4, "top_k": 60, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9, "repetition_penalty": 1.1,
    },
    "synthid": {
        "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[654, 400, 836, 123]), "top_k": 0,
    },
}  # fmt: skip
NOT_AN_OPTION = {"_eos_token_tensor", "use_cache", "max_length", "num_beams", "num_return_sequences"}


def test_no_processor_of_this_release_is_left_out() -> None:
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    options = set(re.findall(r"generation_config\.(\w+)", source)) - NOT_AN_OPTION
    assert options == options & (GREEDY.keys() | SAMPLED.keys())
    assert len(options) > 20


def test_plain_greedy_is_what_these_tests_believe(smollm2_f32: Any, torch_reference: Any) -> None:
    output = same_generation(torch_reference, smollm2_f32, torch.tensor([PROMPT]))
    assert output.sequences[0, len(PROMPT) :].tolist() == PLAIN


@pytest.mark.parametrize("name", GREEDY)
def test_greedy(smollm2_f32: Any, torch_reference: Any, name: str) -> None:
    options = dict(GREEDY[name])
    ids = torch.tensor(options.pop("inputs", [PROMPT]))
    output = same_generation(torch_reference, smollm2_f32, ids, **options)
    assert changed(output), f"{name} did nothing"


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling(smollm2_f32: Any, torch_reference: Any, name: str) -> None:
    output = same_generation(torch_reference, smollm2_f32, torch.tensor([PROMPT]), seed=7, **SAMPLED[name])
    assert changed(output) or name == "do_sample", f"{name} did nothing"


def changed(output: Any) -> bool:
    """The processed scores differ from the raw logits somewhere."""
    return any(not torch.equal(scores, raw) for scores, raw in zip(output.scores, output.logits, strict=True))


def test_prefix_allowed_tokens_fn(smollm2_f32: Any, torch_reference: Any) -> None:
    allowed = {260: [281, 282], 281: [260, 39], 282: [260], 39: [281, 37]}

    def fn(batch_id: int, tokens: torch.Tensor) -> list[int]:
        return allowed.get(int(tokens[-1]), [260])

    output = same_generation(
        torch_reference, smollm2_f32, torch.tensor([PROMPT]), prefix_allowed_tokens_fn=fn
    )
    assert set(output.sequences[0, len(PROMPT) :].tolist()) <= {260, 281, 282, 39, 37}


class OnlyEven(LogitsProcessor):
    """A user's own processor, which also looks at what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(tuple(input_ids.shape))
        scores = scores.clone()
        scores[:, 1::2] = -torch.inf
        return scores


def test_a_processor_of_the_users_own(smollm2_f32: Any, torch_reference: Any) -> None:
    own = OnlyEven()
    output = same_generation(
        torch_reference, smollm2_f32, torch.tensor([PROMPT]), logits_processor=LogitsProcessorList([own])
    )
    assert not any(token % 2 for token in output.sequences[0, len(PROMPT) :].tolist())
    assert own.seen == 2 * [(1, len(PROMPT) + step) for step in range(12)]


def test_a_processor_may_write_into_the_scores(smollm2_f32: Any, torch_reference: Any) -> None:
    """In place, as some do: the logits must be the caller's own."""

    def in_place(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, PLAIN[0]] -= 100
        return scores

    for _ in range(2):  # the second time from a warm prefix
        output = same_generation(
            torch_reference, smollm2_f32, torch.tensor([PROMPT]), logits_processor=LogitsProcessorList([in_place])
        )
        assert PLAIN[0] not in output.sequences[0, len(PROMPT) :]


def test_guidance_with_a_negative_prompt(smollm2_f32: Any, torch_reference: Any) -> None:
    negative = torch.tensor([[2683, 359, 253, 30879, 284, 551, 44222, 11173, 30]])
    plain = same_generation(torch_reference, smollm2_f32, torch.tensor([PROMPT]), guidance_scale=2.0)
    output = same_generation(
        torch_reference, smollm2_f32, torch.tensor([PROMPT]), guidance_scale=2.0, negative_prompt_ids=negative
    )
    assert output.sequences.tolist() != plain.sequences.tolist()


def test_the_watermark_is_found_where_it_is(smollm2_f32: Any) -> None:
    config = WatermarkingConfig(bias=4.0, seeding_scheme="lefthash")
    ids = torch.tensor([PROMPT])
    marked = smollm2_f32.generate(ids, watermarking_config=config, do_sample=False, max_new_tokens=30)
    plain = smollm2_f32.generate(ids, do_sample=False, max_new_tokens=30)
    detector = WatermarkDetector(model_config=smollm2_f32.config, device="cpu", watermarking_config=config)
    assert detector(marked[:, len(PROMPT) :], return_dict=True).prediction.tolist() == [True]
    assert detector(plain[:, len(PROMPT) :], return_dict=True).prediction.tolist() == [False]


def test_the_same_seed_is_the_same_text_and_another_is_not(smollm2_f32: Any) -> None:
    def sample(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return smollm2_f32.generate(torch.tensor([PROMPT]), do_sample=True, top_k=0, max_new_tokens=12)[0].tolist()

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(4)}) > 1
