"""For every parameter of the binding a value that is not its default, and what must then be found where.

Shared by `test_options.py` (the structs) and `tests/model/test_params.py` (a real context).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from transformers_llamacpp.native import params
from transformers_llamacpp.native.params import llama_cpp, struct_fields

_EXTRA = not params.build({}).model.use_extra_bufts  # our default depends on the processor

FIELDS: dict[str, tuple[Any, Any]] = {  # name: (option, value of the field)
    "n_gpu_layers": (3, 3),
    "split_mode": (0, 0),
    "lazy_mode": (0, 0),
    "main_gpu": (1, 1),
    "check_tensors": (True, True),
    "use_extra_bufts": (_EXTRA, _EXTRA),
    "no_host": (True, True),
    "load_mtp": (True, True),
    "load_mode": (0, 0),
    "n_batch": (96, 96),
    "n_ubatch": (32, 32),
    "n_rs_seq": (2, 2),
    "n_outputs_max": (16, 16),
    "n_outputs_max_per_seq": (4, 4),
    "n_threads": (5, 5),
    "n_threads_batch": (6, 6),
    "ctx_type": (1, 1),
    "rope_scaling_type": (2, 2),
    "pooling_type": (0, 0),
    "attention_type": (0, 0),
    "flash_attn_type": (1, 1),
    "rope_freq_base": (50000.0, 50000.0),
    "rope_freq_scale": (0.5, 0.5),
    "yarn_ext_factor": (0.25, 0.25),
    "yarn_attn_factor": (0.5, 0.5),
    "yarn_beta_fast": (16.0, 16.0),
    "yarn_beta_slow": (2, 2.0),
    "yarn_orig_ctx": (128, 128),
    "defrag_thold": (0.5, 0.5),
    "type_k": ("q8_0", params.KV_TYPES["q8_0"]),
    "type_v": ("bf16", params.KV_TYPES["bf16"]),
    "embeddings": (True, True),
    "offload_kqv": (False, False),
    "no_perf": (False, False),
    "op_offload": (False, False),
    "swa_full": (False, False),
}
_array = (ctypes.c_void_p * 2)()


def field_value(native: Any, name: str) -> Any:
    return getattr(native.model if name in struct_fields()[0] else native.context, name)


def _address(name: str) -> Callable[[Any], Any]:
    return lambda native: field_value(native, name)


def _override(native: Any) -> list[Any]:
    entries = [native.model.kv_overrides[i] for i in range(5)]
    text = ctypes.string_at(ctypes.addressof(entries[3].value))
    value = entries[0].value
    return [entry.key for entry in entries] + [
        value.val_i64,
        entries[1].value.val_bool,
        entries[2].value.val_f64,
        text,
    ]


POINTED_TO: dict[
    str, tuple[Any, Callable[[Any], Any], Any]
] = {  # name: (option, how to read it, what to find)
    "devices": (_array, _address("devices"), ctypes.addressof(_array)),
    "tensor_buft_overrides": (_array, _address("tensor_buft_overrides"), ctypes.addressof(_array)),
    "progress_callback_user_data": (4096, _address("progress_callback_user_data"), 4096),
    "cb_eval_user_data": (ctypes.c_void_p(4096), _address("cb_eval_user_data"), 4096),
    "abort_callback_data": (_array, _address("abort_callback_data"), ctypes.addressof(_array)),
    "tensor_split": ([1], lambda native: native.model.tensor_split[0], 1.0),
    "kv_overrides": (
        {"a.int": 7, "a.bool": True, "a.float": 0.5, "a.str": "Ünï"},
        _override,
        [b"a.int", b"a.bool", b"a.float", b"a.str", b"", 7, True, 0.5, "Ünï".encode()],
    ),
}

CALLBACKS: dict[
    str, tuple[Callable[..., bool], tuple[Any, ...], bool]
] = {  # name: (option, a call, its answer)
    "progress_callback": (lambda progress, _: progress > 0.25, (0.5, None), True),
    "cb_eval": (lambda tensor, ask, _: bool(ask), (None, True, None), True),
    "abort_callback": (lambda _: True, (None,), True),
}


def _load_mode(name: str) -> int | None:
    return getattr(llama_cpp, f"LLAMA_LOAD_MODE_{name}", None)


ATTRIBUTES: dict[str, tuple[Any, Callable[[Any], Any], Any]] = {  # arguments of Llama that are no field
    "use_mmap": (False, lambda native: native.model.load_mode, _load_mode("NONE")),
    "use_mlock": (True, lambda native: native.model.load_mode, _load_mode("MMAP_MLOCK")),
    "flash_attn": (True, lambda native: native.context.flash_attn_type, 1),
    "embedding": (True, lambda native: native.context.embeddings, True),
    "numa": (True, lambda native: native.numa, 1),
    "lora_path": ("adapter.gguf", lambda native: native.lora_path, "adapter.gguf"),
    "lora_scale": (0.5, lambda native: native.lora_scale, 0.5),
    "verbose": (True, lambda native: native.verbose, True),
}
