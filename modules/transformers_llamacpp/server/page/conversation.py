"""A conversation that forgets nothing: a tree of messages, of which one path is shown.

An edited question, an answer that is written again, and going on from an earlier message make a new branch beside the old one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidInputError

__all__ = ["Conversation", "Message"]


@dataclass(slots=True)
class Message:
    """`children` are what may follow it, `chosen` the place in them of what is shown; `None`: the path ends here."""

    role: str
    content: str
    parent: int | None
    children: list[int] = field(default_factory=list)
    chosen: int | None = None


class Conversation:
    """Messages are named by their place in the path that is shown, from 0 on."""

    def __init__(self) -> None:
        self._nodes = [Message("", "", None)]  # what the first messages follow

    # -- what is shown -----------------------------------------------------------------------------------------------

    def _path(self) -> list[int]:
        found, node = [], self._nodes[0]
        while node.chosen is not None:
            found.append(node.children[node.chosen])
            node = self._nodes[found[-1]]
        return found

    def messages(self) -> list[dict[str, str]]:
        """`{"role": "user" | "assistant", "content": text}`, as chat templates take them."""
        return [{"role": self._nodes[at].role, "content": self._nodes[at].content} for at in self._path()]

    def __len__(self) -> int:
        return len(self._path())

    @property
    def ends_with_answer(self) -> bool:
        path = self._path()
        return bool(path) and self._nodes[path[-1]].role == "assistant"

    def versions(self) -> list[tuple[int, int]]:
        """Of each message the number of the version that is shown, from 1 on, and how many there are."""
        found = []
        for at in self._path():
            siblings = self._nodes[self._nodes[at].parent or 0].children
            found.append((siblings.index(at) + 1, len(siblings)))
        return found

    def hidden_after(self) -> int:
        """How many ways the conversation went on from where it ends now."""
        path = self._path()
        return len(self._nodes[path[-1] if path else 0].children)

    # -- going on ----------------------------------------------------------------------------------------------------

    def add(self, role: str, content: str) -> int:
        """A message after the last one; its place."""
        path = self._path()
        self._append(path[-1] if path else 0, role, content)
        return len(path)

    def write(self, content: str) -> None:
        """The last message is `content` now."""
        self._nodes[self._path()[-1]].content = content

    def edit(self, at: int, content: str) -> None:
        """Another version of the message at `at`, with nothing after it."""
        node = self._node(at)
        self._append(node.parent or 0, node.role, content)

    def up_to_question(self) -> None:
        """Take what follows the last question out of sight, so that another answer can stand beside it."""
        path = self._path()
        for at in range(len(path) - 1, -1, -1):
            if self._nodes[path[at]].role == "user":
                self._nodes[path[at]].chosen = None
                return
        raise InvalidInputError("there is no question to answer again")

    def branch(self, at: int) -> None:
        """Go on after the message at `at` (-1: from the beginning); what came after it stays, out of sight."""
        node = self._nodes[0] if at < 0 else self._node(at)
        node.chosen = None

    def switch(self, at: int, step: int) -> None:
        """Show the version `step` places further of the message at `at`, with what came after that one."""
        path = self._path()
        self._node(at)
        parent = self._nodes[self._nodes[path[at]].parent or 0]
        parent.chosen = ((parent.chosen or 0) + step) % len(parent.children)

    def resume(self) -> None:
        """Show again how the conversation went on from where it ends now: the newest way."""
        path = self._path()
        node = self._nodes[path[-1] if path else 0]
        if node.children:
            node.chosen = len(node.children) - 1

    def take_back(self) -> str:
        """The last question, to be asked in other words; it and what followed it stay, out of sight."""
        path = self._path()
        for at in range(len(path) - 1, -1, -1):
            if self._nodes[path[at]].role == "user":
                self.branch(at - 1)
                return self._nodes[path[at]].content
        raise InvalidInputError("there is no question to take back")

    def mark(self) -> Any:
        """What `restore` goes back to."""
        return [node.chosen for node in self._nodes]

    def restore(self, mark: Any) -> None:
        """As if nothing had been added since `mark`."""
        del self._nodes[len(mark) :]
        for node, chosen in zip(self._nodes, mark, strict=True):
            node.children = [child for child in node.children if child < len(mark)]
            node.chosen = chosen

    # -- files -------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """What `from_json` takes: every branch."""
        names = ("role", "content", "parent", "chosen")
        return {"messages": [{name: getattr(node, name) for name in names} for node in self._nodes]}

    @classmethod
    def from_json(cls, data: Any) -> Conversation:
        """Raises `InvalidInputError` for what is none. A plain list of messages with `role` and `content` will do too."""
        made = cls()
        try:
            if isinstance(data, list):
                for one in data:
                    made.add(_role(one["role"]), _text(one["content"]))
                return made
            first, *others = data["messages"]
            chosen = [first["chosen"]]
            for one in others:
                parent = one["parent"]
                if not 0 <= parent < len(made._nodes):
                    raise ValueError("a message follows one that is not there")
                made._append(parent, _role(one["role"]), _text(one["content"]))
                chosen.append(one["chosen"])
            for node, choice in zip(made._nodes, chosen, strict=True):
                node.chosen = None if choice is None else range(len(node.children))[choice]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise InvalidInputError(f"this is no saved conversation: {error}") from error
        return made

    # -- inside ------------------------------------------------------------------------------------------------------

    def _node(self, at: int) -> Message:
        path = self._path()
        if not 0 <= at < len(path):
            raise InvalidInputError(f"there is no message {at}; there are {len(path)}")
        return self._nodes[path[at]]

    def _append(self, parent: int, role: str, content: str) -> None:
        self._nodes.append(Message(role, content, parent))
        self._nodes[parent].children.append(len(self._nodes) - 1)
        self._nodes[parent].chosen = len(self._nodes[parent].children) - 1


def _role(value: Any) -> str:
    if value not in ("user", "assistant"):
        raise ValueError(f"{value!r} is no role")
    return str(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"the text is a {type(value).__name__}")
    return value
