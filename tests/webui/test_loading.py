"""The webui's flags as options of the model, and the arguments of a call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from transformers_llamacpp import LlamaCppConfig
from transformers_llamacpp.errors import InvalidInputError, OptionError
from transformers_llamacpp.webui.arguments import plan_call, resting
from transformers_llamacpp.webui.loading import draft_options, load_options, wanted_draft
from transformers_llamacpp.webui.panel import SECTIONS, control, from_control
from transformers_llamacpp.webui.settings import Settings, panel_options

pytestmark = pytest.mark.once

FLAGS = {
    "ctx_size": 0, "gpu_layers": -1, "threads": 0, "threads_batch": 0, "batch_size": 1024, "ubatch_size": 1024,
    "cache_type": "fp16", "tensor_split": None, "split_mode": "layer", "no_kv_offload": False, "no_mmap": False,
    "mlock": False, "numa": False, "cfg_cache": False, "streaming_llm": False, "model_draft": None, "draft_max": 4,
    "gpu_layers_draft": 256, "ctx_size_draft": 0,
}  # fmt: skip
"""As the webui's command line leaves them."""

GIVEN: dict[str, Any] = {
    "penalty_alpha": 0, "guidance_scale": 1, "do_sample": True, "top_k": 0, "sampler_priority": ["temperature", "top_k"],
}  # fmt: skip
"""What every request carries."""


def flags(**values: Any) -> SimpleNamespace:
    return SimpleNamespace(**(FLAGS | values))


def options(n_ctx_train: int = 32768, **values: Any) -> dict[str, Any]:
    found = load_options(flags(**values), n_ctx_train)
    LlamaCppConfig(**found)  # all of it are options of the installed llama.cpp
    return found


def test_flags_nobody_set() -> None:
    assert options() == {"n_ctx": 8192, "n_gpu_layers": -1, "n_batch": 1024, "n_ubatch": 1024}
    assert options(n_ctx_train=2048)["n_ctx"] == 2048
    assert options(n_ctx_train=2048, ctx_size=4096)["n_ctx"] == 4096


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"gpu_layers": 12}, {"n_gpu_layers": 12}),
        ({"threads": 3, "threads_batch": 5}, {"n_threads": 3, "n_threads_batch": 5}),
        ({"batch_size": 256, "ubatch_size": 1024}, {"n_batch": 256, "n_ubatch": 256}),
        ({"tensor_split": "60,40"}, {"tensor_split": [60.0, 40.0]} ),
        ({"split_mode": "row"}, {"split_mode": 2}),
        ({"split_mode": "none"}, {"split_mode": 0}),
        ({"no_kv_offload": True}, {"offload_kqv": False}),
        ({"no_mmap": True}, {"use_mmap": False}),
        ({"mlock": True}, {"use_mlock": True}),
        ({"numa": True}, {"numa": True}),
        ({"cfg_cache": True, "ctx_size": 1024}, {"n_cells": 2048}),
        ({"streaming_llm": True}, {"n_sink": 4, "reuse_min_chunk": 32}),
        ({"cache_type": "q8_0"}, {"type_k": "q8_0", "type_v": "q8_0"}),
        ({"cache_type": "q8_0/q4_0"}, {"type_k": "q8_0", "type_v": "q4_0"}),
        ({"cache_type": "Q8_0, q5_1"}, {"type_k": "q8_0", "type_v": "q5_1"}),
        ({"cache_type": "q8_0_q4_0"}, {"type_k": "q8_0", "type_v": "q4_0"}),
        ({"cache_type": "q8_q4"}, {"type_k": "q8_0", "type_v": "q4_0"}),
        ({"cache_type": "fp16/iq4_nl"}, {"type_k": "f16", "type_v": "iq4_nl"}),
    ],
)  # fmt: skip
def test_a_flag_is_an_option(given: dict[str, Any], expected: dict[str, Any]) -> None:
    if "tensor_split" in given:  # a build without a GPU knows one device
        found = load_options(flags(**given), 0)
    else:
        found = options(**given)
    assert expected.items() <= found.items()


