"""Greedy search and sampling, token by token: transformers' `_sample`, without what it costs beside the decode.

transformers makes tensors of the vocabulary's size in every step, and copies the text. Here the logits stay where llama.cpp
wrote them: they are processed and chosen from in place, the text grows in a buffer, and a batch is one decode of the rows
that are still being written. What is asked, called and returned is the same.

Where no code of others has a part in a step, and calls share their decodes, the call that decodes makes this one's steps too.
A streamer of the caller's own may have part in that if its attribute `never_waits` is true: its `put` is then called on threads
of other calls, must come back at once, and call no model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import compat
from ..cache import LlamaCppCache
from ..request import current_request
from ..turn import CallersOwn
from .common import Trace, cache_survives, first_step, next_step, request_of_call, step_done
from .draw import best, draw
from .ending import Rows
from .numbers import Numbers
from .text import GrowingText
from .warpers import Chain, Scores

__all__ = ["covers", "token_by_token"]

PLAIN_ARGUMENTS = frozenset({
    compat.CACHE_NAME, "attention_mask", "inputs_embeds", "logits_to_keep", "position_ids", "use_cache", "output_hidden_states",
    "output_attentions", "tokenizer",
})  # fmt: skip
"""Arguments for the forward pass that mean nothing after the prompt."""


def covers(input_ids: torch.Tensor) -> bool:
    """Whether `token_by_token` does what a call asks for: one of `generate()`, whose tensors are on the CPU."""
    return current_request.get() is not None and input_ids.device.type == "cpu"


def _is_plain(model: Any, config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a step is a decode of the cache's rows and nothing else. Through the model's forward pass go calls without a
    cache, guidance, hidden states, arguments that are not known here, and models whose steps somebody changed."""
    cache = kwargs.get(compat.CACHE_NAME)
    if not isinstance(cache, LlamaCppCache) or cache.companion is not None or not kwargs.get("use_cache"):
        return False
    if request_of_call().guidance is not None or config.output_hidden_states or config.output_attentions:
        return False
    if any(value is not None for name, value in kwargs.items() if name not in PLAIN_ARGUMENTS):
        return False
    return not model.has_changed_steps()


