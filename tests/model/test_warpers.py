"""The common chains of processors on a model's own logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from transformers_llamacpp.decoding.warpers import Chain
from warper_cases import Case, check, class_of

pytestmark = pytest.mark.once  # what differs between releases is in tests/unit/test_warpers.py

TEXT = (
    "The history of the Roman Empire begins with the fall of the Republic. Once upon a time there was a small lighthouse, "
    "and its keeper wrote letters to nobody. def quicksort(items):\n    if len(items) < 2:\n        return items\n"
)

CHAINS: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "top-k": [("TopKLogitsWarper", (50,))],
    "top-k, top-p": [("TopKLogitsWarper", (40,)), ("TopPLogitsWarper", (0.95,))],
    "temperature, top-k, top-p": [
        ("TemperatureLogitsWarper", (0.7,)), ("TopKLogitsWarper", (40,)), ("TopPLogitsWarper", (0.9,)),
    ],
    "top-p": [("TopPLogitsWarper", (0.95,))],
    "hot top-p": [("TemperatureLogitsWarper", (1.5,)), ("TopPLogitsWarper", (0.8,))],
    "min-p": [("MinPLogitsWarper", (0.05,))],
    "repetition penalty, min-p": [("RepetitionPenaltyLogitsProcessor", (1.1,)), ("MinPLogitsWarper", (0.05,))],
    "everything": [
        ("RepetitionPenaltyLogitsProcessor", (1.1,)), ("NoRepeatNGramLogitsProcessor", (2,)),
        ("MinLengthLogitsProcessor", (1000, 2)), ("TemperatureLogitsWarper", (1.3,)), ("TopKLogitsWarper", (200,)),
        ("TopPLogitsWarper", (0.97,)), ("MinPLogitsWarper", (0.01,)), ("TypicalLogitsWarper", (0.9,)),
        ("EpsilonLogitsWarper", (1e-3,)), ("EtaLogitsWarper", (1e-3,)), ("LogitNormalization", ()),
    ],
    "typical": [("TypicalLogitsWarper", (0.9,))],
    "top-h": [("TopHLogitsWarper", (0.4,))],
    "eta": [("EtaLogitsWarper", (3e-4,))],
}  # fmt: skip


@pytest.mark.parametrize("chain", CHAINS)
def test_as_transformers_on_every_column_of_a_text(smollm2_f32: Any, chain: str) -> None:
    ids = smollm2_f32.tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = smollm2_f32(ids).logits[0]
    processors = [class_of(name)(*arguments) for name, arguments in CHAINS[chain]]
    assert Chain(processors).covered
    random = np.random.default_rng(0)
    for column in range(0, ids.shape[1], 3):
        check(processors, Case(random, ids[:, : column + 1], logits[column : column + 1]))
