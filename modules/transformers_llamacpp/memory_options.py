"""Options of memory and reuse that only a loaded model can judge."""

from __future__ import annotations

from .backend import Backend
from .config import LlamaCppConfig
from .errors import OptionError, UnsupportedFeatureError
from .registry import Keeping
from .state_folder import StateFolder

__all__ = ["check_memory_options", "open_folder"]

LEAST_WINDOW = 16
"""Fewer tokens behind the sinks are no context to go on from."""


def check_memory_options(options: LlamaCppConfig, n_ctx: int, backend: Backend) -> None:
    """Raises `UnsupportedFeatureError` where this model's memory cannot do what is asked, `OptionError` for a conflict."""
    limits = backend.limits
    for name in ("n_sink", "reuse_min_chunk"):
        if getattr(options, name) in (None, 0) and not (name == "n_sink" and options.n_sink == 0):
            continue
        if not limits.can_shift:
            reason = (
                "it keeps a recurrent state, which has no positions to move"
                if limits.recurrent
                else "swa_full=False drops cells; load it with swa_full=True"
                if limits.stateful
                else "keys of type_k='bf16' cannot be rotated; load it with type_k='f16'"
                if backend.fingerprint["type_k"] == "bf16"
                else "the positions of this architecture are no rotations, or llama.cpp cannot shift them"
            )
            raise UnsupportedFeatureError(f"{name} is not possible with this model: {reason}", name)
    if options.n_sink is not None:
        if n_ctx < options.n_sink + LEAST_WINDOW:
            raise OptionError(
                f"n_sink={options.n_sink} leaves {n_ctx - options.n_sink} of n_ctx={n_ctx} tokens to slide; at least "
                f"{LEAST_WINDOW} are needed",
                "n_sink",
            )
        if limits.n_cells < n_ctx:
            raise OptionError(
                f"n_cells={limits.n_cells} is less than n_ctx={n_ctx}: the cells would be full before the context slides",
                "n_cells",
            )
    if options.reuse_min_chunk:
        if not options.prefix_reuse:
            raise OptionError("reuse_min_chunk reuses earlier texts, and prefix_reuse=False keeps none", "reuse_min_chunk")
        if limits.n_seq_max == 1:
            raise OptionError("reuse_min_chunk needs a second sequence to move chunks with: n_seq_max=2", "n_seq_max")


def open_folder(options: LlamaCppConfig, backend: Backend) -> StateFolder | None:
    """The folder of `state_dir`. Raises `StateError` where it cannot be used."""
    if options.state_dir is None:
        return None
    exact = Keeping(reuse_min_chunk=options.reuse_min_chunk).marks(slid=False)
    return StateFolder(options.state_dir, {**backend.fingerprint, **exact}, options.state_dir_bytes)
