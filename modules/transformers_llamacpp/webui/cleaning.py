"""Takes our name out of the webui's own settings files, line by line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from . import yaml_lines
from .disk import read_json, read_text, write_json, write_text
from .places import NAME, Webui

__all__ = ["LOADER", "clean_model_settings", "clean_settings", "tell_of_flags"]

LOADER = "llamacpp_HF"
"""The loader's name in the webui."""

Say = Callable[[str], None]


def clean_settings(webui: Webui, say: Say) -> bool:
    """The panel's settings, and its place among the extensions that are always loaded. Whether there was something."""
    if not webui.settings.is_file():
        return False
    text = read_text(webui.settings)
    cleaned, removed = yaml_lines.without_extension(text, NAME)
    if removed:
        write_text(webui.settings, cleaned)
        say(f"removed from {webui.shown(webui.settings)}: {'; '.join(removed)}")
    _tell_of_rest(webui, webui.settings, cleaned, NAME, say)
    return bool(removed)


def clean_model_settings(webui: Webui, say: Say, remember: bool) -> bool:
    """`loader: llamacpp_HF`, at which the webui dies when it starts; `remember` keeps the choice in a file of our own."""
    if not webui.model_settings.is_file():
        return False
    text = read_text(webui.model_settings)
    cleaned, models = yaml_lines.without_loader(text, LOADER)
    if models:
        if remember:
            loaders = webui.own / "loaders.json"
            write_json(loaders, dict.fromkeys(models, LOADER) | read_json(loaders))
        write_text(webui.model_settings, cleaned)
        kept = " (and remembered by the loader)" if remember else ""
        say(f"removed from {webui.shown(webui.model_settings)}{kept}: loader: {LOADER} of {', '.join(models)}")
    _tell_of_rest(webui, webui.model_settings, cleaned, rf"loader['\"]?\s*:.*{LOADER}", say)
    return bool(models)


def tell_of_flags(webui: Webui, say: Say) -> None:
    if webui.flags.is_file():
        for number, line in yaml_lines.lines_with(read_text(webui.flags), NAME):
            say(f"{webui.shown(webui.flags)}, line {number}, still has: {line}   (left for you to change)")


def _tell_of_rest(webui: Webui, file: Path, text: str, pattern: str, say: Say) -> None:
    for number, line in yaml_lines.lines_with(text, pattern):
        say(f"{webui.shown(file)}, line {number}, still has: {line}   (remove it by hand)")
