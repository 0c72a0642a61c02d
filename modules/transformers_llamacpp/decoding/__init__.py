"""Ways of decoding that transformers does not have any more, on llama.cpp.

`METHODS` is the table: when a call wants a method, what the method cannot do, and the loop that does it. transformers'
`generate()` prepares everything (config, inputs, processors, stopping criteria) and then calls the loop in the place of
its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import beams, constrained, contrastive, dola
from .constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint
from .guidance import Guidance, GuidanceProcessor, check_scale
from .speculation import Speculation

__all__ = [
    "METHODS", "Constraint", "DisjunctiveConstraint", "Guidance", "GuidanceProcessor", "Method", "PhrasalConstraint",
    "check_scale", "method_for",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Method:
    """One row of the table.

    `wants(config)`: a prepared `GenerationConfig` asks for this method. `check(model, config, kwargs)` raises for what
    the method cannot do, before anything is computed. `run(model, input_ids, logits_processor=, stopping_criteria=,
    generation_config=, streamer=, **model_kwargs)` is the loop.
    """

    name: str
    wants: Callable[[Any], bool]
    check: Callable[[Any, Any, dict[str, Any]], None]
    run: Callable[..., Any]


METHODS = (
    Method("DoLa", dola.wants, dola.check, dola.dola_decoding),
    Method("constrained beam search", constrained.wants, constrained.check, constrained.constrained_beam_search),
    Method("group beam search", beams.wants, beams.check, beams.group_beam_search),
    Method("contrastive search", contrastive.wants, contrastive.check, contrastive.contrastive_search),
)
"""The first that is wanted runs; the order is that of transformers' `get_generation_mode`, but for DoLa, which is an error
together with any of the others."""

SETTINGS = (
    "penalty_alpha", "num_beam_groups", "diversity_penalty", "constraints", "force_words_ids", "prompt_lookup_num_tokens",
    "assistant_early_exit", "use_mtp", "dola_layers",
)  # fmt: skip
"""Where all of these are unset, no config has to be prepared to know that transformers' own loops run."""

NEUTRAL = {"num_beam_groups": 1}
"""The values that ask for nothing, where that is not 0."""


def method_for(model: Any, inputs: Any, generation_config: Any, kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The loop for this `generate()` call, to be passed on as `custom_generate=`; `None` lets transformers choose.

    `kwargs` are the call's own; an assistant and its tokenizer are taken out of them, because transformers would check
    them its own way. It hands no streamer to a loop that is passed to it, so the streamer is bound here. Raises
    `InvalidInputError` or `UnsupportedFeatureError` where the settings cannot be obeyed.
    """
    speculation = Speculation.take(model, kwargs)
    if speculation.assistant is None and not any(
        _setting(name, model, generation_config, kwargs) for name in SETTINGS
    ):
        return None
    settings = {name: value for name, value in kwargs.items() if hasattr(model.generation_config, name)}
    config, _ = model._prepare_generation_config(generation_config, **settings)
    beams.check_penalty(config)
    method = next((one for one in METHODS if one.wants(config)), None)
    speculate = speculation.loop(config, None if method is None else method.name, _n_rows(inputs, kwargs))
    if speculate is not None:
        return functools.partial(speculate, streamer=kwargs.get("streamer"))
    if method is None:
        return None
    method.check(model, config, kwargs)
    return functools.partial(method.run, streamer=kwargs.get("streamer"))


def _n_rows(inputs: Any, kwargs: dict[str, Any]) -> int:
    given = next((x for x in (inputs, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None)
    return len(given) if isinstance(given, torch.Tensor) and given.ndim > 1 else 1


def _setting(name: str, model: Any, generation_config: Any, kwargs: dict[str, Any]) -> bool:
    value = kwargs[name] if name in kwargs else getattr(generation_config, name, None)
    if value is None and name not in kwargs:
        value = getattr(model.generation_config, name, None)
    if name in ("prompt_lookup_num_tokens", "dola_layers"):
        return value is not None  # 0 is a mistake, and told
    return isinstance(value, list) or value not in (None, False, NEUTRAL.get(name, 0))
