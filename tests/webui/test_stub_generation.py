"""What happens to the scores of a model of transformers in the webui; on the stand-in, and with ``$TEXTGEN_WEBUI`` on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from webui import folders
from webui.driver import Webui
from webui.test_stub import notes

pytestmark = pytest.mark.once

HERE = Path(__file__).parent
GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def tiny(start_webui_for_module: Callable[..., Webui], tmp_path_factory: Any) -> Webui:
    folder = folders.make(tmp_path_factory.mktemp("webui") / "webui")
    for name in ("probe", "tiny_torch"):
        folders.add_extension(folder, HERE / name)
    return start_webui_for_module("--nowebui", "--extensions", "probe", "tiny_torch", folder=folder)


def test_seeds_and_greedy_texts_repeat(tiny: Webui) -> None:
    assert tiny.complete("Hello", **GREEDY) == tiny.complete("Hello", **GREEDY)
    sampled = {"max_tokens": 12, "seed": 7}
    assert tiny.complete("Hello", **sampled) == tiny.complete("Hello", **sampled)


def test_guidance_and_prompt_lookup_are_done_by_generate(tiny: Webui) -> None:
    plain = tiny.complete("Hello", **GREEDY)
    assert tiny.complete("Hello", **GREEDY, guidance_scale=2.5, negative_prompt="Good bye") != plain
    assert tiny.complete("Hello", **GREEDY, prompt_lookup_num_tokens=3)


def test_contrastive_search_of_transformers_is_an_empty_answer(tiny: Webui) -> None:
    asked = {"max_tokens": 12, "do_sample": False, "penalty_alpha": 0.6, "top_k": 4}
    assert tiny.complete("Hello", **asked) == ""


def test_logits_before_and_after_the_samplers(tiny: Webui) -> None:
    plain = tiny.post("/v1/internal/logits", {"prompt": "Hello", "top_logits": 5})
    assert len(plain) == 5 and 0 < sum(plain.values()) <= 1.001
    asked = {"prompt": "Hello", "top_logits": 5, "use_samplers": True, "top_k": 1}
    sampled = tiny.post("/v1/internal/logits", asked)
    assert max(sampled.values()) == pytest.approx(1) and max(sampled, key=sampled.get) == max(plain, key=plain.get)


def test_logprobs_of_the_prompt_ask_the_model_for_them(tiny: Webui) -> None:
    asked = {"prompt": "Hello", "echo": True, "logprobs": 2, "max_tokens": 0}
    found = tiny.post("/v1/completions", asked)["choices"][0]
    assert notes(tiny, "get_prompt_logits")[-1]["length"] == 5
    assert found["text"] == "Hello"
    assert found["logprobs"]["token_logprobs"][0] is None
    assert found["logprobs"]["tokens"][1:] == list("ello")
    assert all(value < 0 for value in found["logprobs"]["token_logprobs"][1:])


def test_logprobs_are_what_a_processor_wrote_down(tiny: Webui) -> None:
    found = tiny.post("/v1/completions", {"prompt": "Hello", "logprobs": 3, **GREEDY})["choices"][0]
    assert len(found["logprobs"]["tokens"]) == 12
    assert all(len(best) <= 3 for best in found["logprobs"]["top_logprobs"])
    turn = [{"role": "user", "content": "Hello"}]
    answer = tiny.post("/v1/chat/completions", {"messages": turn, "logprobs": True, "top_logprobs": 2, **GREEDY})
    assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2


def test_a_bias_chooses(tiny: Webui) -> None:
    assert tiny.complete("Hello", **GREEDY, logit_bias={str(ord("z")): 100}) == "z" * 12


def test_a_grammar_follows_one_text_only(tiny: Webui) -> None:
    grammar = 'root ::= "yes" | "no"'
    assert tiny.complete("Hello", **GREEDY, grammar_string=grammar) in ("yes", "no")
    tiny.complete("yes no yes no yes", **GREEDY, grammar_string=grammar, prompt_lookup_num_tokens=3)
    assert "RuntimeError" in tiny.wait_log("RuntimeError")  # called for candidates that are not taken


def test_a_full_prompt_is_cut_from_the_left(tiny: Webui) -> None:
    asked = {"prompt": "a" * 100 + "b" * 20, "truncation_length": 32, "echo": False, **GREEDY}
    assert tiny.post("/v1/completions", asked)["choices"][0]["finish_reason"] == "length"
    tail = {"prompt": "b" * 20, "truncation_length": 32, **GREEDY}
    assert tiny.complete(**asked) == tiny.complete(**tail)


def test_stop_strings_are_cut_and_streams_end(tiny: Webui) -> None:
    text = tiny.complete("Hello", **GREEDY)
    assert tiny.complete("Hello", **GREEDY, stop=[text[4:6]]) == text[: text.index(text[4:6])]
    events = list(tiny.stream("/v1/completions", {"prompt": "Hello", **GREEDY}))
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_tokens(tiny: Webui) -> None:
    assert tiny.post("/v1/internal/encode", {"text": "Hi"}) == {"tokens": [72, 105], "length": 2}
    assert tiny.post("/v1/internal/decode", {"tokens": [72, 105]}) == {"text": "Hi"}
    assert tiny.post("/v1/internal/token-count", {"text": "Hi"}) == {"length": 2}


def test_a_lora_is_a_400_where_peft_cannot_add_it(tiny: Webui) -> None:
    tiny.post("/v1/internal/lora/load", {"lora_names": ["missing"]}, status=400)
