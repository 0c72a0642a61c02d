"""From the webui's command line flags (`shared.args`) to options of `LlamaCppConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import OptionError
from ..options import option

__all__ = ["DEFAULT_CTX", "draft_max", "draft_options", "load_options", "wanted_draft"]

DEFAULT_CTX = 8192
"""What `ctx_size` 0 means, as with the webui's other loaders; a model trained for less takes what it was trained for."""

DEFAULT_SINK, DEFAULT_CHUNK = 4, 32
"""What `streaming_llm` sets: the attention sinks of the paper (https://arxiv.org/abs/2309.17453), and the shortest run of
moved tokens that is worth a shift."""

SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
"""LLAMA_SPLIT_MODE_*"""

CACHE_TYPES = {"fp16": "f16", "fp32": "f32", "q8": "q8_0", "q5": "q5_0", "q4": "q4_0"}
"""The names in the webui's menu that llama.cpp spells otherwise."""

KNOWN_TYPES = option("type_k").choices


def load_options(args: Any, n_ctx_train: int, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options for the model. `args` is the webui's namespace; `own` holds what only this loader has (the panel's `n_sink`,
    `reuse_min_chunk`, `lora_path`, ...), which wins over what a flag implies.

    Raises `OptionError` with the flag's name.
    """
    n_ctx = _context(args, n_ctx_train)
    values = _common(args, n_ctx)
    values["n_gpu_layers"] = _integer(args, "gpu_layers", -1)
    if _flag(args, "cfg_cache"):
        values["n_cells"] = 2 * n_ctx
    if _flag(args, "streaming_llm"):
        values |= {"n_sink": DEFAULT_SINK, "reuse_min_chunk": DEFAULT_CHUNK}
    return values | {name: value for name, value in (own or {}).items() if value not in (None, "")}


def wanted_draft(args: Any) -> str:
    """The draft model's name, "" where none was chosen."""
    name = getattr(args, "model_draft", None)
    return "" if name in (None, "", "None") else str(name)


def draft_max(args: Any) -> int:
    """Tokens of a draft."""
    number = _integer(args, "draft_max", 4)
    if number < 1:
        raise OptionError(f"draft_max={number} is below 1, the least a draft has", "draft_max")
    return number


def draft_options(args: Any, n_ctx: int) -> dict[str, Any]:
    """Options for the draft model of a model with `n_ctx`."""
    values = _common(args, _integer(args, "ctx_size_draft", 0) or n_ctx)
    layers = _integer(args, "gpu_layers_draft", -1)
    return values | {"n_gpu_layers": -1 if layers >= 256 else layers}  # 256 is the end of the webui's slider: all of them


def _common(args: Any, n_ctx: int) -> dict[str, Any]:
    values: dict[str, Any] = {"n_ctx": n_ctx}
    for flag, name in (("threads", "n_threads"), ("threads_batch", "n_threads_batch")):
        if number := _integer(args, flag, 0):
            values[name] = number
    for flag, name in (("batch_size", "n_batch"), ("ubatch_size", "n_ubatch")):
        if number := _integer(args, flag, 0):
            values[name] = number
    if "n_ubatch" in values:
        values["n_ubatch"] = min(values["n_ubatch"], values.get("n_batch", values["n_ubatch"]))
    values |= _cache_types(getattr(args, "cache_type", None))
    if split := _tensor_split(getattr(args, "tensor_split", None)):
        values["tensor_split"] = split
    if mode := getattr(args, "split_mode", None):
        if not isinstance(mode, str) or mode not in SPLIT_MODES:
            raise OptionError(f"split_mode={mode!r} is not one of {', '.join(SPLIT_MODES)}", "split_mode")
        if mode != "layer":  # llama.cpp's default
            values["split_mode"] = SPLIT_MODES[mode]
    for flag, name, value in (
        ("no_kv_offload", "offload_kqv", False), ("no_mmap", "use_mmap", False), ("mlock", "use_mlock", True),
        ("numa", "numa", True),
    ):  # fmt: skip
        if _flag(args, flag):
            values[name] = value
    return values


def _context(args: Any, n_ctx_train: int) -> int:
    given = _integer(args, "ctx_size", 0)
    if given < 0:
        raise OptionError(f"ctx_size={given} is below 0; 0 is {DEFAULT_CTX}, or what the model was trained for", "ctx_size")
    return given or min(DEFAULT_CTX, n_ctx_train or DEFAULT_CTX)


def _flag(args: Any, flag: str) -> bool:
    value = getattr(args, flag, False)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise OptionError(f"{flag}={value!r} is neither true nor false", flag)


def _integer(args: Any, flag: str, default: int) -> int:
    """The API hands over whatever JSON it was sent."""
    value = getattr(args, flag, None)
    if value is None or value == "":
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or int(value) != value:
        raise OptionError(f"{flag}={value!r} is no whole number", flag)
    return int(value)


def _cache_types(text: str | None) -> dict[str, Any]:
    """`cache_type` is one type for both, or two, of K and of V: "q8_0/q4_0", "q8_0,q4_0", and as ExLlama spells it "q8_q4"."""
    if not text:
        return {}
    parts = [part.strip() for part in str(text).lower().replace("/", ",").split(",")]
    if len(parts) == 1 and CACHE_TYPES.get(parts[0], parts[0]) not in KNOWN_TYPES:
        parts = _halves(parts[0])
    types = [CACHE_TYPES.get(part, part) for part in parts]
    if not 1 <= len(types) <= 2 or any(one not in KNOWN_TYPES for one in types):
        raise OptionError(
            f"cache_type={text!r} is none of fp16, {', '.join(KNOWN_TYPES)}, nor two of them for K and V as in q8_0/q4_0",
            "cache_type",
        )
    k, v = types[0], types[-1]
    return {} if k == v == "f16" else {"type_k": k, "type_v": v}


def _halves(text: str) -> list[str]:
    """Two types with an underscore or a hyphen between them, some of which have one in their name."""
    for at, letter in enumerate(text):
        first, second = text[:at], text[at + 1 :]
        if letter in "_-" and all(CACHE_TYPES.get(one, one) in KNOWN_TYPES for one in (first, second)):
            return [first, second]
    return [text]


def _tensor_split(text: Any) -> list[float] | None:
    if text in (None, ""):
        return None
    parts = text if isinstance(text, (list, tuple)) else str(text).replace(";", ",").split(",")
    try:
        split = [float(part) for part in parts]
        if all(math.isfinite(part) and part >= 0 for part in split):
            return split
        raise ValueError
    except (TypeError, ValueError):
        raise OptionError(f"tensor_split={text!r} is no list of proportions such as 60,40", "tensor_split") from None
