"""`state_dir`: what one process left there another goes on with, and nothing that lies there does harm."""

from __future__ import annotations

import logging
import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformers_llamacpp.engine import Engine, Usage
from transformers_llamacpp.errors import StateError
from transformers_llamacpp.saved import Saved
from transformers_llamacpp.sequence import Sequence
from transformers_llamacpp.state_file import write_state
from transformers_llamacpp.state_folder import StateFolder
from transformers_llamacpp.testing import FakeBackend
from unit.naive import A, counts, go_on, job, make, say

pytestmark = pytest.mark.once

LONG = [n % 7 for n in range(40)]
KINDS = [{}, {"recurrent": True}, {"window": 4}, {"window": 4, "swa_full": True}]
PRINT = FakeBackend().fingerprint


def process(path: Path, max_bytes: int = 1 << 20, n_ctx: int = 60, host: int = 0, **backend: Any) -> Engine:
    """A process that keeps nothing in host memory."""
    fingerprint = FakeBackend(**backend).fingerprint
    return make(
        n_ctx=n_ctx, host_cache_bytes=host, folder=StateFolder(path, fingerprint, max_bytes), n_cells=200, **backend
    )


def leave(engine: Engine, *texts: list[int]) -> None:
    """Texts that go to the folder."""
    for text in texts:
        sequence, _ = say(engine, text)
        engine.release([sequence])
        park(engine, sequence)


def park(engine: Engine, sequence: Sequence) -> None:
    engine.pool.room.park(sequence)
    engine.pool.room.trim()
    engine.check()


def files(path: Path) -> list[Path]:
    return sorted(path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_another_process_goes_on(tmp_path: Path, kind: dict[str, Any]) -> None:
    first = process(tmp_path, **kind)
    chat, _ = say(first, LONG)
    go_on(first, chat, [9, 8])
    park(first, chat)
    first.release([chat])
    first.close()
    second = process(tmp_path, **kind)
    assert [list(s.tokens) for s in second.pool.sequences] == [[*LONG, 9, 8]]
    _, usage = say(second, [*LONG, 9, 8, 7])
    assert counts(usage) == (42, 1) and usage.reuse == ["disk"]
    again = process(tmp_path, **kind)
    _, usage = say(again, LONG)
    assert counts(usage) == (39, 1), "the same prompt again"


def test_texts_share_files(tmp_path: Path) -> None:
    first = process(tmp_path)
    leave(first, LONG, [*LONG, *[10] * 50][:60])
    leave(first, LONG)  # nothing is written twice
    assert len(files(tmp_path)) == 2
    second = process(tmp_path)
    assert [len(s) for s in second.pool.sequences] == [60]
    assert counts(say(second, [*LONG, 9])[1]) == (40, 1)
    assert counts(say(second, [*LONG, *[10] * 19, 3])[1]) == (59, 1)


def test_only_texts_of_this_model(tmp_path: Path) -> None:
    leave(process(tmp_path, recurrent=True), LONG)
    leave(process(tmp_path, n_vocab=64), LONG)
    engine = process(tmp_path)
    assert engine.pool.sequences == [] and counts(say(engine, LONG)[1]) == (0, 40)
    assert len(process(tmp_path, n_vocab=64).pool.sequences) == 1


@pytest.mark.parametrize("content", [b"", b"GGUF", b"LCPCACHE", b"LCPCACHE\2\0\0\0\xff\xff\0\0{", b"x" * 500])
def test_foreign_files_are_left_alone(tmp_path: Path, content: bytes) -> None:
    leave(process(tmp_path), LONG)
    for name in ("a.state", "notes.txt"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.state").mkdir()
    engine = process(tmp_path)
    assert len(engine.pool.sequences) == 1 and counts(say(engine, [*LONG, 9])[1]) == (40, 1)
    assert (tmp_path / "notes.txt").read_bytes() == (tmp_path / "a.state").read_bytes() == content


def test_a_saved_cache_among_them(tmp_path: Path) -> None:
    write_state(tmp_path / "b.state", PRINT, 0, [])
    write_state(tmp_path / "c.state", {**PRINT, "part": "state"}, 0, [])
    engine = process(tmp_path)
    assert engine.pool.sequences == []


@pytest.mark.parametrize("how", ["gone", "short", "flipped", "another"])
@pytest.mark.parametrize("kind", KINDS)
def test_damage_costs_time_only(tmp_path: Path, kind: dict[str, Any], how: str) -> None:
    engine = process(tmp_path, **kind)
    held, _ = say(engine, LONG)
    park(engine, held)
    leave(engine, [*LONG[:35], *[10] * 5])
    for idle in (False, True):
        for file in files(tmp_path):
            content = file.read_bytes()
            if how == "gone":
                file.unlink()
            elif how == "another":
                file.write_bytes(files(tmp_path)[-1 if file != files(tmp_path)[-1] else 0].read_bytes())
            else:
                file.write_bytes(content[:-40] if how == "short" else content[:-40] + b"!" + content[-39:])
        if idle:
            say(engine, [*LONG[:35], *[10] * 5, 9])
        else:
            assert go_on(engine, held, [9]).evaluated_tokens >= 1


def test_what_lost_its_beginning_is_forgotten(tmp_path: Path) -> None:
    engine = process(tmp_path)
    leave(engine, LONG)
    held, _ = say(engine, [*LONG, 9])
    park(engine, held)
    copy = engine.fork(held)
    engine.release([held])
    assert held.is_saved and copy.is_saved
    for file in files(tmp_path):
        file.unlink()
    assert go_on(engine, copy, [8]).evaluated_tokens == 42
    assert held.closed, "nobody could match it"


def test_a_chain_with_a_hole(tmp_path: Path) -> None:
    leave(process(tmp_path), LONG)
    [base] = files(tmp_path)
    leave(process(tmp_path), [*LONG, 9])
    base.unlink()
    engine = process(tmp_path)
    assert engine.pool.sequences == [] and counts(say(engine, [*LONG, 9])[1]) == (0, 41)


def test_texts_longer_than_the_context(tmp_path: Path) -> None:
    leave(process(tmp_path), LONG)
    leave(process(tmp_path), [*LONG, *[9] * 20])
    engine = process(tmp_path, n_ctx=45)
    assert [len(s) for s in engine.pool.sequences] == [40]
    assert counts(say(engine, [*LONG, 9])[1]) == (40, 1)


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(StateError, match="cannot be used: it is not readable and writable"):
        StateFolder(tmp_path, PRINT, 1)


def test_closing_the_model_writes_what_is_in_memory(tmp_path: Path) -> None:
    engine = process(tmp_path)
    text = [1, 2, 3, 4, 5, 6]
    kept, _ = say(engine, text)
    other, _ = say(engine, [7, 7, 7, 7])
    engine.release([other])
    engine.close()
    engine.close()
    assert len(list(tmp_path.glob("*.state"))) == 2
    again = process(tmp_path)
    assert counts(say(again, [*text, 9])[1]) == (6, 1) and counts(say(again, [7, 7, 7, 7, 8])[1]) == (4, 1)
    del kept


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "folder", Path("a\0b")):
        with pytest.raises(StateError, match=r"^state_dir=.* cannot be used: "):
            StateFolder(path, PRINT, 1)
    StateFolder(tmp_path / "a" / "b", PRINT, 1)
    assert (tmp_path / "a" / "b").is_dir()


def test_at_most_so_many_bytes(tmp_path: Path) -> None:
    texts = [[n] * 40 for n in range(6)]
    leave(process(tmp_path), texts[0])
    size = files(tmp_path)[0].stat().st_size
    engine = process(tmp_path, 3 * size + 20)
    for number, text in enumerate(texts[1:]):
        leave(engine, text)
        for file in files(tmp_path):  # clocks of file systems are coarse
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 10))
        assert len(files(tmp_path)) == min(3, number + 2)
    left = sorted(list(s.tokens) for s in process(tmp_path).pool.sequences)
    assert left == texts[3:]
    assert counts(say(engine, [*texts[5], 9])[1]) == (40, 1)
    assert counts(say(engine, [*texts[1], 9])[1]) == (0, 41)


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    first, second = process(tmp_path), process(tmp_path)
    leave(first, LONG)
    leave(second, LONG, [*LONG, *[9] * 10])
    assert len(files(tmp_path)) == 2
    assert counts(say(first, [*LONG, 7])[1]) == (40, 1)
    for file in files(tmp_path):
        file.unlink()
    assert counts(say(second, [*LONG, *[9] * 10, 7])[1]) == (0, 51)
    leave(second, [8] * 40)
    assert len(files(tmp_path)) == 1


