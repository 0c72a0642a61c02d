"""From the arguments the webui calls `generate()` with to those the call is to have.

Three sources, the later ones winning: the panel's settings, what the webui's own parameters ask for, and entries
`name=value` in `sampler_priority`, the one parameter of a request that takes any text.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidInputError, OptionError
from ..options import options_in, parse
from .settings import CALL_GROUPS

__all__ = ["Plan", "plan_call", "resting"]

LARGEST_SCALE = 1000
"""Beyond it the scores of tokens are no numbers any more."""

LOOKUP_TOKENS = 10
"""Tokens of a draft of prompt lookup, where nothing was set."""

_TABLE = {entry.name: entry for group in CALL_GROUPS for entry in options_in(group)}

MODES = ("dola", "contrastive", "beams", "speculation")
"""Ways of writing of which a call has one; where the panel asks for several, the first of these."""


NAMES = {"dola": "DoLa", "contrastive": "contrastive search", "beams": "beam search", "speculation": "speculation"}

IMPLIED = (
    ("penalty_alpha", "contrastive_search", True),
    ("contrastive_k", "contrastive_search", True),
    ("draft_model", "speculation", "draft model"),
)
"""Who sets the first wants the second, unless the request says otherwise."""


@dataclass(slots=True)
class Plan:
    """`arguments` for `generate()`. `draft_model` is the name of a GGUF that is to draft ("" for the one of the load),
    `use_assistant` whether any may. `negative_prompt` is a text that has to be tokenized yet."""

    arguments: dict[str, Any]
    use_assistant: bool = False
    draft_model: str = ""
    negative_prompt: str = ""
    modes: list[str] = field(default_factory=list)

    @property
    def ways(self) -> str:
        """How the text is written, for people; "" for token by token."""
        guided = ["guidance"] if self.arguments.get("guidance_scale") not in (None, 1) else []
        return ", ".join([*(NAMES[mode] for mode in self.modes if mode != "speculation"), *guided])

    @property
    def streams(self) -> bool:
        """Each token is certain when it is written; beams decide at their end."""
        return (self.arguments.get("num_beams") or 1) == 1


def plan_call(given: Mapping[str, Any], panel: Mapping[str, Any]) -> Plan:
    """`given`: the webui's arguments; `panel`: `Settings.call()`.

    Raises `OptionError` for an entry of `sampler_priority` that is none, and `InvalidInputError` where the request itself
    asks for two ways of writing at once: neither is dropped in silence.
    """
    arguments = dict(given)
    asked = _take_entries(arguments)
    wanted = {**panel, **asked}
    modes = _modes(given, asked, wanted)
    plan = Plan(arguments, modes=modes)
    if "contrastive" in modes:
        _contrastive(plan, asked, wanted)
    elif asked.get("contrastive_search") is False:
        arguments["penalty_alpha"] = 0.0
    if "dola" in modes:
        arguments["dola_layers"] = wanted["dola_layers"]
    if "beams" in modes:
        arguments["num_beams"] = wanted["num_beams"]
        for name in ("num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"):
            if wanted[name] != _TABLE[name].default:
                arguments[name] = wanted[name]
    _speculate(plan, asked, wanted)
    if wanted["min_new_tokens"]:
        arguments["min_new_tokens"] = wanted["min_new_tokens"]
    if "guidance_scale" in asked or arguments.get("guidance_scale") in (None, 1):
        arguments["guidance_scale"] = wanted["guidance_scale"]
    scale = arguments["guidance_scale"]
    if isinstance(scale, (int, float)) and not abs(scale) <= LARGEST_SCALE:
        raise OptionError(f"guidance_scale={scale!r} is none from -{LARGEST_SCALE} to {LARGEST_SCALE}", "guidance_scale")
    if arguments["guidance_scale"] != 1 and ("negative_prompt" in asked or "negative_prompt_ids" not in arguments):
        plan.negative_prompt = wanted["negative_prompt"]
    return plan


def _take_entries(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take `name=value` out of `sampler_priority`; names of samplers, which have no `=`, stay."""
    priority = arguments.get("sampler_priority")
    if not isinstance(priority, list):
        return {}
    entries = [str(item) for item in priority if "=" in str(item)]
    names = [item for item in priority if "=" not in str(item)]
    if entries and not names:
        del arguments["sampler_priority"]  # the model's own order, which is the default one
    elif entries:
        arguments["sampler_priority"] = names
    values = {}
    for item in entries:
        name, text = (part.strip() for part in item.split("=", 1))
        if name not in _TABLE:
            nearest = difflib.get_close_matches(name, _TABLE, n=2, cutoff=0.5)
            hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
            raise OptionError(f"sampler_priority: {name!r} cannot be set; {', '.join(_TABLE)} can.{hint}", name)
        values[name] = parse(_TABLE[name], text)
    for name, mode, value in IMPLIED:
        if values.get(name):
            values.setdefault(mode, value)
    return values


