"""`FakeBackend` is honest: it knows a wrong, missing or doubled cell, and refuses what llama.cpp refuses."""

from __future__ import annotations

import numpy as np
import pytest

from transformers_llamacpp.backend import Backend, DecodeStatus
from transformers_llamacpp.batch import Batch
from transformers_llamacpp.errors import DecodeError, ModelLoadError, StateError
from transformers_llamacpp.testing import FakeBackend, fake_logits
from unit.naive import expected_logits

pytestmark = pytest.mark.once


def batch(tokens: list[int], first: int = 0, seq_id: int = 0, outputs: list[int] | None = None) -> Batch:
    n = len(tokens)
    wanted = np.zeros(n, np.int8)
    wanted[[n - 1] if outputs is None else outputs] = 1
    return Batch(
        tokens=np.array(tokens, np.int32),
        embeds=None,
        positions=np.arange(first, first + n, dtype=np.int32),
        seq_ids=np.full(n, seq_id, np.int32),
        outputs=wanted,
        n_outputs=int(wanted.sum()),
    )


def answer(fake: FakeBackend, more: Batch) -> np.ndarray:
    assert fake.decode(more) is DecodeStatus.OK
    return fake.logits(more.n_outputs)[-1].copy()


def test_it_is_a_backend() -> None:
    fake: Backend = FakeBackend()
    assert fake.limits.n_vocab == 32


def test_logits_are_a_function_of_the_text_and_of_nothing_else() -> None:
    fake = FakeBackend(n_cells=200)
    whole = answer(fake, batch([1, 2, 3]))
    fake.decode(batch([1, 2], seq_id=1))
    np.testing.assert_array_equal(whole, answer(fake, batch([3], 2, seq_id=1)))
    np.testing.assert_array_equal(whole, expected_logits([1, 2, 3], fake))
    different = [[1, 2, 4], [1, 3, 3], [2, 3], [3], [1, 2, 3, 3], [2, 1, 3]]
    assert len({fake_logits(text, 8).tobytes() for text in [[1, 2, 3], *different]}) == 7


def test_every_output_row_is_computed_from_its_own_prefix() -> None:
    fake = FakeBackend()
    fake.decode(batch([1, 2, 3], outputs=[0, 2]))
    np.testing.assert_array_equal(fake.logits(2), [expected_logits(t, fake) for t in ([1], [1, 2, 3])])
    np.testing.assert_array_equal(fake.embeddings(2), fake.logits(2)[:, :4])
    with pytest.raises(AssertionError, match="1 rows asked for, 2 computed"):
        fake.logits(1)


@pytest.mark.parametrize("window", [0, 3])
def test_a_wrong_cell_changes_the_answer(window: int) -> None:
    fake = FakeBackend(window=window)
    fake.decode(batch([1, 2, 3]))
    fake.cells[-1].token = 9
    assert not np.array_equal(answer(fake, batch([4], 3)), expected_logits([1, 2, 3, 4], fake))


def test_a_missing_cell_changes_the_answer_or_is_refused() -> None:
    fake = FakeBackend()
    fake.decode(batch([1, 2, 3]))
    assert fake.seq_remove(0, 1, 2)
    assert not np.array_equal(answer(fake, batch([4], 3)), expected_logits([1, 2, 3, 4], fake))
    fake.seq_remove(0, 2, -1)
    with pytest.raises(DecodeError, match="position 2 of sequence 0 is not 1"):
        fake.decode(batch([4], 2))


def test_a_cell_that_a_window_dropped_changes_the_answer() -> None:
    fake = FakeBackend(window=3)
    np.testing.assert_array_equal(
        answer(fake, batch([1, 2, 3, 4, 5])), expected_logits([1, 2, 3, 4, 5], fake)
    )
    assert (fake.pos_min(0), fake.pos_max(0)) == (2, 4)
    assert fake.seq_remove(0, 3, -1), "like llama.cpp, it does not say that this cannot work"
    assert not np.array_equal(answer(fake, batch([9], 3)), expected_logits([1, 2, 3, 9], fake))


