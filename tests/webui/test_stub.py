"""What the stand-in has in common with text-generation-webui: its seams and its traps.

With ``$TEXTGEN_WEBUI`` the same tests run on the real one; that is what makes the stand-in worth testing on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from webui import folders
from webui.driver import Webui, WebuiEnded

pytestmark = pytest.mark.once

PROBE = Path(__file__).parent / "probe"
OURS = "llamacpp_HF"
GENERATE = {"use_cache", "eos_token_id", "logits_processor", "max_new_tokens", "do_sample", "top_k", "temperature"}


def notes(webui: Webui, event: str) -> list[dict[str, Any]]:
    file = webui.user_data / "probe.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [note for note in map(json.loads, lines) if note["event"] == event]


def write_extension(folder: Path, name: str, code: str) -> None:
    place = folder / "user_data" / "extensions" / name
    place.mkdir()
    (place / "script.py").write_text(code, encoding="utf-8")


@pytest.fixture(scope="module")
def without_page(start_webui_for_module: Callable[..., Webui], tmp_path_factory: Any, tiny_llama_path: Path) -> Webui:
    """Asked for a loader it does not know, with a broken extension before the probe."""
    folder = folders.make(tmp_path_factory.mktemp("webui") / "webui")
    folders.add_model(folder, tiny_llama_path, "tiny.gguf")
    folders.add_extension(folder, PROBE)
    write_extension(folder, "broken", "raise ValueError('broken on purpose')")
    flags = ("--nowebui", "--loader", OURS, "--model", "tiny.gguf", "--extensions", "broken", "probe")
    return start_webui_for_module(*flags, folder=folder)


@pytest.fixture(scope="module")
def probed(start_webui_for_module: Callable[..., Webui], tmp_path_factory: Any, tiny_llama_path: Path) -> Webui:
    """With a page, and the probe's own model in it."""
    folder = folders.make(tmp_path_factory.mktemp("webui") / "webui")
    folders.add_model(folder, tiny_llama_path, "tiny.gguf")
    folders.add_extension(folder, PROBE)
    (folder / "user_data" / "settings.yaml").write_text("probe-given: by settings.yaml\n", encoding="utf-8")
    return start_webui_for_module("--extensions", "probe", folder=folder)


def test_a_loader_nobody_knows_becomes_none_and_the_file_decides(without_page: Webui) -> None:
    seen = notes(without_page, "executed")[0]
    assert seen["asked"] == OURS
    assert seen["loader"] == without_page.info()["loader"] == "llama.cpp"


def test_the_model_is_loaded_before_extensions_are_known(without_page: Webui) -> None:
    assert notes(without_page, "executed")[0]["model"] == "tiny.gguf"


def test_the_command_line_says_which_options_were_given(without_page: Webui) -> None:
    assert {"loader", "model", "extensions"} <= set(notes(without_page, "setup")[0]["provided"])


def test_an_extension_that_fails_is_logged_and_left_out(without_page: Webui) -> None:
    assert "broken on purpose" in without_page.log()
    assert len(notes(without_page, "setup")) == 1


def test_a_loader_named_by_the_api_is_taken_as_it_is(without_page: Webui) -> None:
    without_page.load("tiny.gguf", status=500, loader=OURS)
    assert f"KeyError: '{OURS}'" in without_page.wait_log("KeyError")
    without_page.load("tiny.gguf")  # and must be named each time
    assert without_page.info()["loader"] == "llama.cpp"


def test_a_failed_load_without_an_exception_answers_200(without_page: Webui) -> None:
    assert without_page.load("tiny.gguf", loader="llama.cpp", model_draft="missing.gguf") == "OK"
    assert without_page.info()["model_name"] == "tiny.gguf"
    without_page.post("/v1/internal/encode", {"text": "nothing is loaded"}, status=500)


