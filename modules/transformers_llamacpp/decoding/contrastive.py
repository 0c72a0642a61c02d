"""Contrastive search: Su et al. 2022, "A Contrastive Framework for Neural Text Generation",
https://arxiv.org/abs/2202.06417.

Of the `top_k` most probable tokens the one is taken that maximises

    (1 - alpha) * probability  -  alpha * largest cosine of its hidden state with those of all tokens before it

which needs the hidden state each candidate *would* have: all of them are decoded, and the decode of the winner is that
of the next step too. So a call costs the prompt and one `llama_decode` per token.

What it does is what transformers 4.46 did, with four choices where that said nothing, or failed:

- padding is neither compared with nor counted (4.46 masks it);
- a row that has ended gets one padding token a step instead of `top_k` candidates;
- a token that a processor forbids (score -inf) is never a candidate, also where fewer than `top_k` are allowed;
- a passed-in cache: its hidden states are remembered from the call that made them (`recall.py`), or evaluated again.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import compat
from ..cache import LlamaCppCache
from ..engine import Engine, Usage
from ..errors import InvalidInputError, UnsupportedFeatureError
from ..hidden import LastHiddenState
from ..rows import Feed, feed
from ..sequence import EMBEDDED
from .candidates import Candidates
from .common import Trace, cache_survives, first_step, request_of_call
from .ending import Rows
from .history import HiddenHistory

__all__ = ["check", "contrastive_search", "wants"]

ROOM = 256
"""Tokens a history has room for beyond the prompt, before it grows."""


def wants(config: Any) -> bool:
    """`penalty_alpha > 0` and `top_k > 1`, greedy, one beam. Sampling and beams do not use `penalty_alpha`, as ever."""
    greedy = config.do_sample is not True and config.num_beams in (None, 1)
    return greedy and (config.penalty_alpha or 0) > 0 and (config.top_k or 0) > 1


def check(model: Any, config: Any, kwargs: dict[str, Any]) -> None:
    if config.use_cache is False:
        raise InvalidInputError("contrastive search goes on from a cache: leave out use_cache=False")
    if config.top_k > model.config.vocab_size:
        raise InvalidInputError(f"top_k={config.top_k} is more than the {model.config.vocab_size} tokens there are")


@torch.no_grad()
def contrastive_search(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The loop. `input_ids` is `(rows, length)`; returns what transformers' loops return."""
    engine, request = model.engine, request_of_call()
    usage = request.usage
    cache = model_kwargs[compat.CACHE_NAME]
    alpha, k = generation_config.penalty_alpha, generation_config.top_k
    trace = Trace(generation_config)
    layers = _layers(model, trace, generation_config)
    logits, hidden, histories = _read_prompt(model, input_ids, generation_config, model_kwargs, cache)
    rows = Rows(input_ids.shape[0], generation_config, stopping_criteria)
    while True:
        raw = logits.clone() if trace.logits is not None else logits  # a processor may write into what it is given
        scores = logits_processor(input_ids, logits)
        trace.add(scores, raw, hidden)
        tokens, probabilities = _propose(scores, k, rows)
        candidates = Candidates(engine, cache, tokens, usage, layers)
        picks = [
            int(np.argmax((1 - alpha) * p - alpha * history.similarity(vectors))) if len(p) > 1 else 0
            for p, history, vectors in zip(probabilities, histories, candidates.hidden, strict=True)
        ]
        candidates.keep(picks)
        vectors = np.stack([mine[pick] for mine, pick in zip(candidates.hidden, picks, strict=True)])
        for history, vector in zip(histories, vectors, strict=True):
            history.append(vector[None])
        logits = torch.from_numpy(np.stack([mine[pick] for mine, pick in zip(candidates.logits, picks, strict=True)]))
        states = [mine[pick] for mine, pick in zip(candidates.states, picks, strict=True)] if layers else []
        hidden = _hidden_states(vectors, states, model.config.num_hidden_layers)
        new = [int(mine[pick]) for mine, pick in zip(tokens, picks, strict=True)]
        if request.guidance is not None:
            request.guidance.follow(np.array(new, np.int32), usage)
        chosen = torch.tensor(new, dtype=input_ids.dtype)
        input_ids = torch.cat([input_ids, chosen.to(input_ids.device)[:, None]], dim=1)
        logits = logits.to(input_ids.device)
        if streamer is not None:
            streamer.put(chosen)
        if rows.ended(input_ids, trace.scores):
            break
    if streamer is not None:
        streamer.end()
    for row, history in enumerate(histories):
        engine.recall.remember(np.array(cache.tokens(row), np.int32), history.units)
    if cache_survives(cache, generation_config):
        cache.truncate(cache.get_seq_length() - 1)  # every other method leaves the last token to the next call
    return trace.output(input_ids, cache)


def _layers(model: Any, trace: Trace, config: Any) -> tuple[int, ...]:
    """The layers whose inputs the caller wants to see of each step."""
    if trace.hidden is None or config.output_hidden_states is not True or model.engine.no_layers() is not None:
        return ()
    return tuple(range(model.config.num_hidden_layers))


