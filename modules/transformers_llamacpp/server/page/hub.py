"""GGUF files from the Hugging Face hub into the model folder, with progress."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ...errors import LlamaCppError, ModelLoadError
from ...files import SHARD
from ...gguf_reader import shard_names

__all__ = ["Hub", "RemoteFile"]

Progress = Callable[[int, int], None]

TIMEOUT = 15
"""Seconds to wait for the hub's answer."""

CURE = "check the network; or copy a GGUF file into the model folder yourself"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A model of a repository: `name` of its file, of a split one the first shard; `size` in bytes, of all shards."""

    name: str
    size: int


class Hub:
    """`endpoint`: another server than huggingface.co, or that of `HF_ENDPOINT`."""

    def __init__(self, endpoint: str | None = None) -> None:
        self._endpoint = endpoint

    def files(self, repo: str) -> list[RemoteFile]:
        """The models in a repository, the smallest first. Raises `ModelLoadError`, also where the hub cannot be reached."""
        import huggingface_hub

        repo = repo.strip().removeprefix("https://huggingface.co/").strip("/")
        try:
            info = huggingface_hub.HfApi(endpoint=self._endpoint).model_info(repo, files_metadata=True, timeout=TIMEOUT)
        except Exception as error:  # of the hub's client, or what its HTTP library lets through
            raise _told(error, repo) from error
        sizes = {one.rfilename: one.size or 0 for one in info.siblings or [] if one.rfilename.endswith(".gguf")}
        found = []
        for name in sizes:
            shard = SHARD.match(PurePosixPath(name).name)
            if "mmproj" in name.lower() or (shard and int(shard["number"]) != 1):
                continue
            found.append(RemoteFile(name, sum(sizes.get(one, 0) for one in shard_names(name))))
        if not found:
            raise ModelLoadError(f"{repo} has no GGUF file: look for a repository with GGUF in its name", repo)
        return sorted(found, key=lambda file: (file.size, file.name))

    def fetch(self, repo: str, name: str, folder: Path, progress: Progress, stop: threading.Event) -> Path:
        """Loads the file, and all shards of a split model, into `folder/OWNER/NAME/`; what is there already is not loaded
        again. `progress(bytes so far, bytes in all)`.

        Raises `ModelLoadError`, also when `stop` is set.
        """
        import huggingface_hub

        repo = repo.strip().removeprefix("https://huggingface.co/").strip("/")
        known = {file.name: file.size for file in self.files(repo)}
        if name not in known:
            raise ModelLoadError(f"{repo} has no model {name!r}", repo)
        target = folder / PurePosixPath(repo)
        if target.resolve() != folder.resolve() and folder.resolve() not in target.resolve().parents:
            raise ModelLoadError(f"{repo!r} is no name of a repository", repo)
        _check_room(folder, known[name])
        counted = _Counted(known[name], progress, stop)
        try:
            paths = [
                huggingface_hub.hf_hub_download(
                    repo, shard, local_dir=target, endpoint=self._endpoint, tqdm_class=counted.bar_class()
                )
                for shard in shard_names(name)
            ]
        except Exception as error:
            if stop.is_set():
                raise ModelLoadError("the download was stopped", repo) from error
            raise _told(error, repo) from error
        progress(known[name], known[name])
        return Path(paths[0])


class _StoppedError(Exception):
    """Out of the client's loop."""


class _Counted:
    """Adds up what the bars of all shards are told."""

    def __init__(self, total: int, progress: Progress, stop: threading.Event) -> None:
        self.total, self.done = total, 0
        self._progress, self._stop = progress, stop

    def add(self, number: int) -> None:
        if self._stop.is_set():
            raise _StoppedError
        self.done += number
        self._progress(min(self.done, self.total), self.total)

    def bar_class(self) -> Any:
        from huggingface_hub.utils import tqdm

        counted = self

        class Bar(tqdm):  # type: ignore[misc, unused-ignore]
            """Draws nothing: tells what it is told."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**kwargs, "disable": True})
                counted.add(int(kwargs.get("initial") or 0))  # what an earlier try has loaded

            def update(self, n: float | None = 1) -> None:
                counted.add(int(n or 0))

        return Bar


def _check_room(folder: Path, size: int) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise ModelLoadError(f"the model folder cannot be written: {error.strerror}") from error
    if size > free:
        raise ModelLoadError(f"the file has {size / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free in the model folder")


def _told(error: Exception, repo: str) -> LlamaCppError:
    """A sentence for what the hub's client raises, whose own run over many lines."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return ModelLoadError(f"{repo!r} is no name of a repository: it looks like OWNER/NAME", repo)
    if isinstance(error, errors.GatedRepoError):
        return ModelLoadError(f"{repo} is gated: accept its terms on the hub and set HF_TOKEN", repo)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return ModelLoadError(f"there is no repository {repo} on the hub (or it is private: set HF_TOKEN)", repo)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return ModelLoadError("the hub is not asked, because HF_HUB_OFFLINE is set: unset it and start again", repo)
    if status is not None:
        return ModelLoadError(f"the hub answers with an error {status} for {repo}: try again later", repo)
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        return ModelLoadError(f"the file cannot be written: {error.strerror}", repo)
    return ModelLoadError(f"the hub cannot be reached ({type(error).__name__}): {CURE}", repo)
