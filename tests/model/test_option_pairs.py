"""Every pair of ways to decode: the right text, or one clear error before any token is made.

What is right is reduced, law by law, to calls without the option: drafts and streaming change nothing, a batch is its
rows alone, return sequences are a repeated row, guidance is a processor that evaluates the other side from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from conftest import F32
from plain_guidance import PlainGuidance

pytestmark = pytest.mark.usefixtures("every_round")

TEXT = [40, 41, 42, 43, 44, 45, 40, 41, 42, 43]
ROWS = [TEXT, [50, 51, 52, 50, 51, 52, 50, 51, 53, 60]]
NEGATIVE = [83, 159, 253]
NEW = 12

OPTIONS: dict[str, dict[str, Any]] = {
    "contrastive": {"penalty_alpha": 0.6, "top_k": 3},
    "guidance": {"guidance_scale": 1.7, "negative_prompt_ids": torch.tensor([NEGATIVE])},
    "lookup": {"prompt_lookup_num_tokens": 4},
    "assistant": {"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0},
    "beams": {"num_beams": 3},
    "return sequences": {"num_return_sequences": 2, "do_sample": True, "top_k": 5},
    "batch": {},
    "streaming": {},
    "sink": {},
}

ONE_TEXT = "drafts for one text that is written token by token"
ERRORS: dict[frozenset[str], str] = {
    frozenset({drafter, other}): ONE_TEXT
    for drafter in ("lookup", "assistant")
    for other in ("contrastive", "beams", "return sequences", "batch")
} | {frozenset({"beams", "streaming"}): "streamer"}
"""The pairs that cannot be, and what the error says. `beams` and `contrastive`: beams do not use `penalty_alpha`, and
`return sequences` sample, which does not either, as in transformers always."""

PAIRS = [pair for pair in combinations(OPTIONS, 2) if "sink" not in pair and pair != ("beams", "return sequences")]


class Collector:
    def __init__(self) -> None:
        self.columns: list[list[int]] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        if value.ndim == 2:  # the prompts come first
            self.columns += value.T.tolist()
        else:
            self.columns.append(value.tolist())

    def end(self) -> None:
        self.ended = True


def generate(model: Any, rows: list[list[int]], **call: Any) -> list[list[int]]:
    torch.manual_seed(11)
    call = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | call
    return model.generate(torch.tensor(rows), **call).tolist()


def merged(names: Iterable[str]) -> dict[str, Any]:
    """The arguments of these options, where two give the same (`top_k`) that of the later one in `OPTIONS`: the order of a
    set of strings is another in every process, and may be another in a copy of the set.
    """
    names = set(names)
    return {key: value for name, option in OPTIONS.items() if name in names for key, value in option.items()}


def run(model: Any, names: set[str], twin: Any) -> list[list[int]]:
    call = merged(names)
    collector = Collector()
    if "streaming" in names:
        call["streamer"] = collector
    if "assistant" in names:
        call["assistant_model"] = twin
    got = generate(model, ROWS if "batch" in names else ROWS[:1], **call)
    if "streaming" in names:
        assert collector.ended
        assert [list(column) for column in zip(*got, strict=True)] == collector.columns
    return got


def reference(model: Any, names: set[str]) -> list[list[int]]:
    rows = ROWS if "batch" in names else ROWS[:1]
    call = merged(names - {"guidance", "lookup", "assistant", "streaming", "batch"})
    times = call.pop("num_return_sequences", 1)
    rows = [row for row in rows for _ in range(times)]
    if "guidance" in names:
        plain = PlainGuidance(model, OPTIONS["guidance"]["guidance_scale"], len(TEXT), [NEGATIVE])
        call["logits_processor"] = LogitsProcessorList([plain])
    if call.get("do_sample"):  # the rows draw from one stream of random numbers
        return generate(model, rows, **call)
    return [generate(model, [row], **call)[0] for row in rows]


def test_options_mean_the_same_in_every_order() -> None:
    for pair in PAIRS:
        assert all(merged(names) == merged(pair) for names in permutations(pair)), pair
    assert merged(("return sequences", "contrastive"))["top_k"] == OPTIONS["return sequences"]["top_k"]


@pytest.mark.parametrize("pair", PAIRS, ids=" + ".join)
def test_right_or_one_clear_error(tiny_llama: Any, twin: Any, pair: tuple[str, str]) -> None:
    error = ERRORS.get(frozenset(pair))
    if error is not None:
        with pytest.raises(ValueError, match=error):
            run(tiny_llama, set(pair), twin)
        assert tiny_llama.last_stats.decode_calls == 0
        return
    got = run(tiny_llama, set(pair), twin)
    stats = tiny_llama.last_stats
    assert got == reference(tiny_llama, set(pair))
    if pair in (("lookup", "assistant"), ("guidance", "lookup"), ("guidance", "assistant")):
        assert stats.drafted_tokens > 0


@pytest.mark.parametrize("other", [name for name in OPTIONS if name != "sink"])
def test_a_sink_changes_nothing_before_the_context_is_full(
    load: Callable[..., Any], tiny_llama_path: Path, tiny_llama: Any, twin: Any, other: str
) -> None:
    """What it does then is in test_streaming_llm.py."""
    assert run(load(tiny_llama_path, **F32, n_sink=4), {other}, twin) == reference(tiny_llama, {other})


def test_drafts_with_guidance_and_streaming_together(tiny_llama: Any, twin: Any) -> None:
    names = {"guidance", "lookup", "assistant", "streaming"}
    got = run(tiny_llama, names, twin)
    assert tiny_llama.last_stats.drafted_tokens > 0
    assert got == reference(tiny_llama, names)


def test_return_sequences_of_a_beam_search_are_its_best(tiny_llama: Any) -> None:
    alone = generate(tiny_llama, ROWS[:1], **OPTIONS["beams"])
    every = generate(tiny_llama, ROWS[:1], **OPTIONS["beams"], num_return_sequences=3)
    assert generate(tiny_llama, ROWS[:1], **OPTIONS["beams"], num_return_sequences=2) == every[:2]
    assert every[:1] == alone
    assert len({tuple(text) for text in every}) == 3


def test_beams_with_guidance_return_sequences_and_a_batch(tiny_llama: Any) -> None:
    call = OPTIONS["beams"] | {"num_return_sequences": 2}
    got = generate(tiny_llama, ROWS, **call, **OPTIONS["guidance"])
    plain = PlainGuidance(tiny_llama, OPTIONS["guidance"]["guidance_scale"], len(TEXT), [NEGATIVE])
    expected = [
        text for row in ROWS for text in generate(tiny_llama, [row], **call, logits_processor=LogitsProcessorList([plain]))
    ]
    assert got == expected