def test_a_model_that_is_not_there_is_a_500(without_page: Webui) -> None:
    without_page.load("missing.gguf", status=500)
    assert without_page.load("missing.gguf", loader="llama.cpp") == "OK"  # the loader finds out, and says so in the log


def test_an_unknown_option_ends_the_start(webui_folder: Path) -> None:
    (webui_folder / "user_data" / "CMD_FLAGS.txt").write_text("# no\n--n-sink 4\n", encoding="utf-8")
    with pytest.raises(WebuiEnded, match="unrecognized arguments: --n-sink"):
        Webui(webui_folder).start("--nowebui")


def test_our_name_in_the_saved_settings_ends_the_start(webui_folder: Path, tiny_llama_path: Path) -> None:
    folders.add_model(webui_folder, tiny_llama_path, "tiny.gguf")
    folders.add_extension(webui_folder, PROBE)
    saved = {"tiny.gguf$": {"loader": OURS}}
    (webui_folder / "user_data" / "models" / "config-user.yaml").write_text(yaml.dump(saved), encoding="utf-8")
    webui = Webui(webui_folder)
    with pytest.raises(WebuiEnded, match=f"KeyError: '{OURS}'"):
        webui.start("--nowebui", "--model", "tiny.gguf", "--extensions", "probe")
    assert not notes(webui, "executed")


def test_a_missing_package_of_an_extension_ends_the_start(webui_folder: Path) -> None:
    write_extension(webui_folder, "wanting", "import a_package_that_is_not_there")
    with pytest.raises(WebuiEnded, match="a_package_that_is_not_there"):
        Webui(webui_folder).start("--nowebui", "--extensions", "wanting")


def test_the_webuis_own_files_stay_as_they_are(probed: Webui, webui_folder: Path) -> None:
    probed.complete("Hello")
    assert folders.hashes(webui_folder).items() <= probed.hashes().items()


def test_settings_reach_the_parameters_of_an_extension(probed: Webui) -> None:
    assert notes(probed, "setup")[0]["given"] == "by settings.yaml"


def test_generate_gets_what_the_request_says(probed: Webui) -> None:
    options = {"penalty_alpha": 0.6, "guidance_scale": 1.5, "negative_prompt": "no", "prompt_lookup_num_tokens": 3}
    dropped = {"num_beams": 4, "assistant_model": "small", "draft_max": 8, "min_length": 5, "length_penalty": 2.0}
    probed.complete("Hello", max_tokens=7, temperature=0, seed=1, **options, **dropped)
    seen = notes(probed, "generate")[-1]
    assert set(seen) >= GENERATE
    assert (seen["penalty_alpha"], seen["guidance_scale"], seen["prompt_lookup_num_tokens"]) == (0.6, 1.5, 3)
    assert seen["negative_prompt_ids"] == "Tensor"
    assert (seen["do_sample"], seen["top_k"], seen["max_new_tokens"], seen["eos_token_id"]) == (False, 1, 7, [3])
    assert not set(dropped) & set(seen)


def test_a_request_samples_unless_it_says_otherwise(probed: Webui) -> None:
    probed.complete("Hello", max_tokens=7, penalty_alpha=0.6, top_k=4)
    assert notes(probed, "generate")[-1]["do_sample"] is True


def test_a_failing_generate_is_an_empty_answer(probed: Webui) -> None:
    assert probed.complete("FAIL") == ""
    assert "told to fail" in probed.wait_log("told to fail")


def test_a_stream_shows_whatever_a_criterion_is_called_with(probed: Webui) -> None:
    assert "#" not in probed.complete("REJECT")
    shown = "".join(event["choices"][0]["text"] for event in probed.stream("/v1/completions", {"prompt": "REJECT"}))
    assert "#" in shown
    assert "#" in probed.complete("REJECT", stop=["never said"])  # streamed inside, and so are all chats
    assert "#" in probed.chat("REJECT")


