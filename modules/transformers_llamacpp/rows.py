"""Rows of new columns to jobs for the engine, and the engine's answers back to rows and columns.

Numpy only; transformers' tensors end in `modeling.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .batch import Job
from .engine import Engine, Progress, Usage, Wanted
from .errors import ClosedError, InvalidInputError, UnsupportedFeatureError
from .sequence import EMBEDDED, Sequence, shared_prefix

__all__ = ["Answer", "Feed", "feed", "feed_together"]


@dataclass(slots=True)
class Feed:
    """New columns of a batch.

    `ids` int32 `(rows, columns)`, or `embeds` float32 `(rows, columns, n_embd_inp)`. `mask` bool `(rows, columns)`, `None`
    for no padding. `kept`: the columns whose logits are wanted, `[0, columns)`, in the order of the answer.
    """

    ids: npt.NDArray[np.int32] | None
    embeds: npt.NDArray[np.float32] | None
    mask: npt.NDArray[np.bool_] | None
    kept: npt.NDArray[np.intp]
    n_rows: int
    n_columns: int
    want_hidden: bool = False
    hidden_from: list[int] | None = None
    """With `want_hidden`: for each row the first token whose hidden state is wanted; `None` for all of them. Those
    before it come back as zeros, and may be reused from memory."""
    want_layers: tuple[int, ...] = ()
    """The layers whose inputs are wanted, ascending: at the columns of the hidden states with `want_hidden`, else at
    `kept`."""
    layers: list[npt.NDArray[np.float32]] | None = None
    """The answer to `want_layers`: for each of them `(rows, columns or len(kept), width)`, with zeros where `feed` says
    so."""
    progress: Progress | None = None
    n_batch: int | None = None
    prompt: bool = False
    """The first columns of a `generate()`."""
    cold: bool = False
    """Texts that begin start from nothing but each other."""

    def every(self, step: int) -> Feed:
        """The rows `0, step, 2 * step, …`."""
        ids = None if self.ids is None else self.ids[::step]
        embeds = None if self.embeds is None else self.embeds[::step]
        mask = None if self.mask is None else self.mask[::step]
        known = None if self.hidden_from is None else self.hidden_from[::step]
        return replace(self, ids=ids, embeds=embeds, mask=mask, n_rows=self.n_rows // step, hidden_from=known)

    def repeats_rows(self, times: int) -> bool:
        """Whether each row stands `times` times in a row."""
        arrays = [x for x in (self.ids, self.embeds, self.mask) if x is not None]
        return all(np.array_equal(x, x[::times].repeat(times, axis=0)) for x in arrays)


@dataclass(slots=True)
class _Row:
    """One row without its padding. `outputs[i]` is 1 where token `i` needs an output row, `scored[i]` where that is for
    its logits; `source[k]` is the token whose logits answer `kept[k]`, -1 where there is none (padding before the first
    token)."""

    tokens: npt.NDArray[np.int32]
    embeds: npt.NDArray[np.float32] | None
    columns: npt.NDArray[np.intp] | None
    outputs: npt.NDArray[np.int8]
    scored: npt.NDArray[np.int8]
    source: npt.NDArray[np.intp]
    job: Job | None = None
    offset: int = 0
    """Tokens that were not evaluated because the sequence held them already."""


@dataclass(slots=True)
class Answer:
    """What feeding gave: `sequences` as they are now, `logits` `(rows, len(kept), n_vocab)`, and `hidden`, the last
    hidden state `(rows, columns, n_embd)`, zeros where `hidden_from` wants none, or `None`. A masked column after a row's
    first token answers with the logits of the token before it, one before the first with zeros."""

    sequences: list[Sequence]
    logits: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float32] | None


def feed(engine: Engine, sequences: list[Sequence | None], new: Feed, usage: Usage) -> Answer:
    """Store the new columns in the rows' sequences (`None`: a new text, which may start from a prefix in memory).

    `new.layers` is filled in. All or nothing: after an exception the given sequences hold what they held.
    """
    return feed_together(engine, [(sequences, new)], usage)[0]


def feed_together(engine: Engine, parts: list[tuple[list[Sequence | None], Feed]], usage: Usage) -> list[Answer]:
    """As `feed`, for several groups of rows with columns of their own, in the same decodes.

    `progress` and `n_batch` are those of the first group.
    """
    groups = [[_row(new, index) for index in range(new.n_rows)] for _, new in parts]
    rows = [row for group in groups for row in group]
    sequences = [sequence for group, _ in parts for sequence in group]
    for index, (row, sequence) in enumerate(zip(rows, sequences, strict=True)):
        if not len(row.tokens) and (sequence is None or not sequence.tokens):
            raise InvalidInputError(f"row {index} has no token at all: its attention mask is all zeros")
    before = [0 if s is None else len(s.tokens) for s in sequences]
    made: list[Sequence] = []
    lead = parts[0][1]
    if len(parts) > 1:
        lead = replace(lead, want_hidden=any(new.want_hidden for _, new in parts))
    try:
        leaders = _start(engine, rows, sequences, usage, made, lead)
        ready: list[Sequence] = [s for s in sequences if s is not None]
        assert len(ready) == len(rows)
        _wave(engine, rows, ready, [i for i in range(len(rows)) if leaders[i] is None], lead, usage, bool(made))
        waves = [0] * len(rows)
        for index, leader in enumerate(leaders):
            waves[index] = 0 if leader is None else waves[leader] + 1
        for wave in range(1, max(waves) + 1):
            late = [index for index in range(len(rows)) if waves[index] == wave]
            _follow(engine, rows, ready, leaders, late, lead, usage)
    except BaseException:
        engine.release(made)
        for index, sequence in enumerate(sequences):
            if sequence is not None and sequence not in made and len(sequence.tokens) > before[index]:
                _take_back(engine, sequence, before[index])
        raise
    answers, at = [], 0
    for group, (_, new) in zip(groups, parts, strict=True):
        mine = ready[at : at + len(group)]
        if new.want_layers:
            new.layers = _layers(group, new)
        answers.append(Answer(mine, _logits(engine, group, new), _hidden(engine, group, new)))
        at += len(group)
    return answers


def _take_back(engine: Engine, sequence: Sequence, length: int) -> None:
    """Undo what an earlier wave of a failed call stored. Where that is impossible the row is closed, and says so when used;
    the error that is on its way up stays the one the caller sees."""
    try:
        engine.truncate(sequence, length)
    except UnsupportedFeatureError:
        engine.discard([sequence])
    except ClosedError:
        pass  # the model went away meanwhile, and its sequences with it


def _row(new: Feed, index: int) -> _Row:
    mask = None if new.mask is None else new.mask[index]
    columns = None if mask is None or mask.all() else np.flatnonzero(mask)
    if new.embeds is not None:
        embeds = new.embeds[index] if columns is None else new.embeds[index, columns]
        tokens = np.full(len(embeds), EMBEDDED, np.int32)
    else:
        assert new.ids is not None
        embeds = None
        tokens = new.ids[index] if columns is None else new.ids[index, columns]
    outputs = np.zeros(len(tokens), np.int8)
    source = new.kept if columns is None else np.searchsorted(columns, new.kept, side="right") - 1
    outputs[source[source >= 0]] = 1
    scored = outputs
    if new.want_hidden:
        scored = outputs.copy()
        outputs[0 if new.hidden_from is None else new.hidden_from[index] :] = 1
    return _Row(tokens, embeds, columns, outputs, scored, source)


def _start(
    engine: Engine, rows: list[_Row], sequences: list[Sequence | None], usage: Usage, made: list[Sequence], new: Feed
) -> list[int | None]:
    """Give every row that has no text yet a sequence. For each row: the row it has to wait for, or `None`."""
    leaders: list[int | None] = [None] * len(rows)
    fresh = [i for i, s in enumerate(sequences) if s is None or not s.tokens]
    texts = [i for i in fresh if rows[i].embeds is None and len(rows[i].tokens)]
    firsts = [int(np.argmax(rows[i].outputs)) if rows[i].outputs.any() else len(rows[i].tokens) for i in texts]
    begun: list[tuple[Sequence, int | None]] = []
    if texts or new.prompt:
        beside = [s for s in sequences if s is not None]
        begun = engine.start([rows[i].tokens for i in texts], firsts, usage, beside, new.prompt, new.cold)
    for i, (sequence, leader) in zip(texts, begun, strict=True):
        made.append(sequence)
        leaders[i] = None if leader is None else texts[leader]
    started = dict(zip(texts, made, strict=True))
    for i in fresh:
        if i not in started:
            started[i] = engine.new()
            made.append(started[i])
        sequences[i] = started[i]
        rows[i].offset = len(started[i].tokens)
    return leaders


def _wave(
    engine: Engine, rows: list[_Row], sequences: list[Sequence], chosen: list[int], new: Feed, usage: Usage, fresh: bool
) -> None:
    """`fresh`: a text begins, which somebody may come back to."""
    jobs = []
    for index in chosen:
        row = rows[index]
        if len(row.tokens) > row.offset:
            embeds = None if row.embeds is None else row.embeds[row.offset :]
            scored = row.scored[row.offset :] if new.want_hidden else None
            row.job = Job(sequences[index], row.tokens[row.offset :], row.outputs[row.offset :], embeds, scored)
            jobs.append(row.job)
    if jobs:
        wanted = Wanted(new.want_hidden, new.progress, new.n_batch, new.want_layers, new.prompt or fresh)
        engine.evaluate(jobs, usage, wanted)


def _follow(
    engine: Engine, rows: list[_Row], sequences: list[Sequence], leaders: list[int | None], late: list[int],
    new: Feed, usage: Usage,
) -> None:  # fmt: skip
    """Rows that share a prefix with an earlier row of this call start from it; equal rows take its answer too."""
    rest = []
    for index in late:
        leader = leaders[index]
        assert leader is not None
        row, first = rows[index], rows[leader]
        length = shared_prefix(first.tokens, row.tokens)
        twin = length == len(row.tokens) == len(first.tokens)
        twin = twin and np.array_equal(row.outputs, first.outputs) and np.array_equal(row.scored, first.scored)
        if not twin:
            wanted = int(np.argmax(row.outputs)) if row.outputs.any() else length
            length = min(length, wanted, len(row.tokens) - 1)
        row.offset = engine.share(sequences[leader], sequences[index], length, usage, sequences)
        if twin and row.offset == len(row.tokens):
            row.job, row.offset = first.job, first.offset
        else:
            rest.append(index)
    _wave(engine, rows, sequences, rest, new, usage, True)


def _logits(engine: Engine, rows: list[_Row], new: Feed) -> npt.NDArray[np.float32]:
    n_vocab = engine.backend.limits.n_vocab
    if len(rows) == 1:
        row = rows[0]
        if row.job is not None and row.job.logits is not None and len(row.job.logits) == len(new.kept) == 1:
            return row.job.logits[None]
    answer = np.zeros((len(rows), len(new.kept), n_vocab), np.float32)
    for index, row in enumerate(rows):
        if row.job is None or row.job.logits is None:
            continue
        at = np.cumsum(row.scored) - 1  # token -> row of the job's logits
        known = row.source >= 0
        answer[index, known] = row.job.logits[at[row.source[known]]]
    return answer


def _hidden(engine: Engine, rows: list[_Row], new: Feed) -> npt.NDArray[np.float32] | None:
    if not new.want_hidden:
        return None
    answer = np.zeros((len(rows), new.n_columns, engine.backend.limits.n_embd), np.float32)
    for index, row in enumerate(rows):
        if row.job is not None and row.job.embeddings is not None:
            columns = np.arange(new.n_columns) if row.columns is None else row.columns
            answer[index, columns[row.outputs != 0]] = row.job.embeddings
    return answer


def _layers(rows: list[_Row], new: Feed) -> list[npt.NDArray[np.float32]]:
    known = [row for row in rows if row.job is not None and row.job.layers is not None]
    width = known[0].job.layers.shape[-1] if known else 0  # type: ignore[union-attr]
    places = new.n_columns if new.want_hidden else len(new.kept)
    answers = [np.zeros((len(rows), places, width), np.float32) for _ in new.want_layers]
    for index, row in enumerate(rows):
        if row.job is None or row.job.layers is None:
            continue
        if new.want_hidden:
            at: npt.NDArray[np.intp] = np.arange(len(row.job.layers))
            columns = np.arange(new.n_columns) if row.columns is None else row.columns
            to: npt.NDArray[np.intp] = columns[row.outputs != 0]
        else:
            to = np.flatnonzero(row.source >= 0)
            at = np.cumsum(row.outputs, dtype=np.intp)[row.source[to]] - 1
        for number, answer in enumerate(answers):
            answer[index, to] = row.job.layers[at, number]
    return answers
