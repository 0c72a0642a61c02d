"""Reading and writing a tokenizer's folder: `tokenizer.gguf` (vocabulary, no weights) and `tokenizer_config.json`."""

from __future__ import annotations

import json
import mmap
import os
import struct
import uuid
from pathlib import Path
from typing import Any

from .errors import TokenizerError
from .gguf_reader import GgufReader

__all__ = ["CONFIG_FILE", "VOCAB_FILE", "copy_vocabulary", "read_config", "rewrite_config"]

VOCAB_FILE = "tokenizer.gguf"
CONFIG_FILE = "tokenizer_config.json"
CLASS_NAME = "LlamaCppTokenizer"

def copy_vocabulary(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Write the key-value section of the GGUF `source` to `target`, with no tensors. llama.cpp loads such a file with
    `vocab_only`. Keys about the parts of a split model (`split.*`) are left out. `target` may be `source`.

    Raises:
        TokenizerError: `source` is gone, cut off, or not a GGUF of version 2 or 3.
    """
    source, target = Path(source), Path(target)
    if not source.is_file():
        raise TokenizerError(f"the GGUF file this tokenizer was made from is gone: {source}")
    part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
    try:
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            pairs = _pairs(data, str(source))
            with part.open("wb") as out:
                out.write(struct.pack("<4sIQQ", b"GGUF", 3, 0, len(pairs)))
                for start, end in pairs:
                    out.write(data[start:end])
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _pairs(data: mmap.mmap, name: str) -> list[tuple[int, int]]:
    reader = GgufReader(data, name)
    pairs = []
    for _ in range(reader.n_pairs):
        start = reader.position
        key = reader.string()
        reader.skip_value()
        if reader.position > len(data):
            raise TokenizerError(f"{name} is cut off at byte {len(data)}")
        if not key.startswith(b"split."):
            pairs.append((start, reader.position))
    return pairs


def read_config(folder: Path) -> dict[str, Any]:
    """What `save_pretrained` wrote beside the vocabulary: arguments for the tokenizer. `{}` where nothing was saved or
    another kind of tokenizer was."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        return {}
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if config.pop("tokenizer_class", None) != CLASS_NAME:
        return {}
    templates = {}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    for named in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[named.stem] = named.read_text(encoding="utf-8")
    if templates:
        config["chat_template"] = templates["default"] if list(templates) == ["default"] else templates
    return config


def rewrite_config(file: Path, drop: set[str], add: dict[str, Any]) -> None:
    """Change what transformers wrote to `tokenizer_config.json`."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key not in drop}
    config.update(add, tokenizer_class=CLASS_NAME)
    file.write_text(json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
