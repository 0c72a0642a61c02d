"""`reuse_min_chunk`: what stands elsewhere in an earlier text is moved into place, not evaluated again.

A moved key is the key it would have been there, up to rounding; with one layer it depends on nothing else, so that warm
equals cold. With more layers it still knows what stood before it, and the answer may differ a little.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_gguf
from conftest import F32
from transformers_llamacpp import LlamaCppCache, StateError

pytestmark = pytest.mark.once

LEAST = 8


@pytest.fixture(scope="module")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("one") / "one-layer.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_gguf, "N_LAYER", 1)
        tiny_gguf.write("llama", path)
    return path


def text(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(40, 290), k=n)


def logits(model: Any, tokens: list[int]) -> torch.Tensor:
    ids = torch.tensor([tokens])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    model.engine.check()
    return torch.stack(output.logits)[:, 0]


SYSTEM, A, B, C, NEW = text(20, 1), text(30, 2), text(40, 3), text(25, 4), text(10, 5)
TEXTS = {
    "the oldest message dropped": ([*SYSTEM, *A, *B, *C], [*SYSTEM, *B, *C, *NEW], 20, 65),
    "one in the middle edited": ([*SYSTEM, *A, *B, *C], [*SYSTEM, *A, *text(12, 9), *C, *NEW], 50, 25),
    "one in the middle dropped": ([*SYSTEM, *A, *B, *C], [*SYSTEM, *A, *C, *NEW], 50, 25),
    "one put in": ([*SYSTEM, *A, *B], [*SYSTEM, *text(15, 9), *A, *B, *NEW], 20, 70),
    "another beginning": ([*A, *B], [*text(9, 9), *B, *NEW], 0, 40),
    "too short to move": ([*SYSTEM, *A[:7], *B[:7]], [*SYSTEM, *B[:7], *NEW], 20, 0),
}


@pytest.mark.parametrize("away", [False, True], ids=["in the buffer", "in host memory"])
@pytest.mark.parametrize("name", TEXTS)
def test_with_one_layer_warm_is_cold(load: Callable[..., Any], one_layer: Path, name: str, away: bool) -> None:
    old, new, prefix, moved = TEXTS[name]
    model = load(one_layer, **F32, reuse_min_chunk=LEAST)
    logits(model, old)
    if away:
        with model.engine.lock:
            model.engine.pool.room.empty_buffer()
    warm, stats = logits(model, new), model.last_stats
    assert stats.reused_tokens == prefix + moved and stats.evaluated_tokens == len(new) - prefix - moved + 1
    if moved:
        assert stats.reuse == "shifted" and "were moved" in stats.reuse.reason
    else:
        assert stats.reuse != "shifted"
    model.forget()
    torch.testing.assert_close(warm, logits(model, new), atol=2e-4, rtol=0)
    assert model.last_stats.reused_tokens == 0


def test_a_window_s_layers_move_too(load: Callable[..., Any], tiny_swa_path: Path) -> None:
    """In parts no longer than the window; it has more layers, so that only the counts are compared."""
    old, new, prefix, moved = TEXTS["the oldest message dropped"]
    model = load(tiny_swa_path, **F32, reuse_min_chunk=LEAST)
    logits(model, old)
    logits(model, new)
    assert model.last_stats.reused_tokens == prefix + moved


def test_what_moved_is_not_taken_for_exact(load: Callable[..., Any], tiny_llama_path: Path, tmp_path: Path) -> None:
    old, new, _, _ = TEXTS["the oldest message dropped"]
    options = {**F32, "state_dir": str(tmp_path / "states"), "host_cache_bytes": 0}
    model = load(tiny_llama_path, **options, reuse_min_chunk=LEAST)
    with closing(LlamaCppCache(model)) as cache:
        logits(model, old)
        model.generate(torch.tensor([new]), max_new_tokens=1, do_sample=False, cache=cache)
        assert model.last_stats.reuse == "shifted"
        cache.save(tmp_path / "moved")
    model.close()
    exact = load(tiny_llama_path, **options)
    with pytest.raises(StateError, match="moved_chunks was True and is False"):
        LlamaCppCache.load(exact, tmp_path / "moved")
    logits(exact, [*new, 77])
    assert exact.last_stats.reuse == "none"


def test_off_by_default(tiny_llama: Any) -> None:
    old, new, prefix, _ = TEXTS["the oldest message dropped"]
    logits(tiny_llama, old)
    logits(tiny_llama, new)
    assert tiny_llama.last_stats.reused_tokens == prefix


def test_a_long_chat_that_forgets_its_oldest_messages(load: Callable[..., Any], smollm2_f32_path: Path) -> None:
    """Each turn costs its own message, and the answers stay those of a model that read everything anew, nearly always."""
    model = load(smollm2_f32_path, reuse_min_chunk=16, n_ctx=1024)
    tokenizer = model.tokenizer
    system = tokenizer("You are a friendly assistant.\n").input_ids
    messages: list[list[int]] = []
    same, kept = 0, 0
    for turn in range(14):
        words = f"Question {turn}: what is {turn} and {turn + 3} together, and which town has {turn + 2} hills?\n"
        messages.append(tokenizer(words, add_special_tokens=False).input_ids)
        while sum(map(len, messages)) > 150:
            del messages[0]
        prompt = [*system, *(token for message in messages for token in message)]
        ids = torch.tensor([prompt])
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)
        assert turn == 0 or model.last_stats.evaluated_tokens <= len(messages[-1]) + 2, model.last_stats
        kept += model.last_stats.reuse == "shifted"
        warm = model(ids, use_cache=False, logits_to_keep=1).logits[0, -1].argmax()
        same += bool(warm == model(ids, use_cache=False).logits[0, -1].argmax())
    assert kept >= 5 and same >= 12
