"""The page in a browser, in the words of its user."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 120_000
"""Milliseconds: the machine may be busy with other things."""


class Tab:
    """One open page, in the words of its user."""

    def __init__(self, page: Any, address: str) -> None:
        self.page = page
        self.outside: list[str] = []
        page.set_default_timeout(PATIENCE)
        page.on("request", lambda request: None if request.url.startswith(address) else self._note(request.url))
        with page.expect_response(lambda response: response.url.endswith("/run/predict")) as loaded:  # the load event
            page.goto(address)
        page.wait_for_selector("#prompt textarea")
        loaded.value.finished()
        page.wait_for_timeout(300)  # until it is shown: it would put back what is typed before

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

    # -- whole steps -------------------------------------------------------------------------------------------------

    @contextmanager
    def finishing(self, status: str = "#status") -> Iterator[None]:
        """Inside, something is asked for; afterwards it is written, or an error is shown. What the line said before is wiped
        off, because it may look the same."""
        self.page.evaluate(f"document.querySelectorAll('{status} .line, {status} .note').forEach((one) => one.remove())")
        yield
        line = self.page.locator(status)
        self.until(lambda: re.search(r"evaluated|stopped", line.inner_text()) or line.locator("[role=alert]").count())
        rest = "#prompt .submit-button" if status == "#status" else "#raw-run:not([disabled])"
        self.page.wait_for_selector(rest, state="attached")

    def say(self, text: str) -> str:
        """Asks, waits for the end, and gives the answer."""
        with self.finishing():
            self.send(text)
        return self.answer

    def click(self, selector: str) -> None:
        self.page.click(selector)

    def go(self, name: str) -> None:
        """To another tab of the page."""
        self.page.click(f"#tab-{name}-button")
        self.page.wait_for_selector(f"#tab-{name}")

    def choose(self, name: str, value: str) -> None:
        """One of the choices of an option that are all shown."""
        self.page.locator(f"#option-{name} label").filter(has_text=re.compile(f"^\\s*{re.escape(value)}\\s*$")).click()

    def method(self, name: str) -> None:
        self.choose("method", name)
        group = name if name != "greedy" else "length"
        self.page.wait_for_selector(f"#group-{group}")
        if name != "sampling":
            self.page.wait_for_selector("#group-sampling", state="hidden")

    def unfold(self, group: str) -> None:
        """By its id, such as "group-guidance"."""
        if not self.page.locator(f"#{group} .form, #{group} input").first.is_visible():
            self.page.click(f"#{group} button.label-wrap")

    def pick(self, selector: str, value: str) -> None:
        """One of the entries of a drop-down list."""
        self.page.click(f"{selector} input")
        self.page.click(f"[role=option][data-value='{value}'], [role=option][aria-label='{value}']")

    @property
    def shown(self) -> list[str]:
        """The messages, as they are read."""
        return [str(text).strip() for text in self.page.locator("#chat .message-row .message-content").all_inner_texts()]

    @property
    def versions(self) -> list[str]:
        """What stands at each message about its versions: "2/3", or "" for the only one."""
        found = self.page.locator("#chat .tree-buttons").all_inner_texts()
        return ["".join(re.findall(r"\d+/\d+", text)) for text in found]
