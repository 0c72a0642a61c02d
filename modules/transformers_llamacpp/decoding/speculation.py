"""Who drafts in a call: what its arguments, its config and the model's hook ask for, and whether that can be done."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..engine import Engine
from ..errors import ClosedError, InvalidInputError, UnsupportedFeatureError
from .assisted import assisted_decoding
from .common import request_of_call
from .drafting.assistant import AssistantDrafter, LlamaCppReader, Reader
from .drafting.combined import Drafters, PacedDrafter, Schedule
from .drafting.lookup import PromptLookup
from .drafting.pace import Pace
from .drafting.sampler import DraftSampler, usable_processors
from .drafting.torch_reader import TorchReader
from .drafting.translated import TranslatedDrafter
from .drafting.translation import Translator
from .drafting.vocabularies import PADDING, same_vocabulary

__all__ = ["Speculation"]

NUM_ASSISTANT_TOKENS, SCHEDULE, CONFIDENCE, MAX_NGRAM = 20, "constant", 0.4, 2
"""transformers' defaults."""

SCHEDULES = ("constant", "heuristic", "heuristic_transient")

_grown: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""`num_assistant_tokens` of assistants whose schedule is "heuristic", which transformers keeps between calls. It would
write it into the assistant's generation config, which is the user's."""

_compared: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, bool]] = weakref.WeakKeyDictionary()
"""Vocabularies that were compared once already: it takes a quarter of a second for the largest."""


@dataclass(slots=True)
class Speculation:
    """`assistant_model` and the tokenizers of one call; `asked`: the call names the assistant itself, so that what cannot
    be done is an error. An assistant that only hangs at the model's hook steps aside instead."""

    model: Any
    assistant: Any
    tokenizer: Any
    assistant_tokenizer: Any
    asked: bool
    call: dict[str, Any]

    @classmethod
    def take(cls, model: Any, kwargs: dict[str, Any]) -> Speculation:
        """From the arguments of `generate()`, out of which the assistant and its tokenizer are taken."""
        assistant = kwargs.pop("assistant_model", None)
        tokenizer, its_tokenizer = kwargs.get("tokenizer"), kwargs.pop("assistant_tokenizer", None)
        asked = assistant is not None and assistant is not False
        if assistant is False:
            assistant = None
        elif not asked and model.assistant_model is not None:
            assistant = model.assistant_model
            its_tokenizer = its_tokenizer or model.assistant_tokenizer
            if its_tokenizer is not None and tokenizer is None:
                tokenizer = model.tokenizer
        return cls(model, assistant, tokenizer, its_tokenizer, asked, dict(kwargs))

    def loop(self, config: Any, other: str | None, rows: int) -> Callable[..., Any] | None:
        """The decoding loop for this call, `None` where it is not to speculate.

        `other` names a method that the call asks for as well, `rows` is the size of its batch. Raises
        `InvalidInputError` or `UnsupportedFeatureError` for what cannot be obeyed.
        """
        _refuse_unknown(config)
        lookup = config.prompt_lookup_num_tokens
        if self.assistant is None and lookup is None:
            return None
        conflict = _conflict(config, other, rows)
        if conflict is not None:
            if not self.asked and lookup is None:
                return None
            name = "assistant_model" if self.asked else "prompt_lookup_num_tokens"
            raise InvalidInputError(f"{name} drafts for one text that is written token by token, and {conflict}")
        if lookup is not None:
            self._lookup(config)  # raises what is wrong with it before anything is computed
        if self.assistant is not None:
            self._check_assistant()
            self._settings()
        if self.assistant is None and getattr(config, "assistant_ensemble_weight", None) is not None:
            raise InvalidInputError(
                f"assistant_ensemble_weight={config.assistant_ensemble_weight} weighs an assistant's probabilities, and "
                "prompt lookup has none: pass assistant_model, or leave the weight out"
            )
        direct = self.assistant is None or self._is_direct()
        return functools.partial(assisted_decoding, make_drafters=functools.partial(self._drafters, direct))

    # -- vocabularies --------------------------------------------------------------------------------------------

    def _is_direct(self) -> bool:
        """Whether the assistant's token ids mean the same as the target's. Raises where nobody can tell how they map."""
        model, assistant = self.model, self.assistant
        both = self.tokenizer is not None and self.assistant_tokenizer is not None
        if _is_llama_cpp(assistant):
            same = _same_vocabulary(model, assistant)
        elif both:
            same = self.tokenizer.get_vocab() == self.assistant_tokenizer.get_vocab()
        else:  # nothing but the sizes can be compared; drafts that mean something else would only be slow
            same = abs(model.config.vocab_size - assistant.config.get_text_config().vocab_size) <= PADDING
        if not same and not both and not self.asked and _is_llama_cpp(assistant):
            self.tokenizer, self.assistant_tokenizer = model.tokenizer, assistant.tokenizer  # both files have their own
            return False
        if not same and not both:
            raise InvalidInputError(
                f"the assistant {_name(assistant)} (vocabulary of {assistant.config.get_text_config().vocab_size}) has other "
                f"tokens than {_name(model)} ({model.config.vocab_size}): pass tokenizer= and assistant_tokenizer=, and its "
                "drafts are translated"
            )
        return same

    def _check_assistant(self) -> None:
        config = getattr(self.assistant, "config", None)
        if config is None or not callable(self.assistant):
            raise InvalidInputError(f"assistant_model is a {type(self.assistant).__name__}; a causal language model is needed")
        if getattr(config, "is_encoder_decoder", False):
            raise InvalidInputError(f"the assistant {_name(self.assistant)} is an encoder-decoder; use a decoder-only model")
        if getattr(self.assistant, "generation_config", None) is None:
            raise InvalidInputError(
                f"the assistant {_name(self.assistant)} is a {type(self.assistant).__name__}, which writes no text; a causal "
                "language model is needed"
            )
        if _is_llama_cpp(self.assistant) and self.assistant.engine.closed:
            raise ClosedError(f"the assistant {_name(self.assistant)} was closed: load it again, or pass another one")
        for name in ("tokenizer", "assistant_tokenizer"):
            given = getattr(self, name)
            if given is not None and not callable(getattr(given, "decode", None)):
                raise InvalidInputError(f"{name} is a {type(given).__name__}; a tokenizer is needed")

    # -- drafters --------------------------------------------------------------------------------------------------

    def _lookup(self, config: Any) -> PromptLookup:
        longest = config.max_matching_ngram_size
        return PromptLookup(config.prompt_lookup_num_tokens, MAX_NGRAM if longest is None else longest)

    def _drafters(self, direct: bool, config: Any, processors: Any, keep_probabilities: bool) -> Drafters:
        drafters = []
        if config.prompt_lookup_num_tokens is not None:
            drafters.append(
                PacedDrafter(self._lookup(config), Schedule(config.prompt_lookup_num_tokens, "constant"), Pace(0.0))
            )
        if self.assistant is not None:
            drafters.append(self._assistant_drafter(direct, config, processors, keep_probabilities))
        return Drafters(drafters)

    def _assistant_drafter(self, direct: bool, config: Any, processors: Any, keep: bool) -> PacedDrafter:
        assistant = self.assistant
        name, tokens, threshold = self._settings()
        schedule = Schedule(_grown.get(assistant, tokens) if name == "heuristic" else tokens, name)
        reader: Reader = LlamaCppReader(assistant) if _is_llama_cpp(assistant) else TorchReader(assistant)
        numbers = request_of_call().numbers
        if direct:
            ends = config._eos_token_tensor
            usable, n_vocab = usable_processors(processors), self.model.config.vocab_size
            # a seed decides the text alone: guesses that took numbers of it would change what is drawn next
            draws = bool(config.do_sample) and not numbers.seeded
            sampler = DraftSampler(n_vocab, usable, draws, keep, numbers)
            drafter: Any = AssistantDrafter(reader, sampler, threshold, [] if ends is None else ends.tolist())
        else:
            sampler = DraftSampler(assistant.config.get_text_config().vocab_size, [], False, False, numbers)
            ends = assistant.generation_config.eos_token_id
            inner = AssistantDrafter(reader, sampler, threshold, ends if isinstance(ends, list) else [ends])
            drafter = TranslatedDrafter(inner, Translator(self.tokenizer, self.assistant_tokenizer))
        cost = assistant.get_memory_footprint() / max(1, self.model.get_memory_footprint())  # what is read for each token
        return PacedDrafter(drafter, schedule, Pace(cost), functools.partial(_keep, assistant, name))

    def _settings(self) -> tuple[str, int, float]:
        """Schedule, tokens and confidence threshold of the assistant."""
        schedule = self._setting("num_assistant_tokens_schedule", SCHEDULE)
        if schedule not in SCHEDULES:
            raise InvalidInputError(f"num_assistant_tokens_schedule={schedule!r} is none of {', '.join(SCHEDULES)}")
        tokens = self._setting("num_assistant_tokens", NUM_ASSISTANT_TOKENS)
        if not isinstance(tokens, (int, float)) or int(tokens) != tokens or tokens < 1:
            raise InvalidInputError(f"num_assistant_tokens={tokens!r}: an assistant drafts 1 token or more")
        threshold = self._setting("assistant_confidence_threshold", CONFIDENCE)
        if not isinstance(threshold, (int, float)):
            raise InvalidInputError(f"assistant_confidence_threshold={threshold!r} is no probability, a number from 0 to 1")
        return schedule, int(tokens), float(threshold)

    def _setting(self, name: str, default: Any) -> Any:
        """The call's own value, else the assistant's, as transformers reads it, else transformers' default."""
        if self.call.get(name) is not None:
            return self.call[name]
        value = getattr(self.assistant.generation_config, name, None)
        return default if value is None else value


