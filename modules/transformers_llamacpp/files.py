"""From what a user names — a file, a folder, a shard, a hub repository — to the GGUF file llama.cpp opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .errors import ModelLoadError
from .gguf_reader import SHARD, shard_names

__all__ = ["resolve_gguf"]

HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "subfolder", "proxies")


def resolve_gguf(path_or_repo: str | Path, gguf_file: str | None = None, **hub_kwargs: Any) -> Path:
    """The GGUF file to open; of a split model the first shard, after checking that all are there.

    `path_or_repo` is a `.gguf` file, a folder with one (vision projectors, `mmproj*.gguf`, are not counted), any shard of a
    split model, or a hub repository id. `gguf_file` chooses among several. `hub_kwargs` are those of
    `huggingface_hub.hf_hub_download`; the hub's cache and `HF_HUB_OFFLINE` are respected.

    Raises `ModelLoadError` with the candidates where the choice is not clear.
    """
    unknown = hub_kwargs.keys() - set(HUB_ARGUMENTS)
    if unknown:
        raise TypeError(f"unknown arguments {sorted(unknown)}; hub arguments are {', '.join(HUB_ARGUMENTS)}")
    name = str(path_or_repo)
    path = Path(path_or_repo).expanduser()
    try:
        is_file, is_dir = path.is_file(), path.is_dir()
    except (OSError, ValueError) as error:  # too long, a NUL in it, or not ours to look at
        raise ModelLoadError(f"{name[:80]!r} cannot be opened: {getattr(error, 'strerror', None) or error}", name) from error
    if is_file:
        return _first_shard(path)
    if is_dir:
        return _in_folder(path, gguf_file)
    if name.endswith(".gguf") or name.count("/") > 1 or "\\" in name or name.startswith((".", "/", "~")) or not name:
        raise ModelLoadError(f"{name!r} is neither a file nor a folder here, and no hub repository id", name)
    return _from_hub(name, gguf_file, {k: v for k, v in hub_kwargs.items() if v is not None})


def _in_folder(folder: Path, gguf_file: str | None) -> Path:
    if gguf_file is not None:
        path = folder / gguf_file
        if not path.is_file():
            raise ModelLoadError(f"{folder} has no file {gguf_file!r}; it has {_names(folder)}", str(path))
        return _first_shard(path)
    candidates = _candidates(sorted(str(p.relative_to(folder)) for p in folder.glob("*.gguf")))
    if len(candidates) != 1:
        what = "no GGUF file" if not candidates else f"{len(candidates)} GGUF files, choose one with gguf_file="
        raise ModelLoadError(f"{folder} has {what}: {', '.join(candidates) or _names(folder)}", str(folder))
    return _first_shard(folder / candidates[0])


def _names(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return (", ".join(names[:10]) + (" …" if len(names) > 10 else "")) or "no files"


def _candidates(names: list[str]) -> list[str]:
    """Models among the file names: no projectors, no saved tokenizers, one entry for a split model."""
    models = []
    for name in names:
        base = name.rsplit("/", 1)[-1]
        shard = SHARD.match(base)
        if base == "tokenizer.gguf":  # what LlamaCppTokenizer.save_pretrained writes: a vocabulary without weights
            continue
        if name.endswith(".gguf") and "mmproj" not in base.lower() and (not shard or int(shard["number"]) == 1):
            models.append(name)
    return models


def _first_shard(path: Path) -> Path:
    shards = [path.parent / name for name in shard_names(path.name)]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ModelLoadError(
            f"{path.name} is one of {len(shards)} shards; {', '.join(missing[:3])} "
            f"{'is' if len(missing) == 1 else 'are'} missing in {path.parent}",
            str(path),
        )
    return shards[0]


def _from_hub(repo: str, gguf_file: str | None, hub: dict[str, Any]) -> Path:
    import huggingface_hub
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        name = gguf_file or _choose(repo, hub)
        paths = [Path(huggingface_hub.hf_hub_download(repo, shard, **hub)) for shard in shard_names(name)]
    except ModelLoadError:
        raise
    except HFValidationError as error:
        raise ModelLoadError(f"{repo!r} is neither a file nor a folder here, and no hub repository id: {error}") from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{gguf_file or 'a GGUF file'} of {repo} is not in the local hub cache, and the hub cannot be reached (offline "
            "mode, or no network)",
            repo,
        ) from error
    except Exception as error:  # the hub's client lets through what its HTTP library raises, which differs by release
        raise ModelLoadError(
            f"{repo!r} is no file or folder here, and the hub does not give {gguf_file or 'its files'} either: "
            f"{type(error).__name__}: {error}",
            repo,
        ) from error
    return paths[0]


def _choose(repo: str, hub: dict[str, Any]) -> str:
    """The one model in the repository: asked of the hub, or of the local cache where the hub is not to be asked."""
    import huggingface_hub
    from huggingface_hub import constants

    if hub.get("local_files_only") or constants.HF_HUB_OFFLINE:
        keep = {k: v for k, v in hub.items() if k in ("revision", "cache_dir", "token")}
        folder = Path(huggingface_hub.snapshot_download(repo, local_files_only=True, allow_patterns="*.gguf", **keep))
        names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf"))
    else:
        names = huggingface_hub.list_repo_files(repo, revision=hub.get("revision"), token=hub.get("token"))
    candidates = _candidates(names)
    if len(candidates) != 1:
        what = "no GGUF file" if not candidates else f"{len(candidates)} GGUF files, choose one with gguf_file="
        raise ModelLoadError(f"{repo} has {what}: {', '.join(candidates)}", repo)
    return candidates[0]
