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
