"""What the README shows runs as it is written."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from transformers_llamacpp import cli

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[2]


def blocks(language: str) -> list[str]:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)


def test_the_python_example(smollm2_path: Path, tmp_path: Path) -> None:
    example, _ = blocks("python")
    named = re.search(r'"(models/.+?\.gguf)"', example)
    assert named is not None
    example = example.replace(named[1], smollm2_path.as_posix())
    done = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *answer, stats = done.stdout.strip().splitlines()
    assert answer and re.search(r"prompt_tokens=\d+, reused_tokens=0", stats), done.stdout


def test_the_client_of_the_api(address: str) -> None:
    _, example = blocks("python")
    assert "http://localhost:7860" in example
    example = example.replace("http://localhost:7860", address)
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *streamed, parsed = done.stdout.strip().splitlines()
    assert "".join(streamed).strip(), done.stdout
    assert re.fullmatch(r" ?name=(['\"]).*\1 country=(['\"]).*\2", parsed), done.stdout


def test_the_requests_of_the_api(address: str) -> None:
    requests = re.findall(r"^curl localhost:7860(\S+) .*?-d '(.*?)'$", "".join(blocks("sh")), re.MULTILINE | re.DOTALL)
    assert len(requests) == 2
    for path, body in requests:
        answer = httpx.post(address + path, json=json.loads(body), timeout=120)
        assert answer.status_code == 200, answer.text
        assert "choices" in answer.text


def test_the_command_lines() -> None:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("transformers-llamacpp ")]
    assert lines
    for line in lines:
        words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', line.split("#")[0])]
        cli.build_parser().parse_args(words[1:])


def test_the_files_it_names_are_there() -> None:
    engine = ROOT / "modules" / "transformers_llamacpp"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", readme))
    assert len(named) > 15
    missing = [name for name in named if not (engine / name).is_file() and not (ROOT / name).is_file()]
    assert not missing
