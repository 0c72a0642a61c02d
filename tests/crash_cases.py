"""Inputs that must not kill the process: every one ends in a right answer or in one clear Python exception.

`child.py` runs them, `model/test_no_crash.py` judges. A case that returns has checked its answer itself.
"""

from __future__ import annotations

import ctypes
import sys

from crash import files, life, options, sizes, tensors  # noqa: F401  (their cases enter CASES)
from crash.case import ANSWER, CASES, Case

__all__ = ["CASES", "CRASH"]


def crash() -> None:
    print("on purpose", file=sys.stderr, flush=True)
    ctypes.string_at(0)


CRASH = {"a crash on purpose": Case(crash, ANSWER)}