def _hidden_states(
    last: npt.NDArray[np.float32], states: list[npt.NDArray[np.float32]], n_layer: int
) -> tuple[torch.Tensor, ...]:
    """The `hidden_states` of one step: each row's `last` `(rows, n_embd)`, and `(layers, width)` where there are any."""
    final = torch.from_numpy(last[:, None])
    if not states:
        return LastHiddenState(final, n_layer)
    return (*torch.from_numpy(np.stack(states, axis=1)[:, :, None]).unbind(), final)


def _propose(
    scores: torch.Tensor, k: int, rows: Rows
) -> tuple[list[npt.NDArray[np.int32]], list[npt.NDArray[np.float32]]]:
    """Each row's candidates and their probabilities, the most probable first."""
    probabilities, ids = torch.softmax(scores.float(), dim=-1).topk(k, dim=-1)
    allowed = torch.gather(scores, 1, ids) > -torch.inf
    tokens, weights = [], []
    for row, padded in enumerate(rows.padded):
        if padded:
            tokens.append(np.array([rows.pad], np.int32))
            weights.append(np.ones(1, np.float32))
            continue
        mine = allowed[row] if bool(allowed[row].any()) else torch.arange(k) == 0
        tokens.append(ids[row][mine].cpu().numpy().astype(np.int32))
        weights.append(probabilities[row][mine].cpu().numpy())
    return tokens, weights


def _read_prompt(
    model: Any, input_ids: torch.Tensor, config: Any, model_kwargs: dict[str, Any], cache: LlamaCppCache
) -> tuple[torch.Tensor, Any, list[HiddenHistory]]:
    """Evaluate the prompt: logits of its end `(rows, n_vocab)`, hidden states, and one history per row."""
    engine, request = model.engine, request_of_call()
    past = cache.get_seq_length()
    if past:
        histories = _past(engine, cache, request.usage)
    else:
        histories = _known(engine, input_ids, model_kwargs, config)
        request.hidden_known = [len(history) for history in histories]
    try:
        wanted = config.output_hidden_states or "last"
        outputs = first_step(model, input_ids, config, model_kwargs | {"output_hidden_states": wanted})
    finally:
        request.hidden_known = None
    if len(histories) < cache.batch_size:  # equal rows went on from one row of the cache, and share its past
        repeats = cache.batch_size // len(histories)
        histories = [copy.deepcopy(history) for history in histories for _ in range(repeats)]
    last = outputs.hidden_states[-1].cpu().numpy()
    for row, history in enumerate(histories):
        tokens = last[row, cache.column_mask(row)[past:]]
        history.append(tokens if past else tokens[len(history) :])
    return outputs.logits[:, -1].float(), outputs.hidden_states, histories


def _known(engine: Engine, input_ids: torch.Tensor, model_kwargs: dict[str, Any], config: Any) -> list[HiddenHistory]:
    """Histories of new texts: the leading tokens that are remembered, if the caller does not want to see them all."""
    texts: list[npt.NDArray[np.int32]] = []
    mask = model_kwargs.get("attention_mask")
    for row, ids in enumerate(input_ids.cpu().numpy().astype(np.int32)):
        text = ids if mask is None else ids[mask[row, : len(ids)].cpu().numpy() != 0]
        seen = model_kwargs.get("inputs_embeds") is None and not config.output_hidden_states
        texts.append(text[: len(text) - 1 if seen else 0])  # the last one is evaluated for its logits anyway
    return [_remembered(engine, text) for text in texts]


def _remembered(engine: Engine, text: npt.NDArray[np.int32]) -> HiddenHistory:
    history = HiddenHistory(engine.backend.limits.n_embd, len(text) + ROOM)
    found = engine.recall.match(text)
    if found is not None:
        history.append(found)
    return history


def _past(engine: Engine, cache: LlamaCppCache, usage: Usage) -> list[HiddenHistory]:
    """Histories of what a passed-in cache holds: remembered, or evaluated again beside it."""
    texts = [np.array(cache.tokens(row), np.int32) for row in range(cache.batch_size)]
    histories = [_remembered(engine, text) for text in texts]
    missing = [row for row, text in enumerate(texts) if len(histories[row]) < len(text)]
    if not missing:
        return histories
    if any(EMBEDDED in texts[row] for row in missing):
        raise UnsupportedFeatureError(
            "contrastive search compares with every earlier hidden state, and those of a cache that was made from "
            "inputs_embeds cannot be evaluated again: pass the whole input in one call, without this cache",
            "inputs_embeds",
        )
    width = max(len(texts[row]) for row in missing)
    ids, mask = np.zeros((len(missing), width), np.int32), np.zeros((len(missing), width), np.bool_)
    for index, row in enumerate(missing):
        ids[index, : len(texts[row])], mask[index, : len(texts[row])] = texts[row], True
    known = [len(histories[row]) for row in missing]
    again = Feed(ids, None, mask, np.arange(0), len(missing), width, want_hidden=True, hidden_from=known)
    answer = feed(engine, [None] * len(missing), again, usage)
    engine.discard(answer.sequences)
    hidden = answer.hidden
    assert hidden is not None
    for index, row in enumerate(missing):
        histories[row].append(hidden[index, known[index] : len(texts[row])])
    return histories
