"""What the loops share: what a call collects on its way, and a step of the model."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from .. import compat
from ..engine import Usage
from ..errors import InvalidInputError
from ..request import Request, current_request
from .numbers import Numbers

__all__ = ["Trace", "cache_survives", "first_step", "next_step", "no_streamer", "request_of_call", "step_done"]


class Trace:
    """The per-step tuples of a `return_dict_in_generate` output, each collected only if it is asked for."""

    def __init__(self, config: Any) -> None:
        wanted = bool(config.return_dict_in_generate)
        self.returned = wanted
        self.scores: tuple[Any, ...] | None = () if wanted and config.output_scores else None
        self.logits: tuple[Any, ...] | None = () if wanted and config.output_logits else None
        self.hidden: tuple[Any, ...] | None = () if wanted and config.output_hidden_states else None

    def add(self, scores: Any, logits: Any, hidden: Any) -> None:
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        if self.hidden is not None:
            self.hidden += (hidden,)

    def output(self, sequences: torch.Tensor, cache: Any) -> Any:
        """What `generate` returns for one sequence per row."""
        if not self.returned:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences, scores=self.scores, logits=self.logits, hidden_states=self.hidden,
            **{compat.CACHE_NAME: cache},
        )  # fmt: skip

    def beam_output(
        self, sequences: torch.Tensor, sequences_scores: torch.Tensor, beam_indices: torch.Tensor, cache: Any
    ) -> Any:
        """What `generate` returns for the best beams."""
        if not self.returned:
            return sequences
        scored = self.scores is not None
        return GenerateBeamDecoderOnlyOutput(
            sequences=sequences, sequences_scores=sequences_scores if scored else None, scores=self.scores,
            logits=self.logits, beam_indices=beam_indices if scored else None, hidden_states=self.hidden,
            **{compat.CACHE_NAME: cache},
        )  # fmt: skip


def request_of_call() -> Request:
    """The request of the `generate()` call that runs here; one of its own for a loop that was called directly."""
    return current_request.get() or Request(usage=Usage(), numbers=Numbers())


def cache_survives(cache: Any, config: Any) -> bool:
    """Somebody can go on with the cache after the call."""
    return bool(config.return_dict_in_generate) or bool(getattr(cache, "_is_user_defined", False))


def no_streamer(method: str, kwargs: dict[str, Any]) -> None:
    if kwargs.get("streamer") is not None:
        raise InvalidInputError(
            f"{method} decides only at its end which text it keeps, so there is nothing to stream: leave out "
            "`streamer`, or decode without beams"
        )


def first_step(
    model: Any, input_ids: torch.Tensor, config: Any, model_kwargs: dict[str, Any], is_first_iteration: bool = True
) -> Any:
    """The forward pass over the prompt: what the cache does not hold yet, as every release works it out."""
    return model._prefill(input_ids, config, model_kwargs, is_first_iteration=is_first_iteration)


def next_step(model: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> Any:
    """The forward pass over the newest token of every row (over the whole rows where there is no cache)."""
    length = 1 if model_kwargs["use_cache"] else None
    inputs = model.prepare_inputs_for_generation(input_ids, next_sequence_length=length, **model_kwargs)
    return model(**inputs, return_dict=True)


def step_done(model: Any, outputs: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """`model_kwargs` for the step after `outputs`: the mask one column wider, the cache handed on."""
    return model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
