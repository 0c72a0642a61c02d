"""Chat templates as a GGUF carries them.

Templates are rendered by transformers (`apply_chat_template`); here they are found, and tried once for syntax.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from .errors import UnsupportedFeatureError

__all__ = ["broken_templates", "encode_marked", "template_from_metadata"]

logger = logging.getLogger(__name__)

_KEY = "tokenizer.chat_template"


def template_from_metadata(metadata: Mapping[str, str]) -> str | dict[str, str] | None:
    """The template of a GGUF as `tokenizer.chat_template` has it: one string, or name -> string where the file has
    named ones (`tokenizer.chat_template.NAME`; the plain one is "default"), or `None`."""
    named = {key[len(_KEY) + 1 :]: value for key, value in metadata.items() if key.startswith(_KEY + ".")}
    plain = metadata.get(_KEY)
    if not named:
        return plain or None
    if plain:
        named["default"] = plain
    return named


def broken_templates(chat_template: str | dict[str, str] | None, origin: str) -> dict[str, str]:
    """Template text -> what is wrong with it, for templates that do not compile. Each is a warning in the log."""
    if chat_template is None:
        return {}
    named = {"": chat_template} if isinstance(chat_template, str) else chat_template
    broken: dict[str, str] = {}
    for name, text in named.items():
        reason = _syntax_error(text)
        if reason is not None:
            broken[text] = reason
            title = f"chat template {name!r}" if name else "chat template"
            logger.warning("the %s of %s does not compile (%s); using it will be an error", title, origin, reason)
    return broken


def _syntax_error(text: str) -> str | None:
    try:
        import jinja2
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:  # no jinja2, or a transformers that compiles elsewhere: rendering will say what is wrong
        return None
    try:
        _compile_jinja_template(text)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {error.message}"
    except jinja2.TemplateError as error:
        return str(error)
    except ImportError:  # jinja2 is too old for transformers, which says so when a template is rendered
        return None
    return None


def encode_marked(tokenizer: Any, text: str) -> list[int]:
    """Ids of a chat rendered by `apply_chat_template(..., sanitize_control_tokens=True)`, which newer releases of
    transformers mark up with private characters."""
    from transformers.utils import chat_template_utils

    encode = getattr(chat_template_utils, "encode_marked_chat", None)
    if encode is None:
        raise UnsupportedFeatureError(
            "this release of transformers does not sanitize control tokens; 5.24 does", "sanitize_control_tokens"
        )
    return list(encode(tokenizer, text))
