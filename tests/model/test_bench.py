"""`transformers-llamacpp bench` from its options to its JSON, on tiny models; `benchmarks/speed.py` on made-up figures."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks import speed

from child import environment
from transformers_llamacpp import cli
from transformers_llamacpp.bench.child import settle
from transformers_llamacpp.bench.measure import WITH_TORCH, YARDSTICKS, Measured, Participant, measure
from transformers_llamacpp.bench.plan import Case, Settings
from transformers_llamacpp.bench.process import Process
from transformers_llamacpp.bench.prompts import prompts
from transformers_llamacpp.bench.runs import Run
from transformers_llamacpp.bench.table import table
from transformers_llamacpp.errors import LlamaCppError

pytestmark = pytest.mark.once

QUICK = ["--tokens", "6", "--rounds", "2", "--prompts", "5,40", "--rows", "1,3", "--threads", "1"]
FIGURES = ("tokens_per_second", "first_seconds", "whole_seconds")


@pytest.fixture(scope="module")
def bench(tiny_llama_path: Path, tmp_path_factory: Any) -> Any:
    """What one run printed and wrote."""
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *text, **how: lines.append("" if how.get("file") else str(*text)))
        assert cli.main(["bench", str(tiny_llama_path), *QUICK, "--modes", "greedy,min-p", "--json", str(file)]) == 0
    return "\n".join(lines), json.loads(file.read_text(encoding="utf-8"))


def test_everybody_counts_the_same_tokens(bench: Any) -> None:
    cases = bench[1]["cases"]
    shapes = [(case["mode"], case["prompt_tokens"], case["rows"]) for case in cases]
    assert shapes == [(mode, prompt, rows) for mode in ("greedy", "min-p") for prompt, rows in ((5, 1), (40, 1), (5, 3))]
    for case in cases:
        greedy, alone = case["mode"] == "greedy", case["rows"] == 1
        expected = {"bare": greedy, "llama-cpp-python": alone, "ours": True, "plain-loop": True, "torch": greedy and alone}
        assert case["contenders"].keys() == {name for name, takes_part in expected.items() if takes_part}
        for name, found in case["contenders"].items():
            assert found["new_tokens"] == (2 if name == "torch" else 6 * case["rows"]), (name, case)
            assert len(found["rounds"]) == 2
            for figures in found["rounds"]:
                assert 0 < figures["first_seconds"] < figures["whole_seconds"] and figures["tokens_per_second"] > 0


def test_greedy_tokens_are_equal(bench: Any) -> None:
    for case in bench[1]["cases"][:3]:
        found = {name: one["answer"] for name, one in case["contenders"].items()}
        expected = found.pop("bare")
        assert "ours" in found and (case["rows"] > 1 or {"llama-cpp-python", "torch"} <= found.keys())
        assert len({tuple(row) for row in expected}) == case["rows"], "each row has its own prompt"
        for name, answer in found.items():
            assert answer == [row[: len(answer[0])] for row in expected], name


def test_medians_and_ratios_are_those_of_the_rounds(bench: Any) -> None:
    contenders = bench[1]["cases"][0]["contenders"]
    ours, bare = (contenders[name]["rounds"] for name in ("ours", "bare"))
    for figure in FIGURES:
        assert contenders["ours"]["medians"][figure] == statistics.median(one[figure] for one in ours)
        ratios = [mine[figure] / theirs[figure] for mine, theirs in zip(ours, bare, strict=True)]
        assert contenders["ours"]["median_ratios"]["bare"][figure] == pytest.approx(statistics.median(ratios))
    assert contenders["torch"]["median_ratios"]["bare"].keys() == {*FIGURES} - {"whole_seconds"}, "it writes fewer tokens"


def test_each_process_has_only_what_it_needs(bench: Any) -> None:
    found = bench[1]["participants"]
    assert [name for name, one in found.items() if one["problem"]] == []
    peaks = {name: one["peak_bytes"] for name, one in found.items()}
    assert peaks.keys() == {"bare", "llama-cpp-python", "ours", "plain-loop", "torch", *YARDSTICKS}
    for name in ("bare", "llama-cpp-python"):
        assert 10e6 < peaks[name] < 0.6 * peaks["ours"], f"{name} has no torch: {peaks}"
    assert peaks["bare"] < 0.6 * peaks[WITH_TORCH] and peaks[WITH_TORCH] < 1.2 * peaks["ours"], peaks


def test_the_table_fits(bench: Any) -> None:
    text, content = bench
    lines = text.split("\n")
    assert max(map(len, lines)) <= 100
    for label in ("bare llama.cpp loop", "llama-cpp-python", "transformers-llamacpp", "transformers' GGUF in torch"):
        assert any(line.startswith(f"  {label} ") for line in lines), label
    assert "greedy, prompt of 5 tokens, 3 rows" in lines
    assert content["machine"]["logical_cores"] >= 1 and content["versions"]["llama-cpp-python"]


def test_prompts_differ_from_row_to_row(tiny_llama_path: Path) -> None:
    texts = prompts(tiny_llama_path, 700, 20)
    assert [len(text) for text in texts] == [700] * 20
    assert len({tuple(text) for text in texts}) == 20
    assert prompts(tiny_llama_path, 5, 3) == [text[:5] for text in texts[:3]] and texts[0][:5] != texts[1][:5]


# -- what goes wrong -----------------------------------------------------------------------------------------------------


def test_who_cannot_be_loaded_is_left_out(tiny_hybrid_path: Path) -> None:
    settings = Settings(tokens=3, rounds=1, modes=("greedy",), prompts=(4,), rows=(1,), contenders=("torch", "bare"), threads=1)
    measured = measure(tiny_hybrid_path, settings)
    assert "jamba" in (measured.participants["torch"].problem or "")
    assert [*measured.runs[Case("greedy", 4, 1)]] == ["bare"]
    assert max(map(len, table(measured).split("\n"))) <= 100 and "left out: torch: " in table(measured)


def test_a_process_that_dies_is_an_error(tiny_llama_path: Path) -> None:
    with closing(Process("bare", tiny_llama_path, 64, 64, 1, 1)) as process:
        assert process.run("greedy", [[5, 6, 7]], 2).new_tokens == 2
        with pytest.raises(LlamaCppError, match=r"bare: .*llama_decode"):
            process.run("greedy", [[5, 6, 7]], 500)  # more than there are cells
        process._child.kill()
        with pytest.raises(LlamaCppError, match="bare: its process ended with status"):
            process.run("greedy", [[5, 6, 7]], 2)
    process.close()


def test_a_process_that_goes_on_computing_is_seen() -> None:
    assert not settle(5.0)
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        assert settle(0.1)
    finally:
        stop.set()
        thread.join()


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is no signal that can be sent to one process on Windows")
def test_ctrl_c_ends_it_and_all_its_processes(tiny_llama_path: Path) -> None:
    command = [sys.executable, "-m", "transformers_llamacpp", "bench", str(tiny_llama_path), "--rounds", "1000000"]
    command += ["--contenders", "bare", "--modes", "greedy", "--rows", "1", "--prompts", "9", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as program:
        assert program.stdout is not None and program.stderr is not None
        assert program.stderr.readline() == "loading\n"
        assert program.stderr.readline().startswith("[1/1] greedy")
        children = psutil.Process(program.pid).children()
        assert len(children) == 1
        program.send_signal(signal.SIGINT)
        assert "Traceback" not in program.stderr.read() and program.stdout.read() == ""
        assert program.wait() == 130
    assert psutil.wait_procs(children, timeout=10)[1] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1"], "1 is below its minimum 2"),
        (["--rounds", "0"], "0 is below its minimum 1"),
        (["--rows", "1,x"], "invalid list value: '1,x'"),
        (["--prompts", "0"], "0 is below its minimum 1"),
        (["--modes", "greedy,beam"], "'beam' is not one of greedy, top-k, top-p, min-p"),
        (["--contenders", "bare,theirs"], "'theirs' is not one of bare, llama-cpp-python, ours, plain-loop, torch"),
        (["--threads", "0"], "0 is below its minimum 1"),
    ],
)
def test_bad_options_are_clear_errors(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "no-such.gguf", *arguments])
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_cannot_be_done_is_told_before_anything_is_measured(tiny_llama_path: Path, tmp_path: Path, capsys: Any) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("hello", encoding="utf-8")
    for arguments, message in (
        ([str(tmp_path / "missing.gguf")], "missing.gguf"),
        ([str(text)], "text.gguf"),
        ([str(tiny_llama_path), "--json", str(tmp_path / "missing" / "x.json")], "cannot be written"),
        ([str(tiny_llama_path), "--modes", "top-p", "--contenders", "bare"], "none of the contenders takes part"),
    ):
        assert cli.main(["bench", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error and "warm-up" not in error


# -- the goals -----------------------------------------------------------------------------------------------------------


def test_goals() -> None:
    def run(seconds: float, rows: int = 1, first: float = 1.0) -> Run:
        return Run(first, first + seconds, [[0] * 101] * rows)

    alone, batch, long, sampled = (
        Case("greedy", 16, 1), Case("greedy", 16, 8), Case("greedy", 2000, 1), Case("top-p", 16, 1)
    )  # fmt: skip
    measured = Measured(Path("x.gguf"), Settings(), 2)
    measured.runs = {
        alone: {"bare": [run(1.0), run(2.0)], "ours": [run(1.0), run(2.1)], "torch": [run(4.0), run(8.0)]},
        batch: {"bare": [run(1.0, 8)], "ours": [run(1.2, 8)]},
        long: {"bare": [run(1.0, first=2.0)], "ours": [run(1.0, first=2.1)]},
        sampled: {"llama-cpp-python": [run(1.0)], "ours": [run(0.5)]},
    }
    measured.participants = {"ours": Participant(peak_bytes=120), WITH_TORCH: Participant(peak_bytes=100)}
    found = {text: (wanted, statistics.median(values), met) for text, wanted, values, met in speed.goals(measured)}
    assert found == {
        "greedy, 16 tokens, 1: tokens/s / bare loop": ("≥ 0.97", pytest.approx((1 + 2 / 2.1) / 2), True),
        "greedy, 2000 tokens, 1: tokens/s / bare loop": ("≥ 0.97", pytest.approx(1.0), True),
        "top-p, 16 tokens, 1: tokens/s / llama-cpp-python": ("≥ 1", pytest.approx(2.0), True),
        "greedy, 16 tokens, 8: tokens/s / bare decode": ("≥ 0.9", pytest.approx(1 / 1.2), False),
        "greedy, 2000 tokens, 1: first token / bare loop": ("≤ 1.03", pytest.approx(1.05), False),
        "greedy, 16 tokens, 1: tokens/s / transformers' GGUF": ("≥ 3", pytest.approx((4 + 8 / 2.1) / 2), True),
        "peak memory / bare + torch": ("≤ 1.1", pytest.approx(1.2), False),
    }
