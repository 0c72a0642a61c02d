"""The bare low-level API with sequences that are kept, copied and rewound, for `chat.py` and `decoding.py`.

`speed.py` has a loop of its own in the package, which only goes on. Nothing here imports the package, whose torch would count
as the bare API's memory.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence

import llama_cpp
import numpy as np

QUIET = llama_cpp.llama_log_callback(lambda level, text, data: None)


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def tokenizer(path: str) -> Callable[[str], list[int]]:
    """Text to ids, special tokens included, without loading the weights."""
    llama_cpp.llama_log_set(QUIET, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    assert model
    vocab = llama_cpp.llama_model_get_vocab(model)

    def tokenize(text: str) -> list[int]:
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 1))()
        n = llama_cpp.llama_tokenize(vocab, data, len(data), ids, len(ids), False, True)
        assert n >= 0
        return list(ids[:n])

    return tokenize


class Bare:
    """A model and a context, decoded token by token. `unified`: all sequences share one buffer of `n_ctx` cells; else each
    has `n_ctx / n_seq` cells of its own, and attention reads no others."""

    def __init__(self, path: str, n_ctx: int, n_threads: int, n_seq: int = 1, unified: bool = True) -> None:
        llama_cpp.llama_log_set(QUIET, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        if b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info():
            model_params.use_extra_bufts = False  # as the package does: GCC before 13.3 miscompiles these kernels
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, 512, 512, n_seq
        params.n_threads = params.n_threads_batch = n_threads
        params.kv_unified, params.flash_attn_type = unified, 0
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.model and self.context
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)
        self.n_past = [0] * n_seq

    def decode(self, tokens: Sequence[int], seq: int = 0) -> int:
        """Store the tokens at the end of a sequence; the most likely next one."""
        batch = self.batch
        for start in range(0, len(tokens), 512):
            piece = tokens[start : start + 512]
            batch.n_tokens = len(piece)
            for index, token in enumerate(piece):
                batch.token[index], batch.pos[index] = token, self.n_past[seq] + index
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, seq
                batch.logits[index] = start + index == len(tokens) - 1
            assert llama_cpp.llama_decode(self.context, batch) == 0
            self.n_past[seq] += len(piece)
        row = llama_cpp.llama_get_logits_ith(self.context, -1)
        address = ctypes.cast(row, ctypes.c_void_p).value
        assert address
        memory = (ctypes.c_float * self.n_vocab).from_address(address)
        return int(np.frombuffer(memory, np.float32).argmax())

    def rewind(self, length: int, seq: int = 0) -> None:
        """Forget what a sequence holds from `length` on."""
        assert llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), seq, length, -1)
        self.n_past[seq] = length

    def copy(self, source: int, target: int) -> None:
        """Let the empty sequence `target` hold what `source` does."""
        llama_cpp.llama_memory_seq_cp(llama_cpp.llama_get_memory(self.context), source, target, -1, -1)
        self.n_past[target] = self.n_past[source]

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        self.n_past = [0] * len(self.n_past)

    def side_by_side(self, prompt: list[int], n: int, n_seq: int) -> float:
        """Seconds for `n` decodes of `n_seq` sequences that share everything before; the first one is kept each time."""
        memory = llama_cpp.llama_get_memory(self.context)
        self.clear()
        self.decode(prompt)
        batch, seconds = self.batch, 0.0
        for _ in range(n):
            for other in range(1, n_seq):
                llama_cpp.llama_memory_seq_rm(memory, other, -1, -1)
                llama_cpp.llama_memory_seq_cp(memory, 0, other, -1, -1)
            started = time.perf_counter()
            batch.n_tokens = n_seq
            for index in range(n_seq):
                batch.token[index], batch.pos[index], batch.logits[index] = 100 + index, self.n_past[0], True
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, index
            assert llama_cpp.llama_decode(self.context, batch) == 0
            assert llama_cpp.llama_get_logits(self.context)
            seconds += time.perf_counter() - started
            self.n_past[0] += 1
        return seconds
