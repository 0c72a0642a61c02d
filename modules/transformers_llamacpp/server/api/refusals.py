"""What a request asks for and nobody here can give: said with the field's name, never dropped in silence."""

from __future__ import annotations

from typing import Any

from ..limits import ServeOptions
from .errors import ApiError
from .fields import RESTING

__all__ = ["refuse"]

UNSUPPORTED = {
    "tools": ([], "tool calls are not supported: leave tools out, or ask for JSON with response_format"),
    "functions": ([], "function calls are not supported: leave functions out, or ask for JSON with response_format"),
    "tool_choice": ("none", "tool calls are not supported"),
    "function_call": ("none", "function calls are not supported"),
    "audio": (None, "audio is not supported"),
    "prediction": (None, "predicted outputs are not supported; prompt_lookup_num_tokens drafts from the prompt"),
    "web_search_options": (None, "there is no web search"),
    "suffix": ("", "text cannot be inserted before a suffix: give the prompt only"),
    "instruction_template": ("", "instruction templates are files of the webui: the model's own chat template is used"),
    "character": ("", "characters are files of the webui: describe one in a system message"),
    "chat_template_str": ("", "it belongs to the webui's mode chat, which is not supported"),
}
"""Field -> the value that asks for nothing, and why another one is refused."""


SAMPLERS = frozenset({
    "repetition_penalty", "presence_penalty", "frequency_penalty", "dry", "top_n_sigma", "temperature", "dynamic_temperature",
    "quadratic_sampling", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "tfs", "top_a", "min_p", "adaptive_p",
    "mirostat", "xtc", "encoder_repetition_penalty", "no_repeat_ngram",
})  # fmt: skip
"""The webui's names for what `sampler_priority` puts in order."""

CUTS = {"top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}
"""Those of them that transformers has and that depend on the temperature, and the values that cut nothing off."""


def refuse(request: Any, options: ServeOptions) -> None:
    """Raises `ApiError` for the first thing in `request` (one of `schemas.py`) that cannot be given."""
    for name, (neutral, why) in UNSUPPORTED.items():
        value = getattr(request, name, None)
        if value is not None and value != neutral and not (name == "tool_choice" and value == "auto" and not request.tools):
            raise ApiError(400, f"{name}: {why}", name, "unsupported")
    for name, (_, neutral, why) in RESTING.items():
        value = getattr(request, name, None)
        if neutral is not ... and value is not None and value not in (neutral, "", []):
            what = why or f"transformers has no such sampler; {neutral!r} asks for nothing"
            raise ApiError(400, f"{name}={value!r} is not supported: {what}", name, "unsupported")
    _check_order(request)
    if getattr(request, "mode", None) not in (None, "instruct"):
        raise ApiError(400, "mode: none but instruct; the others need the webui's characters", "mode", "unsupported")
    if getattr(request, "modalities", None) not in (None, ["text"]):
        raise ApiError(400, "modalities: text is all there is", "modalities", "unsupported")
    if getattr(request, "store", None):
        raise ApiError(400, "store: nothing is stored here", "store", "unsupported")
    if getattr(request, "instruction_template_str", None) and not options.chat_templates:
        raise ApiError(
            400, "instruction_template_str: this server takes no templates from requests (see --allow-chat-templates)",
            "instruction_template_str", "unsupported",
        )  # fmt: skip


def _check_order(request: Any) -> None:
    """transformers divides by the temperature first and cuts off then, as the webui does unless it is told otherwise."""
    given = request.sampler_priority or []
    names = [name.strip() for name in (given.replace(",", "\n").split("\n") if isinstance(given, str) else given)]
    names = [name for name in names if name]
    if unknown := [name for name in names if name not in SAMPLERS]:
        raise ApiError(400, f"sampler_priority: {unknown[0]!r} is no sampler", "sampler_priority", "invalid_value")
    if request.temperature in (None, 0, 1) or request.do_sample is False:
        return
    before = names[: names.index("temperature")] if "temperature" in names else []
    for field, first in (("temperature_last", CUTS if request.temperature_last else ()), ("sampler_priority", before)):
        for name in first:
            if name in CUTS and getattr(request, name, None) not in (None, CUTS[name]):
                raise ApiError(400, f"{field}: {name} cannot come before the temperature here", field, "unsupported")
