"""Webui folders and running webuis for the tests; which webui, `folders.py` decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from webui import folders
from webui.driver import Webui
from webui.page import Page

REAL = folders.checkout() is not None


@pytest.fixture
def webui_folder(tmp_path: Path) -> Path:
    """A webui of the test's own."""
    return folders.make(tmp_path / "webui")


def _starting(made: Callable[[], Path]) -> Iterator[Callable[..., Webui]]:
    running: list[Webui] = []

    def start(*flags: str, folder: Path | None = None, **options: Any) -> Webui:
        running.append(Webui(folder or made()))
        return running[-1].start(*flags, **options)

    yield start
    for webui in running:
        webui.stop()


@pytest.fixture
def start_webui(webui_folder: Path) -> Iterator[Callable[..., Webui]]:
    """``start_webui(*flags)``: the test's own webui, running; stopped when the test ends."""
    yield from _starting(lambda: webui_folder)


@pytest.fixture(scope="module")
def start_webui_for_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Webui]]:
    """The same for all tests of a file: ``folder=`` is one from `folders.make`, or else a fresh one is made."""
    yield from _starting(lambda: folders.make(tmp_path_factory.mktemp("webui") / "webui"))


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[[Webui], Page]]:
    """``open_page(webui)``: its page in a browser."""
    opened: list[Any] = []

    def open_it(webui: Webui) -> Page:
        opened.append(browser.new_context(viewport={"width": 1600, "height": 1000}))
        return Page(opened[-1].new_page(), webui)

    yield open_it
    for context in opened:
        context.close()
