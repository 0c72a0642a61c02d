"""`webui-install`: puts the loader, the engine and the panel into a text-generation-webui, and takes them out again.

No file of the webui is edited but for single lines of its settings that name us, and nothing that is not ours is
overwritten or removed. Running it again upgrades in place and finishes what an earlier run left half done: the record is
written before anything else and removed last.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..errors import WebuiError
from . import disk, requirements
from .cleaning import LOADER, clean_model_settings, clean_settings, tell_of_flags
from .payload import EXTENSION_FILES, Payload, engine_files, find_payload
from .places import NAME, Webui, webui_python
from .record import Record

__all__ = ["install", "uninstall"]

Say = Callable[[str], None]


def install(
    folder: str | Path,
    *,
    link: bool = False,
    system: bool = False,
    user_data: str | Path | None = None,
    python: str | Path | None = None,
    say: Say = print,
) -> None:
    """Puts everything into the webui in `folder`; `say` gets a line for each thing done and each left to do.

    `link`: symbolic links to this installation's files, for working on them. `system`: the panel goes to `extensions/`, not
    to `user_data/extensions/`. `python` is only asked for the requirements, which are never installed here.

    Raises `WebuiError`, before anything is changed, where `folder` is no webui or something foreign lies in the way, and
    later where the system refuses a write or a link; then running it again goes on.
    """
    webui, payload = Webui.find(folder, user_data), find_payload()
    asked, own_env = webui_python(webui, python)
    extension = webui.system_extension if system else webui.user_extension
    _refuse(webui, payload, Record.read(webui))
    left = sorted(disk.files_in(extension) - _known(webui, extension, Record.read(webui))) if link else []
    if left and not extension.is_symlink():
        raise WebuiError(f"{left[0]} is not ours: move it away, or install with --copy", str(left[0]))
    with disk.refusals(webui.folder):
        _place(webui, payload, extension, link)
        say(f"{NAME} {_version()} is in {webui.folder}, as {'links' if link else 'copies'}:")
        say(f"  {', '.join(map(webui.shown, webui.loaders))}")
        say(f"  {webui.shown(webui.engine)}/ ({len(engine_files(payload.engine))} files)")
        say(f"  {webui.shown(extension)}/ ({', '.join(EXTENSION_FILES)})")
        say(f"  {webui.shown(Record.file(webui))} (the record of these)")
        clean_model_settings(webui, say, remember=True)
    say(requirements.told(asked, own_env, payload.extension / "requirements.txt", extension / "requirements.txt"))
    data = f" --user-data-dir {requirements.quoted(webui.user_data)}" if user_data else ""
    flags = f"--loader {LOADER}{data}"
    say(f"Start the webui with it: transformers-llamacpp webui-run {requirements.quoted(webui.folder)} -- {flags}")
    say(f"or as ever, with --extensions {NAME} or the box in its Session tab")


def uninstall(folder: str | Path, *, user_data: str | Path | None = None, say: Say = print) -> None:
    """Takes out everything of ours, also what an interrupted run or a lost record left; `say` gets what was done.

    Raises `WebuiError` where `folder` is no webui, or where the system refuses; then running it again goes on.
    """
    webui = Webui.find(folder, user_data)
    record, done = Record.read(webui), False
    with disk.refusals(webui.folder):
        for place in webui.places:
            foreign = webui.foreign(place, record.files)
            if foreign:
                say(f"left alone, because it is not ours: {webui.shown(foreign)}")
            elif _remove(webui, place, record):
                left = "".join(f"; left alone: {webui.shown(file)}" for file in sorted(disk.files_in(place)))
                say(f"removed {webui.shown(place)}{left}")
                done = True
        done |= _remove_traces(webui, say)
        done |= clean_settings(webui, say)
        done |= clean_model_settings(webui, say, remember=False)
        for key in reversed(record.made):
            disk.remove_if_empty(webui.path(key))
        if webui.own.is_dir():
            shutil.rmtree(webui.own)
            say(f"removed {webui.shown(webui.own)} (our settings and the record)")
            done = True
        if not done:
            say(f"nothing of {NAME} is in {webui.folder}")
        elif not user_data and not record.files:
            say("its record was not found: if it was installed with --user-data DIR, run this again with that")
        tell_of_flags(webui, say)


def _refuse(webui: Webui, payload: Payload, record: Record) -> None:
    """An error, as long as nothing has been changed, where something else lies at one of our places."""
    for place in webui.places:
        foreign = webui.foreign(place, record.files)
        if foreign:
            raise WebuiError(
                f"{foreign} is not ours and will not be overwritten: move {webui.shown(place)} away, or delete it if nothing "
                "needs it, then install again",
                str(foreign),
            )
        for source in (*payload.loaders, payload.engine, payload.extension):
            if place.exists() and not place.is_symlink() and place.samefile(source):
                raise WebuiError(f"{place} is what it would be made from: install from another installation", str(place))


def _place(webui: Webui, payload: Payload, extension: Path, link: bool) -> None:
    old = Record.read(webui)
    loaders = dict(zip(webui.loaders, payload.loaders, strict=True))
    parts = {**loaders, webui.engine: payload.engine, extension: payload.extension}
    plan = dict(parts)
    if not link:
        plan = dict(loaders)
        plan |= {webui.engine / name: payload.engine / name for name in engine_files(payload.engine)}
        plan |= {extension / name: payload.extension / name for name in EXTENSION_FILES}
    files = [webui.key(place) for place in plan]
    made = old.made + [webui.key(place.parent) for place in parts if not place.parent.exists()]
    new = Record(_version(), "link" if link else "copy", True, files, made)
    replace(new, complete=False, files=sorted({*old.files, *files})).write(webui)
    if link:  # a refusal must come before copies that work are removed
        trial = webui.own / "trial"
        trial.unlink(missing_ok=True)
        disk.link(payload.loaders[0], trial)
        trial.unlink()

    for place in webui.places:
        if link or place.is_symlink() or place not in parts:
            _remove(webui, place, old)
    if not link:
        for stale in disk.files_in(webui.engine) - plan.keys():
            stale.unlink()
        disk.remove_empty_folders(webui.engine)
        _tidy(webui, extension, {webui.path(key) for key in old.files if key not in files})
    for place, source in plan.items():
        (disk.link if link else disk.copy)(source, place)
    new.write(webui)


def _remove(webui: Webui, place: Path, record: Record) -> bool:
    """Removes what is ours at one of our places; whether there was something. What else is in a panel's folder stays."""
    if place.is_symlink() or place.is_file():
        place.unlink()
        return True
    if not place.exists():
        return False
    if place == webui.engine:
        shutil.rmtree(place)
        return True
    return _tidy(webui, place, _known(webui, place, record))


