"""Prompts and continuations around `n_ctx`, in every way of decoding: a call ends at the limit as at `max_length`, or is one
error before anything is decoded; what comes before the limit is what a larger context gives."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import F32
from transformers_llamacpp import ContextOverflowError, LlamaCppCache

pytestmark = pytest.mark.usefixtures("every_round")

N_CTX = 40
FAR = 400
NEXT = [[1, 60, 61, 62]]

GUIDED = {"guidance_scale": 1.7}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without a cache": {"use_cache": False},
    "sampling": {"do_sample": True, "top_k": 20},
    "return sequences": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams that sample": {"num_beams": 3, "do_sample": True},
    "beams that never stop early": {"num_beams": 3, "early_stopping": "never", "length_penalty": 1.5, "eos_token_id": 179},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beams": {"num_beams": 3, "force_words_ids": [[50]]},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "high"},
    "guidance": GUIDED,
    "guidance with a shorter negative prompt": GUIDED | {"negative_prompt_ids": torch.tensor([[83, 159, 253]])},
    "guidance with beams": GUIDED | {"num_beams": 3},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "assistant": {"assistant_model": N_CTX},
    "assistant with a smaller context": {"assistant_model": N_CTX - 8},
    "assistant with a larger context": {"assistant_model": 4 * N_CTX},
    "assistant on the hook": {"hook": N_CTX},
    "assistant, lookup and guidance": GUIDED | {"assistant_model": N_CTX, "prompt_lookup_num_tokens": 4},
}
"""A number in the place of an assistant is its `n_ctx`."""


def text(length: int, shift: int = 0) -> list[int]:
    """Repeats itself, so that lookup has something to draft."""
    return [1, *(40 + shift + i % 7 for i in range(length - 1))]


@pytest.fixture(scope="module")
def opened(load_for_module: Callable[..., Any], tiny_llama_path: Path) -> Callable[[int], Any]:
    """The model with that `n_ctx`; loaded once, and cold."""
    models: dict[int, Any] = {}

    def get(n_ctx: int) -> Any:
        if n_ctx not in models:
            models[n_ctx] = load_for_module(tiny_llama_path, n_ctx=n_ctx, n_cells=max(256, 4 * n_ctx), **F32)
        models[n_ctx].forget()
        return models[n_ctx]

    return get


@pytest.fixture
def small(opened: Callable[[int], Any]) -> Any:
    return opened(N_CTX)


@pytest.fixture
def large(opened: Callable[[int], Any]) -> Any:
    return opened(1024)


def generate(model: Any, ids: Any, new: int, **call: Any) -> list[list[int]]:
    """The new tokens of each row."""
    torch.manual_seed(5)
    call = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new} | call
    ids = None if ids is None else torch.tensor(ids)
    output = model.generate(ids, **call)
    start = 0 if ids is None else ids.shape[1]
    return (output if isinstance(output, torch.Tensor) else output.sequences)[:, start:].tolist()


def assisted(opened: Callable[[int], Any], model: Any, call: dict[str, Any]) -> dict[str, Any]:
    call = dict(call)
    for name in ("assistant_model", "hook"):
        if name in call:
            n_ctx = call.pop(name)
            # the model itself, where it has that context, would be a fine assistant; another one is the usual case
            helper = opened(n_ctx + 1 if n_ctx == model.engine.n_ctx else n_ctx)
            helper.generation_config.assistant_confidence_threshold = 0.0
            if name == "hook":
                model.assistant_model = helper
            else:
                call[name] = helper
    return call


def fits(model: Any, larger: Any, ids: Any, wanted: int, room: int, **call: Any) -> None:
    got = generate(model, ids, wanted, **call)
    assert model.last_stats.decode_calls > 0
    expected = generate(larger, ids, min(wanted, room), **call)
    assert {len(row) for row in expected} == {min(wanted, room)} or call.get("eos_token_id")
    assert got == expected


def goes_on(model: Any, larger: Any) -> None:
    assert generate(model, NEXT, 8) == generate(larger, NEXT, 8)


@pytest.mark.parametrize("length", [N_CTX - 2, N_CTX - 1, N_CTX, N_CTX + 1, FAR])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(opened: Callable[[int], Any], small: Any, large: Any, mode: str, length: int) -> None:
    call = assisted(opened, small, MODES[mode])
    room = N_CTX - length
    try:
        if room < 1:
            with pytest.raises(ContextOverflowError) as caught:
                generate(small, [text(length)], 3, **call)
            assert (caught.value.needed, caught.value.n_ctx) == (length + 1, N_CTX)
            assert small.last_stats.decode_calls == small.last_stats.new_tokens == 0
        for wanted in {room - 1, room, room + 1, room + 20} if room > 0 else ():
            if wanted:
                fits(small, large, [text(length)], wanted, room, **call)
        goes_on(small, large)
    finally:
        small.assistant_model = None


@pytest.mark.parametrize("length", [N_CTX - 2, N_CTX, FAR])
@pytest.mark.parametrize("mode", [name for name in MODES if "lookup" not in name and "assistant" not in name])
def test_the_longest_row_of_a_padded_batch_counts(small: Any, large: Any, mode: str, length: int) -> None:
    rows = [text(length), text(5, 9), text(length - 1, 3)]
    ids = [[0] * (length - len(row)) + row for row in rows]
    call = MODES[mode] | {"attention_mask": (torch.tensor(ids) != 0).long()}
    if length < N_CTX:
        fits(small, large, ids, 20, N_CTX - length, **call)
    else:
        with pytest.raises(ContextOverflowError):
            generate(small, ids, 3, **call)
        assert small.last_stats.decode_calls == 0
    goes_on(small, large)


@pytest.mark.parametrize("mode", ["guidance", "guidance with beams", "assistant, lookup and guidance"])
@pytest.mark.parametrize("negative", [N_CTX - 2, N_CTX, FAR])
def test_a_negative_prompt_that_is_longer_counts(
    opened: Callable[[int], Any], small: Any, large: Any, mode: str, negative: int
) -> None:
    call = assisted(opened, small, MODES[mode]) | {"negative_prompt_ids": torch.tensor([text(negative, 20)])}
    if negative < N_CTX:
        fits(small, large, [text(12)], 20, N_CTX - negative, **call)
    else:
        with pytest.raises(ContextOverflowError):
            generate(small, [text(12)], 3, **call)
        assert small.last_stats.decode_calls == 0
    goes_on(small, large)


@pytest.mark.parametrize("mode", ["greedy", "return sequences", "beams", "contrastive search", "lookup", "assistant"])
@pytest.mark.parametrize("only_new", [False, True])
def test_what_a_passed_in_cache_holds_counts(
    opened: Callable[[int], Any], small: Any, large: Any, mode: str, only_new: bool
) -> None:
    whole = text(N_CTX - 3)
    for wanted in (2, 3, 9):
        got = cached(opened, small, whole, wanted, only_new, MODES[mode])
        assert got == cached(opened, large, whole, min(wanted, 3), only_new, MODES[mode])
        assert {len(row) for row in got} == {min(wanted, 3)}
    cache = LlamaCppCache(small)
    small(torch.tensor([whole]), cache=cache)
    for length in (N_CTX, FAR):
        with pytest.raises(ContextOverflowError):
            generate(small, [[*whole, *text(length - len(whole))]], 3, cache=cache, **assisted(opened, small, MODES[mode]))
        assert small.last_stats.decode_calls == 0
        assert cache.tokens(0) == whole
    goes_on(small, large)


def cached(
    opened: Callable[[int], Any], model: Any, whole: list[int], new: int, only_new: bool, call: dict[str, Any]
) -> list[list[int]]:
    cache, known = LlamaCppCache(model), len(whole) - 4
    model(torch.tensor([whole[:known]]), cache=cache)
    call = assisted(opened, model, call) | {"cache": cache}
    if only_new:
        return generate(model, [whole[known:]], new, attention_mask=torch.ones(1, len(whole)).long(), **call)
    return generate(model, [whole], new, **call)


@pytest.mark.parametrize("length", [N_CTX - 2, N_CTX - 1, N_CTX, FAR])
@pytest.mark.parametrize("mode", ["greedy", "return sequences", "beams", "contrastive search", "lookup", "assistant"])
def test_embeddings(opened: Callable[[int], Any], small: Any, large: Any, mode: str, length: int) -> None:
    embeds = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(3))
    call = assisted(opened, small, MODES[mode]) | {"inputs_embeds": embeds}
    if length < N_CTX:
        for wanted in (1, N_CTX - length, 20):
            fits(small, large, None, wanted, N_CTX - length, **call)
    else:
        with pytest.raises(ContextOverflowError):
            generate(small, None, 3, **call)
        assert small.last_stats.decode_calls == 0
    goes_on(small, large)


def test_embeddings_count_where_ids_stand_beside_them(small: Any, large: Any) -> None:
    embeds = torch.randn(1, N_CTX - 4, 64, generator=torch.Generator().manual_seed(3))
    mask = torch.ones(1, N_CTX - 4).long()  # some releases would make one for the ids
    fits(small, large, [[5, 6]], 20, 4, inputs_embeds=embeds, attention_mask=mask)


def test_without_any_input(small: Any, large: Any) -> None:
    got = generate(small, None, 2 * N_CTX)
    assert got == generate(large, None, N_CTX - 1) and len(got[0]) == N_CTX


def test_an_assistant_drafts_until_its_own_context_is_full(opened: Callable[[int], Any], small: Any, large: Any) -> None:
    call = assisted(opened, small, MODES["assistant with a smaller context"])
    helper = call["assistant_model"].engine.n_ctx
    fits(small, large, [text(helper - 6)], 40, N_CTX - helper + 6, **call)
    fits(small, large, [text(helper - 6)], 40, N_CTX - helper + 6, **call)
    generate(small, [text(helper - 6)], 40, **call)
    assert 1 <= small.last_stats.accepted_tokens <= 6


def test_the_model_as_its_own_assistant(small: Any, large: Any) -> None:
    got = generate(small, [text(20)], 40, assistant_model=small)
    assert got == generate(large, [text(20)], 20)


@pytest.mark.parametrize("mode", ["greedy", "beams", "lookup"])
def test_the_limit_is_told_once(small: Any, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "transformers_llamacpp"):
        generate(small, [text(N_CTX - 5)], 5, **MODES[mode])
        assert not caplog.records
        generate(small, [text(N_CTX - 5)], 6, **MODES[mode])
    assert [record.getMessage() for record in caplog.records] == [
        "generation will stop after 5 new tokens, where the context of n_ctx=40 is full; 6 were allowed"
    ]
