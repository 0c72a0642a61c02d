"""Beam search with groups: Vijayakumar et al. 2018, "Diverse Beam Search", https://arxiv.org/abs/1610.02424.

The beams of a text are divided into groups that take turns at each step: a token that earlier groups took at this step
costs `diversity_penalty` for each time it was taken. All beams of all groups are rows of one batch, and one decode.

What it does is what transformers 4.46 did. `BeamSearch` is shared with constrained beam search, which has one group.
Where 4.46 is not followed: an end token in the output is the one that was generated, not the first of `eos_token_id`,
and a text that a stopping criterion cut short gets none; `beam_indices` are rows of the batch, also with several groups
or texts, as `compute_transition_scores` reads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessor, SequenceBiasLogitsProcessor

from .. import compat
from ..errors import InvalidInputError
from .common import Trace, first_step, next_step, no_streamer, step_done
from .guidance import GuidanceProcessor
from .hypotheses import Hypotheses, Hypothesis, best_of, to_tensors
from .warpers import Chain

__all__ = ["BeamSearch", "DiversityPenalty", "check", "check_penalty", "group_beam_search", "wants"]


def wants(config: Any) -> bool:
    return (config.num_beams or 1) > 1 and (config.num_beam_groups or 1) > 1


def check(model: Any, config: Any, kwargs: dict[str, Any]) -> None:
    no_streamer("group beam search", kwargs)
    if config.do_sample:
        raise InvalidInputError("group beam search does not sample: set do_sample=False, or num_beam_groups=1")
    if config.num_beams % config.num_beam_groups:
        raise InvalidInputError(
            f"num_beams={config.num_beams} cannot be divided into num_beam_groups={config.num_beam_groups} equal groups"
        )
    if not (config.diversity_penalty or 0) > 0:
        raise InvalidInputError(
            f"diversity_penalty={config.diversity_penalty}: without a penalty above 0 all {config.num_beam_groups} "
            "groups would find the same texts"
        )


def check_penalty(config: Any) -> None:
    """A penalty that no group would ever pay is a mistake; transformers 4.46 failed on it too."""
    if config.diversity_penalty and (config.num_beams or 1) > 1 and (config.num_beam_groups or 1) < 2:
        raise InvalidInputError(
            f"diversity_penalty={config.diversity_penalty} keeps groups of beams apart: set num_beam_groups to 2 or "
            "more, or leave it out"
        )


class DiversityPenalty(LogitsProcessor):
    """Takes `penalty` from a token's score for each time an earlier group took it in this step."""

    def __init__(self, penalty: float, num_beams: int, num_beam_groups: int) -> None:
        self.penalty, self.num_beams, self.size = penalty, num_beams, num_beams // num_beam_groups

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, current_tokens: torch.Tensor, beam_group_idx: int
    ) -> torch.Tensor:
        """`input_ids` and `scores` are the rows of the group, those of all texts. `current_tokens` is
        `(texts * num_beams,)`: what each beam took in this step; those of later groups are not read.
        """
        earlier = current_tokens.view(-1, self.num_beams)[:, : beam_group_idx * self.size]
        times = torch.zeros(len(earlier), scores.shape[-1], dtype=scores.dtype, device=scores.device)
        times.scatter_add_(1, earlier, torch.ones_like(earlier, dtype=scores.dtype))
        return scores - self.penalty * times.repeat_interleave(self.size, dim=0)


