"""The page of a webui, as somebody at it sees it: by labels, which the stand-in and the real one share."""

from __future__ import annotations

import re
import time
from typing import Any

from webui.driver import Webui

SECONDS = 20_000
LOADED = re.compile(r"success|fail|error|unloaded|not loaded|saved|not saving|no model", re.IGNORECASE)


class Page:
    """`page` is Playwright's; everything here waits until what it did has come back from the server."""

    def __init__(self, page: Any, webui: Webui) -> None:
        self.page = page
        self.webui = webui
        page.set_default_timeout(SECONDS)
        self.open()

    def open(self) -> None:
        self.page.goto(self.webui.url, wait_until="domcontentloaded")
        self._ready()

    def _ready(self) -> None:
        self.page.get_by_role("tab", name="Model", exact=True).first.wait_for(timeout=3 * SECONDS)
        self.page.locator("#chat").first.wait_for(state="attached")
        self.tab("Model")
        end = time.monotonic() + 3
        while not self.value("Model loader") and time.monotonic() < end:
            self.page.wait_for_timeout(50)  # until the server has sent what was set; the real one may have lost the loader
        self.tab("Chat")
        self._settled()

    # Tabs and widgets

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name, exact=True).first.click()

    def extension(self) -> None:
        self.tab("llamacpp_HF")

    def value(self, label: str) -> str:
        return self._field(label).input_value()

    def options(self, label: str) -> list[str]:
        """What a dropdown offers."""
        field = self._field(label)
        field.click()
        options = self.page.get_by_role("option")
        options.first.wait_for()
        found = [(option.get_attribute("aria-label") or option.inner_text()).strip() for option in options.all()]
        field.blur()  # it opens when the focus comes
        options.first.wait_for(state="detached")
        return found

    def choose(self, label: str, option: str) -> None:
        """In a dropdown."""
        field = self._field(label)
        if field.input_value() == option:
            return
        field.click()
        self.page.get_by_role("option", name=option, exact=True).first.click()
        self._settled()

    def set(self, label: str, value: Any) -> None:
        """A slider, a number, a text or a checkbox."""
        if isinstance(value, bool):
            self._visible(self.page.get_by_role("checkbox", name=label, exact=True)).set_checked(value)
        else:
            field = self._field(label)
            field.fill(str(value))
            field.blur()
        self._settled()

    def pick(self, option: str) -> None:
        """One of several buttons of which one is pressed."""
        self._visible(self.page.get_by_role("radio", name=option, exact=True)).check()
        self._settled()

    def is_shown(self, label: str) -> bool:
        return any(field.is_visible() for field in self._fields(label).all())

    def unfold(self, name: str) -> None:
        """Opens an accordion, where it is closed and there is one of that name."""
        for button in self.page.get_by_role("button", name=name).all():
            if button.is_visible() and "open" not in (button.get_attribute("class") or "").split():
                button.click()
                self.page.wait_for_timeout(200)

    def press(self, name: str | re.Pattern[str]) -> None:
        exact = isinstance(name, str)
        self._visible(self.page.get_by_role("button", name=name, exact=exact)).click()

    def _fields(self, label: str) -> Any:
        """By its name, to which an explanation may be added; of a slider the number beside it."""
        fields = self.page.locator("input:not([type=range]), textarea")
        title = self.page.get_by_test_id("block-info").and_(self.page.get_by_text(label, exact=True))
        titled = self.page.locator("label", has=title).locator("input:not([type=range]), textarea")
        number = self.page.get_by_label(f"number input for {label}", exact=True)
        return number.or_(fields.and_(self.page.get_by_label(label, exact=True))).or_(titled)

    def _field(self, label: str) -> Any:
        return self._visible(self._fields(label))

    def _visible(self, found: Any) -> Any:
        return found.locator("visible=true").first

    def _settled(self) -> None:
        """Time for the page to take note of a change."""
        self.page.wait_for_timeout(300)

    def toast(self) -> str:
        """What a message over the page says, which is closed then."""
        shown = self.page.get_by_test_id("toast-body").first
        shown.wait_for()
        text = shown.inner_text().strip()
        shown.locator(".toast-close").first.click()
        return text

    # The Model tab

    def choose_model(self, model: str, loader: str | None = None) -> None:
        """Choosing a model lets the webui choose a loader: `loader` comes after that."""
        self.tab("Model")
        if self.value("Model") != model:
            self.choose("Model", model)
            self._until_status(lambda text: model in text)
            self._settled()
        if loader is not None:
            self.choose("Model loader", loader)

    def status(self) -> str:
        """What the Model tab says about the model."""
        return self.page.locator("#model-tab .prose").last.inner_text().strip()

    def load(self, limit: float = 60.0) -> str:
        """Presses Load; the status once loading has ended one way or the other."""
        return self._pressed("Load", limit)

    def unload(self) -> str:
        return self._pressed("Unload", 20.0)

    def save_settings(self) -> str:
        return self._pressed("Save settings", 20.0)

    def _pressed(self, button: str, limit: float) -> str:
        self.tab("Model")
        before = self.status()
        self.press(button)
        started = time.monotonic()
        return self._until_status(
            lambda text: LOADED.search(text) and (text != before or time.monotonic() - started > 3), limit
        )

    def _until_status(self, reached: Any, limit: float = 20.0) -> str:
        end = time.monotonic() + limit
        while not reached(text := self.status()):
            assert time.monotonic() < end, f"the status is still {text!r}\n{self.webui.log()[-2000:]}"
            self.page.wait_for_timeout(50)
        return text

    # The Chat tab

    def send(self, text: str, wait: bool = True) -> str:
        """Sends a message; the answer, or with ``wait=False`` what there is of it."""
        known = len(self.replies())
        self.send_only(text)
        self._until(lambda: len(self.replies()) > known)
        return self.wait_reply() if wait else self._begun("")

    def send_only(self, text: str) -> None:
        """Without an answer to wait for."""
        self.tab("Chat")
        self.page.locator("#chat-input textarea").first.fill(text)
        self._settled()
        self.click_id("Generate")

    def regenerate(self, wait: bool = True) -> str:
        return self._again("Regenerate", wait)

    def continue_(self, wait: bool = True) -> str:
        return self._again("Continue", wait)

    def _again(self, button: str, wait: bool) -> str:
        self.tab("Chat")
        before = self.reply()
        self.click_id(button)
        self.page.locator("._generating").first.wait_for(state="attached")
        return self.wait_reply() if wait else self._begun(before)

    def _begun(self, before: str) -> str:
        """The answer as soon as there is something of it."""
        self._until(lambda: self.reply() not in ("", before) or not self._generating())
        return self.reply()

    def _generating(self) -> bool:
        return self.page.locator("._generating").count() > 0

    def stop(self) -> str:
        self.click_id("stop")
        return self.wait_reply()

    def wait_reply(self, limit: float = 60.0) -> str:
        self._until(lambda: not self._generating(), limit)
        self.page.wait_for_timeout(300)
        return self.reply()

    def replies(self) -> list[str]:
        return [found.get_attribute("data-raw") or "" for found in self.page.locator("#chat .assistant-message").all()]

    def reply(self) -> str:
        found = self.replies()
        return found[-1] if found else ""

    def new_chat(self) -> None:
        self.click_id("new-chat-btn")
        self._until(lambda: not self.replies())

    def click_id(self, element_id: str) -> None:
        """Some of these are only seen while the mouse is over the menu they are in."""
        self.page.evaluate("id => document.getElementById(id).click()", element_id)

    def _until(self, reached: Any, limit: float = 20.0) -> None:
        end = time.monotonic() + limit
        while not reached():
            assert time.monotonic() < end, f"nothing happened\n{self.webui.log()[-2000:]}"
            self.page.wait_for_timeout(50)

    # The Session tab

    def restart(self) -> None:
        """Applies flags and extensions, which restarts the page, and waits for the page that comes after."""
        self.tab("Session")
        self.page.evaluate("window.before_restart = true")
        self.press(re.compile("apply.*restart", re.IGNORECASE))
        self.page.wait_for_timeout(2500)
        self.webui.wait_page()
        self.page.wait_for_function("() => !window.before_restart", timeout=3 * SECONDS)
        self._ready()
