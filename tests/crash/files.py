"""Files that are no model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import models
from crash.case import CASES, EITHER, Case, case, greedy
from transformers_llamacpp import LlamaCppForCausalLM


def file(expect: str, name: str, content: Callable[[], bytes | None]) -> None:
    def run() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "broken.gguf"
            data = content()
            if data is not None:
                path.write_bytes(data)
            with LlamaCppForCausalLM.from_pretrained(path, n_ctx=64) as model:
                greedy(model)

    CASES[f"a file that is {name}"] = Case(run, expect, ("broken.gguf",) if expect == "ModelLoadError" else ())


def whole() -> bytes:
    return models.tiny("llama").read_bytes()


def flipped(seed: int) -> bytes:
    """Random damage in the first kilobytes, where keys and tensor names are."""
    data = bytearray(whole())
    random = np.random.default_rng(seed)
    for place in random.integers(8, 9000, 3):
        data[place] = int(random.integers(256))
    return bytes(data)


file("ModelLoadError", "missing", lambda: None)
file("ModelLoadError", "empty", lambda: b"")
file("ModelLoadError", "garbage", lambda: b"not a model " * 1000)
file("ModelLoadError", "zeros", lambda: bytes(100_000))
file("ModelLoadError", "naming a token twice", lambda: whole().replace(b"<0x41>", b"<0x42>", 1))
file("ModelLoadError", "another version", lambda: whole()[:4] + b"\x63\0\0\0" + whole()[8:])
for share in (4, 8, 20, 24, 100, 5000, 20_000, 300_000, -1):
    file("ModelLoadError", f"cut at {share}", lambda share=share: whole()[:share])
for seed in range(12):
    file(EITHER, f"damaged {seed}", lambda seed=seed: flipped(seed))


@case("ModelLoadError")
def a_folder_without_a_model() -> None:
    with tempfile.TemporaryDirectory() as folder:
        LlamaCppForCausalLM.from_pretrained(folder)


for path in ("", ".", "/", "no/such/file.gguf", "no\0file.gguf", "a" * 5000, "../../etc", "x" * 300 + ".gguf"):

    def odd_path(path: str = path) -> None:
        LlamaCppForCausalLM.from_pretrained(path)

    CASES[f"the path {path[:12]!r} of {len(path)}"] = Case(odd_path, "ModelLoadError")


for path in (None, 5, b"x.gguf", ["x.gguf"]):

    def no_path(path: Any = path) -> None:
        LlamaCppForCausalLM.from_pretrained(path)

    CASES[f"the path {path!r}"] = Case(no_path, "Exception")
