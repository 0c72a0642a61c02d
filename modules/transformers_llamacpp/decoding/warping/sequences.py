"""`SequenceBiasLogitsProcessor` and `NoBadWordsLogitsProcessor`: a bias for the token that would complete a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .ngrams import ends_with
from .rows import Batch, Floats, Ids

__all__ = ["SequenceBias"]

Group = tuple[Ids, Ids, Floats, npt.NDArray[np.intp]]
"""Sequences of one length: the tokens before the last `(n, length - 1)`, the last ones, the biases, the order of adding."""


class SequenceBias:
    """The step of one processor. `in_order`: as releases add biases up that go through the dictionary of sequences; else as
    those do that keep the sequences in tensors, one for each length. `beyond`: how many tokens more than the sequence
    without its last one there must be."""

    def __init__(self, in_order: bool, beyond: int) -> None:
        self._in_order, self._beyond = in_order, beyond
        self._grouped: tuple[dict[Any, float], list[Group]] | None = None
        self._alone: tuple[torch.Tensor, int, Ids] | None = None

    def __call__(self, processor: Any, batch: Batch) -> bool:
        if not processor.prepared_bias_variables:
            # looks at nothing but the shape; raises what it raises for sequences that are not in the vocabulary
            processor._prepare_bias_variables(torch.empty(1, 1).expand(len(batch.rows), batch.n_vocab))
        always = processor.length_1_bias
        if always.shape != (batch.n_vocab,) or always.dtype != torch.float32 or always.device.type != "cpu":
            return False
        if self._alone is None or self._alone[0] is not always or self._alone[1] != always._version:
            self._alone = (always, always._version, np.flatnonzero(always.numpy()))
        groups = self._groups_in_order(processor) if self._in_order else self._groups_by_length(processor)
        return _bias(always.numpy(), self._alone[2], groups, self._beyond, batch)

    def _groups_by_length(self, processor: Any) -> list[Group]:
        groups: list[Group] = []
        start = 0
        for prefixes, last, biases in processor.multi_token_biases:
            groups.append((prefixes.numpy(), last.numpy(), biases.numpy(), np.arange(start, start + len(last))))
            start += len(last)
        return groups

    def _groups_in_order(self, processor: Any) -> list[Group]:
        if self._grouped is None or self._grouped[0] != processor.sequence_bias:
            self._grouped = (dict(processor.sequence_bias), _grouped(processor.sequence_bias))
        return self._grouped[1]


def _grouped(sequences: dict[tuple[int, ...], float]) -> list[Group]:
    lengths: dict[int, list[tuple[int, tuple[int, ...], float]]] = {}
    for order, (tokens, bias) in enumerate(sequences.items()):
        if len(tokens) > 1:
            lengths.setdefault(len(tokens), []).append((order, tokens, bias))
    return [
        (
            np.array([tokens[:-1] for _, tokens, _ in group], np.int64),
            np.array([tokens[-1] for _, tokens, _ in group], np.int64),
            np.array([bias for _, _, bias in group], np.float32),
            np.array([order for order, _, _ in group], np.intp),
        )
        for group in lengths.values()
    ]


def _bias(single: Floats, alone: Ids, groups: list[Group], beyond: int, batch: Batch) -> bool:
    sums = [_sums(ids, single, alone, groups, beyond) for ids in batch.ids]
    if any(np.isnan(biases).any() or (biases == np.inf).any() for _, biases in sums):
        return False  # -inf would not stay what it is
    for row, (tokens, biases) in zip(batch.rows, sums, strict=True):
        if row.ids is None:
            row.writable()[tokens] += biases
        elif len(tokens):
            _, at, of = np.intersect1d(row.ids, tokens, assume_unique=True, return_indices=True)
            row.values[at] += biases[of]
    return True


def _sums(ids: Ids, single: Floats, alone: Ids, groups: list[Group], beyond: int) -> tuple[Ids, Floats]:
    """The tokens that get a bias, each once, and their biases, added up in the order in which transformers adds them."""
    found = []
    for prefixes, last, biases, order in groups:
        if prefixes.shape[1] + beyond <= len(ids):
            matches = ends_with(ids, prefixes)
            if len(matches):
                found.append((order[matches], last[matches], biases[matches]))
    if not found:
        return alone, single[alone]
    order, tokens, biases = (np.concatenate(parts) for parts in zip(*found, strict=True))
    inwards = np.argsort(order, kind="stable")
    unique = np.union1d(alone, tokens)
    sums = single[unique]
    np.add.at(sums, np.searchsorted(unique, tokens[inwards]), biases[inwards])
    return unique, sums
