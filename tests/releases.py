"""The model tests on every supported release of transformers, each in a virtual environment of its own.

    .venv/bin/python tests/releases.py                  all releases but the one that is installed
    .venv/bin/python tests/releases.py 5.6.2 5.13.0     these

A child environment holds only that release and what it pins; torch, llama-cpp-python and the rest are seen through the
environment that runs this (one line in a .pth file), so nothing large is installed or compiled twice. Tests marked
`once` are left out: they ran, or will run, with the installed release.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

RELEASES = ("5.6.2", "5.13.0", "5.14.0", "5.23.0", "5.24.0")
"""The first and last of every dialect of transformers (see `compat.py`)."""

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venvs"
TESTS = ["tests/unit", "tests/model"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", help=f"default: {', '.join(RELEASES)} without the installed one")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders (default: %(default)s)")
    arguments = parser.parse_args()
    installed = importlib.metadata.version("transformers")
    wanted = arguments.releases or [release for release in RELEASES if release != installed]
    print(f"== transformers {installed} is installed; now {', '.join(wanted)}", flush=True)
    results = {}
    for release in wanted:
        began = time.monotonic()
        results[release] = run(release, arguments.tests)
        print(f"== transformers {release}: {results[release]} ({time.monotonic() - began:.0f} s)", flush=True)
    print("== " + ", ".join(f"{release} {result}" for release, result in results.items()), flush=True)
    return 0 if all(result == "passed" for result in results.values()) else 1


def run(release: str, tests: list[str]) -> str:
    """`passed`, or what went wrong."""
    try:
        python = environment(release)
    except subprocess.CalledProcessError as error:
        return f"could not be installed ({error})"
    found = subprocess.run(
        [python, "-c", "import transformers; print(transformers.__version__)"], capture_output=True, text=True
    ).stdout.strip()
    if found != release:
        return f"FAILED: the environment has transformers {found or 'not at all'}"
    command = [python, "-m", "pytest", "-m", "not once", "-q", "-p", "no:cacheprovider", *tests]
    return "passed" if subprocess.run(command, cwd=ROOT).returncode == 0 else "FAILED"


def environment(release: str) -> Path:
    """Python of the release's environment, made when it is not there."""
    folder = VENVS / f"transformers-{release}"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    done = folder / "done"
    if done.is_file():
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", folder], check=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    # addsitedir reads the .pth files of the outer environment too, so what is installed editable there is seen as well.
    outer = sysconfig.get_paths()["purelib"]
    (Path(paths["purelib"]) / "outer.pth").write_text(f"import site; site.addsitedir({outer!r})\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, f"transformers=={release}"], check=True)
    done.touch()
    return python


if __name__ == "__main__":
    sys.exit(main())
