"""A `LogitsProcessorList` that runs transformers' own processors without their cost."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList

from ...errors import InvalidInputError
from .known import ROW_BY_ROW, Step, step_for
from .rows import Batch, Floats, Row, Scores
from .short import ShortTail

__all__ = ["Chain"]


@dataclass(slots=True)
class _Link:
    processor: Any
    step: Step | None
    """`None`: foreign."""
    plain: bool = False
    """A foreign processor that takes nothing but ids and scores."""


class Chain(LogitsProcessorList):
    """The processors of one `generate()` call, in their order; each one gives what it gives in transformers.

    It is a `LogitsProcessorList`, so whatever goes over one, appends to one or calls one can have it. Which processors are
    known is found out at the first use and again whenever the list holds other objects; their attributes are read at every
    step. A processor is known by its exact class, and only as long as that class has transformers' code (`known.py`): all
    others are `foreign`, and get what transformers would give them, in memory of their own.

    One thread at a time: a chain has scratch memory.
    """

    def __init__(self, processors: LogitsProcessorList | list[Any] | tuple[Any, ...] = ()) -> None:
        super().__init__(processors)
        self._links: list[_Link] = []
        self._tail = ShortTail([])
        self._seen = np.zeros(0, np.bool_)

    @property
    def covered(self) -> bool:
        """Every processor is known: `run` calls no code but ours and transformers'."""
        return not self.foreign

    @property
    def foreign(self) -> list[Any]:
        """The processors that are not known, in their order."""
        return [link.processor for link in self._ready() if link.step is None]

    @property
    def row_by_row(self) -> bool:
        """What becomes of a row does not depend on which others there are: some may be left out from one step to the next."""
        return self.covered and all(
            type(one).__name__ in ROW_BY_ROW and not isinstance(getattr(one, "prompt_ignore_length", None), torch.Tensor)
            for one in self
        )

    def run(self, input_ids: Any, logits: Floats, **kwargs: Any) -> list[Scores]:
        """The scores for the next token of every row.

        `input_ids`: int64 `(rows, length)`, a tensor or an array. `logits`: float32 `(rows, n_vocab)`; it may be overwritten,
        and a dense answer may be a view of it. `kwargs` are for foreign processors that ask for more, as in transformers.
        Raises what the processors raise.
        """
        if not self:
            return [Scores(None, _contiguous(scores)) for scores in logits]
        owned = bool(logits.flags.writeable)
        links = self._ready()
        if not self._tail.begin and len(logits):  # and nothing but the short way
            cut = [self._tail.cut(Row(index, _contiguous(scores), owned)) for index, scores in enumerate(logits)]
            if None not in cut:
                return cut  # type: ignore[return-value]
        if isinstance(input_ids, np.ndarray) and any(link.step is None for link in links):
            input_ids = torch.from_numpy(input_ids)
        rows = [Row(index, _contiguous(scores), owned) for index, scores in enumerate(logits)]
        if len(rows) != len(input_ids) or not rows:
            given: Any = super().__call__(input_ids, torch.from_numpy(logits.copy()), **kwargs)
        else:
            given = self._apply(input_ids, self._batch(input_ids, rows, logits.shape[1]), kwargs, True)
        if isinstance(given, list):
            return given
        if isinstance(given, Batch):
            return [row.candidates() for row in given.rows]
        return [Scores(None, scores) for scores in _each_row(given, len(rows))]

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """As `LogitsProcessorList`: `scores` `(rows, n_vocab)` to a tensor of that shape. `scores` stay what they are, but for
        what a foreign processor does to them. Scores on other devices, of other types or with a gradient go through
        transformers.
        """
        if not self:
            return scores
        if not _takes(scores) or not isinstance(input_ids, torch.Tensor) or len(scores) != len(input_ids):
            return super().__call__(input_ids, scores, **kwargs)
        given = self._apply(input_ids, scores, kwargs)
        if isinstance(given, torch.Tensor):
            return given
        if len(given.rows) == 1 and given.rows[0].ids is None and given.rows[0].owned:
            return given.rows[0].tensor()
        return given.tensor()

    def _apply(self, input_ids: Any, current: Any, kwargs: dict[str, Any], short: bool = False) -> Any:
        """`current` is what the processors made of the scores so far: a `Batch`, or a foreign processor's tensor. `short`: the
        answer may be a list of `Scores`."""
        links = self._ready()
        at = 0
        while at < len(links):
            if at == self._tail.begin and short and isinstance(current, Batch):
                cut = [self._tail.cut(row) for row in current.rows]
                if None not in cut:
                    return cut
            if links[at].step is None:
                current = _ask(links[at], input_ids, current, kwargs)
                at += 1
                if not _takes(current) or len(current) != len(input_ids):
                    return LogitsProcessorList([link.processor for link in links[at:]])(input_ids, current, **kwargs)
                continue
            if not isinstance(current, Batch):
                array = current.detach().numpy()
                rows = [Row(index, _contiguous(scores), False) for index, scores in enumerate(array)]
                current = self._batch(input_ids, rows, array.shape[1])
            with np.errstate(all="ignore"):  # transformers' arithmetic makes NaN and infinities without a word
                while at < len(links) and (step := links[at].step) is not None:
                    if not step(links[at].processor, current):
                        self._delegate(links[at].processor, current)
                    at += 1
                    if at == self._tail.begin:
                        break
        return current

    @staticmethod
    def _delegate(processor: Any, batch: Batch) -> None:
        """Let transformers' own object do it, on memory of its own."""
        scores = processor(batch.input_ids, batch.tensor()).numpy()
        for row, values in zip(batch.rows, scores, strict=True):
            row.divisor = None
            row.set_dense(_contiguous(values), True)

    def _batch(self, input_ids: Any, rows: list[Row], n_vocab: int) -> Batch:
        if len(self._seen) != n_vocab:
            self._seen = np.zeros(n_vocab, np.bool_)
        return Batch(input_ids, rows, n_vocab, self._seen)

    def _ready(self) -> list[_Link]:
        links = self._links
        if len(links) != len(self) or any(link.processor is not one for link, one in zip(links, self, strict=True)):
            self._links = [_link(one, at == len(self) - 1) for at, one in enumerate(self)]
            known = next((at for at in range(len(self), 0, -1) if self._links[at - 1].step is None), 0)
            self._tail = ShortTail(self[known:])
            self._tail.begin += known
        return self._links


