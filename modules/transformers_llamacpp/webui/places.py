"""A text-generation-webui on the disk: whether it is one, where our files go, and which of what lies there is ours."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from ..errors import WebuiError
from .disk import files_in
from .payload import EXTENSION_FILES, LOADERS

__all__ = ["MARK", "NAME", "Webui", "holds_mark", "webui_python"]

NAME = "llamacpp_hf"
MARK = "transformers_llamacpp"
"""A text in the loader, the requirements and the package by which they are known as ours without a record."""

NEEDED = ("server.py", "modules/shared.py", "modules/loaders.py", "modules/models.py", "modules/extensions.py")


@dataclass(frozen=True)
class Webui:
    """`folder` holds `server.py`; `user_data` is `folder/user_data` unless the webui runs with `--user-data-dir`."""

    folder: Path
    user_data: Path

    @classmethod
    def find(cls, folder: str | Path, user_data: str | Path | None = None, need_data: bool = True) -> Webui:
        """Raises `WebuiError` with the first file that a text-generation-webui has and this folder has not."""
        folder = Path(folder).expanduser().absolute()
        for name in NEEDED:
            if not (folder / name).is_file():
                raise WebuiError(
                    f"{folder} is no text-generation-webui: {name} is missing there. Name the folder that holds its server.py",
                    str(folder / name),
                )
        data = Path(user_data).expanduser().absolute() if user_data else folder / "user_data"
        if need_data and not data.is_dir():
            raise WebuiError(
                f"{data} is no folder: name the one that the webui is started with (its --user-data-dir) with --user-data, or "
                "start the webui once, if it is new",
                str(data),
            )
        return cls(folder, data)

    @property
    def loader(self) -> Path:
        return self.folder / LOADERS[0]

    @property
    def loaders(self) -> tuple[Path, ...]:
        return tuple(self.folder / name for name in LOADERS)

    @property
    def engine(self) -> Path:
        return self.folder / "modules" / MARK

    @property
    def user_extension(self) -> Path:
        return self.user_data / "extensions" / NAME

    @property
    def system_extension(self) -> Path:
        return self.folder / "extensions" / NAME

    @property
    def places(self) -> tuple[Path, ...]:
        """All that may hold something of ours, apart from `own`."""
        return (*self.loaders, self.engine, self.user_extension, self.system_extension)

    @property
    def own(self) -> Path:
        """Our folder in `user_data`: the panel's settings, the loader of each model, the record of the installation."""
        return self.user_data / NAME

    @property
    def settings(self) -> Path:
        return self.user_data / "settings.yaml"

    @property
    def model_settings(self) -> Path:
        return self.user_data / "models" / "config-user.yaml"

    @property
    def flags(self) -> Path:
        return self.user_data / "CMD_FLAGS.txt"

    def shown(self, path: Path) -> str:
        """The path as messages name it: short where it lies inside the webui."""
        return path.relative_to(self.folder).as_posix() if path.is_relative_to(self.folder) else str(path)

    def foreign(self, path: Path, recorded: list[str]) -> Path | None:
        """The file at or in `path` (one of `places`) that is not ours; `None` where all is ours or nothing there.

        Ours is what holds `MARK`. A folder that lost its marked file is still ours if it holds nothing but what the record
        names.
        """
        if path.is_symlink() and not path.exists():  # to a checkout that has moved
            return None if Path(os.readlink(path)).name == path.name else path
        if not path.exists():
            return None
        if path.is_dir() != (path.suffix != ".py"):
            return path
        if path.is_file():
            return None if holds_mark(path) else path
        marked = [path / name for name in (("__init__.py",) if path.name == MARK else EXTENSION_FILES)]
        if any(holds_mark(file) for file in marked):
            return None
        # what a user keeps beside the panel is in nobody's way
        files = sorted(files_in(path)) if path.name == MARK else [file for file in marked if file.exists()]
        files = [file for file in files if "__pycache__" not in file.parts]
        return next((file for file in files if self.key(file).removesuffix(".part") not in recorded), None)

    def key(self, path: Path) -> str:
        """The name of a path in the record, which stays right when the webui is moved."""
        if path.is_relative_to(self.user_data):
            return f"user_data:{path.relative_to(self.user_data).as_posix()}"
        return f"webui:{path.relative_to(self.folder).as_posix()}"

    def path(self, key: str) -> Path:
        root, _, name = key.partition(":")
        return (self.user_data if root == "user_data" else self.folder) / name


def holds_mark(file: Path) -> bool:
    try:
        return file.is_file() and MARK in file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def webui_python(webui: Webui, chosen: str | Path | None = None) -> tuple[Path, bool]:
    """The Python that runs the webui, and whether it is that of the webui's own installer.

    `chosen` overrides; without it the installer's, else the one that runs this. Raises `WebuiError` if `chosen` is no file.
    """
    own = webui.folder / "installer_files" / "env" / ("python.exe" if os.name == "nt" else "bin/python")
    python = Path(chosen).expanduser().absolute() if chosen else own if own.is_file() else Path(sys.executable)
    if not python.is_file():
        raise WebuiError(f"--python {python} is no file: name the Python that runs the webui", str(python))
    return python, python == own  # never resolved: a virtual environment's python is a link
