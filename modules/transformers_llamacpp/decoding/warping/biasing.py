"""transformers' processors that change the scores of a few tokens.

Each takes transformers' own object, whose attributes are read at every step, and all rows. It answers False, with nothing
changed, where transformers' own code has to run: attributes of other types, tokens outside the vocabulary, numbers that
would turn -inf into something else.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from .ngrams import repeating
from .rows import Batch, Ids, Row

__all__ = [
    "encoder_no_repeat_ngram", "encoder_repetition_penalty", "exponential_decay", "forced_bos", "forced_eos", "inf_nan_remove",
    "min_length", "min_new_tokens", "no_repeat_ngram", "normalization", "repetition_penalty", "suppress", "suppress_at_begin",
]  # fmt: skip


def repetition_penalty(processor: Any, batch: Batch) -> bool:
    """Keskar et al. 2019, https://arxiv.org/abs/1909.05858."""
    ignored = processor.prompt_ignore_length
    if isinstance(ignored, torch.Tensor):
        if ignored.shape != (len(batch.rows),) or ignored.dtype != torch.int64:
            return False
        starts = [max(start, 0) for start in ignored.tolist()]
    elif ignored is None or type(ignored) is int:
        starts = [ignored or 0] * len(batch.rows)
    else:
        return False
    return _penalize(processor.penalty, batch, [batch.ids[row.index, starts[row.index] :] for row in batch.rows])


def repetition_penalty_before_5_23(processor: Any, batch: Batch) -> bool:
    """The same; a tensor is no length to ignore yet."""
    return not isinstance(processor.prompt_ignore_length, torch.Tensor) and repetition_penalty(processor, batch)


def encoder_repetition_penalty(processor: Any, batch: Batch) -> bool:
    tokens = _integers(processor.encoder_input_ids)
    if tokens is None or tokens.ndim != 2 or len(tokens) != len(batch.rows):
        return False
    return _penalize(processor.penalty, batch, list(tokens))


def _penalize(penalty: Any, batch: Batch, tokens: list[Ids]) -> bool:
    if type(penalty) is not float or not 0 < np.float32(penalty) < np.inf or not all(map(batch.fits, tokens)):
        return False
    factor = np.float32(penalty)
    for row, mine in zip(batch.rows, tokens, strict=True):
        if row.ids is None:
            scores, at = row.writable(), mine
        else:
            batch.seen[mine] = True
            scores, at = row.values, np.flatnonzero(batch.seen[row.ids])
            batch.seen[mine] = False
        values = scores[at]
        scores[at] = np.where(values < 0, values * factor, values / factor)
    return True


def no_repeat_ngram(processor: Any, batch: Batch) -> bool:
    size = processor.ngram_size
    return type(size) is int and size > 0 and _ban(batch, [repeating(ids, size) for ids in batch.ids])


