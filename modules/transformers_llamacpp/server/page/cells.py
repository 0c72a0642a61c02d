"""A look at the KV cells: which sequences hold how many. Nothing of their texts is shown."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...sequence import common_prefix

__all__ = ["Cells", "Row", "look"]

MOST_ROWS = 24
TRIES, PAUSE = 5, 0.002
"""The engine's lock is free between two decodes only; nobody is kept waiting for a picture."""


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence: `length` positions, the first `shared` of which are cells of a row above. `state`: "active" (somebody goes on
    with it), "idle" (in the buffer, to be reused), "host" (saved in host memory or on disk)."""

    length: int
    shared: int
    state: str


@dataclass(frozen=True, slots=True)
class Cells:
    """`used` of `n_cells` cells are taken. `rows`: at most `MOST_ROWS` of all `texts`, those in the buffer first."""

    used: int
    n_cells: int
    texts: int
    host_bytes: int
    rows: tuple[Row, ...]


def look(engine: Any) -> Cells | None:
    """`None` where the engine is busy or closed."""
    for _ in range(TRIES):
        with engine.lock.without_waiting() as free:
            if free:
                return None if engine.closed else _cells(engine)
        time.sleep(PAUSE)
    return None


def _cells(engine: Any) -> Cells:
    held = engine.held()  # which also lets go of what nobody refers to any more
    sequences = [one for one in engine.pool.registry.sequences if one.tokens and not one.closed]
    resident = [one for one in sequences if one.resident]
    resident.sort(key=lambda one: (not one.held, -one.last_use))
    away = sorted((one for one in sequences if not one.resident), key=lambda one: -one.last_use)
    rows: list[Row] = []
    above: list[Any] = []
    for one in [*resident, *away][:MOST_ROWS]:
        shared = 0
        if one.resident:
            text = np.array(one.tokens, np.int32)
            shared = max((common_prefix(other.tokens, text, len(one)) for other in above), default=0)
            above.append(one)
        state = "host" if not one.resident else "active" if one.held else "idle"
        rows.append(Row(len(one), shared, state))
    return Cells(held.cells, held.n_cells, len(sequences), held.host_bytes, tuple(rows))
