"""Runs one case of ``crash_cases.py`` in a process of its own, so that a crash shows as an exit status.

``Children`` starts one process that imports everything and then forks for each case (a fresh interpreter would spend
five seconds on imports). Where there is no fork it starts a fresh one. Cases with `at_exit` end as any Python program
ends, so that a crash in the interpreter's clean-up is seen too; the others leave at once.

    python child.py CASE      # one case, by hand
    python child.py           # reads case names from standard input, answers each with a line of JSON
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

TIMEOUT = 120.0
MARK = "\N{BLACK SQUARE}outcome "


def environment(**more: str) -> dict[str, str]:
    """What a child of the tests needs to import what its parent imported."""
    package = importlib.util.find_spec("transformers_llamacpp")
    assert package is not None and package.origin is not None
    folders = [str(Path(package.origin).parent.parent), os.environ.get("PYTHONPATH", "")]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "HF_HUB_OFFLINE": "1"} | more


def run_case(name: str) -> None:
    """Print what came of it: an answer that the case itself found right, or an exception."""
    import crash_cases

    faulthandler.enable()
    case = {**crash_cases.CASES, **crash_cases.CRASH}[name]
    try:
        case.run()
        outcome: dict[str, Any] = {"kind": "answer"}
    except Exception as error:
        types = [kind.__name__ for kind in type(error).__mro__]
        outcome = {"kind": "exception", "types": types, "message": str(error), "trace": traceback.format_exc()}
    print(MARK + json.dumps(outcome), flush=True)
    if not case.at_exit:
        os._exit(0)


def serve() -> bool:
    """True in a child that has to end now, False in the server when its input ends."""
    import crash_cases  # noqa: F401  (what all children need: imported once)

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        with tempfile.TemporaryFile() as output:
            started = time.monotonic()
            pid = os.fork()
            if pid == 0:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                run_case(line.strip())
                return True
            status = _wait(pid, started + TIMEOUT)
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
        print(json.dumps({"status": status, "output": text}), flush=True)
    return False


def _wait(pid: int, deadline: float) -> int | str:
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return f"no end after {TIMEOUT:g} s"
        time.sleep(0.01)


class Children:
    """`run(case)` gives `(status, outcome, output)`: status 0 is a normal end, -6 an abort, a str a hang."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.server: subprocess.Popen[str] | None = None
        if hasattr(os, "fork"):
            self.server = subprocess.Popen(
                [sys.executable, "-X", "utf8", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                encoding="utf-8", env=environment,
            )  # fmt: skip

    def run(self, case: str) -> tuple[int | str, dict[str, Any] | None, str]:
        status, output = self._fork(case) if self.server else self._spawn(case)
        marked = [line for line in output.splitlines() if line.startswith(MARK)]
        return status, json.loads(marked[-1][len(MARK) :]) if marked else None, output

    def _fork(self, case: str) -> tuple[int | str, str]:
        assert self.server is not None and self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(case + "\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        return answer["status"], answer["output"]

    def _spawn(self, case: str) -> tuple[int | str, str]:
        command = [sys.executable, "-X", "utf8", __file__, case]
        try:
            done = subprocess.run(
                command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT
            )
        except subprocess.TimeoutExpired as error:
            return f"no end after {TIMEOUT:g} s", (error.stdout or b"").decode("utf-8", "replace")
        return done.returncode, done.stdout.decode("utf-8", "replace")

    def close(self) -> None:
        if self.server is not None and self.server.stdin is not None:
            self.server.stdin.close()
            self.server.wait(timeout=60)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if len(sys.argv) > 1:
        run_case(sys.argv[1])
    else:
        serve()
