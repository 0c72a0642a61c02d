"""What a GGUF file holds, as far as llama.cpp's API does not show it: keys, and where the tensors are.

Written for speed: `gguf.GGUFReader` takes 13 seconds for a vocabulary of 262,144 tokens, because it decodes every key.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ModelLoadError, TokenizerError

__all__ = [
    "SHARD", "GgufReader", "TensorPlace", "check_tokens", "context_length", "read_values", "shard_names", "tensor_places",
]  # fmt: skip

SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})\.gguf$")

_UINT32, _STRING, _ARRAY = 4, 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each scalar type of GGUF."""
_LAYOUTS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """`shape` as numpy has it, the longest stride first; `kind` is a `ggml_type` number, `offset` in bytes."""

    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufReader:
    """Walks over the key-value section of a little-endian GGUF (version 2 or 3) without decoding it."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        self.name = name
        self.position = 24
        if data[:4] != b"GGUF":
            raise TokenizerError(f"{name} is not a GGUF file")
        self.version, self.n_tensors, self.n_pairs = struct.unpack_from("<IQQ", data, 4)
        if self.version not in (2, 3):
            raise TokenizerError(f"{name} is GGUF version {self.version} (or big-endian); 2 and 3 can be copied")

    def _number(self, layout: str) -> int:
        try:
            (value,) = struct.unpack_from(layout, self.data, self.position)
        except struct.error as error:
            raise TokenizerError(f"{self.name} is cut off at byte {self.position}") from error
        self.position += struct.calcsize(layout)
        return int(value)

    def string(self) -> bytes:
        length = self._number("<Q")
        start = self.position
        self.position += length
        return self.data[start : self.position]

    def skip_value(self) -> None:
        kind = self._number("<I")
        if kind == _STRING:
            self.string()
        elif kind == _ARRAY:
            self._skip_array()
        else:
            self.position += self._size(kind)

    def strings(self) -> list[bytes]:
        """The array of strings at this place; an empty list for a value of another type."""
        if self._number("<I") != _ARRAY or self._number("<I") != _STRING:
            return []
        unpack, data, position = struct.Struct("<Q").unpack_from, self.data, self.position + 8
        found = []
        try:
            for _ in range(self._number("<Q")):
                (length,) = unpack(data, position)
                found.append(data[position + 8 : position + 8 + length])
                position += 8 + length
        except struct.error as error:
            raise TokenizerError(f"{self.name} is cut off at byte {position}") from error
        return found

    def number(self) -> int | None:
        """The unsigned 32-bit number at this place, or `None` for a value of another type, which is skipped."""
        if self._number("<I") == _UINT32:
            return self._number("<I")
        self.position -= 4
        self.skip_value()
        return None

    def value(self) -> bool | int | float | str | list[bool | int | float] | None:
        """The value at this place; of an array of strings their number, which is all that is wanted of a vocabulary here, and
        `None` for an array of arrays."""
        kind = self._number("<I")
        if kind == _STRING:
            return self.string().decode("utf-8", "replace")
        if kind != _ARRAY:
            return self._scalar(kind)
        (inner,) = struct.unpack_from("<I", self.data, self.position)
        if inner in (_STRING, _ARRAY):
            (count,) = struct.unpack_from("<Q", self.data, self.position + 4)
            self._skip_array()
            return int(count) if inner == _STRING else None
        inner, count = self._number("<I"), self._number("<Q")
        if count * self._size(inner) > len(self.data) - self.position:
            raise TokenizerError(f"{self.name} is cut off at byte {self.position}")
        return [self._scalar(inner) for _ in range(count)]

    def _scalar(self, kind: int) -> bool | int | float:
        if kind not in _LAYOUTS:
            raise TokenizerError(f"{self.name}: unknown value type {kind} at byte {self.position}")
        try:
            (value,) = struct.unpack_from(_LAYOUTS[kind], self.data, self.position)
        except struct.error as error:
            raise TokenizerError(f"{self.name} is cut off at byte {self.position}") from error
        self.position += _SIZES[kind]
        found: bool | int | float = value
        return found

    def tensor(self) -> tuple[str, TensorPlace]:
        """Name and place of the next tensor, the offset counted from the start of the data."""
        name = self.string().decode("utf-8", "replace")
        shape = [self._number("<Q") for _ in range(self._number("<I"))]
        return name, TensorPlace(tuple(reversed(shape)), self._number("<I"), self._number("<Q"))

    def _skip_array(self) -> None:
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _ARRAY:
            for _ in range(count):
                self._skip_array()
        elif kind == _STRING:
            unpack, data, position = struct.Struct("<Q").unpack_from, self.data, self.position
            try:
                for _ in range(count):
                    position += 8 + unpack(data, position)[0]
            except struct.error as error:
                raise TokenizerError(f"{self.name} is cut off at byte {position}") from error
            self.position = position
        else:
            self.position += count * self._size(kind)

    def _size(self, kind: int) -> int:
        if kind not in _SIZES:
            raise TokenizerError(f"{self.name}: unknown value type {kind} at byte {self.position}")
        return _SIZES[kind]


def check_tokens(path: Path) -> None:
    """Raise `ModelLoadError` where the vocabulary names a token twice: llama.cpp asserts that it does not, which ends the
    process. Whatever else is wrong with the file llama.cpp says itself, so a damaged one passes here.
    """
    try:
        tokens = _tokens(path)
    except (TokenizerError, ValueError, OverflowError, struct.error, IndexError):
        return
    if len(set(tokens)) == len(tokens):
        return
    first: dict[bytes, int] = {}
    for index, token in enumerate(tokens):
        if token and first.setdefault(token, index) != index:  # empty names are fine: llama.cpp numbers them
            raise ModelLoadError(
                f"{path} names the token {token.decode('utf-8', 'replace')!r} twice, as {first[token]} and {index}: the "
                "file is damaged or was converted wrongly",
                str(path),
            )


def _tokens(path: Path) -> list[bytes]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = GgufReader(data, str(path))
        for _ in range(reader.n_pairs):
            if reader.string() == b"tokenizer.ggml.tokens":
                return reader.strings()
            reader.skip_value()
            if reader.position > len(data):
                break
    return []


def context_length(path: Path) -> int:
    """The tokens the model was trained for; 0 where the file does not say, or is damaged, which llama.cpp tells better."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = GgufReader(data, str(path))
            for _ in range(reader.n_pairs):
                if reader.string().endswith(b".context_length"):
                    return reader.number() or 0
                reader.skip_value()
    except (TokenizerError, ValueError, OverflowError, struct.error, IndexError):
        pass
    return 0