@pytest.mark.parametrize(
    ("flag", "value"),
    [("cache_type", "fp8"), ("cache_type", "q8_0/q4_0/q4_0"), ("split_mode", "rows"), ("tensor_split", "a,b"),
     ("ctx_size", -1), ("ctx_size", "many"), ("threads", 1.5), ("gpu_layers", True)],
)  # fmt: skip
def test_a_wrong_flag_is_named(flag: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        load_options(flags(**{flag: value}), 0)
    assert flag in str(caught.value) and caught.value.option == flag


def test_the_panel_wins_over_what_a_flag_implies() -> None:
    found = load_options(flags(streaming_llm=True), 0, {"n_sink": 16, "lora_path": ""})
    assert found["n_sink"] == 16 and found["reuse_min_chunk"] == 32 and "lora_path" not in found


def test_the_draft_model_has_flags_of_its_own() -> None:
    assert [wanted_draft(flags(model_draft=name)) for name in (None, "", "None", "a.gguf")] == ["", "", "", "a.gguf"]
    found = draft_options(flags(gpu_layers_draft=256, cache_type="q8_0"), 4096)
    assert found["n_gpu_layers"] == -1 and found["n_ctx"] == 4096 and found["type_k"] == "q8_0"
    found = draft_options(flags(gpu_layers_draft=3, ctx_size_draft=512, cfg_cache=True, streaming_llm=True), 4096)
    assert found["n_gpu_layers"] == 3 and found["n_ctx"] == 512 and not found.keys() & {"n_cells", "n_sink"}


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_are_checked_kept_and_read_again(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "folder" / "settings.json"
    settings = Settings(file)
    assert {entry.name: settings[entry.name] for entry in panel_options()} == {e.name: e.default for e in panel_options()}
    settings.set(contrastive_search=True, contrastive_k=6.0)
    with pytest.raises(OptionError, match="penalty_alpha=2"):
        settings.set(num_beams=4, penalty_alpha=2.0)
    assert settings.changed() == {"contrastive_search": True, "contrastive_k": 6}
    settings.save()
    settings.reset()
    assert settings.changed() == {}
    settings.revert()
    assert settings.changed() == Settings(file).changed() == {"contrastive_search": True, "contrastive_k": 6}
    file.write_text('{"contrastive_k": 1, "unheard_of": 2, "num_beams": 3}', encoding="utf-8")
    assert Settings(file).changed() == {"num_beams": 3}
    assert "contrastive_k=1" in caplog.text and "unheard_of" in caplog.text
    file.write_text("[]", encoding="utf-8")
    assert Settings(file).changed() == {} and "cannot be read" in caplog.text


def test_every_setting_has_a_control_and_comes_back_from_it() -> None:
    entries = [entry for section in SECTIONS for entry in section.options]
    assert {entry.name for entry in entries} == {entry.name for entry in panel_options()}
    for entry in entries:
        made = control(entry, entry.default)
        assert made["info"] == entry.help and entry.label in made["label"]
        back = from_control(entry, made["value"])
        assert back == entry.default, entry.name


# -- calls -------------------------------------------------------------------------------------------------------------


def plan(given: dict[str, Any] | None = None, entries: tuple[str, ...] = (), **panel: Any) -> Any:
    settings = Settings()
    settings.set(**panel)
    arguments = GIVEN | (given or {})
    return plan_call(arguments | {"sampler_priority": [*arguments["sampler_priority"], *entries]}, settings.call())


def test_a_panel_nobody_touched_changes_nothing() -> None:
    found = plan()
    assert {name: found.arguments[name] for name in GIVEN} == GIVEN
    assert found.arguments.keys() - GIVEN.keys() == {"assistant_confidence_threshold"}
    assert found.use_assistant and found.draft_model == "" and found.streams


def test_contrastive_search_really_triggers() -> None:
    wanted = {"penalty_alpha": 0.6, "top_k": 4, "do_sample": False}
    assert wanted.items() <= plan(contrastive_search=True).arguments.items()
    assert wanted.items() <= plan({"top_k": 1}, contrastive_search=True).arguments.items()
    assert wanted.items() <= plan(entries=("contrastive_search=on",)).arguments.items()
    found = plan(entries=("penalty_alpha=0.3", "contrastive_k=7")).arguments
    assert (found["penalty_alpha"], found["top_k"], found["do_sample"]) == (0.3, 7, False)
    own = {"penalty_alpha": 0.4, "top_k": 8, "do_sample": False}
    assert own.items() <= plan(own, contrastive_search=True, contrastive_k=3).arguments.items()
    assert not plan(own, entries=("contrastive_search=off",)).arguments["penalty_alpha"]


def test_guidance_of_the_request_wins() -> None:
    found = plan(guidance_scale=2.0, negative_prompt="no")
    assert found.arguments["guidance_scale"] == 2.0 and found.negative_prompt == "no"
    found = plan({"guidance_scale": 1.3, "negative_prompt_ids": "ids"}, guidance_scale=2.0, negative_prompt="no")
    assert found.arguments["guidance_scale"] == 1.3 and found.negative_prompt == ""
    found = plan({"guidance_scale": 1.3}, entries=("guidance_scale=3", "negative_prompt=a = b"))
    assert found.arguments["guidance_scale"] == 3.0 and found.negative_prompt == "a = b"
    assert plan(negative_prompt="no").negative_prompt == ""


def test_speculation() -> None:
    found = plan(speculation="both", num_assistant_tokens=6, draft_model="d.gguf")
    assert (found.arguments["prompt_lookup_num_tokens"], found.arguments["num_assistant_tokens"]) == (6, 6)
    assert found.use_assistant and found.draft_model == "d.gguf"
    assert plan(speculation="prompt lookup").arguments["prompt_lookup_num_tokens"] == 10
    assert not plan(speculation="off").use_assistant
    assert plan({"prompt_lookup_num_tokens": 3}, speculation="off").arguments["prompt_lookup_num_tokens"] == 3
    found = plan({"prompt_lookup_num_tokens": 3}, entries=("speculation=off",))
    assert "prompt_lookup_num_tokens" not in found.arguments and not found.use_assistant
    found = plan(entries=("draft_model=x.gguf",), speculation="off")
    assert found.use_assistant and found.draft_model == "x.gguf"


def test_one_way_of_writing_at_a_time() -> None:
    found = plan(contrastive_search=True, num_beams=4, speculation="both")
    assert found.modes == ["contrastive"] and not found.use_assistant and "num_beams" not in found.arguments
    found = plan({"prompt_lookup_num_tokens": 3}, contrastive_search=True, num_beams=4)
    assert found.modes == ["speculation"] and found.arguments["penalty_alpha"] == 0
    found = plan(entries=("num_beams=2", "length_penalty=0.5"), contrastive_search=True)
    assert found.modes == ["beams"] and not found.streams
    assert (found.arguments["num_beams"], found.arguments["length_penalty"]) == (2, 0.5)
    assert plan(entries=("num_beams=1",), num_beams=4).modes == ["speculation"]
    with pytest.raises(InvalidInputError, match="beam search and speculation"):  # none is dropped in silence
        plan({"prompt_lookup_num_tokens": 3}, entries=("num_beams=2",))
    assert plan({"penalty_alpha": 0.5, "do_sample": False, "top_k": 1}).arguments["top_k"] == 4  # as temperature 0 sends it
    settings = Settings()
    assert resting(settings.call()) == ""
    settings.set(contrastive_search=True, num_beams=2)
    assert resting(settings.call()) == "Contrastive search is on; meanwhile beam search and speculation rest."


def test_entries_of_a_request() -> None:
    found = plan(entries=("min_new_tokens=5", "dola_layers=high", "early_stopping=yes"))
    assert found.arguments["sampler_priority"] == GIVEN["sampler_priority"]
    assert (found.arguments["min_new_tokens"], found.arguments["dola_layers"]) == (5, "high")
    only = plan_call(GIVEN | {"sampler_priority": ["num_beams=2"]}, Settings().call())
    assert "sampler_priority" not in only.arguments and only.arguments["num_beams"] == 2
    for entry, told in (("num_beam=2", "num_beams"), ("num_beams=two", "no number"), ("num_beams=99", "maximum 32"),
                        ("early_stopping=perhaps", "yes or no"), ("dola_layers=up", "off, low, high")):  # fmt: skip
        with pytest.raises(OptionError, match=told):
            plan(entries=(entry,))
