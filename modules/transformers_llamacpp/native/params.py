"""From options by name to llama.cpp's parameter structs.

Nothing here lists llama.cpp's parameters: the names come from the installed binding — the fields of its two structs and
the arguments of `llama_cpp.Llama` — so a newer binding brings its new names with it. Written down are only the names
that need a translation (`ALIASES` below) and those that cannot apply, each with its reason (`NOT_APPLICABLE`).
"""

from __future__ import annotations

import ctypes
import difflib
import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import OptionError, OptionTypeError, UnknownOptionError, UnsupportedFeatureError
from ..options import OWN_OPTIONS
from .library import amx_kernels, default_threads, llama_cpp

__all__ = ["ALIASES", "NOT_APPLICABLE", "REFUSED", "NativeParams", "accepted_names", "build", "check_option"]

ALIASES = {
    "use_mmap": "load_mode",
    "use_mlock": "load_mode",
    "flash_attn": "flash_attn_type",
    "embedding": "embeddings",
    "numa": "llama_numa_init",
    "lora_path": "llama_set_adapters_lora",
    "lora_scale": "llama_set_adapters_lora",
    "verbose": "llama_log_set",
}
"""Arguments of `Llama` that are honoured through something of another name."""

NOT_APPLICABLE = {
    "seed": "sampling is not llama.cpp's here: pass seeds=seed to generate(), or call torch.manual_seed(seed) before it",
    "logits_all": "model(..., logits_to_keep=0) gives the logits of every position without a setting",
    "last_n_tokens_size": "the repetition penalty sees the whole text; pass repetition_penalty to generate()",
    "chat_format": "chats use the template in the GGUF; set tokenizer.chat_template for another one",
    "spm_infill": "infill prompts are ordinary text here: tokenize them in the order the model wants",
    "lora_base": "llama.cpp no longer takes a base model for a LoRA; pass lora_path alone",
}
"""Arguments that change nothing here: accepted with a warning when they are set, so that old settings keep working."""

REFUSED = {
    "model_path": "pass the file to from_pretrained() instead",
    "vocab_only": "a model without weights cannot generate; LlamaCppTokenizer.from_pretrained(file) reads the vocabulary",
    "no_alloc": "a model without memory for its weights cannot generate",
    "kv_unified": "sequences share their cells, so the buffer is always unified",
    "chat_handler": "pass messages to tokenizer.apply_chat_template() and the result to generate()",
    "draft_model": "set model.assistant_model, or pass assistant_model to generate()",
    "tokenizer": "pass your tokenizer where you call it; the model takes token ids",
    "samplers": "sampling is done by transformers' logits processors",
    "n_samplers": "sampling is done by transformers' logits processors",
    "ctx_other": "a context of this package owns its memory and shares it with no other",
}
"""Names that cannot apply; setting one is an error that says what to do instead."""

POINTERS = ("devices", "tensor_buft_overrides", "progress_callback_user_data", "cb_eval_user_data", "abort_callback_data")
"""Struct fields that are raw addresses: an int or a ctypes object."""

KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20}
"""`ggml_type` numbers (part of the file format, so they never change; the binding lacks BF16)."""

ENUMS = {
    "split_mode": "SPLIT_MODE",
    "load_mode": "LOAD_MODE",
    "lazy_mode": "LAZY_MODE",
    "ctx_type": "CONTEXT_TYPE",
    "rope_scaling_type": "ROPE_SCALING_TYPE",
    "pooling_type": "POOLING_TYPE",
    "attention_type": "ATTENTION_TYPE",
    "flash_attn_type": "FLASH_ATTN_TYPE",
}
"""Fields whose numbers are named by constants of the binding; llama.cpp aborts the process on most others."""

MAX_THREADS = 512
"""GGML_MAX_N_THREADS; more kill the process."""

MAX_LAYERS = 512
"""llama.cpp's `LLAMA_MAX_LAYERS`."""

_INTEGERS: dict[type, tuple[int, int]] = {
    ctypes.c_int32: (-(2**31), 2**31 - 1),
    ctypes.c_int: (-(2**31), 2**31 - 1),
    ctypes.c_uint32: (0, 2**32 - 1),
    ctypes.c_int64: (-(2**63), 2**63 - 1),
    ctypes.c_size_t: (0, 2**64 - 1),
}


