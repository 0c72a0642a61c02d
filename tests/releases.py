"""The model tests on every supported release of transformers, each in a virtual environment of its own.

    .venv/bin/python tests/releases.py                  all releases but the one that is installed
    .venv/bin/python tests/releases.py 5.6.2 5.13.0     these
    .venv/bin/python tests/releases.py --jobs 1         one after the other, with two threads each

Side by side each release has one thread, and what it prints is shown whole when it is done.

A child environment holds only that release and what it pins; torch, llama-cpp-python and the rest are seen through the
environment that runs this (one line in a .pth file), so nothing large is installed or compiled twice. Tests marked
`once` are left out: they ran, or will run, with the installed release.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import IO

RELEASES = ("5.6.2", "5.13.0", "5.14.0", "5.23.0", "5.24.0")
"""The first and last of every dialect of transformers (see `compat.py`)."""

ROOT = Path(__file__).resolve().parent.parent
VENVS = ROOT / ".venvs"
TESTS = ["tests/unit", "tests/model"]


PATIENCE = 15.0
"""Seconds a run may take to end by itself after Ctrl-C."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", help=f"default: {', '.join(RELEASES)} without the installed one")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="files or folders (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=min(2, cores()), help="releases at once (default here: %(default)s)")
    arguments = parser.parse_args()
    installed = importlib.metadata.version("transformers")
    wanted = arguments.releases or [release for release in RELEASES if release != installed]
    say(f"transformers {installed} is installed; now {', '.join(wanted)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a job that is cancelled ends its children too
    try:
        results = run_all(wanted, arguments.tests, max(1, min(arguments.jobs, len(wanted))))
    except KeyboardInterrupt:
        say("stopped")
        return 130
    say(", ".join(f"{release} {results[release]}" for release in wanted))
    return 0 if all(result == "passed" for result in results.values()) else 1


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_all(wanted: list[str], tests: list[str], jobs: int) -> dict[str, str]:
    """The result of each release: `passed`, or what went wrong. At most `jobs` run at once."""
    waiting, running, results = list(wanted), list[Run](), dict[str, str]()
    try:
        while waiting or running:
            if waiting and len(running) < jobs:
                release = waiting.pop(0)
                try:  # here, not in the run: two pips at once are a risk
                    running.append(Run(release, checked_environment(release), tests, alone=jobs == 1))
                except (subprocess.CalledProcessError, RuntimeError) as error:
                    results[release] = f"FAILED: no environment ({error})"
                    say(f"transformers {release}: {results[release]}")
                continue
            ended = [run for run in running if run.process.poll() is not None]
            for run in ended:
                running.remove(run)
                results[run.release] = run.report()
            if not ended:
                time.sleep(0.2)
    finally:
        if running:  # a second Ctrl-C must not leave them behind
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        for run in running:
            run.stop()
        for run in running:
            run.wait_or_kill()
            run.report()
    return results


class Run:
    """The tests of one release in a process of its own. `alone`: they may print at once and use every thread."""

    def __init__(self, release: str, python: Path, tests: list[str], alone: bool) -> None:
        self.release, self.began = release, time.monotonic()
        self.output: IO[bytes] | None = None if alone else tempfile.TemporaryFile()  # noqa: SIM115  (closed by report)
        variables = dict(os.environ) if alone else os.environ | {"TRANSFORMERS_LLAMACPP_TEST_THREADS": "1"}
        say(f"transformers {release}: started")
        self.process = subprocess.Popen(
            [python, "-m", "pytest", "-m", "not once", "-q", "-p", "no:cacheprovider", *tests],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT if self.output else None,
            start_new_session=True,  # with its own children it can be ended as one group
        )

    def report(self) -> str:
        """Prints what was held back, then the result, which it returns."""
        if self.output:
            self.output.seek(0)
            sys.stdout.flush()
            shutil.copyfileobj(self.output, sys.stdout.buffer)
            self.output.close()
        status = self.process.returncode
        result = "passed" if status == 0 else f"FAILED (exit status {status})"
        say(f"transformers {self.release}: {result} ({time.monotonic() - self.began:.0f} s)")
        return result

    def stop(self) -> None:
        """Asks for an end as Ctrl-C does, so that pytest still tells how far it came."""
        self._send(signal.SIGINT)

    def wait_or_kill(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        if os.name != "nt":
            self._send(signal.SIGKILL)  # what is left of its group
        self.process.wait()

    def _send(self, number: int) -> None:
        if os.name == "nt":
            self.process.terminate()
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def checked_environment(release: str) -> Path:
    """Python of an environment that does have this release."""
    python = environment(release)
    command = [python, "-c", "import transformers; print(transformers.__version__)"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if found != release:
        raise RuntimeError(f"it has transformers {found or 'not at all'}")
    return python


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


def say(text: str) -> None:
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
