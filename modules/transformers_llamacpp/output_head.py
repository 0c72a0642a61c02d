"""The output head of a model, out of its GGUF: what llama.cpp computes with and does not show.

The only module that knows the `gguf` package, which dequantises every type llama.cpp has; imported when a head is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .errors import UnsupportedFeatureError
from .gguf_reader import TensorPlace, shard_names, tensor_places

__all__ = ["OutputHead", "read_output_head"]

HEAD, HEAD_BIAS, EMBEDDING = "output.weight", "output.bias", "token_embd.weight"
"""Tensor names of GGUF; a file without a head uses the token embeddings as one (`tie_word_embeddings`)."""

PART = 4096
"""Rows that are dequantised at once: the dequantiser needs several times the memory of its result."""


@dataclass(frozen=True, slots=True)
class OutputHead:
    """`logits = states @ weight + bias`. `weight` float32 `(n_embd, n_vocab)`, `bias` float32 `(n_vocab,)` or `None`.
    `tied`: the weights are those of the token embeddings too.

    The weights lie as they are multiplied: the product of eight states takes 23 ms, and 39 ms with what the file has, which
    lies the other way (49,152 tokens, 576 numbers, one thread).
    """

    weight: npt.NDArray[np.float32]
    bias: npt.NDArray[np.float32] | None
    tied: bool


def read_output_head(path: Path, shape: tuple[int, int], lora_path: str | None = None) -> OutputHead:
    """Read the head of the model `path` (of a split one the first shard), whose tensor must have the `shape`
    `(n_vocab, n_embd)`.

    Raises `UnsupportedFeatureError` where the file has no such tensor, where its type cannot be dequantised, and where the
    LoRA changes it; `ModelLoadError` for a file that cannot be read.
    """
    places: dict[str, tuple[Path, TensorPlace]] = {}
    for name in shard_names(path.name):
        shard = path.parent / name
        places |= {tensor: (shard, place) for tensor, place in tensor_places(shard).items()}
    tied = HEAD not in places
    name = EMBEDDING if tied else HEAD
    if name not in places or places[name][1].shape != shape:
        found = places[name][1].shape if name in places else None
        raise _unsupported(f"{path.name} has {name} of shape {found}; {shape} is needed")
    if lora_path is not None and any(tensor.startswith((HEAD, EMBEDDING)) for tensor in tensor_places(Path(lora_path))):
        raise _unsupported(f"the LoRA {lora_path} changes the output head, and the file has the head without that")
    weight = _dequantised(*places[name])
    bias = None if HEAD_BIAS not in places else _dequantised(*places[HEAD_BIAS]).reshape(-1)
    return OutputHead(weight, bias, tied)


def _dequantised(path: Path, place: TensorPlace) -> npt.NDArray[np.float32]:
    """Transposed: `(columns, rows)`."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(place.kind)
        block, size = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError) as error:
        raise _unsupported(f"the head's type {place.kind} is none that the installed gguf {_version()} knows") from error
    *rows, columns = place.shape
    n_rows, row_bytes = int(np.prod(rows, dtype=np.int64)), columns // block * size
    stored = np.memmap(path, np.uint8, "r", place.offset, (n_rows, row_bytes))
    weight = np.empty((columns, n_rows), np.float32)
    try:
        for start in range(0, n_rows, PART):
            weight[:, start : start + PART] = gguf.quants.dequantize(stored[start : start + PART], kind).T
    except NotImplementedError as error:
        raise _unsupported(f"the installed gguf {_version()} cannot dequantise the head's type {kind.name}") from error
    return weight


def _version() -> str:
    from importlib.metadata import version

    return version("gguf")


def _unsupported(reason: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(f"the output head's weights are not available: {reason}", "dola_layers")
