"""Prompts that share something with an earlier one: warm equals cold, and what is evaluated is what differs.

Where the memory can be cut anywhere that is counted to the token. Where it cannot (recurrent states, windows that dropped
cells) a checkpoint is found: before the last token, at the end of a turn, where texts part, and every 256 tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compare import same_greedy
from conftest import F32

pytestmark = pytest.mark.once

NEW = 3
EVERY = 256

KINDS = {
    "llama": ("tiny_llama_path", {}, (1, 2, 31, 32, 33, 511, 512, 513)),
    "all cells of a window": ("tiny_swa_path", {}, (1, 15, 16, 17, 33, 512, 700)),
    "a window": ("tiny_swa_path", {"swa_full": False, "n_seq_max": 4, "n_ubatch": 32}, (1, 15, 16, 17, 33, 512, 700)),
    "recurrent": ("tiny_mamba_path", {}, (1, 2, 32, 33, 256, 257, 513)),
    "hybrid": ("tiny_hybrid_path", {}, (1, 2, 32, 33, 256, 257, 513)),
    "smollm2": ("smollm2_f32_path", {}, (2, 32, 512)),
    "gemma": ("gemma_f32_path", {}, (33, 700)),
    "gemma's window": ("gemma_f32_path", {"swa_full": False, "n_seq_max": 1, "n_batch": 256, "n_ubatch": 256}, (900,)),
}
CASES = [(kind, n) for kind, (_, _, lengths) in KINDS.items() for n in lengths]
LARGE = {"smollm2", "gemma", "gemma's window"}
STATEFUL = {"a window", "recurrent", "hybrid", "gemma's window"}


@pytest.fixture(scope="module")
def opened(request: pytest.FixtureRequest, load_for_module: Callable[..., Any]) -> Callable[[str], Any]:
    """The model of a kind, loaded once, and cold."""
    models: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in models:
            fixture, options, _ = KINDS[kind]
            models[kind] = load_for_module(request.getfixturevalue(fixture), **{**F32, **options})
        models[kind].forget()
        return models[kind]

    return get


def text(n: int, seed: int = 0) -> list[int]:
    return random.Random(f"{n} {seed}").choices(range(40, 290), k=n)


def say(model: Any, tokens: list[int]) -> list[int]:
    ids = torch.tensor([tokens])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    model.engine.check()
    return output[0, len(tokens) :].tolist()


def changed(tokens: list[int], at: int) -> list[int]:
    return [*tokens[:at], 40 + (tokens[at] - 39) % 250, *tokens[at + 1 :]]


def variants(tokens: list[int]) -> dict[str, tuple[list[int], int]]:
    """Each with the tokens it shares with `tokens` and its answer."""
    n = len(tokens)
    found = {"again": (tokens, n), "plus one": ([*tokens, 39], n), "changed at the end": (changed(tokens, n - 1), n - 1)}
    if n > 1:
        found["strict prefix"] = (tokens[: n - max(1, n // 5)], n - max(1, n // 5))
        found["changed in the middle"] = (changed(tokens, n // 2), n // 2)
        found["changed at the start"] = (changed(tokens, 0), 0)
    return found


@pytest.mark.parametrize("away", [False, True], ids=["in the buffer", "in host memory"])
@pytest.mark.parametrize(("kind", "n"), CASES, ids=str)
def test_warm_is_cold(opened: Callable[[str], Any], kind: str, n: int, away: bool) -> None:
    model, tokens = opened(kind), text(n)
    chosen = variants(tokens)
    if kind in LARGE:  # the slow ones: what a cut in the middle and the last token show
        chosen = {name: chosen[name] for name in ("again", "changed in the middle")}
    say(model, tokens)
    answers = {}
    for name, (other, shared) in chosen.items():
        if away:
            with model.engine.lock:
                model.engine.pool.room.empty_buffer()
        answers[name] = say(model, other)
        stats = model.last_stats
        limit = min(shared, len(other) - 1)
        assert stats.prompt_tokens == len(other) == stats.reused_tokens + stats.evaluated_tokens - (NEW - 1), name
        if kind not in STATEFUL:
            assert stats.reused_tokens == limit, name
        else:
            assert limit - EVERY < stats.reused_tokens <= limit, name
            if name == "again":
                assert stats.reused_tokens == limit
        expected = {"none"} if not stats.reused_tokens else {"host", "checkpoint"} if away else {"memory", "host", "checkpoint"}
        assert stats.reuse in expected and stats.reuse.reason, (name, stats.reuse)
    for name, (other, _) in chosen.items():
        model.forget()
        same_greedy(model, other, say(model, other), answers[name], name)
        assert model.last_stats.reuse == "none"


@pytest.mark.parametrize("kind", ["llama", "all cells of a window", "a window", "recurrent", "hybrid"])
def test_regenerate_and_edit_every_turn_of_a_chat(opened: Callable[[str], Any], kind: str) -> None:
    """Turns of 30 tokens. The same turn again costs one token, another message instead of the last one costs the message."""
    model = opened(kind)
    history = text(50)
    for turn in range(6):
        if turn:
            history = [*history, *text(30, turn)]
        answer = say(model, history)
        again = say(model, history)
        assert model.last_stats.evaluated_tokens == 1 + NEW - 1, (turn, model.last_stats)
        assert again == answer
        if turn:
            say(model, [*history[:-30], *text(25, 100 + turn)])
            assert model.last_stats.evaluated_tokens <= 25 + 1 + NEW - 1, (turn, model.last_stats)
        history = [*history, *answer]
    got = say(model, history)
    model.forget()
    same_greedy(model, history, say(model, history), got, kind)


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "a window"])
def test_a_system_prompt_that_chats_share(opened: Callable[[str], Any], kind: str) -> None:
    """The second chat shows where texts part; from the third on it costs nothing."""
    model, system = opened(kind), text(150)
    for number in range(2):
        say(model, [*system, *text(20, 1 + number)])
    for number in range(4):
        say(model, [*system, *text(20, 10 + number)])
        assert model.last_stats.reused_tokens == 150 and model.last_stats.reuse in ("checkpoint", "memory")


@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "a window"])
def test_checkpoints_are_bounded(load: Callable[..., Any], request: pytest.FixtureRequest, kind: str) -> None:
    fixture, options, _ = KINDS[kind]
    bound = 1 << 17
    model = load(request.getfixturevalue(fixture), **{**F32, **options, "host_cache_bytes": bound})
    history = text(100)
    for turn in range(12):
        history = [*history, *text(40, turn)]
        history = [*history, *say(model, history)]
        assert model.engine.pool.registry.states.host_bytes(model.engine.pool.sequences) <= bound
    got = say(model, history)
    model.forget()
    same_greedy(model, history, say(model, history), got, kind)


def test_asking_for_snapshots_a_model_does_not_take(load: Callable[..., Any], tiny_mamba_path: Path) -> None:
    """llama.cpp reduces `n_rs_seq` to 0 for this architecture; its memory is asked, not the option."""
    model = load(tiny_mamba_path, **F32, n_rs_seq=8)
    tokens = text(60)
    say(model, tokens)
    got = say(model, [*tokens[:-1], 39])
    model.forget()
    same_greedy(model, [*tokens[:-1], 39], say(model, [*tokens[:-1], 39]), got)


CALLS: dict[str, tuple[dict[str, Any], int]] = {
    "lookup": ({"prompt_lookup_num_tokens": 4}, 1),
    "assistant": ({"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0}, 1),
    "beams": ({"num_beams": 3}, 3),
    "return sequences": ({"num_return_sequences": 3, "do_sample": True, "top_k": 5}, 3),
}


@pytest.mark.usefixtures("every_round")
@pytest.mark.parametrize("kind", ["recurrent", "hybrid", "a window"])
@pytest.mark.parametrize("name", CALLS)
def test_no_way_of_decoding_reads_the_history_again(
    opened: Callable[[str], Any], load: Callable[..., Any], tiny_llama_path: Path, kind: str, name: str
) -> None:
    model, tokens, new = opened(kind), [1, *([60, 61, 62, 63, 64] * 60)], 20
    (call, rows), ids = CALLS[name], torch.tensor([tokens])
    call = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **call}
    if name == "assistant":
        call["assistant_model"] = load(tiny_llama_path, **F32)
    answers = []
    for _ in range(2):
        torch.manual_seed(1)
        answers.append(model.generate(ids, attention_mask=torch.ones_like(ids), **call))
        stats = model.last_stats
        model.engine.check()
        cost = len(tokens) if len(answers) == 1 else 1
        # a draft that came to nothing is gone back from, and what was taken of it is fed again
        assert stats.evaluated_tokens <= cost + rows * new + 2 * stats.drafted_tokens, stats
    assert torch.equal(answers[0], answers[1])
    if name in ("lookup", "assistant"):
        model.forget()
        assert answers[0][0, len(tokens) :].tolist()[:NEW] == say(model, tokens)
