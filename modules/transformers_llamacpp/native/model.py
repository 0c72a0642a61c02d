"""One GGUF in memory: weights, metadata, vocabulary."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from ..errors import ClosedError, ModelLoadError, OptionError
from ..gguf_reader import check_tokens
from ..output_head import OutputHead, read_output_head
from .library import init_backend, llama_cpp, recent_errors
from .params import NativeParams
from .vocab import NativeVocab, read_metadata

__all__ = ["NativeModel"]


NO_ROPE = -1
"""`LLAMA_ROPE_TYPE_NONE`."""


class NativeModel:
    """Owns a `llama_model`.

    `path` is a GGUF file, or the first shard of a split one (llama.cpp finds the others beside it). Raises
    `ModelLoadError` with llama.cpp's own reason. `close()` frees the weights; contexts made from the model must be closed
    before.
    """

    def __init__(self, path: Path, params: NativeParams) -> None:
        init_backend(params.numa, params.verbose)
        self.path = path
        self.params = params
        self._pointer: Any = None
        self._lora: Any = None
        self._head: OutputHead | None = None
        self._head_lock = threading.Lock()
        self.vocab: NativeVocab = None  # type: ignore[assignment]  # set as soon as there is a model
        _check_file(path)
        devices = llama_cpp.llama_max_devices()
        if not -1 <= params.model.main_gpu < devices:
            raise OptionError(f"main_gpu={params.model.main_gpu} is outside 0 .. {devices - 1}", "main_gpu")
        with recent_errors() as lines:
            self._pointer = llama_cpp.llama_model_load_from_file(os.fsencode(path), params.model)
        if not self._pointer:
            reason = "; ".join(dict.fromkeys(lines)) or "no reason given"
            raise ModelLoadError(f"llama.cpp cannot load {path}: {reason}", str(path))
        try:
            self._check_architecture()
            if params.lora_path is not None:
                self._load_lora(params.lora_path)
            self.vocab = NativeVocab(self._pointer, path=path)
            self.metadata = read_metadata(self._pointer)
        except BaseException:
            self.close()
            raise

    @property
    def pointer(self) -> Any:
        if self._pointer is None:
            raise ClosedError(f"the model {self.path.name} was closed; load it again with from_pretrained()")
        return self._pointer

    @property
    def lora(self) -> Any:
        """The adapter to be set on each context, or `None`."""
        return self._lora

    def close(self) -> None:
        if self.vocab is not None:
            self.vocab.close()
        if self._lora is not None:
            llama_cpp.llama_adapter_lora_free(self._lora)
            self._lora = None
        if self._pointer is not None:
            llama_cpp.llama_model_free(self._pointer)
            self._pointer = None
        self._head = None

    def output_head(self) -> OutputHead:
        """The head's weights in float32, read from the file when first asked for and kept until `close()`: `4 * n_vocab *
        n_embd` bytes, 113 MB for SmolLM2-135M, 2.1 GB for Llama-3-8B."""
        with self._head_lock:
            if self._head is None:
                shape = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.pointer))), self.n_embd
                self._head = read_output_head(self.path, shape, self.params.lora_path)
            return self._head

    def _check_architecture(self) -> None:
        if llama_cpp.llama_model_has_encoder(self._pointer) or not llama_cpp.llama_model_has_decoder(self._pointer):
            raise ModelLoadError(f"{self.path} is no decoder-only language model; generate() needs one", str(self.path))
        if llama_cpp.llama_model_is_diffusion(self._pointer):
            raise ModelLoadError(f"{self.path} is a diffusion model; generate() needs a causal one", str(self.path))

    def _load_lora(self, path: str) -> None:
        if not Path(path).is_file():
            raise ModelLoadError(f"lora_path={path!r} is no file", path)
        with recent_errors() as lines:
            self._lora = llama_cpp.llama_adapter_lora_init(self._pointer, os.fsencode(path))
        if not self._lora:
            self._lora = None
            raise ModelLoadError(f"llama.cpp cannot load the LoRA {path}: {'; '.join(lines) or 'no reason given'}", path)

    @property
    def description(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self.pointer, buffer, 256)
        return buffer.value.decode("utf-8", "replace")

    @property
    def metadata_hash(self) -> str:
        """Of everything the file says about itself."""
        return hashlib.sha256(json.dumps(sorted(self.metadata.items())).encode()).hexdigest()[:16]

    @property
    def n_bytes(self) -> int:
        return int(llama_cpp.llama_model_size(self.pointer))

    @property
    def n_params(self) -> int:
        return int(llama_cpp.llama_model_n_params(self.pointer))

    @property
    def n_ctx_train(self) -> int:
        return int(llama_cpp.llama_model_n_ctx_train(self.pointer))

    @property
    def n_embd(self) -> int:
        return int(llama_cpp.llama_model_n_embd(self.pointer))

    @property
    def n_layer(self) -> int:
        return int(llama_cpp.llama_model_n_layer(self.pointer))

    @property
    def n_head(self) -> int:
        return int(llama_cpp.llama_model_n_head(self.pointer))

    @property
    def n_head_kv(self) -> int:
        return int(llama_cpp.llama_model_n_head_kv(self.pointer))

    @property
    def n_embd_head_k(self) -> int:
        """Numbers in one head of the K cache."""
        architecture = self.metadata.get("general.architecture", "")
        stated = self.metadata.get(f"{architecture}.attention.key_length", "")
        return int(stated) if stated.isdigit() else self.n_embd // max(1, self.n_head)

    @property
    def has_state(self) -> bool:
        """Recurrent or hybrid: part of the memory is a state that cannot be rewound."""
        return bool(
            llama_cpp.llama_model_is_recurrent(self.pointer) or llama_cpp.llama_model_is_hybrid(self.pointer)
        )

    @property
    def can_shift(self) -> bool:
        """Positions are rotations of the keys, which a shift can turn further. llama.cpp's memory says it can shift also where
        it moves nothing but a number: recurrent states, and positions that were added to the embeddings."""
        return not self.has_state and int(llama_cpp.llama_model_rope_type(self.pointer)) != NO_ROPE

    @property
    def has_cells(self) -> bool:
        """Its tokens take cells of the KV buffer; a purely recurrent model has one state for each sequence."""
        return not llama_cpp.llama_model_is_recurrent(self.pointer)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise ModelLoadError(f"{path} is no file", str(path))
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelLoadError(f"{path} is no GGUF file (it starts with {magic!r})", str(path))
    check_tokens(path)
