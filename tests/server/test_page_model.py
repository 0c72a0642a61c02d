"""The page in a real browser: models that are loaded, unloaded and fetched, and a page behind a key."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import api_server
import fake_hub
from page_tab import Tab
from transformers_llamacpp.server.host import ModelHost
from transformers_llamacpp.server.limits import ServeOptions

pytestmark = [pytest.mark.once, pytest.mark.timeout(600)]

KEY = "a key of many words"


@pytest.fixture
def model_tab(tab: Tab) -> Tab:
    tab.go("model")
    return tab


@pytest.fixture
def good(host: ModelHost) -> Iterator[str]:
    """The model that is there before and after."""
    name, options = host.name, dict(host.options)
    yield name
    if host.name != name or host.options != options:
        host.load(name, options)


def load(tab: Tab, name: str) -> str:
    """What the page says of it."""
    tab.page.evaluate("document.querySelectorAll('#load-status .note').forEach((one) => one.remove())")
    tab.pick("#file", name)
    tab.click("#load")
    tab.until(lambda: tab.page.locator("#load-status .good, #load-status .bad").count())
    return str(tab.page.inner_text("#load-status"))


@pytest.mark.parametrize(("file", "message"), [("notes.gguf", "not a GGUF file"), ("broken.gguf", "cannot load")])
def test_a_bad_model_file_says_so(model_tab: Tab, host: ModelHost, good: str, file: str, message: str) -> None:
    tab = model_tab
    assert message in load(tab, file)
    if file == "notes.gguf":
        assert host.name == good, "a file that is no model at all costs nothing"
    else:
        tab.until(lambda: "no model" in tab.page.inner_text("#badge"))
        tab.go("chat")
        tab.send("Hello")
        tab.until(lambda: message in tab.status)
        tab.wait_idle()
        assert tab.page.input_value("#prompt textarea") == "Hello" and not tab.shown
        tab.go("model")
    assert "Loaded in" in load(tab, good)
    tab.go("chat")
    tab.set_number("max_new_tokens", 3)
    assert tab.say("Hello")


def test_memory_is_told_before_loading(model_tab: Tab, good: str) -> None:
    tab = model_tab

    def cells() -> float:
        return float(re.search(r"KV cells ([\d.,]+) MiB", tab.page.inner_text("#estimate"))[1].replace(",", ""))  # type: ignore[index]

    tab.pick("#file", good)
    tab.until(lambda: "trained for 8,192 tokens" in tab.page.inner_text("#facts"))
    before = cells()
    tab.page.fill("#option-n_ctx input", "8192")
    tab.page.press("#option-n_ctx input", "Tab")
    tab.until(lambda: cells() == 2 * before)
    tab.pick("#load-draft", good)
    tab.until(lambda: "draft model" in tab.page.inner_text("#estimate"))
    tab.pick("#file", "notes.gguf")
    tab.until(lambda: tab.page.locator("#estimate [role=alert]").count())


def test_a_load_with_options_and_a_draft_model_and_an_unload(model_tab: Tab, host: ModelHost, good: str) -> None:
    tab, page = model_tab, model_tab.page
    tab.pick("#load-draft", good)
    page.fill("#option-n_ctx input", "512")
    tab.click("button.label-wrap:has-text('Streaming context')")
    page.fill("#option-n_sink input", "4")
    page.press("#option-n_sink input", "Tab")
    assert "Loaded in" in load(tab, good)
    assert host.options["n_ctx"] == 512 and host.options["n_sink"] == 4 and host.model.assistant_model is not None
    tab.go("chat")
    tab.until(lambda: "the first 4 tokens stay" in page.inner_text("#context-line"))
    tab.method("greedy")
    tab.set_number("max_new_tokens", 12)
    tab.say("Count from one to ten.")
    assert "drafted accepted" in tab.status
    tab.go("model")
    tab.click("#unload")
    tab.until(lambda: "its memory is free" in page.inner_text("#load-status") and "no model" in page.inner_text("#badge"))
    assert host.model is None


def test_another_tab_sees_what_happened(open_tab: Callable[..., Tab], host: ModelHost, good: str) -> None:
    tab = open_tab()
    tab.until(lambda: good.removesuffix(".gguf") in tab.page.inner_text("#badge"))
    host.unload()
    tab.until(lambda: "no model" in tab.page.inner_text("#badge"), 20)


def test_a_model_comes_from_the_hub(
    model_tab: Tab, host: ModelHost, good: str, page: Any, tiny_llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    tab = model_tab

    def ask(repo: str) -> None:
        tab.page.fill("#hub-repo textarea, #hub-repo input", repo)
        tab.click("#hub-list")

    ask("owner/Tiny-GGUF")
    tab.until(lambda: "HF_HUB_OFFLINE" in tab.page.inner_text("#hub-status"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    files = {"tiny.gguf": tiny_llama_path.read_bytes(), "big.gguf": b"GGUF" + os.urandom(30 << 20)}
    with fake_hub.running({"owner/Tiny-GGUF": files}, pause=0.01) as address:
        monkeypatch.setattr(page.model.hub, "_endpoint", address)
        ask("owner/Nothing")
        tab.until(lambda: "no repository owner/Nothing" in tab.page.inner_text("#hub-status"))
        ask("owner/Tiny-GGUF")
        tab.until(lambda: tab.page.is_enabled("#hub-fetch"))
        tab.pick("#hub-file", "big.gguf (30 MiB)")
        tab.click("#hub-fetch")
        tab.until(lambda: re.search(r"Downloading [\d,]+ of 30 MiB", tab.page.inner_text("#hub-status")))
        assert tab.page.locator("#hub-status progress").count() == 1
        tab.click("#hub-stop")
        tab.until(lambda: "the download was stopped" in tab.page.inner_text("#hub-status"))
        tab.pick("#hub-file", "tiny.gguf (1 MiB)")
        tab.click("#hub-fetch")
        tab.until(lambda: "is in the model folder" in tab.page.inner_text("#hub-status"))
    assert tab.page.input_value("#file input") == "owner/Tiny-GGUF/tiny.gguf"
    tab.click("#load")
    tab.until(lambda: host.name == "owner/Tiny-GGUF/tiny.gguf")
    tab.go("completion")
    tab.page.fill("#raw textarea", "hello")
    tab.set_number("max_new_tokens", 4)
    with tab.finishing("#raw-status"):
        tab.click("#raw-run")
    assert "tokens/s" in tab.page.inner_text("#raw-status")


def test_the_page_behind_a_key(browser: Any, host: ModelHost, data_dir: Path, good: str) -> None:
    with api_server.running(host, ServeOptions(api_key=KEY, data_dir=data_dir)) as api:
        for credentials in (None, {"username": "", "password": "wrong"}):
            stranger = browser.new_context(http_credentials=credentials)
            answer = stranger.request.get(api.url)
            assert answer.status == 401 and "Basic" in answer.headers["www-authenticate"], "the browser asks for a password"
            stranger.close()
        friend = browser.new_context(
            viewport={"width": 1280, "height": 800}, http_credentials={"username": "anybody", "password": KEY}
        )
        tab = Tab(friend.new_page(), api.url)
        tab.set_number("max_new_tokens", 5)
        assert tab.say("Hello") and "5 tokens" in tab.status
        tab.go("engine")
        tab.until(lambda: tab.page.locator("#tokens .token").count() >= 5)
        assert not tab.outside
        friend.close()
