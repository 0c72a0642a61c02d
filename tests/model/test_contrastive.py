"""Contrastive search: the tokens of transformers 4.46.3, one decode a token, and everything `generate()` takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from compare import TieWarning, cold_logits, first_difference
from golden_cases import decoding_cases, decoding_id, open_cases, open_id
from transformers_llamacpp import LlamaCppCache, UnsupportedFeatureError, compat

OPEN = open_cases("contrastive_k4", "contrastive_k8")
CASES = decoding_cases("contrastive")
ROMAN = OPEN[0]["prompt_ids"]
CALL: dict[str, Any] = {"penalty_alpha": 0.6, "top_k": 4, "max_new_tokens": 12, "eos_token_id": 2, "pad_token_id": 2}
TIE = 1e-3
"""Two candidates whose scores, at most 1, are nearer than this may change places."""


def generate(model: Any, prompt: list[int], **kwargs: Any) -> list[int]:
    output: list[int] = model.generate(torch.tensor([prompt]), **{**CALL, **kwargs})[0, len(prompt) :].tolist()
    return output


def plain_scores(model: Any, text: list[int], alpha: float, k: int) -> dict[int, float]:
    """The paper's score of each of `k` candidates after `text`, with nothing but cold forward passes."""
    probabilities = torch.softmax(cold_logits(model, text)[-1], dim=-1)
    scores = {}
    for token in probabilities.topk(k).indices.tolist():
        output = model(torch.tensor([[*text, token]]), output_hidden_states=True, use_cache=False)
        units = torch.nn.functional.normalize(output.hidden_states[-1][0], dim=-1)
        scores[token] = float((1 - alpha) * probabilities[token] - alpha * (units[:-1] @ units[-1]).max())
    model.forget()
    return scores


def same(model: Any, prompt: list[int], expected: list[int], got: list[int], alpha: float, k: int) -> None:
    """Equal, or different first where two candidates had the same score."""
    at = first_difference(expected, got)
    if expected == got:
        return
    assert at < min(len(expected), len(got)), (expected, got)
    scores = plain_scores(model, [*prompt, *expected[:at]], alpha, k)
    gap = abs(scores[expected[at]] - scores[got[at]])
    assert gap < TIE, f"token {at} is {got[at]}, not {expected[at]}; the gap is {gap}: {expected}, {got}"
    warnings.warn(TieWarning(f"token {at} is {got[at]} or {expected[at]}, gap {gap:.6f}"), stacklevel=2)


# -- the old library's text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", OPEN, ids=open_id)
def test_open_cases(smollm2_f32: Any, case: dict[str, Any]) -> None:
    model, prompt, kwargs = smollm2_f32, case["prompt_ids"], case["kwargs"]
    got = model.generate(torch.tensor([prompt]), max_new_tokens=64, **kwargs)[0, len(prompt) :].tolist()
    assert model.last_stats.decode_calls == len(got) + 1  # the prompt, and one a token
    assert model.last_stats.new_tokens == len(got)
    end = case.get("tie_at")
    same(model, prompt, case["new_ids"][:end], got[:end], kwargs["penalty_alpha"], kwargs["top_k"])


@pytest.mark.parametrize("case", CASES, ids=decoding_id)
def test_batches_ends_and_processors(smollm2_f32: Any, case: dict[str, Any]) -> None:
    ids = torch.tensor(case["ids"])
    output = smollm2_f32.generate(ids, attention_mask=torch.tensor(case["mask"]), **case["kwargs"])
    assert output[:, ids.shape[1] :].tolist() == case["new_ids"]
    assert smollm2_f32.last_stats.decode_calls == output.shape[1] - ids.shape[1] + 1


@pytest.mark.parametrize("kind", ["tiny_llama", "tiny_swa", "tiny_mamba", "tiny_hybrid"])
def test_every_kind_of_memory(request: pytest.FixtureRequest, kind: str) -> None:
    """Against the formula, with nothing but cold forward passes."""
    model, prompt = request.getfixturevalue(kind), [3, 7, 1, 9, 4]
    got = generate(model, prompt, max_new_tokens=8, eos_token_id=None, pad_token_id=0)
    for at, token in enumerate(got):
        scores = plain_scores(model, [*prompt, *got[:at]], 0.6, 4)
        assert max(scores.values()) - scores[token] < TIE, (at, token, scores)


# -- what generate() takes, and gives back -------------------------------------------------------------------


