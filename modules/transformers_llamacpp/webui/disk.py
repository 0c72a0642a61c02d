"""Reading and writing in a webui's folder: whole or not at all, and with errors that say what to do."""

from __future__ import annotations

import contextlib
import filecmp
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import WebuiError

__all__ = [
    "copy",
    "files_in",
    "link",
    "read_json",
    "read_text",
    "refusals",
    "remove_empty_folders",
    "remove_if_empty",
    "write_json",
    "write_text",
]


@contextlib.contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """What the system refuses becomes a `WebuiError` that names the path."""
    try:
        yield
    except BrokenPipeError:  # of what is printed
        raise
    except OSError as error:
        path = error.filename or folder
        raise WebuiError(
            f"{path} cannot be changed: {error.strerror or error}. Put that right and run the same command again; it goes on "
            "where it stopped",
            str(path),
        ) from None


def link(source: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.symlink_to(source, target_is_directory=source.is_dir())
    except (OSError, NotImplementedError) as error:
        cure = "install with --copy" + (", or turn on Windows' developer mode" if os.name == "nt" else "")
        raise WebuiError(f"the system refuses symbolic links in {place.parent} ({error}): {cure}", str(place)) from None


def copy(source: Path, place: Path) -> None:
    """Moved into place when it is complete, so that a killed run leaves no half file (but perhaps one named `.part`)."""
    if place.is_file() and filecmp.cmp(source, place, shallow=False):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(place.name + ".part")
    shutil.copyfile(source, part)
    os.replace(part, place)


def read_text(file: Path) -> str:
    """Every byte comes back when it is written again: line ends, and what is no UTF-8."""
    with open(file, encoding="utf-8", errors="surrogateescape", newline="") as stream:
        return stream.read()


def write_text(file: Path, text: str) -> None:
    file = file.resolve()  # a link stays one
    part = file.with_name(file.name + ".part")
    with open(part, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        stream.write(text)
    if file.exists():
        shutil.copymode(file, part)
    os.replace(part, file)


def read_json(file: Path) -> dict[str, Any]:
    """An object; empty where there is none, or a damaged one."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(content, indent=1) + "\n")


def files_in(folder: Path) -> set[Path]:
    return {file for file in folder.rglob("*") if file.is_file() or file.is_symlink()}


def remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # in use, or not there
        folder.rmdir()


def remove_empty_folders(folder: Path) -> None:
    """Those below it."""
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir() and not path.is_symlink()), reverse=True):
        remove_if_empty(inner)
