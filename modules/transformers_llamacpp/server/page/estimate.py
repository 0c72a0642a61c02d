"""How much memory a model will take, before it is loaded: what llama.cpp allocates, worked out from what the file says.

Compared with llama.cpp's own figures (SmolLM2, Gemma 3 with sliding windows; with and without flash attention, quantised KV,
several batch sizes): the KV cells are exact, the rest within 3 %.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files import resolve_gguf
from ...gguf_reader import shard_names
from ...native import NativeModel, build
from ...options import option

__all__ = ["Estimate", "Facts", "estimate", "facts_of", "free_memory"]

TYPE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}  # fmt: skip
"""Bytes of one number of the K or V cache."""

PAD = 256
"""llama.cpp makes cells in steps of as many."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a file says about itself. `window` is 0 without a sliding one, `windowed` how many layers have it."""

    name: str
    architecture: str
    description: str
    file_bytes: int
    parameters: int
    n_ctx_train: int
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    key_width: int
    value_width: int
    n_vocab: int
    window: int
    windowed: int
    has_state: bool
    has_cells: bool
    templates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes. `weights` are mapped from the file, so that other programs may share them and the system may drop them."""

    weights: int
    cells: int
    compute: int
    n_cells: int
    exact: bool
    """False where part of the memory is a recurrent state, which is not counted."""

    @property
    def total(self) -> int:
        return self.weights + self.cells + self.compute


def facts_of(source: str) -> Facts:
    """Of a file, or a folder with one; hub repositories are not asked. Raises `ModelLoadError`."""
    path = resolve_gguf(source)
    return _facts(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=32)
def _facts(path: Path, changed: int) -> Facts:
    native = NativeModel(path, build({"vocab_only": True}))
    try:
        metadata, architecture = native.metadata, native.metadata.get("general.architecture", "unknown")

        def number(key: str, otherwise: int) -> int:
            value = metadata.get(f"{architecture}.{key}", "")
            return int(value) if value.isdigit() else otherwise

        key_width = native.n_embd_head_k
        window = number("attention.sliding_window", 0)
        pattern = number("attention.sliding_window_pattern", 6 if architecture == "gemma3" else 2)
        prefix = "tokenizer.chat_template"
        return Facts(
            name=metadata.get("general.name", path.stem),
            architecture=architecture,
            description=native.description,
            file_bytes=sum(_size(path.parent / name) for name in shard_names(path.name)),
            parameters=native.n_params,
            n_ctx_train=native.n_ctx_train,
            n_layer=native.n_layer,
            n_embd=native.n_embd,
            n_head=native.n_head,
            n_head_kv=native.n_head_kv,
            key_width=key_width,
            value_width=number("attention.value_length", key_width),
            n_vocab=native.vocab.n_tokens,
            window=window,
            windowed=native.n_layer - native.n_layer // pattern if window and pattern > 1 else 0,
            has_state=native.has_state,
            has_cells=native.has_cells,
            templates=tuple(key[len(prefix) + 1 :] or "default" for key in sorted(metadata) if key.startswith(prefix)),
        )
    finally:
        native.close()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def estimate(facts: Facts, options: Mapping[str, Any]) -> Estimate:
    """For a load with `options`; what is missing has the option table's default."""

    def value(name: str) -> Any:
        given = options.get(name)
        return option(name).default if given is None else given

    n_ctx = value("n_ctx") or facts.n_ctx_train
    n_cells = _padded(value("n_cells") or n_ctx)
    n_ubatch = max(1, min(value("n_ubatch") or value("n_batch"), value("n_batch"), n_cells))
    windowed = 0
    n_seq = value("n_seq_max") or (8 if facts.has_state or (facts.window and not value("swa_full")) else 64)
    if facts.window and not value("swa_full"):
        windowed = min(n_cells, _padded(facts.window * n_seq + n_ubatch))
    type_k, type_v = (TYPE_BYTES[str(value(name))] for name in ("type_k", "type_v"))
    per_cell = facts.n_head_kv * (facts.key_width * type_k + facts.value_width * type_v)
    full = facts.n_layer - facts.windowed if windowed else facts.n_layer
    kv = per_cell * (full * n_cells + (facts.windowed * windowed if windowed else 0)) if facts.has_cells else 0
    row = 4 * n_ubatch
    logits = row * (facts.n_vocab + 3 * facts.n_embd)
    flash = bool(value("flash_attn"))
    attention = 0 if flash or not facts.has_cells else row * (n_cells * (facts.n_head + 1) + 6 * facts.n_embd)
    compute = max(logits, attention) + 4 * n_seq * facts.n_vocab
    return Estimate(facts.file_bytes, int(kv), int(compute), n_cells, not facts.has_state)


def _padded(cells: int) -> int:
    return -(-cells // PAD) * PAD


def free_memory() -> int | None:
    """Bytes that programs may still take, where the system says so."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
