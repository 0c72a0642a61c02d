"""No input kills the process (`../crash_cases.py`): a right answer, or one clear Python exception.

Each case runs in a child process; a signal, an abort or a hang is a failure. The cases do not depend on the release of
transformers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from child import Children, environment
from crash.case import ANSWER, EITHER
from crash_cases import CASES

pytestmark = pytest.mark.once


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    children = Children(environment(GGML_NO_BACKTRACE="1"))
    yield children
    children.close()


@pytest.mark.parametrize("name", CASES)
def test_the_process_lives(children: Children, name: str) -> None:
    case = CASES[name]
    status, outcome, output = children.run(name)
    assert status == 0, f"the child ended with {status}:\n{output[-4000:]}"
    assert outcome is not None, output[-4000:]
    if outcome["kind"] == "answer":
        assert case.expect in (ANSWER, EITHER, "Exception or answer"), f"no {case.expect}"
        return
    trace, types, message = outcome["trace"], outcome["types"], outcome["message"]
    if case.expect == EITHER:
        assert "LlamaCppError" in types, trace
        assert len(message) > 20, f"this message helps nobody: {message!r}"
    elif case.expect.startswith("Exception"):
        assert "AssertionError" not in types, trace
    else:
        assert case.expect in types, trace
    for part in case.says:
        assert part in message, f"{part!r} is not in the message: {message}"


def test_a_child_that_crashes_is_seen(children: Children) -> None:
    status, outcome, output = children.run("a crash on purpose")
    assert status != 0
    assert outcome is None
    assert "on purpose" in output
    status, outcome, _ = children.run("a prompt of one token")
    assert (status, outcome) == (0, {"kind": "answer"})