@functools.cache
def struct_fields() -> tuple[dict[str, Any], dict[str, Any]]:
    """Names and ctypes of the model's and the context's parameter struct."""
    return dict(llama_cpp.llama_model_params._fields_), dict(llama_cpp.llama_context_params._fields_)


@functools.cache
def llama_arguments() -> frozenset[str]:
    """The arguments of `llama_cpp.Llama.__init__`, less `self` and `**kwargs`."""
    parameters = inspect.signature(llama_cpp.Llama.__init__).parameters.values()
    return frozenset(p.name for p in parameters if p.kind != p.VAR_KEYWORD and p.name != "self")


@functools.cache
def accepted_names() -> frozenset[str]:
    """Every name `LlamaCppConfig` takes with the installed binding."""
    model, context = struct_fields()
    return frozenset(OWN_OPTIONS) | model.keys() | context.keys() | llama_arguments()


def check_option(name: str, value: Any) -> Any:
    """Return `value` as it will be used. Raises `UnknownOptionError`, `OptionError`, `UnsupportedFeatureError`."""
    if name not in accepted_names():
        nearest = tuple(difflib.get_close_matches(name, sorted(accepted_names()), n=3, cutoff=0.5))
        hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
        raise UnknownOptionError(f"{name!r} is not an option of LlamaCppConfig.{hint}", name, nearest)
    if value is None:
        return None
    if name in OWN_OPTIONS:
        if problem := OWN_OPTIONS[name].check(value):
            kind = OptionError if OWN_OPTIONS[name].has_type(value) else OptionTypeError
            raise kind(problem, name)
        return value
    if name in REFUSED:
        if _is_default(name, value):
            return value
        raise UnsupportedFeatureError(f"{name} cannot be set: {REFUSED[name]}.", name)
    if name in NOT_APPLICABLE:
        if not _is_default(name, value):
            warnings.warn(f"{name}={value!r} changes nothing: {NOT_APPLICABLE[name]}.", stacklevel=4)
        return value
    return _checked(name, value)


def _is_default(name: str, value: Any) -> bool:
    if name == "kv_unified":
        return value is True
    parameter = inspect.signature(llama_cpp.Llama.__init__).parameters.get(name)
    default = parameter.default if parameter is not None else False
    return bool(value == default) or value in (False, None, 0)


def _checked(name: str, value: Any) -> Any:
    """The value as its struct field takes it, or an `OptionError` that names the type."""
    model, context = struct_fields()
    kind = model.get(name, context.get(name))
    if name in ("type_k", "type_v") and isinstance(value, str):
        if value.lower() not in KV_TYPES:
            raise OptionError(f"{name}={value!r} is not one of {', '.join(KV_TYPES)}", name)
        return KV_TYPES[value.lower()]
    if name in ("use_mmap", "use_mlock", "flash_attn", "embedding", "verbose"):
        kind = ctypes.c_bool
    elif name == "lora_scale":
        kind = ctypes.c_float
    elif name == "lora_path":
        return _instance(name, value, str, "a path as str")
    elif name == "numa":
        number = int(_instance(name, value, int, "bool or int"))  # True is 1, GGML_NUMA_STRATEGY_DISTRIBUTE
        if not 0 <= number < llama_cpp.GGML_NUMA_STRATEGY_COUNT:
            raise OptionError(f"numa={number} is outside 0 .. {llama_cpp.GGML_NUMA_STRATEGY_COUNT - 1}", name)
        return number
    elif name == "tensor_split":
        return _tensor_split(value)
    elif name == "kv_overrides":
        _instance(name, value, dict, "a dict of str to bool, int, float or str")
        kv_overrides(value)
        return value
    if kind is ctypes.c_bool:
        return _instance(name, value, bool, "bool")
    if kind is ctypes.c_float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise OptionTypeError(f"{name} takes float, not {type(value).__name__} {value!r}", name)
        return float(value)
    if kind in _INTEGERS and name not in POINTERS:
        if isinstance(value, bool) or not isinstance(value, int):
            raise OptionTypeError(f"{name} takes int, not {type(value).__name__} {value!r}", name)
        low, high = _INTEGERS[kind]
        if not low <= value <= high:
            raise OptionError(f"{name}={value} is outside {low} .. {high}", name)
        if name in ("n_batch", "n_threads", "n_threads_batch") and value < 1:
            raise OptionError(f"{name}={value} is below its minimum 1", name)
        if name in ("n_threads", "n_threads_batch") and value > MAX_THREADS:
            raise OptionError(f"{name}={value} is above its maximum {MAX_THREADS}", name)
        if name in ("type_k", "type_v") and value not in KV_TYPES.values():
            raise OptionError(f"{name}={value} is not one of {', '.join(KV_TYPES)}", name)
        if name in ENUMS:
            _check_enum(name, value)
        return value
    if name in POINTERS:
        if not isinstance(value, (int, ctypes.c_void_p, ctypes.Array, ctypes.Structure, ctypes._Pointer)):
            raise OptionTypeError(f"{name} takes an address (int or ctypes object), not {type(value).__name__}", name)
        return value
    if not callable(value):  # what is left are callbacks
        raise OptionTypeError(f"{name} takes a callable, not {type(value).__name__} {value!r}", name)
    return value


