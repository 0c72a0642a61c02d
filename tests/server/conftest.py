"""A server on the small model, in this process so that a test can look inside."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import api_server
from page_tab import Tab
from transformers_llamacpp.server.app import Server, open_socket
from transformers_llamacpp.server.host import ModelHost
from transformers_llamacpp.server.limits import Limits, ServeOptions

THREADS = int(os.environ.get("TRANSFORMERS_LLAMACPP_TEST_THREADS", "2"))
F32 = {"type_k": "f32", "type_v": "f32", "flash_attn": False}

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
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page of `address` keeps its presets."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def served(host: ModelHost, data_dir: Path) -> Iterator[tuple[str, Any]]:
    """The address of a server with a page, and its application."""
    ready, told = threading.Event(), []

    def announce(url: str) -> None:
        told.append(url)
        ready.set()

    sock = open_socket("127.0.0.1", 0)
    server = Server(host, announce, ServeOptions(data_dir=data_dir))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert ready.wait(60), "the server did not start"
    yield told[0], server.config.app
    server.should_exit = True
    thread.join(20)


@pytest.fixture(scope="session")
def address(served: tuple[str, Any]) -> str:
    return served[0]


@pytest.fixture(scope="session")
def page(served: tuple[str, Any]) -> Any:
    """The `Page` that `address` serves."""
    return served[1].state.page


@pytest.fixture
def open_tab(browser: Any, address: str, host: ModelHost) -> Iterator[Callable[..., Tab]]:
    """`open_tab(**options of the browser's context)`: the page, opened."""
    contexts = []

    def open_one(**options: Any) -> Tab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        return Tab(context.new_page(), address)

    yield open_one
    for context in contexts:
        context.close()
    assert api_server.eventually(lambda: host.calls == 0), "a closed tab left its answer running"


@pytest.fixture
def tab(open_tab: Callable[..., Tab]) -> Tab:
    tab = open_tab()
    tab.set_number("seed", 1)
    return tab


@pytest.fixture(scope="session")
def api(smollm2_f32_path: Path, tiny_llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[api_server.Api]:
    """The API alone, with the F32 model loaded and a folder of small ones beside it."""
    folder = tmp_path_factory.mktemp("api-models")
    for name, path in (("f32.gguf", smollm2_f32_path), ("tiny.gguf", tiny_llama_path)):
        (folder / name).symlink_to(path)
    (folder / "notes.gguf").write_text("not a model", encoding="utf-8")
    threads = {"n_threads": THREADS, "n_threads_batch": THREADS}
    host = ModelHost(folder, {"n_ctx": 1024, "n_batch": 32, "n_ubatch": 32, **F32, **threads})
    host.load("f32.gguf", {})
    with api_server.running(host, ServeOptions(Limits(parallel=4, max_queue=4, max_choices=8), page=False)) as api:
        yield api
    host.unload()


@pytest.fixture
def loaded(api: api_server.Api) -> Iterator[api_server.Api]:
    """The API with the F32 model, whatever a test before did; every test leaves nothing running behind."""
    if api.state.host.name != "f32.gguf":
        api.state.host.load("f32.gguf", {})
    yield api
    assert api_server.eventually(lambda: api.idle), "a request is still running"
