"""A server on the small model, in this process so that a test can look inside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from transformers_llamacpp.server.app import Server, open_socket
from transformers_llamacpp.server.host import ModelHost

OPTIONS = {"n_ctx": 4096, "n_batch": 32, "n_ubatch": 32}
"""Small batches: a long prompt has many decodes between which it can be stopped."""


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