def test_copies_share_cells() -> None:
    fake = FakeBackend()
    fake.decode(batch([1, 2, 3]))
    fake.seq_copy(0, 1)
    assert len(fake.cells) == 3 and fake.text(1) == [1, 2, 3]
    fake.seq_remove(0, -1, -1)
    assert len(fake.cells) == 3 and fake.text(0) == [] and fake.pos_max(0) == fake.pos_min(0) == -1
    fake.decode(batch([4], 3, seq_id=1))
    with pytest.raises(AssertionError, match="not empty"):
        fake.seq_copy(0, 1)


def test_a_state_goes_back_only_whole() -> None:
    fake = FakeBackend(recurrent=True)
    fake.decode(batch([1, 2, 3]))
    assert not fake.seq_remove(0, 2, -1) and not fake.seq_remove(0, 0, 2)
    assert fake.text(0) == [1, 2, 3]
    assert fake.seq_remove(0, 3, -1), "nothing is there to remove"
    assert fake.seq_remove(0, -1, -1) and fake.text(0) == []


def test_no_room_stores_nothing() -> None:
    fake = FakeBackend(n_cells=4)
    fake.decode(batch([1, 2, 3]))
    assert fake.decode(batch([4, 5], 3)) is DecodeStatus.NO_SLOT
    assert fake.text(0) == [1, 2, 3] and fake.decoded_tokens == 3 and fake.decodes == 1


@pytest.mark.parametrize(
    "wrong", [batch([1], 1), batch([1], seq_id=4), batch([1], seq_id=-1), batch([-1]), batch([5, 32])]
)
def test_an_invalid_batch_stores_nothing(wrong: Batch) -> None:
    fake = FakeBackend()
    with pytest.raises(DecodeError) as caught:
        fake.decode(wrong)
    assert caught.value.status == -1 and fake.cells == []


def test_a_batch_over_the_limits_is_a_fault_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        FakeBackend(n_batch=2).decode(batch([1, 2, 3]))
    with pytest.raises(AssertionError):
        FakeBackend(n_outputs=1).decode(batch([1, 2, 3], outputs=[0, 1]))


def test_failures_to_order() -> None:
    fake = FakeBackend()
    fake.fail_next(2, 2)
    assert fake.decode(batch([1, 2, 3])) is DecodeStatus.ABORTED and fake.text(0) == [1, 2]
    fake.fail_next(-3, 1)
    with pytest.raises(DecodeError) as caught:
        fake.decode(batch([3, 4], 2))
    assert caught.value.status == -3 and fake.text(0) == [1, 2, 3]
    fake.fail_next(1)
    assert fake.decode(batch([4], 3)) is DecodeStatus.NO_SLOT
    assert fake.decode(batch([4], 3)) is DecodeStatus.OK


def test_a_view_that_is_kept_too_long_shows() -> None:
    fake = FakeBackend()
    fake.decode(batch([1]))
    view = fake.logits(1)
    fake.decode(batch([2], 1, outputs=[]))
    assert np.isnan(view).all()


@pytest.mark.parametrize("window", [0, 3])
def test_states_come_back_bit_for_bit(window: int) -> None:
    fake = FakeBackend(n_cells=8, window=window)
    fake.decode(batch([1, 2, 3, 4, 5]))
    state = fake.state_save(0)
    expected = answer(fake, batch([6], 5))
    assert not fake.state_load(1, state) or window
    fake.clear()
    assert fake.state_load(2, state)
    np.testing.assert_array_equal(answer(fake, batch([6], 5, seq_id=2)), expected)


def test_growth() -> None:
    fake = FakeBackend(n_seq_max=1, n_seq_limit=4)
    fake.decode(batch([1, 2]))
    fake.grow(2)
    assert fake.limits.n_seq_max == 2 and fake.text(0) == [1, 2]
    fake.fail_grow(lost=False)
    with pytest.raises(ModelLoadError):
        fake.grow(3)
    assert fake.limits.n_seq_max == 2 and fake.text(0) == [1, 2]
    fake.fail_grow(lost=True)
    with pytest.raises(StateError):
        fake.grow(3)
    assert fake.limits.n_seq_max == 3 and fake.text(0) == []
    with pytest.raises(AssertionError):
        fake.grow(5)
