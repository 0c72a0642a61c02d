"""Replaces methods of transformers for everybody in the process, so that the webui's own samplers are known to it."""

import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import LogitNormalization

original_get_logits_processor = transformers.GenerationMixin._get_logits_processor
original_init = transformers.GenerationConfig.__init__
global_scores = None

DEFAULTS = {
    "min_p": 0.0,
    "dynamic_temperature": False,
    "dynatemp_low": 1,
    "dynatemp_high": 1,
    "dynatemp_exponent": 1,
    "smoothing_factor": 0.0,
    "smoothing_curve": 1.0,
    "tfs": 1.0,
    "top_a": 0.0,
    "top_n_sigma": 0.0,
    "adaptive_target": 0.0,
    "adaptive_decay": 0.9,
    "mirostat_mode": 0,
    "mirostat_eta": 0.1,
    "mirostat_tau": 5,
    "repetition_penalty_range": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_sequence_breakers": '"\\n", ":"',
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "temperature_last": False,
    "sampler_priority": [
        "repetition_penalty", "presence_penalty", "frequency_penalty", "temperature", "top_k", "top_p", "min_p",
    ],
}
NICKNAMES = {
    "TemperatureLogitsWarperCustom": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "TypicalLogitsWarper": "typical_p",
    "RepetitionPenaltyLogitsProcessorWithRange": "repetition_penalty",
    "PresencePenaltyLogitsProcessor": "presence_penalty",
    "FrequencyPenaltyLogitsProcessor": "frequency_penalty",
    "TopNSigmaLogitsWarper": "top_n_sigma",
    "XTCLogitsWarper": "xtc",
}


class TemperatureLogitsWarperCustom(LogitsProcessor):
    def __init__(self, temperature):
        self.temperature = temperature

    def __call__(self, input_ids, scores):
        if self.temperature == 0:
            return scores.masked_fill(scores < scores.max(dim=-1, keepdim=True).values, -float("inf"))
        return scores / self.temperature


class _Repeated(LogitsProcessor):
    """Changes the scores of what already occurs among the last tokens."""

    def __init__(self, strength, _range):
        self.strength, self._range = strength, _range

    def __call__(self, input_ids, scores):
        for row, ids in enumerate(input_ids):
            tokens, counts = ids[-self._range :].unique(return_counts=True)
            scores[row, tokens] = self.changed(scores[row, tokens], counts)
        return scores


class RepetitionPenaltyLogitsProcessorWithRange(_Repeated):
    def changed(self, scores, counts):
        return torch.where(scores < 0, scores * self.strength, scores / self.strength)


class PresencePenaltyLogitsProcessor(_Repeated):
    def changed(self, scores, counts):
        return scores - self.strength


class FrequencyPenaltyLogitsProcessor(_Repeated):
    def changed(self, scores, counts):
        return scores - self.strength * counts


class TopNSigmaLogitsWarper(LogitsProcessor):
    def __init__(self, n_sigma):
        self.n_sigma = n_sigma

    def __call__(self, input_ids, scores):
        finite = scores[torch.isfinite(scores)]
        return scores.masked_fill(scores < finite.max() - self.n_sigma * finite.std(), -float("inf"))


class XTCLogitsWarper(LogitsProcessor):
    def __init__(self, threshold, probability):
        self.threshold, self.probability = threshold, probability

    def __call__(self, input_ids, scores):
        above = scores.softmax(dim=-1) > self.threshold
        if torch.rand(()) >= self.probability or above.sum() < 2:
            return scores
        above[0, torch.where(above, scores, float("inf")).argmin()] = False
        return scores.masked_fill(above, -float("inf"))


class SpyLogitsWarper(LogitsProcessor):
    """Last of all: keeps the scores for those who ask for logits after the samplers."""

    def __call__(self, input_ids, scores):
        global global_scores
        global_scores = scores
        return scores


def _additions(config):
    reach = config.repetition_penalty_range
    if config.repetition_penalty not in (None, 1.0):
        yield RepetitionPenaltyLogitsProcessorWithRange(config.repetition_penalty, reach)
    if config.presence_penalty:
        yield PresencePenaltyLogitsProcessor(config.presence_penalty, reach)
    if config.frequency_penalty:
        yield FrequencyPenaltyLogitsProcessor(config.frequency_penalty, reach)
    if config.top_n_sigma:
        yield TopNSigmaLogitsWarper(config.top_n_sigma)
    if config.xtc_probability:
        yield XTCLogitsWarper(config.xtc_threshold, config.xtc_probability)


def get_logits_processor_patch(self, **kwargs):
    config = kwargs["generation_config"]
    if isinstance(config.temperature, int):
        config.temperature = float(config.temperature)
    warpers = []
    for warper in original_get_logits_processor(self, **kwargs):
        name = type(warper).__name__
        if name == "TemperatureLogitsWarper":
            warper = TemperatureLogitsWarperCustom(config.temperature)
        if name != "RepetitionPenaltyLogitsProcessor":
            warpers.append(warper)
    last = [warpers.pop()] if warpers and isinstance(warpers[-1], LogitNormalization) else []
    warpers += _additions(config)
    order = config.sampler_priority
    if config.temperature_last:
        order[:] = [name for name in order if name != "temperature"] + ["temperature"]
    places = {name: at for at, name in enumerate(order)}
    warpers.sort(key=lambda warper: places.get(NICKNAMES.get(type(warper).__name__), -1))  # unknown ones come first
    return LogitsProcessorList([*warpers, *last, SpyLogitsWarper()])


def generation_config_init_patch(self, **kwargs):
    original_init(self, **kwargs)
    for name, default in DEFAULTS.items():
        setattr(self, name, kwargs.get(name, list(default) if isinstance(default, list) else default))


def hijack_samplers():
    transformers.GenerationMixin._get_logits_processor = get_logits_processor_patch
    transformers.GenerationConfig.__init__ = generation_config_init_patch
