"""The engine against the naive one, through anything callers may do, over a `FakeBackend`.

One machine, three kinds of memory: plain attention, a sliding window that drops cells, a recurrent state. The
settings are small (few cells, few sequence ids, little host memory), so that eviction, parking, restoring and
growth happen in nearly every run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transformers_llamacpp import room
from transformers_llamacpp.batch import Job
from transformers_llamacpp.engine import Engine, Usage, Wanted
from transformers_llamacpp.errors import (
    CacheFullError,
    ContextOverflowError,
    DecodeError,
    GenerationCancelled,
    UnsupportedFeatureError,
)
from transformers_llamacpp.sequence import EMBEDDED, Sequence
from transformers_llamacpp.testing import FakeBackend, fake_token
from unit.naive import NaiveEngine, NaiveRow, expected_logits, job, start_all

MAX_ROWS = 6
N_CTX = 40

words = st.lists(st.integers(0, 2), min_size=1, max_size=12)
picks = st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=3)


class EngineMachine(RuleBasedStateMachine):
    window = 0
    recurrent = False

    @initialize(
        prefix_reuse=st.sampled_from([True, True, True, False]),
        host_cache_bytes=st.sampled_from([0, 500, 1 << 20]),
        n_cells=st.sampled_from([48, 72, 200]),
        n_seq_max=st.integers(1, 3),
        n_batch=st.integers(2, 8),
        n_outputs=st.integers(1, 8),
        spare=st.sampled_from([0, 5, 256]),
    )
    def begin(self, prefix_reuse: bool, host_cache_bytes: int, spare: int, **sizes: int) -> None:
        self.spare = room.SPARE
        room.SPARE = spare
        self.backend = FakeBackend(
            n_vocab=8, n_seq_limit=MAX_ROWS, window=self.window, recurrent=self.recurrent, **sizes
        )
        self.engine = Engine(self.backend, N_CTX, prefix_reuse, host_cache_bytes)
        self.naive = NaiveEngine()
        self.usage = Usage()
        self.rows: list[tuple[Sequence, NaiveRow]] = []
        self.past: list[list[int]] = [[0]]
        self.lost = False
        self.grow_armed = False

    # -- what may happen, and what must be true then ----------------------------------------------------

    def chosen(self, picked: list[int]) -> list[tuple[Sequence, NaiveRow]]:
        return [self.rows[i] for i in sorted({pick % len(self.rows) for pick in picked})]

    def attempt(self, rows: list[NaiveRow], new: list[list[int]]) -> None:
        for _ in range(2 if self.grow_armed else 1):  # a context that comes up empty is filled a second time
            self.naive.attempt(rows, new)

    def fragile(self, row: NaiveRow) -> bool:
        """It holds vectors, and the memory cannot always bring them back."""
        return any(token >= 1 << 32 for token in row.text) and (
            bool(self.window) or self.recurrent or self.lost
        )

    def excuse(self, error: Exception, rows: list[NaiveRow], new: list[list[int]]) -> None:
        """`CacheFullError` only where the rows of this call do not fit even alone."""
        if isinstance(error, UnsupportedFeatureError):
            assert any(self.fragile(row) for row in rows), error
        else:
            needed = sum(len(row.text) + len(tokens) for row, tokens in zip(rows, new, strict=True))
            cut = any(
                token >= 1 << 32 for row in rows for token in row.text
            )  # a saved state may have a longer tail
            assert needed > self.backend.limits.n_cells or cut or "no memory" in str(error), error

    def evaluate(self, rows: list[tuple[Sequence, NaiveRow]], new: list[list[int]], jobs: list[Job]) -> None:
        resident = all(sequence.resident for sequence, _ in rows)
        before = self.usage.evaluated_tokens
        self.attempt([row for _, row in rows], new)
        try:
            self.engine.evaluate(jobs, self.usage)
        except (CacheFullError, UnsupportedFeatureError) as error:
            self.excuse(error, [row for _, row in rows], new)
            self.drop_closed(rows)
            return
        cost, total = self.usage.evaluated_tokens - before, sum(map(len, new))
        assert cost == total if resident else cost >= total
        for (_, row), tokens, done in zip(rows, new, jobs, strict=True):
            self.naive.append(row, tokens)
            self.compare(row.text, done)

    def compare(self, text: list[int], done: Job) -> None:
        start = len(text) - len(done.tokens)
        ends = [start + int(i) + 1 for i in np.flatnonzero(done.outputs)]
        assert (done.logits is None) == (not ends)
        if ends:
            assert done.logits is not None
            np.testing.assert_array_equal(
                done.logits, [expected_logits(text[:end], self.backend) for end in ends]
            )

    def drop_closed(self, rows: list[tuple[Sequence, NaiveRow]]) -> None:
        for sequence, row in rows:
            if sequence.closed:
                assert self.fragile(row), "only what cannot be brought back is given up"
                self.rows = [pair for pair in self.rows if pair[0] is not sequence]
                self.naive.drop(row)

    def keep(self, sequence: Sequence, row: NaiveRow) -> None:
        self.rows.append((sequence, row))
        self.past = [*self.past[-8:], [t for t in row.text if t < 1 << 32]]

    # -- new texts --------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.rows) <= MAX_ROWS - 3)
    @rule(data=st.data(), tails=st.lists(words, min_size=1, max_size=3), all_rows=st.booleans())
    def start(self, data: st.DataObject, tails: list[list[int]], all_rows: bool) -> None:
        texts = []
        for tail in tails:
            old = data.draw(st.sampled_from([*self.past, *texts]))
            texts.append([*old[: data.draw(st.integers(0, len(old)))], *tail][:N_CTX])
        firsts = [data.draw(st.integers(0, len(text) - 1)) if all_rows else len(text) - 1 for text in texts]
        used = Usage()
        self.attempt([self.naive.new() for _ in texts], texts)
        known = len(self.engine.pool.sequences)
        try:
            sequences, jobs = start_all(self.engine, texts, used, firsts)
        except CacheFullError as error:
            self.excuse(error, [NaiveRow([]) for _ in texts], texts)
            sequences, jobs, texts = [], [], []
            assert sum(s.held for s in self.engine.pool.sequences) <= known
        self.usage.evaluated_tokens += used.evaluated_tokens
        self.usage.decode_calls += used.decode_calls
        if sequences and not self.lost and not self.grow_armed:
            assert used.reused_tokens + used.evaluated_tokens == sum(map(len, texts))
        for text, sequence, done in zip(texts, sequences, jobs, strict=True):
            if done is not None:
                self.compare(text, done)
            self.keep(sequence, self.naive.new(text))

    # -- going on ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), picked=picks)
    def append(self, data: st.DataObject, picked: list[int]) -> None:
        rows = self.chosen(picked)
        rows = [(s, row) for s, row in rows if len(row.text) < N_CTX]
        new = [data.draw(words)[: N_CTX - len(row.text)] for _, row in rows]
        wanted = [sorted(data.draw(st.sets(st.integers(0, len(tokens) - 1)))) for tokens in new]
        jobs = [job(s, tokens, w) for (s, _), tokens, w in zip(rows, new, wanted, strict=True)]
        self.evaluate(rows, new, jobs)

    @precondition(lambda self: self.rows)
    @rule(pick=st.integers(0, MAX_ROWS - 1), n=st.integers(1, 5), seed=st.integers(0, 3))
    def append_vectors(self, pick: int, n: int, seed: int) -> None:
        sequence, row = self.rows[pick % len(self.rows)]
        if len(row.text) + n > N_CTX:
            return
        vectors = (
            np.full((n, self.backend.limits.n_embd_inp), seed, np.float32)
            + np.arange(n, dtype=np.float32)[:, None]
        )
        done = job(sequence, [EMBEDDED] * n)
        done.embeds = vectors
        self.evaluate([(sequence, row)], [[fake_token(vectors, i) for i in range(n)]], [done])

    @precondition(lambda self: self.rows)
    @rule(pick=st.integers(0, MAX_ROWS - 1))
    def overflow(self, pick: int) -> None:
        sequence, row = self.rows[pick % len(self.rows)]
        try:
            self.engine.evaluate([job(sequence, [1] * (N_CTX + 1 - len(row.text)))], self.usage)
        except ContextOverflowError as error:
            assert (error.needed, error.n_ctx, error.row) == (N_CTX + 1, N_CTX, None)
        else:
            raise AssertionError("more than n_ctx tokens went in")

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), pick=st.integers(0, MAX_ROWS - 1), parked=st.booleans())
    def truncate(self, data: st.DataObject, pick: int, parked: bool) -> None:
        sequence, row = self.rows[pick % len(self.rows)]
        if parked and sequence.resident:
            self.engine.pool.room.park(sequence)
        length = data.draw(st.integers(max(0, len(row.text) - 6), len(row.text)))
        try:
            sequence.truncate(length)
        except UnsupportedFeatureError:
            assert self.fragile(row)
        else:
            self.naive.truncate(row, length)

    # -- copies, and the end ----------------------------------------------------------------------------

    @precondition(lambda self: 0 < len(self.rows) < MAX_ROWS)
    @rule(pick=st.integers(0, MAX_ROWS - 1))
    def fork(self, pick: int) -> None:
        sequence, row = self.rows[pick % len(self.rows)]
        try:
            copy = sequence.fork()
        except CacheFullError as error:
            assert "no memory" in str(error)
        else:
            self.keep(copy, self.naive.fork(row))

    @precondition(lambda self: len(self.rows) >= 2)
    @rule(beams=st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=MAX_ROWS // 2))
    def reorder(self, beams: list[int]) -> None:
        old = self.rows[:3]
        kept = [old[beam % len(old)] for beam in beams]
        busy = [sequence for sequence, _ in old]
        new = []
        for sequence, row in kept:
            try:
                new.append((self.engine.fork(sequence, busy), self.naive.fork(row)))
            except CacheFullError as error:
                assert "no memory" in str(error)
                self.engine.discard([copy for copy, _ in new])
                return
            busy.append(new[-1][0])
        self.engine.discard([sequence for sequence, _ in old])
        for _, row in old:
            self.naive.drop(row)
        self.rows = [*new, *self.rows[len(old) :]]

    @precondition(lambda self: self.rows)
    @rule(
        pick=st.integers(0, MAX_ROWS - 1),
        how=st.sampled_from(["release", "release", "discard", "later", "close"]),
    )
    def end(self, pick: int, how: str) -> None:
        sequence, row = self.rows.pop(pick % len(self.rows))
        self.naive.drop(row)
        if how == "release":
            self.engine.release([sequence])
            self.engine.release([sequence])  # idempotent
        elif how == "discard":
            self.engine.discard([sequence])
        elif how == "later":
            self.engine.pool.release_later([sequence])
        else:
            sequence.close()

    @rule()
    def forget(self) -> None:
        self.engine.forget()
        assert all(sequence.held for sequence in self.engine.pool.sequences)

    @precondition(lambda self: self.rows)
    @rule(pick=st.integers(0, MAX_ROWS - 1))
    def park(self, pick: int) -> None:
        sequence, _ = self.rows[pick % len(self.rows)]
        if sequence.resident:
            self.engine.pool.room.park(sequence)

    # -- failures ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.rows)
    @rule(
        data=st.data(), picked=picks, at=st.integers(0, 2), stored=st.integers(0, 8),
        how=st.sampled_from([-1, -3, 2, "raise", "cancel"]),
    )  # fmt: skip
    def fail(self, data: st.DataObject, picked: list[int], at: int, stored: int, how: Any) -> None:
        """A decode fails, or a callback stops the call, after `at` decodes: nothing may have happened."""
        rows = [(s, row) for s, row in self.chosen(picked) if len(row.text) < N_CTX]
        new = [data.draw(words)[: N_CTX - len(row.text)] for _, row in rows]
        jobs = [job(s, tokens) for (s, _), tokens in zip(rows, new, strict=True)]
        done = 0

        def progress(evaluated: int, total: int) -> object:
            nonlocal done
            done += 1
            assert 0 < evaluated <= total
            if isinstance(how, int) and done == at:
                self.backend.fail_next(how, stored)
            if how == "raise" and done > at:
                raise KeyError("the caller's own")
            return not (how == "cancel" and done > at)

        if isinstance(how, int) and at == 0:
            self.backend.fail_next(how, stored if how != -1 else 0)
        self.attempt([row for _, row in rows], new)
        try:
            self.engine.evaluate(jobs, self.usage, Wanted(progress=progress))
        except DecodeError as error:
            assert error.status == how
        except (KeyError, GenerationCancelled):
            assert how in ("raise", "cancel")
        except (CacheFullError, UnsupportedFeatureError) as error:
            self.excuse(error, [row for _, row in rows], new)
        else:  # it was over before
            for (_, row), tokens in zip(rows, new, strict=True):
                self.naive.append(row, tokens)
        self.backend._failure = None
        self.drop_closed(rows)

    @rule(lost=st.booleans())
    def growth_will_fail(self, lost: bool) -> None:
        self.backend.fail_grow(lost)
        self.grow_armed = self.grow_armed or lost
        self.lost = self.lost or lost

    # -- always -----------------------------------------------------------------------------------------

    @invariant()
    def books_are_right(self) -> None:
        self.engine.check()
        for sequence, row in self.rows:
            assert not sequence.closed and sequence.held
            assert list(sequence.tokens) == [EMBEDDED if token >= 1 << 32 else token for token in row.text]
            if sequence.seq_id is not None and row.text:
                first = self.backend.pos_min(sequence.seq_id)
                assert self.backend.text(sequence.seq_id) == row.text[first:]
                assert first == 0 or self.window
        for sequence in self.engine.pool.sequences:
            if not sequence.held:
                assert self.engine.pool.keeping.prefix_reuse, "prefix_reuse=False keeps nothing idle"
                assert sequence.resident or sequence.is_saved, "it can never be matched"
        assert self.backend.decoded_tokens <= self.naive.evaluated
        assert self.usage.evaluated_tokens == self.backend.decoded_tokens
        assert self.usage.decode_calls == self.backend.decodes

    def teardown(self) -> None:
        room.SPARE = self.spare
        self.engine.release([sequence for sequence, _ in self.rows])
        self.engine.forget()
        assert self.engine.pool.sequences == [] and self.backend.cells == []


class WindowMachine(EngineMachine):
    window = 5


class RecurrentMachine(EngineMachine):
    recurrent = True


steps = settings(deadline=None, max_examples=120, stateful_step_count=40)
TestPlain = EngineMachine.TestCase
TestPlain.settings = steps
TestWindow = WindowMachine.TestCase
TestWindow.settings = steps
TestRecurrent = RecurrentMachine.TestCase
TestRecurrent.settings = steps
