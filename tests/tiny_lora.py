"""A small LoRA as a GGUF file, made for a model at hand."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

__all__ = ["write_lora"]

MATRIX = "blk.0.ffn_up.weight"


def write_lora(path: Path, model: Path) -> Path:
    """Of rank 2, on one matrix of a model of the llama architecture; returns `path`."""
    shape = next(tensor.shape for tensor in gguf.GGUFReader(model).tensors if tensor.name == MATRIX)
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 2.0)
    for suffix, size in (("a", (2, int(shape[0]))), ("b", (int(shape[1]), 2))):
        writer.add_tensor(f"{MATRIX}.lora_{suffix}", random.normal(0, 1, size).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
