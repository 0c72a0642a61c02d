"""webui-install and webui-run on a whole webui."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from transformers_llamacpp import cli
from webui import folders
from webui.driver import NAMES, Webui

pytestmark = pytest.mark.once

MODULES = folders.REPOSITORY / "modules"


@pytest.mark.parametrize("how", ["--copy", "--link"])
def test_installed_started_with_one_load_and_removed(
    start_webui: Callable[..., Webui], webui_folder: Path, tiny_llama_path: Path, how: str
) -> None:
    name = folders.add_model(webui_folder, tiny_llama_path)
    before = folders.hashes(webui_folder)
    python = folders.python()
    assert cli.main(["webui-install", str(webui_folder), how, "--python", python]) == 0
    command = [sys.executable, "-m", "transformers_llamacpp", "webui-run", str(webui_folder), "--python", python, "--"]
    webui = start_webui(
        "--nowebui", "--model", name, "--loader", "llamacpp_HF", "--ctx-size", "256", command=command,
        env={"PYTHONPATH": os.pathsep.join([str(NAMES), str(MODULES)])},
    )  # fmt: skip
    assert webui.complete("a", max_tokens=4)
    log = " ".join(webui.log().split())
    assert log.count("256 tokens") == 1 and log.count(f'Loading "{name}"') == 1
    webui.stop()
    assert cli.main(["webui-install", str(webui_folder), "--uninstall"]) == 0
    assert folders.hashes(webui_folder) == before
