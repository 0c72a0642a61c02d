"""Counting KV cells before they are taken: what texts share, what beams share, and where a call ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from transformers_llamacpp.decoding.room import CellsFull, Lineage, Room, Sharing, cells_of, read_texts
from transformers_llamacpp.engine import Engine, Usage
from transformers_llamacpp.errors import CacheFullError
from transformers_llamacpp.rows import Feed, feed
from transformers_llamacpp.sequence import EMBEDDED
from transformers_llamacpp.testing import FakeBackend

pytestmark = pytest.mark.once

TEXTS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=6), min_size=1, max_size=5)


def arrays(texts: list[list[int]]) -> list[Any]:
    return [np.array(text, np.int32) for text in texts]


def stored(texts: list[list[int]], sharing: Sharing) -> int:
    """Cells a cold engine takes for them."""
    backend = FakeBackend(n_cells=64, n_seq_max=8, recurrent=sharing is Sharing.WHOLE)
    width = max(map(len, texts))
    ids, mask = np.zeros((len(texts), width), np.int32), np.zeros((len(texts), width), np.bool_)
    for row, text in enumerate(texts):
        ids[row, width - len(text) :], mask[row, width - len(text) :] = text, True
    new = Feed(ids, None, mask, np.array([width - 1]), len(texts), width, want_hidden=sharing is Sharing.EQUAL)
    feed(Engine(backend, 64), [None] * len(texts), new, Usage())
    return len(backend.cells)


@given(TEXTS, st.sampled_from(Sharing))
def test_texts_take_as_many_cells_as_are_counted(texts: list[list[int]], sharing: Sharing) -> None:
    assert cells_of(arrays(texts), sharing) == stored(texts, sharing)


def test_vectors_share_nothing() -> None:
    assert cells_of(arrays([[EMBEDDED] * 3] * 2)) == 6


def test_only_real_tokens_count() -> None:
    ids = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]])
    texts = read_texts(ids, torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
    assert [text.tolist() for text in texts.tokens] == [[5, 6], [3, 4, 5, 6]]
    assert texts.lengths == [2, 4]
    assert texts.going_on(100) == texts.unshared == 0
    assert read_texts(torch.zeros(2, 3, 8), None).lengths == [3, 3]


class Cells:
    """Beams as llama.cpp stores them: each row a list of cells, shared by reference."""

    def __init__(self, rows: int) -> None:
        self.rows: list[list[object]] = [[] for _ in range(rows)]

    def reorder(self, parents: list[int]) -> None:
        self.rows = [list(self.rows[parent]) for parent in parents]

    def store(self) -> None:
        for row in self.rows:
            row.append(object())

    def count(self) -> int:
        return len({id(cell) for row in self.rows for cell in row})


@given(st.integers(1, 3), st.integers(1, 4), st.data())
def test_beams_share_what_they_had_before_they_parted(families: int, size: int, data: st.DataObject) -> None:
    rows, lineage = families * size, Lineage(families)
    cells = Cells(rows)
    for step in range(data.draw(st.integers(0, 8))):
        assert lineage.cells(step, rows) == cells.count()
        parents = [row // size * size + data.draw(st.integers(0, size - 1)) for row in range(rows)]
        lineage.reordered(parents)
        cells.reorder(parents)
        assert lineage.cells(step, rows) == cells.count()
        cells.store()


@pytest.mark.parametrize(("prompts", "rows", "steps"), [(90, 1, 10), (90, 3, 3), (0, 100, 1), (99, 1, 1)])
def test_steps_until_the_cells_are_full(prompts: int, rows: int, steps: int) -> None:
    assert Room(100, prompts, rows).steps == steps


@pytest.mark.parametrize(("prompts", "rows"), [(100, 1), (98, 3), (300, 2)])
def test_prompts_that_leave_no_room_are_an_error_with_its_numbers(prompts: int, rows: int) -> None:
    with pytest.raises(CacheFullError, match=rf"{prompts} KV cells.* n_cells=100.*n_cells={prompts + rows}\)") as caught:
        _ = Room(100, prompts, rows).steps
    assert (caught.value.needed, caught.value.limit) == (prompts + rows, 100)


def ends_after(criterion: CellsFull, parents: list[int], reorder_first: bool) -> int:
    rows = len(parents)
    for step in range(1, 100):
        if reorder_first:
            criterion.lineage.reordered(parents)
        if bool(criterion(torch.zeros(rows, step), None).all()):
            return step
        if not reorder_first:
            criterion.lineage.reordered(parents)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("reorder_first", [False, True])
def test_beams_that_part_at_once_end_where_rows_would(reorder_first: bool) -> None:
    """The last tokens need no cell: nothing is decoded after them."""
    assert ends_after(CellsFull(Room(50, 20, 3), 1, 1, 99), [0, 1, 2], reorder_first) == 11
    assert ends_after(CellsFull(Room(50, 20, 6), 1, 2, 99), [0, 1, 2], reorder_first) == 6


def test_beams_that_go_on_from_the_best_one_share_all_but_their_last_cell() -> None:
    """Each token costs one cell, and those of the losers only until they are gone."""
    assert ends_after(CellsFull(Room(50, 20, 3), 1, 1, 99), [0, 0, 0], reorder_first=True) == 29
    assert ends_after(CellsFull(Room(50, 20, 3), 1, 1, 99), [0, 0, 0], reorder_first=False) == 27


def test_the_end_is_told_unless_it_was_the_end_anyway(caplog: pytest.LogCaptureFixture) -> None:
    ends_after(CellsFull(Room(50, 20, 3), 1, 1, 11), [0, 1, 2], reorder_first=True)
    assert not caplog.records
    ends_after(CellsFull(Room(50, 20, 3), 1, 1, 12), [0, 1, 2], reorder_first=True)
    assert "after 11 new tokens" in caplog.text and "n_cells=50" in caplog.text
