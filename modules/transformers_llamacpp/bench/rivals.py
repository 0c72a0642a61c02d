"""llama-cpp-python's own loop, and transformers' own loading of a GGUF into torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from ..native.library import amx_kernels
from .plan import MODES
from .runs import Run

__all__ = ["LlamaLoop", "TorchModel"]


class LlamaLoop:
    """`llama_cpp.Llama.generate`, as its documentation shows it."""

    def __init__(self, path: str, n_ctx: int, threads: int) -> None:
        if amx_kernels():  # as the package does; `Llama` has no argument for it
            defaults = llama_cpp.llama_model_default_params

            def without() -> Any:
                params = defaults()
                params.use_extra_bufts = False
                return params

            llama_cpp.llama_model_default_params = without
        self.llama = llama_cpp.Llama(path, n_ctx=n_ctx, n_threads=threads, n_threads_batch=threads, seed=0, verbose=False)

    def run(self, mode: str, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        self.llama.reset()  # the next call evaluates all of its prompt
        (prompt,) = prompts
        answer: list[int] = []
        first = 0.0
        started = time.perf_counter()
        for token in self.llama.generate(prompt, **MODES[mode].llama):
            if not answer:
                first = time.perf_counter() - started
            answer.append(token)
            if len(answer) == tokens:
                break
        return Run(first, time.perf_counter() - started, [answer])


class TorchModel:
    """`AutoModelForCausalLM.from_pretrained(folder, gguf_file=...)`: the weights as F32, in torch."""

    def __init__(self, path: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from .ours import generate, without_defaults

        torch.set_num_threads(threads)
        file = Path(path)
        self.model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
        without_defaults(self.model)
        self.generate = generate

    def run(self, mode: str, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        return self.generate(self.model, mode, prompts, tokens)
