"""The page in a real browser: what somebody who opens it does, and what must be seen then."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from transformers_llamacpp.server.host import ModelHost

pytestmark = [pytest.mark.once, pytest.mark.timeout(600)]

PATIENCE = 120_000
"""Milliseconds: the machine may be busy with other things."""


class Tab:
    """One open page, in the words of its user."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.outside: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: None if request.url.startswith(address) else self._note(request.url))
        with page.expect_response(lambda response: response.url.endswith("/run/predict")):  # the load event
            page.goto(address)
        page.wait_for_selector("#prompt textarea")

    def _note(self, url: str) -> None:
        if not url.startswith(("data:", "blob:")):
            self.outside.append(url)

    def set_number(self, name: str, value: float) -> None:
        field = self.page.locator(f"#option-{name} input[type=number]")
        field.fill(str(value))
        field.blur()

    def send(self, text: str) -> None:
        """Returns when the question is seen in the chat, or an error instead of it; the status line is new then too."""
        asked = self.messages("user")
        self.page.fill("#prompt textarea", text)
        self.page.press("#prompt textarea", "Enter")
        self.until(lambda: self.messages("user") > asked or self.page.locator("#status [role=alert]").count())

    @property
    def status(self) -> str:
        return str(self.page.inner_text("#status"))

    @property
    def answer(self) -> str:
        answers = self.page.locator("#chat .bot.message")
        return str(answers.last.inner_text()) if answers.count() else ""

    def messages(self, role: str) -> int:
        return int(self.page.locator(f"#chat .{role}.message").count())

    def until(self, what: Callable[[], Any], seconds: float = PATIENCE / 1000) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            value = what()
            if value:
                return value
            self.page.wait_for_timeout(20)
        raise AssertionError(f"not within {seconds:.0f} s; status: {self.status!r}, answer: {self.answer[-200:]!r}")

    def wait_idle(self) -> None:
        self.page.wait_for_selector("#prompt .submit-button")

    def stop(self) -> None:
        self.page.click("#prompt .stop-button")


@pytest.fixture
def open_tab(browser: Any, address: str, host: ModelHost) -> Iterator[Callable[..., Tab]]:
    contexts = []

    def open_one(**options: Any) -> Tab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        return Tab(context.new_page(), address)

    yield open_one
    for context in contexts:
        context.close()
    end = time.monotonic() + 30
    while host.calls and time.monotonic() < end:
        time.sleep(0.05)
    assert host.calls == 0, "a closed tab left its answer running"


@pytest.fixture
def tab(open_tab: Callable[..., Tab]) -> Tab:
    tab = open_tab()
    tab.set_number("seed", 1)
    return tab


def test_an_answer_streams(tab: Tab) -> None:
    tab.set_number("max_new_tokens", 48)
    tab.send("Tell me a short story about a llama.")
    seen: list[str] = []
    while "reused" not in tab.status:
        if tab.answer and (not seen or tab.answer != seen[-1]):
            seen.append(tab.answer)
        tab.page.wait_for_timeout(10)
    assert len(seen) >= 3, seen
    assert all(len(before) <= len(after) for before, after in pairwise(seen))
    assert re.search(r"\d+ tokens\s+[\d.]+ tokens/s\s+prompt \d+: 0 reused, \d+ evaluated in [\d.]+ s", tab.status)
    assert "cut at the longest answer" in tab.status
    assert tab.page.input_value("#prompt textarea") == ""

    tab.wait_idle()
    tab.send("And then?")
    tab.until(lambda: re.search(r"prompt (\d+): (\d+) reused, (\d+) evaluated", tab.status))
    total, reused, evaluated = map(int, re.search(r"prompt (\d+): (\d+) reused, (\d+) eval", tab.status).groups())  # type: ignore[union-attr]
    assert reused + evaluated == total
    assert evaluated < 30 < reused, "the second turn evaluates only what is new"
    assert tab.messages("user") == 2 and tab.messages("bot") == 2
    assert not tab.outside, "the page asked for something that is not on this machine"


def test_stop_and_regenerate(tab: Tab) -> None:
    tab.set_number("max_new_tokens", 3000)
    tab.send("Write down the numbers from one to five hundred, in words, one on each line.")
    tab.until(lambda: len(tab.answer) > 20)
    tab.stop()
    tab.wait_idle()
    stopped = tab.answer
    assert "stopped" in tab.status and len(stopped) > 20
    tab.page.wait_for_timeout(500)
    assert tab.answer == stopped

    tab.set_number("max_new_tokens", 12)
    tab.page.click("#regenerate")
    tab.until(lambda: re.search(r"^12 tokens\s.*cut at the longest answer", tab.status, re.DOTALL))
    assert tab.messages("user") == 1 and tab.messages("bot") == 1
    assert tab.answer and len(tab.answer) < 12 * 20, "another answer, of twelve tokens"


def test_escape_stops_and_enter_does_not_start_a_second_answer(tab: Tab) -> None:
    tab.set_number("max_new_tokens", 3000)
    tab.send("Write a very long story.")
    tab.until(lambda: tab.answer)
    tab.page.fill("#prompt textarea", "Next question")
    tab.page.press("#prompt textarea", "Enter")
    tab.page.wait_for_timeout(300)
    tab.page.keyboard.press("Escape")
    tab.wait_idle()
    assert "stopped" in tab.status
    assert tab.messages("user") == 1
    assert tab.page.input_value("#prompt textarea") == "Next question", "what is typed meanwhile stays"