def encoder_no_repeat_ngram(processor: Any, batch: Batch) -> bool:
    size, ngrams, texts = processor.ngram_size, processor.generated_ngrams, processor.batch_size
    if type(size) is not int or type(texts) is not int or not 0 < texts <= len(batch.rows):
        return False
    start, copies = batch.length + 1 - size, len(batch.rows) // texts
    if (len(batch.rows) - 1) // copies >= len(ngrams):
        return False
    last = [tuple(ids[start:].tolist()) for ids in batch.ids]
    return _ban(batch, [np.array(ngrams[i // copies].get(key, []), np.int64) for i, key in enumerate(last)])


def min_length(processor: Any, batch: Batch) -> bool:
    return batch.length >= processor.min_length or _ban_known(batch, processor.eos_token_id)


def min_new_tokens(processor: Any, batch: Batch) -> bool:
    new = batch.length - processor.prompt_length_to_skip
    return new >= processor.min_new_tokens or _ban_known(batch, processor.eos_token_id)


def suppress(processor: Any, batch: Batch) -> bool:
    return _ban_known(batch, processor.suppress_tokens)


def suppress_at_begin(processor: Any, batch: Batch) -> bool:
    return batch.length != processor.begin_index or _ban_known(batch, processor.begin_suppress_tokens)


def _ban_known(batch: Batch, tokens: Any) -> bool:
    """-inf for those of `tokens` that are in the vocabulary."""
    if isinstance(tokens, torch.Tensor) and not tokens.numel():
        return True
    banned = _integers(tokens)
    if banned is None:
        return False
    banned = banned.reshape(-1)
    return _ban(batch, [banned[(banned >= 0) & (banned < batch.n_vocab)]] * len(batch.rows))


def _ban(batch: Batch, tokens: list[Ids]) -> bool:
    if not all(map(batch.fits, tokens)):
        return False
    for row, mine in zip(batch.rows, tokens, strict=True):
        row.ban(mine)
    return True


def forced_bos(processor: Any, batch: Batch) -> bool:
    if batch.length != 1:
        return True
    token = processor.bos_token_id
    return type(token) is int and _force(batch, np.array([token]))


def forced_eos(processor: Any, batch: Batch) -> bool:
    if batch.length != processor.max_length - 1:
        return True
    tokens = _integers(processor.eos_token_id)
    return tokens is not None and _force(batch, np.unique(tokens))


def _force(batch: Batch, tokens: Ids) -> bool:
    """0 for `tokens` (ascending), -inf for all others."""
    if not batch.fits(tokens):
        return False
    for row in batch.rows:
        row.set_sparse(tokens, np.zeros(len(tokens), np.float32))
    return True


def exponential_decay(processor: Any, batch: Batch) -> bool:
    past = batch.length - processor.regulation_start
    if past <= 0:
        return True
    tokens, factor = _integers(processor.eos_token_id), processor.regulation_factor
    if tokens is None or not batch.fits(tokens) or type(factor) not in (float, int):
        return False
    tokens = np.unique(tokens)
    growth = np.float32(pow(factor, past) - 1)
    for row in batch.rows:
        # releases differ in what an end token at -inf becomes
        if row.ids is not None and not np.isin(tokens, row.ids).all():
            return False
        if not np.isfinite(_scores_at(row, tokens)).all():
            return False
    for row in batch.rows:
        scores = row.values if row.ids is not None else row.writable()
        at = tokens if row.ids is None else np.searchsorted(row.ids, tokens)
        scores[at] += np.abs(scores[at]) * growth
    return True


def _scores_at(row: Row, tokens: Ids) -> Any:
    return row.dense()[tokens] if row.ids is None else row.values[np.searchsorted(row.ids, tokens)]


def inf_nan_remove(processor: Any, batch: Batch) -> bool:
    limits = np.finfo(np.float32)
    for row in batch.rows:
        values = row.dense()
        if np.isfinite(values.max()) and np.isfinite(values.min()):
            continue
        values = row.writable()
        values[np.isnan(values)] = 0
        np.clip(values, limits.min, limits.max, out=values)
    return True


def normalization(processor: Any, row: Row, batch: Batch) -> bool:
    """One row. torch's own log-softmax, whose every rounding a later processor might see; over one row it is one thread's."""
    row.set_dense(torch.log_softmax(row.tensor(), dim=-1)[0].numpy(), True)
    return True


def last_normalization(processor: Any, row: Row, batch: Batch) -> bool:
    """The same where no processor follows: what is at -inf stays there."""
    if row.ids is None or not len(row.values) or not math.isfinite(row.values.max()):
        return normalization(processor, row, batch)
    distances = row.values.astype(np.float64) - float(row.values.max())
    row.values = (distances - math.log(float(np.exp(distances).sum()))).astype(np.float32)
    return True


def _integers(tokens: Any) -> Ids | None:
    """A tensor of integers as an array, `None` for anything else."""
    if not isinstance(tokens, torch.Tensor) or tokens.device.type != "cpu" or tokens.dtype not in (torch.int64, torch.int32):
        return None
    return np.ascontiguousarray(tokens.numpy(), np.int64)
