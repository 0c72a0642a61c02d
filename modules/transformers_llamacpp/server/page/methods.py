"""From what the page's controls say to the fields of a request to the API, and which controls a method has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import OptionError
from ...options import Option, option

__all__ = ["CALL_OPTIONS", "GROUPS", "METHODS", "Group", "checked", "default_of", "notes", "request_fields", "shown"]

LOOKUP_TOKENS = 10
"""Tokens in a draft of prompt lookup where nothing else is asked for."""


@dataclass(frozen=True, slots=True)
class Group:
    """Controls that belong together. `methods`: those that read them, empty for all. `folded`: shown closed."""

    name: str
    title: str
    options: tuple[Option, ...]
    methods: frozenset[str] = frozenset()
    folded: bool = False

    def shown(self, method: str) -> bool:
        return not self.methods or method in self.methods


def _group(name: str, title: str, options: str, methods: str = "", folded: bool = False) -> Group:
    return Group(name, title, tuple(option(one) for one in options.split()), frozenset(methods.split()), folded)


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size")
METHODS = option("method").choices

GROUPS = (
    _group("sampling", "", "temperature top_p top_k min_p typical_p seed", "sampling"),
    _group("contrastive", "", "penalty_alpha contrastive_k", "contrastive"),
    _group("beams", "", "num_beams num_beam_groups diversity_penalty length_penalty early_stopping", "beams"),
    _group("length", "", "max_new_tokens"),
    _group("guidance", "Guidance (CFG)", "guidance_scale negative_prompt", folded=True),
    _group(
        "speculation", "Speculation", "speculation draft_model num_assistant_tokens assistant_confidence_threshold",
        "sampling greedy", True,
    ),
    _group("penalties", "Repetition", " ".join(PENALTIES), folded=True),
    _group("dola", "DoLa", "dola_layers", "sampling greedy", True),
    _group("ending", "More", "stop min_new_tokens top_logprobs", folded=True),
)  # fmt: skip
"""In the order of the page. What has no title is always open."""

DEFAULTS = {"num_beams": 4}
"""Where the page begins with something else than the option table, whose 1 beam is another method."""

CALL_OPTIONS = (option("method"), *(entry for group in GROUPS for entry in group.options))
"""Everything that a preset holds."""

ALWAYS = (*PENALTIES, "min_new_tokens")
SAMPLERS = ("temperature", "top_p", "top_k", "min_p", "typical_p")
BEAMS = ("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping")


def shown(method: str) -> list[Group]:
    """The groups whose controls `method` reads."""
    return [group for group in GROUPS if group.shown(method)]


def default_of(entry: Option) -> Any:
    """What the page begins with."""
    return DEFAULTS.get(entry.name, entry.default)


def checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """All of `CALL_OPTIONS` in the types of the option table, the page's defaults for those that are missing or `None`.

    Raises `OptionError` for a value outside its range.
    """
    found = {}
    for entry in CALL_OPTIONS:
        value = values.get(entry.name)
        if value is None:
            value = default_of(entry)
        elif entry.kind is int and isinstance(value, float) and value.is_integer():  # as sliders give them
            value = int(value)
        if wrong := entry.check(value):
            raise OptionError(wrong, entry.name)
        found[entry.name] = value
    return found


def request_fields(values: Mapping[str, Any], draft_models: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`values` as the fields of a request for the same text; what the method does not read is left out. `draft_models`: those
    that may be named. Raises `OptionError`."""
    values = checked(values)
    method = values["method"]
    fields: dict[str, Any] = {"max_tokens": values["max_new_tokens"]}
    if method == "sampling":
        fields |= {name: values[name] for name in SAMPLERS}
        if values["seed"] >= 0:
            fields["seed"] = values["seed"]
        fields["typical_p"] = None if values["typical_p"] == 1 else values["typical_p"]
    elif method == "greedy":
        fields["do_sample"] = False
    elif method == "contrastive":
        fields |= {"penalty_alpha": values["penalty_alpha"], "top_k": values["contrastive_k"], "do_sample": False}
    else:
        fields |= {name: values[name] for name in BEAMS if values[name] != option(name).default}
        fields |= {"num_beams": values["num_beams"], "do_sample": False}
        if values["num_beam_groups"] == 1:
            fields.pop("diversity_penalty", None)
    fields |= {name: values[name] for name in ALWAYS if values[name] != option(name).default}
    if values["guidance_scale"] != 1:
        fields["guidance_scale"] = values["guidance_scale"]
        if values["negative_prompt"]:
            fields["negative_prompt"] = values["negative_prompt"]
    if method in ("sampling", "greedy") and values["dola_layers"] == "off":
        fields |= _speculation(values, draft_models)
    else:
        fields["assistant_model"] = False
        fields["dola_layers"] = values["dola_layers"] if method in ("sampling", "greedy") else None
    if stops := [line for line in values["stop"].split("\n") if line]:
        fields["stop"] = stops
    return {name: value for name, value in fields.items() if value is not None}


def _speculation(values: Mapping[str, Any], draft_models: Mapping[str, Any] | None) -> dict[str, Any]:
    kind, tokens, name = values["speculation"], values["num_assistant_tokens"], values["draft_model"]
    fields: dict[str, Any] = {}
    if kind in ("prompt lookup", "both"):
        fields["prompt_lookup_num_tokens"] = tokens or LOOKUP_TOKENS
    if kind not in ("draft model", "both"):
        return {**fields, "assistant_model": False}
    if name and draft_models is not None and name not in draft_models:
        raise OptionError(f"draft_model: there is no model {name!r} any more; choose another one", "draft_model")
    fields["assistant_confidence_threshold"] = values["assistant_confidence_threshold"]
    if name:
        fields["assistant_model"] = name
    if tokens:
        fields["num_assistant_tokens"] = tokens
    return fields


def notes(values: Mapping[str, Any], has_draft: bool, n_sink: int | None = None) -> list[str]:
    """What is worth knowing about how these settings work together. `has_draft`: a draft model is loaded."""
    found = []
    method = values["method"]
    drafts = method in ("sampling", "greedy")
    if drafts and values["dola_layers"] != "off":
        found.append("DoLa compares layers, which drafts have not: speculation rests.")
    elif drafts and values["speculation"] in ("draft model", "both") and not values["draft_model"] and not has_draft:
        rest = "only the text itself drafts" if values["speculation"] == "both" else "nothing is drafted"
        found.append(f"No draft model is loaded: {rest}.")
    if values["guidance_scale"] == 1 and values["negative_prompt"]:
        found.append("The negative prompt rests while the guidance scale is 1.")
    if method == "beams" and values["num_beams"] == 1:
        found.append("One beam is greedy search.")
    elif method == "beams" and values["num_beams"] % values["num_beam_groups"]:
        found.append(f"{values['num_beams']} beams do not divide into {values['num_beam_groups']} groups.")
    if n_sink is not None and method in ("beams", "contrastive"):
        found.append("Beams and contrastive candidates end where the context is full: they do not slide.")
    return found
