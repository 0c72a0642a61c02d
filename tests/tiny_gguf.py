"""Tiny random models, one for each kind of memory llama.cpp has, written with the ``gguf`` package.

    llama    plain attention
    swa      gemma2: a sliding window of 16 tokens in every other layer
    mamba    recurrent: a state instead of KV cells
    hybrid   jamba: recurrent and attention layers in turn

The weights are seeded, F32, and large enough that every token of the prompt moves the logits by far more than
rounding does; the vocabulary is SentencePiece's byte fallback and a few letters. Keys and tensors are those
that llama.cpp's ``load_arch_hparams`` and ``load_arch_tensors`` of each architecture ask for.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

N_EMBD, N_HEAD, N_HEAD_KV, N_FF, N_LAYER = 64, 4, 2, 96, 4
N_CTX_TRAIN, WINDOW = 512, 16
D_CONV, D_STATE, DT_RANK = 4, 8, 4
D_INNER = 2 * N_EMBD  # llama.cpp takes no other expansion
HEAD = N_EMBD // N_HEAD

UNK, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3
LETTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz.,!?'", "▁t", "he", "▁the", "an", "▁and"]
N_VOCAB = FIRST_BYTE + 256 + len(LETTERS)


def write(kind: str, path: Path) -> None:
    """Write the model of `kind` (one of `KINDS`) to `path`: the same bytes at every call."""
    architecture, build = KINDS[kind]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(f"tiny-{kind}")
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_vocabulary(writer)
    build(_Weights(writer))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def recipe() -> str:
    """Eight hex digits that change with this file."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


class _Weights:
    """Random tensors by name; shapes as PyTorch writes them, (out, in)."""

    def __init__(self, writer: gguf.GGUFWriter) -> None:
        self.writer = writer
        self.random = np.random.default_rng(20240229)

    def add(self, name: str, values: np.ndarray) -> None:
        self.writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))

    def matrix(self, name: str, out: int, into: int, gain: float = 1.0) -> None:
        self.add(f"{name}.weight", self.random.normal(0, gain / np.sqrt(into), (out, into)))

    def norm(self, name: str, size: int = N_EMBD, gain: float = 1.0) -> None:
        self.add(f"{name}.weight", gain * (1 + self.random.normal(0, 0.1, size)))

    def embedding(self) -> None:
        self.add("token_embd.weight", self.random.normal(0, 1, (N_VOCAB, N_EMBD)))
        self.norm("output_norm")
        self.matrix("output", N_VOCAB, N_EMBD, gain=3.0)

    def tied_embedding(self) -> None:
        """Small beside what the layers add, or the model would only repeat its last token."""
        self.add("token_embd.weight", self.random.normal(0, 1 / np.sqrt(N_EMBD), (N_VOCAB, N_EMBD)))
        self.norm("output_norm", gain=3.0)

    def attention(self, block: str) -> None:
        self.matrix(f"{block}.attn_q", N_HEAD * HEAD, N_EMBD, gain=2.0)
        self.matrix(f"{block}.attn_k", N_HEAD_KV * HEAD, N_EMBD, gain=2.0)
        self.matrix(f"{block}.attn_v", N_HEAD_KV * HEAD, N_EMBD, gain=2.0)
        self.matrix(f"{block}.attn_output", N_EMBD, N_HEAD * HEAD, gain=2.0)

    def feed_forward(self, block: str) -> None:
        self.norm(f"{block}.ffn_norm")
        self.matrix(f"{block}.ffn_gate", N_FF, N_EMBD)
        self.matrix(f"{block}.ffn_up", N_FF, N_EMBD)
        self.matrix(f"{block}.ffn_down", N_EMBD, N_FF)

    def state_space(self, block: str, norms: bool) -> None:
        self.matrix(f"{block}.ssm_in", 2 * D_INNER, N_EMBD)
        self.add(f"{block}.ssm_conv1d.weight", self.random.normal(0, 0.5, (D_INNER, D_CONV)))
        self.add(f"{block}.ssm_conv1d.bias", self.random.normal(0, 0.1, D_INNER))
        self.matrix(f"{block}.ssm_x", DT_RANK + 2 * D_STATE, D_INNER, gain=2.0)
        self.matrix(f"{block}.ssm_dt", D_INNER, DT_RANK)
        self.add(f"{block}.ssm_dt.bias", self.random.normal(-3, 0.5, D_INNER))  # small steps: a long memory
        self.add(f"{block}.ssm_a", -np.exp(self.random.normal(-1, 0.5, (D_INNER, D_STATE))))
        self.add(f"{block}.ssm_d", self.random.normal(0.5, 0.1, D_INNER))
        self.matrix(f"{block}.ssm_out", N_EMBD, D_INNER, gain=2.0)
        if norms:
            self.norm(f"{block}.ssm_dt_norm", DT_RANK)
            self.norm(f"{block}.ssm_b_norm", D_STATE)
            self.norm(f"{block}.ssm_c_norm", D_STATE)


