"""The one model the server has loaded: many calls use it, and one at a time may change it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ClosedError, LlamaCppError, ModelLoadError, OptionError
from ..files import SHARD

__all__ = ["ModelHost", "gguf_files"]

Loader = Callable[[str, Mapping[str, Any]], Any]
Progress = Callable[[str, float], bool]


def gguf_files(folder: Path) -> dict[str, Path]:
    """Every model below `folder` by its relative name; a split one by its first shard, projectors left out."""
    found = {}
    for file in sorted(folder.rglob("*.gguf"), key=lambda file: str(file).lower()):
        shard = SHARD.match(file.name)
        if file.name.startswith("mmproj") or (shard and int(shard["number"]) != 1):
            continue
        found[file.relative_to(folder).as_posix()] = file
    return found


def load(source: str, options: Mapping[str, Any]) -> Any:
    from ..config import LlamaCppConfig
    from ..modeling import LlamaCppForCausalLM

    return LlamaCppForCausalLM.from_pretrained(source, quantization_config=LlamaCppConfig(**options))


class ModelHost:
    """Holds the model, the name people know it by, and the stop events of the calls that run on it.

    A change of model is never kept waiting by a long answer: it stops all of them, waits until they are out (one
    decode), closes the old model and loads the new one. When that fails no model is left, and `error` says why.
    """

    def __init__(
        self, model_dir: Path, defaults: Mapping[str, Any] | None = None, loader: Loader = load, draft: str | None = None
    ) -> None:
        """`defaults`: options that hold for every model unless a load says otherwise. `draft`: the source of a model that
        drafts for every model (see `LlamaCppForCausalLM.assistant_model`)."""
        self.model_dir = model_dir
        self.defaults = dict(defaults or {})
        self.model: Any = None
        self.name = ""
        self.options: dict[str, Any] = {}
        self.error: LlamaCppError | None = None
        self.loading = ""
        self.changes = 0
        """Counts the models that were taken away: who remembers the number knows whether "the model" is still the same."""
        self._loader = loader
        self._draft_source = draft
        self._drafts: dict[str, Any] = {}
        self._draft_lock = threading.Lock()
        self._extra: dict[str, str] = {}
        self._running: list[threading.Event] = []  # one for each call: calls of a request share their event
        self._idle = threading.Condition()
        self._change = threading.Lock()

    def add(self, source: str) -> str:
        """Makes the model from the command line loadable, wherever it is; returns the name it goes by."""
        file = Path(source).expanduser()
        if not file.is_file():
            self._extra[source] = source  # a folder or a hub repository
            return source
        for name, known in self.sources().items():
            if Path(known).resolve() == file.resolve():
                return name
        self._extra[file.name] = str(file)
        return file.name

    def sources(self) -> dict[str, str]:
        """What may be loaded, by name: the files in the folder as it is now, and the model from the command line."""
        return {name: str(file) for name, file in gguf_files(self.model_dir).items()} | self._extra

    def load(
        self,
        name: str,
        options: Mapping[str, Any],
        draft: str = "",
        draft_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Loads the model called `name` in place of the present one; an option that is `None` is left to llama.cpp. `draft`:
        the name of a model that drafts for it, `draft_tokens` at a time. `progress` is told what is read, and how much of it
        (0 to 1); where it says `False` the load is given up.

        Raises `LlamaCppError`.
        """
        source = self.sources().get(name)
        if source is None:
            raise ModelLoadError(f"there is no model {name!r} in {self.model_dir}")
        draft_source = self._draft_source
        if draft:
            draft_source = self.sources().get(draft)
            if draft_source is None:
                raise ModelLoadError(f"there is no model {draft!r} in {self.model_dir}")
        if Path(source).is_file():
            check_gguf(Path(source))  # before the old model is given up
        options = {key: value for key, value in {**self.defaults, **options}.items() if value is not None}
        with self._change:
            self.loading = name
            try:
                self._unload()
                model = self._loader(source, options | _watched(progress, name))
                if draft_source is not None:
                    try:
                        model.assistant_model = self._load_draft(draft_source, options, progress)
                    except BaseException:
                        model.close()
                        raise
                    if draft_tokens is not None:
                        model.assistant_model.generation_config.num_assistant_tokens = draft_tokens
                self.model = model
                self.name, self.options, self.error = name, options, None
            except LlamaCppError as error:
                self.error = error
                raise
            finally:
                self.loading = ""

    def unload(self) -> None:
        with self._change:
            self._unload()

    def _unload(self) -> None:
        with self._idle:
            old, self.model, self.name = self.model, None, ""  # at once: nobody comes in while the others go out
            self.changes += old is not None
            for stop in self._running:
                stop.set()
            self._idle.wait_for(lambda: not self._running)
        with self._draft_lock:
            drafts, self._drafts = [*self._drafts.values()], {}
        for one in [old, *drafts, getattr(old, "assistant_model", None)]:
            if one is not None:
                one.close()

    def draft(self, name: str) -> Any:
        """The model called `name` as one that drafts for the present one, loaded when it is asked for the first time.

        Raises `OptionError` for a name that is not in the list, and `LlamaCppError`.
        """
        source = self.sources().get(name)
        if source is None:
            raise OptionError(f"assistant_model: there is no model {name!r} in {self.model_dir.name}", "assistant_model")
        with self._draft_lock:
            if name not in self._drafts:
                self._drafts.clear()  # one at a time; the old one is freed when no call uses it any more
                self._drafts[name] = self._load_draft(source, self.options)
            return self._drafts[name]

    def _load_draft(self, source: str, options: Mapping[str, Any], progress: Progress | None = None) -> Any:
        wanted = ("n_ctx", "n_threads", "n_threads_batch", "n_gpu_layers", "n_batch", "n_ubatch")
        kept = {name: options[name] for name in wanted if name in options}
        return self._loader(source, kept | _watched(progress, Path(source).name))

    @property
    def calls(self) -> int:
        """How many calls run on the model right now."""
        return len(self._running)

    @contextmanager
    def use(self, stop: threading.Event, change: int | None = None) -> Iterator[Any]:
        """The model for one call, which must end soon after `stop` is set. Raises `ModelLoadError` without one, and
        `ClosedError` where `changes` is no longer what it was."""
        with self._idle:
            if change is not None and change != self.changes:
                raise ClosedError("the model was unloaded while the call waited; make it again")
            if self.model is None:
                if self.loading:
                    raise ModelLoadError(f"{self.loading} is being loaded")
                raise self.error or ModelLoadError("no model is loaded: choose a file first")
            model = self.model
            self._running.append(stop)
        try:
            yield model
        finally:
            with self._idle:
                self._running.remove(stop)
                self._idle.notify_all()


def _watched(progress: Progress | None, name: str) -> dict[str, Any]:
    """llama.cpp's own callback, as an option of the load."""
    return {} if progress is None else {"progress_callback": lambda share, _: progress(name, float(share))}


def check_gguf(file: Path) -> None:
    """Looks at the first four bytes only: a truncated or unknown model is llama.cpp's to judge."""
    try:
        with file.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise ModelLoadError(f"{file.name} cannot be read: {error.strerror}", str(file)) from error
    if magic != b"GGUF":
        raise ModelLoadError(f"{file.name} is not a GGUF file (it starts with {magic!r})", str(file))