def _is_llama_cpp(assistant: Any) -> bool:
    """A `LlamaCppForCausalLM`, whose class stands above this module."""
    return isinstance(getattr(assistant, "engine", None), Engine)


def _same_vocabulary(model: Any, assistant: Any) -> bool:
    known = _compared.setdefault(model, weakref.WeakKeyDictionary())
    if assistant not in known:
        known[assistant] = same_vocabulary(model.native.vocab, assistant.native.vocab)
    return known[assistant]


def _keep(assistant: Any, schedule: str, tokens: int) -> None:
    if schedule == "heuristic":
        _grown[assistant] = tokens


def _name(model: Any) -> str:
    return str(getattr(model, "name_or_path", "") or type(model).__name__)


def _refuse_unknown(config: Any) -> None:
    for name in ("assistant_early_exit", "use_mtp"):
        if getattr(config, name, None):
            raise UnsupportedFeatureError(
                f"{name} drafts with parts of a PyTorch model that llama.cpp does not have; use assistant_model= or "
                "prompt_lookup_num_tokens=",
                name,
            )


def _conflict(config: Any, other: str | None, rows: int) -> str | None:
    if other is not None:
        return f"{other} does not write like that: leave one of them out"
    if (config.num_beams or 1) > 1:
        return f"num_beams={config.num_beams} writes several: leave one of them out"
    if (config.num_return_sequences or 1) > 1:
        return f"num_return_sequences={config.num_return_sequences} are several: call generate() once for each"
    if rows > 1:
        return f"the input has {rows}: call generate() once for each row"
    if config.use_cache is False:
        return "needs its cache: leave out use_cache=False"
    return None
