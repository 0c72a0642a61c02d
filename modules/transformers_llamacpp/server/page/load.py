"""Work that takes a while and that a page watches: loading a model, and fetching one from the hub."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import LlamaCppError, OptionError
from ...options import Option, option
from ..host import ModelHost
from .hub import Hub

__all__ = ["LOAD_GROUPS", "LOAD_OPTIONS", "Task", "fetch_task", "load_options", "load_task"]


def _group(title: str, names: str, folded: bool = True) -> tuple[str, tuple[Option, ...], bool]:
    return title, tuple(option(name) for name in names.split()), folded


LOAD_GROUPS = (
    _group("", "n_ctx n_gpu_layers n_threads", False),
    _group("Streaming context", "n_sink reuse_min_chunk"),
    _group("KV cells", "n_cells n_seq_max type_k type_v flash_attn swa_full"),
    _group("Reuse", "prefix_reuse host_cache_bytes"),
    _group("Weights and batches", "n_threads_batch n_batch n_ubatch use_mmap use_mlock"),
)
"""`(title, options, folded)`. What names a folder or a file is left to who starts the server."""

LOAD_OPTIONS = tuple(entry for _, entries, _ in LOAD_GROUPS for entry in entries)


def load_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` by option, `None` for those that are left to llama.cpp. Raises `OptionError`."""
    found: dict[str, Any] = {}
    for entry in LOAD_OPTIONS:
        value = values.get(entry.name)
        if entry.kind is int and isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None and entry.default is not None:
            value = entry.default
        if wrong := entry.check(value):
            raise OptionError(wrong, entry.name)
        found[entry.name] = value
    return found


class Task:
    """`work(self)` on a thread of its own. It tells `say(what, share)`, and ends soon after `stop` is set."""

    def __init__(self, work: Callable[[Task], str]) -> None:
        self.stop = threading.Event()
        self.what, self.share = "", 0.0
        self.error: BaseException | None = None
        self.result = ""
        self._began = time.monotonic()
        self._ended: float | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def say(self, what: str, share: float) -> bool:
        """Whether to go on."""
        self.what, self.share = what, share
        return not self.stop.is_set()

    @property
    def seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._began

    def running(self, wait: float) -> bool:
        """Whether it still runs, `wait` seconds later at the latest."""
        self._thread.join(wait)
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.result = self._work(self)
        except BaseException as error:  # it belongs to the page, not to this thread
            self.error = error
        finally:
            self._ended = time.monotonic()


def load_task(host: ModelHost, name: str, values: Mapping[str, Any], draft: str, draft_tokens: int) -> Task:
    """Loads the model `name` in place of the present one."""

    def work(task: Task) -> str:
        if not name:
            raise OptionError("choose a model first", "model")
        try:
            host.load(name, load_options(values), draft, draft_tokens or None, task.say)
        except LlamaCppError:
            if task.stop.is_set():
                raise LlamaCppError("the load was stopped: no model is loaded now") from None
            raise
        return name

    return Task(work)


def fetch_task(hub: Hub, host: ModelHost, repo: str, file: str) -> Task:
    """Fetches `file` of `repo` into the model folder; its result is the name it goes by there."""

    def work(task: Task) -> str:
        if not repo.strip() or not file:
            raise OptionError("name a repository, list its files and choose one", "repo")

        def progress(done: int, total: int) -> None:
            task.say(f"{done / 2**20:,.0f} of {total / 2**20:,.0f} MiB", done / total if total else 0.0)

        path = hub.fetch(repo, file, host.model_dir, progress, task.stop)
        return path.relative_to(host.model_dir).as_posix()

    return Task(work)