def test_two_threads_can_be_in_the_model(probed: Webui) -> None:
    assert probed.complete("SLOW", stop=["c"]) == "ab"
    probed.complete("Hello")
    assert notes(probed, "generate")[-1]["inside"] == 2


def test_chat_usage_counts_no_prompt_tokens(probed: Webui) -> None:
    answer = probed.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]})
    assert answer["usage"]["prompt_tokens"] == 0
    assert answer["usage"]["completion_tokens"] > 0


def test_bad_requests_are_json_errors(probed: Webui) -> None:
    error = probed.post("/v1/completions", {"prompt": "Hello", "max_tokens": -1}, status=400)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "max_tokens")
    probed.post("/v1/completions", {"prompt": "Hello", "max_tokens": "many"}, status=422)


def test_the_chat_page(probed: Webui, open_page: Any) -> None:
    page = open_page(probed)
    page.tab("Parameters")
    page.set("temperature", 0.5)
    page.set("do_sample", False)
    page.set("Negative prompt", "rude")
    first = page.send("Hello")
    assert first.startswith("answer ")
    seen = notes(probed, "generate")[-1]
    assert (seen["temperature"], seen["do_sample"], seen["negative_prompt_ids"]) == (0.5, False, "Tensor")
    second = page.regenerate()
    assert second.startswith("answer ") and second != first
    assert page.continue_().startswith(second + "answer ")
    page.send("SLOW", wait=False)
    stopped = page.stop()
    assert "abcdefghij" * 10 not in stopped
    assert len(page.replies()) == 2


def test_a_restart_executes_extensions_again(probed: Webui, open_page: Any) -> None:
    page = open_page(probed)
    before = len(notes(probed, "executed"))
    page.restart()
    assert len(notes(probed, "executed")) == len(notes(probed, "setup")) == before + 1
    page.tab("probe")
    page.page.get_by_text("The probe is here.").wait_for()
    assert probed.complete("Hello").startswith("answer ")  # the model is still there
    page.tab("Model")
    assert "llama.cpp" in page.options("Model loader")
    page.choose("Model loader", "llama.cpp")
    page.set("ctx-size", 2048)
    assert page.value("ctx-size") == "2048"
    page.unfold("Speculative decoding")
    assert page.is_shown("draft-max")


def test_choosing_a_model_changes_the_arguments_of_the_one_that_is_loaded(probed: Webui, open_page: Any) -> None:
    open_page(probed).choose_model("tiny.gguf")
    probed.complete("Hello")
    assert isinstance(notes(probed, "generate")[-1]["gpu_layers"], dict)  # and not to a number, but to a change of its slider


def test_unloading_asks_only_the_webuis_own_classes_to_free_anything(probed: Webui) -> None:
    probed.complete("Hello")
    probed.post("/v1/internal/model/unload")
    assert probed.info()["model_name"] == "None"
    assert not notes(probed, "unload")


def test_choosing_a_model_flips_the_loader_and_saving_writes_its_name(probed: Webui, open_page: Any) -> None:
    page = open_page(probed)
    page.tab("Model")
    page.choose("Model loader", "Transformers")
    assert not page.is_shown("streaming-llm")
    page.choose_model("tiny.gguf")
    assert page.value("Model loader") == "llama.cpp"
    assert page.is_shown("streaming-llm")
    page.save_settings()
    saved = yaml.safe_load((probed.user_data / "models" / "config-user.yaml").read_text(encoding="utf-8"))
    assert saved["tiny.gguf$"]["loader"] == "llama.cpp"
    assert "tiny.gguf" in page.load()  # which upstream's own llama.cpp can only where its programs are installed
    assert page.unload() == "Model unloaded"


def test_without_a_model_the_chat_says_so(probed: Webui, open_page: Any) -> None:
    probed.post("/v1/internal/model/unload")
    page = open_page(probed)
    page.send_only("Hello")
    assert "no model" in page.toast().lower()
