"""Neutral values of the samplers. Holds a reference to the table of samplers, as the webui's module does."""

from modules import shared
from modules.loaders import loaders_samplers

default_preset_values = {
    "temperature": 1,
    "dynatemp_low": 1,
    "dynatemp_high": 1,
    "dynatemp_exponent": 1,
    "smoothing_factor": 0,
    "smoothing_curve": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "top_n_sigma": 0,
    "typical_p": 1,
    "xtc_threshold": 0.1,
    "xtc_probability": 0,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "tfs": 1,
    "top_a": 0,
    "adaptive_target": 0,
    "adaptive_decay": 0.9,
    "dry_multiplier": 0,
    "dry_allowed_length": 2,
    "dry_base": 1.75,
    "repetition_penalty": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "repetition_penalty_range": 1024,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "mirostat_mode": 0,
    "mirostat_tau": 5,
    "mirostat_eta": 0.1,
    "do_sample": True,
    "dynamic_temperature": False,
    "temperature_last": False,
    "sampler_priority": "repetition_penalty\npresence_penalty\nfrequency_penalty\ntemperature\ntop_k\ntop_p\nmin_p",
    "dry_sequence_breakers": '"\\n", ":"',
}
INTEGERS = {"top_k", "dry_allowed_length", "no_repeat_ngram_size", "repetition_penalty_range", "mirostat_mode"}


def default_preset():
    return dict(default_preset_values)


def presets_params():
    return list(default_preset())


def loader_contains(sampler):
    return sampler in loaders_samplers[shared.args.loader]
