"""`state_dir`: what host memory has no place for, one file for each part of a saved state.

A file is named by what it holds and written whole or not at all, so that several processes may share a folder, and a part
that was written once is not written again. The next process that loads the model finds the texts and goes on with them.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import StateError
from .saved import Saved
from .state_file import SavedRow, peek, read_state, write_state

__all__ = ["StateFolder"]

SUFFIX = ".state"


class StateFolder:
    """Files of one model, among which may be those of others. At most `max_bytes` of all of them are kept; what was used
    longest ago is deleted.

    Raises `StateError` where the folder cannot be made or written.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: dict[str, Any], max_bytes: int) -> None:
        self.path = Path(path)
        self.max_bytes = max_bytes
        self._fingerprint = fingerprint
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (OSError, ValueError) as error:
            raise StateError(f"state_dir={str(path)!r} cannot be used: {error}") from error
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise StateError(f"state_dir={str(path)!r} cannot be used: it is not readable and writable")

    def write(self, part: Saved, tokens: array[int], dropped: int) -> Path:
        """Keep `part.data`, the memory of positions of the text `tokens`; the file. Raises `StateError`."""
        assert part.data is not None
        text = tokens[: part.stop + dropped]
        model = self._model(part.partial)
        key = hashlib.sha256(json.dumps([model, part.start, part.stop, dropped], sort_keys=True).encode())
        key.update(text.tobytes())
        file = self.path / f"{key.hexdigest()[:40]}{SUFFIX}"
        if file.exists():
            os.utime(file)
            return file
        if len(part.data) > self.max_bytes:
            raise StateError(f"a state of {len(part.data)} bytes is larger than state_dir_bytes={self.max_bytes}")
        write_state(file, model, 0, [SavedRow(text, None, dropped, [(part.start, part.stop, part.data)])])
        self._trim(file)
        return file

    def read(self, file: Path) -> memoryview:
        """The bytes that were written. Raises `StateError` where they are gone or damaged."""
        try:
            _, rows = read_state(file, None)
            os.utime(file)
        except OSError as error:
            raise StateError(f"{file} cannot be read: {error}") from error
        return rows[0].parts[0][2]

    def texts(self) -> Iterator[tuple[array[int], Saved, list[Saved]]]:
        """What earlier processes left of this model: the tokens, their state, and checkpoints; used longest ago first."""
        parts: dict[bytes, tuple[array[int], Saved]] = {}
        checkpoints: list[tuple[array[int], Saved]] = []
        for file in self._files():
            found = self._peek(file)
            if found is None:
                continue
            tokens, part = found
            if part.partial:
                checkpoints.append(found)
            elif len(tokens) == part.stop:
                parts[tokens.tobytes()] = tokens, part
        for tokens, part in parts.values():
            if part.start and (before := parts.get(tokens[: part.start].tobytes())) is not None:
                part.base = before[1]
        bases = {id(part.base) for _, part in parts.values()}
        for tokens, part in parts.values():
            if id(part) not in bases and part.chain()[0].start == 0:
                mine = [c for text, c in checkpoints if text == tokens[: c.stop]]
                yield tokens, part, sorted(mine, key=lambda c: c.stop)

    def _peek(self, file: Path) -> tuple[array[int], Saved] | None:
        """Which part of which text a file holds; `None` for those of other models."""
        try:
            about, tokens = peek(file)
            _, _, _, shapes = about["rows"][0]
            start, stop, _ = shapes[0]
        except (StateError, OSError, ValueError, KeyError, IndexError, TypeError):
            return None
        for partial in (False, True):
            if about.get("model") == self._model(partial):
                return tokens, Saved(int(start), int(stop), None, None, file, partial)
        return None

    def _model(self, partial: bool) -> dict[str, Any]:
        return {**self._fingerprint, "part": "checkpoint" if partial else "state"}

    def _files(self) -> list[Path]:
        """All files of states, used longest ago first."""
        times: list[tuple[float, Path]] = []
        for file in self.path.glob(f"*{SUFFIX}"):
            try:
                times.append((file.stat().st_mtime, file))
            except OSError:  # another process deleted it
                continue
        return [file for _, file in sorted(times)]

    def _trim(self, but: Path) -> None:
        sizes = {}
        for file in self._files():
            try:
                sizes[file] = file.stat().st_size
            except OSError:
                continue
        total = sum(sizes.values())
        for file, size in sizes.items():
            if total <= self.max_bytes:
                return
            if file != but:
                file.unlink(missing_ok=True)
                total -= size
