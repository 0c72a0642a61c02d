"""What a constrained beam search has to make true: words that must occur, and how far a text is with them.

The protocol is that of transformers 4.x, so objects written for it still work: `seqlen` (the most tokens it takes),
`advance()` (the token or tokens that would bring it one step on, `None` for none), `does_advance(token)`,
`update(token) -> (stepped, completed, reset)`, `reset()`, `remaining()`, `copy(stateful=False)`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from ..errors import InvalidInputError

__all__ = ["Constraint", "DisjunctiveConstraint", "PhrasalConstraint", "Progress", "from_words"]


class Constraint(ABC):
    """Base class for constraints of your own. Feeding `advance()` to `update()` must complete it at some time."""

    seqlen: int
    completed: bool

    @abstractmethod
    def advance(self) -> int | list[int] | None:
        """The token, or the tokens of which any one, brings it one step on; `None` once it is complete."""

    @abstractmethod
    def does_advance(self, token_id: int) -> bool:
        """Would this token bring it on? Changes nothing."""

    @abstractmethod
    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """The text has this token now: `(stepped, completed, reset)`. A token that does not fit resets it."""

    @abstractmethod
    def reset(self) -> None:
        """Back to the start."""

    @abstractmethod
    def remaining(self) -> int:
        """Steps that are still to be made, at most."""

    @abstractmethod
    def copy(self, stateful: bool = False) -> Constraint:
        """A new one: as far as this one is if `stateful`, else at its start. The two share nothing that changes."""


class DisjunctiveConstraint(Constraint):
    """One of several words, each a list of token ids, must occur. None may be the beginning of another."""

    def __init__(self, nested_token_ids: list[list[int]]) -> None:
        words = _checked(nested_token_ids)
        for word in words:
            if any(word != other and other[: len(word)] == word for other in words):
                raise InvalidInputError(
                    f"the word {list(word)} is the beginning of another one of {nested_token_ids}, which could never "
                    "be reached: leave the longer one out"
                )
        self.token_ids = nested_token_ids
        self.seqlen = max(map(len, words))
        self._words = words
        self._so_far: tuple[int, ...] = ()

    @property
    def completed(self) -> bool:  # type: ignore[override]
        return self._so_far in self._words

    def _next(self) -> list[int]:
        n = len(self._so_far)
        fitting = (word for word in self._words if len(word) > n and word[:n] == self._so_far)
        return list(dict.fromkeys(word[n] for word in fitting))

    def advance(self) -> int | list[int] | None:
        return self._next() or None

    def does_advance(self, token_id: int) -> bool:
        return token_id in self._next()

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        stepped = self.does_advance(token_id)
        if stepped:
            self._so_far = (*self._so_far, token_id)
        else:
            self.reset()
        return stepped, self.completed, not stepped

    def reset(self) -> None:
        self._so_far = ()

    def remaining(self) -> int:
        return 0 if self.completed else self.seqlen - len(self._so_far)

    def copy(self, stateful: bool = False) -> DisjunctiveConstraint:
        new = copy.copy(self)  # what changes is a tuple, so nothing is shared
        if not stateful:
            new.reset()
        return new


class PhrasalConstraint(DisjunctiveConstraint):
    """These token ids must occur, one after the other."""

    def __init__(self, token_ids: list[int]) -> None:
        if not isinstance(token_ids, list):
            raise InvalidInputError(f"a phrase is a list of token ids, not {token_ids!r}")
        super().__init__([token_ids])
        self.token_ids = token_ids  # type: ignore[assignment]

    def advance(self) -> int | list[int] | None:
        tokens = self._next()
        return tokens[0] if tokens else None


class Progress:
    """How far one text is with a list of constraints.

    Only one constraint is under way at a time; a token that does not continue it sets that one back, and is not looked
    at as the beginning of another. Once all are complete, nothing changes any more.
    """

    def __init__(self, constraints: Iterable[Any]) -> None:
        self.pending = [constraint.copy(stateful=False) for constraint in constraints]
        self.under_way: Any = None
        self.complete = 0
        self._longest = max(constraint.seqlen for constraint in self.pending)

    @property
    def completed(self) -> bool:
        return not self.pending and self.under_way is None

    @property
    def steps(self) -> int:
        """Steps made: every complete constraint counts as the longest one, the one under way as far as it is."""
        partly = 0 if self.under_way is None else self._longest - self.under_way.remaining()
        return self.complete * self._longest + partly

    def helpful_tokens(self) -> list[int]:
        """The tokens that would be a step: of the constraint under way, else of any that is not complete."""
        tokens: list[int] = []
        for constraint in self.pending if self.under_way is None else [self.under_way]:
            advance = constraint.advance()
            tokens += [advance] if isinstance(advance, int) else advance or []
        return list(dict.fromkeys(tokens))

    def after(self, token: int) -> Progress:
        """The progress of this text with one more token; this one stays what it is."""
        if self.completed:
            return self
        new = copy.copy(self)
        if self.under_way is not None:
            new.under_way = _clone(self.under_way)
            _, completed, reset = new.under_way.update(token)
            if completed:
                new.complete, new.under_way = self.complete + 1, None
            elif reset:
                new.pending, new.under_way = [*self.pending, self.under_way.copy(stateful=False)], None
            return new
        for index, constraint in enumerate(self.pending):
            if constraint.does_advance(token):
                started = _clone(constraint)
                stepped, completed, _ = started.update(token)
                if not stepped:
                    raise InvalidInputError(
                        f"{constraint!r}: does_advance({token}) says yes, and update({token}) makes no step"
                    )
                new.pending = self.pending[:index] + self.pending[index + 1 :]
                new.complete += completed
                new.under_way = None if completed else started
                break
        return new

    def after_all(self, tokens: Iterable[int]) -> Progress:
        progress = self
        for token in tokens:
            if progress.completed:
                break
            progress = progress.after(token)
        return progress


def _clone(constraint: Any) -> Any:
    """A copy with its state. Objects of others are copied deeply: 4.x's own shared a list with their copies."""
    return constraint.copy(stateful=True) if isinstance(constraint, Constraint) else copy.deepcopy(constraint)


def from_words(words: Any) -> list[Constraint]:
    """Constraints for `force_words_ids`: each entry a word (list of ids) that must occur, or a list of words of which
    one must. Raises `InvalidInputError`."""
    if not isinstance(words, list) or not words or not all(isinstance(word, list) and word for word in words):
        raise InvalidInputError(
            "force_words_ids is a list of words (lists of token ids), or of lists of words of which one must occur; "
            f"not {words!r}"
        )
    return [DisjunctiveConstraint(word) if isinstance(word[0], list) else PhrasalConstraint(word) for word in words]


def _checked(words: Any) -> list[tuple[int, ...]]:
    fine = isinstance(words, list) and len(words) > 0
    for word in words if fine else ():
        fine = fine and isinstance(word, list) and len(word) > 0
        fine = fine and all(isinstance(token, int) and token >= 0 for token in word)
    if not fine:
        raise InvalidInputError(f"a word is a list of token ids, none of them negative; {words!r} has something else")
    return list(dict.fromkeys(map(tuple, words)))