def test_nothing_but_the_penalty(tiny_llama: Any) -> None:
    """`penalty_alpha=1`, the end of its range, is contrastive search as 0.999 is."""
    prompt = list(range(40, 60))
    nearly = generate(tiny_llama, prompt, penalty_alpha=0.9999, top_k=4)
    assert generate(tiny_llama, prompt, penalty_alpha=1.0, top_k=4) == nearly
    assert tiny_llama.last_stats.decode_calls < tiny_llama.last_stats.evaluated_tokens - len(prompt)


def test_outputs(smollm2_f32: Any) -> None:
    model, ids = smollm2_f32, torch.tensor([ROMAN])
    out = model.generate(
        ids, **CALL, return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True,
        repetition_penalty=1.2,
    )  # fmt: skip
    new = out.sequences[0, len(ROMAN) :].tolist()
    assert len(out.scores) == len(out.logits) == len(out.hidden_states) == len(new) == 12
    text = out.sequences[0].tolist()
    model.forget()
    cold = model(torch.tensor([text[:-1]]), output_hidden_states=True, use_cache=False)
    for step, logits in enumerate(out.logits):
        assert logits.shape == out.scores[step].shape == (1, model.config.vocab_size)
        torch.testing.assert_close(logits[0], cold.logits[0, len(ROMAN) - 1 + step], atol=0.03, rtol=0)
        assert not torch.equal(logits, out.scores[step])  # the penalty is in the scores only
        assert new[step] in out.scores[step][0].topk(4).indices
    hidden = torch.cat([step[-1] for step in out.hidden_states], dim=1)
    torch.testing.assert_close(hidden, cold.hidden_states[-1], atol=0.03, rtol=0.01)
    assert out.stats.new_tokens == 12
    cache = compat.cache_of(out)
    assert cache.tokens(0) == text[:-1]  # the last token is left to the next call, as by every method
    cache.close()


def test_a_returned_cache_goes_on(smollm2_f32: Any) -> None:
    whole = generate(smollm2_f32, ROMAN, max_new_tokens=16)
    smollm2_f32.forget()
    first = smollm2_f32.generate(torch.tensor([ROMAN]), **{**CALL, "max_new_tokens": 8}, return_dict_in_generate=True)
    cache = compat.cache_of(first)
    second = smollm2_f32.generate(first.sequences, **{**CALL, "max_new_tokens": 8}, cache=cache)
    same(smollm2_f32, ROMAN, whole, second[0, len(ROMAN) :].tolist(), 0.6, 4)
    assert smollm2_f32.last_stats.decode_calls == 9
    assert smollm2_f32.last_stats.evaluated_tokens == 1 + 8 * 4  # its hidden states were remembered
    assert cache.tokens(0) == second[0, :-1].tolist()
    cache.close()


@pytest.mark.parametrize("only_new", [False, True])
def test_a_cache_whose_hidden_states_nobody_knows(smollm2_f32: Any, only_new: bool) -> None:
    """It was filled by greedy search: they are evaluated again."""
    model = smollm2_f32
    cache = LlamaCppCache(model)
    greedy = model.generate(torch.tensor([ROMAN]), cache=cache, max_new_tokens=6, do_sample=False)
    given = greedy[:, -1:] if only_new else greedy
    mask = torch.ones_like(greedy) if only_new else None
    got = model.generate(given, cache=cache, attention_mask=mask, **CALL)
    assert model.last_stats.decode_calls == 12 + 2  # once the past, once the new token
    text = greedy[0].tolist()
    assert cache.tokens(0) == text + got[0, given.shape[1] : -1].tolist()
    cache.close()
    model.forget()
    same(model, text, generate(model, text), got[0, given.shape[1] :].tolist(), 0.6, 4)


def test_a_prompt_that_continues_an_earlier_call(smollm2_f32: Any) -> None:
    """Both the cells and the hidden states are found again; the text is that of a cold call."""
    model = smollm2_f32
    first = ROMAN + generate(model, ROMAN)
    longer = [*first, 30, 378]
    warm = generate(model, longer)
    assert model.last_stats.reused_tokens == len(first)
    assert model.last_stats.evaluated_tokens == 2 + 12 * 4
    model.forget()
    cold = generate(model, longer)
    assert model.last_stats.reused_tokens == 0
    same(model, longer, cold, warm, 0.6, 4)


