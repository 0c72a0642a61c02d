"""How an assistant picks the tokens it drafts: with what shapes the target's choice, as far as that is safe."""

from __future__ import annotations

from typing import Any

import torch

from ..draw import draw_dense
from ..numbers import Numbers
from ..warpers import Chain

__all__ = ["DraftSampler", "usable_processors"]

STATELESS = frozenset({
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
    "SuppressTokensLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization",
})  # fmt: skip
"""transformers' processors that may be asked about texts that come to nothing, and in any order."""


def usable_processors(processors: Any) -> list[Any]:
    """Those that may run on drafted text too. Any other might remember what it saw, so it sees verified text only: the
    drafts are then worse, never the result."""
    return [one for one in processors if type(one).__name__ in STATELESS and type(one).__module__.startswith("transformers.")]


class DraftSampler:
    """`do_sample`: draw from the processed distribution, and tell it; else the most probable token, as a plain guess.

    `n_vocab` is the target's: an assistant's vocabulary may be padded differently, and tokens beyond the target's are
    never drafted.
    """

    def __init__(
        self, n_vocab: int, processors: list[Any], do_sample: bool, keep_probabilities: bool, numbers: Numbers
    ) -> None:
        self._numbers = numbers
        self._n_vocab, self._processors, self._do_sample = n_vocab, Chain(processors), do_sample
        self._keep = keep_probabilities

    def pick(self, tokens: list[int], logits: torch.Tensor) -> tuple[int, float, torch.Tensor | None]:
        """The token after `tokens`, its probability, and, if they are kept, all probabilities `(n_vocab,)`.

        `logits` is float32 `(n,)`, with `n` the assistant's vocabulary.
        """
        scores = logits[: self._n_vocab]
        if len(scores) < self._n_vocab:
            scores = torch.nn.functional.pad(scores, (0, self._n_vocab - len(scores)), value=-torch.inf)
        if self._processors:
            text = torch.tensor([tokens])
            scores = self._processors(text, scores[None].clone())[0]  # a processor may write into what it is given
        probabilities = torch.softmax(scores, dim=-1)
        if self._do_sample:
            token = draw_dense(probabilities.cpu().numpy(), self._numbers.next(0))
        else:
            token = int(scores.argmax())
        return token, float(probabilities[token]), probabilities if self._keep else None
