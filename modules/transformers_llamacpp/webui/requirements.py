"""Whether the webui's Python has what the loader needs, and the command that installs it. Nothing is installed here."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

from packaging.requirements import Requirement

__all__ = ["quoted", "told", "versions"]

PATIENCE = 30.0
"""Seconds that Python may take; it imports nothing large."""

QUESTION = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def told(python: Path, own_env: bool, needed: Path, placed: Path) -> str:
    """One line: that all of `needed` (a requirements file) is there, or what to run. `placed` is the webui's copy of it."""
    wanted = [Requirement(line) for line in _entries(needed)]
    # the installer's environment sees no packages but its own when the webui runs
    found = versions(python, [entry.name for entry in wanted], isolated=own_env)
    whose = "the webui's Python" if own_env else f"this Python ({python})"
    command = f"{quoted(python)} -m pip install -r {quoted(placed)}"
    if not own_env:
        command += "   (with the Python that runs the webui, if that is another one)"
    if found is None:
        return f"{whose} could not be asked what it has. Install the requirements: {command}"
    missing = [str(entry) for entry in wanted if not entry.specifier.contains(found.get(entry.name, "0"), prereleases=True)]
    have = ", ".join(f"{name} {version}" for name, version in found.items())
    if not missing:
        return f"{whose} has what it needs: {have}"
    return f"{whose} lacks {', '.join(missing)}{have and f' (it has {have})'}. Install the requirements: {command}"


def versions(python: Path, names: list[str], isolated: bool = False) -> dict[str, str] | None:
    """The installed versions of these distributions, or `None` where Python cannot be run."""
    try:
        command = [str(python), *(["-I"] if isolated else []), "-c", QUESTION, *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)
        found = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None
    return found if isinstance(found, dict) else None


def quoted(path: Path) -> str:
    return subprocess.list2cmdline([str(path)]) if os.name == "nt" else shlex.quote(str(path))


def _entries(file: Path) -> list[str]:
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]
