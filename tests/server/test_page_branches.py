"""The page in a real browser: edited messages, versions, branches, answers that go on, and the raw text beside the chat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from page_tab import Tab

pytestmark = [pytest.mark.once, pytest.mark.timeout(600)]


@pytest.fixture
def chatted(tab: Tab) -> Tab:
    """Two questions with answers of four tokens."""
    tab.set_number("max_new_tokens", 4)
    tab.say("First question")
    tab.say("Second question")
    return tab


def edit(tab: Tab, at: int, text: str) -> None:
    tab.page.locator("#chat button[title=Edit]").nth(at).click()
    tab.page.locator("#chat textarea").fill(text)
    tab.page.locator("#chat button[title=Submit]").click()


def test_an_edited_question_is_asked_again(chatted: Tab) -> None:
    tab, before = chatted, chatted.shown
    with tab.finishing():
        edit(tab, 0, "Another first question")
    tab.until(lambda: tab.versions == ["2/2", ""])
    assert len(tab.shown) == 2 and tab.shown[0] == "Another first question" and tab.shown[1]
    tab.click("#chat button[title='The version before']")
    tab.until(lambda: tab.shown == before)
    assert tab.page.is_enabled("#regenerate")


def test_an_edited_answer_stands_and_is_part_of_the_prompt(chatted: Tab) -> None:
    tab, before = chatted, chatted.shown
    edit(tab, 1, "My own answer")
    tab.until(lambda: tab.shown == [before[0], "My own answer"])
    tab.until(lambda: tab.versions == ["", "2/2"])
    with tab.finishing():
        tab.click("#as-text")
        tab.until(lambda: "My own answer" in tab.page.input_value("#raw textarea"))
        tab.go("chat")
        tab.send("And?")
    assert tab.shown[1] == "My own answer" and len(tab.shown) == 4


def test_a_branch_goes_on_from_an_earlier_message(chatted: Tab) -> None:
    tab, before = chatted, chatted.shown
    tab.page.locator("#chat button[title^='Branch']").nth(1).click()
    tab.until(lambda: tab.shown == before[:2])
    assert "goes on from here" in tab.status
    tab.say("A third question")
    tab.until(lambda: tab.versions == ["", "", "2/2", ""])
    assert tab.shown[2] == "A third question"
    tab.page.locator("#chat button[title='The next version']").click()
    tab.until(lambda: tab.shown == before)
    tab.page.locator("#chat button[title^='Branch']").nth(1).click()
    tab.click("#resume button")
    tab.until(lambda: tab.shown[2:3] == ["A third question"])


def test_an_answer_goes_on(tab: Tab) -> None:
    tab.set_number("temperature", 0)
    tab.set_number("max_new_tokens", 24)
    whole = tab.say("Name three rivers.")
    tab.click("#clear")
    tab.until(lambda: not tab.shown)
    tab.set_number("max_new_tokens", 12)
    half = tab.say("Name three rivers.")
    assert whole.startswith(half)
    with tab.finishing():
        tab.click("#continue")
    assert tab.messages("bot") == 1 and tab.answer.startswith(half) and len(tab.answer) > len(half)
    assert tab.answer.split() == whole.split(), "as if it had never stopped"


def test_undo_takes_a_question_back_and_keeps_it(chatted: Tab) -> None:
    tab, before = chatted, chatted.shown
    tab.click("#undo")
    tab.until(lambda: tab.shown == before[:2])
    assert tab.page.input_value("#prompt textarea") == "Second question"
    tab.click("#resume button")
    tab.until(lambda: tab.shown == before)


def test_a_conversation_as_a_file(chatted: Tab, tmp_path: Path) -> None:
    tab, before = chatted, chatted.shown
    with tab.page.expect_download() as download:
        tab.click("#export")
    file = tmp_path / "chat.json"
    download.value.save_as(file)
    assert len(json.loads(file.read_text(encoding="utf-8"))["messages"]) == 5
    tab.click("#clear")
    tab.until(lambda: not tab.shown)
    for path, good in ((file, True), (Path(__file__), False)):
        with tab.page.expect_file_chooser() as chooser:
            tab.click("#import")
        chooser.value.set_files(path)
        tab.until(lambda: tab.shown == before)
        if not good:
            tab.until(lambda: "no saved conversation" in tab.status)


def test_a_raw_text_goes_on_in_place(tab: Tab) -> None:
    page = tab.page
    tab.set_number("temperature", 0)
    tab.set_number("max_new_tokens", 8)
    tab.go("completion")
    begin = "Once upon a time, there was a"
    page.fill("#raw textarea", begin)
    with tab.finishing("#raw-status"):
        page.press("#raw textarea", "Control+Enter")
    first = page.input_value("#raw textarea")
    assert first.startswith(begin) and len(first) > len(begin) and "8 tokens" in page.inner_text("#raw-status")
    with tab.finishing("#raw-status"):
        tab.click("#raw-again")
    assert page.input_value("#raw textarea") == first, "the same beginning, greedy"
    with tab.finishing("#raw-status"):
        tab.click("#raw-run")
    assert page.input_value("#raw textarea").startswith(first) and page.input_value("#raw textarea") != first
    tab.click("#raw-undo")
    tab.until(lambda: page.input_value("#raw textarea") == first)

    tab.go("chat")
    tab.set_number("max_new_tokens", 3000)
    tab.go("completion")
    with tab.finishing("#raw-status"):
        tab.click("#raw-run")
        tab.until(lambda: len(page.input_value("#raw textarea")) > len(first) + 20)
        page.keyboard.press("Escape")
    assert "stopped" in page.inner_text("#raw-status")


def test_a_chat_as_raw_text(chatted: Tab) -> None:
    page, last = chatted.page, chatted.shown[-1]
    chatted.click("#as-text")
    page.wait_for_selector("#raw textarea")
    text = chatted.until(lambda: page.input_value("#raw textarea"))
    assert text.count("<|im_start|>user") == 2 and "".join(text.split()).endswith("".join(last.split()))
