"""StreamingLLM (`n_sink`): generation past `n_ctx`, held against a loop over the bare memory operations."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_architectures
from compare import evaluates, same_greedy
from conftest import F32
from transformers_llamacpp import (
    ContextOverflowError,
    LlamaCppCache,
    LlamaCppConfig,
    OptionError,
    StateError,
    UnsupportedFeatureError,
)
from transformers_llamacpp.batch import Batch
from transformers_llamacpp.native import NativeBackend, NativeModel, build

pytestmark = pytest.mark.usefixtures("every_round")

N_CTX, SINK = 64, 4
SLIDE = (N_CTX - SINK) // 4
FAR = 5 * N_CTX
PROMPT = [1, 60, 61, 62, 80, 81, 82, 60, 61, 62]
LONG = [1, *(40 + (7 * i * i + 3 * i) % 90 for i in range(3 * N_CTX))]
KINDS = {"llama": "tiny_llama_path", "all cells of a window": "tiny_swa_path"}


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(KINDS[request.param])


@pytest.fixture(scope="module")
def shared_model(load_for_module: Callable[..., Any], path: Path) -> Any:
    return load_for_module(path, **F32, n_ctx=N_CTX, n_cells=512, n_sink=SINK)


@pytest.fixture
def model(shared_model: Any) -> Any:
    shared_model.forget()
    return shared_model


@pytest.fixture(scope="module")
def reference(path: Path) -> list[int]:
    return bare(path, PROMPT, FAR)


def bare(path: Path, prompt: list[int], n: int) -> list[int]:
    """Greedy tokens, each decoded alone; a full context drops `SLIDE` tokens behind the sinks, and the rest moves up."""
    native = NativeModel(path, build(LlamaCppConfig(**F32, n_threads=1, n_threads_batch=1).options))
    backend = NativeBackend(native, 512, 2)
    text, position, answer = list(prompt), 0, list[int]()
    one, zero = np.ones(1, np.int8), np.zeros(1, np.int32)
    while len(answer) < n:
        if position == N_CTX:
            assert backend.seq_remove(0, SINK, SINK + SLIDE)
            backend.seq_shift(0, SINK + SLIDE, -SLIDE)
            position -= SLIDE
        token = np.array([text.pop(0)], np.int32)
        backend.decode(Batch(token, None, np.array([position], np.int32), zero, one, 1))
        position += 1
        if not text:
            answer.append(int(backend.logits(1)[0].argmax()))
            text = answer[-1:]
    backend.close()
    native.close()
    return answer


def say(model: Any, tokens: list[int] | list[list[int]], n: int, **kwargs: Any) -> Any:
    ids = torch.tensor(tokens if isinstance(tokens[0], list) else [tokens])
    kwargs = {"max_new_tokens": n, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | kwargs
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **kwargs)
    model.engine.check()
    return output[:, ids.shape[1] :].tolist()


def same(model: Any, expected: list[int], got: list[int], what: str = "") -> None:
    assert len(got) == len(expected)
    assert got == expected, (what, next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b))


def test_far_beyond_the_context_at_one_decode_a_token(model: Any, reference: list[int], caplog: Any) -> None:
    with evaluates(model, len(PROMPT) + FAR - 1):
        [got] = say(model, PROMPT, FAR)
    assert not caplog.records  # nor does transformers warn of a length
    same(model, reference, got)
    assert model.last_stats.decode_calls == FAR


@pytest.mark.once
@pytest.mark.parametrize(
    "types",
    [{"type_k": name} for name in ("f16", "q8_0", "q5_1", "q4_0", "iq4_nl")] + [{"flash_attn": True, "type_v": "q8_0"}],
    ids=str,
)
def test_every_type_of_key_that_is_taken_can_slide(load: Callable[..., Any], smollm2_f32_path: Path, types: Any) -> None:
    model = load(smollm2_f32_path, n_ctx=N_CTX, n_sink=SINK, **types)
    [got] = say(model, PROMPT, N_CTX)
    assert len(got) == N_CTX


def test_a_prompt_beyond_the_context(model: Any, path: Path) -> None:
    with evaluates(model, len(LONG) + 20 - 1):
        [got] = say(model, LONG, 20)
    same(model, bare(path, LONG, 20), got)


@pytest.mark.parametrize("n", [N_CTX - 2, N_CTX - 1, N_CTX, N_CTX + 1, N_CTX + SLIDE, N_CTX + SLIDE + 1])
def test_prompts_around_the_limit(model: Any, path: Path, n: int) -> None:
    [got] = say(model, LONG[:n], 3)
    same(model, bare(path, LONG[:n], 3), got)


def test_resumed_is_one_shot(model: Any, reference: list[int]) -> None:
    text = list(PROMPT)
    for part in (30, 40, 50, 100):
        [more] = say(model, text, part)
        new = len(PROMPT) if text == PROMPT else 1  # all but what was said last is in memory
        assert model.last_stats.evaluated_tokens == new + part - 1
        text += more
    same(model, reference[:220], text[len(PROMPT) :])


def test_the_same_again_and_a_few_tokens_taken_back(model: Any, reference: list[int]) -> None:
    """Wherever the context slid in between: what it was before is still kept."""
    text = [*PROMPT, *reference]
    say(model, PROMPT, 200)
    for n in (150, 151, 165, 180, 195):
        [got] = say(model, text[: len(PROMPT) + n], 5)
        same(model, reference[n : n + 5], got, str(n))


def test_a_kept_cache_is_cropped_and_goes_on(model: Any, reference: list[int]) -> None:
    with closing(LlamaCppCache(model)) as cache:
        say(model, PROMPT, 200, cache=cache)
        text = [*PROMPT, *reference[:190]]
        [got] = say(model, text, 40, cache=cache)
        same(model, reference[190:230], got)
        assert cache.get_seq_length() == len(text) + 39
        cache.truncate(0)
        [got] = say(model, PROMPT, 10, cache=cache)
        same(model, reference[:10], got)


@pytest.mark.parametrize("call", [{"prompt_lookup_num_tokens": 6}, {"assistant_model": True}], ids=["lookup", "assistant"])
def test_drafts_change_nothing(
    model: Any, load: Callable[..., Any], path: Path, reference: list[int], call: dict[str, Any]
) -> None:
    if "assistant_model" in call:
        call = {"assistant_model": load(path, **F32, n_ctx=N_CTX, n_sink=SINK)}
    [got] = say(model, PROMPT, FAR, **call)
    same_greedy(model, PROMPT, reference[:50], got[:50])
    same(model, reference, got)
    assert model.last_stats.accepted_tokens > 0


def test_rows_slide_on_their_own(model: Any, path: Path, reference: list[int]) -> None:
    other = [1, *range(90, 99)]
    got = say(model, [PROMPT, other], 150)
    same(model, reference[:150], got[0])
    same(model, bare(path, other, 150), got[1])


def test_return_sequences_part_before_they_slide(model: Any) -> None:
    """They share the cells of the prompt, and a shift would move them for all."""
    torch.manual_seed(3)
    together = say(model, PROMPT, 120, do_sample=True, num_return_sequences=3)
    torch.manual_seed(3)
    model.forget()
    apart = say(model, [PROMPT] * 3, 120, do_sample=True)
    assert together == apart


def test_guidance_slides_on_both_sides(model: Any) -> None:
    [once] = say(model, PROMPT, 100, guidance_scale=1.5)
    model.forget()
    [first] = say(model, PROMPT, 60, guidance_scale=1.5)
    assert first == once[:60] and len(once) == 100


@pytest.mark.parametrize(
    "call",
    [
        {"num_beams": 3},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    ],
    ids=str,
)
def test_what_shares_cells_ends_at_the_limit(model: Any, call: dict[str, Any], caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "transformers_llamacpp.generation"):
        [got] = say(model, PROMPT, FAR, **call)
    assert len(got) <= N_CTX - len(PROMPT) and "n_ctx=64 is full and does not slide (beams" in caplog.text
    with pytest.raises(ContextOverflowError, match="which does not slide: beams"):
        say(model, LONG, 5, **call)
    say(model, PROMPT, 3)


def test_more_rows_than_cells_end_at_the_limit(load: Callable[..., Any], tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, **F32, n_ctx=200, n_cells=256, n_sink=SINK)
    got = say(model, [PROMPT, [1, *range(90, 99)]], 300)
    assert {len(row) for row in got} == {(256 - 19) // 2}
    with pytest.raises(ContextOverflowError, match="n_cells=400, and there are 256"):
        say(model, [LONG + LONG] * 2, 5)
    [alone] = say(model, PROMPT, 300)
    assert len(alone) == 300


def test_a_slid_cache_is_saved_and_goes_on(model: Any, reference: list[int], tmp_path: Path) -> None:
    with closing(LlamaCppCache(model)) as cache:
        say(model, PROMPT, 150, cache=cache)
        cache.save(tmp_path / "slid")
    model.forget()
    with closing(LlamaCppCache.load(model, tmp_path / "slid")) as cache:
        with evaluates(model, 1 + 49):
            [got] = say(model, [*PROMPT, *reference[:150]], 50, cache=cache)
        same(model, reference[150:200], got)


def test_a_slid_cache_belongs_to_its_sinks(
    model: Any, load: Callable[..., Any], path: Path, tmp_path: Path, reference: list[int]
) -> None:
    with closing(LlamaCppCache(model)) as cache:
        say(model, PROMPT, 20, cache=cache)
        cache.save(tmp_path / "whole")
        say(model, [*PROMPT, *reference[:20]], 80, cache=cache)
        cache.save(tmp_path / "slid")
    other = load(path, **F32, n_ctx=128, n_cells=512, n_sink=16)
    with pytest.raises(StateError, match="n_ctx was 64 and is 128; n_sink was 4 and is 16"):
        LlamaCppCache.load(other, tmp_path / "slid")
    with closing(LlamaCppCache.load(other, tmp_path / "whole")) as cache:
        assert say(other, [*PROMPT, *reference[:20]], 20, cache=cache) == [reference[20:40]]


def test_forks_of_a_cache_do_not_notice(model: Any, reference: list[int]) -> None:
    import copy

    with closing(LlamaCppCache(model)) as cache:
        say(model, PROMPT, 50, cache=cache)
        twin = copy.deepcopy(cache)
        text = [*PROMPT, *reference[:50]]
        [one] = say(model, text, 60, cache=cache)
        [two] = say(model, text, 60, cache=twin)
        twin.close()
    same(model, reference[50:110], one)
    same(model, reference[50:110], two)


@pytest.mark.parametrize(
    ("fixture", "options", "words"),
    [
        ("tiny_mamba_path", {}, "recurrent state"),
        ("tiny_hybrid_path", {}, "recurrent state"),
        ("tiny_swa_path", {"swa_full": False}, "swa_full=True"),
        ("tiny_llama_path", {"type_k": "bf16"}, "type_k='f16'"),
    ],
)
@pytest.mark.parametrize("option", [{"n_sink": 4}, {"n_sink": 0}, {"reuse_min_chunk": 8}], ids=str)
def test_a_memory_that_cannot_shift_is_an_error_at_loading(
    load: Callable[..., Any], request: pytest.FixtureRequest, fixture: str, options: Any, words: str, option: Any
) -> None:
    with pytest.raises(UnsupportedFeatureError, match=words) as caught:
        load(request.getfixturevalue(fixture), **options, **option)
    assert caught.value.feature in option


@pytest.mark.parametrize("kind", ["gpt2", "bloom"])
def test_positions_that_are_no_rotations(load: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    """llama.cpp would move the number of a position that is part of the key."""
    with pytest.raises(UnsupportedFeatureError, match="no rotations"):
        load(tiny_architectures.write(kind, tmp_path / "model.gguf"), n_sink=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_sink": 60, "n_ctx": 64}, "leaves 4 of n_ctx=64"),
        ({"n_sink": 4, "n_ctx": 1024, "n_cells": 512}, "n_cells=512 is less than n_ctx=1024"),
        ({"reuse_min_chunk": 8, "prefix_reuse": False}, "prefix_reuse=False"),
        ({"reuse_min_chunk": 8, "n_seq_max": 1}, "n_seq_max=2"),
    ],
)
def test_options_in_conflict(load: Callable[..., Any], tiny_llama_path: Path, options: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        load(tiny_llama_path, **options)
