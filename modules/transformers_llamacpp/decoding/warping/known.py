"""Which of transformers' processors are known, by the digest of their code, and what is done in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.generation import logits_process

from . import biasing, truncating
from .nucleus import top_p
from .rows import Batch, Row
from .sequences import SequenceBias
from .sources import digest, is_transformers_own
from .top_h import top_h
from .typical import typical

__all__ = ["KNOWN", "ROW_BY_ROW", "Known", "Step", "step_for"]

Step = Callable[[Any, Batch], bool]
"""Does to the batch what the processor would have done; False, with nothing changed, where the processor has to do it."""

RowStep = Callable[[Any, Row, Batch], bool]


@dataclass(frozen=True, slots=True)
class Known:
    """`steps`: what makes the step, by the digest of `__call__`. `helpers`: other functions that `__call__` relies on, by where
    they are found (in the class or in the module), with their digests."""

    steps: dict[str, Callable[[], Step]]
    helpers: dict[str, tuple[str, ...]]


def step_for(processor: Any, last: bool) -> Step | None:
    """What runs in the place of `processor`; `None` where it is unknown: its class is not exactly one of transformers', it was
    changed, or this release has other code. `last`: no processor follows."""
    cls = type(processor)
    name = cls.__name__
    if getattr(logits_process, name, None) is not cls or "__call__" in vars(processor):
        return None
    if name in DELEGATED:
        return _never if is_transformers_own(cls.__call__) else None
    known = KNOWN.get(name)
    if known is None or not is_transformers_own(cls.__call__):
        return None
    for where, digests in known.helpers.items():
        if digest(getattr(cls, where, None) or getattr(logits_process, where, None)) not in digests:
            return None
    if last and name == "LogitNormalization" and digest(cls.__call__) in known.steps:
        return _each_row(biasing.last_normalization)()
    make = known.steps.get(digest(cls.__call__))
    return None if make is None else make()


def _each_row(step: RowStep) -> Callable[[], Step]:
    def every(processor: Any, batch: Batch) -> bool:
        for row in batch.rows:
            if not step(processor, row, batch):
                batch.delegate_row(processor, row)
        return True

    return lambda: every


def _whole(step: Step) -> Callable[[], Step]:
    return lambda: step


def _never(processor: Any, batch: Batch) -> bool:
    return False


def _same(step: Callable[[], Step], *digests: str, **helpers: str) -> Known:
    return Known(dict.fromkeys(digests, step), {name: (one,) for name, one in helpers.items()})


DELEGATED = ("WatermarkLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor")
"""Their own work is all their cost; they run no code but transformers'."""

ROW_BY_ROW = frozenset({
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper",
    "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization", "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor", "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor", "SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor",
    "ExponentialDecayLengthPenalty",
})  # fmt: skip
"""Those that do to a row the same whatever other rows there are. The others hold something for each row of the call."""

KNOWN = {
    "TemperatureLogitsWarper": _same(_each_row(truncating.temperature), "6800357b2a8a"),
    "TopKLogitsWarper": _same(_each_row(truncating.top_k), "36a6854efc51"),
    "TopPLogitsWarper": _same(_each_row(top_p), "db88a9b9a03a"),
    "MinPLogitsWarper": _same(_each_row(truncating.min_p), "df2dae54954d"),
    "TypicalLogitsWarper": _same(_each_row(typical), "9495414f9dcb"),
    "EpsilonLogitsWarper": _same(_each_row(truncating.epsilon), "3506ce854048"),
    "EtaLogitsWarper": _same(_each_row(truncating.eta), "0042615beb13"),
    "TopHLogitsWarper": _same(_whole(top_h), "16448755b7dc"),
    "LogitNormalization": _same(_each_row(biasing.normalization), "d6a49a6a6481"),
    "RepetitionPenaltyLogitsProcessor": Known(
        {
            "eb9c242a5035": _whole(biasing.repetition_penalty_before_5_23),
            "5bae1a7dc5a6": _whole(biasing.repetition_penalty_before_5_23),
            "d2565cd12724": _whole(biasing.repetition_penalty),
        },
        {},
    ),
    "EncoderRepetitionPenaltyLogitsProcessor": _same(
        _whole(biasing.encoder_repetition_penalty), "2bdbd18f6740", "d21bc90514b5"
    ),
    "NoRepeatNGramLogitsProcessor": _same(_whole(biasing.no_repeat_ngram), "29404dd32b78", "0ba6d247279d", "f91c368727e2"),
    "EncoderNoRepeatNGramLogitsProcessor": _same(
        _whole(biasing.encoder_no_repeat_ngram), "6d74ed287e92", _get_generated_ngrams="b1d87a431a26"
    ),
    **dict.fromkeys(
        ("SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor"),
        Known(
            {
                "22b8c98946a6": lambda: SequenceBias(True, 1),
                "5c5384e1d7c2": lambda: SequenceBias(True, 0),
                "df3cd5622e5e": lambda: SequenceBias(False, 0),
            },
            {"_prepare_bias_variables": ("bdac741b7fa4", "e5a2563513a8")},
        ),
    ),
    "MinLengthLogitsProcessor": _same(_whole(biasing.min_length), "187daba291fd"),
    "MinNewTokensLengthLogitsProcessor": _same(_whole(biasing.min_new_tokens), "eb5c647d35e6"),
    "SuppressTokensLogitsProcessor": _same(_whole(biasing.suppress), "187d6ba3c0cb"),
    "SuppressTokensAtBeginLogitsProcessor": _same(_whole(biasing.suppress_at_begin), "69fc2b6ef1f8", "9c376690c400"),
    "ForcedBOSTokenLogitsProcessor": _same(_whole(biasing.forced_bos), "5b4109ed9032"),
    "ForcedEOSTokenLogitsProcessor": _same(_whole(biasing.forced_eos), "b008a541864b"),
    "InfNanRemoveLogitsProcessor": _same(_whole(biasing.inf_nan_remove), "dd786a02bc0e"),
    "ExponentialDecayLengthPenalty": _same(_whole(biasing.exponential_decay), "daebb7eff602", "b36efd80e437"),
}
"""By the name of the class. A release whose code has another digest is not wrong, only slow: read what changed, and add it."""
