"""`/docs`: the OpenAPI document as a page that needs nothing from anywhere else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

__all__ = ["docs_page"]

STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:0 auto;padding:1rem;color-scheme:light dark}
h2{border-top:1px solid #8886;padding-top:1rem}summary{cursor:pointer}code{font-family:ui-monospace,monospace}
td{vertical-align:top;padding:.15rem .6rem .15rem 0}td:nth-child(2){white-space:nowrap;opacity:.75}
.verb{display:inline-block;min-width:3.5rem;font-weight:600}table{font-size:.9rem}
"""


def docs_page(document: Mapping[str, Any]) -> str:
    """HTML for an OpenAPI document: each route with its fields."""
    body = "".join(_routes(document))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(document['info']['title'])}: API</title><style>{STYLE}</style><h1>API</h1>"
        f'<p>The routes of OpenAI and of text-generation-webui; for tools: <a href="openapi.json">openapi.json</a>.'
        f"</p>{body}</html>"
    )


def _routes(document: Mapping[str, Any]) -> Iterator[str]:
    seen = ""
    for path, methods in document["paths"].items():
        for verb, route in methods.items():
            tag = route.get("tags", [""])[0]
            if tag != seen:
                seen = tag
                yield f"<h2>{escape(tag)}</h2>"
            title = f'<span class="verb">{verb.upper()}</span><code>{escape(path)}</code> {escape(route.get("summary", ""))}'
            about = f"<p>{escape(route['description'])}</p>" if route.get("description") else ""
            fields = "".join(_fields(document, route))
            yield f"<details><summary>{title}</summary>{about}{fields and f'<table>{fields}</table>'}</details>"


def _fields(document: Mapping[str, Any], route: Mapping[str, Any]) -> Iterator[str]:
    content = route.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = _resolved(document, content.get("schema", {}))
    required = schema.get("required", [])
    names = sorted(schema.get("properties", {}), key=lambda name: name not in required)
    for name in names:
        field = schema["properties"][name]
        text = field.get("description") or _resolved(document, field).get("description", "")
        yield (
            f"<tr><td><code>{escape(name)}</code><td>{escape(_kind(document, field))}{' *' * (name in required)}"
            f"<td>{escape(text)}</tr>"
        )


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = schema.get("$ref", "").rsplit("/", 1)[-1]
    found: Mapping[str, Any] = document["components"]["schemas"][name] if name else schema
    return found


def _kind(document: Mapping[str, Any], field: Mapping[str, Any]) -> str:
    choices = [one for one in field.get("anyOf", [field]) if one.get("type") != "null"]
    names = []
    for one in choices:
        if "enum" in one:
            names.append(" | ".join(map(str, one["enum"])))
        elif one.get("type") == "array":
            names.append(f"[{_kind(document, one.get('items', {}))}]")
        else:
            names.append(one.get("type") or one.get("$ref", "any").rsplit("/", 1)[-1])
    return " or ".join(dict.fromkeys(names)) or "any"
