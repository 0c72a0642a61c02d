"""A webui as a process: started on free ports, asked over HTTP, stopped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from webui import folders

NAMES = folders.HERE / "gradio_names"
LIMIT = 120.0
"""Seconds until a webui must answer: with two cores and other tests beside it, importing PyTorch alone may take 20."""


class WebuiEnded(RuntimeError):
    """The webui ended before it answered; the message is the end of its log."""


class Webui:
    """One webui folder, and the process that runs in it between `start` and `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self.api_port = self.page_port = 0
        self._log_file = folder.with_name(folder.name + ".log")

    @property
    def url(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.page_port}"

    @property
    def user_data(self) -> Path:
        return self.folder / "user_data"

    def start(
        self, *flags: str, command: list[str] | None = None, env: dict[str, str] | None = None, limit: float = LIMIT
    ) -> Webui:
        """``python server.py --api`` with `flags`, or another `command` to which the same is added; returns when it answers.
        `env` goes on top of `environment()`.

        Raises `WebuiEnded` where the process ends instead, `TimeoutError` where it does neither.
        """
        assert self.process is None, "it runs"
        self.api_port, self.page_port = free_port(), free_port()
        ports = ["--api", "--api-port", str(self.api_port), "--listen-port", str(self.page_port)]
        with self._log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*(command or [folders.python(), "server.py"]), *ports, *flags],
                cwd=self.folder,
                env={**environment(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait(time.monotonic() + limit, page="--nowebui" not in flags)
        except BaseException:
            self.stop()
            raise
        return self

    def _wait(self, end: float, page: bool) -> None:
        for url in [f"http://127.0.0.1:{self.api_port}/v1/internal/model/info", *([self.url] if page else [])]:
            while not _answers(url):
                if self.process is None or self.process.poll() is not None:
                    raise WebuiEnded(self.log()[-3000:])
                if time.monotonic() > end:
                    raise TimeoutError(f"no answer from {url}:\n{self.log()[-3000:]}")
                time.sleep(0.1)

    def wait_page(self, limit: float = LIMIT) -> None:
        """Until the page answers (again)."""
        self._wait(time.monotonic() + limit, page=True)

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:  # its threads may be in the middle of a text
            process.kill()
            process.wait()

    def log(self) -> str:
        """What this run has written so far."""
        return self._log_file.read_text(encoding="utf-8", errors="replace") if self._log_file.exists() else ""

    def wait_log(self, text: str, limit: float = 20.0) -> str:
        """The log, once `text` is in it."""
        end = time.monotonic() + limit
        while text not in self.log():
            assert time.monotonic() < end, f"{text!r} is not in the log:\n{self.log()[-3000:]}"
            time.sleep(0.05)
        return self.log()

    def hashes(self) -> dict[str, str]:
        return folders.hashes(self.folder)

    def get(self, path: str, status: int = 200) -> Any:
        return self._ask(path, None, status)

    def post(self, path: str, body: dict[str, Any] | None = None, status: int = 200) -> Any:
        """The JSON of the answer, which must have this `status`."""
        return self._ask(path, body or {}, status)

    def _ask(self, path: str, body: dict[str, Any] | None, status: int) -> Any:
        try:
            with self._open(path, body) as response:
                found, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            found, text = error.code, error.read().decode(errors="replace")
        assert found == status, f"{path}: {found} instead of {status}\n{text}\n{self.log()[-3000:]}"
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.api_port}{path}"
        return urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=LIMIT)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of an answer as they come. Closing the iterator is the client going away."""
        with self._open(path, {**body, "stream": True}) as response:
            for line in response:
                text = line.decode().strip()
                if text == "data: [DONE]":
                    return
                if text.startswith("data:"):
                    yield json.loads(text[len("data:") :])

    def info(self) -> dict[str, Any]:
        return self.get("/v1/internal/model/info")

    def load(self, model: str, status: int = 200, **args: Any) -> Any:
        return self.post("/v1/internal/model/load", {"model_name": model, "args": args}, status=status)

    def complete(self, prompt: str, **options: Any) -> str:
        return self.post("/v1/completions", {"prompt": prompt, **options})["choices"][0]["text"]

    def chat(self, *messages: str, **options: Any) -> str:
        """The answer to a conversation, in which the user speaks first."""
        roles = ("user", "assistant")
        turns = [{"role": roles[at % 2], "content": text} for at, text in enumerate(messages)]
        return self.post("/v1/chat/completions", {"messages": turns, **options})["choices"][0]["message"]["content"]


def environment() -> dict[str, str]:
    """Ours, without the folders this Python imports from."""
    return {
        **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")},
        "PYTHONPATH": str(NAMES),
        "PYTHONUNBUFFERED": "1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
        **({"PYTHONUTF8": "1"} if sys.platform == "win32" else {}),
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False
