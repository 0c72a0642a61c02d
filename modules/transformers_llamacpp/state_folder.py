"""`state_dir`: what host memory has no place for, one file for each part of a saved state.

A file is named by what it holds and written whole or not at all, so that several processes may share a folder, and a part
that was written once is not written again. The next process that loads the model finds the texts and goes on with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from .errors import StateError
from .saved import Saved
from .state_file import WRITING, SavedRow, peek, read_state, write_state

__all__ = ["StateFolder"]

SUFFIX = ".state"

LEFT_BEHIND = 3600
"""Seconds after which nobody is still writing a file."""


class StateFolder:
    """Files of one model, among which may be those of others. At most `max_bytes` of all of them are kept; what was used
    longest ago is deleted.

    Raises `StateError` where the folder cannot be made or written.
    """

    def __init__(self, path: str | os.PathLike[str], fingerprint: dict[str, Any], max_bytes: int) -> None:
        if not str(path):
            raise StateError("state_dir='' names no folder")
        self.path = Path(path).absolute()  # whoever changes the working directory does not mean this one
        self.max_bytes = max_bytes
        self._fingerprint = fingerprint
        try:
            self._make()
        except (OSError, ValueError) as error:
            raise StateError(f"state_dir={str(path)!r} cannot be used: {error}") from error
        if not os.access(self.path, os.R_OK | os.W_OK | os.X_OK):
            raise StateError(f"state_dir={str(path)!r} cannot be used: it is not readable and writable")
        self._sweep()
        self._trim(None)

    def _make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _sweep(self) -> None:
        """Delete what processes that were killed while writing left behind; not what one may be writing now."""
        for file in self.path.glob(f"{WRITING}*"):
            with suppress(OSError):
                if time.time() - file.stat().st_mtime > LEFT_BEHIND:
                    file.unlink()

    def write(self, part: Saved, tokens: array[int], dropped: int) -> Path:
        """Keep `part.data`, the memory of positions of the text `tokens`; the file. Raises `StateError`."""
        assert part.data is not None
        row = SavedRow(tokens[: part.stop + dropped], None, dropped, [(part.start, part.stop, part.data)])
        file = self.path / self._name(row, part.partial)
        with suppress(OSError):
            os.utime(file)
            return file
        with suppress(OSError):  # it may have been deleted meanwhile
            self._make()
        write_state(file, self._model(part.partial), 0, [row])
        self._trim(file)
        return file

    def read(self, part: Saved) -> memoryview:
        """The bytes that were written. Raises `StateError` where they are gone or damaged, or others are in their place; such
        a file is deleted, so that it can be written anew."""
        assert part.file is not None
        try:
            return self._read(part, part.file)
        except StateError:
            with suppress(OSError):
                part.file.unlink()
            raise

    def _read(self, part: Saved, file: Path) -> memoryview:
        _, rows = read_state(file, self._model(part.partial))
        if len(rows) != 1 or len(rows[0].parts) != 1 or self._name(rows[0], part.partial) != file.name:
            raise StateError(f"{file} holds another state than its name says")
        with suppress(OSError):
            os.utime(file)
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
            _, _, _, [[start, stop, _]] = about["rows"][0]
            for partial in (False, True):
                if about["model"] == self._model(partial):
                    return tokens, Saved(int(start), int(stop), None, None, file, partial)
        except (StateError, OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError, MemoryError):
            pass  # damaged, or of another kind; what is believed is checked as a whole when it is read
        return None

    def _model(self, partial: bool) -> dict[str, Any]:
        return {**self._fingerprint, "part": "checkpoint" if partial else "state"}

    def _files(self) -> list[Path]:
        """All files of states, used longest ago first."""
        times: list[tuple[float, Path]] = []
        for file in self.path.glob(f"*{SUFFIX}"):
            with suppress(OSError):  # another process may delete it
                if file.is_file():
                    times.append((file.stat().st_mtime, file))
        return [file for _, file in sorted(times)]

    def _trim(self, but: Path | None) -> None:
        sizes = {}
        for file in self._files():
            with suppress(OSError):
                sizes[file] = file.stat().st_size
        total = sum(sizes.values())
        for file, size in sizes.items():
            if total <= self.max_bytes:
                return
            if file != but:
                with suppress(OSError):
                    file.unlink()
                total -= size
