"""Vectors of texts: the last hidden states, pooled as the GGUF says, of length 1."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

from ...cache import LlamaCppCache
from ...errors import ContextOverflowError, GenerationCancelled
from ..host import ModelHost
from .errors import ApiError
from .job import Done, Job

__all__ = ["Embedding", "embeddings_body", "embeddings_inputs"]

MAX_INPUTS = 2048
CHUNK = 256
CLS, LAST = 2, 3
"""`llama_pooling_type`; all others, and files that say nothing, are the mean over all tokens."""


def embeddings_inputs(model: Any, request: Any) -> list[list[int]]:
    """Token ids of every text. Raises `ApiError` and `ContextOverflowError`."""
    given = request.input
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if len(given) > MAX_INPUTS:
        raise ApiError(400, f"input: {len(given)} texts, and {MAX_INPUTS} are the most", "input", "too_many")
    width = model.config.hidden_size
    if request.dimensions not in (None, width):
        raise ApiError(400, f"dimensions: the vectors of this model have {width}", "dimensions", "unsupported")
    texts = [model.tokenizer.encode(one) if isinstance(one, str) else one for one in given]
    n_ctx, n_vocab = model.config.max_position_embeddings, model.config.vocab_size
    for at, ids in enumerate(texts):
        if not ids:
            raise ApiError(400, f"input.{at} is empty", "input", "invalid_value")
        if max(ids) >= n_vocab:
            raise ApiError(400, f"token id {max(ids)} is outside the vocabulary 0 .. {n_vocab - 1}", "input", "invalid_value")
        if len(ids) > n_ctx:
            raise ContextOverflowError(len(ids), n_ctx)
    return texts


class Embedding:
    """A part of a job (see `state.py`). `vectors`: float32 `(texts, hidden_size)`, when it is done."""

    def __init__(self, host: ModelHost, job: Job, texts: list[list[int]]) -> None:
        self._host, self._job, self._texts = host, job, texts
        self.vectors: Any = None

    def run(self) -> None:
        with self._host.use(self._job.stop, self._job.change) as model:
            architecture = model.native.metadata.get("general.architecture", "")
            pooling = int(model.native.metadata.get(f"{architecture}.pooling_type", "0") or 0)
            try:
                self.vectors = np.stack([self._vector(model, ids, pooling) for ids in self._texts])
            except GenerationCancelled:
                self._job.check_model()
                raise ApiError(503, "the request was stopped", code="stopped") from None
        self._job.post(Done(0, sum(map(len, self._texts)), None, 0))

    def _vector(self, model: Any, ids: list[int], pooling: int) -> Any:
        cache = LlamaCppCache(model)
        parts = []
        try:
            for begin in range(0, len(ids), CHUNK):
                if self._job.stop.is_set():
                    raise GenerationCancelled(begin, len(ids))
                end = min(begin + CHUNK, len(ids))
                output = model(
                    torch.tensor([ids[begin:end]]), attention_mask=torch.ones(1, end, dtype=torch.int64),
                    past_key_values=cache, logits_to_keep=0, output_hidden_states="last",
                )  # fmt: skip
                parts.append(output.hidden_states[-1][0].float())
        finally:
            cache.close()
            model.engine.backend.rest()  # as generate() does at its end
        states = torch.cat(parts)
        pooled = states[0] if pooling == CLS else states[-1] if pooling == LAST else states.mean(dim=0)
        return torch.nn.functional.normalize(pooled, dim=0).numpy()


def embeddings_body(vectors: Any, texts: list[list[int]], model: str, as_base64: bool) -> dict[str, Any]:
    data = [
        {
            "object": "embedding",
            "index": at,
            "embedding": base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_base64 else vector.tolist(),
        }
        for at, vector in enumerate(vectors)
    ]
    tokens = sum(map(len, texts))
    return {"object": "list", "data": data, "model": model, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
