"""A saved cache goes on as if it had never left: in the same process, after `forget`, and in another one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from transformers_llamacpp import LlamaCppCache, LlamaCppForCausalLM
from transformers_llamacpp.errors import ClosedError, ContextOverflowError, StateError

KINDS = ("tiny_llama", "tiny_swa", "tiny_mamba", "tiny_hybrid")
TEXT = [40, 41, 42, 43, 44, 45, 46, 47, 48]
MORE = [50, 51]
NEW = 8
SMALL = {"type_k": "f32", "type_v": "f32", "flash_attn": False}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


def generate(model: Any, tokens: list[int], cache: Any = None) -> list[int]:
    call = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(torch.tensor([tokens]), past_key_values=cache, **call)[0].tolist()


def test_goes_on_where_it_stopped_and_evaluates_nothing_again(model: Any, tmp_path: Path) -> None:
    cache = LlamaCppCache(model)
    text = generate(model, TEXT, cache)
    cache.save(tmp_path / "chat")
    expected = generate(model, [*text, *MORE], cache)  # the saved one was a copy
    cache.close()
    model.forget()
    loaded = LlamaCppCache.load(model, tmp_path / "chat")
    assert loaded.get_seq_length() == len(text) - 1
    assert loaded.tokens(0) == text[:-1]
    assert generate(model, [*text, *MORE], loaded) == expected
    assert model.last_stats.evaluated_tokens == 1 + len(MORE) + NEW - 1
    loaded.close()


def test_rows_with_padding(tiny_llama: Any, tmp_path: Path) -> None:
    ids = torch.tensor([[0, 0, *TEXT[:5]], TEXT[:7]])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    cache = LlamaCppCache(tiny_llama)
    tiny_llama(ids, attention_mask=mask, past_key_values=cache)
    cache.save(tmp_path / "rows")
    step = {"attention_mask": torch.cat([mask, torch.ones((2, 1), dtype=torch.long)], dim=1)}
    expected = tiny_llama(torch.tensor([[60], [61]]), past_key_values=cache, **step).logits
    loaded = LlamaCppCache.load(tiny_llama, tmp_path / "rows")
    assert loaded.column_mask(0).tolist() == [False, False, *[True] * 5]
    got = tiny_llama(torch.tensor([[60], [61]]), past_key_values=loaded, **step).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    for one in (cache, loaded):
        one.close()


def test_an_empty_cache_and_a_truncated_one(tiny_llama: Any, tmp_path: Path) -> None:
    cache = LlamaCppCache(tiny_llama)
    cache.save(tmp_path / "empty")
    assert LlamaCppCache.load(tiny_llama, tmp_path / "empty").get_seq_length() == 0
    text = generate(tiny_llama, TEXT, cache)
    cache.truncate(5)
    cache.save(tmp_path / "short")
    loaded = LlamaCppCache.load(tiny_llama, tmp_path / "short")
    assert loaded.tokens(0) == TEXT[:5]
    assert generate(tiny_llama, TEXT, loaded) == text
    cache.close()
    with pytest.raises(ClosedError):
        cache.save(tmp_path / "closed")


def test_a_row_that_had_to_leave_the_memory_is_saved_too(model: Any, tmp_path: Path) -> None:
    cache = LlamaCppCache(model)
    text = generate(model, TEXT, cache)
    with model.engine.lock:
        model.engine.pool.room.empty_buffer()
    cache.save(tmp_path / "parked")
    cache.truncate(4)  # a state cannot be cut: it has to be evaluated again
    cache.save(tmp_path / "cut")
    cache.close()
    model.forget()
    for name, tokens in (("parked", text[:-1]), ("cut", text[:4])):
        loaded = LlamaCppCache.load(model, tmp_path / name)
        assert loaded.tokens(0) == tokens
        assert generate(model, text, loaded) == generate(model, text)
        loaded.close()


def test_the_file_grows_with_the_tokens_only(tiny_llama: Any, tmp_path: Path) -> None:
    sizes = []
    for n in (8, 16, 32):
        cache = LlamaCppCache(tiny_llama)
        tiny_llama(torch.tensor([[40] * n]), past_key_values=cache)
        cache.save(tmp_path / "n")
        sizes.append((tmp_path / "n").stat().st_size)
        cache.close()
    assert sizes[2] - sizes[1] == pytest.approx(2 * (sizes[1] - sizes[0]), abs=8)


def test_another_model_another_type_and_a_smaller_context(
    tiny_llama: Any, load: Callable[..., Any], tiny_llama_path: Path, tiny_swa: Any, tmp_path: Path
) -> None:
    cache = LlamaCppCache(tiny_llama)
    tiny_llama(torch.tensor([TEXT * 4]), past_key_values=cache)
    cache.save(tmp_path / "mine")
    cache.close()
    with pytest.raises(StateError, match="saved with another model, or another setting: bytes was"):
        LlamaCppCache.load(tiny_swa, tmp_path / "mine")
    with pytest.raises(StateError, match="type_k was 'f32' and is 'f16'"):
        LlamaCppCache.load(load(tiny_llama_path, flash_attn=False), tmp_path / "mine")
    with pytest.raises(ContextOverflowError):
        LlamaCppCache.load(load(tiny_llama_path, n_ctx=32, **SMALL), tmp_path / "mine")


CHILD = """
import json, sys, torch
from transformers_llamacpp import LlamaCppCache, LlamaCppForCausalLM
path, file, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
model = LlamaCppForCausalLM.from_pretrained(path, n_ctx=2048, type_k="f32", type_v="f32", flash_attn=False)
cache = LlamaCppCache.load(model, file)
got = model.generate(torch.tensor([tokens]), past_key_values=cache, max_new_tokens=8, do_sample=False, eos_token_id=None,
                     pad_token_id=0)[0].tolist()
print(json.dumps([got, model.last_stats.evaluated_tokens]))
"""


def test_another_process_goes_on(tiny_llama: Any, tiny_llama_path: Path, tmp_path: Path) -> None:
    cache = LlamaCppCache(tiny_llama)
    text = generate(tiny_llama, TEXT, cache)
    cache.save(tmp_path / "chat")
    expected = generate(tiny_llama, [*text, *MORE], cache)
    cache.close()
    arguments = [str(tiny_llama_path), str(tmp_path / "chat"), json.dumps([*text, *MORE])]
    folder = Path(sys.modules[LlamaCppForCausalLM.__module__].__file__ or "").parents[1]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{CHILD}", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got, evaluated = json.loads(done.stdout.splitlines()[-1])
    assert got == expected
    assert evaluated == 1 + len(MORE) + NEW - 1