def _link(processor: Any, last: bool) -> _Link:
    step = step_for(processor, last)
    if step is not None:
        return _Link(processor, step)
    try:
        plain = len(inspect.signature(processor.__call__).parameters) <= 2
    except (TypeError, ValueError, AttributeError):
        plain = False  # transformers says what is wrong, when it is called
    return _Link(processor, None, plain)


def _ask(link: _Link, input_ids: Any, current: Any, kwargs: dict[str, Any]) -> Any:
    """What a foreign processor makes of the scores."""
    scores = current.tensor() if isinstance(current, Batch) else current
    if link.plain:
        return link.processor(input_ids, scores)
    return LogitsProcessorList([link.processor])(input_ids, scores, **kwargs)


def _each_row(given: Any, n_rows: int) -> Floats:
    """Scores of every row out of what a foreign processor answered; one row is for all of them, as in transformers."""
    if not isinstance(given, torch.Tensor):
        raise InvalidInputError(f"a logits processor answered with a {type(given).__name__}; a tensor of scores is needed")
    scores = given[None] if given.ndim == 1 else given
    if scores.ndim != 2 or len(scores) not in (1, n_rows):
        raise InvalidInputError(
            f"a logits processor answered with scores of shape {tuple(given.shape)}; {n_rows} rows of n_vocab are needed"
        )
    array: Floats = scores.detach().float().cpu().numpy()
    return array if len(array) == n_rows else np.repeat(array, n_rows, axis=0)


def _takes(scores: Any) -> bool:
    """What is known is known of float32 scores on the CPU that want no gradient."""
    return (
        type(scores) is torch.Tensor
        and scores.dtype == torch.float32
        and scores.device.type == "cpu"
        and scores.layout == torch.strided
        and scores.ndim == 2
        and scores.shape[1] > 0
        and not (scores.requires_grad and torch.is_grad_enabled())
    )


def _contiguous(values: Floats) -> Floats:
    return values if values.flags.c_contiguous else np.ascontiguousarray(values)
