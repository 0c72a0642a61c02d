"""A radix tree over tokens: which of many texts share the longest prefix with a new one, without looking at all of them.

A node holds the tokens between two branches, so that a prompt common to a thousand texts is stored and compared once. The
owners of texts are any hashable objects; the tree knows nothing of sequences or memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from .sequence import shared_prefix

__all__ = ["PrefixTree"]

Owner = TypeVar("Owner")


class _Node(Generic[Owner]):
    __slots__ = ("children", "owners", "parent", "segment")

    def __init__(self, segment: npt.NDArray[np.int32], parent: _Node[Owner] | None) -> None:
        self.segment = segment
        self.parent = parent
        self.children: dict[int, _Node[Owner]] = {}
        self.owners: dict[Owner, None] = {}
        """Those whose text ends with this node, in the order they came."""


class PrefixTree(Generic[Owner]):
    """Texts of tokens and who owns them; one text for each owner, any number of owners for a text."""

    def __init__(self) -> None:
        self._root: _Node[Owner] = _Node(np.empty(0, np.int32), None)
        self._ends: dict[Owner, _Node[Owner]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, owner: Owner) -> bool:
        return owner in self._ends

    def put(self, owner: Owner, tokens: npt.NDArray[np.int32]) -> None:
        """Note, or correct, what `owner` holds; the tree keeps a copy."""
        self.discard(owner)
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                child = _Node(tokens[at:].copy(), node)
                node.children[int(tokens[at])] = child
                node, at = child, len(tokens)
                break
            n = shared_prefix(child.segment, tokens[at:])
            node = self._cut(child, n) if n < len(child.segment) else child
            at += n
        node.owners[owner] = None
        self._ends[owner] = node

    def discard(self, owner: Owner) -> None:
        """Forget what `owner` holds; nothing happens where that is unknown."""
        node = self._ends.pop(owner, None)
        if node is None:
            return
        del node.owners[owner]
        while node.parent is not None and not node.owners:
            parent = node.parent
            if len(node.children) > 1:
                break
            if node.children:
                self._merge(node)
                break
            del parent.children[int(node.segment[0])]
            node = parent

    def text(self, owner: Owner) -> npt.NDArray[np.int32]:
        """What was noted for `owner`. Raises `KeyError`."""
        node: _Node[Owner] | None = self._ends[owner]
        parts = []
        while node is not None:
            parts.append(node.segment)
            node = node.parent
        return np.concatenate(parts[::-1])

    def matches(self, tokens: npt.NDArray[np.int32]) -> Iterator[tuple[int, Owner]]:
        """`(shared, owner)` for every owner that shares at least one token, those who share most first, and among them those
        whose text ends there.

        The tree must not change meanwhile.
        """
        path: list[tuple[int, _Node[Owner]]] = []
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            n = shared_prefix(child.segment, tokens[at:])
            at += n
            path.append((at, child))
            if n < len(child.segment):
                break
            node = child
        seen: _Node[Owner] | None = None
        for shared, node in reversed(path):
            for owner in self._below(node, seen):
                yield shared, owner
            seen = node

    def _below(self, node: _Node[Owner], but: _Node[Owner] | None) -> Iterator[Owner]:
        """All owners of the texts that go through `node`, but for those that go through `but`."""
        todo = [node]
        while todo:
            current = todo.pop()
            yield from current.owners
            todo.extend(child for child in current.children.values() if child is not but)

    @staticmethod
    def _cut(node: _Node[Owner], n: int) -> _Node[Owner]:
        """A new node for the first `n` tokens of `node`, which keeps the rest."""
        assert node.parent is not None
        upper: _Node[Owner] = _Node(node.segment[:n], node.parent)
        node.parent.children[int(node.segment[0])] = upper
        node.segment, node.parent = node.segment[n:], upper
        upper.children[int(node.segment[0])] = node
        return upper

    @staticmethod
    def _merge(node: _Node[Owner]) -> None:
        """A node nobody ends at and only one text goes through becomes one with its child."""
        (child,) = node.children.values()
        assert node.parent is not None
        child.segment = np.concatenate([node.segment, child.segment])
        child.parent = node.parent
        node.parent.children[int(node.segment[0])] = child
