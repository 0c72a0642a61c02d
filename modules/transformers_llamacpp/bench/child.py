"""The process of one contender: loads it, then answers requests that come as lines of JSON. Started by `process.py`.

    {"run": {"mode": ..., "prompts": [[id, ...], ...], "tokens": n}}    a `Run`, as a dict
    {"settle": seconds}                                                 {"busy": whether it still computed after so long}
    {"peak": true}                                                      {"peak_bytes": resident memory at its largest}

A problem is answered with {"error": text}. The end of the input ends the process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

from .runs import Measurable

__all__ = ["main", "peak_bytes"]

REST = 0.02
"""Seconds over which `settle` looks at the processor time."""


def peak_bytes() -> int | None:
    """Peak resident memory of this process; `None` on Windows without psutil."""
    if sys.platform == "linux":  # what getrusage() says begins with the memory of the process that started this one
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    if sys.platform == "win32":
        try:
            import psutil
        except ImportError:
            return None
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def settle(seconds: float) -> bool:
    """Wait until this process rests: threads of OpenMP go on spinning for a while. Whether it still does after `seconds`."""
    end = time.perf_counter() + seconds
    while True:
        before = time.process_time()
        time.sleep(REST)
        if time.process_time() - before < 0.1 * REST:
            return False
        if time.perf_counter() > end:
            return True


def load(name: str, path: str, n_ctx: int, n_cells: int, rows: int, threads: int, imports: list[str]) -> Measurable:
    """The contender. Each is imported here, so that no process holds in memory what another one needs."""
    for library in imports:
        __import__(library)
    if name == "bare":
        from .bare import Bare

        return Bare(path, n_cells, threads, rows)
    if name == "ours" or name == "plain-loop":
        from .ours import Ours

        return Ours(path, n_ctx, n_cells, threads, plain=name == "plain-loop")
    from . import rivals

    return rivals.TorchModel(path, threads) if name == "torch" else rivals.LlamaLoop(path, n_ctx, threads)


def answer(contender: Measurable, request: dict[str, Any]) -> dict[str, Any]:
    if "run" in request:
        return dataclasses.asdict(contender.run(**request["run"]))
    if "settle" in request:
        return {"busy": settle(request["settle"])}
    return {"peak_bytes": peak_bytes()}


def main() -> None:
    """The last argument of the command is what `load` takes, as JSON. The first line out says that it is done."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no answer

    def send(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    def tell(error: Exception) -> None:
        send({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})

    try:
        contender = load(**json.loads(sys.argv[-1]))
    except Exception as error:
        tell(error)
        return
    send({})
    for line in sys.stdin:
        try:
            send(answer(contender, json.loads(line)))
        except Exception as error:
            tell(error)