def _tidy(webui: Webui, extension: Path, known: set[Path]) -> bool:
    """Removes these files of a panel's folder, then what is empty; whether one of them was there."""
    if not extension.is_dir() or extension.is_symlink():
        return False
    ours = disk.files_in(extension) & known
    for file in ours:
        file.unlink()
    disk.remove_empty_folders(extension)
    disk.remove_if_empty(extension)
    return bool(ours) or not extension.exists()


def _known(webui: Webui, extension: Path, record: Record) -> set[Path]:
    """What may be removed from a panel's folder: our files, an interrupted copy of them, what Python made of them."""
    names = [*EXTENSION_FILES, *(f"{name}.part" for name in EXTENSION_FILES)]
    cached = disk.files_in(extension / "__pycache__")
    return {*map(webui.path, record.files), *(extension / name for name in names), *cached}


def _remove_traces(webui: Webui, say: Say) -> bool:
    """What Python compiled in the webui's own `modules/`, and an interrupted copy."""
    folder = webui.loader.parent
    names = [loader.stem for loader in webui.loaders]
    compiled = [file for name in names for file in (folder / "__pycache__").glob(f"{name}.*.pyc")]
    found = [*compiled, *(file for name in names for file in folder.glob(f"{name}.py.part"))]
    for file in found:
        file.unlink()
        say(f"removed {webui.shown(file)}")
    disk.remove_if_empty(folder / "__pycache__")
    return bool(found)


def _version() -> str:
    return str(vars(sys.modules[__name__.partition(".")[0]])["__version__"])
