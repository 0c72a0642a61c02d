"""What the machine of `test_engine_machine.py` stands on: settings, what may fail and why, and what must always be true."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence as List
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from transformers_llamacpp import room
from transformers_llamacpp.batch import Job
from transformers_llamacpp.engine import Engine, Usage, Wanted
from transformers_llamacpp.errors import CacheFullError, UnsupportedFeatureError
from transformers_llamacpp.sequence import EMBEDDED, Sequence
from transformers_llamacpp.state_folder import StateFolder
from transformers_llamacpp.testing import FakeBackend
from unit.naive import NaiveEngine, NaiveRow, held, logits_of

MAX_ROWS = 6
VECTOR = 1 << 32
"""Numbers from here on are vectors."""


class Machine(RuleBasedStateMachine):
    window = 0
    swa_full = False
    recurrent = False
    n_ctx = 40
    n_sink: int | None = None
    reuse_min_chunk = 0
    with_folder = False

    @initialize(
        prefix_reuse=st.sampled_from([True, True, True, False]),
        host_cache_bytes=st.sampled_from([0, 500, 1 << 20]),
        folder_bytes=st.sampled_from([2500, 1 << 20]),
        n_cells=st.sampled_from([48, 72, 200]),
        n_seq_max=st.integers(1, 3),
        n_batch=st.integers(2, 8),
        n_outputs=st.integers(1, 8),
        spare=st.sampled_from([0, 5, 256]),
        part=st.sampled_from([2, 32]),
    )
    def begin(
        self, prefix_reuse: bool, host_cache_bytes: int, folder_bytes: int, spare: int, part: int, **sizes: int
    ) -> None:
        self.constants = room.SPARE, room.PART
        room.SPARE, room.PART = spare, part
        self.sizes = sizes
        self.keeping = prefix_reuse, host_cache_bytes, folder_bytes
        self.folder = tempfile.TemporaryDirectory() if self.with_folder else None
        self.past: list[list[int]] = [[0]]
        self.open()

    def open(self) -> None:
        prefix_reuse, host_cache_bytes, folder_bytes = self.keeping
        self.backend = FakeBackend(
            n_vocab=8, n_seq_limit=MAX_ROWS, window=self.window, swa_full=self.swa_full, recurrent=self.recurrent,
            **self.sizes,
        )  # fmt: skip
        folder = StateFolder(self.folder.name, self.backend.fingerprint, folder_bytes) if self.folder else None
        self.engine = Engine(
            self.backend, self.n_ctx, prefix_reuse, host_cache_bytes, self.n_sink, self.reuse_min_chunk, folder
        )
        self.naive = NaiveEngine()
        self.usage = Usage()
        self.rows: list[tuple[Sequence, NaiveRow]] = []
        self.running = self.engine.call()
        self.in_call = False
        self.lost = False
        self.grow_armed = False

    @property
    def longest(self) -> int:
        """Tokens a text may have."""
        return self.n_ctx if self.n_sink is None else 3 * self.n_ctx

    def files(self) -> list[Path]:
        return sorted(Path(self.folder.name).glob("*.state")) if self.folder else []

    def chosen(self, picked: list[int]) -> list[tuple[Sequence, NaiveRow]]:
        return [self.rows[i] for i in sorted({pick % len(self.rows) for pick in picked})]

    def attempt(self, rows: list[NaiveRow], new: list[list[int]]) -> None:
        for _ in range(2 if self.grow_armed else 1):  # a context that comes up empty is filled a second time
            self.naive.attempt(rows, new)

    def fragile(self, row: NaiveRow) -> bool:
        """It holds vectors, and the memory cannot always bring them back."""
        forgets = bool(self.window) or self.recurrent or self.n_sink is not None or self.lost or self.with_folder
        return forgets and any(token >= VECTOR for token in row.text)

    def positions(self, text: List[int], more: int = 0) -> int:
        """The most cells that a text needs while `more` tokens come."""
        return min(len(text) + more, self.n_ctx)

    def excuse(self, error: Exception, rows: list[NaiveRow], new: list[list[int]]) -> None:
        """`CacheFullError` only where the rows of this call do not fit even alone."""
        if isinstance(error, UnsupportedFeatureError):
            assert any(self.fragile(row) for row in rows), error
        else:
            needed = sum(
                self.positions(row.text, len(tokens)) for row, tokens in zip(rows, new, strict=True)
            )
            # a saved state may have a longer tail
            cut = any(token >= VECTOR for row in rows for token in row.text)
            assert needed > self.backend.limits.n_cells or cut or "no memory" in str(error), error

    def evaluate(
        self, rows: list[tuple[Sequence, NaiveRow]], new: list[list[int]], jobs: list[Job], prompt: bool = False
    ) -> None:
        resident = all(sequence.resident for sequence, _ in rows)
        before = self.usage.evaluated_tokens
        self.attempt([row for _, row in rows], new)
        try:
            plain = all(len(done.tokens) == 1 and done.embeds is None and done.outputs[0] for done in jobs)
            if jobs and plain and not prompt:
                self.step(jobs)
            else:
                self.engine.evaluate(jobs, self.usage, Wanted(prompt=prompt))
        except (CacheFullError, UnsupportedFeatureError) as error:
            self.excuse(error, [row for _, row in rows], new)
            self.drop_closed(rows)
            return
        cost, total = self.usage.evaluated_tokens - before, sum(map(len, new))
        assert cost == total if resident else cost >= total
        for (_, row), tokens, done in zip(rows, new, jobs, strict=True):
            self.naive.append(row, tokens)
            self.compare(row.text, done)

    def step(self, jobs: list[Job]) -> None:
        """A token each, as the decoding loop takes it."""
        logits = self.engine.step(
            [done.sequence for done in jobs], [int(done.tokens[0]) for done in jobs], self.usage, np.copy
        )
        for done, row in zip(jobs, logits, strict=True):
            done.logits = row[None]

    def compare(self, text: list[int], done: Job) -> None:
        start = len(text) - len(done.tokens)
        ends = [start + int(i) + 1 for i in np.flatnonzero(done.outputs)]
        assert (done.logits is None) == (not ends)
        if ends:
            assert done.logits is not None
            np.testing.assert_array_equal(
                done.logits, [logits_of(text[:end], self.backend, self.n_ctx, self.n_sink) for end in ends]
            )

    def drop_closed(self, rows: list[tuple[Sequence, NaiveRow]]) -> None:
        for sequence, row in rows:
            if sequence.closed:
                assert self.fragile(row), "only what cannot be brought back is given up"
                self.rows = [pair for pair in self.rows if pair[0] is not sequence]
                self.naive.drop(row)

    def keep(self, sequence: Sequence, row: NaiveRow) -> None:
        self.rows.append((sequence, row))
        self.past = [*self.past[-8:], [t for t in row.text if t < VECTOR]]

    # -- always -----------------------------------------------------------------------------------------

    @invariant()
    def books_are_right(self) -> None:
        self.engine.check()
        for sequence, row in self.rows:
            assert not sequence.closed and sequence.held
            assert list(sequence.tokens) == [EMBEDDED if token >= VECTOR else token for token in row.text]
            text = held(row.text, self.n_ctx, self.n_sink)
            if not (sequence.resident or sequence.is_saved):
                continue
            if len(sequence) != len(text):  # cropped to where it was full the last time
                assert len(text) == self.n_ctx and sequence.dropped
                text = held([*row.text, 0], self.n_ctx, self.n_sink)[:-1]
                assert len(sequence) == len(text)
            if sequence.seq_id is not None and row.text:
                first = self.backend.pos_min(sequence.seq_id)
                assert self.backend.text(sequence.seq_id) == text[first:]
                assert first == 0 or self.window
        for sequence in self.engine.pool.sequences:
            if not sequence.held:
                assert self.engine.pool.keeping.prefix_reuse, "prefix_reuse=False keeps nothing idle"
                assert sequence.resident or sequence.is_saved, "it can never be matched"
        assert self.backend.decoded_tokens <= self.naive.evaluated
        assert self.usage.evaluated_tokens == self.backend.decoded_tokens
        assert self.usage.decode_calls == self.backend.decodes
        if self.folder is not None:
            sizes = [file.stat().st_size for file in self.files()]
            assert sum(sizes) <= self.keeping[2]

    def teardown(self) -> None:
        room.SPARE, room.PART = self.constants
        self.engine.release([sequence for sequence, _ in self.rows])
        self.engine.forget()
        assert self.engine.pool.sequences == [] and self.backend.cells == []
        if self.folder is not None:
            self.folder.cleanup()
