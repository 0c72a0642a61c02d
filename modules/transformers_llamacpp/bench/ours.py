"""`generate()`: this package's, with its own loop or transformers'."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from ..config import LlamaCppConfig
from ..modeling import LlamaCppForCausalLM
from .plan import MODES
from .runs import Run

__all__ = ["Ours", "generate", "without_defaults"]


class FirstToken:
    """A streamer that notes when the first token comes; what `generate()` hands out before it is the prompt."""

    def __init__(self) -> None:
        self.calls = 0
        self.at = 0.0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


def without_defaults(model: Any) -> None:
    """No end token and no sampling defaults of the file: a mode is what `plan.MODES` says."""
    model.generation_config = GenerationConfig(pad_token_id=0)


def generate(model: Any, mode: str, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
    """One call of any causal model's `generate()`; the ids are tensors before the clock starts."""
    torch.manual_seed(0)
    ids = torch.tensor([list(prompt) for prompt in prompts])
    mask, clock = torch.ones_like(ids), FirstToken()
    started = time.perf_counter()
    output = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, streamer=clock, **MODES[mode].generate)
    seconds = time.perf_counter() - started
    return Run(clock.at - started, seconds, output[:, ids.shape[1] :].tolist())


class Ours:
    def __init__(self, path: str, n_ctx: int, n_cells: int, threads: int, plain: bool = False) -> None:
        config = LlamaCppConfig(n_ctx=n_ctx, n_cells=n_cells, n_threads=threads, n_threads_batch=threads)
        self.model: Any = LlamaCppForCausalLM.from_pretrained(path, quantization_config=config)
        without_defaults(self.model)
        self.loop: Any = contextlib.nullcontext
        if plain:
            from ..generation import plain_loop

            self.loop = plain_loop

    def run(self, mode: str, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        self.model.forget()
        with self.loop():
            return generate(self.model, mode, prompts, tokens)
