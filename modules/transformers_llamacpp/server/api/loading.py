"""Options of a load over HTTP: the webui's names and this package's, those of files left out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ...errors import OptionError
from ...options import options_in
from ...webui import loading
from .errors import ApiError

__all__ = ["draft_of", "load_options"]

OWN = {entry.name: entry for group in ("context", "model") for entry in options_in(group) if entry.kind is not str
       or entry.choices}  # fmt: skip
"""Whatever names a file or a folder is the business of who started the server."""

WEBUI = frozenset({
    "ctx_size", "gpu_layers", "threads", "threads_batch", "batch_size", "ubatch_size", "cache_type", "tensor_split",
    "split_mode", "no_kv_offload", "no_mmap", "mlock", "numa", "cfg_cache", "streaming_llm",
})  # fmt: skip

IGNORED = frozenset({"loader", "cpu", "bf16", "spec_type", "gpu_layers_draft", "device_draft", "ctx_size_draft"})
"""Of other loaders; and a draft model has the options of its target."""

DRAFT = frozenset({"model_draft", "draft_max"})


def draft_of(args: Mapping[str, Any]) -> tuple[str, int | None]:
    """The name of the model that is to draft ("" for none) and its tokens at a time. Raises `ApiError`."""
    name, tokens = args.get("model_draft"), args.get("draft_max")
    if not isinstance(name, (str, type(None))):
        raise ApiError(400, "args.model_draft: the name of a model", "args.model_draft", "invalid_type")
    if tokens is not None and (not isinstance(tokens, int) or isinstance(tokens, bool) or not 1 <= tokens <= 64):
        raise ApiError(400, "args.draft_max: a number from 1 to 64", "args.draft_max", "invalid_value")
    return ("" if name in (None, "None") else name), tokens


def load_options(args: Mapping[str, Any]) -> dict[str, Any]:
    """Raises `ApiError` with the name of the argument."""
    flags, options = {}, {}
    for name, value in args.items():
        if value is None or name in IGNORED or name in DRAFT:
            continue
        if name in OWN:
            if wrong := OWN[name].check(value):
                raise ApiError(400, f"args.{wrong}", f"args.{name}", "invalid_value")
            options[name] = value
        elif name in WEBUI:
            flags[name] = value
        else:
            nearest = difflib.get_close_matches(name, [*OWN, *WEBUI, *DRAFT], n=2, cutoff=0.5)
            hint = f": did you mean {' or '.join(nearest)}?" if nearest else ""
            raise ApiError(400, f"args.{name}: there is no such option{hint}", f"args.{name}", "unknown_field")
    if not flags:
        return options
    try:
        translated = loading.load_options(SimpleNamespace(**flags), 0)
    except OptionError as error:
        raise ApiError(400, f"args.{error}", f"args.{error.option}", "invalid_value") from error
    if "ctx_size" not in flags:
        translated.pop("n_ctx")
    if "gpu_layers" not in flags:
        translated.pop("n_gpu_layers")
    if flags.get("cfg_cache") and "n_ctx" not in translated:
        translated.pop("n_cells")
    return translated | options
