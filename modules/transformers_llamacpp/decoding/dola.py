"""DoLa, decoding by contrasting layers: Chuang et al. 2023, https://arxiv.org/abs/2309.03883.

The hidden states between some of the layers go through the output head too, without the final norm. Of these early
distributions `q` the one that differs most from the last layer's `p` (Jensen-Shannon divergence) is taken, and a token's
score is

    log p - log q    where p >= 0.1 * max(p), and -inf elsewhere

What it does is what transformers 4.46 did, with three choices where that said nothing, or failed:

- each row takes the layer that suits it; in 4.46 a batch took one layer for all its rows, finished ones included, so that
  a text depended on its neighbours;
- `"low"` in a model of three layers is the one layer there is (4.46 had none and failed);
- a layer that is no number from 0 on is an error (4.46 took -1 for the output of the final norm).

A step costs a decode in which the layers are recorded, and one product of the head with all candidate layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .. import compat
from ..errors import InvalidInputError
from ..output_head import OutputHead
from ..request import Request, current_request
from . import constrained, contrastive
from .common import Trace, first_step, next_step, request_of_call, step_done
from .draw import draw_dense
from .ending import Rows

__all__ = ["candidate_layers", "check", "contrast", "dola_decoding", "wants"]

RELATIVE_TOP = 0.1
"""Tokens less probable than this share of the most probable one are no candidates (Li et al. 2022, contrastive decoding)."""

TINY = -80.0
"""Logarithm of a probability that counts for nothing. Below -87 floats are denormal, and slow: 13 ms instead of 0.7 for
eight layers and 49,152 tokens."""

DEEP = 40
"""Models with more layers have their candidates in the first or last 20 layers."""


def wants(config: Any) -> bool:
    return config.dola_layers is not None


def check(model: Any, config: Any, kwargs: dict[str, Any]) -> None:
    others = {
        f"num_beams={config.num_beams}": (config.num_beams or 1) > 1,
        "constraints": constrained.wants(config),
        f"penalty_alpha={config.penalty_alpha} (contrastive search)": contrastive.wants(config),
    }
    if conflicts := [name for name, wanted in others.items() if wanted]:
        raise InvalidInputError(
            f"dola_layers={config.dola_layers!r} goes with greedy search and with sampling, not with {', '.join(conflicts)}"
        )
    candidate_layers(config.dola_layers, model.config.num_hidden_layers, tied=True)
    problem = model.engine.no_layers()
    if problem is not None:
        raise problem


def candidate_layers(dola_layers: Any, n_layer: int, tied: bool) -> tuple[int, ...]:
    """The numbers of the candidate layers, ascending; layer `i` stands for what goes into it, `hidden_states[i]`.

    `"low"`: every second one of the first half; `"high"`: of the second half (of the first or last 20 where there are more
    than 40). A list is taken as it is, less what is no layer before the end. `tied`: the head is the token embeddings, and
    would only find the last token again in the first layers, which are left out of `"low"`.
    """
    half, last = (n_layer // 2, n_layer // 2) if n_layer <= DEEP else (20, n_layer - 20)
    if dola_layers == "low":
        first = 0 if not tied else min(2, n_layer - 1)
        return tuple(range(first, half, 2)) or (first,)
    if dola_layers == "high":
        return tuple(range(last, n_layer, 2))
    numbers = dola_layers if isinstance(dola_layers, (list, tuple)) else []
    if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
        numbers = []
    chosen = sorted({number for number in numbers if number < n_layer})
    if not chosen:
        raise InvalidInputError(
            f"dola_layers={dola_layers!r} names no layer: 'low', 'high', or a list of numbers from 0 to {n_layer - 1}"
        )
    return tuple(chosen)


def contrast(final: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    """Scores of one row, `(n_vocab,)`, from the last layer's logits `(n_vocab,)` and those of the candidate layers
    `(candidates, n_vocab)`. Of equally different candidates the first is taken."""
    log_p, log_q = torch.log_softmax(final, dim=-1), torch.log_softmax(early, dim=-1)
    picked = 0
    if len(early) > 1:
        middle = (log_p.clamp(min=TINY).exp() + log_q.clamp(min=TINY).exp()) / 2
        # the sum of KL(middle, p) and KL(middle, q); the constant factors of 4.46 do not change which is largest
        divergence = (2 * torch.special.xlogy(middle, middle) - middle * (log_p + log_q)).sum(dim=-1)
        picked = int(divergence.argmax())
    return (log_p - log_q[picked]).masked_fill(log_p < log_p.max() + math.log(RELATIVE_TOP), -torch.inf)


@torch.no_grad()
def dola_decoding(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The loop. `input_ids` is `(rows, length)`; returns what transformers' loops return."""
    head = model.native.output_head()
    layers = candidate_layers(generation_config.dola_layers, model.config.num_hidden_layers, head.tied)
    request = request_of_call()
    forward = _Forward(request, layers, head)
    rows, trace = Rows(input_ids.shape[0], generation_config, stopping_criteria), Trace(generation_config)
    outputs, early = forward(lambda: first_step(model, input_ids, generation_config, model_kwargs), model_kwargs)
    while True:
        model_kwargs = step_done(model, outputs, model_kwargs)
        final = outputs.logits[:, -1].float()
        logits = torch.stack([contrast(p, q) for p, q in zip(final.cpu(), early, strict=True)]).to(input_ids.device)
        scores = logits_processor(input_ids, logits)
        trace.add(scores, final, outputs.hidden_states)
        if generation_config.do_sample:
            weights = torch.softmax(scores, dim=-1)
            if request.numbers.seeded:
                drawn = [draw_dense(row, request.numbers.next(at)) for at, row in enumerate(weights.cpu().numpy())]
                chosen = torch.tensor(drawn, device=scores.device)
            else:
                chosen = torch.multinomial(weights, num_samples=1)[:, 0]
        else:
            chosen = scores.argmax(dim=-1)
        chosen = chosen.masked_fill(torch.tensor(rows.padded, device=chosen.device), rows.pad)
        input_ids = torch.cat([input_ids, chosen.to(input_ids.dtype)[:, None]], dim=1)
        if streamer is not None:
            streamer.put(chosen.cpu())
        if rows.ended(input_ids, trace.scores):
            break
        outputs, early = forward(lambda: next_step(model, input_ids, model_kwargs), model_kwargs)  # noqa: B023
    if streamer is not None:
        streamer.end()
    return trace.output(input_ids, outputs.get(compat.CACHE_NAME))


