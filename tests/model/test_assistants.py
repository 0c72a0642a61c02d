"""Who may draft, and on what terms: the hook, the settings, PyTorch models, other vocabularies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from drafts import LOOKUP, NEW, TEXT, generate, small_llama
from transformers_llamacpp import ClosedError, InvalidInputError, LlamaCppError

pytestmark = pytest.mark.usefixtures("every_round")


# -- the hook and the settings -----------------------------------------------------------------------------------------


@pytest.fixture
def hooked(tiny_llama: Any, twin: Any) -> Any:
    tiny_llama.assistant_model = twin
    yield tiny_llama
    tiny_llama.assistant_model = tiny_llama.assistant_tokenizer = None


def test_the_hook_drafts_in_every_call_until_it_is_taken_off(hooked: Any) -> None:
    text = generate(hooked)
    assert hooked.last_stats.drafted_tokens > 0
    hooked.assistant_model = None
    assert generate(hooked) == text
    assert hooked.last_stats.drafted_tokens == 0


def test_a_named_assistant_comes_before_the_hook(hooked: Any, tiny_mamba: Any) -> None:
    hooked.assistant_model = None
    expected = generate(hooked)
    hooked.assistant_model = object()  # would be an error
    assert generate(hooked, assistant_model=tiny_mamba) == expected


@pytest.mark.parametrize(
    "call",
    [
        {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
        {"penalty_alpha": 0.6, "top_k": 3},
        {"num_beams": 2, "force_words_ids": [[50]]},
        {"use_cache": False},
    ],
)
def test_the_hook_steps_aside_where_a_named_assistant_is_an_error(hooked: Any, twin: Any, call: dict[str, Any]) -> None:
    torch.manual_seed(1)
    got = generate(hooked, **call)
    assert hooked.last_stats.drafted_tokens == 0
    hooked.assistant_model = None
    torch.manual_seed(1)
    assert generate(hooked, **call) == got
    for drafts, name in (({"assistant_model": twin}, "assistant_model"), (LOOKUP, "prompt_lookup_num_tokens")):
        with pytest.raises(InvalidInputError, match=f"{name} drafts for one text"):
            generate(hooked, **call, **drafts)
        assert hooked.last_stats.decode_calls == 0


def test_a_batch_is_an_error_and_no_matter_for_the_hook(hooked: Any, twin: Any) -> None:
    batch = torch.tensor([TEXT, TEXT])
    assert hooked.generate(batch, max_new_tokens=3).shape == (2, len(TEXT) + 3)
    hooked.assistant_model = None
    with pytest.raises(InvalidInputError, match="the input has 2: call generate"):
        hooked.generate(batch, max_new_tokens=3, assistant_model=twin)


def test_the_hook_is_no_part_of_the_model(tiny_llama: Any, torch_assistant: Any) -> None:
    before = tiny_llama.num_parameters()
    tiny_llama.assistant_model = torch_assistant
    try:
        assert not list(tiny_llama.parameters())
        assert tiny_llama.num_parameters() == before
    finally:
        tiny_llama.assistant_model = None


def test_the_assistants_settings_are_obeyed_and_left_alone(tiny_llama: Any, twin: Any) -> None:
    for name, value in (("num_assistant_tokens", 2), ("assistant_confidence_threshold", 0.0)):
        setattr(twin.generation_config, name, value)
    before = twin.generation_config.to_dict()
    generate(tiny_llama, assistant_model=twin)
    stats = tiny_llama.last_stats
    assert stats.decode_calls == 1 + -(-(NEW - 1) // 3)
    assert twin.generation_config.to_dict() == before
    generate(tiny_llama, assistant_model=twin, num_assistant_tokens=6)  # the call's own comes first
    assert tiny_llama.last_stats.decode_calls == 1 + -(-(NEW - 1) // 7)
    generate(tiny_llama, assistant_model=twin, assistant_confidence_threshold=1.1)  # never sure enough for a second one
    rounds = tiny_llama.last_stats.decode_calls - 1
    assert rounds - 1 <= tiny_llama.last_stats.drafted_tokens <= rounds  # the last round may have no room for one


def test_schedules(tiny_llama: Any, twin: Any) -> None:
    call = {"assistant_model": twin, "num_assistant_tokens": 1, "assistant_confidence_threshold": 0, "max_new_tokens": 40}

    def decodes(schedule: str) -> int:
        generate(tiny_llama, num_assistant_tokens_schedule=schedule, **call)
        return tiny_llama.last_stats.decode_calls

    constant = decodes("constant")
    growing = decodes("heuristic_transient")
    assert growing < constant == 1 + -(-39 // 2)
    assert decodes("heuristic_transient") == growing
    assert decodes("heuristic") == growing
    assert decodes("heuristic") < growing  # what the last call came to is kept
    assert decodes("constant") == constant


@pytest.mark.skipif(
    not hasattr(GenerationConfig(), "assistant_ensemble_weight"), reason="this release has no assistant_ensemble_weight"
)
def test_an_ensemble_weight_lets_more_of_the_assistant_through(tiny_llama: Any, tiny_swa: Any) -> None:
    call = {"assistant_model": tiny_swa, "num_assistant_tokens": 3, "assistant_confidence_threshold": 0}
    plain = generate(tiny_llama, **call)
    strict = tiny_llama.last_stats.accepted_tokens
    generate(tiny_llama, assistant_ensemble_weight=0.05, **call)
    assert tiny_llama.last_stats.accepted_tokens > strict
    assert generate(tiny_llama, assistant_ensemble_weight=0.999, **call) == plain
    with pytest.raises(InvalidInputError, match="assistant_ensemble_weight"):
        generate(tiny_llama, assistant_ensemble_weight=0.5, **LOOKUP)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens=0"),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 0}, "max_matching_ngram_size"),
        ({"prompt_lookup_num_tokens": 2.5}, "no whole number"),
        ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": "2"}, "no whole number"),
        ({"assistant_model": "a model"}, "assistant_model is a str"),
        ({"assistant_model": torch.nn.Linear(2, 2)}, "assistant_model is a Linear"),
        ({"assistant_early_exit": 2}, "assistant_early_exit"),
    ],
)
def test_bad_settings_are_errors_before_anything_is_computed(tiny_llama: Any, call: dict[str, Any], message: str) -> None:
    with pytest.raises(LlamaCppError, match=message):
        generate(tiny_llama, **call)
    assert tiny_llama.last_stats.decode_calls == 0


@pytest.mark.parametrize("tokens", [0, -1])
def test_an_assistant_that_may_draft_nothing(tiny_llama: Any, twin: Any, tokens: int) -> None:
    with pytest.raises(InvalidInputError, match="num_assistant_tokens"):
        generate(tiny_llama, assistant_model=twin, num_assistant_tokens=tokens)


@pytest.mark.parametrize(
    "call",
    [
        {"num_assistant_tokens": "x"},
        {"num_assistant_tokens": 2.5},
        {"num_assistant_tokens_schedule": "nonsense"},
        {"assistant_confidence_threshold": "x"},
        {"tokenizer": 5, "assistant_tokenizer": "x"},
    ],
)
def test_bad_settings_of_an_assistant(tiny_llama: Any, twin: Any, call: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match=next(iter(call))):
        generate(tiny_llama, assistant_model=twin, **call)
    assert tiny_llama.last_stats.decode_calls == 0


def test_a_closed_assistant(tiny_llama: Any, load: Callable[..., Any], tiny_llama_path: Path) -> None:
    assistant = load(tiny_llama_path)
    assistant.close()
    with pytest.raises(ClosedError, match=r"the assistant .*tiny-llama.* was closed"):
        generate(tiny_llama, assistant_model=assistant)


def test_a_model_that_writes_nothing(tiny_llama: Any) -> None:
    with pytest.raises(InvalidInputError, match="a LlamaModel, which writes no text"):
        generate(tiny_llama, assistant_model=small_llama(tiny_llama.config.vocab_size).model)


# -- PyTorch, and other vocabularies -----------------------------------------------------------------------------------


@pytest.fixture
def torch_assistant(tiny_llama: Any) -> Any:
    return small_llama(tiny_llama.config.vocab_size)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("extra", [0, 24, -20])
def test_a_torch_assistant_also_with_a_vocabulary_padded_differently(tiny_llama: Any, extra: int, sample: bool) -> None:
    assistant = small_llama(tiny_llama.config.vocab_size + extra)
    before = assistant.generation_config.to_dict()
    expected = generate(tiny_llama)
    got = generate(tiny_llama, assistant_model=assistant, num_assistant_tokens=3, do_sample=sample)
    assert tiny_llama.last_stats.drafted_tokens > 0
    assert len(got) == len(expected)
    assert sample or got == expected
    assert assistant.generation_config.to_dict() == before


def test_the_torch_original_drafts_what_its_gguf_says(smollm2_f32: Any, torch_reference: Any) -> None:
    ids = smollm2_f32.tokenizer("The history of the Roman Empire begins with").input_ids
    expected = generate(smollm2_f32, ids)
    call = {"num_assistant_tokens": 5, "assistant_confidence_threshold": 0}
    assert generate(smollm2_f32, ids, assistant_model=torch_reference, **call) == expected
    stats = smollm2_f32.last_stats
    assert stats.accepted_tokens == stats.drafted_tokens
    assert stats.decode_calls == 1 + -(-(NEW - 1) // 6)


def test_a_llama_cpp_model_assists_a_torch_model(smollm2_f32: Any, torch_reference: Any) -> None:
    ids = smollm2_f32.tokenizer("The history of the Roman Empire begins with", return_tensors="pt").input_ids
    call = {"max_new_tokens": 16, "do_sample": False}
    expected = torch_reference.generate(ids, **call).tolist()
    before = smollm2_f32.generation_config.to_dict()
    assert torch_reference.generate(ids, **call, assistant_model=smollm2_f32).tolist() == expected
    assert smollm2_f32.generation_config.to_dict() == before


def test_other_tokens_without_tokenizers_are_an_error_that_names_both(tiny_llama: Any, smollm2_f32: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"SmolLM2.*tiny-llama.*pass tokenizer= and assistant_tokenizer="):
        generate(tiny_llama, assistant_model=smollm2_f32)
    assert tiny_llama.last_stats.decode_calls == 0
    with pytest.raises(InvalidInputError, match=r"LlamaForCausalLM \(vocabulary of 1000\)"):
        generate(tiny_llama, assistant_model=small_llama(1000))


@pytest.mark.parametrize("sample", [False, True])
def test_an_assistant_with_another_vocabulary(
    smollm2_f32: Any, load: Callable[..., Any], gemma_path: Path, sample: bool
) -> None:
    gemma = load(gemma_path)
    ids = smollm2_f32.tokenizer("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday,").input_ids
    call = {"do_sample": sample, "top_k": 3, "max_new_tokens": 20}
    torch.manual_seed(3)
    expected = generate(smollm2_f32, ids, **call)
    tokenizers = {"tokenizer": smollm2_f32.tokenizer, "assistant_tokenizer": gemma.tokenizer}
    torch.manual_seed(3)
    assert generate(smollm2_f32, ids, assistant_model=gemma, num_assistant_tokens=4, **tokenizers, **call) == expected
    assert smollm2_f32.last_stats.accepted_tokens > 0


def test_the_hook_with_another_vocabulary(smollm2_f32: Any, load: Callable[..., Any], gemma_path: Path) -> None:
    gemma = load(gemma_path)
    ids = smollm2_f32.tokenizer("Monday, Tuesday, Wednesday, Thursday, Friday,").input_ids
    expected = generate(smollm2_f32, ids)
    smollm2_f32.assistant_model, smollm2_f32.assistant_tokenizer = gemma, gemma.tokenizer
    try:
        assert generate(smollm2_f32, ids) == expected
        assert smollm2_f32.last_stats.drafted_tokens > 0
        smollm2_f32.assistant_tokenizer = None  # then each file's own
        assert generate(smollm2_f32, ids) == expected
        assert smollm2_f32.last_stats.drafted_tokens > 0
    finally:
        smollm2_f32.assistant_model = smollm2_f32.assistant_tokenizer = None
