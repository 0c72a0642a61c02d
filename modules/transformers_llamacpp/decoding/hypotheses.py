"""The finished texts of a beam search: an n-best list for each group of beams, and the output made of them.

Vijayakumar et al. 2018 (diverse beam search) keeps one list per group; a search without groups has one group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["Hypotheses", "Hypothesis", "best_of", "to_tensors"]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """`tokens`: what was generated, its end token included. `beams`: the row of the batch each token was chosen in.
    `score`: sum of log-probabilities / length ** length_penalty."""

    score: float
    tokens: tuple[int, ...]
    beams: tuple[int, ...]


@dataclass(slots=True)
class Hypotheses:
    """The best `size` texts of one group.

    `early_stopping`: True ends the group once it has `size` texts; False once no running beam would be better if it
    ended now; "never" once none could be better at any length up to `max_new_tokens`.
    """

    size: int
    length_penalty: float
    early_stopping: bool | str
    max_new_tokens: int
    done: bool = False
    kept: list[Hypothesis] = field(default_factory=list)

    def add(self, log_probability: float, tokens: tuple[int, ...], beams: tuple[int, ...]) -> None:
        """`log_probability`: the sum over `tokens`. Of `size + 1` texts the worst goes; of equals the older one."""
        score = log_probability / len(tokens) ** self.length_penalty
        if len(self.kept) == self.size and score <= min(one.score for one in self.kept):
            return
        self.kept.append(Hypothesis(score, tokens, beams))
        if len(self.kept) > self.size:
            self.kept.remove(min(self.kept, key=lambda one: one.score))

    def update_done(self, best_log_probability: float, length: int) -> None:
        """After a step: `best_log_probability` is the largest sum of a candidate, `length` the tokens it has."""
        if self.done or len(self.kept) < self.size:
            return
        if self.early_stopping is True:
            self.done = True
            return
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_new_tokens  # a negative sum divided by more is a better score
        attainable = best_log_probability / length**self.length_penalty
        self.done = min(one.score for one in self.kept) >= attainable


def best_of(groups: list[Hypotheses], n: int) -> list[Hypothesis]:
    """The `n` best texts of all groups, best first; of equals the one that ended last."""
    everything = [one for group in groups for one in group.kept]
    everything.sort(key=lambda one: one.score)  # backwards, and read from its end: so equals change places
    return everything[: -n - 1 : -1]


def to_tensors(
    prompts: torch.Tensor, best: list[Hypothesis], pad: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences `(n, prompt + longest)`, scores `(n,)` and beam indices `(n, longest)`, -1 after a text's end.

    `prompts` is `(n, prompt)`: the prompt of each text.
    """
    longest = max(len(one.tokens) for one in best)
    fill = 0 if pad is None else pad  # without an end token all texts have one length, and nothing is filled
    new = torch.full((len(best), longest), fill, dtype=prompts.dtype, device=prompts.device)
    beams = torch.full((len(best), longest), -1, dtype=torch.long, device=prompts.device)
    for row, one in enumerate(best):
        new[row, : len(one.tokens)] = torch.tensor(one.tokens, dtype=prompts.dtype)
        beams[row, : len(one.beams)] = torch.tensor(one.beams, dtype=torch.long)
    scores = torch.tensor([one.score for one in best], dtype=torch.float32, device=prompts.device)
    return torch.cat([prompts, new], dim=1), scores, beams
