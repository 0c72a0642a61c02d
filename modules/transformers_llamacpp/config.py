"""`LlamaCppConfig`: how a GGUF is loaded; `LlamaCppModelConfig`: what transformers wants to know about the loaded model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig
from transformers.utils.quantization_config import QuantizationConfigMixin

from .native import accepted_names, check_option
from .native.model import NativeModel
from .options import OWN_OPTIONS

__all__ = ["LlamaCppConfig", "LlamaCppModelConfig"]


class LlamaCppConfig(QuantizationConfigMixin):
    """Options of a GGUF model, passed as `quantization_config=` to `from_pretrained`.

    Takes, by name: our own options (`n_ctx`, `n_cells`, `n_seq_max`, `host_cache_bytes`, `prefix_reuse`, …, see
    `options.py`), every argument of `llama_cpp.Llama`, and every field of the installed `llama_model_params` and
    `llama_context_params`. Reading an option that was not set gives our default, or `None` where llama.cpp decides.

    Raises `UnknownOptionError` (a `TypeError`) with the nearest valid names, `OptionTypeError` for a wrong type,
    `OptionError` for a value out of range, `UnsupportedFeatureError` for a name that cannot apply, with the reason.

    >>> LlamaCppConfig(n_ctx=8192, n_gpu_layers=20, type_k="q8_0", flash_attn=True)
    """

    def __init__(self, **kwargs: Any) -> None:
        kwargs.pop("quant_method", None)
        object.__setattr__(self, "quant_method", "llama_cpp")
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "quant_method":
            value = check_option(name, value)
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in accepted_names():
            return OWN_OPTIONS[name].default if name in OWN_OPTIONS else None
        raise AttributeError(f"{type(self).__name__} has no option {name!r}")

    @property
    def options(self) -> dict[str, Any]:
        """What was set, by name."""
        return {name: value for name, value in self.__dict__.items() if name != "quant_method"}

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": self.quant_method, **self.options}

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """Set what is an option here; returns the rest."""
        known = {name: value for name, value in kwargs.items() if name in accepted_names()}
        for name, value in known.items():
            setattr(self, name, value)
        return {name: value for name, value in kwargs.items() if name not in known}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        config = cls(**config_dict)
        unused = config.update(**kwargs)
        return (config, unused) if return_unused_kwargs else config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LlamaCppConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


class LlamaCppModelConfig(PreTrainedConfig):
    """What the GGUF says about its model, under transformers' names."""

    model_type = "llama_cpp"

    @classmethod
    def from_native(cls, native: NativeModel, n_ctx: int) -> LlamaCppModelConfig:
        """Read from the loaded model. `max_position_embeddings` is `n_ctx`, the length that can really be used."""
        vocab, architecture = native.vocab, native.metadata.get("general.architecture", "unknown")
        feed_forward = native.metadata.get(f"{architecture}.feed_forward_length", "")
        config = cls(
            vocab_size=vocab.n_tokens,
            bos_token_id=vocab.bos_id,
            eos_token_id=list(vocab.eog_ids) or None,
            pad_token_id=vocab.pad_id if vocab.pad_id is not None else vocab.eos_id,
        )
        values: dict[str, Any] = {
            "hidden_size": native.n_embd,
            "intermediate_size": int(feed_forward) if feed_forward.isdigit() else None,
            "num_hidden_layers": native.n_layer,
            "num_attention_heads": native.n_head,
            "num_key_value_heads": native.n_head_kv,
            "max_position_embeddings": n_ctx,
            "n_ctx_train": native.n_ctx_train,
            "gguf_architecture": architecture,
            "gguf_name": native.metadata.get("general.name", native.path.stem),
            "use_cache": True,
            "tie_word_embeddings": False,
            "architectures": ["LlamaCppForCausalLM"],
            "vocab_size": vocab.n_tokens,
        }
        for name, value in values.items():
            setattr(config, name, value)
        return config
