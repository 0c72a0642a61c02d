"""The command line: in this process where that shows the same, as a program where signals and exit statuses matter."""

from __future__ import annotations

import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from transformers_llamacpp import cli
from transformers_llamacpp.errors import InvalidInputError
from transformers_llamacpp.options import options_in
from transformers_llamacpp.perplexity import perplexity, windows

pytestmark = pytest.mark.once

COMMANDS = ("serve", "generate", "chat", "info", "perplexity", "bench", "webui-install", "webui-run")
PROGRAM = [sys.executable, "-m", "transformers_llamacpp"]


def help_of(command: str, capsys: Any) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: Any) -> None:
    text = help_of(command, capsys)
    groups = () if command in ("info", "bench", "webui-install", "webui-run") else ("context", "model")
    for entry in (entry for group in groups for entry in options_in(group)):
        assert "--" + entry.name.replace("_", "-") in text
        assert " ".join(entry.help.split()) in text


def test_values_are_checked_before_a_model_is_loaded(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", "no-such.gguf", "x", "--top-p", "3"])
    assert ended.value.code == 2
    assert "above its maximum" in capsys.readouterr().err


def test_errors_are_one_line(tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("hello", encoding="utf-8")
    for arguments in (
        ["info", str(text)],
        ["generate", str(tmp_path / "missing.gguf"), "x"],
        ["chat", str(text)],
        ["perplexity", str(text), "--text-file", str(tmp_path / "missing.txt")],
        ["serve", "--model", str(text)],
        ["serve"],
        ["serve", "--model-dir", str(tmp_path / "missing")],
        ["serve", "--model", str(text), "--host", "0.0.0.0"],
    ):
        assert cli.main(arguments) == 2, arguments
        captured = capsys.readouterr()
        assert captured.err.count("\n") == 1 and captured.err.startswith("transformers-llamacpp: "), captured.err


def test_info(smollm2_path: Path, capsys: Any) -> None:
    assert cli.main(["info", str(smollm2_path), "--all"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"architecture +llama$", text, re.MULTILINE)
    assert re.search(r"parameters +134,515,008$", text, re.MULTILINE)
    assert re.search(r"trained context +8,192 tokens$", text, re.MULTILINE)
    assert re.search(r"chat template +yes$", text, re.MULTILINE)
    assert "llama.block_count = 30" in text


def test_generate(smollm2_path: Path, capsys: Any, monkeypatch: Any) -> None:
    arguments = ["generate", str(smollm2_path), "--temperature", "0", "--max-new-tokens", "8", "--n-ctx", "256"]
    assert cli.main([*arguments, "The capital of France is"]) == 0
    first = capsys.readouterr()
    assert "Paris" in first.out
    assert re.search(r"\[8 tokens, [\d.]+ tokens/s; prompt 5 tokens: 0 reused, 5 evaluated in .*\]", first.err)
    monkeypatch.setattr("sys.stdin", io.StringIO("The capital of France is"))
    assert cli.main([*arguments, "-"]) == 0
    assert capsys.readouterr().out == first.out


def test_chat(smollm2_path: Path, capsys: Any, monkeypatch: Any) -> None:
    lines = ["Hello, my name is Bob.", "What is my name?", "/regenerate", "/clear", "Hi", "/what", "/exit", "not read"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    arguments = ["chat", str(smollm2_path), "--temperature", "0", "--max-new-tokens", "6", "--system", "Be terse."]
    assert cli.main(arguments) == 0
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) >= 4
    turns = [tuple(map(int, turn)) for turn in re.findall(r"prompt (\d+) tokens: (\d+) reused, (\d+)", captured.err)]
    assert len(turns) == 4, captured.err
    first, second, again, after_clear = turns
    assert second[1] >= first[0] and second[2] < 25, "the second turn evaluates only what is new"
    assert again[0] == second[0] and again[2] == 1
    assert after_clear[0] < first[0]
    assert captured.err.count("/regenerate answers again") == 2  # at the start, and for the unknown command


def test_every_token_is_scored_once() -> None:
    for length in (2, 3, 7, 8, 9, 30):
        for size in (2, 3, 8, 40):
            spans = list(windows(length, size))
            scored = [token for _, first, end in spans for token in range(first, end)]
            assert scored == list(range(1, length)), (length, size)
            assert all(begin < first and end - begin <= size for begin, first, end in spans)


def test_perplexity_is_that_of_the_model(smollm2_f32: Any) -> None:
    text = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 6
    ids = smollm2_f32.tokenizer(text, return_tensors="pt").input_ids
    value, tokens = perplexity(smollm2_f32, text)
    assert tokens == ids.shape[1] - 1 > 64
    assert math.log(value) == pytest.approx(float(smollm2_f32(ids, labels=ids).loss), abs=1e-3)
    assert perplexity(smollm2_f32, text, window=32)[0] > value, "less context predicts worse"
    with pytest.raises(InvalidInputError):
        perplexity(smollm2_f32, text, window=1)
    with pytest.raises(InvalidInputError):
        perplexity(smollm2_f32, "", window=32)


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is no signal that can be sent to one process on Windows")
def test_ctrl_c_ends_an_answer_cleanly(smollm2_path: Path) -> None:
    command = [*PROGRAM, "generate", str(smollm2_path), "Once upon a time", "--max-new-tokens", "4000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        error = process.stderr.read().decode()
        assert process.wait() == 130
        assert time.monotonic() - began < 20
    assert "Traceback" not in error, error


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is no signal that can be sent to one process on Windows")
def test_ctrl_c_ends_a_server_and_its_streams(smollm2_path: Path) -> None:
    import httpx

    command = [*PROGRAM, "serve", "--model", str(smollm2_path), "--port", "0", "--no-page", "--api-key", "k"]
    body = {"prompt": "Once", "max_tokens": 4000, "stream": True, "ban_eos_token": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ready = re.search(r"http\S+", process.stdout.readline())
        assert ready is not None and ready[0].endswith("/v1")
        headers = {"authorization": "Bearer k"}
        with httpx.stream("POST", f"{ready[0]}/completions", json=body, headers=headers, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGINT)
            began = time.monotonic()
            last = [line for line in lines if line][-1]
        assert "shutting down" in last
        rest = process.stdout.read()
        assert process.wait() in (0, 130) and time.monotonic() - began < 20
    assert "Traceback" not in rest, rest


def test_serve_tells_the_address_and_ends_on_sigterm(smollm2_path: Path) -> None:
    command = [*PROGRAM, "serve", "--model", str(smollm2_path), "--port", "0", "--n-ctx", "256"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert lines[0].startswith("Loading"), lines
        assert re.search(r"Ready: open http://127\.0\.0\.1:\d+ in a browser; the API is at http", lines[1]), lines
        process.terminate()
        rest = process.stdout.read()
        process.wait(30)
    assert "Traceback" not in rest, rest
