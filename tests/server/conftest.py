"""A server on the small model, in this process so that a test can look inside, and a browser to drive its page."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from transformers_llamacpp.server.app import Server, open_socket
from transformers_llamacpp.server.host import ModelHost

OPTIONS = {"n_ctx": 4096, "n_batch": 32, "n_ubatch": 32}
"""Small batches: a long prompt has many decodes between which it can be stopped."""

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


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two files that are no models: one says so in its first bytes, the other only to llama.cpp."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "notes.gguf").write_text("not a model", encoding="utf-8")
    (folder / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(range(256)))
    return folder


@pytest.fixture(scope="session")
def host(model_dir: Path, smollm2_path: Path) -> Iterator[ModelHost]:
    host = ModelHost(model_dir, OPTIONS)
    host.load(host.add(str(smollm2_path)), {})
    yield host
    host.unload()


@pytest.fixture(scope="session")
def address(host: ModelHost) -> Iterator[str]:
    ready, told = threading.Event(), []

    def announce(url: str) -> None:
        told.append(url)
        ready.set()

    sock = open_socket("127.0.0.1", 0)
    server = Server(host, announce)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert ready.wait(60), "the server did not start"
    yield told[0]
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with sync_playwright() as playwright:
        path = find_browser(playwright)
        if path is None and os.environ.get("CI"):
            pytest.fail(CURE, pytrace=False)
        elif path is None:
            pytest.skip(CURE)
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()
