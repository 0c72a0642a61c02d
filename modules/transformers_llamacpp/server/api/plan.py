"""From a request to what `generate()` is called with: every field that changes the text is read here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import WatermarkingConfig

from ...errors import ContextOverflowError
from ..limits import ServeOptions
from .errors import ApiError
from .fields import CONFIG_FIELDS, NEWER
from .grammar import grammar_of
from .prompts import Prompt

__all__ = ["Plan", "make_plan"]

DEFAULT_TOKENS = 512
"""Of a completion without max_tokens, as in the webui; an answer in a chat may fill the context."""

CONTRASTIVE_K = 4
SAMPLERS = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
"""OpenAI's defaults, and no top-k, where neither the request nor the GGUF says anything."""


@dataclass(slots=True)
class Plan:
    """`rows` texts are written for each prompt, and the likeliest `n` of them returned. `options` go to `generate()` as they
    are; `max_tokens` is one number for each prompt."""

    prompts: list[Prompt]
    max_tokens: list[int]
    options: dict[str, Any]
    n: int = 1
    rows: int = 1
    stops: list[str] = field(default_factory=list)
    seed: int | None = None
    logprobs: int | None = None
    """Of how many of the likeliest tokens; `None`: of none, not even the chosen one."""
    tells_logprobs: bool = False
    echo: bool = False
    grammar: str | None = None
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    range_penalty: tuple[float, int] | None = None
    negative_prompt: str = ""
    assistant: str | bool | None = None
    """The name of the one that drafts; `False`: nobody does; `None`: as the model is loaded."""
    skip_special: bool = True
    beams: bool = False

    @property
    def one_by_one(self) -> bool:
        """Drafts are for one text at a time, so that several are several calls."""
        return isinstance(self.assistant, str) or "prompt_lookup_num_tokens" in self.options

    def seeds(self, rows: range) -> list[int] | None:
        return None if self.seed is None else [(self.seed + row) % 2**64 for row in rows]


def make_plan(request: Any, model: Any, prompts: list[Prompt], serve: ServeOptions, *, default_tokens: int | None) -> Plan:
    """Raises `ApiError` with the name of the field, and `ContextOverflowError`."""
    names = (*CONFIG_FIELDS, *NEWER)
    options = {name: getattr(request, name) for name in names if getattr(request, name, None) is not None}
    stops = _stops(request.stop, options.pop("stop_strings", None))
    plan = Plan(prompts, [], options, n=request.n or 1, stops=stops, seed=_seed(request.seed))
    plan.rows = max(plan.n, getattr(request, "best_of", None) or 1)
    plan.echo = bool(getattr(request, "echo", None))
    plan.logprobs = _logprobs(request)
    plan.tells_logprobs = plan.logprobs is not None
    if plan.rows > plan.n and not plan.tells_logprobs:
        plan.logprobs = 0  # by which the best are found
    plan.presence, plan.frequency = request.presence_penalty or 0.0, request.frequency_penalty or 0.0
    plan.skip_special = request.skip_special_tokens is not False
    plan.grammar = grammar_of(request)
    _choose_method(request, model, plan)
    _check_beams(request, plan)
    _speculation(request, plan)
    _tokens(request, model, plan)
    _check_size(request, plan, serve)
    plan.negative_prompt = request.negative_prompt or ""
    plan.max_tokens = [_room(request, model, plan, prompt, serve, default_tokens) for prompt in prompts]
    if request.n_sink is not None and request.n_sink != model.quantization_config.n_sink:
        raise ApiError(
            400, f"n_sink: the model is loaded with {model.quantization_config.n_sink}, which holds for all of its texts; load "
            f"it with args n_sink={request.n_sink}", "n_sink", "invalid_value",
        )  # fmt: skip
    return plan


def _logprobs(request: Any) -> int | None:
    given = getattr(request, "logprobs", None)
    if not isinstance(given, bool):
        return given
    top = request.top_logprobs
    if top and not given:
        raise ApiError(400, "top_logprobs: only with logprobs=true", "top_logprobs", "invalid_value")
    return (top or 0) if given else None


