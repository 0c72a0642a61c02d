"""Many conversations on one model: each turn evaluates its own tokens, wherever the history is by then."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compare import same_greedy
from conftest import F32
from transformers_llamacpp import LlamaCppCache, StateError
from transformers_llamacpp.state_file import peek

pytestmark = pytest.mark.once

SYSTEM = [1, *(40 + (11 * i) % 200 for i in range(60))]
CHATS, TURNS, NEW = 12, 4, 5


def say(model: Any, tokens: list[int], n: int = NEW, **kwargs: Any) -> list[int]:
    ids = torch.tensor([tokens])
    call = {"max_new_tokens": n, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **kwargs}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **call)
    model.engine.check()
    return output[0, len(tokens) :].tolist()


def message(chat: int, turn: int, n: int = 20) -> list[int]:
    return [40 + (7 * chat + 13 * turn + i * (chat + 3)) % 240 for i in range(n)]


def take_turns(model: Any, turns: int = TURNS) -> tuple[list[list[int]], list[tuple[int, str]]]:
    """The chats, and for each turn the tokens evaluated beyond what was new, and where the rest was."""
    chats = [list(SYSTEM) for _ in range(CHATS)]
    costs = []
    for turn in range(turns):
        for number, chat in enumerate(chats):
            new = message(number, turn)
            chat += new
            answer = say(model, chat)
            stats = model.last_stats
            known = 0 if turn == number == 0 else len(SYSTEM) if turn == 0 else len(chat) - len(new)
            costs.append((stats.evaluated_tokens - (NEW - 1) - (len(chat) - known), str(stats.reuse)))
            chat += answer
    return chats, costs


KINDS = {
    "llama": ("tiny_llama_path", {"n_ctx": 256, "n_cells": 512, "n_seq_max": 4}),
    "all cells of a window": ("tiny_swa_path", {"n_ctx": 256, "n_cells": 512, "n_seq_max": 4}),
    "a window": ("tiny_swa_path", {"n_ctx": 256, "n_cells": 512, "n_seq_max": 4, "swa_full": False}),
    "recurrent": ("tiny_mamba_path", {"n_ctx": 256, "n_seq_max": 3}),
    "hybrid": ("tiny_hybrid_path", {"n_ctx": 256, "n_cells": 512, "n_seq_max": 3}),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def opened(load: Callable[..., Any], request: pytest.FixtureRequest, kind: str) -> Callable[..., Any]:
    fixture, options = KINDS[kind]
    path = request.getfixturevalue(fixture)
    return lambda **more: load(path, **F32, **options, **more)


def right(model: Any, chats: list[list[int]]) -> None:
    for number, chat in enumerate(chats[:3]):
        before, answer = chat[:-NEW], chat[-NEW:]
        model.forget()
        same_greedy(model, before, say(model, before), answer, f"chat {number}")


def test_more_chats_than_the_buffer_holds(opened: Callable[..., Any]) -> None:
    model = opened()
    chats, costs = take_turns(model)
    # the second chat of a memory that cannot be cut shows where texts part
    assert [cost for cost, _ in costs[2:]] and max(cost for cost, _ in costs[2:]) <= 1, costs
    assert {where for _, where in costs[CHATS:]} <= {"host", "memory"}
    right(model, chats)


def test_what_host_memory_cannot_hold_comes_from_disk(opened: Callable[..., Any], tmp_path: Path) -> None:
    model = opened(host_cache_bytes=1 << 17, state_dir=str(tmp_path))
    chats, costs = take_turns(model)
    assert max(cost for cost, _ in costs[2:]) <= 1, costs
    assert "disk" in {where for _, where in costs}
    assert model.engine.pool.registry.states.host_bytes(model.engine.pool.sequences) <= 1 << 17
    right(model, chats)


def test_without_a_folder_it_is_evaluated_again(opened: Callable[..., Any]) -> None:
    model = opened(host_cache_bytes=1 << 16)
    chats, costs = take_turns(model, 2)
    assert max(cost for cost, _ in costs) > 1  # it is said where the bound is, and nothing is wrong
    right(model, chats)


def test_the_next_process_goes_on(opened: Callable[..., Any], tmp_path: Path) -> None:
    options = {"host_cache_bytes": 1 << 14, "state_dir": str(tmp_path)}
    first = opened(**options)
    chats, _ = take_turns(first, 2)
    first.close()
    second = opened(**options)
    chat = chats[0]
    say(second, [*chat, 45, 46])
    stats = second.last_stats
    assert stats.reuse == "disk" and stats.evaluated_tokens == 1 + 2 + NEW - 1, stats
    damaged = 0
    for file in tmp_path.glob("*.state"):
        data = bytearray(file.read_bytes())
        data[-40] ^= 1
        file.write_bytes(data)
        damaged += 1
    assert damaged
    second.close()
    third = opened(**options)
    got = say(third, [*chat, 45, 46])
    assert third.last_stats.reuse == "none"
    third.forget()
    same_greedy(third, [*chat, 45, 46], say(third, [*chat, 45, 46]), got)


def test_the_folder_is_bounded(load: Callable[..., Any], tiny_llama_path: Path, tmp_path: Path) -> None:
    bound = 400_000
    options = {"n_ctx": 256, "n_cells": 512, "host_cache_bytes": 1 << 12, "state_dir": str(tmp_path)}
    model = load(tiny_llama_path, **F32, **options, state_dir_bytes=bound)
    chats, _ = take_turns(model, 3)
    assert 0 < sum(file.stat().st_size for file in tmp_path.iterdir()) <= bound
    right(model, chats)


def test_a_file_of_another_model_is_left_alone(
    load: Callable[..., Any], tiny_llama_path: Path, tiny_swa_path: Path, tmp_path: Path
) -> None:
    options = {"n_ctx": 256, "n_cells": 512, "host_cache_bytes": 1 << 12, "state_dir": str(tmp_path)}
    take_turns(load(tiny_llama_path, **F32, **options), 2)
    files = set(tmp_path.iterdir())
    assert files and all(peek(file)[1] for file in files)
    other = load(tiny_swa_path, **F32, **options)
    say(other, SYSTEM)
    assert other.last_stats.reuse == "none" and files <= set(tmp_path.iterdir())


def test_a_folder_that_cannot_be_used(load: Callable[..., Any], tiny_llama_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StateError, match="state_dir"):
        load(tiny_llama_path, state_dir=str(tmp_path / "file"))


def test_a_system_prompt_is_stored_once(load: Callable[..., Any], tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, **F32, n_ctx=512, n_cells=1024)
    system = [1, *(40 + (11 * i) % 200 for i in range(400))]
    for number in range(10):
        say(model, [*system, *message(number, 0, 30)])
    with model.engine.lock:
        model.engine.pool.room.empty_buffer()
    per_token = model.engine.pool.registry.states.host_bytes(model.engine.pool.sequences) / (400 + 10 * 35)
    one = load(tiny_llama_path, **F32, n_ctx=512)
    say(one, system)
    with one.engine.lock:
        one.engine.pool.room.empty_buffer()
    alone = one.engine.pool.registry.states.host_bytes(one.engine.pool.sequences) / 405
    assert per_token < 1.2 * alone, (per_token, alone)


def test_the_buffer_holds_only_what_is_in_use(load: Callable[..., Any], tiny_llama_path: Path) -> None:
    model = load(tiny_llama_path, **F32, n_ctx=1024, n_cells=4096)
    pool = model.engine.pool
    kept = []
    for number in range(5):
        cache = LlamaCppCache(model)
        say(model, [*SYSTEM, *message(number, 0, 400)], cache=cache)
        kept.append(cache)
        assert sum(len(s) for s in pool.sequences if s.resident) <= 61 + 400 + NEW + 256
    for number, cache in enumerate(kept):  # caches that are kept left it too, and lost nothing
        text = [*cache.tokens(0), 50, 51]
        say(model, text, cache=cache)
        assert model.last_stats.evaluated_tokens == 2 + NEW - 1, (number, model.last_stats)
        assert model.last_stats.reuse == "host", (number, model.last_stats)
        cache.close()


def test_nothing_is_written_without_a_folder(opened: Callable[..., Any], tmp_path: Path) -> None:
    os.chdir(tmp_path)
    take_turns(opened(host_cache_bytes=1 << 14), 1)
    assert not list(tmp_path.iterdir())
