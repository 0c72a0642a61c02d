"""The engine against the naive one, through anything callers may do, over a `FakeBackend`.

One machine for all kinds of memory: plain attention, sliding windows that drop cells or keep them, recurrent states; with
files of states that vanish or rot, with contexts that slide, with chunks that move. The settings are small (few cells, few
sequence ids, little host memory), so that eviction, parking, restoring and growth happen in nearly every run.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from unit.machine import Machine
from unit.machine_rules import EngineMachine

pytestmark = pytest.mark.once


class WindowMachine(EngineMachine):
    window = 5


class FullWindowMachine(EngineMachine):
    window = 5
    swa_full = True


class RecurrentMachine(EngineMachine):
    recurrent = True


class FolderMachine(EngineMachine):
    with_folder = True


class FolderWindowMachine(WindowMachine):
    with_folder = True


class FolderFullWindowMachine(FullWindowMachine):
    with_folder = True


class FolderRecurrentMachine(RecurrentMachine):
    with_folder = True


class SlidingMachine(EngineMachine):
    n_ctx = 12
    n_sink = 2


class SlidingFullWindowMachine(FullWindowMachine):
    n_ctx = 12
    n_sink = 2
    with_folder = True


class MovingMachine(EngineMachine):
    reuse_min_chunk = 3


class MovingFullWindowMachine(FullWindowMachine):
    reuse_min_chunk = 3
    with_folder = True


class MovingSlidingMachine(SlidingMachine):
    reuse_min_chunk = 3


MACHINES = [
    EngineMachine, WindowMachine, FullWindowMachine, RecurrentMachine, FolderMachine, FolderWindowMachine,
    FolderFullWindowMachine, FolderRecurrentMachine, SlidingMachine, SlidingFullWindowMachine, MovingMachine,
    MovingFullWindowMachine, MovingSlidingMachine,
]  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES)
def test_machine(machine: type[Machine]) -> None:
    steps = settings(deadline=None, max_examples=100, stateful_step_count=40)
    run_state_machine_as_test(machine, settings=steps)
