"""What a caller of the API may ask for, and how many may ask at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["Limits", "ServeOptions"]


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_tokens` is what one answer may have at most; 0 leaves it to the context. `max_choices`: texts one request may ask
    for, which is its prompts times `n` or `best_of`. `parallel` texts are written at once (all choices of a prompt count as
    one), `max_queue` more may wait; who comes then is told so (429)."""

    max_body: int = 8 << 20
    max_tokens: int = 0
    max_choices: int = 32
    parallel: int = 16
    max_queue: int = 64


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`api_key` must be given with every request but `/health`; `remote`: the server listens on more than this machine's own
    addresses. `cors_origins` may call from a browser. `chat_templates`: requests may bring Jinja templates of their own."""

    limits: Limits = Limits()
    api_key: str = ""
    remote: bool = False
    cors_origins: tuple[str, ...] = ()
    chat_templates: bool = False
    page: bool = True
    data_dir: Path | None = None
    """Where the page keeps presets; `None`: a folder of the user's."""
