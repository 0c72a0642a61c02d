"""Speculative decoding: the text of plain decoding, whoever drafts, under any processor and any stopping criterion.

Drafts here are made in every round and whatever they cost (`every_round`), so that what is counted is exact; the pace
that stops what does not pay has tests of its own (`unit/test_pace.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from transformers_llamacpp import ClosedError, InvalidInputError, LlamaCppCache, LlamaCppError
from transformers_llamacpp.decoding import speculation
from transformers_llamacpp.decoding.drafting.pace import FixedPace

TEXT = [40, 41, 42, 43, 44, 45, 40, 41, 42, 43]
NEW = 24
KINDS = ("tiny_llama", "tiny_swa", "tiny_mamba", "tiny_hybrid")
LOOKUP = {"prompt_lookup_num_tokens": 4}


@pytest.fixture
def every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "Pace", FixedPace)


pytestmark = pytest.mark.usefixtures("every_round")


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.fixture
def twin(load: Callable[..., Any], tiny_llama_path: Path) -> Any:
    """An assistant that drafts what `tiny_llama` says."""
    return load(tiny_llama_path, type_k="f32", type_v="f32", flash_attn=False)


def generate(model: Any, tokens: list[int] = TEXT, **call: Any) -> list[int]:
    call = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | call
    return model.generate(torch.tensor([tokens]), **call)[0].tolist()


# -- who drafts --------------------------------------------------------------------------------------------------------


def test_prompt_lookup_is_plain_decoding(model: Any) -> None:
    text = generate(model) * 2  # what it said before can be looked up
    expected = generate(model, text)
    assert generate(model, text, **LOOKUP) == expected
    stats = model.last_stats
    assert stats.drafted_tokens > 0
    assert stats.new_tokens == NEW
    if stats.reused_tokens and not model.engine.backend.limits.recurrent:
        assert stats.decode_calls == NEW - stats.accepted_tokens
        assert stats.evaluated_tokens == 1 + (stats.decode_calls - 1) + stats.drafted_tokens


@pytest.mark.parametrize("drafter", KINDS)
def test_any_assistant_is_plain_decoding(model: Any, request: pytest.FixtureRequest, drafter: str) -> None:
    expected = generate(model)
    assert generate(model, assistant_model=request.getfixturevalue(drafter), num_assistant_tokens=3) == expected
    assert model.last_stats.drafted_tokens > 0


def test_a_perfect_assistant(tiny_llama: Any, twin: Any) -> None:
    expected = generate(tiny_llama)
    tiny_llama.forget()
    got = generate(tiny_llama, assistant_model=twin, num_assistant_tokens=4, assistant_confidence_threshold=0.0)
    assert got == expected
    stats = tiny_llama.last_stats
    # the prompt gives one token; each round four drafted ones and one more, and the last one what is left
    rounds, rest = divmod(NEW - 1, 5)
    assert stats.decode_calls == 1 + rounds + bool(rest)
    assert stats.accepted_tokens == stats.drafted_tokens == rounds * 4 + max(0, rest - 1)
    assert stats.evaluated_tokens == len(TEXT) + NEW - 1
    assert stats.new_tokens == NEW


def test_a_model_may_draft_for_itself(tiny_llama: Any) -> None:
    expected = generate(tiny_llama)
    assert generate(tiny_llama, assistant_model=tiny_llama) == expected


def test_an_n_gram_comes_first_and_the_assistant_otherwise(tiny_llama: Any, twin: Any) -> None:
    text = generate(tiny_llama) * 2
    expected = generate(tiny_llama, text)
    got = generate(tiny_llama, text, assistant_model=twin, num_assistant_tokens=3, **LOOKUP)
    assert got == expected
    both = tiny_llama.last_stats
    generate(tiny_llama, text, **LOOKUP)
    assert both.accepted_tokens > tiny_llama.last_stats.accepted_tokens
    assert both.decode_calls < tiny_llama.last_stats.decode_calls


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_gives_the_same_text_with_prompt_lookup(model: Any, seed: int) -> None:
    call = {"do_sample": True, "top_k": 5, "temperature": 0.7}
    text = generate(model) * 2
    torch.manual_seed(seed)
    expected = generate(model, text, **call)
    torch.manual_seed(seed)
    assert generate(model, text, **call, **LOOKUP) == expected
    assert model.last_stats.drafted_tokens > 0


def test_sampling_with_an_assistant_keeps_the_distribution(tiny_llama: Any, tiny_swa: Any) -> None:
    """Two tokens, three candidates each: nine outcomes, compared with their exact probabilities by a chi-square."""
    call = {"do_sample": True, "top_k": 3, "max_new_tokens": 2}

    def probabilities(tokens: list[int]) -> torch.Tensor:
        logits = tiny_llama(torch.tensor([tokens])).logits[0, -1]
        kept = logits.topk(3).indices
        return torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept]).softmax(0)

    expected: dict[tuple[int, int], float] = {}
    first = probabilities(TEXT)
    for one in first.nonzero()[:, 0].tolist():
        second = probabilities([*TEXT, one])
        for two in second.nonzero()[:, 0].tolist():
            expected[one, two] = float(first[one] * second[two])
    assert abs(sum(expected.values()) - 1) < 1e-4
    torch.manual_seed(0)
    n, seen = 600, dict.fromkeys(expected, 0)
    for _ in range(n):
        got = generate(tiny_llama, assistant_model=tiny_swa, num_assistant_tokens=2, **call)
        seen[tuple(got[-2:])] += 1
    chi_square = sum((seen[pair] - n * p) ** 2 / (n * p) for pair, p in expected.items())
    assert chi_square < 26.1  # 8 degrees of freedom: 0.001


# -- where it ends -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new", range(1, 9))
def test_never_more_than_max_new_tokens(tiny_llama: Any, twin: Any, new: int) -> None:
    expected = generate(tiny_llama, max_new_tokens=new)
    assert len(expected) == len(TEXT) + new
    assert generate(tiny_llama, max_new_tokens=new, **LOOKUP) == expected
    assert generate(tiny_llama, max_new_tokens=new, assistant_model=twin) == expected
    assert tiny_llama.last_stats.drafted_tokens <= max(0, new - 2)


@pytest.mark.parametrize("place", [0, 1, 3, 4, 7])
def test_an_end_token_inside_a_draft_ends_the_text(tiny_llama: Any, twin: Any, place: int) -> None:
    end = generate(tiny_llama)[len(TEXT) + place]
    expected = generate(tiny_llama, eos_token_id=end)
    assert len(expected) <= len(TEXT) + place + 1
    got = generate(tiny_llama, eos_token_id=[0, end], assistant_model=twin, num_assistant_tokens=6)
    assert got == generate(tiny_llama, eos_token_id=[0, end]) == expected
    assert tiny_llama.last_stats.new_tokens == len(expected) - len(TEXT)


def test_the_context_ends_the_text(load: Callable[..., Any], tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, n_ctx=32)
    expected = generate(model, max_new_tokens=100)
    assert len(expected) == 32
    assert generate(model, max_new_tokens=100, **LOOKUP) == expected
    assert generate(model, max_new_tokens=100, assistant_model=model) == expected


def test_an_assistant_with_a_shorter_context_drafts_as_far_as_it_goes(
    tiny_llama: Any, load: Callable[..., Any], tiny_llama_path: Path
) -> None:
    short = load(tiny_llama_path, n_ctx=20, type_k="f32", type_v="f32", flash_attn=False)
    expected = generate(tiny_llama)
    assert generate(tiny_llama, assistant_model=short, num_assistant_tokens=3, assistant_confidence_threshold=0) == expected
    assert 0 < tiny_llama.last_stats.accepted_tokens <= 20 - len(TEXT)


# -- what others see ---------------------------------------------------------------------------------------------------


class Recorder(LogitsProcessor, StoppingCriteria):
    """Remembers every call it gets as processor and as criterion, and lets what it saw decide."""

    def __init__(self, stop_at: int = 1 << 30) -> None:
        self.scored: list[list[int]] = []
        self.asked: list[list[int]] = []
        self.stop_at = stop_at

    def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
        seen = input_ids[0].tolist()
        if isinstance(scores, torch.Tensor):
            self.scored.append(seen)
            scores = scores.clone()
            scores[:, len(self.scored) % 7 :: 7] -= 3.0  # another change at each call: asked twice it would differ
            return scores
        self.asked.append(seen)
        return torch.tensor([len(self.asked) >= self.stop_at])


class Collector:
    def __init__(self) -> None:
        self.put_tokens: list[int] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.put_tokens += value.reshape(-1).tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("stop_at", [1 << 30, 5])
def test_processors_criteria_and_streamers_see_verified_text_once_and_in_order(
    tiny_llama: Any, twin: Any, stop_at: int
) -> None:
    seen = []
    for drafts in ({}, LOOKUP, {"assistant_model": twin, "num_assistant_tokens": 5}):
        recorder, collector = Recorder(stop_at), Collector()
        text = generate(
            tiny_llama, logits_processor=LogitsProcessorList([recorder]), streamer=collector,
            stopping_criteria=StoppingCriteriaList([recorder]), **drafts,
        )  # fmt: skip
        assert collector.ended
        assert tiny_llama.last_stats.drafted_tokens > 0 or not drafts
        seen.append((text, recorder.scored, recorder.asked, collector.put_tokens))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0][2]) == min(stop_at, NEW)
    assert seen[0][3] == seen[0][0]


def test_a_stop_string_ends_the_text_where_it_does_without_drafts(smollm2_f32: Any, smollm2_q4_0_path: Path, load: Any) -> None:
    ids = smollm2_f32.tokenizer("1, 2, 3, 4, 5, 6, 7,", return_tensors="pt").input_ids
    call = {"max_new_tokens": 30, "do_sample": False, "stop_strings": [" 12"], "tokenizer": smollm2_f32.tokenizer}
    expected = smollm2_f32.generate(ids, **call).tolist()
    assert smollm2_f32.tokenizer.decode(expected[0]).endswith("12")
    assert smollm2_f32.generate(ids, **call, prompt_lookup_num_tokens=8).tolist() == expected
    assert smollm2_f32.generate(ids, **call, assistant_model=load(smollm2_q4_0_path)).tolist() == expected


def test_scores_logits_and_hidden_states_are_those_of_plain_decoding(tiny_llama: Any, twin: Any) -> None:
    call = {
        "max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "repetition_penalty": 1.2,
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True,
    }  # fmt: skip
    ids = torch.tensor([TEXT])
    tiny_llama.forget()
    plain = tiny_llama.generate(ids, **call)
    tiny_llama.forget()
    got = tiny_llama.generate(ids, **call, assistant_model=twin, num_assistant_tokens=3)
    assert got.stats.accepted_tokens > 0
    assert got.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits"):
        assert len(got[name]) == 8
        for mine, theirs in zip(got[name], plain[name], strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-3, rtol=0)
    for mine, theirs in zip(got.hidden_states, plain.hidden_states, strict=True):
        torch.testing.assert_close(mine[-1], theirs[-1], atol=2e-3, rtol=0)


# -- caches ------------------------------------------------------------------------------------------------------------


def test_a_kept_cache_holds_all_but_the_last_token(model: Any) -> None:
    cache, text = LlamaCppCache(model), generate(model) * 2
    call = {"past_key_values": cache, "max_new_tokens": 7, **LOOKUP}
    first = generate(model, text, **call)
    assert cache.tokens(0) == first[:-1]
    second = generate(model, [*first, 50, 51], **call)
    assert second == generate(model, [*first, 50, 51], max_new_tokens=7)
    only_new = torch.tensor([[second[-1], 60]])
    mask = torch.ones((1, len(second) + 1), dtype=torch.long)
    third = model.generate(only_new, attention_mask=mask, do_sample=False, eos_token_id=None, pad_token_id=0, **call)
    assert third[0, 2:].tolist() == generate(model, [*second, 60], max_new_tokens=7)[-7:]
    cache.close()


def test_what_fails_in_the_middle_of_a_draft_leaves_the_verified_text(tiny_llama: Any, twin: Any) -> None:
    class Failing(Recorder):
        def __call__(self, input_ids: torch.Tensor, scores: Any) -> Any:
            if input_ids.shape[1] == len(TEXT) + 4:
                raise RuntimeError("mine")
            return scores

    cache = LlamaCppCache(tiny_llama)
    with pytest.raises(RuntimeError, match="mine"):
        generate(
            tiny_llama, past_key_values=cache, assistant_model=twin, num_assistant_tokens=6,
            logits_processor=LogitsProcessorList([Failing()]),
        )  # fmt: skip
    assert cache.tokens(0) == generate(tiny_llama)[: len(TEXT) + 4]  # as plain decoding leaves it
    assert generate(tiny_llama, past_key_values=cache) == generate(tiny_llama)
    cache.close()


@pytest.mark.parametrize("place", [2, 3, 5, 7])
def test_a_stop_in_the_middle_of_a_draft_leaves_a_cache_to_go_on_with(model: Any, place: int) -> None:
    cache = LlamaCppCache(model)
    stop = StoppingCriteriaList([lambda ids, scores, **kwargs: torch.tensor([ids.shape[1] >= len(TEXT) + place])])
    draft = {"assistant_model": model, "num_assistant_tokens": 6, "assistant_confidence_threshold": 0}
    first = generate(model, past_key_values=cache, stopping_criteria=stop, **draft)
    assert first == generate(model)[: len(TEXT) + place]
    assert cache.tokens(0) == first[:-1]
    new, mask = torch.tensor([[first[-1], 60, 61]]), torch.ones((1, len(first) + 2), dtype=torch.long)
    call = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    got = model.generate(new, attention_mask=mask, past_key_values=cache, **call)[0, 3:].tolist()
    assert got == generate(model, [*first, 60, 61], max_new_tokens=5)[-5:]
    cache.close()


def test_an_exception_of_the_callers_own_is_what_the_caller_sees(model: Any) -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 3:
            raise ZeroDivisionError
        return scores

    embeds = torch.zeros((1, 4, model.config.hidden_size))
    for drafts in ({}, LOOKUP, {"assistant_model": model}):
        with pytest.raises(ZeroDivisionError):
            model.generate(
                inputs_embeds=embeds, max_new_tokens=8, eos_token_id=None, logits_processor=LogitsProcessorList([fails]),
                **drafts,
            )  # fmt: skip
    assert generate(model, max_new_tokens=3) == generate(model, max_new_tokens=3, **LOOKUP)


def test_a_padded_row(tiny_llama: Any, twin: Any) -> None:
    ids, mask = torch.tensor([[0, 0, *TEXT]]), torch.tensor([[0, 0, *[1] * len(TEXT)]])
    call = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    expected = tiny_llama.generate(ids, **call).tolist()
    assert tiny_llama.generate(ids, **call, assistant_model=twin).tolist() == expected
    assert expected[0][2:] == generate(tiny_llama, max_new_tokens=9)


def test_inputs_embeds(tiny_llama: Any, twin: Any) -> None:
    embeds = torch.randn((1, 5, tiny_llama.config.hidden_size), generator=torch.Generator().manual_seed(1))
    call = {"inputs_embeds": embeds, "max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = tiny_llama.generate(**call).tolist()
    assert tiny_llama.generate(**call, **LOOKUP).tolist() == expected
    assert tiny_llama.generate(**call, assistant_model=twin).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_guidance(request: pytest.FixtureRequest, kind: str, twin: Any) -> None:
    model = request.getfixturevalue(kind)
    call = {"guidance_scale": 1.8, "negative_prompt_ids": torch.tensor([[83, 159, 253]])}
    text = generate(model, **call) * 2
    expected = generate(model, text, **call)
    assert generate(model, text, **call, **LOOKUP) == expected
    assert model.last_stats.drafted_tokens > 0
    assert generate(model, text, **call, assistant_model=twin, num_assistant_tokens=3) == expected
    assert model.last_stats.drafted_tokens > 0


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


def small_llama(vocab_size: int, seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=2, bos_token_id=1, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


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
