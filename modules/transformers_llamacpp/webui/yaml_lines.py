"""Takes single lines of ours out of the webui's YAML files and leaves every other byte as it is."""

from __future__ import annotations

import json
import re

__all__ = ["lines_with", "without_extension", "without_loader"]

BLANK = re.compile(r"(---|\.\.\.)?\s*(#.*)?$|\s*(#.*)?$")
KEY = r"(?P<quote>['\"]?)(?P<key>{})(?P=quote)\s*:(?=\s|$)"


def without_extension(text: str, name: str) -> tuple[str, list[str]]:
    """`text` of a settings.yaml without the settings `name-…` and without `name` in `default_extensions`; what was removed.

    A list that is empty then is written as `[]`. A list that goes over several lines inside brackets is left alone.
    """
    lines, kept, removed = _lines(text), list[str](), list[str]()
    setting, extensions = re.compile(KEY.format(re.escape(name) + r"-[^'\":]*")), re.compile(KEY.format("default_extensions"))
    index = 0
    while index < len(lines):
        end = _end_of_block(lines, index)
        block, index = lines[index:end], end
        if setting.match(block[0]):
            removed += block
            continue
        found = extensions.match(block[0])
        if found:
            block, gone = _without_item(block, found.end(), name)
            removed += gone
        kept += block
    return "".join(kept), [line.strip() for line in removed]


def _without_item(block: list[str], colon: int, name: str) -> tuple[list[str], list[str]]:
    """A list's lines, the first being its key up to `colon`, without the item; the lines that are gone."""
    head, value = block[0][:colon], block[0][colon:]
    inline = re.match(r"(\s*\[)([^\]#]*)(\].*)", value, re.DOTALL)
    if inline:
        entries = inline[2].split(",")
        left = [entry for entry in entries if entry.strip().strip("'\"") != name]
        if len(left) == len(entries):
            return block, []
        return [head + inline[1] + ",".join(left).strip() + inline[3], *block[1:]], [f"{name} in {block[0].strip()}"]
    item = re.compile(rf"\s*-\s+(['\"]?){re.escape(name)}\1\s*(#.*)?$")
    gone = [line for line in block[1:] if item.match(line)]
    rest = [line for line in block[1:] if not item.match(line)]
    if gone and all(BLANK.match(line) for line in rest):
        head += " []"
    return [head + value, *rest], gone


def without_loader(text: str, loader: str) -> tuple[str, list[str]]:
    """`text` of a config-user.yaml without the lines `loader: <loader>`; the models (patterns) that had one.

    A model with no other setting is taken out whole: the webui cannot read an empty entry.
    """
    mark = "\ufeff" if text.startswith("\ufeff") else ""  # as Windows' editor writes it
    text = text[len(mark) :]
    wanted = re.compile(rf"\s+(['\"]?)loader\1\s*:\s*(['\"]?){re.escape(loader)}\2\s*(#.*)?$", re.IGNORECASE)
    model = re.compile(KEY.format(r".+?") + r"\s*(#.*)?$")
    lines, kept, models = _lines(text), list[str](), list[str]()
    index = 0
    while index < len(lines):
        end = _end_of_block(lines, index)
        block, index = lines[index:end], end
        named = model.match(block[0])
        rest = [line for line in block[1:] if not wanted.match(line)]
        if not named or len(rest) == len(block) - 1:
            kept += block
            continue
        models.append(_unquoted(named["key"], named["quote"]))
        if all(BLANK.match(line) for line in rest):
            kept += rest
        else:
            kept += [block[0], *rest]
    if models and kept and all(BLANK.match(line) for line in kept) and any(line.strip() for line in kept):
        # comments and marks of a document alone are no settings, and the webui fails on them
        kept = [line for line in kept if not line.startswith(("---", "..."))] + ["{}\n"]
    return mark + "".join(kept), models


def lines_with(text: str, pattern: str) -> list[tuple[int, str]]:
    """Number and text of the lines, comments left out, in which the pattern occurs in any case."""
    lines = enumerate(_lines(text), 1)
    found = re.compile(pattern, re.IGNORECASE)
    return [(number, line.strip()) for number, line in lines if found.search(line) and not line.lstrip().startswith("#")]


def _lines(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _end_of_block(lines: list[str], start: int) -> int:
    """Where the value ends that begins at a line of the top level: what is indented or a list item belongs to it."""
    end = start + 1
    for index in range(start + 1, len(lines)):
        if re.match(r"[ \t]+\S|-(\s|$)", lines[index]) and not lines[index].lstrip().startswith("#"):
            end = index + 1
        elif not BLANK.match(lines[index]):
            break
    return end


def _unquoted(key: str, quote: str) -> str:
    if quote == "'":
        return key.replace("''", "'")
    if quote == '"':
        try:
            return str(json.loads(f'"{key}"'))
        except ValueError:
            return key
    return key