def _stops(stop: Any, strings: Any) -> list[str]:
    found = [one for given in (stop, strings) if given is not None for one in ([given] if isinstance(given, str) else given)]
    return [one for one in dict.fromkeys(found) if one]


def _seed(seed: int | None) -> int | None:
    return None if seed is None or seed < 0 else seed


def _choose_method(request: Any, model: Any, plan: Plan) -> None:
    """Sampling, unless the request asks for something that does not sample; the samplers go where nothing is sampled."""
    options = plan.options
    contrastive = (options.get("penalty_alpha") or 0) > 0
    plan.beams = (options.get("num_beams") or 1) > 1 or bool(options.get("force_words_ids"))
    asked = options.get("do_sample")
    if asked and contrastive:
        raise ApiError(400, "penalty_alpha: contrastive search does not sample: leave out do_sample", "penalty_alpha",
                       "invalid_value")  # fmt: skip
    cold = options.get("temperature") == 0
    if asked and cold:
        raise ApiError(400, "temperature=0 takes the likeliest token, which is not sampling: leave out do_sample, or raise it",
                       "temperature", "invalid_value")  # fmt: skip
    sample = not (contrastive or plan.beams or cold) if asked is None else bool(asked) and not cold
    options["do_sample"] = sample
    if not sample:
        k = options.get("top_k")
        for name in SAMPLERS:
            options.pop(name, None)
        if contrastive:
            options["top_k"] = k if k and k > 1 else CONTRASTIVE_K
            if options["top_k"] > 64:
                raise ApiError(400, f"top_k={k}: contrastive search takes 64 candidates at most", "top_k", "invalid_value")
        return
    for name, value in NEUTRAL.items():
        if getattr(model.generation_config, name, None) is None:
            options.setdefault(name, value)
    for name in ("epsilon_cutoff", "eta_cutoff"):
        if options.get(name, 0) >= 1:
            options[name] *= 1e-4
    if plan.beams and plan.seed is not None:
        raise ApiError(400, "seed: sampled beams draw from all beams at once, which no seed decides: leave out do_sample",
                       "seed", "unsupported")  # fmt: skip


def _check_beams(request: Any, plan: Plan) -> None:
    beams = plan.options.get("num_beams") or 1
    if not plan.beams:
        return
    if beams > 1 and plan.rows > beams:
        raise ApiError(400, f"n={plan.rows} texts cannot come of num_beams={beams}", "n", "invalid_value")
    if beams == 1:
        raise ApiError(400, "force_words_ids needs beams: num_beams=4", "force_words_ids", "invalid_value")


def _speculation(request: Any, plan: Plan) -> None:
    if not plan.options.get("prompt_lookup_num_tokens"):
        plan.options.pop("prompt_lookup_num_tokens", None)
    named = request.assistant_model
    if named is True:
        raise ApiError(400, "assistant_model: the name of a model, or false", "assistant_model", "invalid_type")
    if named is False or named in ("off", "None"):
        plan.assistant = False
    elif named:
        plan.assistant = named


