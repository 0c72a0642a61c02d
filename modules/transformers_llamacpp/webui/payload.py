"""The files a webui is given, wherever this package was installed from."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from ..errors import WebuiError

__all__ = ["Payload", "engine_files", "find_payload"]

DISTRIBUTION = "transformers-llamacpp"
SHARED = "share/transformers-llamacpp/"
"""Where a wheel puts them, below the environment's prefix (`data-files` in pyproject.toml)."""

LOADERS = tuple(f"modules/llamacpp_hf{part}.py" for part in ("", "_seams", "_replies"))
EXTENSION = "extensions/llamacpp_hf"
EXTENSION_FILES = ("script.py", "requirements.txt")


@dataclass(frozen=True)
class Payload:
    """`loaders`, of which the first is the one to import, the package's folder `engine`, and the folder `extension` with
    `EXTENSION_FILES`."""

    loaders: tuple[Path, ...]
    engine: Path
    extension: Path


def find_payload() -> Payload:
    """What lies beside the package in a checkout (also of an editable install), else what the wheel brought.

    Raises `WebuiError` with the first file that is missing.
    """
    engine = Path(__file__).resolve().parent.parent
    root = engine.parent.parent
    if not (root / LOADERS[0]).is_file():
        root = _shared() or root
    wanted = (*LOADERS, *(f"{EXTENSION}/{name}" for name in EXTENSION_FILES))
    missing = [name for name in wanted if not (root / name).is_file()]
    if missing:
        raise WebuiError(
            f"this installation of {DISTRIBUTION} is not complete: {root / missing[0]} is missing. Install it again: "
            f"pip install --force-reinstall --no-deps {DISTRIBUTION}",
            str(root / missing[0]),
        )
    return Payload(tuple(root / name for name in LOADERS), engine, root / EXTENSION)


def engine_files(engine: Path) -> list[Path]:
    """The files of the package a webui needs, relative to it: all but the stand-alone page."""
    found = (file.relative_to(engine) for file in engine.rglob("*") if file.is_file())
    return sorted(file for file in found if file.parts[0] != "server" and "__pycache__" not in file.parts)


def _shared() -> Path | None:
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.as_posix().endswith(SHARED + LOADERS[0]):
            return Path(str(file.locate())).resolve().parents[1]
    return None
