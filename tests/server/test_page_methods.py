"""From controls to a request: each method sends what it reads, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from transformers_llamacpp.errors import OptionError
from transformers_llamacpp.options import OPTIONS
from transformers_llamacpp.server.page.controls import shown_value, value_of
from transformers_llamacpp.server.page.load import LOAD_OPTIONS, load_options
from transformers_llamacpp.server.page.methods import CALL_OPTIONS, METHODS, checked, notes, request_fields, shown
from transformers_llamacpp.server.page.writing import as_request

pytestmark = pytest.mark.once


def fields(**values: Any) -> dict[str, Any]:
    return request_fields(values, {"small.gguf": ""})


def test_every_control_is_an_option_of_the_table_with_a_help_of_its_own() -> None:
    assert set(CALL_OPTIONS) | set(LOAD_OPTIONS) <= set(OPTIONS)
    assert all(entry.help and entry.label for entry in OPTIONS)
    names = [entry.name for entry in OPTIONS]
    assert len(names) == len(set(names)) and len({entry.help for entry in OPTIONS}) == len(names)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_sends_only_what_its_controls_say(method: str) -> None:
    allowed = {entry.name for group in shown(method) for entry in group.options} | {"max_tokens", "do_sample"}
    allowed |= {"assistant_model", "prompt_lookup_num_tokens", "top_k"}
    # every control is set to something else than its default, those of other methods too
    values = {entry.name: _other(entry) for entry in CALL_OPTIONS} | {"method": method, "draft_model": "small.gguf"}
    for dola in ("off", "low"):
        sent = fields(**values | {"dola_layers": dola})
        assert sent.keys() <= allowed, sent.keys() - allowed
        as_request("completion", {"prompt": "x", **sent})  # a request the API takes


def _other(entry: Any) -> Any:
    if entry.kind is bool:
        return not entry.default
    if entry.choices:
        return next(choice for choice in entry.choices if choice != entry.default)
    if entry.kind is str:
        return "x"
    return entry.kind(entry.maximum if entry.maximum is not None and entry.maximum < 100 else entry.default + 1)


def test_sampling() -> None:
    assert fields() == {
        "max_tokens": 512, "temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05, "assistant_confidence_threshold": 0.4,
    }  # fmt: skip
    sent = fields(temperature=0.0, seed=7.0, typical_p=0.9, repetition_penalty=1.1)
    assert sent["seed"] == 7 and sent["typical_p"] == 0.9 and sent["repetition_penalty"] == 1.1
    assert "do_sample" not in sent, "a temperature of 0 is greedy, which the API finds out itself"


def test_methods() -> None:
    greedy = fields(method="greedy", temperature=1.5)
    assert greedy["do_sample"] is False and "temperature" not in greedy
    contrastive = fields(method="contrastive", contrastive_k=6, penalty_alpha=0.5)
    assert contrastive == {"max_tokens": 512, "penalty_alpha": 0.5, "top_k": 6, "do_sample": False, "assistant_model": False}
    beams = fields(method="beams", num_beams=6, num_beam_groups=2, diversity_penalty=0.5, early_stopping=True)
    assert beams["num_beams"] == 6 and beams["num_beam_groups"] == 2 and beams["diversity_penalty"] == 0.5
    assert "diversity_penalty" not in fields(method="beams", diversity_penalty=0.5), "without groups there is none"
    assert fields(method="beams")["num_beams"] == 4


def test_guidance() -> None:
    assert fields(guidance_scale=1.5, negative_prompt="no")["negative_prompt"] == "no"
    assert "negative_prompt" not in fields(negative_prompt="no")
    assert fields(method="beams", guidance_scale=1.5)["guidance_scale"] == 1.5


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"speculation": "off"}, {"assistant_model": False}),
        ({"speculation": "prompt lookup"}, {"assistant_model": False, "prompt_lookup_num_tokens": 10}),
        ({"speculation": "prompt lookup", "num_assistant_tokens": 4},
         {"assistant_model": False, "prompt_lookup_num_tokens": 4}),
        ({"speculation": "draft model", "draft_model": "small.gguf", "num_assistant_tokens": 3},
         {"assistant_model": "small.gguf", "num_assistant_tokens": 3, "assistant_confidence_threshold": 0.4}),
        ({"speculation": "both", "draft_model": "small.gguf"},
         {"assistant_model": "small.gguf", "prompt_lookup_num_tokens": 10, "assistant_confidence_threshold": 0.4}),
        ({"speculation": "both", "dola_layers": "high"}, {"assistant_model": False, "dola_layers": "high"}),
    ],
)  # fmt: skip
def test_speculation(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert fields(method="greedy", **values) == {"max_tokens": 512, "do_sample": False, **expected}


def test_a_draft_model_that_is_gone() -> None:
    with pytest.raises(OptionError, match=r"gone\.gguf"):
        fields(draft_model="gone.gguf")


def test_stop_strings_are_lines() -> None:
    assert fields(stop="\n\nEND\n  two words")["stop"] == ["END", "  two words"]


@pytest.mark.parametrize(("name", "value"), [("temperature", 9), ("top_k", -1), ("method", "guess"), ("seed", "x")])
def test_values_outside_their_range(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        checked({name: value})


def test_notes() -> None:
    def said(has_draft: bool = False, n_sink: int | None = None, **values: Any) -> str:
        return " ".join(notes(checked(values), has_draft, n_sink))

    assert "nothing is drafted" in said() and said(has_draft=True) == ""
    assert "only the text itself drafts" in said(speculation="both")
    assert "speculation rests" in said(dola_layers="low")
    assert "rests while the guidance scale is 1" in said(negative_prompt="x", has_draft=True)
    assert "do not divide" in said(method="beams", num_beams=4, num_beam_groups=3)
    assert "greedy" in said(method="beams", num_beams=1)
    assert "do not slide" in said(method="contrastive", n_sink=4) and said(method="contrastive") == ""


@pytest.mark.parametrize("entry", [*CALL_OPTIONS, *LOAD_OPTIONS], ids=lambda entry: entry.name)
def test_a_control_gives_back_what_it_shows(entry: Any) -> None:
    assert value_of(entry, shown_value(entry, entry.default)) == entry.default
    assert value_of(entry, None) == entry.default
    if entry.kind is bool and entry.default is None:
        assert value_of(entry, shown_value(entry, False)) is False


def test_options_of_a_load() -> None:
    options = load_options({"n_ctx": 512.0, "flash_attn": None, "n_sink": 4})
    assert options["n_ctx"] == 512 and options["flash_attn"] is None and options["n_sink"] == 4 and options["type_k"] == "f16"
    with pytest.raises(OptionError, match="n_batch"):
        load_options({"n_batch": 0})
    assert not {"state_dir", "lora_path", "verbose"} & options.keys(), "files and logs are who started the server's"
