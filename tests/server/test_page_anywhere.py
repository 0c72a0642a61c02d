"""The page in a real browser: on a phone, light and dark, and without a mouse."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from page_tab import Tab

pytestmark = [pytest.mark.once, pytest.mark.timeout(600)]

PHONE = {"width": 390, "height": 844}


@pytest.fixture
def phone(open_tab: Callable[..., Tab]) -> Tab:
    return open_tab(viewport=PHONE, color_scheme="dark")


def test_a_phone(phone: Tab) -> None:
    tab, page = phone, phone.page
    box = page.locator("#prompt").bounding_box()
    assert box["x"] >= 0 and box["y"] + box["height"] <= 844, "the text box is in the first screen"
    assert not page.locator("#preset").is_visible()
    tab.click("#side-toggle")
    page.wait_for_function("document.querySelector('#side').getBoundingClientRect().right <= 390")
    assert page.locator("#side-toggle").get_attribute("aria-expanded") == "true"
    tab.set_number("max_new_tokens", 12)
    page.keyboard.press("Escape")
    page.wait_for_function("getComputedStyle(document.querySelector('#side')).visibility === 'hidden'")
    assert tab.say("Write a table with three columns and a very long line of Python code.")
    for name in ("completion", "model", "engine"):
        tab.go(name)
        if name == "engine":
            page.locator("#tokens .token").first.click()
        for card in page.locator(f"#tab-{name} .card").all():
            size = card.bounding_box()
            assert size["x"] >= 0 and size["x"] + size["width"] <= 390 and size["height"] > 40, (name, size)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390, name


def test_light_and_dark(phone: Tab) -> None:
    page = phone.page
    assert page.evaluate("document.body.classList.contains('dark')"), "as the system has it"
    page.click("#theme")
    assert not page.evaluate("document.body.classList.contains('dark')")
    page.reload()
    page.wait_for_selector("#prompt textarea")
    page.wait_for_function("!document.body.classList.contains('dark')")


def test_without_a_mouse(tab: Tab) -> None:
    page = tab.page
    tab.set_number("max_new_tokens", 5)
    page.focus("#prompt textarea")
    page.keyboard.type("Hello")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("you")
    with tab.finishing():
        page.keyboard.press("Enter")
    assert tab.shown[0].split() == ["Hello", "you"]
    focused = []
    for _ in range(9):
        page.keyboard.press("Tab")
        focused.append(page.evaluate("document.activeElement.id"))
    order = [name for name in focused if name in ("regenerate", "continue", "undo", "clear", "inspect", "as-text", "export")]
    assert order == ["regenerate", "continue", "undo", "clear", "inspect", "as-text", "export"]
    page.focus("#inspect")
    page.keyboard.press("Enter")
    tab.until(lambda: page.locator("#tokens .token").first.is_visible())


def test_everything_has_a_name(tab: Tab) -> None:
    """Every button and every field, on each tab."""
    unnamed = """() => [...document.querySelectorAll('button, input, textarea, a[href]')]
        .filter((one) => one.offsetParent && !(one.innerText || '').trim() && !one.getAttribute('aria-label') && !one.title
            && !one.closest('label')?.innerText.trim() && !one.labels?.length && one.type !== 'range')
        .map((one) => one.outerHTML.slice(0, 200))"""
    for name in ("chat", "completion", "model", "engine"):
        tab.go(name)
        assert tab.page.evaluate(unnamed) == [], name