def shard_names(name: str) -> list[str]:
    """All shards of the split model that the file belongs to, or the file alone. `/` separates folders."""
    folder, _, base = name.rpartition("/")
    shard = SHARD.match(base)
    if not shard:
        return [name]
    prefix = f"{folder}/" if folder else ""
    total = int(shard["total"])
    return [f"{prefix}{shard['stem']}-{number:05d}-of-{total:05d}.gguf" for number in range(1, total + 1)]


def read_values(path: Path) -> tuple[dict[str, Any], int]:
    """What the file says about itself by key, of lists of strings their lengths only; and how many numbers its tensors have.
    Takes milliseconds. Raises `ModelLoadError` for a damaged file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = GgufReader(data, path.name)
            values = {reader.string().decode("utf-8", "replace"): reader.value() for _ in range(reader.n_pairs)}
            tensors = [reader.tensor()[1].shape for _ in range(reader.n_tensors)]
    except (TokenizerError, ValueError, OverflowError, struct.error, IndexError, MemoryError) as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error}", str(path)) from error
    return values, sum(math.prod(shape) for shape in tensors)


def tensor_places(path: Path) -> dict[str, TensorPlace]:
    """The tensors of one file by name, offsets from the start of the file. Raises `ModelLoadError` for a damaged one."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader, alignment = GgufReader(data, str(path)), 32  # GGUF_DEFAULT_ALIGNMENT
            for _ in range(reader.n_pairs):
                if reader.string() == b"general.alignment":
                    alignment = reader.number() or alignment
                else:
                    reader.skip_value()
            found = dict(reader.tensor() for _ in range(reader.n_tensors))
            start = -(-reader.position // alignment) * alignment
    except (TokenizerError, OverflowError, struct.error, IndexError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}", str(path)) from error
    return {name: TensorPlace(place.shape, place.kind, start + place.offset) for name, place in found.items()}
