"""Speculative decoding: drafts of an n-gram lookup or an assistant model, verified several tokens at a time.

Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", https://arxiv.org/abs/2211.17192.

A draft goes into one `llama_decode` with the newest token. Then its tokens are verified one after another, each as plain
decoding would make it: the processors see verified text only, in order and once; a token goes to the streamer and the
stopping criteria when it is certain; the first one that differs ends the round. So any processor, also one that
remembers, and any stopping criterion, also one that streams, does what it does without drafts. Plain guesses leave the
random numbers as plain sampling would: the same seed gives the same text.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import compat
from ..errors import LlamaCppError
from ..hidden import at_column
from ..sequence import EMBEDDED
from .common import Trace, cache_survives, first_step, request_of_call
from .drafting.combined import Drafters
from .drafting.draft import EMPTY, Draft
from .ending import Rows
from .text import GrowingText
from .verify import Chooser

__all__ = ["assisted_decoding"]


@torch.no_grad()
def assisted_decoding(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    make_drafters: Callable[[Any, Any, bool], Drafters],
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The loop, for one row: `input_ids` is `(1, length)`. Returns what transformers' loops return.

    `make_drafters(generation_config, logits_processor, keep_probabilities)`.
    """
    request, cache = request_of_call(), model_kwargs[compat.CACHE_NAME]
    chooser = Chooser(generation_config, request.numbers)
    trace, rows, text = Trace(generation_config), Rows(1, generation_config, stopping_criteria), GrowingText(input_ids)
    drafters = make_drafters(generation_config, logits_processor, chooser.needs_probabilities)
    ends = generation_config._eos_token_tensor
    end_tokens = frozenset() if ends is None else frozenset(ends.tolist())
    draft, bookmark, seconds = EMPTY, None, None
    try:
        outputs = first_step(model, input_ids, generation_config, model_kwargs)
        before = cache.get_seq_length() - len(text)  # columns of a passed-in cache that input_ids does not show
        history = _after_embeddings(cache.tokens(0))
        while True:
            accepted, ended = 0, False
            try:
                for place in range(len(draft) + 1):
                    raw = outputs.logits[:, place - 1 - len(draft)].float().to(input_ids.device)
                    scores = logits_processor(text.ids, raw.clone() if trace.logits is not None else raw)
                    trace.add(scores, raw, _hidden(outputs, place - 1 - len(draft), trace, seconds is None))
                    token, as_drafted = chooser.choose(scores, draft, place)
                    text.append(token)
                    history.append(token)
                    accepted += as_drafted
                    if streamer is not None:
                        streamer.put(text.ids[0, -1:].cpu())
                    ended = rows.ended(text.ids, trace.scores)
                    if ended or not as_drafted:
                        break
            except BaseException:
                with contextlib.suppress(LlamaCppError):  # what is on its way up is what the caller has to see
                    cache.go_back(min(cache.get_seq_length(), before + len(text)), bookmark)
                raise
            cache.go_back(before + len(text) - 1, bookmark)
            request.drafted_tokens += len(draft)
            request.accepted_tokens += accepted
            if seconds is not None:
                drafters.verified(len(draft), accepted, seconds)
            if ended:
                break
            limit = generation_config.max_length - len(text) - 1
            draft = _usable(drafters.draft(history, limit), end_tokens, model.config.vocab_size)
            pending = text.ids[:, cache.get_seq_length() - before :]
            if len(draft) and pending.shape[1] > 1:
                # a memory that cannot be rewound lost these with the last draft; behind the bookmark they would be lost again
                model(pending[:, :-1], logits_to_keep=1, **{compat.CACHE_NAME: cache})
                pending = pending[:, -1:]
            bookmark = cache.bookmark() if len(draft) else None
            new = torch.cat([pending, torch.tensor([draft.tokens], dtype=pending.dtype, device=pending.device)], dim=1)
            started = time.perf_counter()
            try:
                outputs = model(
                    new, logits_to_keep=len(draft) + 1, output_hidden_states=trace.hidden is not None,
                    **{compat.CACHE_NAME: cache},
                )  # fmt: skip
            except BaseException:
                cache.drop(bookmark)
                raise
            seconds = time.perf_counter() - started
    finally:
        drafters.close()
    if streamer is not None:
        streamer.end()
    if cache_survives(cache, generation_config):
        missing = text.ids[:, cache.get_seq_length() - before : -1]
        if missing.shape[1]:  # a memory that cannot be rewound went back further than the draft
            model(missing, logits_to_keep=1, **{compat.CACHE_NAME: cache})
    return trace.output(text.ids.clone(), cache)


def _hidden(outputs: Any, column: int, trace: Trace, first: bool) -> Any:
    """As plain decoding collects them: those of the whole prompt first, then one column for each token."""
    if trace.hidden is None or first:
        return outputs.hidden_states
    return at_column(outputs.hidden_states, column)


def _after_embeddings(tokens: list[int]) -> list[int]:
    """What a drafter can read: the tokens after the last position that was given by `inputs_embeds`."""
    if EMBEDDED in tokens:
        return tokens[len(tokens) - tokens[::-1].index(EMBEDDED) :]
    return tokens


def _usable(draft: Draft, ends: frozenset[int], n_vocab: int) -> Draft:
    """Up to and including the first end token, after which nothing is wanted, and only tokens that there are."""
    for place, token in enumerate(draft.tokens):
        if not 0 <= token < n_vocab or token in ends:
            length = place + (token in ends)
            return Draft(draft.tokens[:length], None if draft.probabilities is None else draft.probabilities[:length])
    return draft
