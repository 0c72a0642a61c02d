"""Which sequence has to go when cells or sequence ids run out, and what an error says when none can."""

from __future__ import annotations

import pytest

from transformers_llamacpp.engine import Usage
from transformers_llamacpp.errors import (
    CacheFullError,
)
from unit.naive import A, counts, go_on, job, make, say, start_all

pytestmark = pytest.mark.once


def test_the_idle_sequence_used_longest_ago_goes_first() -> None:
    engine = make(n_cells=18, host_cache_bytes=0)
    old, new = say(engine, [1] * 6)[0], say(engine, [2] * 6)[0]
    engine.release([new, old])
    third, _ = say(engine, [3] * 6)
    say(engine, [4] * 6)
    assert new.closed and not old.closed and third.resident, "idle ones first, by last use, never a held one"


def test_an_evicted_sequence_comes_back_from_host_memory() -> None:
    engine = make(n_cells=12)
    first, _ = say(engine, A)
    engine.release([first])
    second, _ = say(engine, [7] * 8)
    assert first.is_saved and not first.resident
    engine.release([second])
    assert counts(say(engine, [*A, 9])[1]) == (6, 1)


def test_host_memory_is_bounded() -> None:
    one = 6 * 16  # bytes the fake saves for six tokens
    engine = make(n_cells=8, host_cache_bytes=2 * one)
    texts = [[n] * 6 for n in range(1, 6)]
    for text in texts:
        engine.release([say(engine, text)[0]])
    saved = [list(s.tokens) for s in engine.pool.sequences if s.is_saved]
    assert saved == texts[2:4]  # the newest is resident still, the oldest are gone
    engine.check()


def test_held_sequences_survive_a_lack_of_cells() -> None:
    engine = make(n_cells=16, host_cache_bytes=0)
    kept = [say(engine, [n] * 7)[0] for n in range(5)]
    assert sum(s.resident for s in kept) == 2 and all(len(s) == 7 for s in kept)
    for sequence in kept:  # saved states of held ones have no limit: nothing is evaluated again
        assert go_on(engine, sequence, [9]).evaluated_tokens == 1


def test_held_sequences_survive_a_lack_of_ids() -> None:
    engine = make(n_cells=64, n_seq_max=2, n_seq_limit=2)
    kept = [say(engine, [n] * 3)[0] for n in range(5)]
    for sequence in kept:
        assert go_on(engine, sequence, [9]).evaluated_tokens == 1


def test_no_cells_left() -> None:
    engine = make(n_cells=16)
    sequences = [say(engine, [n] * 7)[0] for n in (1, 2)]
    with pytest.raises(CacheFullError, match="larger n_cells") as caught:
        engine.evaluate([job(s, [3, 4]) for s in sequences], Usage())
    assert (caught.value.needed, caught.value.limit) == (18, 16)
    engine.check()
    for sequence, n in zip(sequences, (1, 2), strict=True):
        assert list(sequence.tokens) == [n] * 7
        go_on(engine, sequence, [9])


def test_no_sequence_ids_left() -> None:
    engine = make(n_seq_max=2, n_seq_limit=3)
    sequences = [engine.new() for _ in range(4)]
    with pytest.raises(
        CacheFullError, match=r"4 sequences are needed at once and llama\.cpp allows 3"
    ) as caught:
        engine.evaluate([job(s, [1]) for s in sequences], Usage())
    assert (caught.value.needed, caught.value.limit) == (4, 3)
    engine.check()
    engine.evaluate([job(s, [1]) for s in sequences[:3]], Usage())
    engine.check()


def test_a_full_pool_still_evaluates_what_it_cannot_fork() -> None:
    engine = make(n_seq_max=1, n_seq_limit=1)
    engine.release([say(engine, A)[0]])
    _, usage = say(engine, [1, 2, 3, 9])
    assert counts(usage) == (0, 4)


def test_sequence_ids_grow_in_steps_up_to_the_limit() -> None:
    engine = make(n_seq_max=1, n_seq_limit=5)
    sizes = []
    kept = []
    for n in range(7):
        kept.append(say(engine, [n, 1])[0])
        sizes.append(engine.backend.limits.n_seq_max)
    assert sizes == [1, 2, 4, 4, 5, 5, 5]
    assert [s.resident for s in kept].count(True) == 5
    many = make(n_seq_max=1, n_seq_limit=16)
    start_all(many, [[n] for n in range(9)], Usage())
    assert many.backend.limits.n_seq_max == 9


def test_growth_without_memory() -> None:
    engine = make(n_seq_max=1)
    first, _ = say(engine, A)
    engine.backend.fail_grow(lost=False)  # type: ignore[attr-defined]
    second, _ = say(engine, [9])  # parks the held one instead
    assert first.is_saved
    engine.discard([second])
    engine.backend.fail_grow(lost=False)  # type: ignore[attr-defined]
    with pytest.raises(CacheFullError, match="no memory for more"):
        start_all(engine, [[5], [6]], Usage())
    engine.check()
    assert go_on(engine, first, [7]).evaluated_tokens == 1


def test_growth_that_loses_everything() -> None:
    engine = make(n_seq_max=1)
    first, _ = say(engine, A)
    engine.backend.fail_grow(lost=True)  # type: ignore[attr-defined]
    copy = engine.fork(first)
    assert list(copy.tokens) == A and not copy.resident and not first.resident
    engine.check()
    assert go_on(engine, first, [7]).evaluated_tokens == 7
    assert go_on(engine, copy, [8]).evaluated_tokens == 1  # it starts from the other


def test_one_sequence_id_is_enough_for_what_was_saved() -> None:
    engine = make(n_cells=64, n_seq_max=1, n_seq_limit=1)
    first, _ = say(engine, [*A, 20, 21, 22])
    engine.release([first])
    second, _ = say(engine, [7] * 8)
    engine.release([second])
    third, usage = say(engine, [*A, 30, 31])
    assert counts(usage) == (6, 2)
    engine.release([third])
    assert counts(say(engine, [*A, 20, 21, 22, 23])[1]) == (9, 1)
