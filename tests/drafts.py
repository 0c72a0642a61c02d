"""What the tests of speculative decoding share: a text that repeats itself, a greedy call, a small PyTorch model."""

from __future__ import annotations

from typing import Any

import torch

TEXT = [40, 41, 42, 43, 44, 45, 40, 41, 42, 43]
NEW = 24
LOOKUP = {"prompt_lookup_num_tokens": 4}


def generate(model: Any, tokens: list[int] = TEXT, **call: Any) -> list[int]:
    call = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | call
    return model.generate(torch.tensor([tokens]), **call)[0].tolist()


def small_llama(vocab_size: int, seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=2, bos_token_id=1, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