def test_rows_alone_and_together(smollm2_f32: Any) -> None:
    case = next(case for case in CASES if case["name"] == "contrastive batch")
    for ids, mask, expected in zip(case["ids"], case["mask"], case["new_ids"], strict=True):
        prompt = [token for token, real in zip(ids, mask, strict=True) if real]
        alone = generate(smollm2_f32, prompt, **case["kwargs"])
        same(smollm2_f32, prompt, expected[: len(alone)], alone, 0.6, 4)


def test_embeddings_are_compared_with_too(tiny_llama: Any) -> None:
    embeds = torch.randn(1, 6, tiny_llama.config.hidden_size, generator=torch.Generator().manual_seed(0))
    first = tiny_llama.generate(inputs_embeds=embeds, **CALL)
    assert first.shape == (1, 12) and tiny_llama.last_stats.decode_calls == 13
    out = tiny_llama.generate(inputs_embeds=embeds, **CALL, return_dict_in_generate=True)
    assert torch.equal(out.sequences, first)
    cache = compat.cache_of(out)
    with pytest.raises(UnsupportedFeatureError, match="inputs_embeds cannot be evaluated again"):
        tiny_llama.generate(out.sequences[:, -1:], cache=cache, attention_mask=torch.ones(1, 18), **CALL)
    cache.close()


class Streamer:
    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.reshape(-1).tolist())

    def end(self) -> None:
        self.ended += 1


def test_a_streamer(tiny_llama: Any) -> None:
    streamer = Streamer()
    got = generate(tiny_llama, [3, 7, 1], streamer=streamer)
    assert streamer.got == [[3, 7, 1], *([token] for token in got)] and streamer.ended == 1
    streamer = Streamer()  # every argument may come by its place
    tiny_llama.generate(torch.tensor([[3, 7, 1]]), None, None, None, None, None, None, streamer, **CALL)
    assert streamer.got == [[3, 7, 1], *([token] for token in got)] and streamer.ended == 1


class Stop(StoppingCriteria):
    def __init__(self, lengths: list[int]) -> None:
        self.lengths = torch.tensor(lengths)
        self.scores: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.scores.append(scores)
        return input_ids.shape[1] >= self.lengths


def test_stopping_criteria(tiny_llama: Any) -> None:
    ids = torch.tensor([[3, 7, 1], [4, 4, 2]])
    call = {**CALL, "eos_token_id": 255, "pad_token_id": 0}
    free = tiny_llama.generate(ids, **call)
    tiny_llama.forget()
    stop = Stop([5, 7])
    out = tiny_llama.generate(ids, **call, stopping_criteria=[stop], return_dict_in_generate=True, output_scores=True)
    assert out.sequences.tolist() == [[*free[0, :5].tolist(), 0, 0], free[1, :7].tolist()]
    assert len(stop.scores) == 4 and len(stop.scores[-1]) == 4
    assert tiny_llama.last_stats.evaluated_tokens == 6 + 2 * 8 + 2 * (
        4 + 1
    )  # a row that ended gets one token, not four


def test_stop_strings_find_the_tokenizer(smollm2_f32: Any) -> None:
    got = generate(smollm2_f32, ROMAN, stop_strings=["Rome"], tokenizer=smollm2_f32.tokenizer)
    assert smollm2_f32.tokenizer.decode(got).endswith("Rome") and len(got) == 4


class Seen(LogitsProcessor):
    """Forbids everything but `allowed`, in place, and remembers what it was shown."""

    def __init__(self, allowed: list[int]) -> None:
        self.allowed, self.texts = allowed, []  # type: ignore[var-annotated]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.texts.append(input_ids.tolist())
        keep = scores[:, self.allowed].clone()
        scores.fill_(-torch.inf)
        scores[:, self.allowed] = keep
        return scores


def test_processors_see_the_text_and_are_obeyed(tiny_llama: Any) -> None:
    seen = Seen([11, 12])
    out = tiny_llama.generate(
        torch.tensor([[3, 7, 1]]), **CALL, logits_processor=[seen], return_dict_in_generate=True, output_logits=True
    )
    text = out.sequences[0].tolist()
    assert set(text[3:]) <= {11, 12}  # also where less than top_k tokens are allowed
    assert seen.texts == [[text[: 3 + step]] for step in range(12)]
    assert all(torch.isfinite(logits).all() for logits in out.logits)
    compat.cache_of(out).close()


