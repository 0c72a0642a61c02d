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
from ...gguf_reader import read_values, shard_names
from ...options import option

__all__ = ["Estimate", "Facts", "estimate", "facts_of", "free_memory"]

TYPE_BYTES = {
    "f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32,
    "iq4_nl": 18 / 32,
}  # fmt: skip
"""Bytes of one number of the K or V cache."""

PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2, "cohere2": 4, "llama4": 4, "exaone4": 4}

FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S",
    22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS",
    31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
"""`llama_ftype` numbers, which are part of the file format."""

PAD = 256
"""llama.cpp makes cells in steps of as many."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a file says about itself. Of each layer its `key_heads`, and whether it looks through the sliding `window` (0: there
    is none)."""

    name: str
    architecture: str
    kind: str
    """The type of most weights, such as "Q4_K_M"; "" where the file does not say."""
    file_bytes: int
    parameters: int
    n_ctx_train: int
    n_embd: int
    n_head: int
    key_heads: tuple[int, ...]
    key_width: int
    value_width: int
    n_vocab: int
    window: int
    windowed: tuple[bool, ...]
    recurrent: bool
    """It has a state besides its cells, or instead of them."""
    has_template: bool


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


@functools.lru_cache(maxsize=64)
def _facts(path: Path, changed: int) -> Facts:
    values, parameters = read_values(path)
    others = [path.parent / name for name in shard_names(path.name)[1:]]
    architecture = str(values.get("general.architecture", "unknown"))

    def number(key: str, otherwise: int) -> int:
        value = values.get(f"{architecture}.{key}", otherwise)
        return int(max(value, default=otherwise) if isinstance(value, list) else value)

    n_layer, n_embd, n_head = number("block_count", 1), number("embedding_length", 0), max(1, number("attention.head_count", 1))
    key_width = number("attention.key_length", n_embd // n_head)
    recurrent = any(key.startswith((f"{architecture}.ssm.", f"{architecture}.wkv.")) for key in values)
    return Facts(
        name=str(values.get("general.name", path.stem)),
        architecture=architecture,
        kind=FILE_TYPES.get(values.get("general.file_type", -1), ""),
        file_bytes=path.stat().st_size + sum(file.stat().st_size for file in others),
        parameters=parameters + sum(read_values(file)[1] for file in others),
        n_ctx_train=number("context_length", 0),
        n_embd=n_embd,
        n_head=n_head,
        key_heads=_each(values.get(f"{architecture}.attention.head_count_kv", 0 if recurrent else n_head), n_layer),
        key_width=key_width,
        value_width=number("attention.value_length", key_width),
        n_vocab=number("vocab_size", int(values.get("tokenizer.ggml.tokens") or 0)),
        window=number("attention.sliding_window", 0),
        windowed=_windowed(values.get(f"{architecture}.attention.sliding_window_pattern"), architecture, n_layer),
        recurrent=recurrent,
        has_template=any(key.startswith("tokenizer.chat_template") for key in values),
    )


def _each(value: Any, n_layer: int) -> tuple[int, ...]:
    """A number that is all layers', or one of each."""
    return tuple(int(one) for one in value[:n_layer]) if isinstance(value, list) else (int(value),) * n_layer


def _windowed(pattern: Any, architecture: str, n_layer: int) -> tuple[bool, ...]:
    """Files seldom say it: of so many layers all but the last one are windowed."""
    if isinstance(pattern, list):
        return tuple(bool(one) for one in pattern[:n_layer])
    period = int(pattern or PERIODS.get(architecture, 0))
    return tuple(bool(period) and (layer + 1) % period != 0 for layer in range(n_layer))


def estimate(facts: Facts, options: Mapping[str, Any]) -> Estimate:
    """For a load with `options`; what is missing has the option table's default."""

    def value(name: str) -> Any:
        given = options.get(name)
        return option(name).default if given is None else given

    n_ctx = value("n_ctx") or facts.n_ctx_train
    n_cells = _padded(value("n_cells") or n_ctx)
    n_ubatch = max(1, min(value("n_ubatch") or value("n_batch"), value("n_batch"), n_cells))
    sliding = bool(facts.window) and not value("swa_full")
    n_seq = value("n_seq_max") or (8 if facts.recurrent or sliding else 64)
    windowed = min(n_cells, _padded(facts.window * n_seq + n_ubatch)) if sliding else n_cells
    per_head = facts.key_width * TYPE_BYTES[str(value("type_k"))] + facts.value_width * TYPE_BYTES[str(value("type_v"))]
    layers = zip(facts.key_heads, facts.windowed, strict=False)
    kv = per_head * sum(heads * (windowed if slides else n_cells) for heads, slides in layers)
    row = 4 * n_ubatch
    logits = row * (facts.n_vocab + 3 * facts.n_embd)
    flash = bool(value("flash_attn"))
    masks = n_cells + (windowed if facts.window else 0)
    attention = 0 if flash or not kv else row * (n_cells * facts.n_head + masks + 6 * facts.n_embd)
    compute = max(logits, attention) + 4 * n_seq * facts.n_vocab
    return Estimate(facts.file_bytes, int(kv), int(compute), n_cells, not facts.recurrent)


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
