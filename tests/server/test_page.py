"""The page in a real browser: a chat as somebody has one, and what must be seen then."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from itertools import pairwise

import pytest

from page_tab import Tab
from transformers_llamacpp.server.host import ModelHost

pytestmark = [pytest.mark.once, pytest.mark.timeout(600)]


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
    with tab.finishing():
        tab.stop()
    stopped = tab.answer
    assert "stopped" in tab.status and len(stopped) > 20
    tab.page.wait_for_timeout(500)
    assert tab.answer == stopped

    tab.set_number("max_new_tokens", 12)
    with tab.finishing():
        tab.click("#regenerate")
    assert re.search(r"^12 tokens\s.*cut at the longest answer", tab.status, re.DOTALL)
    assert tab.messages("user") == 1 and tab.messages("bot") == 1
    assert tab.answer and tab.answer != stopped
    tab.until(lambda: tab.versions == ["", "2/2"])
    tab.click("#chat button[title='The version before']")
    tab.until(lambda: tab.answer == stopped)


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
    tab.unfold("chat-options")
    tab.page.fill("#option-system_prompt textarea", "You are a pirate. " * 20)
    tab.send("Hi")
    tab.until(lambda: "reused" in tab.status)
    assert int(re.search(r"prompt (\d+):", tab.status)[1]) > 100  # type: ignore[index]
