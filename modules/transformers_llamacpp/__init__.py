"""transformers_llamacpp: any GGUF model, on any device llama.cpp runs on, with transformers' whole `generate()` toolbox."""

from __future__ import annotations

from . import compat as _compat
from .cache import LlamaCppCache
from .config import LlamaCppConfig, LlamaCppModelConfig
from .errors import (
    CacheFullError,
    ClosedError,
    ContextOverflowError,
    DecodeError,
    GenerationCancelled,
    InvalidInputError,
    LlamaCppError,
    ModelLoadError,
    OptionError,
    OptionTypeError,
    StateError,
    TokenizerError,
    UnknownOptionError,
    UnsupportedFeatureError,
    WebuiError,
)
from .modeling import LlamaCppForCausalLM
from .request import GenerateStats
from .tokenizer import LlamaCppTokenizer

__version__ = "0.1.0"

__all__ = [
    "CacheFullError",
    "ClosedError",
    "ContextOverflowError",
    "DecodeError",
    "GenerateStats",
    "GenerationCancelled",
    "InvalidInputError",
    "LlamaCppCache",
    "LlamaCppConfig",
    "LlamaCppError",
    "LlamaCppForCausalLM",
    "LlamaCppModelConfig",
    "LlamaCppTokenizer",
    "ModelLoadError",
    "OptionError",
    "OptionTypeError",
    "StateError",
    "TokenizerError",
    "UnknownOptionError",
    "UnsupportedFeatureError",
    "WebuiError",
]

_compat.register(LlamaCppModelConfig, LlamaCppForCausalLM, LlamaCppConfig)
