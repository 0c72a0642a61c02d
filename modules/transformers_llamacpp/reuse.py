"""Where the beginning of a text came from, and why not more of it."""

from __future__ import annotations

__all__ = ["Reuse"]


class Reuse(str):
    """One of "memory" (the KV buffer), "host" (host memory), "disk", "shifted" (moved chunks), "checkpoint", "none"; it
    compares as that word. `reason` is a sentence for people, with the numbers."""

    __slots__ = ("reason",)
    reason: str

    def __new__(cls, source: str, reason: str = "") -> Reuse:
        self = super().__new__(cls, source)
        self.reason = reason
        return self

    def __reduce__(self) -> tuple[type[Reuse], tuple[str, str]]:
        return Reuse, (str(self), self.reason)

    def __repr__(self) -> str:
        return f"Reuse({str(self)!r}, {self.reason!r})"