def _tokens(request: Any, model: Any, plan: Plan) -> None:
    """Everything that speaks of token ids."""
    n_vocab, options = model.config.vocab_size, plan.options
    if request.ban_eos_token:
        ends = model.generation_config.eos_token_id or []
        options["suppress_tokens"] = [*options.get("suppress_tokens", []), *([ends] if isinstance(ends, int) else ends)]
    if request.custom_token_bans:
        try:
            banned = [int(part) for part in request.custom_token_bans.split(",") if part.strip()]
        except ValueError:
            raise ApiError(400, "custom_token_bans: numbers with commas between them", "custom_token_bans",
                           "invalid_value") from None  # fmt: skip
        options["suppress_tokens"] = [*options.get("suppress_tokens", []), *banned]
    for name, value in (request.logit_bias or {}).items():
        if not name.isascii() or not name.isdigit() or int(name) >= n_vocab:
            raise ApiError(400, f"logit_bias: {name!r} is no token id from 0 to {n_vocab - 1}", "logit_bias", "invalid_value")
        if not -100 <= value <= 100:
            raise ApiError(400, f"logit_bias: {value} is none from -100 to 100", "logit_bias", "invalid_value")
        plan.bias[int(name)] = value
    for name in ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids", "sequence_bias",
                 "forced_eos_token_id", "forced_bos_token_id", "eos_token_id", "pad_token_id"):  # fmt: skip
        for token in _numbers(options.get(name) if name != "sequence_bias" else [one[:1] for one in options.get(name, [])]):
            if not isinstance(token, int) or not 0 <= token < n_vocab:
                where = "custom_token_bans" if name == "suppress_tokens" and request.custom_token_bans else name
                raise ApiError(400, f"{where}: {token!r} is no token id from 0 to {n_vocab - 1}", where, "invalid_value")
    if request.repetition_penalty_range and options.get("repetition_penalty", 1) != 1:
        plan.range_penalty = options.pop("repetition_penalty"), request.repetition_penalty_range
        options["repetition_penalty"] = 1.0
    if "watermarking_config" in options:
        try:
            options["watermarking_config"] = WatermarkingConfig(**options["watermarking_config"])
        except TypeError as error:
            raise ApiError(400, f"watermarking_config: {error}", "watermarking_config", "invalid_value") from None
    if "exponential_decay_length_penalty" in options:
        decay = options["exponential_decay_length_penalty"]
        if len(decay) != 2 or int(decay[0]) != decay[0]:
            raise ApiError(400, "exponential_decay_length_penalty: two numbers, [tokens, factor]",
                           "exponential_decay_length_penalty", "invalid_value")  # fmt: skip
        options["exponential_decay_length_penalty"] = (int(decay[0]), float(decay[1]))


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [token for part in value for token in _numbers(part)]
    return [] if value is None else [value]


def _check_size(request: Any, plan: Plan, serve: ServeOptions) -> None:
    limit, texts = serve.limits.max_choices, len(plan.prompts) * plan.rows
    if texts > limit:
        name = "n" if len(plan.prompts) == 1 else "prompt"
        raise ApiError(400, f"{texts} texts are asked for at once, and {limit} are allowed (--max-choices)", name, "too_many")
    if plan.rows > plan.n and request.stream:
        raise ApiError(400, "best_of: the best are known at the end only: leave out stream", "best_of", "invalid_value")


def _room(request: Any, model: Any, plan: Plan, prompt: Prompt, serve: ServeOptions, default: int | None) -> int:
    """How many tokens may follow a prompt: what was asked for, if the context has room for it."""
    options, limit = plan.options, serve.limits.max_tokens
    wanted = request.max_tokens
    for given in (getattr(request, "max_completion_tokens", None), options.get("max_new_tokens")):
        wanted = given if given is not None else wanted
    if wanted is None and options.get("max_length") is not None:
        wanted = max(0, options["max_length"] - len(prompt.ids))
    if limit and wanted is not None and wanted > limit:
        raise ApiError(400, f"max_tokens={wanted} is more than this server allows: {limit} (--max-tokens)", "max_tokens",
                       "too_many")  # fmt: skip
    if wanted is None and request.auto_max_new_tokens is not True:
        wanted = default
    if wanted == 0 and not plan.echo:
        raise ApiError(400, "max_tokens=0 writes nothing: echo shows the prompt", "max_tokens", "invalid_value")
    if wanted == 0:
        return 0
    n_ctx = model.config.max_position_embeddings
    allowed = min(one for one in (wanted, limit or None, n_ctx if wanted is None else None) if one is not None)
    if model.quantization_config.n_sink is not None:  # a full context slides
        return allowed
    if len(prompt.ids) >= n_ctx:
        raise ContextOverflowError(len(prompt.ids) + 1, n_ctx)
    return min(n_ctx - len(prompt.ids), allowed)


