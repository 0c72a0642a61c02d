"""The loader and its tab, in a browser."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from webui import folders
from webui.driver import Webui
from webui.page import Page
from webui.test_loader import FLAGS, GREEDY, PROMPT, Stats, make_folder

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def webui(
    start_webui_for_module: Callable[..., Webui], tmp_path_factory: pytest.TempPathFactory,
    smollm2_f32_path: Path, smollm2_q4_0_path: Path, tiny_llama_path: Path,
) -> Webui:  # fmt: skip
    models = (smollm2_f32_path, smollm2_q4_0_path, tiny_llama_path)
    folder = make_folder(tmp_path_factory.mktemp("panel") / "webui", *models)
    whole = tiny_llama_path.read_bytes()
    (folder / "user_data" / "models" / "broken.gguf").write_bytes(whole[: len(whole) * 2 // 3])
    (folder / "user_data" / "settings.yaml").write_text("auto_max_new_tokens: false\nmax_new_tokens: 40\n", encoding="utf-8")
    return start_webui_for_module(*FLAGS, folder=folder)


@pytest.fixture
def page(open_page: Callable[[Webui], Page], webui: Webui) -> Page:
    return settled(open_page(webui))


def settled(page: Page) -> Page:
    """What the page is told when it is opened would overwrite what is chosen before that. It need not be a loader."""
    page.tab("Model")
    end = time.monotonic() + 3
    while not page.value("Model loader") and time.monotonic() < end:
        page.page.wait_for_timeout(50)
    page.page.wait_for_timeout(300)
    return page


@pytest.fixture
def loaded(page: Page, smollm2_q4_0_path: Path) -> Page:
    if page.webui.info()["model_name"] != smollm2_q4_0_path.name:
        page.choose_model(smollm2_q4_0_path.name, "llamacpp_HF")
        page.set("ctx-size", 2048)
        assert "success" in page.load().lower()
    return page


def panel(page: Page, **values: object) -> None:
    """Sets controls of the tab by their labels."""
    page.extension()
    page.press("Defaults")
    page.page.wait_for_timeout(800)
    for label, value in values.items():
        page.set(label.replace("_", " "), value)


def message(page: Page, text: str) -> None:
    """The tab answers with it."""
    page.page.get_by_text(text).locator("visible=true").first.wait_for()


def test_load_from_the_page(page: Page, smollm2_q4_0_path: Path) -> None:
    page.tab("Model")
    assert "llamacpp_HF" in page.options("Model loader")
    page.choose_model(smollm2_q4_0_path.name, "llamacpp_HF")
    for label in ("gpu-layers", "ctx-size", "cache-type", "streaming-llm"):
        assert page.is_shown(label), label
    page.set("ctx-size", 2048)
    assert "success" in page.load().lower()
    assert page.value("Model loader") == "llamacpp_HF"
    assert "2048 tokens" in " ".join(page.webui.log().split())


def test_another_model_keeps_the_loader(loaded: Page, tiny_llama_path: Path, smollm2_q4_0_path: Path) -> None:
    page = loaded
    page.choose_model(smollm2_q4_0_path.name, "llamacpp_HF")
    page.choose_model(tiny_llama_path.name)
    assert page.value("Model loader") == "llamacpp_HF"
    assert "success" in page.load().lower()
    assert "unloaded" in page.unload().lower()
    assert page.webui.info()["model_name"] == "None"


def test_a_load_that_fails_is_one_message(page: Page) -> None:
    page.choose_model("broken.gguf")
    page.choose("Model loader", "llamacpp_HF")
    status = page.load()
    assert "broken.gguf could not be loaded with llamacpp_HF" in status and "Traceback" not in status


def test_chat_regenerate_continue(loaded: Page) -> None:
    """Told by the statistics: an answer may come faster than the page draws the question."""
    page, stats = loaded, Stats(loaded.webui)
    page.send_only("Name three rivers.")
    assert stats.next()["new"] > 1
    page.page.wait_for_timeout(1500)
    page.click_id("Regenerate")
    again = stats.next()
    assert again["reused"] == again["prompt"] - 1 and again["new"] > 1
    page.page.wait_for_timeout(1500)
    page.click_id("Continue")
    on = stats.next()
    assert on["reused"] >= again["prompt"] - 1 and on["prompt"] > again["prompt"]


def test_stop_while_the_prompt_is_read(loaded: Page, smollm2_f32_path: Path, smollm2_q4_0_path: Path) -> None:
    page, stats = loaded, Stats(loaded.webui)
    page.choose_model(smollm2_f32_path.name, "llamacpp_HF")
    page.set("ctx-size", 4096)
    assert "success" in page.load().lower()
    page.send_only(" ".join(str(number) for number in range(10000, 10400)))
    page.page.wait_for_timeout(700)
    page.click_id("stop")
    seen = stats.next()
    assert seen["new"] == 0 and seen["tokens"] < 2000
    page.choose_model(smollm2_q4_0_path.name, "llamacpp_HF")
    page.set("ctx-size", 2048)
    assert "success" in page.load().lower()


@pytest.mark.parametrize(
    ("values", "check"),
    [
        ({"Contrastive_search": True}, lambda s: s["tokens"] >= 4 * (s["decodes"] - 2)),
        ({"Guidance_scale": 1.5, "Negative_prompt": "Be boring."}, lambda s: s["tokens"] >= 2 * (s["decodes"] - 2)),
        ({"Speculative_decoding": "prompt lookup"}, lambda s: s["drafted"] > 0),
        ({"Beams": 3}, lambda s: s["tokens"] >= 2 * s["new"]),
    ],
    ids=["contrastive", "guidance", "lookup", "beams"],
)  # fmt: skip
def test_what_the_panel_sets_holds_for_page_and_api(
    loaded: Page, values: dict[str, object], check: Callable[[dict[str, int]], bool]
) -> None:
    page = loaded
    panel(page)
    if "Speculative_decoding" in values:
        page.page.get_by_role("radio", name=str(values["Speculative_decoding"]), exact=True).check()
        page.page.wait_for_timeout(800)
    else:
        if "Beams" in values:
            page.page.get_by_text("Beams and more").click()
        for label, value in values.items():
            page.set(label.replace("_", " "), value)
    stats = Stats(page.webui)
    page.webui.complete("One two three four one two three four one two", **GREEDY)
    assert check(stats.next())
    page.send_only("Say one two three one two three one two three.")
    assert check(stats.next())
    page.page.wait_for_timeout(1000)
    panel(page)
    page.webui.complete(PROMPT, **GREEDY)
    plain = stats.next()
    assert plain["drafted"] == 0 and plain["tokens"] <= plain["prompt"] + plain["new"]


def test_settings_are_saved_and_come_back(loaded: Page) -> None:
    page = loaded
    panel(page, Alpha=0.3)
    page.press("Save settings")
    message(page, "Saved to")
    saved = page.webui.user_data / "llamacpp_hf" / "settings.json"
    assert json.loads(saved.read_text(encoding="utf-8")) == {"penalty_alpha": 0.3}
    page.set("Alpha", 0.9)
    page.press("Undo changes")
    page.page.wait_for_timeout(800)
    assert page.value("Alpha") == "0.3"
    page.restart()
    page.extension()
    assert page.value("Alpha") == "0.3"
    panel(page)
    page.press("Save settings")
    message(page, "Saved to")
    assert json.loads(saved.read_text(encoding="utf-8")) == {}


def test_a_wrong_draft_model_is_told_and_not_taken(loaded: Page) -> None:
    page = loaded
    panel(page)
    page.choose("Draft model", "broken.gguf")
    message(page, "Draft model stays")
    stats = Stats(page.webui)
    assert page.webui.complete(PROMPT, **GREEDY) and stats.next()["drafted"] == 0


def test_the_status_lives(loaded: Page) -> None:
    page = loaded
    panel(page)
    page.webui.complete(PROMPT, **GREEDY, prompt_lookup_num_tokens=4)
    page.page.get_by_text(re.compile(r"16 tokens, [\d.]+ tokens/s")).locator("visible=true").first.wait_for(timeout=10_000)
    page.press("Reload model")
    message(page, "Loaded.")
    page.page.get_by_text("0 known texts").locator("visible=true").first.wait_for(timeout=10_000)


def test_a_saved_choice_survives_and_a_plain_start_too(
    webui_folder: Path, start_webui: Callable[..., Webui], open_page: Callable[[Webui], Page], tiny_llama_path: Path
) -> None:
    """What "Save settings" writes must not kill a webui without the extension."""
    folders.install(webui_folder)
    name = folders.add_model(webui_folder, tiny_llama_path)
    webui = start_webui(*FLAGS, folder=webui_folder)
    page = settled(open_page(webui))
    page.choose_model(name, "llamacpp_HF")
    page.set("ctx-size", 1024)
    assert "saved" in page.save_settings().lower()
    written = (webui.user_data / "models" / "config-user.yaml").read_text(encoding="utf-8")
    assert "llamacpp_HF" not in written and "ctx_size: 1024" in written
    page.open()
    settled(page).choose_model(name)
    assert page.value("Model loader") == "llamacpp_HF" and page.value("ctx-size") == "1024"
    page.restart()
    settled(page).choose_model(name)
    assert "success" in page.load().lower()
    page.tab("Parameters")
    assert "llamacpp_HF" in page.options("Filter by loader")
    webui.stop()
    plain = start_webui("--nowebui", "--model", name, folder=webui_folder)
    assert plain.info()
    plain.stop()
    again = start_webui(*FLAGS, "--nowebui", "--model", name, folder=webui_folder)
    end = time.monotonic() + 20
    while "1024 tokens" not in " ".join(again.log().split()):
        assert time.monotonic() < end, again.log()[-2000:]
        time.sleep(0.1)
