"""The transformers dialects: the one place that knows what differs between the supported releases.

| | up to 5.13 | 5.14 to 5.23 | 5.24 |
|---|---|---|---|
| the cache's name | `past_key_values` | `past_key_values` | `cache` |
| `Cache.crop(x)` | keep `x`, or remove `-x` | remove `-x`, or keep `x > 0` | remove `-x`; `x > 0` is an error |
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import transformers
import transformers.generation.utils
from transformers.modeling_outputs import CausalLMOutputWithPast

__all__ = [
    "CACHE_NAME", "CRITERIA_COME_FIRST", "cache_of", "can_crop", "crop_length", "model_output", "register", "take_cache",
    "with_cache",
]  # fmt: skip

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])

CACHE_NAME = (
    "cache" if "cache" in {field.name for field in dataclasses.fields(CausalLMOutputWithPast)} else "past_key_values"
)
"""What this release calls a cache in `forward`, `generate` and in outputs."""

CRITERIA_COME_FIRST = hasattr(transformers.generation.utils, "StopCheck")
"""Whether transformers' own loop asks the stopping criteria before it hands a token to the streamer, or after."""

CACHE_NAMES = ("cache", "past_key_values")


def take_cache(kwargs: dict[str, Any]) -> Any:
    """Remove the cache from `kwargs`, under whichever name it came. Raises `ValueError` if it came under both."""
    found = [kwargs.pop(name) for name in CACHE_NAMES if name in kwargs]
    given = [cache for cache in found if cache is not None]
    if len(given) > 1 and given[0] is not given[1]:
        raise ValueError("pass the cache as `cache` or as `past_key_values`, not both")
    return given[0] if given else None


def with_cache(kwargs: dict[str, Any], cache: Any) -> dict[str, Any]:
    """`kwargs` with the cache under the name of this release."""
    if cache is not None:
        kwargs[CACHE_NAME] = cache
    return kwargs


def cache_of(outputs: Any) -> Any:
    """The cache in a model's or `generate`'s output, on every release; `None` where there is none."""
    return getattr(outputs, CACHE_NAME, None)


def model_output(loss: Any, logits: torch.Tensor, cache: Any, hidden_states: Any) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=hidden_states, **{CACHE_NAME: cache})


def crop_length(length: int, argument: int) -> int:
    """How many of `length` tokens `Cache.crop(argument)` keeps in this release."""
    if argument < 0 or (argument == 0 and VERSION >= (5, 14)):
        return max(0, length + argument)
    if argument > 0 and VERSION >= (5, 24):
        raise ValueError(
            f"transformers {transformers.__version__} crops by the number of tokens to remove: crop({argument}) is no "
            f"such number; call crop({min(argument, length) - length}) to keep {argument} of {length}"
        )
    return min(length, argument)


def register(config_class: type, model_class: type, quantization_config_class: type) -> None:
    """Let transformers' auto classes find ours. Without a `LlamaCppConfig` they behave exactly as before."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)  # type: ignore[attr-defined]
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault("llama_cpp", quantization_config_class)
    inherited = AutoModelForCausalLM.from_pretrained.__func__
    if getattr(inherited, "_llama_cpp", False):
        return

    @functools.wraps(inherited)
    def from_pretrained(cls: type, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("quantization_config")
        if isinstance(config, quantization_config_class) or _names_us(config):
            return model_class.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)  # type: ignore[attr-defined]
        return inherited(cls, pretrained_model_name_or_path, *args, **kwargs)

    from_pretrained._llama_cpp = True  # type: ignore[attr-defined]
    AutoModelForCausalLM.from_pretrained = classmethod(from_pretrained)


def _names_us(config: Any) -> bool:
    return isinstance(config, dict) and config.get("quant_method") == "llama_cpp"


def can_crop(cache: Any) -> bool:
    """Whether `cache.crop(-n)` takes back `n` tokens on every release: plain layers that keep every key can."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    return isinstance(cache, DynamicCache) and all(type(layer) is DynamicLayer for layer in cache.layers)
