"""Any causal language model of transformers as an assistant."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ... import compat

__all__ = ["TorchReader"]

UNLIMITED = 1 << 30


class TorchReader:
    """Reads with a PyTorch model, on its device, in a cache of its own.

    A cache that cannot be shortened (recurrent layers, a sliding window that has moved on) is copied before each draft and
    the copy gone back to.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        self._copy: tuple[Any, int] | None = None
        self._read: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        config = model.config.get_text_config()
        self.n_ctx = int(getattr(config, "max_position_embeddings", None) or UNLIMITED)
        self.n_vocab = int(config.vocab_size)

    def read(self, tokens: npt.NDArray[np.int32]) -> torch.Tensor:
        n = min(len(self._read), len(tokens) - 1)
        different = np.flatnonzero(self._read[:n] != tokens[:n])
        self._go_back(int(different[0]) if len(different) else n)
        logits = self._feed(tokens[len(self._read) :])
        if not compat.can_crop(self._cache):
            self._copy = (copy.deepcopy(self._cache), len(self._read))
        return logits

    def step(self, token: int) -> torch.Tensor:
        return self._feed(np.array([token], np.int32))

    def close(self) -> None:
        self._cache = self._copy = None
        self._read = np.zeros(0, np.int32)

    def _go_back(self, length: int) -> None:
        surplus = len(self._read) - length
        if surplus <= 0 or self._cache is None:
            return
        if compat.can_crop(self._cache):
            self._cache.crop(-surplus)
        elif self._copy is not None and self._copy[1] <= length:
            self._cache, length = self._copy
        else:
            self._cache, length = None, 0
        self._copy = None
        self._read = self._read[:length]

    def _feed(self, tokens: npt.NDArray[np.int32]) -> torch.Tensor:
        ids = torch.from_numpy(tokens.astype(np.int64))[None].to(self._model.device)
        with torch.no_grad():
            output = self._model(ids, use_cache=True, **{compat.CACHE_NAME: self._cache})
        self._cache = compat.cache_of(output)
        self._read = np.concatenate([self._read, tokens]) if self._cache is not None else np.zeros(0, np.int32)
        logits: torch.Tensor = output.logits[0, -1].float().cpu()
        return logits
