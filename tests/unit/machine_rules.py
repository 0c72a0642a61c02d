"""The rules of the machine of `test_engine_machine.py`: anything callers may do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from transformers_llamacpp.engine import Usage, Wanted
from transformers_llamacpp.errors import (
    CacheFullError,
    ContextOverflowError,
    DecodeError,
    GenerationCancelled,
    UnsupportedFeatureError,
)
from transformers_llamacpp.sequence import EMBEDDED
from transformers_llamacpp.testing import fake_token
from unit.machine import MAX_ROWS, Machine
from unit.naive import NaiveRow, job, start_all

words = st.lists(st.integers(0, 2), min_size=1, max_size=12)
picks = st.lists(st.integers(0, MAX_ROWS - 1), min_size=1, max_size=3)


class EngineMachine(Machine):
    # -- new texts --------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.rows) <= MAX_ROWS - 3)
    @rule(data=st.data(), tails=st.lists(words, min_size=1, max_size=3), all_rows=st.booleans(), cut=st.booleans())
    def start(self, data: st.DataObject, tails: list[list[int]], all_rows: bool, cut: bool) -> None:
        texts = []
        for tail in tails:
            old = data.draw(st.sampled_from([*self.past, *texts]))
            first = data.draw(st.integers(0, len(old)))
            gone = data.draw(st.integers(0, 9)) if cut else len(old)  # what comes after a few tokens stays
            texts.append([*old[:first], *([] if cut else tail), *old[first + gone :], *tail][: self.longest])
        firsts = [data.draw(st.integers(0, len(text) - 1)) if all_rows else len(text) - 1 for text in texts]
        used = Usage()
        self.attempt([self.naive.new() for _ in texts], texts)
        known = len(self.engine.pool.sequences)
        try:
            sequences, jobs = start_all(
                self.engine, texts, used, firsts, [sequence for sequence, _ in self.rows], self.in_call
            )
        except CacheFullError as error:
            self.excuse(error, [NaiveRow([]) for _ in texts], texts)
            sequences, jobs, texts = [], [], []
            assert sum(s.held for s in self.engine.pool.sequences) <= known
        self.usage.evaluated_tokens += used.evaluated_tokens
        self.usage.decode_calls += used.decode_calls
        if sequences and not self.lost and not self.grow_armed:
            total = used.reused_tokens + used.evaluated_tokens
            assert total <= sum(map(len, texts)) if self.reuse_min_chunk else total == sum(map(len, texts))
        for text, sequence, done in zip(texts, sequences, jobs, strict=True):
            if done is not None:
                self.compare(text, done)
            self.keep(sequence, self.naive.new(text))

    # -- going on ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), picked=picks)
    def append(self, data: st.DataObject, picked: list[int]) -> None:
        rows = self.chosen(picked)
        rows = [(s, row) for s, row in rows if len(row.text) < self.longest]
        new = [data.draw(words)[: self.longest - len(row.text)] for _, row in rows]
        wanted = [sorted(data.draw(st.sets(st.integers(0, len(tokens) - 1)))) for tokens in new]
        jobs = [job(s, tokens, w) for (s, _), tokens, w in zip(rows, new, wanted, strict=True)]
        self.evaluate(rows, new, jobs, data.draw(st.booleans()))

    @precondition(lambda self: self.rows)
    @rule(pick=st.integers(0, MAX_ROWS - 1), n=st.integers(1, 5), seed=st.integers(0, 3))
    def append_vectors(self, pick: int, n: int, seed: int) -> None:
        sequence, row = self.rows[pick % len(self.rows)]
        if len(row.text) + n > self.longest:
            return
        vectors = (
            np.full((n, self.backend.limits.n_embd_inp), seed, np.float32)
            + np.arange(n, dtype=np.float32)[:, None]
        )
        done = job(sequence, [EMBEDDED] * n)
        done.embeds = vectors
        self.evaluate([(sequence, row)], [[fake_token(vectors, i) for i in range(n)]], [done])

    @precondition(lambda self: self.rows and self.n_sink is None)
    @rule(pick=st.integers(0, MAX_ROWS - 1))
    def overflow(self, pick: int) -> None:
        sequence, row = self.rows[pick % len(self.rows)]
        with pytest.raises(ContextOverflowError) as caught:
            self.engine.evaluate([job(sequence, [1] * (self.n_ctx + 1 - len(row.text)))], self.usage)
        assert (caught.value.needed, caught.value.n_ctx, caught.value.row) == (self.n_ctx + 1, self.n_ctx, None)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), pick=st.integers(0, MAX_ROWS - 1), parked=st.booleans())
    def truncate(self, data: st.DataObject, pick: int, parked: bool) -> None:
        sequence, row = self.rows[pick % len(self.rows)]
        if parked and sequence.resident:
            self.engine.pool.room.park(sequence)
        length = len(row.text) - data.draw(st.integers(0, 6) | st.integers(0, len(row.text)))
        length = max(0, length)
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

    @rule()
    def call(self) -> None:
        """A call of somebody else begins, or ends."""
        if self.in_call:
            self.running.__exit__(None, None, None)
            self.running = self.engine.call()
        else:
            self.running.__enter__()
        self.in_call = not self.in_call

    # -- files ------------------------------------------------------------------------------------------

    @precondition(lambda self: self.files())
    @rule(data=st.data(), how=st.sampled_from(["gone", "short", "flipped", "swapped"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        """Something happens to a file behind our back."""
        file = data.draw(st.sampled_from(self.files()))
        content = bytearray(file.read_bytes())
        if how == "gone":
            file.unlink()
        elif how == "swapped":
            other = data.draw(st.sampled_from(self.files()))
            file.write_bytes(other.read_bytes())
            other.write_bytes(content)
        elif content:
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] ^= 1
            file.write_bytes(content[:at] if how == "short" else content)

    @rule()
    def squeeze(self) -> None:
        """Host memory is short for a moment."""
        states = self.engine.pool.registry.states
        before, states.max_bytes = states.max_bytes, 0
        self.engine.pool.room.trim()
        states.max_bytes = before

    @precondition(lambda self: self.folder)
    @rule()
    def restart(self) -> None:
        """Another process goes on with the folder."""
        self.engine.release([sequence for sequence, _ in self.rows])
        self.engine.close()
        self.open()

    # -- failures ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.rows)
    @rule(
        data=st.data(), picked=picks, at=st.integers(0, 2), stored=st.integers(0, 8),
        how=st.sampled_from([-1, -3, 2, "raise", "cancel"]),
    )  # fmt: skip
    def fail(self, data: st.DataObject, picked: list[int], at: int, stored: int, how: Any) -> None:
        """A decode fails, or a callback stops the call, after `at` decodes: nothing may have happened."""
        rows = [(s, row) for s, row in self.chosen(picked) if len(row.text) < self.longest]
        new = [data.draw(words)[: self.longest - len(row.text)] for _, row in rows]
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

    @rule(times=st.integers(1, 3))
    def copy_ahead(self, times: int) -> None:
        for _ in range(times):
            before = {sequence: sequence.seq_id for sequence in self.engine.pool.sequences if sequence.resident}
            if not self.engine.pool.room.copy_ahead(1):
                break
            assert {sequence: sequence.seq_id for sequence in self.engine.pool.sequences if sequence.resident} == before

    @rule(lost=st.booleans())
    def growth_will_fail(self, lost: bool) -> None:
        self.backend.fail_grow(lost)
        self.grow_armed = self.grow_armed or lost
        self.lost = self.lost or lost