def _modes(given: Mapping[str, Any], asked: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """The ways of writing: all that the request asks for, or else the first one of the panel."""
    # temperature 0 makes the webui send top_k=1, which leaves nothing to choose from: k is the panel's then
    own_contrastive = (given.get("penalty_alpha") or 0) > 0 and not given.get("do_sample")
    requested = {
        "dola": asked.get("dola_layers", "off") != "off",
        "contrastive": asked.get("contrastive_search", own_contrastive),
        "beams": asked.get("num_beams", 1) > 1,
        "speculation": bool(given.get("prompt_lookup_num_tokens")) or asked.get("speculation", "off") != "off",
    }
    found = [mode for mode in MODES if requested[mode]]
    if len(found) > 1:
        names = " and ".join(NAMES[mode] for mode in found)
        raise InvalidInputError(f"{names} are different ways of writing a text: leave one of them out")
    if found:
        return found
    return _switched_on(wanted)[:1]


def _switched_on(panel: Mapping[str, Any]) -> list[str]:
    on = {
        "dola": panel["dola_layers"] != "off",
        "contrastive": panel["contrastive_search"],
        "beams": panel["num_beams"] > 1,
        "speculation": panel["speculation"] != "off",
    }
    return [mode for mode in MODES if on[mode]]


def resting(panel: Mapping[str, Any]) -> str:
    """A sentence about what the panel has switched on and what rests for another way of writing; "" where nothing does."""
    first, *others = [NAMES[mode] for mode in _switched_on(panel)] or [""]
    rest = f"{' and '.join(others)} rest{'s' * (len(others) == 1)}"
    return f"{first[0].upper()}{first[1:]} is on; meanwhile {rest}." if others else ""


def _contrastive(plan: Plan, asked: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """It runs only where nothing is sampled and `top_k` leaves a choice, which the webui's own parameters seldom do."""
    arguments = plan.arguments
    own_alpha = not asked.keys() & {"contrastive_search", "penalty_alpha"} and (arguments.get("penalty_alpha") or 0) > 0
    if not own_alpha or arguments.get("do_sample"):
        arguments["penalty_alpha"] = wanted["penalty_alpha"]
    if "contrastive_k" in asked or not own_alpha or (arguments.get("top_k") or 0) < 2:
        arguments["top_k"] = wanted["contrastive_k"]
    arguments["do_sample"] = False


def _speculate(plan: Plan, asked: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    arguments = plan.arguments
    if asked.get("speculation") == "off":
        arguments.pop("prompt_lookup_num_tokens", None)
    if "speculation" not in plan.modes:
        return
    kind, tokens = wanted["speculation"], wanted["num_assistant_tokens"]
    if kind in ("prompt lookup", "both") and not arguments.get("prompt_lookup_num_tokens"):
        arguments["prompt_lookup_num_tokens"] = tokens or LOOKUP_TOKENS
    if kind in ("draft model", "both"):
        plan.use_assistant, plan.draft_model = True, wanted["draft_model"]
        arguments["assistant_confidence_threshold"] = wanted["assistant_confidence_threshold"]
        if tokens:
            arguments["num_assistant_tokens"] = tokens
