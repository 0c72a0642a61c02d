"""What the panel sets: checked against the option table, kept in a file, handed out as plain values."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import LlamaCppError, OptionError
from ..options import OPTIONS, Option, options_in

__all__ = ["CALL_GROUPS", "LOAD_NAMES", "Settings", "panel_options"]

logger = logging.getLogger(__name__)

CALL_GROUPS = ("contrastive", "guidance", "speculation", "beams", "other")
"""Options of a call: they hold for the next answer."""

LOAD_NAMES = ("n_sink", "reuse_min_chunk", "state_dir", "swa_full", "lora_path", "lora_scale")
"""Options of a load: they hold from the next one on."""


def panel_options() -> tuple[Option, ...]:
    """What can be set, in the order of the table."""
    return tuple(entry for entry in OPTIONS if entry.name in LOAD_NAMES) + tuple(
        entry for group in CALL_GROUPS for entry in options_in(group)
    )


class Settings:
    """Values by name; what is not set has the table's default. Any thread may read and set them.

    `path`: the JSON file of `save()`. One that cannot be read is said so once and then taken as empty; entries in it that
    the table does not know, or does not allow, are left out with a warning and stay in nobody's way.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._table = {entry.name: entry for entry in panel_options()}
        self._lock = threading.Lock()
        self._values: dict[str, Any] = {}
        self.revert()

    def __getitem__(self, name: str) -> Any:
        return self._values.get(name, self._table[name].default)

    def set(self, **values: Any) -> None:
        """All of them, or none: raises `OptionError`."""
        checked: dict[str, Any] = {}
        for name, value in values.items():
            entry = self._table.get(name)
            if entry is None:
                raise OptionError(f"there is no setting {name!r}; there are {', '.join(self._table)}", name)
            if entry.kind is int and isinstance(value, float) and value.is_integer():  # sliders give floats
                value = int(value)
            if value is None and entry.default is None:
                checked[name] = None
                continue
            if wrong := entry.check(value):
                raise OptionError(wrong, name)
            checked[name] = value
        with self._lock:
            self._values = {**self._values, **checked}

    def call(self) -> dict[str, Any]:
        """Every option of a call."""
        return {entry.name: self[entry.name] for group in CALL_GROUPS for entry in options_in(group)}

    def load(self) -> dict[str, Any]:
        """The options of a load that were set to something else than the default."""
        names = [name for name in LOAD_NAMES if self[name] != self._table[name].default]
        return {name: self[name] for name in names}

    def changed(self) -> dict[str, Any]:
        """What differs from the table's defaults."""
        return {name: value for name, value in self._values.items() if value != self._table[name].default}

    def save(self) -> Path:
        """Write what differs from the defaults. Raises `LlamaCppError` where the file cannot be written."""
        if self.path is None:
            raise LlamaCppError("these settings have no file to be saved in")
        text = json.dumps(self.changed(), indent=2, ensure_ascii=False)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part = self.path.with_suffix(".part")
            part.write_text(text + "\n", encoding="utf-8")
            os.replace(part, self.path)
        except (OSError, ValueError) as error:  # a lone surrogate cannot be written
            raise LlamaCppError(f"the settings could not be saved: {error}") from error
        return self.path

    def revert(self) -> None:
        """Back to what was saved."""
        values = self._read()
        with self._lock:
            self._values = {}
        for name, value in values.items():
            try:
                self.set(**{name: value})
            except OptionError as error:
                logger.warning("%s: %s", self.path, error)

    def reset(self) -> None:
        """Everything as in the table; the file stays as it is."""
        with self._lock:
            self._values = {}

    def _read(self) -> Mapping[str, Any]:
        if self.path is None or not self.path.is_file():
            return {}
        try:
            values = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError(f"a {type(values).__name__} where an object was expected")
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("the saved settings in %s cannot be read and are left out: %s", self.path, error)
            return {}
        return values
