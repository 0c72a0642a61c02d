"""Memory of `generate()` beside the bare low-level API: no buffer of ours may grow with `n_ctx * n_vocab`."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.greedy import run

pytestmark = pytest.mark.once


def test_a_long_context_costs_what_llama_cpp_needs_for_it(gemma_path: Path) -> None:
    arguments = [str(gemma_path), "--n-ctx", "32768", "--prompt", "10", "--tokens", "1"]
    torch = run("ours.py", str(gemma_path), "--only-torch")["peak_bytes"]
    bare = run("bare.py", *arguments)["peak_bytes"]
    ours = run("ours.py", *arguments)["peak_bytes"]
    assert ours <= bare + torch + 300e6, f"{ours / 1e6:.0f} MB; bare {bare / 1e6:.0f}, torch {torch / 1e6:.0f}"
