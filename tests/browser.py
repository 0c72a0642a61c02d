"""One browser for all tests that open a page. `conftest.py` has the fixture: Playwright takes one at a time in a process."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
ELSEWHERE = {
    "darwin": ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",),
    "win32": (
        r"C:\Program Files\Google\Chrome\Application\chrome.exe",
        r"C:\Program Files (x86)\Microsoft\Edge\Application\msedge.exe",
    ),
}
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CURE = "no browser for the page's tests: install Chromium or Chrome, or run: python -m playwright install chromium"


def find_browser(playwright: Any) -> str | None:
    """The system's browser, or else Playwright's own."""
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    for path in (*ELSEWHERE.get(sys.platform, ()), playwright.chromium.executable_path):
        if Path(path).is_file():
            return path
    return None


def launched() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = find_browser(playwright)
        if path is None and os.environ.get("CI"):
            pytest.fail(CURE, pytrace=False)
        elif path is None:
            pytest.skip(CURE)
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()
