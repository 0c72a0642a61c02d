"""Whether a class of transformers still does what is known of it: nobody put another function in its place, and this
release's code is one that was read."""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from typing import Any

from transformers.generation import logits_process

__all__ = ["digest", "is_transformers_own"]

_digests: dict[Any, str] = {}


def digest(function: Any) -> str:
    """Of the code of a Python function alone: names, constants and structure, without annotations, decorators, docstring,
    comments and layout. The same on every version of Python. Empty where there is no source to read."""
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    if code not in _digests:
        _digests[code] = _digest(function)
    return _digests[code]


def is_transformers_own(function: Any) -> bool:
    """The function was written in transformers' file of processors. One that another function wraps is not."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == logits_process.__file__


def _digest(function: Any) -> str:
    try:
        tree = ast.parse(textwrap.dedent("".join(inspect.getsourcelines(function.__code__)[0])))
    except (OSError, TypeError, SyntaxError):
        return ""
    definition = next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)
    if definition is None:
        return ""
    body = definition.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
        body = body[1:]
    names = [argument.arg for argument in definition.args.args]
    return hashlib.sha256(repr((names, [_plain(node) for node in body])).encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """A tree as nested tuples, without what is empty: that is where versions of Python differ."""
    if isinstance(value, ast.AST):
        fields = ((name, _plain(content)) for name, content in ast.iter_fields(value) if name not in ("annotation", "kind"))
        return (type(value).__name__, *(pair for pair in fields if pair[1] not in (None, ())))
    if isinstance(value, list):
        return tuple(_plain(item) for item in value)
    return None if value is None else repr(value)
