"""The parts of start.py that need no installation: flags, requirements, and what pip's output means."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
import start

pytestmark = pytest.mark.once

ROOT = Path(start.__file__).parent


def test_only_the_standard_library() -> None:
    tree = ast.parse((ROOT / "start.py").read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


def test_an_old_python_can_read_it_and_gets_a_message() -> None:
    source = (ROOT / "start.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 7))
    assert source.isascii(), "old Windows consoles"
    with pytest.raises(SystemExit, match=r"this is Python 3\.9\.1, and 3\.10 or newer is needed"):
        start.check_python((3, 9, 1))
    start.check_python((3, 10, 0))


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ([], False),
        (["--port", "1"], False),
        (["--model", "x"], True),
        (["--model=x"], True),
        (["--model-dir", "x"], False),
    ],
)
def test_whether_a_model_is_named(arguments: list[str], chosen: bool) -> None:
    assert start.names_model(arguments) is chosen


def test_requirements_come_from_pyproject() -> None:
    assert start.requirement("torch").startswith("torch>=")
    assert start.requirement("llama-cpp-python").startswith("llama-cpp-python>=0.3.36")
    assert start.requirement("unheard-of") == "unheard-of"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("  [ 45/290] Building CXX object vendor/llama.cpp/x.cpp.o", "compiling  15%"),
        ("[1/7] something small", None),
        ("[ 12%] Building CXX object x", "compiling  12%"),
        (
            "Downloading torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl (191.8 MB)",
            "downloading torch 2.13.0+cpu (191.8 MB)",
        ),
        ("  Downloading https://host/whl/x-1.0.tar.gz#sha256=ab (2 kB)", "downloading x 1.0 (2 kB)"),
        ("  Downloading gradio-6.31.0-py3-none-any.whl.metadata (16 kB)", None),
        ("Building wheel for llama-cpp-python (pyproject.toml): started", "building llama-cpp-python"),
        ("Installing collected packages: a, b", "unpacking"),
        ("Requirement already satisfied: numpy", None),
        ("", None),
    ],
)
def test_tidy(line: str, told: str | None) -> None:
    assert start.tidy(line) == told


NO_COMPILER = """
  CMake Error: CMAKE_C_COMPILER not set, after EnableLanguage
  CMake Error: CMAKE_CXX_COMPILER not set, after EnableLanguage
  *** CMake configuration failed
  ERROR: Failed building wheel for llama-cpp-python
"""
BROKEN_BUILD = """
  ggml-cpu.c:12:5: error: unknown type name 'block_q4_0'
  ninja: build stopped: subcommand failed.
  ERROR: Failed building wheel for llama-cpp-python
"""


@pytest.mark.parametrize(
    ("output", "system", "tool", "parts"),
    [
        (NO_COMPILER, "Linux", "apt-get", ["no working C++ compiler", "sudo apt-get install build-essential"]),
        (NO_COMPILER, "Linux", "dnf", ["sudo dnf install gcc-c++"]),
        (NO_COMPILER, "Darwin", None, ["xcode-select --install"]),
        (NO_COMPILER, "Windows", None, ["winget install Microsoft.VisualStudio", "new terminal"]),
        (
            "Building for: NMake Makefiles\n Running\n 'nmake' '-?'\n failed",
            "Windows",
            None,
            ["C++ compiler", "winget"],
        ),
        (BROKEN_BUILD, "Linux", "apt-get", ["Building llama.cpp failed", "unknown type name", "newer compiler"]),
        ("c++: fatal error: Killed signal terminated program cc1plus", "Linux", None, ["export CMAKE_BUILD_PARALLEL"]),
        ("OSError: [Errno 28] No space left on device", "Linux", None, ["disk is full"]),
        (
            "NewConnectionError(...)\nERROR: No matching distribution found for torch",
            "Linux",
            None,
            ["Check the network"],
        ),
        ("ERROR: No matching distribution found for torch>=2.4", "Darwin", None, ["no torch>=2.4 for Python"]),
        ("something\nERROR: a new kind of error", "Linux", None, ["pip failed", "a new kind of error"]),
        ("nothing that helps", "Linux", None, ["nothing that helps"]),
    ],
)
def test_a_failure_names_the_cure(output: str, system: str, tool: str | None, parts: list[str]) -> None:
    told = start.explain(output, system, tool)
    for part in parts:
        assert part in told
    assert "install.log" in told and "start again" in told.lower()


def test_a_python_without_venv() -> None:
    debian = "The virtual environment was not created successfully because ensurepip is not\navailable."
    assert "sudo apt-get install python3.11-venv" in start.explain_venv(debian, (3, 11))
    assert "No space" in start.explain_venv("Error: No space left", (3, 11))


def test_the_stamp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.touch()
    monkeypatch.setattr(start, "STAMP", tmp_path / "stamp.json")
    monkeypatch.setattr(start, "venv_python", lambda: python)
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    assert not start.installed({"server"})
    (tmp_path / "stamp.json").write_text("no json", encoding="utf-8")
    assert not start.installed({"server"})
    stamp = {"key": start.stamp_key(), "extras": ["dev", "server"], "cmake_args": "", "torch": str(tmp_path)}
    (tmp_path / "stamp.json").write_text(json.dumps(stamp), encoding="utf-8")
    assert start.installed({"server"}) and start.installed({"server", "dev"})
    assert not start.installed({"server", "test"})
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert not start.installed({"server"}), "asked for another build of llama.cpp"
    monkeypatch.delenv("CMAKE_ARGS")
    (tmp_path / "stamp.json").write_text(json.dumps(stamp | {"torch": str(tmp_path / "gone")}), encoding="utf-8")
    assert not start.installed({"server"}), "torch was taken from outside and is no longer there"
    (tmp_path / "stamp.json").write_text(json.dumps(stamp), encoding="utf-8")
    monkeypatch.setattr(start, "stamp_key", lambda: "changed")
    assert not start.installed({"server"})


def test_the_one_download_that_is_large_is_announced() -> None:
    notice = start.CUDA_TORCH_NOTICE.format(python="python", index=start.CPU_TORCH_INDEX)
    assert re.search(r"about \d+ GB", notice) and "To avoid it" in notice and "--cpu-torch" in notice
