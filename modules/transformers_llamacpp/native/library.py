"""The installed llama.cpp: its version and limits, its log, what it was built with.

`llama_cpp` (the binding) and ctypes are imported in this package and nowhere else.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import logging
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    import llama_cpp
except ImportError as error:  # the webui must survive a missing binding, and the cure must be readable
    raise ImportError(
        "transformers_llamacpp needs llama-cpp-python 0.3.36 or newer: pip install 'llama-cpp-python>=0.3.36,<0.4' "
        f"({error})"
    ) from error

__all__ = ["default_threads", "init_backend", "library_version", "llama_cpp", "recent_errors", "system_info"]

logger = logging.getLogger("transformers_llamacpp.llama_cpp")

_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
"""`ggml_log_level` of ggml.h; the binding's own comment shows the order of an older one."""

_lock = threading.Lock()
_recent: collections.deque[str] = collections.deque(maxlen=40)
_state: dict[str, Any] = {"started": False, "numa": 0, "level": logging.WARNING, "verbose": False}


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, _user_data: Any) -> None:
    """llama.cpp's log: errors are kept for the messages of our exceptions, the rest goes to Python's logging."""
    if level == 5:  # GGML_LOG_LEVEL_CONT: the previous line goes on
        number = _state["level"]
    else:
        number = _state["level"] = _LEVELS.get(level, logging.DEBUG)
    if number < logging.WARNING and not _state["verbose"]:
        return
    line = text.decode("utf-8", "replace").rstrip("\n")
    if number >= logging.WARNING and line:
        _recent.append(line)
    logger.log(number if _state["verbose"] else logging.DEBUG, "%s", line)


@contextmanager
def recent_errors() -> Iterator[list[str]]:
    """Collect what llama.cpp logs as a warning or an error inside the block; the list is filled at its end."""
    lines: list[str] = []
    _recent.clear()
    try:
        yield lines
    finally:
        lines.extend(_recent)


def init_backend(numa: int = 0, verbose: bool = False) -> None:
    """Start llama.cpp once in this process, and send its log to the logger `transformers_llamacpp.llama_cpp`.

    `numa` is a GGML_NUMA_STRATEGY_* number; llama.cpp takes it once, a later different one is reported as a warning.
    """
    with _lock:
        llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
        _state["verbose"] = _state["verbose"] or verbose
        if verbose and not logger.handlers and not logging.getLogger().handlers:
            logger.addHandler(logging.StreamHandler())
            logger.setLevel(logging.DEBUG)
        if not _state["started"]:
            llama_cpp.llama_backend_init()
            _state["started"] = True
        if numa and numa != _state["numa"]:
            if _state["numa"]:
                logger.warning("numa=%d is ignored: numa=%d was set for this process before", numa, _state["numa"])
            else:
                llama_cpp.llama_numa_init(numa)
                _state["numa"] = numa


def library_version() -> str:
    return str(llama_cpp.__version__)


@functools.cache
def system_info() -> str:
    """llama.cpp's own line about the instruction sets it was built with."""
    return bytes(llama_cpp.llama_print_system_info()).decode("utf-8", "replace")


def amx_kernels() -> bool:
    """Whether llama.cpp was built with AMX kernels that this processor would run.

    GCC before 13.3 miscompiles the tile configuration (GCC PR 114098), and the first matrix product of such a build
    kills the process. Nothing tells a good build from a bad one, so the caller avoids these kernels by default.
    """
    return "AMX_INT8 = 1" in system_info()


@functools.cache
def default_threads() -> int:
    """Physical cores this process may use: hyper-threads slow llama.cpp down, and so do the small cores of a processor that has
    two kinds, because a decode waits for its slowest thread. Not more than a container's share of the processors."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    large = _numbers("/sys/devices/cpu_core/cpus")  # Linux has it where there are two kinds
    allowed = allowed & large or allowed
    cores = set()
    for cpu in allowed:
        siblings = _read(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        if not siblings:
            cores = set(map(str, range(len(allowed) if len(allowed) <= 4 else len(allowed) // 2)))
            break
        cores.add(siblings)
    return max(1, min(len(cores), _share()))


def _share() -> int:
    """Processors that the control group leaves to this process, of either version; a part of one counts as one."""
    quota, period = "max", "100000"
    if line := _read("/sys/fs/cgroup/cpu.max"):
        quota, _, period = line.partition(" ")
    elif line := _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"):
        quota, period = line, _read("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
    try:
        share = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):
        return 1 << 20
    return math.ceil(share) if share > 0 else 1 << 20


def _numbers(path: str) -> set[int]:
    """`0-3,8` as numbers."""
    found: set[int] = set()
    for part in _read(path).split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found |= set(range(int(first), int(last or first) + 1))
    return found


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
