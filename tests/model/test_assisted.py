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
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from drafts import LOOKUP, NEW, TEXT, generate
from transformers_llamacpp import LlamaCppCache

KINDS = ("tiny_llama", "tiny_swa", "tiny_mamba", "tiny_hybrid")

pytestmark = pytest.mark.usefixtures("every_round")


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


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
