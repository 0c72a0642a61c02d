"""Settings of the ways of decoding that have a name: those that come with the package, and a user's own, a JSON file each."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import LlamaCppError, OptionError
from .methods import CALL_OPTIONS, checked, default_of

__all__ = ["BUILT_IN", "Presets", "data_folder"]

BUILT_IN: dict[str, dict[str, Any]] = {
    "Balanced": {},
    "Precise": {"temperature": 0.3, "top_p": 0.9},
    "Creative": {"temperature": 1.2, "top_p": 1.0, "top_k": 0, "min_p": 0.1},
    "Greedy": {"method": "greedy"},
    "Contrastive": {"method": "contrastive"},
    "Beams": {"method": "beams"},
}
"""What differs from the page's defaults."""

NAME = re.compile(r"[\w][\w .()+-]{0,59}", re.UNICODE)
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # no names of files on Windows

FOLDER_VARIABLE = "TRANSFORMERS_LLAMACPP_DATA"


def data_folder() -> Path:
    """Where a user's own files are, by the custom of the system; `TRANSFORMERS_LLAMACPP_DATA` names another folder."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "transformers-llamacpp"


class Presets:
    """Those in `folder` (made when something is saved) behind `BUILT_IN`. Everybody who uses the page shares them."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or data_folder() / "presets"

    def names(self) -> list[str]:
        own = [file.stem for file in self.folder.glob("*.json")] if self.folder.is_dir() else []
        return [*BUILT_IN, *sorted((name for name in own if _is_name(name)), key=str.lower)]

    def load(self, name: str) -> dict[str, Any]:
        """A value for each of `CALL_OPTIONS`. Raises `LlamaCppError` for a file that cannot be read, or holds what the option
        table does not allow."""
        if name in BUILT_IN:
            return checked(BUILT_IN[name])
        file = self._file(name)
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise LlamaCppError(f"there is no preset {name!r}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise LlamaCppError(f"the preset {name!r} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise LlamaCppError(f"the preset {name!r} holds no settings")
        known = {entry.name for entry in CALL_OPTIONS}
        if unknown := sorted(values.keys() - known):
            raise LlamaCppError(f"the preset {name!r} sets {', '.join(unknown)}, which this version does not know")
        return checked(values)

    def save(self, name: str, values: Mapping[str, Any]) -> str:
        """The name it got. What has the page's default is not written down."""
        name = name.strip()
        if name in BUILT_IN:
            raise OptionError(f"{name} comes with the program: choose another name", "preset")
        values = checked(values)
        changed = {entry.name: values[entry.name] for entry in CALL_OPTIONS if values[entry.name] != default_of(entry)}
        file = self._file(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(part, file)
        except (OSError, ValueError) as error:  # a lone surrogate cannot be written
            raise LlamaCppError(f"the preset cannot be saved: {error}") from error
        return name

    def delete(self, name: str) -> None:
        if name in BUILT_IN:
            raise OptionError(f"{name} comes with the program and stays", "preset")
        try:
            self._file(name).unlink()
        except FileNotFoundError:
            raise LlamaCppError(f"there is no preset {name!r}") from None
        except OSError as error:
            raise LlamaCppError(f"the preset {name!r} cannot be deleted: {error.strerror}") from error

    def _file(self, name: str) -> Path:
        if not _is_name(name):
            raise OptionError(
                f"{name!r} is no name for a preset: up to 60 letters, digits, spaces and . - + ( ), a letter or a digit first",
                "preset",
            )
        return self.folder / f"{name}.json"


def _is_name(name: str) -> bool:
    return bool(NAME.fullmatch(name)) and not RESERVED.fullmatch(name) and not name.endswith((" ", "."))