class BeamSearch:
    """The running beams of a batch of texts, and the texts they have finished.

    A beam is a row of the batch: text `t`, group `g`, beam `b` of the group is row `(t * groups + g) * size + b`.
    `input_ids` is `(texts * num_beams, length)`; `sums` the log-probability of what each beam has generated.
    """

    def __init__(self, input_ids: torch.Tensor, config: Any, groups: int = 1) -> None:
        self.input_ids = input_ids
        self.prompt = input_ids.shape[1]
        self.num_beams, self.groups, self.size = config.num_beams, groups, config.num_beams // groups
        self.texts = input_ids.shape[0] // self.num_beams
        ends = config._eos_token_tensor
        self.ends = set() if ends is None else set(ends.tolist())
        self.pad = None if config._pad_token_tensor is None else int(config._pad_token_tensor)
        self.keep = config.num_return_sequences or 1
        early = False if config.early_stopping is None else config.early_stopping
        self.finished = [
            Hypotheses(self.size, config.length_penalty, early, config.max_length - self.prompt)
            for _ in range(self.texts * groups)
        ]
        # equal prompts would give equal beams: only the first beam of a group has a say in the first step
        self.sums = torch.full((input_ids.shape[0],), -1e9, dtype=torch.float32, device=input_ids.device)
        self.sums[:: self.size] = 0
        self.paths: list[tuple[int, ...]] = [()] * input_ids.shape[0]

    @property
    def all_done(self) -> bool:
        return all(group.done for group in self.finished)

    @property
    def candidates(self) -> int:
        """As many of a group's best continuations are looked at: enough that end tokens leave one for each beam."""
        return max(2, 1 + len(self.ends)) * self.size

    def rows_of(self, group: int) -> torch.Tensor:
        """The rows of that group in all texts, text by text."""
        rows = torch.arange(len(self.sums)).view(self.texts, self.groups, self.size)
        return rows[:, group].reshape(-1)

    def generated(self, row: int) -> tuple[int, ...]:
        return tuple(self.input_ids[row, self.prompt :].tolist())

    def choose(self, text: int, group: int, scores: torch.Tensor, may_end: Any = None) -> list[tuple[float, int, int]]:
        """The continuations of one group: `(sum, row it continues, token)` for each beam, best first.

        `scores` is `(size, n_vocab)`: log-probabilities with the beams' sums. Texts that end go to the hypotheses,
        unless `may_end(row)` forbids it. A group that is done goes on with padding.
        """
        first = (text * self.groups + group) * self.size
        finished = self.finished[text * self.groups + group]
        if finished.done:
            assert self.pad is not None
            return [(0.0, first + beam, self.pad) for beam in range(self.size)]
        sums, flat = scores.reshape(-1).topk(self.candidates)
        going_on: list[tuple[float, int, int]] = []
        for rank, (total, index) in enumerate(zip(sums.tolist(), flat.tolist(), strict=True)):
            row, token = first + index // scores.shape[-1], index % scores.shape[-1]
            if token not in self.ends:
                going_on.append((total, row, token))
            elif rank < self.size and (may_end is None or may_end(row)):
                finished.add(total, (*self.generated(row), token), (*self.paths[row], row))
            if len(going_on) == self.size:
                break
        finished.update_done(float(sums[0]), self.input_ids.shape[1] - self.prompt + 1)
        return going_on

    def advance(self, chosen: list[tuple[float, int, int]]) -> torch.Tensor:
        """Row `i` becomes what `chosen[i]` says; returns the rows that were continued, `(rows,)`."""
        sums, rows, tokens = zip(*chosen, strict=True)
        device = self.input_ids.device
        parents = torch.tensor(rows, device=device)
        new = torch.tensor(tokens, dtype=self.input_ids.dtype, device=device)[:, None]
        self.input_ids = torch.cat([self.input_ids[parents], new], dim=1)
        self.sums = torch.tensor(sums, dtype=torch.float32, device=device)
        self.paths = [(*self.paths[row], row) for row in rows]
        return parents

    def finish(self, trace: Trace, cache: Any) -> Any:
        """Running beams of groups that are not done count as texts too; returns what `generate` returns."""
        best = [one for text in range(self.texts) for one in self._best(text)]
        prompts = self.input_ids[:: self.num_beams, : self.prompt].repeat_interleave(self.keep, dim=0)
        return trace.beam_output(*to_tensors(prompts, best, self.pad), cache)

    def _best(self, text: int) -> list[Hypothesis]:
        """The `keep` best of the text, best first."""
        groups = range(text * self.groups, (text + 1) * self.groups)
        for group in groups:
            if not self.finished[group].done:
                self._take_running(self.finished[group], range(group * self.size, (group + 1) * self.size))
        return best_of([self.finished[group] for group in groups], self.keep)

    def _take_running(self, hypotheses: Hypotheses, rows: Iterable[int]) -> None:
        for row in rows:
            hypotheses.add(float(self.sums[row]), self.generated(row), self.paths[row])


