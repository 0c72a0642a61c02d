"""The file of a saved cache: what its rows hold, and the model they belong to.

    8 bytes   "LCPCACHE"
    2 x u32   format version, length of the header (little endian)
    header    JSON: the model's fingerprint, columns, and for each row how many tokens, how many of them were dropped, bytes
              of mask, and first and last position and bytes of each part of the state
    body      for each row: tokens (int32), mask (one byte per column, if any), llama.cpp's state of the sequence in parts
    32 bytes  sha256 of everything before

Its size grows with the tokens only. A file is written beside its place and then moved there, so that there is a whole
one or none; it is believed only as a whole, because llama.cpp does not survive every damaged state.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import StateError

__all__ = ["WRITING", "SavedRow", "peek", "read_state", "write_state"]

MAGIC, VERSION = b"LCPCACHE", 2
WRITING = ".saving."
"""What the name of a file that is being written begins with."""

START = struct.Struct("<8sII")
DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, slots=True)
class SavedRow:
    """`tokens` with -1 for positions given by embeddings; `mask` one byte per column, `None` where nothing is masked;
    `dropped` tokens have left the memory (see `Sequence`); `parts` of its state, each with its positions `[start, stop)`."""

    tokens: array[int]
    mask: bytes | None
    dropped: int
    parts: list[tuple[int, int, memoryview]]

    def shape(self) -> list[Any]:
        parts = [[start, stop, len(data)] for start, stop, data in self.parts]
        return [len(self.tokens), None if self.mask is None else len(self.mask), self.dropped, parts]

    def body(self) -> Iterator[bytes | memoryview]:
        tokens = self.tokens
        if sys.byteorder == "big":
            tokens = array("i", tokens)
            tokens.byteswap()
        yield tokens.tobytes()
        yield self.mask or b""
        for *_, data in self.parts:
            yield data


def write_state(path: Path, model: dict[str, Any], columns: int, rows: list[SavedRow]) -> None:
    """Raises `StateError` where the file cannot be written; what was there before is then untouched."""
    header = json.dumps({"model": model, "columns": columns, "rows": [row.shape() for row in rows]}).encode()
    temporary = ""
    try:
        path = Path(os.path.realpath(path))  # what a link points to is replaced, not the link
        if path.exists() and not path.is_file():
            raise StateError(f"the cache cannot be saved to {path}: that is no file; name one, or a new one")
        digest = hashlib.sha256()
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=WRITING, delete=False) as file:
            temporary = file.name
            for part in _parts(header, rows):
                digest.update(part)
                file.write(part)
            file.write(digest.digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        raise StateError(f"the cache cannot be saved to {path}: {error}") from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def _parts(header: bytes, rows: list[SavedRow]) -> Iterator[bytes | memoryview]:
    yield START.pack(MAGIC, VERSION, len(header))
    yield header
    for row in rows:
        yield from row.body()


def read_state(
    path: Path, model: dict[str, Any], known: dict[str, Any] | None = None
) -> tuple[int, list[SavedRow]]:
    """Columns and rows. Raises `StateError` for a file of another kind, version or model, and for a damaged one. `known`: what
    the model is beyond that, for files that depend on it."""
    try:
        if not path.is_file():
            raise StateError(f"no cache can be read from {path}: there is no such file")
        data = memoryview(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StateError(f"no cache can be read from {path}: {error}") from error
    length = _header_length(path, data[: START.size])
    if hashlib.sha256(data[:-DIGEST]).digest() != data[-DIGEST:]:
        raise StateError(f"{path} is damaged or was cut off: its checksum is another one. Save the cache again")
    about = json.loads(bytes(data[START.size : START.size + length]))
    wanted = about["model"]
    known = model | {name: value for name, value in (known or {}).items() if name in wanted}
    if different := [name for name in {*wanted, *known} if wanted.get(name) != known.get(name)]:
        raise StateError(
            f"{path} was saved with another model, or another setting: "
            + "; ".join(f"{name} was {wanted.get(name)!r} and is {known.get(name)!r}" for name in sorted(different))
        )
    body, rows, at = data[START.size + length : -DIGEST], [], 0
    for n_tokens, n_mask, dropped, shapes in about["rows"]:
        tokens = array("i")
        tokens.frombytes(body[at : at + 4 * n_tokens])
        if sys.byteorder == "big":
            tokens.byteswap()
        at += 4 * n_tokens
        mask = None if n_mask is None else bytes(body[at : at + n_mask])
        at += n_mask or 0
        parts = []
        for start, stop, size in shapes:
            parts.append((start, stop, body[at : at + size]))
            at += size
        rows.append(SavedRow(tokens, mask, dropped, parts))
    return about["columns"], rows


def peek(path: Path) -> tuple[dict[str, Any], array[int]]:
    """The header and the tokens of the first row, unchecked. Raises `StateError`, `OSError`, `ValueError`."""
    with path.open("rb") as file:
        length = _header_length(path, file.read(START.size))
        about = json.loads(file.read(length))
        tokens = array("i")
        tokens.frombytes(file.read(min(4 * about["rows"][0][0], path.stat().st_size)))
    if sys.byteorder == "big":
        tokens.byteswap()
    return about, tokens


def _header_length(path: Path, start: bytes | memoryview) -> int:
    if len(start) < START.size or start[: len(MAGIC)] != MAGIC:
        raise StateError(f"{path} is no saved cache; cache.save(path) makes one")
    _, version, length = START.unpack(start)
    if version != VERSION:
        raise StateError(f"{path} has format {version}, and this version of the package reads {VERSION}: save it again")
    return int(length)
