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
from contextlib import suppress
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
        row = SavedRow(tokens[: part.stop + dropped], None, dropped, [(part.start, part.stop, part.data)])
        file = self.path / self._name(row, part.partial)
        with suppress(OSError):
            os.utime(file)
            return file
        write_state(file, self._model(part.partial), 0, [row])
        self._trim(file)
        return file

    def read(self, part: Saved) -> memoryview:
        """The bytes that were written. Raises `StateError` where they are gone or damaged, or others are in their place."""
        assert part.file is not None
        _, rows = read_state(part.file, self._model(part.partial))
        if len(rows) != 1 or len(rows[0].parts) != 1 or self._name(rows[0], part.partial) != part.file.name:
            raise StateError(f"{part.file} holds another state than its name says")
        with suppress(OSError):
            os.utime(part.file)
        return rows[0].parts[0][2]

    def _name(self, row: SavedRow, partial: bool) -> str:
        """It says what is in the file: the tokens make the state, but where some of them are unknown or were dropped, so that
        only the bytes themselves tell."""
        [(start, stop, data)] = row.parts
        key = hashlib.sha256(json.dumps([self._model(partial), start, stop, row.dropped], sort_keys=True).encode())
        key.update(row.tokens.tobytes())
        if row.dropped or len(row.tokens) < stop:
            key.update(data)
        return f"{key.hexdigest()[:40]}{SUFFIX}"

    def texts(self) -> Iterator[tuple[array[int], Saved, list[Saved]]]:
        """What earlier processes left of this model: the tokens, their state, and checkpoints; used longest ago first."""
        parts: dict[bytes, list[tuple[array[int], Saved]]] = {}
        checkpoints: list[tuple[array[int], Saved]] = []
        for file in self._files():
            found = self._peek(file)
            if found is None:
                continue
            tokens, part = found
            if part.partial:
                checkpoints.append(found)
            elif len(tokens) == part.stop:
                parts.setdefault(tokens.tobytes(), []).append(found)
        whole: dict[bytes, tuple[array[int], Saved]] = {}
        for key in sorted(parts, key=len):
            for tokens, part in parts[key]:
                before = whole.get(tokens[: part.start].tobytes())
                if part.start == 0 or before is not None:
                    part.base = None if before is None else before[1]
                    whole[key] = tokens, part
        bases = {id(part.base) for _, part in whole.values()}
        for key in parts:  # used longest ago first
            if key in whole and id(whole[key][1]) not in bases:
                tokens, part = whole[key]
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
                with suppress(OSError):
                    file.unlink()
                total -= size