@torch.no_grad()
def group_beam_search(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The loop. `input_ids` is `(texts * num_beams, length)`; returns what transformers' beam search returns."""
    groups = generation_config.num_beam_groups
    search, trace = BeamSearch(input_ids, generation_config, groups), Trace(generation_config)
    before, after = _with_penalty(logits_processor, generation_config)
    outputs = first_step(model, input_ids, generation_config, model_kwargs)
    while True:
        model_kwargs = step_done(model, outputs, model_kwargs)
        logits = outputs.logits[:, -1].float().to(input_ids.device)
        log_probabilities = torch.log_softmax(logits, dim=-1)
        log_probabilities = before(search.input_ids, log_probabilities)
        scores = torch.empty_like(log_probabilities)
        tokens = torch.zeros_like(search.input_ids[:, 0])
        chosen: list[Any] = [None] * len(tokens)
        for group in range(groups):
            rows = search.rows_of(group)
            scores[rows] = _processed(after, search.input_ids, log_probabilities, tokens, group, rows)
            sums = (scores[rows] + search.sums[rows, None]).view(search.texts, search.size, -1)
            for text in range(search.texts):
                mine = rows[text * search.size : (text + 1) * search.size].tolist()
                for row, one in zip(mine, search.choose(text, group, sums[text]), strict=True):
                    chosen[row], tokens[row] = one, one[2]
        trace.add(scores, logits, outputs.hidden_states)
        parents = search.advance(chosen)
        cache = model_kwargs.get(compat.CACHE_NAME)
        if cache is not None:
            cache.reorder_cache(parents)
        if search.all_done or bool(stopping_criteria(search.input_ids, trace.scores).all()):
            return search.finish(trace, cache)
        outputs = next_step(model, search.input_ids, model_kwargs)


def _with_penalty(processors: Any, config: Any) -> tuple[Chain, list[Any]]:
    """The processors that come before the diversity penalty, and the rest with the penalty at their head.

    As in 4.46: after guidance and sequence bias, before everything that depends on the size of scores.
    """
    early = (GuidanceProcessor, SequenceBiasLogitsProcessor)
    at = next((i for i, processor in enumerate(processors) if not isinstance(processor, early)), len(processors))
    penalty = DiversityPenalty(config.diversity_penalty, config.num_beams, config.num_beam_groups)
    after: list[Any] = [penalty]
    for processor in processors[at:]:
        if not _asks_for_group(processor) and isinstance(after[-1], Chain):
            after[-1].append(processor)
        else:
            after.append(processor if _asks_for_group(processor) else Chain([processor]))
    return Chain(processors[:at]), after


def _asks_for_group(processor: Any) -> bool:
    return "beam_group_idx" in inspect.signature(processor.__call__).parameters


def _processed(
    processors: list[Any],
    input_ids: torch.Tensor,
    scores: torch.Tensor,
    tokens: torch.Tensor,
    group: int,
    rows: torch.Tensor,
) -> torch.Tensor:
    """`(rows of the group, n_vocab)`.

    One that asks for the group is called with the group's rows; any other with all rows, because it may count them, or
    know something about each, such as where its padding ends.
    """
    scores = scores.clone()
    for processor in processors:
        if not isinstance(processor, Chain):
            scores[rows] = processor(input_ids[rows], scores[rows], current_tokens=tokens, beam_group_idx=group)
        else:
            scores = processor(input_ids, scores)
    return scores[rows]