def _check_enum(name: str, value: int) -> None:
    prefix = f"LLAMA_{ENUMS[name]}_"
    known = {n.removeprefix(prefix): getattr(llama_cpp, n) for n in dir(llama_cpp) if n.startswith(prefix)}
    known.pop("MAX_VALUE", None)
    known.pop("NON_CAUSAL", None)  # generate() needs causal attention
    if known and value not in known.values():
        values = ", ".join(f"{number} ({text})" for text, number in sorted(known.items(), key=lambda item: item[1]))
        raise OptionError(f"{name}={value} is not one of {values}", name)


def _instance(name: str, value: Any, kind: type, text: str) -> Any:
    if not isinstance(value, kind):
        raise OptionTypeError(f"{name} takes {text}, not {type(value).__name__} {value!r}", name)
    return value


def _tensor_split(value: Any) -> list[float]:
    limit = llama_cpp.llama_max_devices()
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(x, (int, float)) and not isinstance(x, bool) for x in value
    ):
        raise OptionTypeError(f"tensor_split takes a list of numbers, one per device, not {value!r}", "tensor_split")
    if len(value) > limit:
        raise OptionError(f"tensor_split has {len(value)} entries; llama.cpp knows {limit} devices", "tensor_split")
    return [float(x) for x in value]


def _deadly(key: str, value: Any) -> str | None:
    """Why llama.cpp would end the process over this value (it asserts instead of answering), or `None`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if key.endswith(".block_count") and not 1 <= value <= MAX_LAYERS:
        return f"a model has 1 to {MAX_LAYERS} layers"
    if key.endswith("epsilon") and not value >= 0:
        return "an epsilon is not negative"
    return None


def kv_overrides(values: Mapping[str, Any]) -> Any:
    """llama.cpp's array of metadata overrides, closed by an empty key."""
    array = (llama_cpp.llama_model_kv_override * (len(values) + 1))()
    for entry, (key, value) in zip(array, values.items(), strict=False):
        if not isinstance(key, str) or len(key.encode()) > 127:
            raise OptionError(f"kv_overrides: the key {key!r} is not a str of at most 127 bytes", "kv_overrides")
        if reason := _deadly(key, value):
            raise OptionError(f"kv_overrides[{key!r}] = {value!r}: {reason}", "kv_overrides")
        entry.key = key.encode()
        if isinstance(value, bool):
            entry.tag, entry.value.val_bool = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
        elif isinstance(value, int) and -(2**63) <= value < 2**63:
            entry.tag, entry.value.val_i64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT, value
        elif isinstance(value, float):
            entry.tag, entry.value.val_f64 = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
        elif isinstance(value, str) and len(value.encode()) <= 127:
            entry.tag = llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR
            offset = llama_cpp.llama_model_kv_override_value.val_str.offset
            data = value.encode() + b"\0"
            ctypes.memmove(ctypes.addressof(entry.value) + offset, data, len(data))
        else:
            raise OptionError(
                f"kv_overrides[{key!r}] = {value!r} is none of bool, int (64 bits), float, str (at most 127 bytes)",
                "kv_overrides",
            )
    return array


