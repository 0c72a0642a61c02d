"""Folders with a webui: our stand-in, or a copy of the checkout that ``$TEXTGEN_WEBUI`` names, which is never written to.

``$TEXTGEN_WEBUI_PYTHON`` runs it; without it, the checkout's own environment if there is one, or else this Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
STUB = HERE / "stub_webui"
WRITTEN = ("user_data/cache", "user_data/logs", "user_data/settings.yaml")
"""What a webui writes by itself as soon as somebody opens its page."""


def checkout() -> Path | None:
    named = os.environ.get("TEXTGEN_WEBUI")
    return Path(named).resolve() if named else None


def python() -> str:
    named = os.environ.get("TEXTGEN_WEBUI_PYTHON")
    if named:
        return os.path.abspath(named) if os.path.dirname(named) else named
    if checkout() is not None:
        for place in ("installer_files/env/bin/python", "installer_files/env/python.exe"):
            if (checkout() / place).is_file():
                return str(checkout() / place)
    return sys.executable


def make(folder: Path) -> Path:
    """A fresh webui in `folder`, which must not exist: as it comes, without anybody's models, settings or flags."""
    source = checkout() or STUB
    left_out = {source / name for name in (".git", "installer_files", *WRITTEN)}
    emptied = {source / "user_data" / name for name in ("models", "extensions", "loras", "image_models", "mmproj")}

    def ignored(place: str, names: list[str]) -> list[str]:
        if Path(place) in emptied:
            return names
        return [name for name in names if name == "__pycache__" or Path(place) / name in left_out]

    shutil.copytree(source, folder, ignore=ignored, symlinks=True)
    (folder / "user_data" / "CMD_FLAGS.txt").write_text("", encoding="utf-8")
    for name in ("models", "extensions"):
        (folder / "user_data" / name).mkdir(parents=True, exist_ok=True)
    return folder


def add_model(folder: Path, model: Path, name: str | None = None) -> str:
    """Puts a model file into the webui by linking; its name there."""
    link(model, folder / "user_data" / "models" / (name or model.name))
    return name or model.name


def add_extension(folder: Path, source: Path, name: str | None = None) -> str:
    link(source, folder / "user_data" / "extensions" / (name or source.name))
    return name or source.name


def install(folder: Path) -> None:
    """Our loader, engine and extension, linked to where a user would put them."""
    for file in (REPOSITORY / "modules").glob("llamacpp_hf*.py"):
        link(file, folder / "modules" / file.name)
    link(REPOSITORY / "modules" / "transformers_llamacpp", folder / "modules" / "transformers_llamacpp")
    add_extension(folder, REPOSITORY / "extensions" / "llamacpp_hf")


def link(source: Path, target: Path) -> None:
    """A link, or where the system allows none (Windows without developer mode) a copy."""
    try:
        target.symlink_to(source, target_is_directory=source.is_dir())
    except OSError:
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            try:
                os.link(source, target)
            except OSError:
                shutil.copyfile(source, target)


def hashes(folder: Path) -> dict[str, str]:
    """What every file of the webui holds, by its path; a link by what it points to. Of what a webui writes, nothing."""
    found = {}
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in [*files, *[name for name in folders if (Path(place) / name).is_symlink()]]:
            file = Path(place) / name
            path = file.relative_to(folder).as_posix()
            if path.startswith(WRITTEN):
                continue
            content = str(file.readlink()).encode() if file.is_symlink() else file.read_bytes()
            found[path] = hashlib.sha256(content).hexdigest()
    return found
