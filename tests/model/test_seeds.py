"""`seeds` and `observe_logits` of `generate()`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from transformers_llamacpp.errors import InvalidInputError, UnsupportedFeatureError


def prompt(model: Any, text: str = "Once upon a time there was a fox") -> torch.Tensor:
    ids: torch.Tensor = model.tokenizer(text, return_tensors="pt").input_ids
    return ids


def sample(model: Any, ids: torch.Tensor, seeds: Any, **arguments: Any) -> list[list[int]]:
    wanted = {"max_new_tokens": 12, "do_sample": True, "top_k": 40, "pad_token_id": 0, "eos_token_id": None, **arguments}
    found: list[list[int]] = model.generate(ids, seeds=seeds, **wanted)[:, ids.shape[1] :].tolist()
    return found


def test_a_seed_decides_whatever_else_is_drawn(smollm2_f32: Any) -> None:
    ids = prompt(smollm2_f32)
    torch.manual_seed(1)
    first = sample(smollm2_f32, ids, 3)
    torch.manual_seed(2)
    assert sample(smollm2_f32, ids, [3]) == first
    assert sample(smollm2_f32, ids, 4) != first


def test_rows_are_those_of_their_seeds(smollm2_f32: Any) -> None:
    ids = prompt(smollm2_f32)
    alone = [sample(smollm2_f32, ids, seed)[0] for seed in (3, 4)]
    assert sample(smollm2_f32, ids.repeat(2, 1), [3, 4]) == alone
    assert sample(smollm2_f32, ids, [3, 4], num_return_sequences=2) == alone


def test_drafts_change_nothing(smollm2_f32: Any, every_round: None) -> None:
    ids = prompt(smollm2_f32, "one two three four one two three four one two three")
    plain = sample(smollm2_f32, ids, 9, temperature=0.7, max_new_tokens=24)
    assert sample(smollm2_f32, ids, 9, temperature=0.7, max_new_tokens=24, prompt_lookup_num_tokens=4) == plain
    assert smollm2_f32.last_stats.accepted_tokens > 0


def test_an_assistant_that_samples_changes_nothing(tiny_llama: Any, twin: Any, every_round: None) -> None:
    ids = torch.tensor([[1, 5, 9, 5, 9]])
    plain = sample(tiny_llama, ids, 9, max_new_tokens=32)
    assert sample(tiny_llama, ids, 9, max_new_tokens=32, assistant_model=twin) == plain
    assert tiny_llama.last_stats.drafted_tokens > 0


def test_threads_do_not_disturb_each_other(tiny_llama: Any) -> None:
    ids = torch.tensor([[1, 5, 9, 5, 9]])
    alone = {seed: sample(tiny_llama, ids, seed, max_new_tokens=40) for seed in range(6)}
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda seed=seed: found.update({seed: sample(tiny_llama, ids, seed, max_new_tokens=40)}))
        for seed in alone
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_seeds_that_cannot_be(tiny_llama: Any) -> None:
    ids = torch.tensor([[1, 5, 9]])
    for seeds in (-1, 2**64, 1.5, True, [], ["a"]):
        with pytest.raises(InvalidInputError, match="seeds"):
            sample(tiny_llama, ids, seeds)
    with pytest.raises(InvalidInputError, match="each row needs one"):
        sample(tiny_llama, ids.repeat(2, 1), 1)
    with pytest.raises(UnsupportedFeatureError, match="beams"):
        sample(tiny_llama, ids, 1, num_beams=2)
    assert sample(tiny_llama, ids, 1, do_sample=False) == sample(tiny_llama, ids, 2, do_sample=False), "nothing is drawn"


@pytest.mark.parametrize("way", [{}, {"repetition_penalty": 3.0}, {"guidance_scale": 2.0}, {"prompt_lookup_num_tokens": 3}])
def test_observed_logits_are_the_models(tiny_llama: Any, way: dict[str, Any]) -> None:
    ids = torch.tensor([[1, 5, 9, 5, 9]])
    seen: dict[int, torch.Tensor] = {}
    output = tiny_llama.generate(
        ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0,
        observe_logits=lambda text, logits: seen.update({text.shape[1]: logits.clone()}), **way,
    )  # fmt: skip
    rows = tiny_llama(output, use_cache=False).logits[0]
    assert sorted(seen) == list(range(5, output.shape[1]))
    for length, logits in seen.items():
        assert torch.allclose(logits[0], rows[length - 1], atol=1e-3)
