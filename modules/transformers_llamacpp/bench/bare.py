"""The bare low-level API: the yardstick that `generate()` is held against.

As fast as Python can call llama.cpp: the batch is written through numpy, and the next tokens are numpy's argmax over the logits
where llama.cpp left them. Nothing of this package's engine takes part, and its process loads no torch.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from ..errors import ModelLoadError
from ..native.library import amx_kernels, init_backend
from .runs import Run

__all__ = ["Bare"]

N_BATCH = 512
"""Tokens in one decode, and computed at once: what `Llama` and this package take by default."""


class Bare:
    """A model and a context with `n_seq` sequences, decoded token by token.

    `unified`: the sequences share one buffer of `n_ctx` cells; else each has `n_ctx / n_seq` cells of its own, and attention
    reads no others.
    """

    def __init__(self, path: str, n_ctx: int, n_threads: int, n_seq: int = 1, unified: bool = True) -> None:
        init_backend()
        model_params = llama_cpp.llama_model_default_params()
        if amx_kernels():  # as the package does
            model_params.use_extra_bufts = False
        self.model = llama_cpp.llama_model_load_from_file(os.fsencode(path), model_params)
        if not self.model:
            raise ModelLoadError(f"llama.cpp cannot load {path}", path)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, N_BATCH, N_BATCH, n_seq
        params.n_threads = params.n_threads_batch = n_threads
        params.kv_unified, params.flash_attn_type = unified, 0
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise ModelLoadError(f"llama.cpp cannot make a context of {n_ctx} cells for {path}", path)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.n_past = [0] * n_seq
        self._views: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
        self._make_batch()

    def _make_batch(self) -> None:
        """A batch whose arrays are numpy's, so that it is filled without a Python loop."""
        self.token, self.pos, self.seq = (np.zeros(N_BATCH, np.int32) for _ in range(3))
        self.out = np.zeros(N_BATCH, np.int8)
        self._one = np.ones(N_BATCH, np.int32)
        self._seqs = self.seq.ctypes.data + 4 * np.arange(N_BATCH, dtype=np.uintp)
        self.batch = llama_cpp.llama_batch()
        fields = dict(self.batch._fields_)
        for name, array in (("token", self.token), ("pos", self.pos), ("n_seq_id", self._one), ("seq_id", self._seqs),
                            ("logits", self.out)):  # fmt: skip
            setattr(self.batch, name, ctypes.cast(array.ctypes.data, fields[name]))

    # -- decoding ------------------------------------------------------------------------------------------------------

    def decode(self, tokens: Sequence[int], seq: int = 0) -> int:
        """Store the tokens at the end of a sequence; the most likely next one."""
        return int(self.prompts([tokens], seq)[0])

    def prompts(self, texts: Sequence[Sequence[int]], first: int = 0) -> npt.NDArray[np.intp]:
        """Store each text at the end of its sequence (`first` and those after it); the most likely next token of each."""
        token = np.concatenate([np.asarray(text, np.int32) for text in texts])
        lengths = np.array([len(text) for text in texts])
        ends = np.cumsum(lengths)
        seq = np.repeat(np.arange(first, first + len(texts), dtype=np.int32), lengths)
        past = np.array(self.n_past[first : first + len(texts)])
        pos = np.arange(len(token)) - np.repeat(ends - lengths, lengths) + np.repeat(past, lengths)
        out = np.zeros(len(token), np.int8)
        out[ends - 1] = 1
        following = []
        for start in range(0, len(token), N_BATCH):
            piece = slice(start, start + N_BATCH)
            n = len(token[piece])
            self.token[:n], self.pos[:n], self.seq[:n], self.out[:n] = token[piece], pos[piece], seq[piece], out[piece]
            self._decode(n)
            if wanted := int(out[piece].sum()):
                following.append(self.likeliest(wanted))
        for index, length in enumerate(lengths):
            self.n_past[first + index] += int(length)
        return np.concatenate(following)

    def _decode(self, n: int) -> None:
        self.batch.n_tokens = n
        status = llama_cpp.llama_decode(self.context, self.batch)
        if status:
            raise RuntimeError(f"llama_decode answered {status}")

    def likeliest(self, rows: int) -> npt.NDArray[np.intp]:
        """The most likely token of each row of logits."""
        pointer: Any = llama_cpp.llama_get_logits(self.context)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        if address is None:
            raise RuntimeError("llama.cpp has no logits")
        key = (address, rows)
        if key not in self._views:  # llama.cpp keeps its buffer; making a view costs as much as the argmax
            memory = (ctypes.c_float * (rows * self.n_vocab)).from_address(address)
            self._views[key] = np.frombuffer(memory, np.float32).reshape(rows, self.n_vocab)
        return self._views[key].argmax(axis=1)

    def clear(self) -> None:
        """Forget everything."""
        llama_cpp.llama_memory_clear(self.memory, False)
        self.n_past = [0] * len(self.n_past)

    # -- the contender -------------------------------------------------------------------------------------------------

    def run(self, mode: str, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        """Greedy, whatever `mode` says; one row for each sequence."""
        self.clear()
        rows = len(prompts)
        answer = np.empty((tokens, rows), np.int32)
        started = time.perf_counter()
        answer[0] = self.prompts(prompts)
        first = time.perf_counter() - started
        self.seq[:rows], self.out[:rows], self.pos[:rows] = np.arange(rows), 1, self.n_past[:rows]
        for step in range(1, tokens):
            self.token[:rows] = answer[step - 1]
            self._decode(rows)
            answer[step] = self.likeliest(rows)
            self.pos[:rows] += 1
        seconds = time.perf_counter() - started
        self.n_past[:rows] = self.pos[:rows].tolist()
        return Run(first, seconds, answer.T.tolist())
