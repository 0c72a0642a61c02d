"""What a request costs while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from .reuse import Reuse

__all__ = ["Usage"]


@dataclass(slots=True)
class Usage:
    """What one request cost; counted by the engine, reset by nobody. `reuse`: how each of its texts began.

    `decode_calls` counts those that other calls took part in, too.
    """

    evaluated_tokens: int = 0
    reused_tokens: int = 0
    decode_calls: int = 0
    reuse: list[Reuse] = field(default_factory=list)