def test_a_full_disk_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = process(tmp_path)
    leave(engine, LONG)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with caplog.at_level(logging.WARNING):
        leave(engine, [8] * 40, [7] * 40)
    [record] = caplog.records
    assert "No space left on device; nothing is written to state_dir for 60 seconds" in record.message
    assert counts(say(engine, [*LONG, 9])[1]) == (40, 1), "what was written is read"
    assert [file.suffix for file in files(tmp_path)] == [".state"]


def test_a_state_larger_than_all_files_may_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = process(tmp_path, 600)
    leave(engine, LONG, A)
    assert caplog.records == [] and len(files(tmp_path)) == 1
    assert counts(say(engine, [*A, 9])[1]) == (6, 1)


def test_vectors_are_not_trusted_to_files(tmp_path: Path) -> None:
    engine = process(tmp_path)
    sequences = []
    for number in range(2):
        sequence = engine.new()
        done = job(sequence, [-1] * 3)
        done.embeds = np.full((3, 4), number, np.float32)
        engine.evaluate([done], Usage())
        park(engine, sequence)
        sequences.append(sequence)
    assert files(tmp_path) == []
    answers = []
    for sequence in sequences:
        done = job(sequence, [5])
        engine.evaluate([done], Usage())
        answers.append(done.logits)
    assert not np.array_equal(answers[0], answers[1])


def test_a_truncated_text_that_is_spilled_keeps_its_tail_for_others(tmp_path: Path) -> None:
    """Equal beginnings, of which one is the text of a fork that was cut: the files are two."""
    engine = process(tmp_path, host=1 << 20)
    held = []
    for number in range(2):
        sequence, _ = say(engine, [*A, *[number] * 9])
        park(engine, sequence)
        copy = engine.fork(sequence)
        copy.truncate(6)
        held += [copy, sequence]
        engine.pool.registry.sequences.sort(key=len)  # the cut one is asked first
    engine.pool.registry.states.max_bytes = 0
    engine.pool.room.trim()
    for sequence in held:
        assert go_on(engine, sequence, [9]).evaluated_tokens == 1


def test_names_tell_contents_apart(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, PRINT, 1 << 20)
    tokens = array("i", A)
    parts = [Saved(0, 6, None, memoryview(data)) for data in (b"one", b"two")]
    same = {folder.write(part, tokens, 0) for part in parts}
    assert len(same) == 1, "the tokens make the state"
    for text, dropped in ((array("i", [*A, 7]), 1), (tokens[:3], 0)):
        names = [folder.write(part, text, dropped) for part in parts]
        assert len({*names}) == 2
        for part, name in zip(parts, names, strict=True):
            part.file = name
            assert bytes(folder.read(part)) == part.data
