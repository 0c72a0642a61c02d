"""`ModelHost` and `open_socket` without a model: who may load what, and what happens to the calls that run."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from transformers_llamacpp.errors import ClosedError, LlamaCppError, ModelLoadError, OptionError
from transformers_llamacpp.server.app import create_app, open_socket
from transformers_llamacpp.server.host import ModelHost, gguf_files
from transformers_llamacpp.server.limits import ServeOptions

pytestmark = pytest.mark.once


class FakeModel:
    def __init__(self, source: str, options: Mapping[str, Any]) -> None:
        self.source, self.options, self.closed = source, options, False

    def close(self) -> None:
        self.closed = True


def load_fake(source: str, options: Mapping[str, Any]) -> FakeModel:
    if "broken" in source:
        raise ModelLoadError("llama.cpp cannot load it")
    return FakeModel(source, options)


@pytest.fixture
def host(tmp_path: Path) -> ModelHost:
    for name in ("a.gguf", "sub/b.gguf", "broken.gguf", "big-00001-of-00002.gguf", "big-00002-of-00002.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF")
    (tmp_path / "text.gguf").write_bytes(b"hello")
    return ModelHost(tmp_path, {"n_ctx": 100, "n_threads": 3}, load_fake)


def test_models_of_a_folder(host: ModelHost) -> None:
    names = list(gguf_files(host.model_dir))
    assert sorted(names) == ["a.gguf", "big-00001-of-00002.gguf", "broken.gguf", "sub/b.gguf", "text.gguf"]


def test_options_of_a_load_go_before_the_defaults(host: ModelHost) -> None:
    host.load("a.gguf", {"n_ctx": 200, "n_threads": None})
    assert host.model.options == {"n_ctx": 200}
    assert host.name == "a.gguf"


@pytest.mark.parametrize("name", ["", "../a.gguf", "missing.gguf", "/etc/hostname", "sub"])
def test_only_names_of_the_list_are_loaded(host: ModelHost, name: str) -> None:
    with pytest.raises(ModelLoadError, match="there is no model"):
        host.load(name, {})


def test_the_model_of_the_command_line_may_lie_elsewhere(host: ModelHost, tmp_path_factory: Any) -> None:
    outside = tmp_path_factory.mktemp("outside") / "c.gguf"
    outside.write_bytes(b"GGUF")
    assert host.add(str(outside)) == "c.gguf"
    host.load("c.gguf", {})
    assert host.model.source == str(outside)
    assert host.add(str(host.model_dir / "sub" / "b.gguf")) == "sub/b.gguf", "a file of the folder keeps its name"
    assert host.add("owner/repository") == "owner/repository"


def test_a_file_that_is_no_model_leaves_the_old_one(host: ModelHost) -> None:
    host.load("a.gguf", {})
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        host.load("text.gguf", {})
    assert host.name == "a.gguf" and not host.model.closed


def test_a_failed_load_says_why_until_the_next(host: ModelHost) -> None:
    host.load("a.gguf", {})
    old = host.model
    with pytest.raises(ModelLoadError):
        host.load("broken.gguf", {})
    assert old.closed and host.model is None
    with pytest.raises(ModelLoadError, match="cannot load"), host.use(threading.Event()):
        pass
    host.load("a.gguf", {})
    assert host.error is None


def test_a_load_stops_the_calls_and_waits_for_them(host: ModelHost) -> None:
    host.load("a.gguf", {})
    stop, inside, order = threading.Event(), threading.Event(), []

    def call() -> None:
        with host.use(stop) as model:
            inside.set()
            stop.wait(10)
            time.sleep(0.05)
            order.append(("call ended", model.closed))

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait(10)
    old = host.model
    host.load("sub/b.gguf", {})
    order.append(("loaded", old.closed))
    thread.join()
    assert order == [("call ended", False), ("loaded", True)]
    assert host.calls == 0


def test_no_model(host: ModelHost) -> None:
    with pytest.raises(LlamaCppError, match="no model is loaded"), host.use(threading.Event()):
        pass


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.5", "example.com", ""])
def test_only_loopback_addresses_without_a_key(address: str) -> None:
    with pytest.raises(OptionError, match=r"--api-key|an address of this machine"):
        open_socket(address, None)


def test_a_key_opens_other_addresses() -> None:
    with open_socket("0.0.0.0", 0, has_key=True) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


def test_a_busy_port(host: ModelHost) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"port {port} is not free"):
            open_socket("127.0.0.1", port)
        with open_socket("localhost", None, default=port) as found:
            assert port < found.getsockname()[1] < port + 20


def test_requests_for_another_name_are_refused(host: ModelHost) -> None:
    from starlette.testclient import TestClient

    client = TestClient(create_app(host), base_url="http://127.0.0.1")
    assert client.get("/").status_code == 200
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/docs", headers={"host": "evil.example"}).status_code == 400


def test_the_page_lies_beside_the_api(host: ModelHost) -> None:
    from starlette.testclient import TestClient

    client = TestClient(create_app(host), base_url="http://127.0.0.1")
    assert "gradio" in client.get("/").text.lower()
    assert client.get("/v1/models").json() == {"object": "list", "data": []}
    without = TestClient(create_app(host, ServeOptions(page=False)), base_url="http://127.0.0.1")
    assert without.get("/").status_code == 404 and without.get("/v1/models").status_code == 200


def test_an_api_alone_needs_no_gradio() -> None:
    program = "import sys; from transformers_llamacpp.server import app; sys.exit('gradio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_draft_model_goes_with_every_model(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "small.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    host = ModelHost(tmp_path, {"n_ctx": 100, "type_k": "f32"}, load_fake, draft=str(tmp_path / "small.gguf"))
    host.load("a.gguf", {})
    draft = host.model.assistant_model
    assert draft.source.endswith("small.gguf") and draft.options == {"n_ctx": 100}
    named = host.draft("b.gguf")
    assert host.draft("b.gguf") is named
    with pytest.raises(OptionError, match="no model"):
        host.draft("../b.gguf")
    host.unload()
    assert draft.closed and named.closed


def test_who_waited_for_another_model_is_told(host: ModelHost) -> None:
    host.load("a.gguf", {})
    change = host.changes
    with host.use(threading.Event(), change):
        pass
    host.load("sub/b.gguf", {})
    with pytest.raises(ClosedError, match="while the call waited"), host.use(threading.Event(), change):
        pass


def test_nobody_comes_in_while_the_others_go_out(host: ModelHost) -> None:
    host.load("a.gguf", {})
    stop, inside, refused = threading.Event(), threading.Event(), []

    def call() -> None:
        with host.use(stop):
            inside.set()
            stop.wait(10)
            try:
                with host.use(threading.Event()):
                    pass
            except LlamaCppError as error:
                refused.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    inside.wait(10)
    host.unload()
    thread.join(10)
    assert refused == ["no model is loaded: choose a file first"]
