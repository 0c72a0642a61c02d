"""What a call reuses, what it costs, and what is left when a sequence ends: exact counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from transformers_llamacpp.engine import Usage
from transformers_llamacpp.errors import (
    ClosedError,
    DecodeError,
    InvalidInputError,
    UnsupportedFeatureError,
)
from transformers_llamacpp.pool import SequencePool
from transformers_llamacpp.registry import Keeping
from transformers_llamacpp.saved import SavedStates
from transformers_llamacpp.sequence import EMBEDDED
from transformers_llamacpp.testing import FakeBackend
from unit.naive import A, counts, go_on, job, make, say, start_all

pytestmark = pytest.mark.once

# -- reuse ----------------------------------------------------------------------------------------------


def test_an_idle_prefix_is_taken_over_and_copies_nothing() -> None:
    engine = make(n_seq_max=1, n_seq_limit=1)
    first, _ = say(engine, A)
    engine.release([first])
    second, usage = say(engine, [*A, 7, 8])
    assert counts(usage) == (6, 2)
    assert first.closed and len(first) == 0 and engine.pool.sequences == [second]


def test_a_held_prefix_is_forked() -> None:
    engine = make()
    first, _ = say(engine, A)
    second, usage = say(engine, [*A, 7])
    assert counts(usage) == (6, 1)
    assert list(first.tokens) == A and first.resident and first.seq_id != second.seq_id
    assert len(engine.backend.cells) == 7  # type: ignore[attr-defined]  # shared, not copied


def test_an_idle_one_is_forked_where_it_goes_on_differently() -> None:
    engine = make()
    first, _ = say(engine, A)
    engine.release([first])
    _, usage = say(engine, [1, 2, 3, 9])
    assert counts(usage) == (3, 1)
    _, usage = say(engine, [*A, 7])  # the other conversation has lost nothing
    assert counts(usage) == (6, 1)


def test_at_least_one_token_is_left_to_evaluate() -> None:
    engine = make()
    first, _ = say(engine, A)
    engine.release([first])
    _, usage = say(engine, A)
    assert counts(usage) == (5, 1)


def test_rows_whose_logits_are_wanted_are_not_reused() -> None:
    engine = make()
    first, _ = say(engine, A)
    engine.release([first])
    _, usage = say(engine, [*A, 7], first_output=2)
    assert counts(usage) == (2, 5)
    _, usage = say(engine, [*A, 8], first_output=0)
    assert counts(usage) == (0, 7)


def test_the_longest_prefix_wins_wherever_it_is() -> None:
    engine = make()
    for text in ([1, 2], [1, 2, 3, 4], [1, 9, 9]):
        engine.release([say(engine, text)[0]])
    assert counts(say(engine, [1, 2, 3, 7])[1]) == (3, 1)
    assert counts(say(engine, [1, 9, 9, 9])[1]) == (3, 1)


def test_equal_rows_of_one_call_are_evaluated_once() -> None:
    engine = make()
    usage = Usage()
    sequences, jobs = start_all(engine, [A, A, A], usage)
    assert counts(usage) == (12, 6) and usage.decode_calls == 1
    assert jobs[1:] == [None, None] and all(list(s.tokens) == A for s in sequences)
    engine.check()


def test_equal_rows_of_a_recurrent_model_are_evaluated_once() -> None:
    usage = Usage()
    start_all(make(recurrent=True), [A, A], usage)
    assert counts(usage) == (6, 6)


def test_equal_rows_share_even_where_all_logits_are_wanted() -> None:
    usage = Usage()
    start_all(make(), [A, A], usage, [0, 0])
    assert counts(usage) == (6, 6)


def test_different_rows_whose_logits_are_all_wanted_do_not_wait_for_each_other() -> None:
    engine = make(n_batch=16, n_outputs=16)
    usage = Usage()
    start_all(engine, [A, [*A, 7]], usage, [0, 0])
    assert counts(usage) == (0, 13) and usage.decode_calls == 1


def test_rows_of_one_call_share_their_prefix() -> None:
    usage = Usage()
    start_all(make(), [[*A, 7], [*A, 8, 9], [5]], usage)
    assert counts(usage) == (6, 7 + 2 + 1)


def test_without_prefix_reuse_nothing_is_kept_and_the_cells_are_the_same() -> None:
    engine = make(prefix_reuse=False)
    for _ in range(2):
        sequence, usage = say(engine, A)
        assert counts(usage) == (0, 6) and sequence.seq_id == 0
        engine.release([sequence])
        assert engine.pool.sequences == [] and engine.backend.cells == []  # type: ignore[attr-defined]


def test_vectors_are_never_matched() -> None:
    engine = make()
    for _ in range(2):
        usage = Usage()
        sequence = engine.new()
        done = job(sequence, [EMBEDDED] * 3)
        done.embeds = np.ones((3, 4), np.float32)
        engine.evaluate([done], usage)
        assert counts(usage) == (0, 3)
        engine.release([sequence])
        assert sequence.closed  # nobody could ever match it
    with pytest.raises(InvalidInputError, match="3 numbers; this model takes 4"):
        done.embeds = np.ones((3, 3), np.float32)
        done.sequence = engine.new()
        engine.evaluate([done], Usage())
    starts = engine.start([np.full(3, EMBEDDED, np.int32)] * 2, [2, 2], Usage())
    assert [leader for _, leader in starts] == [None, None]


# -- going back -----------------------------------------------------------------------------------------


def test_truncating_attention_costs_nothing() -> None:
    engine = make()
    sequence, _ = say(engine, A)
    sequence.truncate(4)
    assert go_on(engine, sequence, [9]).evaluated_tokens == 1


def test_truncating_a_state_evaluates_again() -> None:
    engine = make(recurrent=True)
    sequence, _ = say(engine, A)
    sequence.truncate(4)
    assert not sequence.resident and list(sequence.tokens) == A[:4]
    assert go_on(engine, sequence, [9]).evaluated_tokens == 5


def test_a_sliding_window_goes_back_only_as_far_as_it_holds_cells() -> None:
    engine = make(window=4)
    sequence, _ = say(engine, [*A, 7, 8])
    sequence.truncate(2)
    assert not sequence.resident
    assert go_on(engine, sequence, [9]).evaluated_tokens == 3
    fresh, _ = say(engine, [1, 1, 1])
    fresh.truncate(1)  # nothing has slid out yet
    assert fresh.resident and go_on(engine, fresh, [9]).evaluated_tokens == 1


@pytest.mark.parametrize("length", [-1, 7])
def test_truncating_to_an_impossible_length(length: int) -> None:
    sequence, _ = say(make(), A)
    with pytest.raises(IndexError, match=f"cannot truncate 6 tokens to {length}"):
        sequence.truncate(length)


def test_a_parked_sequence_is_truncated_without_losing_its_state() -> None:
    engine = make()
    sequence, _ = say(engine, A)
    engine.pool.room.park(sequence)
    sequence.truncate(4)
    assert go_on(engine, sequence, [9]).evaluated_tokens == 1


def test_vectors_in_a_memory_that_cannot_go_back() -> None:
    engine = make(recurrent=True)
    sequence = engine.new()
    done = job(sequence, [EMBEDDED] * 3)
    done.embeds = np.ones((3, 4), np.float32)
    engine.evaluate([done], Usage())
    with pytest.raises(UnsupportedFeatureError, match="start over"):
        sequence.truncate(2)
    assert len(sequence) == 3 and sequence.resident
    engine.backend.fail_next(-3, 1)  # type: ignore[attr-defined]
    with pytest.raises(DecodeError):
        engine.evaluate([job(sequence, [1, 2])], Usage())
    assert sequence.closed
    with pytest.raises(ClosedError, match="start again"):
        engine.evaluate([job(sequence, [1])], Usage())
    engine.check()


# -- the end of a sequence ------------------------------------------------------------------------------


def test_what_finalizers_leave_is_released_by_the_next_call() -> None:
    engine = make()
    sequence, _ = say(engine, A)
    engine.pool.release_later([sequence])
    assert sequence.held
    _, usage = say(engine, [*A, 7])
    assert counts(usage) == (6, 1) and sequence.closed
    engine.pool.release_later([sequence, sequence])  # closed already
    engine.forget()


def test_a_sequence_that_an_idle_one_covers_is_closed_at_once() -> None:
    engine = make()
    long, _ = say(engine, A)
    short = engine.fork(long)
    short.truncate(3)
    assert not engine.pool._is_covered(short), "a held one may be gone in a moment"
    engine.release([long])
    assert engine.pool._is_covered(short) and not engine.pool._is_covered(long)
    engine.release([short])
    assert short.closed and not long.closed
    other, _ = say(engine, [1, 2, 9])
    assert not engine.pool._is_covered(other)
    engine.release([other])
    assert not other.closed
    copy = engine.fork(long)
    engine.pool.room.park(long)
    assert not engine.pool._is_covered(copy), "only a resident one can stand in"


@pytest.mark.parametrize("kind", [{"recurrent": True}, {"window": 4}])
def test_where_memory_cannot_go_back_nothing_covers_another(kind: dict[str, Any]) -> None:
    engine = make(**kind)
    short, _ = say(engine, A)
    say(engine, [*A, 7])
    engine.release([short])
    assert not short.closed


def test_an_empty_or_useless_sequence_is_closed_when_released() -> None:
    engine = make(recurrent=True)
    empty = engine.new()
    parked, _ = say(engine, A)
    parked.truncate(2)  # a state that cannot go back: tokens without memory
    engine.release([empty, parked])
    assert empty.closed and parked.closed and engine.pool.sequences == []


def test_an_empty_buffer_starts_at_its_first_cell_again() -> None:
    engine = make()
    sequences = [say(engine, [n])[0] for n in range(3)]
    engine.discard(sequences[::-1])
    assert say(engine, A)[0].seq_id == 0


def test_check_finds_books_that_are_wrong() -> None:
    engine = make()
    sequence, _ = say(engine, A)
    sequence.tokens.pop()
    with pytest.raises(AssertionError, match=r"llama\.cpp holds 6 positions"):
        engine.check()
    pool = SequencePool(FakeBackend(), Keeping(), SavedStates(1 << 20))
    pool.memory.free.pop()
    with pytest.raises(AssertionError):
        pool.check()


def test_repr_says_where_it_is() -> None:
    engine = make()
    sequence, _ = say(engine, A)
    assert repr(sequence) == "Sequence(6 tokens, seq_id=0, held)"
    engine.pool.room.park(sequence)
    assert "saved, held" in repr(sequence)
    sequence.close()
    assert "parked, closed" in repr(sequence)
