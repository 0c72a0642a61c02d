"""Which rows of a batch are still being written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from ..errors import InvalidInputError

__all__ = ["Rows"]

KNOWN = {kind: kind.__call__ for kind in (MaxLengthCriteria, EosTokenCriteria)}
"""Criteria that are looked at without a tensor, and what they must be unchanged in for that."""


class Rows:
    """A row ends when a stopping criterion says so. Where one of the criteria looks at end tokens, a row that ended gets
    padding from then on; otherwise it goes on until all have ended, as in transformers.

    transformers' own criteria for lengths and end tokens cost nothing here; every other one is called as transformers calls
    it, once after each token.
    """

    def __init__(self, n_rows: int, config: Any, criteria: Any) -> None:
        self.unfinished = [True] * n_rows
        self._pad = config._pad_token_tensor
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        plain = type(criteria) is StoppingCriteriaList
        known = [one for one in criteria if plain and _is_known(one)]
        self._lengths = [one for one in known if type(one) is MaxLengthCriteria]
        self._end_criteria = [one for one in known if type(one) is EosTokenCriteria]
        self._ends_of: list[Any] = []
        self._ends: set[int] = set()
        self._read_ends()
        others = [one for one in criteria if not any(one is mine for mine in known)]
        self._others = StoppingCriteriaList(others) if plain else criteria
        self.calls_others = bool(others)
        """Whether criteria are asked that may look at all rows and scores."""

    @property
    def padded(self) -> list[bool]:
        """The rows whose next token is padding, whatever the model says."""
        return [self._pads and not going_on for going_on in self.unfinished]

    @property
    def pad(self) -> int:
        return int(self._pad)

    def ended(self, input_ids: torch.Tensor, scores: Any) -> bool:
        """After a token for every row: have all rows ended? `input_ids` is `(rows, length)`."""
        return self.ended_with(input_ids[:, -1].tolist(), input_ids.shape[1], lambda: input_ids, scores)

    def ended_with(self, newest: list[int], length: int, ids: Callable[[], torch.Tensor], scores: Any) -> bool:
        """The same for those who know the newest tokens; `ids` is asked for the text by those only who look at it."""
        unfinished = self.unfinished
        for one in self._lengths:
            if length >= one.max_length:
                unfinished = self.unfinished = [False] * len(unfinished)
            elif one.max_position_embeddings is not None and length > one.max_position_embeddings:
                one(ids(), scores)  # for its warning
        if any(one.eos_token_id is not ends for one, ends in zip(self._end_criteria, self._ends_of, strict=True)):
            self._read_ends()
        if self._ends:
            for row, token in enumerate(newest):
                if token in self._ends:
                    unfinished[row] = False
        if self.calls_others:
            over = torch.as_tensor(self._others(ids(), scores))
            if over.shape != (len(unfinished),):
                raise InvalidInputError(
                    f"a stopping criterion answered with shape {tuple(over.shape)}; one for each row, ({len(unfinished)},), is "
                    "needed"
                )
            for row in over.bool().nonzero()[:, 0].tolist():
                unfinished[row] = False
        return True not in unfinished

    def _read_ends(self) -> None:
        self._ends_of = [one.eos_token_id for one in self._end_criteria]
        self._ends = {int(end) for ends in self._ends_of for end in ends.reshape(-1)}


def _is_known(criterion: Any) -> bool:
    kind = type(criterion)
    return kind in KNOWN and kind.__call__ is KNOWN[kind]
