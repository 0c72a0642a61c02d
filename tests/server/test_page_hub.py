"""Files from a hub: on this machine, since no test may need the network."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import fake_hub
from transformers_llamacpp.errors import ModelLoadError, OptionError
from transformers_llamacpp.server.host import ModelHost
from transformers_llamacpp.server.page.hub import Hub, RemoteFile
from transformers_llamacpp.server.page.load import fetch_task

pytestmark = pytest.mark.once

BIG = b"GGUF" + os.urandom(12 << 20)
FILES = {
    "Model-Q4.gguf": BIG, "mmproj-Model.gguf": b"GGUF", "README.md": b"#", "big/Two-00001-of-00002.gguf": b"GGUF" + bytes(1000),
    "big/Two-00002-of-00002.gguf": b"GGUF" + bytes(500),
}  # fmt: skip


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with fake_hub.running({"owner/Some-GGUF": FILES, "owner/None": {"README.md": b"#"}}) as address:
        yield address


@pytest.fixture
def hub(endpoint: str, online: None) -> Hub:
    return Hub(endpoint)


def test_the_models_of_a_repository(hub: Hub) -> None:
    listed = [RemoteFile("big/Two-00001-of-00002.gguf", 1508), RemoteFile("Model-Q4.gguf", len(BIG))]
    assert hub.files("owner/Some-GGUF") == listed
    assert hub.files(" https://huggingface.co/owner/Some-GGUF/ ") == listed


@pytest.mark.parametrize(
    ("repo", "message"),
    [("owner/None", "no GGUF file"), ("owner/Gone", "no repository owner/Gone"), ("not a name", "OWNER/NAME"),
     ("", "OWNER/NAME"), ("../../etc", "OWNER/NAME"), ("a/b/c", "OWNER/NAME")],
)  # fmt: skip
def test_repositories_without(hub: Hub, repo: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        hub.files(repo)


def test_a_hub_that_cannot_be_reached(online: None) -> None:
    with pytest.raises(ModelLoadError, match="cannot be reached"):
        Hub("http://127.0.0.1:9").files("owner/Some-GGUF")


def test_offline(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE"):
        Hub(endpoint).files("owner/Some-GGUF")


def test_a_file_comes_into_the_model_folder(hub: Hub, tmp_path: Path) -> None:
    host = ModelHost(tmp_path / "models")
    task = fetch_task(hub, host, "owner/Some-GGUF", "Model-Q4.gguf")
    shares = []
    while task.running(0.01):
        shares.append(task.share)
    assert task.error is None and task.result == "owner/Some-GGUF/Model-Q4.gguf" and task.share == 1
    assert shares == sorted(shares)
    assert Path(host.sources()[task.result]).read_bytes() == BIG


def test_all_shards_come(hub: Hub, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    name, stop = "big/Two-00001-of-00002.gguf", threading.Event()
    path = hub.fetch("owner/Some-GGUF", name, tmp_path, lambda *now: told.append(now), stop)
    assert path == tmp_path / "owner/Some-GGUF/big/Two-00001-of-00002.gguf"
    assert (path.parent / "Two-00002-of-00002.gguf").stat().st_size == 504
    assert told[-1] == (1508, 1508)


def test_a_download_can_be_stopped(online: None, tmp_path: Path) -> None:
    with fake_hub.running({"owner/Some-GGUF": FILES}, pause=0.01) as address:
        task = fetch_task(Hub(address), ModelHost(tmp_path), "owner/Some-GGUF", "Model-Q4.gguf")
        task.stop.set()
        assert not task.running(30)
    assert isinstance(task.error, ModelLoadError) and "stopped" in str(task.error)
    assert not list(tmp_path.glob("owner/*/*.gguf")), "half a file is no model"


@pytest.mark.parametrize("name", ["gone.gguf", "../x.gguf", "README.md", "big/Two-00002-of-00002.gguf"])
def test_only_files_of_the_list_are_fetched(hub: Hub, tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelLoadError, match="has no model"):
        hub.fetch("owner/Some-GGUF", name, tmp_path, lambda *now: None, threading.Event())


def test_nothing_chosen(hub: Hub, tmp_path: Path) -> None:
    task = fetch_task(hub, ModelHost(tmp_path), "", "")
    assert not task.running(10) and isinstance(task.error, OptionError)
