"""`LlamaCppCache`: transformers' view of a batch (rows, columns, padding) over llama.cpp's view (sequences of tokens).

A *column* is a position in transformers' padded tensors; a *token* is what a sequence really holds. Padding never reaches
llama.cpp: a row with a mask holds exactly its unmasked tokens at contiguous positions, which is what transformers computes
from the same mask.
"""

from __future__ import annotations

import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache

from . import compat
from .cache_life import CacheLife
from .cache_row import Bookmark, Row
from .engine import Engine, Usage
from .errors import CacheFullError, InvalidInputError, UnsupportedFeatureError
from .rows import Feed, feed_together
from .sequence import Sequence
from .state_file import SavedRow, read_state, write_state
from .turn import After, Read

if TYPE_CHECKING:
    from .modeling import LlamaCppForCausalLM

__all__ = ["LlamaCppCache"]

T = TypeVar("T")


class LlamaCppCache(CacheLife, Cache):
    """A `transformers.Cache` over llama.cpp sequences, one per batch row.

    Pass it to `model(...)` or `model.generate(...)` to go on where an earlier call stopped. It is never taken away: if a
    row had to leave the KV buffer, it is brought back from host memory or by evaluating its tokens again. `close()` gives
    its sequences back to the pool, where they stay candidates for prefix reuse; so does garbage collection.

    All methods that change rows (`crop`, `reorder_cache`, `batch_repeat_interleave`, `batch_select_indices`) work by
    reference: rows that share a prefix share its cells. One call at a time goes on with it; what changes it meanwhile from
    another thread is an `InvalidInputError`.
    """

    is_compileable = False
    is_croppable = True
    is_initialized = True

    def __init__(self, model: LlamaCppForCausalLM) -> None:
        self._setup(model.engine, model.config.num_hidden_layers)

    def _setup(self, engine: Engine, n_layer: int) -> None:
        self.layers: list[Any] = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self._engine = engine
        self._n_layer = n_layer
        self._rows: list[Row] = []
        self._columns = 0
        self._begin_life()
        self.companion: LlamaCppCache | None = None
        """A cache with the same rows that goes wherever this one goes, as guidance needs; whoever set it takes it away."""
        self.on_reorder: Any = None  # called with the rows of every `reorder_cache`; whoever set it takes it away

    # -- what transformers asks --------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included."""
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._engine.n_ctx

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self._engine.n_ctx

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._columns + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._columns

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first tokens."""
        return len(self._rows) or -1

    @property
    def max_batch_size(self) -> int:
        return self.batch_size

    @property
    def is_sliding(self) -> list[bool]:
        return [False] * self._n_layer

    @property
    def is_linear(self) -> list[bool]:
        return [False] * self._n_layer

    @property
    def is_dummy(self) -> list[bool]:
        return [False] * self._n_layer

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._columns > 0

    def activate_past_recording(self) -> None:
        """Nothing to switch on: the engine can always go back."""

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return True

    def __len__(self) -> int:
        return self._n_layer

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._rows)} rows x {self._columns} columns"
        return f"LlamaCppCache({state})"

    def update(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedFeatureError(
            "keys and values live inside llama.cpp; a LlamaCppCache works with a LlamaCppForCausalLM only", "update"
        )

    # -- rows ----------------------------------------------------------------------------------------------------

    @property
    def n_tokens(self) -> int:
        """Tokens of all rows together, padding left out."""
        return sum(len(row.sequence.tokens) for row in self._rows)

    @property
    def has_embeddings(self) -> bool:
        return any(row.sequence.has_embeddings for row in self._rows)

    def row_lengths(self, n_rows: int) -> list[int]:
        """Tokens of each row; `n_rows` zeros before the first ones."""
        return [len(row.sequence.tokens) for row in self._rows] or [0] * n_rows

    def column_mask(self, row: int) -> npt.NDArray[np.bool_]:
        """Which columns of that row hold a token: `(columns,)`, false for padding."""
        return self._rows[row].real(self._columns)

    @property
    def sequences(self) -> list[Sequence]:
        """What each row holds now; to be read, and to be forked for tries that may come to nothing."""
        return [row.sequence for row in self._rows]

    def advance(self, sequences: list[Sequence]) -> None:
        """Each row goes on as `sequences[row]`, which is the row's own sequence or a fork of it, one token longer.

        The sequences that are replaced are the caller's to give back. On whichever thread decodes for the call.
        """
        self._open()
        for row, sequence in zip(self._rows, sequences, strict=True):
            row.sequence = sequence
            if row.mask is not None:
                row.mask.append(1)
        self._columns += 1

    def tokens(self, row: int) -> list[int]:
        """The tokens that row holds, padding left out; -1 stands for a position given by `inputs_embeds`."""
        return list(self._rows[row].sequence.tokens)

    def crop(self, argument: int) -> None:  # type: ignore[override]
        """Shorten all rows, with the meaning of the number that the installed transformers gives it:

        up to 5.13 `x >= 0` keeps `x` columns and `-x` removes `x`; 5.14 to 5.23 `x > 0` keeps and `x <= 0` removes; from
        5.24 on only removal, `x <= 0`.
        """
        self.truncate(compat.crop_length(self._columns, argument))

    def truncate(self, columns: int) -> None:
        """Keep the first `columns` columns of every row."""
        self._alive()
        if not 0 <= columns <= self._columns:
            raise InvalidInputError(f"cannot keep {columns} of {self._columns} columns")
        if columns == self._columns:
            return
        if self.companion is not None:
            self.companion.truncate(max(0, self.companion._columns - (self._columns - columns)))
        for row in self._rows:
            self._engine.truncate(row.sequence, row.tokens_in(columns))
            if row.mask is not None:
                del row.mask[columns:]
        self._columns = columns

    def bookmark(self) -> Bookmark | None:
        """A way back to here for a memory that cannot be rewound (recurrent states, sliding windows): copies of the rows by
        reference. `None` where `truncate` needs no help. `go_back` or `drop` must be called with it."""
        self._alive()
        if not self._rows or not self._engine.backend.limits.stateful:
            return None
        busy = [row.sequence for row in self._rows]
        forks: list[Sequence] = []
        try:
            for row in self._rows:
                forks.append(self._engine.fork(row.sequence, [*busy, *forks]))
        except CacheFullError:  # no place for a copy: the way back is to evaluate again
            self._engine.discard(forks)
            return None
        companion = None if self.companion is None else self.companion.bookmark()
        return Bookmark(self._columns, forks, companion)

    def drop(self, bookmark: Bookmark | None) -> None:
        if bookmark is not None:
            self._engine.discard(bookmark.forks)
            if self.companion is not None:
                self.companion.drop(bookmark.companion)

    def go_back(self, columns: int, bookmark: Bookmark | None) -> None:
        """Keep at most the first `columns` columns of every row: those, or as many as the bookmark has.

        Afterwards `get_seq_length()` says how many; what is missing has to be fed again.
        """
        if bookmark is None or columns == self._columns:
            self.truncate(columns)
            self.drop(bookmark)
            return
        self._alive()
        for row, fork in zip(self._rows, bookmark.forks, strict=True):
            self._engine.discard([row.sequence])
            row.sequence = fork
            if row.mask is not None:
                del row.mask[bookmark.columns :]
        removed = self._columns - bookmark.columns
        self._columns = bookmark.columns
        if self.companion is not None:
            self.companion.go_back(self.companion._columns - removed, bookmark.companion)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row `i` becomes what row `beam_idx[i]` was; a row that is asked for twice is forked."""
        if self.on_reorder:
            self.on_reorder(beam_idx.tolist())
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._select(indices.tolist())

    def _select(self, indices: list[int]) -> None:
        self._alive()
        rows = self._rows
        if not rows or indices == list(range(len(rows))):
            return
        indices = [range(len(rows))[index] for index in indices]  # negative ones count from the end; IndexError
        with self._engine.lock:
            used = set(indices)
            self._engine.discard([row.sequence for index, row in enumerate(rows) if index not in used])
            chosen: list[Row] = []
            for index in indices:
                row = rows[index]
                if index in used:
                    used.remove(index)
                    chosen.append(row)
                    continue
                busy = [other.sequence for other in (*rows, *chosen)]
                mask = None if row.mask is None else bytearray(row.mask)
                chosen.append(Row(self._engine.fork(row.sequence, busy), mask))
            rows[:] = chosen
        if self.companion is not None:
            self.companion._select(indices)

    def reset(self) -> None:
        """Empty, as after construction."""
        self._alive()
        self._engine.release([row.sequence for row in self._rows])
        self._rows.clear()
        self._columns = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> LlamaCppCache:
        """By reference: the copy shares all cells, and either can go on."""
        self._alive()
        copy = LlamaCppCache.__new__(LlamaCppCache)
        copy._setup(self._engine, self._n_layer)
        with self._engine.lock:
            for row in self._rows:
                mask = None if row.mask is None else bytearray(row.mask)
                copy._rows.append(Row(self._engine.fork(row.sequence, [r.sequence for r in self._rows]), mask))
        copy._columns = self._columns
        memo[id(self)] = copy
        return copy

    def __copy__(self) -> LlamaCppCache:
        return self.__deepcopy__({})

    def __reduce__(self) -> Any:
        raise UnsupportedFeatureError(
            "a LlamaCppCache cannot be pickled: its cells are llama.cpp's; use cache.save(path) and "
            "LlamaCppCache.load(model, path)",
            "pickle",
        )

    # -- on disk -------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all rows to a file, for `load` in this or another process; the cache itself stays as it is.

        Takes as many bytes as the tokens take in the KV buffer. The file belongs to this model file and its cache types, to
        models with `reuse_min_chunk` if this has it, and where its context slid to the same `n_sink` and `n_ctx`.
        Replaces an older file at once and whole, and only its owner may read it. Raises `StateError` where it cannot be
        written.
        """
        self._alive()
        rows = [
            SavedRow(
                array("i", row.sequence.tokens),
                None if row.mask is None else bytes(row.mask),
                row.sequence.dropped,
                self._engine.save(row.sequence),
            )
            for row in self._rows
        ]
        slid = any(row.dropped for row in rows)
        model = self._engine.backend.fingerprint | self._engine.pool.keeping.marks(slid)
        write_state(Path(path), model, self._columns, rows)

    @classmethod
    def load(cls, model: LlamaCppForCausalLM, path: str | os.PathLike[str]) -> LlamaCppCache:
        """The cache that was saved, ready to go on with: nothing is evaluated.

        Raises `StateError` for a file that is none, is damaged, or belongs to another model; `ContextOverflowError` where
        `n_ctx` is smaller than its rows.
        """
        cache = cls(model)
        engine = cache._engine
        columns, rows = read_state(Path(path), engine.backend.fingerprint, engine.pool.keeping.all_marks())
        try:
            for row in rows:
                mask = None if row.mask is None else bytearray(row.mask)
                cache._rows.append(Row(cache._engine.adopt(row.tokens, row.dropped, row.parts), mask))
        except BaseException:
            cache.close()
            raise
        cache._columns = columns
        return cache

    # -- going on ------------------------------------------------------------------------------------------------

    def matches(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_] | None) -> int:
        """How many leading columns of `ids` (and `mask`) are what this cache holds already."""
        masks = [None] * len(ids) if mask is None else mask
        return min(row.matches(self._columns, ids[index], masks[index]) for index, row in enumerate(self._rows))

    def best_rows(self, ids: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_] | None) -> list[int]:
        """For each row of `ids` the row of this cache that shares most leading columns with it, of equals the first."""
        best = []
        for index, text in enumerate(ids):
            known = [row.matches(self._columns, text, None if mask is None else mask[index]) for row in self._rows]
            best.append(known.index(max(known)))
        return best

    def feed(
        self, feed_: Feed, past_mask: npt.NDArray[np.bool_] | None, usage: Usage
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
        """Store new columns; logits `(rows, kept, n_vocab)` and, if asked for, the last hidden state
        `(rows, columns, n_embd)`. All or nothing. `past_mask` is what the caller believes about the columns so far."""
        if repeats := self._expansion(feed_):
            part = feed_.every(repeats)
            logits, hidden = self.feed(part, None if past_mask is None else past_mask[::repeats], usage)
            self.batch_repeat_interleave(repeats)
            feed_.layers = None if part.layers is None else [states.repeat(repeats, axis=0) for states in part.layers]
            return logits.repeat(repeats, axis=0), None if hidden is None else hidden.repeat(repeats, axis=0)
        self._check(feed_, past_mask)
        answer = feed_together(self._engine, [(self._before(feed_), feed_)], usage)[0]
        self._remember(answer.sequences, feed_)
        return answer.logits, answer.hidden

    def step(self, tokens: list[int], usage: Usage, read: Read[T]) -> T:
        """Store one more column, a token for every row, in one decode; what `read` makes of the logits `(rows, n_vocab)`.
        All or nothing. What `read` gets is llama.cpp's own buffer, see `Engine.step`."""
        answers: list[T] = []
        self.steps(tokens, usage, read, answers.append)
        return answers[0]

    def steps(self, tokens: list[int], usage: Usage, read: Read[T], after: After[T]) -> None:
        """One `step` after the other, with the tokens that `after` makes of what `read` answered, until it says `None`. See
        `Engine.steps` for who calls both."""
        self._alive()
        sequences = self.sequences

        def stored(answer: T) -> list[int] | None:
            self.advance(sequences)
            return after(answer)

        self._engine.steps(sequences, tokens, usage, read, stored)

    def retire(self, kept: list[int]) -> None:
        """Go on with these rows only, in their order; the others' texts stay candidates for prefix reuse."""
        self._alive()
        rows = self._rows
        gone = [row.sequence for index, row in enumerate(rows) if index not in kept]
        rows[:] = [rows[index] for index in kept]
        self._engine.release(gone)

    def feed_beside(
        self, feed_: Feed, past_mask: npt.NDArray[np.bool_] | None, usage: Usage, beside: Feed
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None, npt.NDArray[np.float32]]:
        """As `feed`, with the columns `beside` for the companion in the same decodes; its logits come third."""
        companion = self.companion
        assert companion is not None
        if repeats := self._expansion(feed_, beside):
            if beside.repeats_rows(repeats):
                past, part = None if past_mask is None else past_mask[::repeats], feed_.every(repeats)
                logits, hidden, theirs = self.feed_beside(part, past, usage, beside.every(repeats))
                self.batch_repeat_interleave(repeats)
                feed_.layers = None if part.layers is None else [states.repeat(repeats, axis=0) for states in part.layers]
                hidden = None if hidden is None else hidden.repeat(repeats, axis=0)
                return logits.repeat(repeats, axis=0), hidden, theirs.repeat(repeats, axis=0)
            self.batch_repeat_interleave(repeats)
        self._check(feed_, past_mask)
        companion._check(beside, None)
        parts = [(self._before(feed_), feed_), (companion._before(beside), beside)]
        mine, other = feed_together(self._engine, parts, usage)
        self._remember(mine.sequences, feed_)
        companion._remember(other.sequences, beside)
        return mine.logits, mine.hidden, other.logits

    def _before(self, feed_: Feed) -> list[Sequence | None]:
        return [row.sequence for row in self._rows] or [None] * feed_.n_rows

    def _check(self, feed_: Feed, past_mask: npt.NDArray[np.bool_] | None) -> None:
        self._alive()
        if self._rows and len(self._rows) != feed_.n_rows:
            raise InvalidInputError(
                f"the cache has {len(self._rows)} rows and the input {feed_.n_rows}: choose rows with "
                "cache.batch_select_indices(indices), repeat them with cache.batch_repeat_interleave(n), or use a cache of its "
                "own for each batch"
            )
        self._check_past(past_mask)

    def _expansion(self, feed_: Feed, *beside: Feed) -> int:
        """How often each row is asked for by equal rows of the input, as beams and return sequences do; 0 where none is. Such
        rows are evaluated once and shared: rows beside each other share only what they begin with, with the first of them."""
        n_rows, n_before = feed_.n_rows, len(self._rows)
        if n_before:
            times, rest = divmod(n_rows, n_before)
            return times if times > 1 and not rest and feed_.repeats_rows(times) else 0
        most = n_rows if n_rows <= self._engine.backend.limits.n_seq_limit else 1  # that many are an error, and told at once
        divisors = (times for times in range(most, 1, -1) if n_rows % times == 0)
        return next((times for times in divisors if all(new.repeats_rows(times) for new in (feed_, *beside))), 0)

    def _remember(self, sequences: list[Sequence], feed_: Feed) -> None:
        if not self._rows:
            self._rows.extend(Row(sequence) for sequence in sequences)
        for index, row in enumerate(self._rows):
            if row.sequence is not sequences[index]:  # an empty one that was given a start from memory
                self._engine.discard([row.sequence])
                row.sequence = sequences[index]
            new = None if feed_.mask is None else feed_.mask[index]
            if row.mask is None and new is not None and not new.all():
                row.mask = bytearray(b"\1" * self._columns)
            if row.mask is not None:
                row.mask += b"\1" * feed_.n_columns if new is None else new.astype(np.uint8).tobytes()
        self._columns += feed_.n_columns

    def _check_past(self, past_mask: npt.NDArray[np.bool_] | None) -> None:
        if past_mask is None or not self._rows:
            return
        for index, row in enumerate(self._rows):
            given = past_mask[index]
            same = given.all() if row.mask is None else np.array_equal(given, row.real(self._columns))
            if not same:
                raise InvalidInputError(
                    f"row {index}: the attention mask of the {self._columns} columns in the cache differs from the one "
                    "they were stored with; a column cannot be masked or unmasked afterwards"
                )
