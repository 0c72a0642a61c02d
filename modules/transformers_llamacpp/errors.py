"""Every exception this package raises on purpose.

    LlamaCppError
    ├── ModelLoadError            the file, the options or the memory do not allow a model
    ├── OptionError               an option of LlamaCppConfig: unknown, ill-typed, out of range, in conflict
    │   ├── OptionTypeError       (also a TypeError)
    │   └── UnknownOptionError    (also a TypeError)
    ├── InvalidInputError         a tensor or a token list that cannot mean anything (also a ValueError)
    ├── ContextOverflowError      more tokens than n_ctx
    ├── CacheFullError            no KV cells or no sequence ids left
    ├── DecodeError               llama.cpp refused or failed a decode
    ├── UnsupportedFeatureError   something llama.cpp cannot give
    ├── TokenizerError            text or tokens the vocabulary cannot handle
    ├── StateError                a saved state that does not fit
    ├── ClosedError               the model or the cache was closed
    ├── WebuiError                a folder of text-generation-webui that something of ours cannot be put into or run from
    └── GenerationCancelled       the caller stopped the call (a progress callback said so)

Each message says what happened, with the numbers, and names the option or the call that cures it. The numbers are
attributes too, so that a caller never has to read the text.
"""

from __future__ import annotations

__all__ = [
    "CacheFullError",
    "ClosedError",
    "ContextOverflowError",
    "DecodeError",
    "GenerationCancelled",
    "InvalidInputError",
    "LlamaCppError",
    "ModelLoadError",
    "OptionError",
    "OptionTypeError",
    "StateError",
    "TokenizerError",
    "UnknownOptionError",
    "UnsupportedFeatureError",
    "WebuiError",
]


class LlamaCppError(Exception):
    """Root of the tree: `except LlamaCppError` catches everything this package raises on purpose."""


class ModelLoadError(LlamaCppError):
    """The model could not be loaded. `path` is the file that was tried, or `None`."""

    def __init__(self, message: str, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class OptionError(LlamaCppError, ValueError):
    """An option cannot have this value. `option` is its name."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class OptionTypeError(OptionError, TypeError):
    """An option cannot have a value of this type."""


class UnknownOptionError(OptionError, TypeError):
    """No option has this name. `nearest` lists the valid names that look most like it."""

    def __init__(self, message: str, option: str, nearest: tuple[str, ...] = ()) -> None:
        super().__init__(message, option)
        self.nearest = nearest


class InvalidInputError(LlamaCppError, ValueError):
    """The input has a shape, a mask or a token id that cannot mean anything."""


class ContextOverflowError(LlamaCppError, ValueError):
    """A sequence would hold `needed` tokens, and `n_ctx` is the most it may hold. `why`: why the context does not slide, where
    the model has `n_sink`."""

    def __init__(self, needed: int, n_ctx: int, row: int | None = None, why: str = "") -> None:
        where = "" if row is None else f" (row {row})"
        super().__init__(
            f"{needed} tokens do not fit into a context of {n_ctx}{where}{why and f', which does not slide: {why}'}. Load the "
            f"model with LlamaCppConfig(n_ctx={needed}) or more, or shorten the prompt."
        )
        self.needed = needed
        self.n_ctx = n_ctx
        self.row = row


class CacheFullError(LlamaCppError, RuntimeError):
    """The KV buffer has no room: `needed` tokens or sequences were asked for, `limit` is what there is."""

    def __init__(self, message: str, needed: int, limit: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.limit = limit


class DecodeError(LlamaCppError, RuntimeError):
    """`llama_decode` returned `status`. The sequences of the call are back where they were before it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class UnsupportedFeatureError(LlamaCppError):
    """llama.cpp cannot give this. `feature` names it."""

    def __init__(self, message: str, feature: str | None = None) -> None:
        super().__init__(message)
        self.feature = feature


class TokenizerError(LlamaCppError, ValueError):
    """The vocabulary cannot handle this text or these tokens."""


class StateError(LlamaCppError):
    """A saved state does not belong to this model, or is damaged."""


class ClosedError(LlamaCppError, RuntimeError):
    """The model or the cache was closed; load the model again, or make a new cache."""


class WebuiError(LlamaCppError):
    """The folder of a text-generation-webui is none, or holds or refuses something. `path` is what is in the way."""

    def __init__(self, message: str, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class GenerationCancelled(LlamaCppError):
    """A progress callback stopped the call after `evaluated` of `total` prompt tokens. The model stays usable."""

    def __init__(self, evaluated: int, total: int) -> None:
        super().__init__(f"cancelled after {evaluated} of {total} prompt tokens; the model can be used again at once")
        self.evaluated = evaluated
        self.total = total