def test_sampling_leaves_the_penalty_unused(tiny_llama: Any) -> None:
    ids = torch.tensor([[3, 7, 1]])
    outputs = []
    for extra in ({}, {"penalty_alpha": 0.6}):
        torch.manual_seed(5)
        outputs.append(tiny_llama.generate(ids, do_sample=True, top_k=4, max_new_tokens=12, eos_token_id=None, **extra))
    assert torch.equal(*outputs)


def test_beams_leave_the_penalty_unused(tiny_llama: Any) -> None:
    ids = torch.tensor([[3, 7, 1]])
    call = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6}
    assert torch.equal(tiny_llama.generate(ids, **call), tiny_llama.generate(ids, **call, penalty_alpha=0.6, top_k=4))


def test_settings_may_come_from_the_models_own_config(tiny_llama: Any) -> None:
    expected = generate(tiny_llama, [3, 7, 1])
    kept = tiny_llama.generation_config
    tiny_llama.generation_config = type(kept)(**{**kept.to_dict(), "penalty_alpha": 0.6, "top_k": 4})
    try:
        call = {"max_new_tokens": 12, "eos_token_id": 2}
        got = tiny_llama.generate(torch.tensor([[3, 7, 1]]), **call)[0, 3:].tolist()
        off = tiny_llama.generate(torch.tensor([[3, 7, 1]]), **call, penalty_alpha=None)[0, 3:].tolist()
    finally:
        tiny_llama.generation_config = kept
    assert got == expected
    assert off == tiny_llama.generate(torch.tensor([[3, 7, 1]]), **call)[0, 3:].tolist()


def test_guidance(tiny_llama: Any) -> None:
    """The guided scores are what candidates are chosen from."""
    prompt, scale = [3, 7, 1, 9], 1.5
    got = generate(tiny_llama, prompt, guidance_scale=scale, max_new_tokens=6)
    for at, token in enumerate(got):
        text = [*prompt, *got[:at]]
        sides = [torch.log_softmax(cold_logits(tiny_llama, side)[-1], -1) for side in (text, text[len(prompt) - 1 :])]
        guided = sides[1] + scale * (sides[0] - sides[1])
        assert token in guided.topk(4).indices.tolist()


def test_a_function_of_the_callers_own_is_left_alone(tiny_llama: Any) -> None:
    def mine(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids + 1

    ids = torch.tensor([[3, 7, 1]])
    assert torch.equal(tiny_llama.generate(ids, **CALL, custom_generate=mine), ids + 1)


# -- no room, and errors -------------------------------------------------------------------------------------


def test_a_full_context_costs_decodes_and_not_the_text(load: Callable[..., Any], tiny_llama_path: Path) -> None:
    """At the end there are no cells for four candidates beside each other: they take turns."""
    options = {"type_k": "f32", "type_v": "f32", "flash_attn": False}
    roomy, tight = load(tiny_llama_path, n_ctx=512, **options), load(tiny_llama_path, n_ctx=256, **options)
    prompt = (np.arange(240) % 200 + 3).tolist()
    call = {"max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    expected, got = generate(roomy, prompt, **call), generate(tight, prompt, **call)
    assert roomy.last_stats.decode_calls == 17 < tight.last_stats.decode_calls
    same(roomy, prompt, expected, got, 0.6, 4)


def test_more_candidates_than_sequence_ids(load: Callable[..., Any], tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, n_ctx=1024, n_seq_max=2)
    limit = model.engine.backend.limits.n_seq_limit
    got = generate(model, [3, 7, 1], top_k=limit + 10 if limit < 240 else 200, max_new_tokens=3)
    assert len(got) == 3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"use_cache": False}, "use_cache=False"),
        ({"top_k": 10**6}, "top_k=1000000 is more than"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
    ],
)
def test_errors_come_before_anything_is_computed(tiny_llama: Any, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(tiny_llama, [3, 7, 1], **extra)
    assert tiny_llama.last_stats.decode_calls == 0


def test_attentions_are_an_error(tiny_llama: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match="attention"):
        generate(tiny_llama, [3, 7, 1], output_attentions=True, return_dict_in_generate=True)


def test_a_failing_streamer_leaves_everything_in_order(tiny_llama: Any) -> None:
    class Broken(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.got) == 4:
                raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
        generate(tiny_llama, [3, 7, 1], streamer=Broken())
    tiny_llama.engine.check()
    assert generate(tiny_llama, [3, 7, 1]) == generate(tiny_llama, [3, 7, 1])
