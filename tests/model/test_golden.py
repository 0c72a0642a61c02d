"""What transformers 4.46.3 generated from the same F32 weights, token for token (`../golden/README.md`).

With the options a user gets by default, so keys and values are F16, but for DoLa: of the second prompt's token 26 the
probability is within 0.1 % of the share of the largest below which a token is no candidate, and F16 may move it there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compare import first_difference

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "open.json").read_text(encoding="utf-8"))
MODES = ("greedy", "greedy_penalty", "beam4", "beam3_len", "cfg_1_5", "cfg_neg", "lookup")
CASES = [case for case in GOLDEN["cases"] if case["mode"] in MODES]
DOLA = [case for case in GOLDEN["cases"] if case["mode"] == "dola"]


@pytest.fixture(scope="module")
def model(load_for_module: Callable[..., Any], smollm2_f32_path: Path) -> Any:
    return load_for_module(smollm2_f32_path)


def test_there_are_three_prompts_in_each_mode() -> None:
    assert [case["mode"] for case in CASES].count("greedy") == 3
    assert len(CASES) == 3 * len(MODES) and len(DOLA) == 3


@pytest.mark.parametrize("case", CASES, ids=[f"{case['mode']}-{case['prompt'][:9]!r}" for case in CASES])
def test_new_ids_are_equal(model: Any, case: dict[str, Any]) -> None:
    same_as_recorded(model, case)


@pytest.mark.parametrize("case", DOLA, ids=[case["prompt"][:9] for case in DOLA])
def test_new_ids_of_dola_are_equal(smollm2_f32: Any, case: dict[str, Any]) -> None:
    same_as_recorded(smollm2_f32, case)


def same_as_recorded(model: Any, case: dict[str, Any]) -> None:
    prompt = torch.tensor([case["prompt_ids"]])
    call = dict(case["kwargs"])
    if "negative_prompt_ids" in case:
        call["negative_prompt_ids"] = torch.tensor([case["negative_prompt_ids"]])
    output = model.generate(prompt, max_new_tokens=64, **call)
    got = output[0, prompt.shape[1] :].tolist()
    expected = case["new_ids"]
    if "tie_at" in case:  # two candidates equal to within case["tie_gap"]; what follows depends on the choice
        got, expected = got[: case["tie_at"]], expected[: case["tie_at"]]
    assert got == expected, f"first difference at {first_difference(expected, got)}"


@pytest.mark.parametrize("entry", GOLDEN["losses"], ids=[entry["text"][:9] for entry in GOLDEN["losses"]])
def test_losses_are_equal(model: Any, entry: dict[str, Any]) -> None:
    ids = torch.tensor([next(case["prompt_ids"] for case in CASES if case["prompt"] == entry["text"])])
    assert float(model(ids, labels=ids).loss) == pytest.approx(entry["loss"], abs=1e-3)


@pytest.mark.parametrize("case", CASES[:: len(MODES)], ids=[case["prompt"][:9] for case in CASES[:: len(MODES)]])
def test_the_tokenizer_gives_the_prompt_ids(model: Any, case: dict[str, Any]) -> None:
    assert model.tokenizer(case["prompt"]).input_ids == case["prompt_ids"]


GUIDED = [case for case in CASES if case["mode"] == "cfg_neg"]


@pytest.mark.parametrize("case", GUIDED, ids=[case["prompt"][:9] for case in GUIDED])
@pytest.mark.parametrize("way", ["prompt lookup", "assistant", "a batch of 2", "2 return sequences"])
def test_guidance_gives_the_same_ids_in_every_company(
    model: Any, load_for_module: Callable[..., Any], smollm2_q4_0_path: Path, case: dict[str, Any], way: str
) -> None:
    prompt = torch.tensor([case["prompt_ids"]])
    call: dict[str, Any] = {**case["kwargs"], "negative_prompt_ids": torch.tensor([case["negative_prompt_ids"]])}
    if way == "prompt lookup":
        call["prompt_lookup_num_tokens"] = 5
    elif way == "assistant":
        call["assistant_model"] = load_for_module(smollm2_q4_0_path)
    elif way == "a batch of 2":
        prompt = prompt.repeat(2, 1)
    else:
        call |= {"do_sample": True, "top_k": 1, "num_return_sequences": 2}  # greedy search returns one
    got = model.generate(prompt, max_new_tokens=64, **call)[:, prompt.shape[1] :].tolist()
    tie = case.get("tie_at")
    assert [row[:tie] for row in got] == [case["new_ids"][:tie]] * (1 if way in ("prompt lookup", "assistant") else 2)
