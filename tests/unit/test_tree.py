"""The radix tree against a scan of all texts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transformers_llamacpp.sequence import EMBEDDED
from transformers_llamacpp.tree import PrefixTree
from unit.naive import ids

pytestmark = pytest.mark.once

texts = st.lists(st.integers(EMBEDDED, 2), max_size=8)
changes = st.lists(
    st.tuples(st.just("put"), st.integers(0, 5), texts) | st.tuples(st.just("discard"), st.integers(0, 5), st.just([])),
    max_size=25,
)


def shared(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n] != EMBEDDED:
        n += 1
    return n


def check(tree: PrefixTree[int], known: dict[int, list[int]], asked: list[int]) -> None:
    found = list(tree.matches(ids(*asked)))
    counts = [n for n, _ in found]
    assert counts == sorted(counts, reverse=True), "those who share most come first"
    scan = {(shared(text, asked), owner) for owner, text in known.items() if shared(text, asked)}
    assert len(found) == len(scan) and set(found) == scan


def clean(texts: list[int]) -> list[int]:
    """A text ends before its first vector, as in the pool."""
    return texts[: texts.index(EMBEDDED)] if EMBEDDED in texts else texts


@settings(max_examples=400, deadline=None)
@given(changes=changes, asked=st.lists(texts, min_size=1, max_size=4))
def test_any_changes(changes: list[tuple[str, int, list[int]]], asked: list[list[int]]) -> None:
    tree: PrefixTree[int] = PrefixTree()
    known: dict[int, list[int]] = {}
    for what, owner, text in changes:
        if what == "put":
            known[owner] = clean(text)
            tree.put(owner, ids(*known[owner]))
        else:
            known.pop(owner, None)
            tree.discard(owner)
        assert len(tree) == len(known)
        for other, tokens in known.items():
            assert other in tree and tree.text(other).tolist() == tokens
        nodes_are_needed(tree)
    for text in [*asked, *known.values()]:
        check(tree, known, text)


def nodes_are_needed(tree: PrefixTree[int]) -> None:
    """Every node is an end or a branch: the tree does not grow with what was forgotten."""
    todo = list(tree._root.children.values())
    while todo:
        node = todo.pop()
        assert node.owners or len(node.children) > 1
        assert len(node.segment) and all(child.parent is node for child in node.children.values())
        assert all(first == child.segment[0] for first, child in node.children.items())
        todo.extend(node.children.values())


def test_the_tree_keeps_a_copy() -> None:
    tree: PrefixTree[str] = PrefixTree()
    text = ids(1, 2, 3)
    tree.put("a", text)
    text[:] = 9
    assert tree.text("a").tolist() == [1, 2, 3]
    with pytest.raises(KeyError):
        tree.text("b")
    tree.discard("b")


def test_owners_of_equal_texts_in_the_order_they_came() -> None:
    tree: PrefixTree[str] = PrefixTree()
    for owner in "cab":
        tree.put(owner, ids(1, 2))
    tree.put("longer", ids(1, 2, 3))
    assert list(tree.matches(ids(1, 2, 9))) == [(2, "c"), (2, "a"), (2, "b"), (2, "longer")]


def test_a_common_beginning_is_stored_once() -> None:
    tree: PrefixTree[int] = PrefixTree()
    for owner in range(50):
        tree.put(owner, ids(*range(100), 200 + owner))
    [trunk] = tree._root.children.values()
    assert len(trunk.segment) == 100 and len(trunk.children) == 50
    assert all(len(child.segment) == 1 for child in trunk.children.values())
    assert np.array_equal(tree.text(7), ids(*range(100), 207))
