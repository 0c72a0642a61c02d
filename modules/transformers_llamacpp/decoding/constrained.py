"""Constrained beam search: words that must occur in the text (Anderson et al. 2017, https://arxiv.org/abs/1612.00576;
with the banks of Post and Vilar 2018, https://arxiv.org/abs/1804.06609).

Besides the best continuations, each beam is also continued with every token that brings a constraint one step on. All
are sorted into banks by the steps they have made, and the beams are filled from the banks in turn: the best of each
bank, then the second best of each. So unlikely words get a place, and likely texts are not lost to them.

What it does is what transformers 4.46 did. Two things follow from its rules: what the prompt contains counts; and where
fewer running beams have completed everything than texts are asked for, the others are ranked with them by score alone,
so that a text without the words can come first. More `max_new_tokens`, more beams or fewer returned texts cure that.

Where 4.46 is not followed: see `beams.py`; `scores` are the log-probabilities of one step (there, sums over the text,
which `compute_transition_scores` cannot read); padding in front of a prompt is not read as text; a beam that is half
through one of several words with a common beginning keeps its progress for each (there, only for the first).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .. import compat
from ..errors import InvalidInputError
from .beams import BeamSearch
from .common import Trace, first_step, next_step, no_streamer, step_done
from .constraints import Progress, from_words
from .hypotheses import Hypotheses

__all__ = ["check", "constrained_beam_search", "wants"]

PROTOCOL = ("seqlen", "advance", "does_advance", "update", "remaining", "copy")


def wants(config: Any) -> bool:
    return config.constraints is not None or config.force_words_ids is not None


def check(model: Any, config: Any, kwargs: dict[str, Any]) -> None:
    no_streamer("constrained beam search", kwargs)
    if config.do_sample:
        raise InvalidInputError("constrained beam search does not sample: set do_sample=False, or drop the constraints")
    if (config.num_beams or 1) < 2:
        raise InvalidInputError(f"num_beams={config.num_beams}, and constraints need beams to choose from: 2 or more")
    if (config.num_beam_groups or 1) > 1:
        raise InvalidInputError("constraints and groups of beams do not go together: set num_beam_groups=1")
    for constraint in _constraints(config):
        missing = [name for name in PROTOCOL if not hasattr(constraint, name)]
        if missing:
            raise InvalidInputError(f"{constraint!r} is no constraint: it has no {', '.join(missing)}")
        _check_tokens(_all_tokens(constraint), model.config.vocab_size)


def _constraints(config: Any) -> list[Any]:
    given = list(config.constraints or ())
    if config.force_words_ids is not None:
        given += from_words(config.force_words_ids)
    if not given:
        raise InvalidInputError("constraints is an empty list: name at least one, or leave it out")
    return given


def _all_tokens(constraint: Any) -> list[int]:
    """Token ids as far as the constraint shows them."""
    tokens: list[int] = []
    for one in getattr(constraint, "token_ids", None) or [constraint.advance()]:
        tokens += one if isinstance(one, list) else [] if one is None else [one]
    return tokens


def _check_tokens(tokens: list[int], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise InvalidInputError(f"a constraint wants token {token}; the vocabulary is 0 .. {vocab_size - 1}")


class ConstrainedBeams(BeamSearch):
    """Beams that know how far they are: `progress[row]`. A text may end only with all constraints complete."""

    def __init__(self, input_ids: torch.Tensor, config: Any, mask: torch.Tensor | None) -> None:
        super().__init__(input_ids, config)
        start = Progress(_constraints(config))
        self.progress: list[Progress] = []
        for text in range(self.texts):
            row = text * self.num_beams
            ids = input_ids[row] if mask is None else input_ids[row][mask[row, -self.prompt :].bool()]
            self.progress += [start.after_all(ids.tolist() if self.prompt else [])] * self.num_beams

    def choose_constrained(self, text: int, scores: torch.Tensor) -> list[tuple[float, int, int]]:
        """As `choose`, and then filled from the banks."""
        if self.finished[text].done:
            return self.choose(text, 0, scores)
        best = self.choose(text, 0, scores, lambda row: self.progress[row].completed)
        tried = {(*self.generated(row), token) for _, row, token in best}
        forced = []
        for beam in range(self.size):
            row = text * self.size + beam
            if self.progress[row].completed:
                continue
            tokens = self.progress[row].helpful_tokens()
            _check_tokens(tokens, scores.shape[-1])
            for token in tokens:
                written = (*self.generated(row), token)
                if written not in tried:  # beams with equal texts would fill the banks with copies
                    tried.add(written)
                    forced.append((float(scores[beam, token]), row, token))
        return self._from_banks(best, forced) if forced else best

    def _from_banks(
        self, best: list[tuple[float, int, int]], forced: list[tuple[float, int, int]]
    ) -> list[tuple[float, int, int]]:
        everything = [(self.progress[one[1]].after(one[2]).steps, one) for one in best + forced]
        # within a bank by score, and for equal scores in the order they came in
        everything.sort(key=lambda one: (one[0], one[1][0]), reverse=True)
        places: dict[int, int] = {}
        ranked = []
        for bank, one in everything:
            places[bank] = places.get(bank, -1) + 1
            ranked.append((places[bank], one))
        ranked.sort(key=lambda one: one[0])  # stable: the bank with more steps comes first
        return [one for _, one in ranked[: self.size]]

    def advance(self, chosen: list[tuple[float, int, int]]) -> torch.Tensor:
        self.progress = [self.progress[row].after(token) for _, row, token in chosen]
        return super().advance(chosen)

    def _take_running(self, hypotheses: Hypotheses, rows: Iterable[int]) -> None:
        """Those with everything in them; where they are fewer than are asked for, the others too, ranked by score."""
        complete = [row for row in rows if self.progress[row].completed]
        super()._take_running(hypotheses, complete)
        if len(complete) < self.keep:
            super()._take_running(hypotheses, (row for row in rows if row not in complete))


@torch.no_grad()
def constrained_beam_search(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The loop. `input_ids` is `(texts * num_beams, length)`; returns what transformers' beam search returns."""
    search = ConstrainedBeams(input_ids, generation_config, model_kwargs.get("attention_mask"))
    trace = Trace(generation_config)
    outputs = first_step(model, input_ids, generation_config, model_kwargs)
    while True:
        model_kwargs = step_done(model, outputs, model_kwargs)
        logits = outputs.logits[:, -1].float().to(input_ids.device)
        scores = logits_processor(search.input_ids, torch.log_softmax(logits, dim=-1))
        trace.add(scores, logits, outputs.hidden_states)
        sums = (scores + search.sums[:, None]).view(search.texts, search.size, -1)
        chosen = [one for text in range(search.texts) for one in search.choose_constrained(text, sums[text])]
        parents = search.advance(chosen)
        cache = model_kwargs.get(compat.CACHE_NAME)
        if cache is not None:
            cache.reorder_cache(parents)
        if search.all_done or bool(stopping_criteria(search.input_ids, trace.scores).all()):
            return search.finish(trace, cache)
        outputs = next_step(model, search.input_ids, model_kwargs)