class NativeParams:
    """The two filled structs, and every Python object that must live as long as llama.cpp reads them."""

    def __init__(self) -> None:
        self.model = llama_cpp.llama_model_default_params()
        self.context = llama_cpp.llama_context_default_params()
        self.lora_path: str | None = None
        self.lora_scale = 1.0
        self.numa = 0
        self.verbose = False
        self.keep: list[Any] = []

    def set(self, name: str, value: Any) -> None:
        """Write one checked value into the struct that has a field of this name."""
        model, _ = struct_fields()
        target = self.model if name in model else self.context
        kind = dict(target._fields_)[name]
        if name == "tensor_split":
            value = (ctypes.c_float * llama_cpp.llama_max_devices())(*value)
        elif name == "kv_overrides":
            value = kv_overrides(value)
        elif name in POINTERS:
            self.keep.append(value)
            value = value if isinstance(value, (int, ctypes.c_void_p)) else ctypes.addressof(value)
        elif callable(value) and not isinstance(value, kind):
            value = kind(value)
        self.keep.append(value)
        setattr(target, name, value)


def build(options: Mapping[str, Any]) -> NativeParams:
    """Structs for `options` (already checked): our defaults where DESIGN sets one, llama.cpp's elsewhere."""
    params = NativeParams()
    model_fields, context_fields = struct_fields()
    given = {name: value for name, value in options.items() if value is not None}
    params.numa = given.get("numa", 0)
    params.verbose = given.get("verbose", False)
    params.lora_path = given.get("lora_path")
    params.lora_scale = given.get("lora_scale", 1.0)
    threads = given.get("n_threads", default_threads())
    values: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads, "n_batch": 512}
    if "use_mmap" in given or "use_mlock" in given:
        _load_mode(values, model_fields, given)
    if "flash_attn" in given:
        values["flash_attn_type"] = int(given["flash_attn"])
    elif not _wants_flash_attention(given):
        values["flash_attn_type"] = 0
    if "embedding" in given:
        values["embeddings"] = given["embedding"]
    if "use_extra_bufts" in model_fields and "use_extra_bufts" not in given and amx_kernels():
        values["use_extra_bufts"] = False
    fields = model_fields.keys() | context_fields.keys()
    values |= {name: value for name, value in given.items() if name in fields and name not in OWN_OPTIONS}
    if values.get("n_gpu_layers", 0) < -1:
        raise OptionError(f"n_gpu_layers={values['n_gpu_layers']} is below -1 (all layers)", "n_gpu_layers")
    for name, value in values.items():
        if name not in REFUSED:
            params.set(name, value)
    params.context.kv_unified = True
    return params


def _wants_flash_attention(given: Mapping[str, Any]) -> bool:
    """Left to llama.cpp on a GPU, and where a quantised V cache needs it. Not by default on the CPU: there its kernel rounds
    more, enough to change the beams of an F32 model (0.0114 to 0.0128 in a score), and wins nothing.
    """
    quantised = given.get("type_v", KV_TYPES["f16"]) not in [KV_TYPES[name] for name in ("f32", "f16", "bf16")]
    return quantised or (given.get("n_gpu_layers", -1) != 0 and bool(llama_cpp.llama_supports_gpu_offload()))


def _load_mode(values: dict[str, Any], fields: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    mmap = given.get("use_mmap", True) and not given.get("lora_path")
    mlock = given.get("use_mlock", False)
    if "load_mode" in fields:
        name = {(True, True): "MMAP_MLOCK", (False, True): "MLOCK", (True, False): "MMAP", (False, False): "NONE"}
        values["load_mode"] = getattr(llama_cpp, f"LLAMA_LOAD_MODE_{name[bool(mmap), mlock]}")
    else:  # bindings before load_mode have the two flags themselves
        values["use_mmap"], values["use_mlock"] = bool(mmap), mlock