def test_a_long_prompt_shows_progress_and_can_be_stopped(tab: Tab) -> None:
    question = " ".join(f"Item {number} costs {number * 7 % 100} coins." for number in range(320))
    tab.send(question)
    shown = tab.until(lambda: re.search(r"Reading the prompt: ([1-9][\d,]*) of ([\d,]+) tokens", tab.status))
    assert int(shown[2].replace(",", "")) > 2000
    tab.stop()
    tab.wait_idle()
    evaluated, total = re.search(r"([\d,]+) of ([\d,]+) prompt tokens evaluated\s+stopped", tab.status).groups()  # type: ignore[union-attr]
    assert int(evaluated.replace(",", "")) < int(total.replace(",", ""))
    assert tab.page.input_value("#prompt textarea") == question, "a question without an answer is not lost"
    assert tab.messages("user") == 0


def test_a_prompt_that_does_not_fit(tab: Tab) -> None:
    tab.send("word " * 5000)
    tab.wait_idle()
    assert "n_ctx" in tab.page.inner_text("#status [role=alert]")


def test_undo_and_clear(tab: Tab) -> None:
    tab.set_number("max_new_tokens", 4)
    for question in ("First question", "Second question"):
        tab.send(question)
        tab.until(lambda: "reused" in tab.status)
        tab.wait_idle()
    tab.page.click("#undo")
    tab.until(lambda: tab.messages("user") == 1)
    assert tab.page.input_value("#prompt textarea") == "Second question"
    tab.page.click("#clear")
    tab.until(lambda: tab.messages("user") == 0)
    assert tab.page.is_disabled("#regenerate")


def test_two_tabs_at_once(open_tab: Callable[..., Tab]) -> None:
    tabs = [open_tab(), open_tab()]
    for tab, topic in zip(tabs, ("llamas", "alpacas"), strict=True):
        tab.set_number("max_new_tokens", 60)
        tab.set_number("temperature", 0)
        tab.send(f"Write about {topic}.")
    for tab in tabs:
        tab.until(lambda tab=tab: "reused" in tab.status)
    for tab, topic in zip(tabs, ("llamas", "alpacas"), strict=True):
        assert tab.messages("user") == 1 and tab.messages("bot") == 1
        assert topic in tab.page.inner_text("#chat .user.message")


def test_a_closed_tab_stops_its_answer(open_tab: Callable[..., Tab], host: ModelHost) -> None:
    tab = open_tab()
    tab.set_number("max_new_tokens", 3000)
    tab.send("Write a very long story.")
    tab.until(lambda: tab.answer)
    assert host.calls == 1
    tab.page.close()
    end = time.monotonic() + 20
    while host.calls and time.monotonic() < end:
        time.sleep(0.05)
    assert host.calls == 0


def test_system_prompt_reaches_the_model(tab: Tab) -> None:
    tab.set_number("max_new_tokens", 2)
    tab.page.fill("#system textarea", "You are a pirate. " * 20)
    tab.send("Hi")
    tab.until(lambda: "reused" in tab.status)
    assert int(re.search(r"prompt (\d+):", tab.status)[1]) > 100  # type: ignore[index]


def test_narrow_and_dark(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page = tab.page
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 390
    box = page.locator("#prompt").bounding_box()
    assert box["x"] >= 0 and box["y"] + box["height"] <= 844, "the text box is in the first screen"
    assert page.evaluate("document.body.classList.contains('dark')")
    page.click("#theme")
    assert not page.evaluate("document.body.classList.contains('dark')")
    page.reload()
    page.wait_for_selector("#prompt textarea")
    page.wait_for_function("!document.body.classList.contains('dark')")
    page.click("a.jump")
    page.wait_for_function("document.querySelector('#settings').getBoundingClientRect().top < 120")


@pytest.mark.parametrize(("file", "message"), [("notes.gguf", "not a GGUF file"), ("broken.gguf", "cannot load")])
def test_a_bad_model_file_says_so(tab: Tab, host: ModelHost, file: str, message: str) -> None:
    good = host.name
    choose(tab, file)
    tab.page.click("#load")
    tab.until(lambda: message in tab.page.inner_text("#load-status"))
    if file == "notes.gguf":
        assert host.name == good, "a file that is no model at all costs nothing"
    else:
        tab.until(lambda: "no model" in tab.page.inner_text("#badge"))
        tab.send("Hello")
        tab.until(lambda: message in tab.page.inner_text("#status"))
        tab.wait_idle()
    choose(tab, good or next(name for name in host.sources() if name not in ("notes.gguf", "broken.gguf")))
    tab.page.click("#load")
    tab.until(lambda: "Loaded in" in tab.page.inner_text("#load-status"))
    tab.set_number("max_new_tokens", 3)
    tab.wait_idle()
    tab.send("Hello")
    tab.until(lambda: "reused" in tab.status)


def choose(tab: Tab, name: str) -> None:
    if not tab.page.is_visible("#file input"):
        tab.page.click("#model-panel button.label-wrap")
    tab.page.click("#file input")
    tab.page.click(f"[role=option][data-value='{name}'], [role=option][aria-label='{name}']")
