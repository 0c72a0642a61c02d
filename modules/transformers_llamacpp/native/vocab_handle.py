"""The pointer to a model's vocabulary: who may use it, until when, and the metadata beside it."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import ClosedError, ModelLoadError
from .library import llama_cpp

__all__ = ["VocabHandle", "read_metadata"]

Self = TypeVar("Self", bound="VocabHandle")


class VocabHandle:
    """Lends out a `llama_vocab_p` until it is closed. Copies are the same object: nothing here ever changes, and a
    second native model would cost the load again."""

    def __init__(
        self,
        model_pointer: Any,
        owner: object | None,
        path: str | os.PathLike[str] | None,
        on_close: Callable[[], object] | None,
    ) -> None:
        self.path = None if path is None else Path(path)
        if not model_pointer:
            raise ModelLoadError("no vocabulary: the model pointer is NULL; load the model first", self._name())
        pointer = llama_cpp.llama_model_get_vocab(model_pointer)
        if not pointer:
            raise ModelLoadError("llama_model_get_vocab gave NULL: this model has no vocabulary", self._name())
        self._model = model_pointer
        self._pointer = pointer
        self._owner = owner
        self._on_close = on_close
        self._idle = threading.Condition(threading.Lock())
        self._users = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Forget the native vocabulary; idempotent. Waits for calls that are inside llama.cpp. Later use is a
        `ClosedError`. Whoever frees the model calls this first."""
        with self._idle:
            if self._closed:
                return
            self._closed = True
            self._idle.wait_for(lambda: self._users == 0)
        self._owner = None
        if self._on_close is not None:
            self._on_close()

    @contextmanager
    def _use(self) -> Iterator[Any]:
        """The native pointer, which `close()` leaves alone until the block ends."""
        with self._idle:
            if self._closed:
                raise ClosedError(
                    f"the model of this vocabulary{self._of()} was closed; open the vocabulary alone with "
                    "LlamaCppTokenizer.from_pretrained(path)"
                )
            self._users += 1
        try:
            yield self._pointer
        finally:
            with self._idle:
                self._users -= 1
                if not self._users:
                    self._idle.notify_all()

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return self

    def metadata(self) -> dict[str, str]:
        """The GGUF's scalar key-value pairs as llama.cpp prints them (arrays are left out)."""
        with self._use():
            return read_metadata(self._model)

    def metadata_value(self, key: str) -> str | None:
        with self._use():
            return _sized(partial(llama_cpp.llama_model_meta_val_str, self._model, key.encode("utf-8")))

    def _name(self) -> str | None:
        return None if self.path is None else str(self.path)

    def _of(self) -> str:
        return "" if self.path is None else f" ({self.path})"


def _sized(call: Callable[[Any, int], int]) -> str | None:
    """Call a function of the `snprintf` kind, which answers the length it needs, or a negative number."""
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        length = int(call(buffer, size))
        if length < 0:
            return None
        if length < size:
            return buffer.raw[:length].decode("utf-8", "replace")
        size = length + 1


def read_metadata(model_pointer: Any) -> dict[str, str]:
    """Every scalar key-value pair of a loaded model, values as llama.cpp prints them."""
    pairs: dict[str, str] = {}
    for index in range(int(llama_cpp.llama_model_meta_count(model_pointer))):
        key = _sized(partial(llama_cpp.llama_model_meta_key_by_index, model_pointer, index))
        value = _sized(partial(llama_cpp.llama_model_meta_val_str_by_index, model_pointer, index))
        if key is not None and value is not None:
            pairs[key] = value
    return pairs