@torch.no_grad()
def token_by_token(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The loop. `input_ids` is `(rows, length)`; returns what transformers' `_sample` returns."""
    request: Any = request_of_call()
    cache: Any = model_kwargs.get(compat.CACHE_NAME)
    plain = _is_plain(model, generation_config, model_kwargs)
    text, trace = GrowingText(input_ids.long()), Trace(generation_config)
    rows = Rows(input_ids.shape[0], generation_config, stopping_criteria)
    chooser = _Chooser(logits_processor, text, trace, bool(generation_config.do_sample), request.numbers)
    # a row that has ended is decoded only for those who see it
    seen = not chooser.row_by_row or rows.calls_others or trace.returned or cache_survives(cache, generation_config)
    first = not getattr(generation_config, "is_assistant", False)
    outputs = first_step(model, input_ids, generation_config, model_kwargs, first)
    # whether no code of others runs between two steps, so that another call may make them; see `Engine.steps`
    quick = not (chooser.foreign or rows.calls_others) and (streamer is None or getattr(streamer, "never_waits", False))
    going_on = chooser.rows
    tokens: list[int] = []
    ended = False

    def show(shared: bool) -> None:
        """`shared`: maybe on another call's thread, to which nothing that is raised here belongs."""
        try:
            streamer.put(text.newest.clone())
        except BaseException as error:
            if shared:
                raise CallersOwn(error) from error
            raise

    def record(chosen: list[int], shared: bool = False) -> list[int]:
        """The text grows by the chosen tokens; what it grew by."""
        nonlocal ended
        tokens = chosen if all(rows.unfinished) else _with_padding(rows, going_on, chosen)
        text.append(*tokens)
        if streamer is not None and not compat.CRITERIA_COME_FIRST:
            show(shared)
        ended = rows.ended_with(tokens, len(text), text.view, trace.scores)
        if streamer is not None and compat.CRITERIA_COME_FIRST:
            show(shared)
        return tokens

    def next_column(tokens: list[int]) -> list[int]:
        """What the cache's rows are fed with."""
        if len(going_on) < len(tokens):
            return [tokens[row] for row in going_on]
        return tokens if all(rows.unfinished) else _that_can_be_fed(tokens, rows, model.config.vocab_size)

    def recorded(chosen: list[int]) -> list[int] | None:
        """The next step, where a row that ended needs nothing else first."""
        nonlocal tokens
        before = rows.unfinished.count(True)
        tokens = record(chosen, True)
        if ended or not (seen or rows.unfinished.count(True) == before):
            return None
        return next_column(tokens)

    model_kwargs = step_done(model, outputs, model_kwargs)
    tokens = record(_chosen(outputs, chooser, plain))
    del outputs
    while not ended:
        if chooser.foreign or rows.calls_others:
            tokens = text.newest_again()
        if not plain:
            outputs = next_step(model, text.ids, model_kwargs)
            model_kwargs = step_done(model, outputs, model_kwargs)
            tokens = record(_chosen(outputs, chooser, plain))
            continue
        if not seen and not all(rows.unfinished):
            going_on = chooser.rows = _still_written(rows, going_on, cache)
        column = next_column(tokens)
        if quick:
            cache.steps(column, request.usage, chooser.choose, recorded)
        elif chooser.foreign:  # code that is not ours must not hold the engine, nor see its buffer change
            tokens = record(chooser.choose(cache.step(column, request.usage, np.copy)))
        else:
            tokens = record(cache.step(column, request.usage, chooser.choose))
    if streamer is not None:
        streamer.end()
    return trace.output(text.ids.clone(), model_kwargs.get(compat.CACHE_NAME))


def _chosen(outputs: Any, chooser: _Chooser, plain: bool) -> list[int]:
    """From a forward pass of the model."""
    # whoever put something between the steps may have kept the logits
    logits = outputs.logits[:, -1].to(torch.float32, copy=not plain)
    return chooser.choose(logits.numpy(), outputs.hidden_states)


def _with_padding(rows: Rows, going_on: list[int], chosen: list[int]) -> list[int]:
    """A token for every row of the text: the chosen ones, and padding for rows that get nothing else any more."""
    padded = rows.padded
    tokens = [rows.pad if over else 0 for over in padded]
    for row, token in zip(going_on, chosen, strict=True):
        if not padded[row]:
            tokens[row] = token
    return tokens


def _that_can_be_fed(tokens: list[int], rows: Rows, n_vocab: int) -> list[int]:
    """Padding may be a number that is no token; what a row that has ended is fed with means nothing."""
    padded = rows.padded
    return [0 if over and not 0 <= token < n_vocab else token for token, over in zip(tokens, padded, strict=True)]


def _still_written(rows: Rows, going_on: list[int], cache: LlamaCppCache) -> list[int]:
    """The rows that are decoded from now on; the cache goes on with them only."""
    padded = rows.padded
    kept = [place for place, row in enumerate(going_on) if not padded[row]]
    if len(kept) < len(going_on):
        cache.retire(kept)
    return [going_on[place] for place in kept]


class _Chooser:
    """From logits to tokens. `rows`: those of the text that are still decoded, one for each row of logits."""

    def __init__(self, processors: Any, text: GrowingText, trace: Trace, do_sample: bool, numbers: Numbers) -> None:
        self._chain = processors if isinstance(processors, Chain) else Chain(processors)
        self._text, self._trace, self._do_sample, self._numbers = text, trace, do_sample, numbers
        self._plain = not (len(self._chain) or do_sample or trace.returned)
        self.foreign, self.row_by_row = bool(self._chain.foreign), self._chain.row_by_row
        self._n_rows = text.ids.shape[0]
        self.rows = list(range(self._n_rows))

    def choose(self, logits: npt.NDArray[np.float32], hidden: Any = None) -> list[int]:
        """A token for each row of `logits` `(rows, n_vocab)`, which may be overwritten."""
        if self._plain:
            return [int(row.argmax()) for row in logits]
        trace, n_vocab = self._trace, logits.shape[1]
        raw = torch.from_numpy(logits.copy()) if trace.logits is not None else None
        ids = self._text.view() if self.foreign else self._text.array
        scores = self._chain.run(ids if len(self.rows) == self._n_rows else ids[self.rows], logits)
        if trace.returned:
            trace.add(None if trace.scores is None else _dense(scores, n_vocab), raw, hidden)
        if not self._do_sample:
            return [best(row) for row in scores]
        return [draw(scored, self._numbers.next(row)) for scored, row in zip(scores, self.rows, strict=True)]


def _dense(scores: list[Scores], n_vocab: int) -> torch.Tensor:
    return torch.from_numpy(np.stack([row.dense(n_vocab) for row in scores]))