def _llama(weights: _Weights) -> None:
    _attention_keys(weights.writer)
    weights.embedding()
    for i in range(N_LAYER):
        weights.norm(f"blk.{i}.attn_norm")
        weights.attention(f"blk.{i}")
        weights.feed_forward(f"blk.{i}")


def _gemma2(weights: _Weights) -> None:
    _attention_keys(weights.writer)
    weights.writer.add_key_length(HEAD)
    weights.writer.add_value_length(HEAD)
    weights.writer.add_sliding_window(WINDOW)
    weights.writer.add_attn_logit_softcapping(50.0)
    weights.writer.add_final_logit_softcapping(30.0)
    weights.tied_embedding()
    for i in range(N_LAYER):
        weights.norm(f"blk.{i}.attn_norm")
        weights.attention(f"blk.{i}")
        weights.norm(f"blk.{i}.post_attention_norm", gain=2.0)
        weights.feed_forward(f"blk.{i}")
        weights.norm(f"blk.{i}.post_ffw_norm", gain=2.0)


def _mamba(weights: _Weights) -> None:
    _state_space_keys(weights.writer)
    weights.embedding()
    for i in range(N_LAYER):
        weights.norm(f"blk.{i}.attn_norm")
        weights.state_space(f"blk.{i}", norms=False)


def _jamba(weights: _Weights) -> None:
    is_attention = [i % 2 == 1 for i in range(N_LAYER)]
    weights.writer.add_head_count(N_HEAD)
    weights.writer.add_head_count_kv([N_HEAD_KV if attends else 0 for attends in is_attention])
    _state_space_keys(weights.writer)
    weights.embedding()
    for i, attends in enumerate(is_attention):
        weights.norm(f"blk.{i}.attn_norm")
        if attends:
            weights.attention(f"blk.{i}")
        else:
            weights.state_space(f"blk.{i}", norms=True)
        weights.feed_forward(f"blk.{i}")


KINDS: dict[str, tuple[str, Callable[[_Weights], None]]] = {
    "llama": ("llama", _llama),
    "swa": ("gemma2", _gemma2),
    "mamba": ("mamba", _mamba),
    "hybrid": ("jamba", _jamba),
}


def _attention_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_rope_dimension_count(HEAD)


def _state_space_keys(writer: gguf.GGUFWriter) -> None:
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_inner_size(D_INNER)
    writer.add_ssm_state_size(D_STATE)
    writer.add_ssm_time_step_rank(DT_RANK)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    kind = gguf.TokenType
    special = [("<unk>", kind.UNKNOWN), ("<s>", kind.CONTROL), ("</s>", kind.CONTROL)]
    in_bytes = [(f"<0x{byte:02X}>", kind.BYTE) for byte in range(256)]
    letters = [(letter, kind.NORMAL) for letter in LETTERS]
    tokens, types = zip(*special, *in_bytes, *letters, strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    writer.add_token_scores([0.0] * (FIRST_BYTE + 256) + [-float(i) for i in range(len(LETTERS), 0, -1)])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(UNK)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
