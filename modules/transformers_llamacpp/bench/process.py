"""A contender in a process of its own, as its parent sees it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import LlamaCppError
from .runs import Run

__all__ = ["Process"]

PACKAGE = Path(__file__).resolve().parent.parent

WITHOUT_TORCH = ("bare", "llama-cpp-python")

BOOT = """
import sys, types
sys.path.insert(0, sys.argv[1])
if sys.argv[2]:
    package = types.ModuleType("transformers_llamacpp")
    package.__path__ = [sys.argv[2]]
    sys.modules["transformers_llamacpp"] = package
from transformers_llamacpp.bench.child import main
main()
"""
"""Importing this package imports torch; where a contender needs none, an empty package stands in for it."""

PATIENCE = 2.0
"""Seconds a process may take to come to rest."""


class Process:
    """Loads the contender at once. Every method raises `LlamaCppError` with the contender's own reason."""

    def __init__(
        self, name: str, path: Path, n_ctx: int, n_cells: int, rows: int, threads: int, imports: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.busy = False
        """It was still computing when the next contender's turn came."""
        setup = {"name": name, "path": str(path), "n_ctx": n_ctx, "n_cells": n_cells, "rows": rows, "threads": threads}
        stub = str(PACKAGE) if name in WITHOUT_TORCH else ""
        command = [sys.executable, "-c", BOOT, str(PACKAGE.parent), stub, json.dumps(setup | {"imports": [*imports]})]
        self._asked = True
        """Its answer has not come yet; at first that is the word that it is ready."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the process
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, encoding="utf-8"
        )
        started = time.perf_counter()
        try:
            self._receive()
            self.ready_seconds = time.perf_counter() - started
            """What Python, its imports and loading the file took."""
        except BaseException:
            self.close()
            raise

    def run(self, mode: str, prompts: Sequence[Sequence[int]], tokens: int) -> Run:
        run = Run(**self._ask({"run": {"mode": mode, "prompts": [*map(list, prompts)], "tokens": tokens}}))
        self.busy |= self._ask({"settle": PATIENCE})["busy"]
        if any(len(row) != tokens for row in run.answer) or len(run.answer) != len(prompts):
            raise LlamaCppError(f"{self.name} wrote {[*map(len, run.answer)]} tokens where {tokens} a row were asked for")
        return run

    def peak_bytes(self) -> int | None:
        """The most resident memory it has had so far; `None` where the system does not tell."""
        peak: int | None = self._ask({"peak": True})["peak_bytes"]
        return peak

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):  # where it is gone, the answer says so
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
        self._asked = True
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise LlamaCppError(f"{self.name}: its process ended with status {self._child.wait()}{self._last_words()}")
        self._asked = False
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise LlamaCppError(f"{self.name}: {message['error']}")
        return message

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        return "".join(f": {line.strip()}" for line in [line for line in lines if line.strip()][-1:])

    def close(self) -> None:
        """End the process, in the middle of an answer too; idempotent."""
        assert self._child.stdin is not None and self._child.stdout is not None
        if self._asked:
            self._child.kill()
        with contextlib.suppress(OSError):
            self._child.stdin.close()  # it ends when its input does
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()
        self._log.close()
