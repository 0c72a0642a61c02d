"""Presets: files with safe names, whose values the option table allows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from transformers_llamacpp.errors import LlamaCppError, OptionError
from transformers_llamacpp.server.page.methods import CALL_OPTIONS, checked
from transformers_llamacpp.server.page.presets import BUILT_IN, Presets, data_folder

pytestmark = pytest.mark.once


@pytest.fixture
def presets(tmp_path: Path) -> Presets:
    return Presets(tmp_path / "new" / "presets")


def test_saved_loaded_deleted(presets: Presets) -> None:
    values = checked({"method": "beams", "num_beams": 7, "negative_prompt": "Ünïcode\n\"x\""})
    assert presets.save(" My beams (7) ", values) == "My beams (7)"
    assert presets.names() == [*BUILT_IN, "My beams (7)"]
    assert presets.load("My beams (7)") == values
    written = json.loads((presets.folder / "My beams (7).json").read_text(encoding="utf-8"))
    assert written == {"method": "beams", "num_beams": 7, "negative_prompt": "Ünïcode\n\"x\""}, "only what differs"
    presets.save("My beams (7)", checked({}))
    assert presets.load("My beams (7)") == checked({})
    presets.delete("My beams (7)")
    assert presets.names() == list(BUILT_IN) and not list(presets.folder.iterdir())


def test_built_in_ones_are_whole_and_stay(presets: Presets) -> None:
    for name in BUILT_IN:
        assert presets.load(name).keys() == {entry.name for entry in CALL_OPTIONS}
        for change in (presets.delete, lambda name: presets.save(name, {})):
            with pytest.raises(OptionError, match=name):
                change(name)


@pytest.mark.parametrize(
    "name",
    ["", " ", "..", "../x", "a/b", "a\\b", "/etc/x", "C:x", ".hidden", "x\0y", "x\ny", "nul", "COM1", "con.txt", "x" * 61, "a.",
     "a*", "-x", "x\u202ey"],
)  # fmt: skip
def test_names_that_are_no_file(presets: Presets, name: str) -> None:
    for act in (lambda: presets.save(name, {}), lambda: presets.load(name), lambda: presets.delete(name)):
        with pytest.raises(OptionError, match="no name for a preset"):
            act()
    assert not presets.folder.exists() or not list(presets.folder.rglob("*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ("[1]", "holds no settings"), ('{"temperature": 99}', "temperature"), ('{"colour": 1}', "colour"),
     ("\x80", "cannot be read"), ('{"temperature": "warm"}', "temperature")],
)  # fmt: skip
def test_files_of_others(presets: Presets, text: str, message: str) -> None:
    presets.folder.mkdir(parents=True)
    (presets.folder / "other.json").write_bytes(text.encode("latin-1"))
    (presets.folder / "..strange.json").write_text("{}", encoding="utf-8")
    assert presets.names() == [*BUILT_IN, "other"]
    with pytest.raises(LlamaCppError, match=message):
        presets.load("other")


def test_what_is_not_there(presets: Presets) -> None:
    for act in (presets.load, presets.delete):
        with pytest.raises(LlamaCppError, match="no preset 'gone'"):
            act("gone")


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of folders are another matter there")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LlamaCppError, match="cannot be saved"):
        Presets(tmp_path / "file" / "presets").save("x", {})


def test_the_data_folder_is_the_user_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRANSFORMERS_LLAMACPP_DATA", raising=False)
    assert Path.home() in data_folder().parents or sys.platform == "win32"
    monkeypatch.setenv("TRANSFORMERS_LLAMACPP_DATA", str(tmp_path))
    assert Presets().folder == tmp_path / "presets"
