"""Memory of `generate()` beside the bare low-level API: no buffer of ours may grow with `n_ctx * n_vocab`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from conftest import THREADS
from transformers_llamacpp.bench.process import Process

pytestmark = pytest.mark.once


def peak(name: str, path: Path, *imports: str) -> int:
    with closing(Process(name, path, n_ctx=32768, n_cells=32768, rows=1, threads=THREADS, imports=imports)) as process:
        process.run("greedy", [range(100, 110)], 1)
        return process.peak_bytes()


def test_a_long_context_costs_what_llama_cpp_needs_for_it(gemma_path: Path) -> None:
    bare, ours = peak("bare", gemma_path, "torch"), peak("ours", gemma_path)
    assert ours <= bare + 300e6, f"{ours / 1e6:.0f} MB; bare, with torch in its process, {bare / 1e6:.0f}"
