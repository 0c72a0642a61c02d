"""Rows that share `n_cells`: a call ends where the cells are full, and prompts that do not fit are an error at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compare import padded
from conftest import F32
from transformers_llamacpp import CacheFullError, LlamaCppCache
from transformers_llamacpp.compat import cache_of

pytestmark = pytest.mark.usefixtures("every_round")

N_CELLS = 256  # llama.cpp makes no smaller buffer
NEXT = [[1, 60, 61, 62]]


def text(length: int, first: int = 1) -> list[int]:
    """Shares nothing with a text that starts otherwise."""
    return [first, *(5 + (i * (3 + first)) % 280 for i in range(length - 1))]


def common(length: int, shared: int, tail: int) -> list[int]:
    return [*text(shared), *text(length - shared, tail)]


def negative(*lengths: int) -> dict[str, Any]:
    ids, mask = padded([text(length, 90 + row) for row, length in enumerate(lengths)], "left")
    return {"guidance_scale": 1.7, "negative_prompt_ids": ids, "negative_prompt_attention_mask": mask}


CALLS: dict[str, tuple[list[list[int]], dict[str, Any], int]] = {
    "one row": ([text(250)], {}, 6),
    "one row that samples": ([text(250)], {"do_sample": True}, 6),
    "lookup": ([text(250)], {"prompt_lookup_num_tokens": 10}, 6),
    "assistant": ([text(250)], {"assistant_model": 512}, 6),
    "batch": ([text(120), text(121, 2)], {}, 7),
    "batch of unequal rows": ([text(20), text(221, 2)], {}, 7),
    "batch that shares a beginning": ([common(150, 100, 2), common(150, 100, 3)], {}, 28),
    "batch of equal rows": ([text(200)] * 4, {}, 14),
    "return sequences": ([text(200)], {"num_return_sequences": 4, "do_sample": True}, 14),
    "return sequences of a batch": ([common(100, 1, 2), common(100, 1, 3)], {"num_return_sequences": 3, "do_sample": True}, 9),
    "contrastive search": ([text(120), text(121, 2)], {"penalty_alpha": 0.6, "top_k": 4}, 7),
    "contrastive search, one beginning": ([common(120, 50, 2), common(121, 50, 3)], {"penalty_alpha": 0.6, "top_k": 4}, 7),
    "DoLa": ([text(120), text(121, 2)], {"dola_layers": "high"}, 7),
    "guidance": ([text(251)], {"guidance_scale": 1.7}, 2),
    "guidance with a negative prompt": ([text(150)], negative(90), 8),
    "guidance in a batch": ([text(60), text(60, 2)], negative(60), 19),
    "guidance with a negative prompt each": ([text(60), text(60, 2)], negative(60, 30), 11),
    "guidance with one beginning": (
        [common(150, 100, 2)], {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([common(140, 100, 3)])}, 33
    ),
    "guidance and drafts": ([text(150)], negative(90) | {"prompt_lookup_num_tokens": 10, "assistant_model": 512}, 8),
}  # fmt: skip
"""Prompts, the call, and how many tokens it can write."""

BEAMS: dict[str, tuple[list[list[int]], dict[str, Any]]] = {
    "beams": ([text(226)], {"num_beams": 3}),
    "beams of a batch": ([common(110, 1, 2), common(110, 1, 3)], {"num_beams": 3}),
    "beams that sample": ([text(226)], {"num_beams": 3, "do_sample": True}),
    "group beams": ([text(226)], {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}),
    "constrained beams": ([text(226)], {"num_beams": 3, "force_words_ids": [[50]]}),
    "beams with guidance": ([text(120)], {"num_beams": 3} | negative(100)),
    "beams without a cache": ([text(226)], {"num_beams": 3, "use_cache": False}),
    "one allowed token": ([text(226)], {"num_beams": 3, "prefix_allowed_tokens_fn": lambda row, ids: [5 + len(ids) % 9]}),
}


@pytest.fixture(scope="module")
def opened(load_for_module: Callable[..., Any], tiny_llama_path: Path) -> Callable[[int], Any]:
    models: dict[int, Any] = {}

    def get(n_cells: int) -> Any:
        if n_cells not in models:
            models[n_cells] = load_for_module(tiny_llama_path, n_ctx=512, n_cells=n_cells, **F32)
        models[n_cells].forget()
        return models[n_cells]

    return get


@pytest.fixture
def small(opened: Callable[[int], Any]) -> Any:
    return opened(N_CELLS)


@pytest.fixture
def large(opened: Callable[[int], Any]) -> Any:
    return opened(4096)


def generate(model: Any, rows: list[list[int]], new: int, **call: Any) -> list[list[int]]:
    torch.manual_seed(5)
    ids, mask = padded(rows, "left")
    call = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new, "attention_mask": mask} | call
    output = model.generate(ids, **call)
    return (output if isinstance(output, torch.Tensor) else output.sequences)[:, ids.shape[1] :].tolist()


def goes_on(model: Any, larger: Any) -> None:
    assert generate(model, NEXT, 8) == generate(larger, NEXT, 8)


@pytest.mark.parametrize("name", CALLS)
def test_the_call_ends_where_the_cells_are_full(
    opened: Callable[[int], Any], small: Any, large: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows, call, room = CALLS[name]
    if "assistant_model" in call:
        call = call | {"assistant_model": opened(call["assistant_model"])}
    for wanted in (room - 1, room, room + 1, 100):
        caplog.clear()
        assert generate(small, rows, wanted, **call) == generate(large, rows, min(wanted, room), **call)
        told = [record.getMessage() for record in caplog.records if "KV cells" in record.getMessage()]
        assert len(told) == (wanted > room)
        assert all(f"after {room} new tokens" in message and "n_cells=256" in message for message in told)
    assert generate(small, rows, 100, **call) == generate(large, rows, room, **call)  # with what the last call left
    goes_on(small, large)


@pytest.mark.parametrize("name", BEAMS)
def test_beams_end_where_the_cells_are_full(small: Any, large: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """How soon depends on what they share: not before each would have cells of its own."""
    rows, call = BEAMS[name]
    with caplog.at_level(logging.WARNING):
        got = generate(small, rows, 100, **call)
    room = len(got[0])
    apart = (N_CELLS - 226) // (len(rows) * call["num_beams"] * (2 if "guidance_scale" in call else 1))
    assert apart <= room < 100
    assert f"after {room} new tokens" in caplog.text and "n_cells=256" in caplog.text
    assert got == generate(large, rows, room, **call)
    assert generate(small, rows, apart, **call) == generate(large, rows, apart, **call)
    goes_on(small, large)


@pytest.mark.parametrize("kind", ["llama", "swa", "hybrid"])
def test_beams_of_every_memory(load: Callable[..., Any], request: pytest.FixtureRequest, kind: str) -> None:
    path = request.getfixturevalue(f"tiny_{kind}_path")
    model, larger = (load(path, n_ctx=512, n_cells=n_cells, **F32) for n_cells in (N_CELLS, 2048))
    for rows, call in ([text(226)], {"num_beams": 3}), ([common(110, 1, 2), common(110, 1, 3)], {}), ([text(250)], {}):
        got = generate(model, rows, 100, **call)
        assert 6 <= len(got[0]) < 100
        assert got == generate(larger, rows, len(got[0]), **call)


def test_a_state_takes_no_cells(load: Callable[..., Any], tiny_mamba_path: Path) -> None:
    model, larger = (load(tiny_mamba_path, n_ctx=512, n_cells=n_cells) for n_cells in (N_CELLS, 2048))
    rows = [text(150, first) for first in range(1, 4)]
    assert generate(model, rows, 30) == generate(larger, rows, 30)


TOO_MUCH: dict[str, tuple[list[list[int]], dict[str, Any], int]] = {
    "one row": ([text(256)], {}, 257),
    "far beyond": ([text(500)], {}, 501),
    "batch": ([text(128), text(127, 2)], {}, 257),
    "batch that shares a beginning": ([common(200, 145, 2), common(200, 145, 3)], {}, 257),
    "return sequences": ([text(253)], {"num_return_sequences": 4, "do_sample": True}, 257),
    "beams": ([text(253)], {"num_beams": 4}, 257),
    "group beams": ([text(253)], {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, 257),
    "constrained beams": ([text(253)], {"num_beams": 4, "force_words_ids": [[50]]}, 257),
    "contrastive search": ([common(150, 50, 2), common(105, 50, 3)], {"penalty_alpha": 0.6, "top_k": 4}, 257),
    "DoLa": ([text(128), text(127, 2)], {"dola_layers": "high"}, 257),
    "guidance": ([text(254)], {"guidance_scale": 1.7}, 257),
    "guidance with a negative prompt": ([text(20)], negative(235), 257),
    "lookup": ([text(256)], {"prompt_lookup_num_tokens": 10}, 257),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_prompts_that_do_not_fit_are_an_error_at_once(small: Any, large: Any, name: str) -> None:
    rows, call, needed = TOO_MUCH[name]
    goes_on(small, large)
    with pytest.raises(CacheFullError, match=f"n_cells={N_CELLS}.*n_cells={needed}") as caught:
        generate(small, rows, 3, **call)
    assert (caught.value.needed, caught.value.limit) == (needed, N_CELLS)
    assert small.last_stats.decode_calls == small.last_stats.new_tokens == 0
    goes_on(small, large)
    assert generate(large, rows, 3, **call)


def test_what_earlier_calls_left_does_not_count_twice(opened: Callable[[int], Any], large: Any) -> None:
    """The texts of a call share their beginning; parked and brought back one by one they would not."""
    model = opened(768)
    rows = [common(450, 300, 2), common(450, 300, 3)]
    expected = generate(large, rows, 60)
    for _ in range(3):
        assert generate(model, rows, 60) == expected


def test_a_passed_in_cache(small: Any, large: Any) -> None:
    rows = [common(150, 100, 2), common(150, 100, 3)]
    texts = []
    for model in (small, large):
        ids = torch.tensor(rows)
        first = model.generate(ids, do_sample=False, eos_token_id=None, max_new_tokens=8, return_dict_in_generate=True)
        again = generate(model, first.sequences.tolist(), 100 if model is small else 20, cache=cache_of(first))
        texts.append(again)
        assert cache_of(first).get_seq_length() == 150 + 8 + 20 - 1
        cache_of(first).close()
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("length", "room"), [(150, 20), (110, 10), (170, 2)])
def test_a_passed_in_cache_that_had_to_leave_the_buffer(small: Any, large: Any, length: int, room: int) -> None:
    """Its rows share 100 cells no more where both are copied back, and do where there is no room for that."""
    rows = [common(length, 100, 2), common(length, 100, 3)]
    cache = LlamaCppCache(small)
    small(torch.tensor(rows), cache=cache, logits_to_keep=1)
    generate(small, [text(250, 9)], 2)
    more = [[*row, 7, 8] for row in rows]
    got = generate(small, more, 100, cache=cache)
    assert len(got[0]) >= room
    assert got == generate(large, more, len(got[0]))


def test_a_passed_in_cache_stays_where_its_text_does_not_fit(small: Any, large: Any) -> None:
    cache = LlamaCppCache(small)
    small(torch.tensor([text(100)]), cache=cache)
    with pytest.raises(CacheFullError):
        generate(small, [[*text(100), *text(156, 2)]], 3, cache=cache)
    assert small.last_stats.decode_calls == 0
    assert cache.tokens(0) == text(100)
    got = generate(small, [[*text(100), 7, 8]], 5, cache=cache)
    assert got == generate(large, [[*text(100), 7, 8]], 5)


@pytest.mark.parametrize("call", [{"num_return_sequences": 3, "do_sample": True}, {"num_beams": 3}], ids=str)
def test_copies_of_embeddings_share_their_cells(small: Any, large: Any, call: dict[str, Any]) -> None:
    embeds = torch.randn(1, 226, 64, generator=torch.Generator().manual_seed(3))
    call = {"inputs_embeds": embeds, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | call
    texts = []
    for model, new in ((small, 100), (large, None)):
        torch.manual_seed(5)
        texts.append(model.generate(max_new_tokens=new or texts[0].shape[1], **call))
        assert model.last_stats.evaluated_tokens == 226 + 3 * (texts[0].shape[1] - 1)
    assert texts[0].tolist() == texts[1].tolist()
    assert texts[0].shape[1] >= 10


def test_the_second_prompt_of_a_batch_is_evaluated_once_for_its_beams(large: Any) -> None:
    """Although it shares its first token with the other one, which is what its rows find first."""
    rows = [common(50, 1, 2), common(50, 1, 3)]
    generate(large, rows, 5, num_beams=4)
    assert large.last_stats.evaluated_tokens == 50 + 49 + 8 * 4


def test_rows_share_with_a_row_that_shares_itself(small: Any, large: Any) -> None:
    """The first row shares little with the others, and these much among themselves: each token is evaluated once."""
    system, more = text(10), text(60, 3)[1:]
    rows = [[*system, *text(60, 5)], *([*system, *more, last] for last in (50, 51, 52))]
    got = generate(small, rows, 20)
    assert small.last_stats.evaluated_tokens == 11 + 59 + 58 + 3 + 4 * 19  # the first 11 are common
    assert got == generate(large, rows, 20)


def test_a_negative_prompt_is_evaluated_once_whatever_it_begins_with(small: Any, large: Any) -> None:
    system, more = text(10), text(60, 3)[1:]
    rows = [[*system, 60], [1, 70, 71, 72], [1, 80, 81]]
    call = {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[*system, *more, 4, 4, 4, 4]])}
    got = generate(small, rows, 10, **call)
    assert got == generate(large, rows, 10, **call) and {len(row) for row in got} == {10}
