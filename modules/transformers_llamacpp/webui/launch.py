"""`webui-run`: starts a text-generation-webui with the loader registered before its `server.py` runs.

Without it the webui loads the model of its command line before it imports any extension, so that the model is loaded
twice: once with a loader of the webui, then with ours.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import WebuiError
from .payload import find_payload
from .places import NAME, Webui, holds_mark, webui_python
from .requirements import quoted

__all__ = ["command", "run", "with_extension"]

BOOTSTRAP = Path(__file__).with_name("bootstrap.py")


def run(
    folder: str | Path, flags: Sequence[str] = (), *, python: str | Path | None = None, say: Callable[[str], None] = print
) -> int:
    """Becomes the webui where the system allows (POSIX), so that signals and the exit status are its own; else waits for it.

    Raises `WebuiError` where `folder` is no webui, or holds a loader of that name which is not ours.
    """
    arguments, environment = command(folder, flags, python=python, say=say)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.name != "nt":
        try:
            os.execve(arguments[0], arguments, environment)
        except OSError as error:
            raise WebuiError(f"{arguments[0]} cannot be run: {error.strerror}", arguments[0]) from None
    process = subprocess.Popen(arguments, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the console sent it to the webui as well
            continue


def command(
    folder: str | Path,
    flags: Sequence[str],
    *,
    python: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> tuple[list[str], dict[str, str]]:
    """What `run` runs: the command and its environment. `say` gets a line where the webui has no installed panel."""
    webui = Webui.find(folder, _flag(flags, "--user-data-dir", folder), need_data=False)
    program, own_env = webui_python(webui, python)
    flags, loader, engine = list(flags), webui.loader, ""
    if loader.exists() and not holds_mark(loader):
        raise WebuiError(
            f"{loader} is not ours: move it away, then run transformers-llamacpp webui-install {quoted(webui.folder)}",
            str(loader),
        )
    if any((place / "script.py").is_file() for place in (webui.user_extension, webui.system_extension)):
        flags = with_extension(flags, NAME, _flags_of_file(webui))
    if not loader.exists():
        payload = find_payload()
        loader, engine = payload.loaders[0], str(payload.engine)
        say(
            f"{NAME} is not installed in {webui.folder}: starting with the loader of this package, without the panel. "
            f"To have both there: transformers-llamacpp webui-install {quoted(webui.folder)}"
        )
    environment = _environment(program) if own_env else dict(os.environ)
    return [str(program), str(BOOTSTRAP), str(webui.folder), str(loader), engine, *flags], environment


def with_extension(flags: Sequence[str], name: str, of_file: Sequence[str] = ()) -> list[str]:
    """`flags` with `name` among the extensions. `of_file` are the flags of CMD_FLAGS.txt.

    A second `--extensions` would replace the first, and one on the command line that of the file: the name joins the list
    that counts.
    """
    found = list(flags)
    place = _last_extensions(found)
    if place is None:
        place_of_file = _last_extensions(of_file)
        values = [] if place_of_file is None else _values(of_file, place_of_file)
        return found if name in values else [*found, "--extensions", *values, name]
    values = _values(found, place)
    if name in values:
        return found
    end = place + 1 if "=" in found[place] else place + 1 + len(values)
    return [*found[:place], "--extensions", *values, name, *found[end:]]


def _last_extensions(flags: Sequence[str]) -> int | None:
    """Where `--extensions` stands, also shortened as argparse allows or with `=`."""
    places = [
        index
        for index, flag in enumerate(flags)
        if len(flag) >= len("--exte") and "--extensions".startswith(flag.split("=")[0]) and flag.startswith("--exte")
    ]
    return places[-1] if places else None


def _values(flags: Sequence[str], place: int) -> list[str]:
    if "=" in flags[place]:
        return [flags[place].split("=", 1)[1]]
    rest = list(flags[place + 1 :])
    end = next((index for index, flag in enumerate(rest) if flag.startswith("-")), len(rest))
    return rest[:end]


def _flag(flags: Sequence[str], name: str, folder: str | Path) -> Path | None:
    """The folder a flag names, seen from the webui's own folder; `None` without the flag."""
    for index, flag in enumerate(flags):
        if flag.startswith(name + "="):
            return Path(folder) / flag.split("=", 1)[1]
        if flag == name and index + 1 < len(flags):
            return Path(folder) / flags[index + 1]
    return None


def _flags_of_file(webui: Webui) -> list[str]:
    """The flags the webui reads from CMD_FLAGS.txt; none where it cannot be read (the webui will say so)."""
    try:
        lines = webui.flags.read_text(encoding="utf-8").splitlines()
        texts = (line.strip().rstrip("\\").strip() for line in lines if not line.strip().startswith("#"))
        return shlex.split(" ".join(text for text in texts if text))
    except (OSError, ValueError):
        return []


def _environment(python: Path, outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What the webui's own start script sets around its environment, which must see no other packages."""
    prefix = python.parent if os.name == "nt" else python.parent.parent
    folders = [python.parent, prefix / "Library" / "bin", prefix / "Scripts"] if os.name == "nt" else [python.parent]
    kept = {name: value for name, value in outer.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    path = os.pathsep.join([*map(str, folders), outer.get("PATH", "")])
    return kept | {"PATH": path, "PYTHONNOUSERSITE": "1", "CUDA_PATH": str(prefix), "CUDA_HOME": str(prefix)}
