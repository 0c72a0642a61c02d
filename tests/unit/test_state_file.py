"""The file of a saved cache: what was written comes back, and nothing else is believed."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transformers_llamacpp.errors import StateError
from transformers_llamacpp.state_file import SavedRow, read_state, write_state

pytestmark = pytest.mark.once

MODEL = {"metadata": "abc", "type_k": "f16", "bytes": 7}
ROWS = [
    SavedRow(array("i", [1, 2, -1]), b"\0\1\1\1", 1, [(0, 1, memoryview(b"sta")), (1, 2, memoryview(b"te"))]),
    SavedRow(array("i", []), None, 0, []),
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "chat.cache"
    write_state(path, MODEL, 4, ROWS)
    return path


def test_what_was_written_comes_back(saved: Path) -> None:
    assert read_state(saved, MODEL) == (4, ROWS)
    assert os.listdir(saved.parent) == [saved.name]  # nothing is left beside it


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.builds(
            SavedRow,
            st.lists(st.integers(-1, 2**31 - 1), max_size=20).map(lambda numbers: array("i", numbers)),
            st.none() | st.binary(max_size=20),
            st.integers(0, 9),
            st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.binary(max_size=50).map(memoryview)), max_size=3),
        ),
        max_size=4,
    ),
    columns=st.integers(0, 1000),
)
def test_any_rows(tmp_path: Path, rows: list[SavedRow], columns: int) -> None:
    path = tmp_path / "any"
    write_state(path, MODEL, columns, rows)
    assert read_state(path, MODEL) == (columns, rows)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_byte_may_change_and_none_may_be_missing(saved: Path, data: st.DataObject) -> None:
    whole = saved.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        bad = whole[:at]
    else:
        bad = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    path = saved.parent / "bad"
    path.write_bytes(bad)
    with pytest.raises(StateError, match="bad"):
        read_state(path, MODEL)


def test_longer_than_it_should_be(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes() + b"x")
    with pytest.raises(StateError, match="is damaged or was cut off"):
        read_state(saved, MODEL)


def test_another_model_says_what_differs(saved: Path) -> None:
    with pytest.raises(StateError, match=r"another setting: bytes was 7 and is 8; type_k was 'f16' and is 'q8_0'$"):
        read_state(saved, MODEL | {"type_k": "q8_0", "bytes": 8})


def test_another_format(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[8] = 9
    saved.write_bytes(data)
    with pytest.raises(StateError, match="has format 9, and this version of the package reads 2"):
        read_state(saved, MODEL)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"LCPCACHE", b"x" * 500])
def test_a_file_of_another_kind(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(StateError, match="is no saved cache"):
        read_state(path, MODEL)


def test_no_file_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="no cache can be read from"):
        read_state(tmp_path / "nothing", MODEL)
    with pytest.raises(StateError, match="cannot be saved to"):
        write_state(tmp_path / "no" / "folder", MODEL, 0, [])
    with pytest.raises(StateError, match="there is no such file"):
        read_state(tmp_path, MODEL)
    for path in (Path("a\0b"), tmp_path / ("x" * 300)):
        with pytest.raises(StateError, match="cannot be saved to"):
            write_state(path, MODEL, 0, [])
        with pytest.raises(StateError, match="no cache can be read from"):
            read_state(path, MODEL)


def test_only_files_are_replaced_and_links_followed(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="that is no file"):
        write_state(tmp_path, MODEL, 0, [])
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(StateError, match="that is no file"):
            write_state(tmp_path / "pipe", MODEL, 0, [])
        (tmp_path / "link").symlink_to(tmp_path / "target")
        write_state(tmp_path / "link", MODEL, 4, ROWS)
        assert (tmp_path / "link").is_symlink()
        assert read_state(tmp_path / "target", MODEL) == (4, ROWS)


def test_a_name_as_long_as_the_system_takes(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)
    write_state(path, MODEL, 4, ROWS)
    assert read_state(path, MODEL) == (4, ROWS)


def test_a_write_that_fails_leaves_the_old_file(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match="No space left"):
        write_state(saved, MODEL, 1, [])
    assert read_state(saved, MODEL) == (4, ROWS)
    assert os.listdir(saved.parent) == [saved.name]
