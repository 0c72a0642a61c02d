"""More tiny models, for what a layer's input is in them: written as ``tiny_gguf.py`` writes its own.

gpt2     positions are added to the embeddings; head and embeddings are one
bloom    the embeddings are normalised first, and llama.cpp counts that as part of layer 0
phi2     attention and feed-forward side by side; the head has a bias
olmo2    norms behind attention and feed-forward instead of before
granite  embeddings and residuals are scaled
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tiny_gguf
from tiny_gguf import HEAD, N_CTX_TRAIN, N_EMBD, N_FF, N_HEAD, N_HEAD_KV, N_VOCAB, _attention_keys, _Weights


def write(kind: str, path: Path) -> Path:
    """Write the model of `kind` to `path`, with `tiny_gguf.N_LAYER` layers."""
    tiny_gguf.KINDS[kind] = kind, ARCHITECTURES[kind]
    try:
        tiny_gguf.write(kind, path)
    finally:
        del tiny_gguf.KINDS[kind]
    return path


def _bias(weights: _Weights, name: str, size: int) -> None:
    weights.add(f"{name}.bias", weights.random.normal(0, 0.1, size))


def _norm(weights: _Weights, name: str) -> None:
    weights.norm(name)
    _bias(weights, name, N_EMBD)


def _linear(weights: _Weights, name: str, out: int, into: int) -> None:
    weights.matrix(name, out, into)
    _bias(weights, name, out)


def _with_biases(weights: _Weights, norms: tuple[str, ...]) -> None:
    """Layers as GPT-2 has them."""
    weights.writer.add_head_count(N_HEAD)
    weights.writer.add_layer_norm_eps(1e-5)
    for i in range(tiny_gguf.N_LAYER):
        for norm in norms:
            _norm(weights, f"blk.{i}.{norm}")
        _linear(weights, f"blk.{i}.attn_qkv", 3 * N_EMBD, N_EMBD)
        _linear(weights, f"blk.{i}.attn_output", N_EMBD, N_EMBD)
        _linear(weights, f"blk.{i}.ffn_up", N_FF, N_EMBD)
        _linear(weights, f"blk.{i}.ffn_down", N_EMBD, N_FF)


def _gpt2(weights: _Weights) -> None:
    weights.add("token_embd.weight", weights.random.normal(0, 1, (N_VOCAB, N_EMBD)))
    weights.add("position_embd.weight", weights.random.normal(0, 0.5, (N_CTX_TRAIN, N_EMBD)))
    _norm(weights, "output_norm")
    _with_biases(weights, ("attn_norm", "ffn_norm"))


def _bloom(weights: _Weights) -> None:
    weights.embedding()
    _bias(weights, "output_norm", N_EMBD)
    _norm(weights, "token_embd_norm")
    _with_biases(weights, ("attn_norm", "ffn_norm"))


def _phi2(weights: _Weights) -> None:
    weights.writer.add_head_count_kv(N_HEAD)
    weights.writer.add_rope_dimension_count(HEAD)
    weights.embedding()
    _bias(weights, "output_norm", N_EMBD)
    _bias(weights, "output", N_VOCAB)
    _with_biases(weights, ("attn_norm",))


def _olmo2(weights: _Weights) -> None:
    _attention_keys(weights.writer)
    weights.embedding()
    for i in range(tiny_gguf.N_LAYER):
        weights.attention(f"blk.{i}")
        weights.norm(f"blk.{i}.attn_q_norm")
        weights.norm(f"blk.{i}.attn_k_norm", N_HEAD_KV * HEAD)
        weights.norm(f"blk.{i}.post_attention_norm")
        weights.norm(f"blk.{i}.post_ffw_norm")
        weights.matrix(f"blk.{i}.ffn_gate", N_FF, N_EMBD)
        weights.matrix(f"blk.{i}.ffn_up", N_FF, N_EMBD)
        weights.matrix(f"blk.{i}.ffn_down", N_EMBD, N_FF)


def _granite(weights: _Weights) -> None:
    writer = weights.writer
    _attention_keys(writer)
    writer.add_embedding_scale(3.0)
    writer.add_residual_scale(0.5)
    writer.add_attention_scale(0.25)
    writer.add_logit_scale(1.0)
    weights.embedding()
    for i in range(tiny_gguf.N_LAYER):
        weights.norm(f"blk.{i}.attn_norm")
        weights.attention(f"blk.{i}")
        weights.feed_forward(f"blk.{i}")


ARCHITECTURES: dict[str, Callable[[_Weights], None]] = {
    "gpt2": _gpt2,
    "bloom": _bloom,
    "phi2": _phi2,
    "olmo2": _olmo2,
    "granite": _granite,
}
