"""Options of every size and type."""

from __future__ import annotations

from typing import Any

import models
from crash.case import ANSWER, CASES, EITHER, Case, greedy, load, right


def option(expect: str, *says: str, kind: str = "llama", loads: bool = False, **options: Any) -> None:
    """Load with `options` and generate. `loads`: the answer is not the usual one, it is enough that there is one."""

    def run() -> None:
        with load(kind, **options) as model:
            if loads:
                assert len(greedy(model)) == 4
            else:
                right(model, kind)

    shown = {name: value.__name__ if callable(value) else repr(value) for name, value in options.items()}
    name = ", ".join(f"{name}={value}" for name, value in shown.items())
    CASES[name if kind == "llama" else f"{kind}: {name}"] = Case(run, expect, says)


for size in (1, 2, 3, 7, 10, 11, 256, 257, 100_000, 2**31 - 1, 2**31, 2**32 - 1):
    option(ANSWER, n_batch=size)
for size in (0, 1, 3, 10, 1000, 2**32 - 1):
    option(ANSWER, n_ubatch=size)
option(ANSWER, n_batch=5, n_ubatch=2)
option(ANSWER, n_batch=2, n_ubatch=5)
option(ANSWER, n_batch=1, n_ubatch=1, kind="mamba")
option(ANSWER, n_batch=3, n_ubatch=2, kind="hybrid")
option(ANSWER, n_batch=3, n_ubatch=2, kind="swa", swa_full=False)
for value in (0, -1, 2**32, 2**70):
    option("OptionError", "n_batch", str(value), n_batch=value)
for value in (-1, 2**32):
    option("OptionError", "n_ubatch", str(value), n_ubatch=value)
for value in ("512", 1.5, True, [1], b"1"):
    option("OptionTypeError", "n_batch", "int", n_batch=value)

option(ANSWER, n_ctx=0)
for value in (1, 2, 9):
    option("ContextOverflowError", "n_ctx", str(value), n_ctx=value)
for value in (14, 255, 257, 1000):
    option(ANSWER, n_ctx=value)
for value in (-1, 2**31, 2**40):
    option("OptionError", "n_ctx", str(value), n_ctx=value)
for value in ("4096", 1.0, True, float("nan")):
    option("OptionTypeError", "n_ctx", "int", n_ctx=value)
option("ModelLoadError", "n_ctx", n_ctx=2**31 - 1)
option("ModelLoadError", "n_ctx", n_ctx=2**31 - 1, kind="hybrid")
for value in (1, 2, 20):
    option(ANSWER, n_cells=value)  # llama.cpp rounds up to 256
option("OptionError", "n_cells", n_cells=0)

for value in (1, 2, 256):
    option(ANSWER, n_seq_max=value)
    option(ANSWER, n_seq_max=value, kind="mamba")
for value in (0, -1, 257, 2**31, 2**40):
    option("OptionError", "n_seq_max", str(value), n_seq_max=value)
for value in (1, 2, 64):
    option(ANSWER, n_threads=value)
for value in (0, -1, -(2**31), 2**31):
    option("OptionError", "n_threads", str(value), n_threads=value)
    option("OptionError", "n_threads_batch", str(value), n_threads_batch=value)
option(EITHER, n_threads=100_000)
option(EITHER, n_threads_batch=2**31 - 1)
for value in (-1, 0, 1, 99, 2**31 - 1):
    option(ANSWER, n_gpu_layers=value)
option("OptionError", "n_gpu_layers", n_gpu_layers=-2)
for value in (-1, 5, 2**31 - 1):
    option(EITHER, main_gpu=value)
for value in (-1, 3, 99):
    option(EITHER, split_mode=value)
option("OptionError", "tensor_split", tensor_split=[1.0] * 1000)
option(EITHER, tensor_split=[-1.0])
option(EITHER, tensor_split=[float("nan")])

# A head of the tiny model has 16 numbers and a block of these types 32: llama.cpp takes some of it and gives garbage.
for value in ("q8_0", "q4_0", "iq4_nl"):
    option(EITHER, "type", type_k=value)
    option(EITHER, "type", type_v=value, flash_attn=True)
    option("OptionError", "type_v", "flash_attn", type_v=value, flash_attn=False)
for value in ("f32", "f16", "bf16"):
    option(ANSWER, type_k=value, type_v=value)
    option(ANSWER, type_k=value, flash_attn=True)
for value in (-1, 3, 15, 16, 40, 99, 1000, 2**31 - 1):
    option(EITHER, type_k=value)
    option(EITHER, type_v=value)
option("OptionError", "type_k", "f16", type_k="float16")
for value in (-7, 2, 99):
    option(EITHER, flash_attn_type=value, loads=True)
    option(EITHER, rope_scaling_type=value, loads=True)
    option(EITHER, pooling_type=value, loads=True)
    option(EITHER, attention_type=value, loads=True)
for value in (0, 1, 2, 3, 4):
    option(EITHER, pooling_type=value, embeddings=True, loads=True)
option(EITHER, attention_type=1, loads=True)  # not causal
for value in (0.0, -1.0, float("nan"), float("inf")):
    option(EITHER, rope_freq_base=value, loads=True)
    option(EITHER, rope_freq_scale=value, loads=True)
    option(EITHER, yarn_ext_factor=value, loads=True)
for value in (0, 1, 4, 100_000, 2**32 - 1):
    option(EITHER, n_rs_seq=value)
    option(EITHER, n_rs_seq=value, kind="mamba")
for value in (0, 1, 3, 2**32 - 1):
    option(EITHER, n_outputs_max=value)
option(EITHER, embedding=True)
option(EITHER, use_mmap=False, use_mlock=True)
option(ANSWER, use_mmap=False)
option(ANSWER, check_tensors=True)
option(EITHER, ctx_type=99)
option("UnsupportedFeatureError", "vocab_only", vocab_only=True)
option("UnsupportedFeatureError", "kv_unified", kv_unified=False)
option("ModelLoadError", "none.gguf", lora_path="none.gguf")
option("ModelLoadError", models.tiny("mamba").name, lora_path=str(models.tiny("mamba")))


def go_on(progress: float, data: object) -> bool:
    return True


def give_up(progress: float, data: object) -> bool:
    return False


option(ANSWER, progress_callback=go_on)
option("ModelLoadError", progress_callback=give_up)
option("OptionTypeError", "progress_callback", progress_callback=5)
option("UnknownOptionError", "n_ctx", n_contex=5)
option("OptionError", "kv_overrides", kv_overrides={"x" * 200: 1})
option("OptionTypeError", "kv_overrides", kv_overrides=5)
for key, value in {
    "llama.block_count": 0, "llama.block_count ": 10_000, "llama.embedding_length": 7, "llama.attention.head_count": 0,
    "llama.attention.head_count_kv": 0, "llama.attention.head_count_kv ": 3, "llama.rope.dimension_count": 7,
    "llama.context_length": 0, "llama.vocab_size": 5, "tokenizer.ggml.eos_token_id": 10**6,
    "tokenizer.ggml.bos_token_id": 2**32 - 1, "llama.attention.layer_norm_rms_epsilon": -1.0,
}.items():  # fmt: skip
    option(EITHER, kv_overrides={key.strip(): value}, loads=True)