class _Forward:
    """A forward pass that also gives the early logits of each row's newest token."""

    def __init__(self, request: Request, layers: tuple[int, ...], head: OutputHead) -> None:
        self._request, self._layers = request, layers
        self._weight = torch.from_numpy(head.weight)
        self._bias = None if head.bias is None else torch.from_numpy(head.bias)

    def __call__(self, step: Callable[[], Any], model_kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """The outputs, and float32 `(rows, candidates, n_vocab)`."""
        request, mask = self._request, model_kwargs.get("attention_mask")
        token = current_request.set(request)
        request.want_layers = self._layers
        try:
            outputs = step()
        finally:
            request.want_layers = ()
            current_request.reset(token)
        recorded, request.layers = request.layers, None
        assert recorded is not None
        if len(recorded) > len(self._layers):  # the caller wants to see all hidden states
            recorded = [recorded[layer] for layer in self._layers]
        newest = np.stack([_newest(states, mask) for states in recorded], axis=1)
        flat = torch.from_numpy(newest).reshape(-1, newest.shape[-1])
        logits = flat @ self._weight if self._bias is None else torch.addmm(self._bias, flat, self._weight)
        return outputs, logits.reshape(*newest.shape[:2], -1)


def _newest(states: Any, mask: torch.Tensor | None) -> Any:
    """Of `(rows, columns, width)` each row's last column that is no padding: `(rows, width)`."""
    n_rows, n_columns, _ = states.shape
    if mask is None or n_columns == 1:
        return states[:, -1]
    real = mask[:, -n_columns:].cpu().numpy() != 0
    return states[np.arange(n_rows), n_columns - 1 - real[:, ::-1].argmax(axis=1)]
