"""The threads that llama.cpp computes with beside the one that calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .library import llama_cpp

__all__ = ["give_back"]

SOFT = 1
"""`omp_pause_soft` of omp.h."""


def give_back() -> None:
    """The calling thread will not decode for a while: its OpenMP threads end; the next decode makes new ones, in less than a
    millisecond.

    GNU's OpenMP gives each thread that calls it threads of its own, keeps them as long as the caller lives, and once all of
    them together are more than there are processors, lets none of them spin any more: a decode of some hundred steps, each of
    which waits for all threads, then sleeps and wakes as often.
    """
    pause = _pause()
    if pause is not None:
        pause(SOFT)


@functools.cache
def _pause() -> Callable[[int], Any] | None:
    """`omp_pause_resource_all` of GNU's OpenMP, where llama.cpp was built with that; others have one pool for all callers."""
    library = llama_cpp.llama_cpp._lib  # a symbol is looked for in everything it was linked to as well
    if hasattr(library, "__kmpc_fork_call") or not hasattr(library, "GOMP_parallel"):
        return None
    found: Callable[[int], Any] | None = getattr(library, "omp_pause_resource_all", None)
    return found
