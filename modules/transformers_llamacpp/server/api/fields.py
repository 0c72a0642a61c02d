"""The fields of a request that are transformers' `GenerationConfig` or the webui's samplers: their types, ranges and help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from transformers import GenerationConfig

from ...options import OPTIONS

__all__ = ["CONFIG_FIELDS", "NEWER", "RESTING", "SERVER_OWNED", "config_definitions", "help_of", "resting_definitions"]

_HELP = {entry.name: entry.help for entry in OPTIONS}

Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(max_length=65536)]
Phrases = Annotated[list[Annotated[list[Token], Field(min_length=1, max_length=256)]], Field(max_length=256)]


def help_of(name: str, otherwise: str = "") -> str:
    """What the option table says about `name`, else `otherwise`."""
    return _HELP.get(name, otherwise)


@dataclass(frozen=True, slots=True)
class Known:
    """A field of `GenerationConfig`: its type and range, and help where the option table has none."""

    kind: Any
    help: str = ""
    ge: float | None = None
    le: float | None = None
    gt: float | None = None

    def definition(self, name: str) -> tuple[Any, Any]:
        return self.kind | None, Field(None, ge=self.ge, le=self.le, gt=self.gt, description=help_of(name, self.help))


CONFIG_FIELDS: dict[str, Known] = {
    # how the next token is chosen
    "do_sample": Known(bool, "Draw tokens instead of taking the likeliest. By default they are drawn, unless temperature is 0, "
                       "or beams or contrastive search are asked for."),
    "temperature": Known(float, ge=0, le=100),
    "top_p": Known(float, ge=0, le=1),
    "top_k": Known(int, ge=0, le=2**20),
    "min_p": Known(float, ge=0, le=1),
    "top_h": Known(float, "Keep the likeliest tokens up to this share of the distribution's entropy.", gt=0, le=1),
    "typical_p": Known(float, gt=0, le=1),
    "epsilon_cutoff": Known(float, "Drop tokens less likely than this; 0 is off. From 1 on in ten-thousandths, as the webui "
                            "counts.", 0, 9999),
    "eta_cutoff": Known(float, "The same, less strict where many tokens are likely; 0 is off. From 1 on in ten-thousandths.",
                        0, 9999),
    "renormalize_logits": Known(bool, "Normalise the scores after all processors."),
    "remove_invalid_values": Known(bool, "Replace scores that are no numbers."),
    # what counts against a token, or for it
    "repetition_penalty": Known(float, gt=0, le=100),
    "encoder_repetition_penalty": Known(float, "Above 1 favours tokens of the prompt; 1 is off.", gt=0, le=100),
    "no_repeat_ngram_size": Known(int, ge=0, le=1024),
    "bad_words_ids": Known(Phrases, "Runs of token ids that must not occur."),
    "sequence_bias": Known(list[list[Any]], "Runs of token ids and what is added to their "
                           "score: [[[id, ...], bias], ...]."),
    "suppress_tokens": Known(Tokens, "Token ids that are never chosen."),
    "begin_suppress_tokens": Known(Tokens, "Token ids that are not chosen first."),
    "forced_bos_token_id": Known(Token, "The first token after a prompt of one token."),
    "forced_eos_token_id": Known(Token | Tokens, "The last token where the length is reached."),
    "exponential_decay_length_penalty": Known(list[float], "[start, factor]: from so many tokens on the end becomes likelier."),
    "watermarking_config": Known(dict[str, Any], "Watermark the text: transformers' WatermarkingConfig."),
    # when it ends
    "max_new_tokens": Known(int, ge=0, le=2**31 - 1),
    "max_length": Known(int, "Most tokens of prompt and answer together.", 1, 2**31 - 1),
    "min_length": Known(int, "The text, prompt included, does not end before it has this many tokens.", 0, 2**31 - 1),
    "min_new_tokens": Known(int, ge=0, le=2**31 - 1),
    "max_time": Known(float, "Seconds after which the answer ends.", gt=0),
    "stop_strings": Known(str | list[str], "The same as stop."),
    "eos_token_id": Known(Token | Tokens, "Tokens that end the answer, instead of the model's own."),
    "pad_token_id": Known(Token, "The token of rows that have ended."),
    "bos_token_id": Known(Token, "The token that texts begin with."),
    # several texts side by side
    "num_beams": Known(int, ge=1, le=64),
    "num_beam_groups": Known(int, ge=1, le=64),
    "diversity_penalty": Known(float, ge=0, le=1000),
    "length_penalty": Known(float, ge=-1000, le=1000),
    "early_stopping": Known(bool | str),
    "force_words_ids": Known(list[Any], "Runs of token ids that must occur (with beams): [[id, ...], ...]."),
    # ways of decoding
    "penalty_alpha": Known(float, "Contrastive search: how much repetition counts against probability; 0 is off. Greedy, with "
                           "top_k candidates (4 unless given).", 0, 1),
    "dola_layers": Known(str | list[Annotated[int, Field(ge=0, le=4096)]], "DoLa: contrast the last layer with earlier ones: "
                         '"low", "high", or a list of layers.'),
    "guidance_scale": Known(float, ge=-1000, le=1000),
    "prompt_lookup_num_tokens": Known(int, "Draft up to this many tokens from what the text says already; 0 is off.", 0, 64),
    "max_matching_ngram_size": Known(int, "The longest run of tokens that prompt lookup looks for.", 1, 64),
    "num_assistant_tokens": Known(int, ge=1, le=64),
    "num_assistant_tokens_schedule": Known(str, '"constant", "heuristic" or "heuristic_transient".'),
    "assistant_confidence_threshold": Known(float, ge=0, le=1),
    "assistant_ensemble_weight": Known(float, "Verify drafts against this share of the model and the rest of the assistant.",
                                       0, 1),
    "assistant_lookbehind": Known(int, "Tokens before a draft that are compared again, with other vocabularies.", 1, 1024),
    "target_lookbehind": Known(int, "The same on the model's side.", 1, 1024),
    "token_healing": Known(bool, "Let the model choose anew where the prompt was cut inside a word."),
    "use_cache": Known(bool, "false evaluates the whole text for every token."),
    "cache_implementation": Known(str, "Only llama.cpp's own: null or dynamic."),
    "prefill_chunk_size": Known(int, "Most tokens in one decode of the prompt.", 1, 2**31 - 1),
}  # fmt: skip
"""What a request may set, by the name it has in transformers."""

SERVER_OWNED = frozenset(
    {
        "compile_config", "constraints", "continuous_batching_config", "decoder_start_token_id", "disable_compile",
        "encoder_no_repeat_ngram_size", "is_assistant", "max_cache_len", "num_return_sequences", "output_attentions",
        "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate", "transformers_version",
        "cache_config", "low_memory", "assistant_early_exit", "use_mtp", "speculation_type",
    }
)  # fmt: skip
"""What a request cannot set: it is the server's, has no meaning in JSON, or belongs to PyTorch models. `n` is the name for
`num_return_sequences`."""

INSTALLED = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))

NEWER = tuple(sorted(INSTALLED - set(CONFIG_FIELDS) - SERVER_OWNED))
"""Fields that only a newer release of transformers than this table knows has: they are passed on as they are."""

RESTING: dict[str, tuple[Any, Any, str]] = {
    "dynamic_temperature": (bool, False, ""), "dynatemp_low": (float, ..., ""), "dynatemp_high": (float, ..., ""),
    "dynatemp_exponent": (float, ..., ""), "smoothing_factor": (float, 0, ""), "smoothing_curve": (float, ..., ""),
    "xtc_threshold": (float, ..., ""), "xtc_probability": (float, 0, ""), "tfs": (float, 1, ""), "top_a": (float, 0, ""),
    "top_n_sigma": (float, 0, ""), "adaptive_target": (float, 0, ""), "adaptive_decay": (float, ..., ""),
    "dry_multiplier": (float, 0, ""), "dry_allowed_length": (int, ..., ""), "dry_base": (float, ..., ""),
    "dry_sequence_breakers": (str | list[str], ..., ""), "mirostat_mode": (int, 0, ""), "mirostat_tau": (float, ..., ""),
    "mirostat_eta": (float, ..., ""), "static_cache": (bool, False, ""),
    "max_tokens_second": (int, 0, ""), "preset": (str, None, "presets are files of the webui: send what they hold"),
}  # fmt: skip
"""The webui's samplers that transformers does not have: type, the value that asks for nothing (`...`: any, because another
field switches it on), and a reason. Clients send them all the time, with these values."""


def config_definitions() -> dict[str, tuple[Any, Any]]:
    """Definitions for `pydantic.create_model`: the fields that the installed release of transformers has."""
    known = {name: field.definition(name) for name, field in CONFIG_FIELDS.items() if name in INSTALLED}
    return known | {name: (Any, Field(None, description="As in transformers' GenerationConfig.")) for name in NEWER}


def resting_definitions() -> dict[str, tuple[Any, Any]]:
    definitions = {}
    for name, (kind, neutral, _) in RESTING.items():
        about = "accepted, and not read" if neutral is ... else f"only {neutral!r}, which asks for nothing, is accepted"
        definitions[name] = (kind | None, Field(None, description=f"Of the webui: {about}."))
    return definitions
