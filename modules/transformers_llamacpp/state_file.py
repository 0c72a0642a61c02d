"""The file of a saved cache: what its rows hold, and the model they belong to.

    8 bytes   "LCPCACHE"
    2 x u32   format version, length of the header (little endian)
    header    JSON: the model's fingerprint, columns, for each row how many tokens, bytes of mask and of state; sha256 of
              the body
    body      for each row: tokens (int32), mask (one byte per column, if any), llama.cpp's state of the sequence

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

__all__ = ["SavedRow", "read_state", "write_state"]

MAGIC, VERSION = b"LCPCACHE", 1
START = struct.Struct("<8sII")


@dataclass(frozen=True, slots=True)
class SavedRow:
    """`tokens` with -1 for positions given by embeddings; `mask` one byte per column, `None` where nothing is masked."""

    tokens: array[int]
    mask: bytes | None
    state: bytes

    def parts(self) -> Iterator[bytes]:
        tokens = self.tokens
        if sys.byteorder == "big":
            tokens = array("i", tokens)
            tokens.byteswap()
        yield tokens.tobytes()
        yield self.mask or b""
        yield self.state


def write_state(path: Path, model: dict[str, Any], columns: int, rows: list[SavedRow]) -> None:
    """Raises `StateError` where the file cannot be written; what was there before is then untouched."""
    body = hashlib.sha256()
    for row in rows:
        for part in row.parts():
            body.update(part)
    header = json.dumps({
        "model": model, "columns": columns, "sha256": body.hexdigest(),
        "rows": [[len(row.tokens), None if row.mask is None else len(row.mask), len(row.state)] for row in rows],
    }).encode()  # fmt: skip
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(START.pack(MAGIC, VERSION, len(header)))
            file.write(header)
            for row in rows:
                file.writelines(row.parts())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise StateError(f"the cache cannot be saved to {path}: {error}") from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def read_state(path: Path, model: dict[str, Any]) -> tuple[int, list[SavedRow]]:
    """Columns and rows. Raises `StateError` for a file of another kind, version or model, and for a damaged one."""
    try:
        data = memoryview(path.read_bytes())
    except OSError as error:
        raise StateError(f"no cache can be read from {path}: {error}") from error
    if len(data) < START.size or data[: len(MAGIC)] != MAGIC:
        raise StateError(f"{path} is no saved cache; cache.save(path) makes one")
    _, version, length = START.unpack_from(data)
    if version != VERSION:
        raise StateError(f"{path} has format {version}, and this version of the package reads {VERSION}: save it again")
    header, body = data[START.size : START.size + length], data[START.size + length :]
    try:
        about = json.loads(bytes(header))
        saved, columns, shapes, digest = about["model"], about["columns"], about["rows"], about["sha256"]
        sizes = [(4 * tokens, mask or 0, state) for tokens, mask, state in shapes]
        expected = sum(map(sum, sizes))
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "its header cannot be read") from error
    if different := [name for name in {*saved, *model} if saved.get(name) != model.get(name)]:
        raise StateError(
            f"{path} was saved with another model: "
            + "; ".join(f"{name} was {saved.get(name)!r} and is {model.get(name)!r}" for name in sorted(different))
        )
    if len(body) != expected:
        raise _damaged(path, f"it has {len(body)} of {expected} bytes behind its header")
    if hashlib.sha256(body).hexdigest() != digest:
        raise _damaged(path, "its checksum is another one")
    rows, at = [], 0
    for (tokens, mask, state), shape in zip(sizes, shapes, strict=True):
        numbers = array("i")
        numbers.frombytes(body[at : at + tokens])
        if sys.byteorder == "big":
            numbers.byteswap()
        masked = None if shape[1] is None else bytes(body[at + tokens : at + tokens + mask])
        rows.append(SavedRow(numbers, masked, bytes(body[at + tokens + mask : at + tokens + mask + state])))
        at += tokens + mask + state
    return columns, rows


def _damaged(path: Path, how: str) -> StateError:
    return StateError(f"{path} is damaged, {how}: save the cache again with cache.save(path)")
