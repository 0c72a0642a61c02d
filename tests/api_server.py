"""Real servers for the tests of the API: on a free port, in a thread, so that a test can look inside."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from transformers_llamacpp.server.app import Server, open_socket
from transformers_llamacpp.server.host import ModelHost
from transformers_llamacpp.server.limits import ServeOptions


@dataclass
class Api:
    """`url` without a path; `state` is the application's own."""

    url: str
    state: Any
    key: str = ""

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=120)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self.key or "none", max_retries=0, timeout=120)

    def request(self, method: str, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        return httpx.request(method, self.url + path, timeout=120, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.request("POST", path, body, **kwargs)

    def text(self, **body: Any) -> str:
        """The one text of a completion."""
        answer = self.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    @property
    def idle(self) -> bool:
        return not self.state.jobs and not self.state.gate.running and not self.state.gate.waiting and not self.state.host.calls


@contextmanager
def running(host: ModelHost, options: ServeOptions) -> Iterator[Api]:
    """A server around `host`. Every test that uses it leaves it with nothing to do."""
    ready, told = threading.Event(), []

    def announce(url: str) -> None:
        told.append(url)
        ready.set()

    sock = open_socket("127.0.0.1", 0)
    server = Server(host, announce, options)
    api = server.api
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert ready.wait(60), "the server did not start"
    yield Api(told[0], api, options.api_key)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive(), "the server did not stop"


def eventually(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Whether it holds within that time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which has OpenAI's shape."""
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    error: dict[str, Any] = body["error"]
    assert error["message"], body
    return error
