"""Classifier-free guidance: always the text of plain guidance, both sides in one decode, nothing left behind.

Plain guidance is computed as the paper defines it (`plain_guidance.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from plain_guidance import PlainGuidance
from transformers_llamacpp import LlamaCppCache
from transformers_llamacpp.errors import ContextOverflowError, InvalidInputError

PROMPTS = [[28, 104, 243, 282, 260], [1, 93, 198, 20]]
NEGATIVE = [83, 159, 253, 79]
NEW = 12


def batch(*rows: list[int]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def negatives(*rows: list[int]) -> dict[str, torch.Tensor]:
    given = batch(*rows)
    return {"negative_prompt_ids": given["input_ids"], "negative_prompt_attention_mask": given["attention_mask"]}


def plain(model: Any, rows: list[list[int]], scale: float, negative: list[list[int]] | None, **call: Any) -> Any:
    inputs = batch(*rows)
    processors = [PlainGuidance(model, scale, inputs["input_ids"].shape[1], negative)]
    if "repetition_penalty" in call:  # by name they would come before the guidance
        processors.append(RepetitionPenaltyLogitsProcessor(call.pop("repetition_penalty")))
        processors.append(NoRepeatNGramLogitsProcessor(call.pop("no_repeat_ngram_size")))
    return model.generate(**inputs, max_new_tokens=NEW, logits_processor=LogitsProcessorList(processors), **call)


WAYS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
    "constrained beams": {"num_beams": 3, "force_words_ids": [[200]]},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "without a cache": {"use_cache": False},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [PROMPTS[:1], PROMPTS], ids=["one row", "batch"])
def test_equals_plain_guidance(tiny_llama: Any, way: str, rows: list[list[int]]) -> None:
    expected = plain(tiny_llama, rows, 1.7, [NEGATIVE] * len(rows), do_sample=False, **WAYS[way])
    got = tiny_llama.generate(
        **batch(*rows), max_new_tokens=NEW, do_sample=False, guidance_scale=1.7,
        negative_prompt_ids=torch.tensor([NEGATIVE]), **WAYS[way],
    )  # fmt: skip
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("scale", [0.0, 0.4, 1.5, 3.0, -1.0])
def test_any_scale_and_no_negative_prompt(tiny_llama: Any, scale: float) -> None:
    expected = plain(tiny_llama, PROMPTS[:1], scale, None, do_sample=False)
    got = tiny_llama.generate(**batch(PROMPTS[0]), max_new_tokens=NEW, do_sample=False, guidance_scale=scale)
    assert got.tolist() == expected.tolist()


def test_each_row_has_its_own_negative_prompt(tiny_llama: Any) -> None:
    others = [NEGATIVE, [77, 78]]
    expected = plain(tiny_llama, PROMPTS, 2.0, others, do_sample=False)
    got = tiny_llama.generate(**batch(*PROMPTS), **negatives(*others), max_new_tokens=NEW, do_sample=False, guidance_scale=2.0)
    assert got.tolist() == expected.tolist()


def test_return_sequences_are_samples_of_plain_guidance(tiny_llama: Any) -> None:
    call = {"do_sample": True, "num_return_sequences": 3, "top_k": 0}
    torch.manual_seed(5)
    expected = plain(tiny_llama, PROMPTS[:1], 1.5, [NEGATIVE], **call)
    torch.manual_seed(5)
    got = tiny_llama.generate(
        **batch(PROMPTS[0]), max_new_tokens=NEW, guidance_scale=1.5, negative_prompt_ids=torch.tensor([NEGATIVE]), **call
    )
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_one_decode_for_each_token(tiny_llama: Any, rows: int) -> None:
    tiny_llama.generate(
        **batch(*PROMPTS[:rows]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, guidance_scale=1.5,
        negative_prompt_ids=torch.tensor([NEGATIVE]),
    )  # fmt: skip
    stats = tiny_llama.last_stats
    # equal negative prompts are evaluated once, in a decode that may follow the first
    assert stats.decode_calls - (NEW - 1) == 1
    assert stats.prompt_tokens == sum(map(len, PROMPTS[:rows])) + rows * len(NEGATIVE)
    assert stats.evaluated_tokens == sum(map(len, PROMPTS[:rows])) + len(NEGATIVE) + 2 * rows * (NEW - 1)


def test_the_second_turn_reuses_both_sides(tiny_llama: Any) -> None:
    negative = torch.tensor([NEGATIVE * 5])
    call = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "guidance_scale": 1.5}
    first = tiny_llama.generate(**batch(PROMPTS[0]), negative_prompt_ids=negative, **call)[0].tolist()
    turn = [*first, 40, 41, 42]
    warm = tiny_llama.generate(**batch(turn), negative_prompt_ids=negative, **call)
    stats = tiny_llama.last_stats
    assert stats.reused_tokens == len(first) - 1 + len(NEGATIVE) * 5 - 1
    tiny_llama.forget()
    assert warm.tolist() == tiny_llama.generate(**batch(turn), negative_prompt_ids=negative, **call).tolist()


def test_a_kept_cache_goes_on_with_another_negative_prompt_and_without_guidance(tiny_llama: Any) -> None:
    cache = LlamaCppCache(tiny_llama)
    call = {"max_new_tokens": NEW, "do_sample": False}
    negative = {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([NEGATIVE])}
    other = {"guidance_scale": 0.5, "negative_prompt_ids": torch.tensor([[9, 8, 7]])}
    text = PROMPTS[0]
    for guidance in (negative, other, {}, negative):
        got = tiny_llama.generate(**batch(text), past_key_values=cache, **call, **guidance)[0].tolist()
        assert cache.companion is None
        assert got == tiny_llama.generate(**batch(text), **call, **guidance)[0].tolist()
        text = [*got, 50, 51]
    assert cache.get_seq_length() == len(got) - 1
    cache.close()


def test_return_sequences_from_a_kept_cache(tiny_llama: Any) -> None:
    cache = LlamaCppCache(tiny_llama)
    tiny_llama(torch.tensor([PROMPTS[0][:3]]), past_key_values=cache)
    call = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 2, "guidance_scale": 2.0}
    call["negative_prompt_ids"] = torch.tensor([NEGATIVE])
    got = tiny_llama.generate(**batch(PROMPTS[0]), past_key_values=cache, **call)
    assert got.tolist() == tiny_llama.generate(**batch(PROMPTS[0]), **call).tolist()
    cache.close()


def test_a_failed_call_leaves_nothing_behind(tiny_llama: Any) -> None:
    cache = LlamaCppCache(tiny_llama)
    ids = batch(PROMPTS[0])
    with pytest.raises(InvalidInputError, match="the negative prompt: token id 99999999 is outside"):
        tiny_llama.generate(
            **ids, past_key_values=cache, guidance_scale=2.0, negative_prompt_ids=torch.tensor([[99999999]]), max_new_tokens=2
        )
    assert cache.companion is None
    assert cache.get_seq_length() == 0
    cache.close()


@pytest.mark.parametrize(
    ("negative", "message"),
    [
        (torch.tensor([1, 2]), r"negative_prompt_ids is of shape \(2,\)"),
        ([[1, 2]], "negative_prompt_ids is a list"),
        (torch.zeros((1, 0), dtype=torch.long), r"negative_prompt_ids is of shape \(1, 0\)"),
        (torch.ones((3, 2), dtype=torch.long), "negative_prompt_ids has 3 rows and the input 2"),
        (torch.tensor([[-1, 2]]), "the negative prompt: token id -1"),
    ],
)
def test_bad_negative_prompts(tiny_llama: Any, negative: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tiny_llama.generate(**batch(*PROMPTS), guidance_scale=2.0, negative_prompt_ids=negative, max_new_tokens=2)
    assert tiny_llama.last_stats.decode_calls == 0


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones((1, 2), dtype=torch.long), r"negative_prompt_attention_mask is of shape \(1, 2\)"),
        (torch.ones(4, dtype=torch.long), r"negative_prompt_attention_mask is of shape \(4,\)"),
        ([[1, 1, 1, 1]], "negative_prompt_attention_mask is a list"),
        (torch.zeros((1, 4), dtype=torch.long), "row 0 of negative_prompt_ids has no token"),
    ],
)
def test_bad_masks(tiny_llama: Any, mask: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        tiny_llama.generate(
            **batch(PROMPTS[0]), guidance_scale=2.0, negative_prompt_ids=torch.tensor([NEGATIVE]), max_new_tokens=2,
            negative_prompt_attention_mask=mask,
        )  # fmt: skip


@pytest.mark.parametrize("use_cache", [True, False])
def test_padding_behind_a_negative_prompt(tiny_llama: Any, use_cache: bool) -> None:
    expected = plain(tiny_llama, PROMPTS[:1], 1.7, [NEGATIVE], do_sample=False)
    got = tiny_llama.generate(
        **batch(PROMPTS[0]), guidance_scale=1.7, negative_prompt_ids=torch.tensor([[*NEGATIVE, 0, 0]]), max_new_tokens=NEW,
        negative_prompt_attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0]]), do_sample=False, use_cache=use_cache,
    )  # fmt: skip
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("scale", ["2", float("nan"), float("inf"), [2]])
def test_a_scale_that_is_no_number(tiny_llama: Any, scale: Any) -> None:
    with pytest.raises(InvalidInputError, match="guidance_scale"):
        tiny_llama.generate(**batch(PROMPTS[0]), guidance_scale=scale, max_new_tokens=2)


def test_the_negative_prompt_counts_against_the_context(load: Callable[..., Any], tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, n_ctx=64)
    call = {"guidance_scale": 2.0, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    got = model.generate(**batch(PROMPTS[0]), negative_prompt_ids=torch.full((1, 61), 40), **call)
    assert got.shape[1] == len(PROMPTS[0]) + 3
    with pytest.raises(ContextOverflowError):
        model.generate(**batch(PROMPTS[0]), negative_prompt_ids=torch.full((1, 64), 40), **call)


def test_embeddings_need_a_negative_prompt(tiny_llama: Any) -> None:
    embeds = torch.zeros((1, 3, tiny_llama.config.hidden_size))
    with pytest.raises(InvalidInputError, match="pass negative_prompt_ids"):
        tiny_llama.generate(inputs_embeds=embeds, guidance_scale=2.0, max_new_tokens=2)
    got = tiny_llama.generate(
        inputs_embeds=embeds, guidance_scale=2.0, max_new_tokens=4, min_new_tokens=4,
        negative_prompt_ids=torch.tensor([NEGATIVE]),
    )  # fmt: skip
    assert got.shape == (1, 4)


@pytest.mark.parametrize("name", ["tiny_swa", "tiny_mamba", "tiny_hybrid"])
def test_every_kind_of_memory(request: pytest.FixtureRequest, name: str) -> None:
    model = request.getfixturevalue(name)
    expected = plain(model, PROMPTS, 1.7, [NEGATIVE] * 2, do_sample=False)
    call = {"max_new_tokens": NEW, "do_sample": False, "guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([NEGATIVE])}
    assert model.generate(**batch(*PROMPTS), **call).tolist() == expected.tolist()
