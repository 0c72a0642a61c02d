"""`user_data/llamacpp_hf/installed.json`: what webui-install put where."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path, PureWindowsPath

from .disk import read_json, write_json
from .places import Webui

__all__ = ["Record"]


@dataclass(frozen=True)
class Record:
    """`files` and the folders `made` for them, by `Webui.key`. Not `complete`: the run was interrupted, and `files` are those
    from before and those that were to come."""

    version: str = ""
    how: str = "copy"
    complete: bool = False
    files: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, webui: Webui) -> Record:
        """An empty one where there is none or a damaged one: what is ours is known without it."""
        found = read_json(cls.file(webui))
        lists = {name: found.get(name, []) for name in ("files", "made")}
        for keys in lists.values():
            if not isinstance(keys, list) or not all(isinstance(key, str) and _inside(key) for key in keys):
                return cls()
        return cls(str(found.get("version", "")), str(found.get("how", "")), bool(found.get("complete")), **lists)

    def write(self, webui: Webui) -> None:
        write_json(self.file(webui), asdict(self))

    @staticmethod
    def file(webui: Webui) -> Path:
        return webui.own / "installed.json"


def _inside(key: str) -> bool:
    """It names something in the webui or in its user data."""
    name = key.partition(":")[2]
    return bool(name) and ".." not in name and not Path(name).is_absolute() and not PureWindowsPath(name).drive
