"""The page in a real browser: every way of decoding, what only its own controls show, presets, and tokens with their rivals."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from page_tab import Tab
from transformers_llamacpp.server.host import ModelHost
from transformers_llamacpp.server.page.methods import GROUPS, METHODS, shown

pytestmark = [pytest.mark.once, pytest.mark.timeout(600)]

QUESTION = "Repeat this three times: one two three four five six seven eight nine ten."


@pytest.fixture
def short(tab: Tab) -> Tab:
    tab.set_number("max_new_tokens", 16)
    return tab


@pytest.mark.parametrize("method", METHODS)
def test_a_method_shows_its_controls_and_writes(short: Tab, method: str) -> None:
    tab = short
    tab.method(method)
    visible = {group.name for group in GROUPS if tab.page.locator(f"#group-{group.name}").is_visible()}
    assert visible == {group.name for group in shown(method)}
    assert tab.say(QUESTION), tab.status
    assert re.search(r"^\d+ tokens?\s+[\d.]+ tokens/s", tab.status), tab.status
    again = tab.answer
    if method != "sampling":
        tab.click("#clear")
        tab.until(lambda: not tab.shown)
        assert tab.say(QUESTION) == again, "nothing is drawn"
    tab.go("engine")
    assert tab.until(lambda: tab.page.locator("#tokens .token").count()) <= 17
    tab.page.locator("#tokens .token").nth(2).click()
    assert len(tab.page.locator(".rivals tr").all()) >= 6, "five alternatives, and the head"


def test_greedy_takes_the_likeliest(short: Tab) -> None:
    tab = short
    tab.method("greedy")
    tab.say(QUESTION)
    tab.go("engine")
    for at in range(8):
        tab.page.locator("#tokens .token").nth(at).click()
        assert "chosen" in str(tab.page.locator(".rivals tr").nth(1).get_attribute("class"))
        percent = [float(text.split()[0]) for text in tab.page.locator(".rivals .share span").all_inner_texts()]
        assert percent == sorted(percent, reverse=True) and sum(percent) <= 100.1


def test_guidance_and_what_it_changed(short: Tab) -> None:
    tab = short
    tab.method("greedy")
    plain = tab.say("Describe the sea.")
    tab.click("#clear")
    tab.until(lambda: not tab.shown)
    tab.unfold("group-guidance")
    tab.page.fill("#option-negative_prompt textarea", "Describe the sea.")
    tab.until(lambda: "rests while the guidance scale is 1" in tab.page.inner_text("#notes"))
    tab.set_number("guidance_scale", 3)
    tab.until(lambda: "rests" not in tab.page.inner_text("#notes").replace("nothing is drafted", ""))
    guided = tab.say("Describe the sea.")
    assert guided and guided != plain
    tab.go("engine")
    changed = re.search(r"likeliest token at (\d+) of (\d+) places", tab.page.inner_text("#tokens"))
    assert changed and int(changed[1]) == tab.page.locator("#tokens .token.changed").count() > 0
    tab.page.locator("#tokens .token.changed").first.click()
    assert tab.page.locator(".rivals th").all_inner_texts() == ["token", "without guidance", "with guidance"]
    best = tab.page.locator(".rivals tr").nth(1)
    without, with_ = (float(text.split()[0]) for text in best.locator(".share span").all_inner_texts())
    others = [row.locator(".plain span").inner_text() for row in tab.page.locator(".rivals tr").all()[2:]]
    assert with_ > without or max(float(text.split()[0]) for text in others) > without


def test_every_kind_of_speculation(short: Tab, host: ModelHost) -> None:
    tab = short
    tab.method("greedy")
    tab.unfold("group-speculation")
    answers = []
    for kind in ("off", "prompt lookup", "both", "draft model"):
        tab.choose("speculation", kind)
        if kind == "both":
            tab.until(lambda: "only the text itself drafts" in tab.page.inner_text("#notes"))
            tab.pick("#option-draft_model", host.name)
            tab.until(lambda: "only the text itself drafts" not in tab.page.inner_text("#notes"))
        answers.append(tab.say(QUESTION))
        drafted = re.search(r"(\d+) of (\d+) drafted accepted", tab.status)
        assert (drafted is None) == (kind == "off"), (kind, tab.status)
        if kind == "draft model":
            tab.go("engine")
            assert drafted and f"{drafted[1]} of {drafted[2]}" in tab.page.inner_text("#tiles")
            tab.go("chat")
        tab.click("#clear")
        tab.until(lambda: not tab.shown)
    assert all(answers)


def test_what_the_engine_did(short: Tab) -> None:
    tab = short
    tab.say(QUESTION)
    tab.say("And backwards?")
    reused = re.search(r"prompt (\d+): (\d+) reused", tab.status)
    tab.go("engine")
    assert reused and f"{reused[2]}\nprompt tokens reused\nof {reused[1]}" in tab.page.inner_text("#tiles")
    assert tab.page.locator("#speed svg polyline").count() == 1
    bar = tab.page.locator("#prompt-bar [role=img]").get_attribute("aria-label")
    assert bar == f"{reused[2]} of {reused[1]} prompt tokens reused"
    tab.until(lambda: tab.page.locator("#cells .sequence.idle").count())
    assert re.search(r"[\d,]+ of 4,096 cells", tab.page.inner_text("#cells"))
    tab.page.locator("#tokens .token").first.focus()
    tab.page.keyboard.press("ArrowRight")
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.locator("#tokens .token").nth(2).get_attribute("aria-selected") == "true"
    tab.click("button.label-wrap:has-text('The same as a request')")
    tab.until(lambda: '"max_tokens": 16' in tab.page.inner_text("#api-request"))


def test_presets(tab: Tab, data_dir: Path) -> None:
    page = tab.page
    tab.set_number("temperature", 1.5)
    tab.method("contrastive")
    tab.set_number("penalty_alpha", 0.35)
    told = {"../../evil": "no name for a preset", "Greedy": "comes with the program", "Mine": "Saved as Mine"}
    for name, answer in told.items():
        page.fill("#preset input", name)
        page.press("#preset input", "Tab")
        tab.click("#preset-save")
        tab.until(lambda answer=answer: answer in page.inner_text("#preset-status"))
    assert [file.name for file in (data_dir / "presets").iterdir()] == ["Mine.json"]
    tab.pick("#preset", "Precise")
    tab.until(lambda: page.locator("#group-sampling").is_visible())
    assert page.input_value("#option-temperature input[type=number]") == "0.3"
    tab.pick("#preset", "Mine")
    tab.until(lambda: page.locator("#group-contrastive").is_visible())
    assert page.input_value("#option-penalty_alpha input[type=number]") == "0.35"
    tab.click("#preset-delete")
    tab.until(lambda: "Mine is deleted" in page.inner_text("#preset-status"))
    assert not list((data_dir / "presets").iterdir())


def test_a_value_outside_its_range_is_an_error(tab: Tab) -> None:
    tab.set_number("seed", -7)
    tab.page.fill("#prompt textarea", "Hi")
    tab.page.press("#prompt textarea", "Enter")
    tab.until(lambda: tab.page.locator("#status [role=alert]").count() and "seed=-7 is below its minimum" in tab.status)
    assert tab.page.input_value("#prompt textarea") == "Hi" and not tab.shown
    tab.set_number("seed", 7)
    tab.set_number("max_new_tokens", 3)
    assert tab.say("Hi")
