"""`generate()`: transformers' own, told about our cache, our limits and our statistics."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    MaxLengthCriteria,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from . import compat
from .cache import LlamaCppCache
from .decoding import Guidance, GuidanceProcessor, check_scale, contrastive, method_for
from .decoding.loop import covers, token_by_token
from .decoding.numbers import Numbers, check_seeds
from .decoding.observer import LogitsObserver
from .decoding.room import CellsFull, Room, Sharing, Texts, cells_of, read_texts
from .decoding.warpers import Chain
from .errors import ContextOverflowError, InvalidInputError, UnsupportedFeatureError
from .request import GenerateStats, Request, current_request

if TYPE_CHECKING:
    from .native import NativeModel

__all__ = ["LlamaCppGenerationMixin", "default_generation_config", "plain_loop"]

logger = logging.getLogger(__name__)

FORWARDED = frozenset({compat.CACHE_NAME, "use_cache", "logits_to_keep", "output_hidden_states", "output_attentions"})
"""What a step of a generation loop hands on to `forward`, beside the tokens and their mask."""

THEIR_LOOP = GenerationMixin._sample
"""transformers' own, unless somebody puts something in its place."""

POSITIONAL = tuple(inspect.signature(GenerationMixin.generate).parameters)[3:-1]
"""Names of `generate`'s arguments after `self`, `inputs` and `generation_config`, in their order."""

SAMPLING_KEYS = {
    "general.sampling.temp": ("temperature", float),
    "general.sampling.top_k": ("top_k", int),
    "general.sampling.top_p": ("top_p", float),
    "general.sampling.min_p": ("min_p", float),
    "general.sampling.penalty_repeat": ("repetition_penalty", float),
}
"""Sampling defaults some GGUFs carry, and what transformers calls them."""


def default_generation_config(native: NativeModel) -> GenerationConfig:
    """End, pad and start tokens as llama.cpp reports them, and the sampling defaults the file carries."""
    vocab = native.vocab
    values: dict[str, Any] = {}
    for key, (name, kind) in SAMPLING_KEYS.items():
        if key in native.metadata:
            try:
                values[name] = kind(float(native.metadata[key]))
            except ValueError:
                logger.warning("%s = %r in %s is no number and is ignored", key, native.metadata[key], native.path.name)
    if values.get("temperature") == 0:
        del values["temperature"]  # 0 means greedy, which is the default
    elif "temperature" in values or "top_k" in values or "top_p" in values or "min_p" in values:
        values["do_sample"] = True
    pad = vocab.pad_id if vocab.pad_id is not None else vocab.eos_id
    return GenerationConfig(
        bos_token_id=vocab.bos_id, eos_token_id=list(vocab.eog_ids) or None, pad_token_id=pad, **values
    )


_plain: ContextVar[bool] = ContextVar("transformers_llamacpp_plain_loop", default=False)


@contextlib.contextmanager
def plain_loop() -> Iterator[None]:
    """Inside, `generate()` runs transformers' own loop and processors: to compare with."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


class LlamaCppGenerationMixin:
    """Goes before `GenerationMixin`. `generate()` takes everything transformers' does, and `prompt_progress=`."""

    @torch.no_grad()
    def generate(self, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See `transformers.GenerationMixin.generate`; every argument is its own, but for:

        prompt_progress: `callable(evaluated, total)`, called after every decode of the prompt with the tokens evaluated so
            far and to be evaluated in all (reused ones are not counted). Returning `False` stops the call with
            `GenerationCancelled`; what was evaluated is kept for the next call with this prompt.
        seeds: a number from 0 to 2**64 - 1, or one for each row of the answer (return sequences counted). What is sampled then
            depends on its row's seed alone, not on torch's random numbers, which all threads share: the same seed draws the
            same tokens again, alone or in a batch, with drafts or without. Not for beams that sample.
        cache, past_key_values: a `LlamaCppCache`, under either name on every release. The input may be the whole history
            (what differs from the cache is evaluated, nothing else), or only the new tokens together with an
            `attention_mask` of the whole length.
        observe_logits: `callable(input_ids, logits)`, shown the model's logits `(rows, n_vocab)` of every step before any
            processor changes them; valid during the call only. `input_ids` `(rows, length)` is what they follow.

        Afterwards `model.last_stats` says what the call did; with `return_dict_in_generate=True` so does `output.stats`,
        which is this call's own when several run at once.

        Contrastive search (`penalty_alpha`, `top_k`), group beam search (`num_beam_groups`, `diversity_penalty`),
        constrained beam search (`constraints`, `force_words_ids`) and DoLa (`dola_layers`) run here, without the hub and
        `trust_remote_code`. So do the following, with transformers' own arguments:

        guidance_scale, negative_prompt_ids, negative_prompt_attention_mask: classifier-free guidance, both sides in one
            decode. One negative prompt `(1, length)` for all rows, or one for each prompt. It counts against `n_ctx`, and
            both sides against `n_cells`.
        prompt_lookup_num_tokens, max_matching_ngram_size: drafts from what the text says already, at most as many tokens.
        assistant_model: drafts; a `LlamaCppForCausalLM` or a causal model of transformers. With other tokens than this model
            it needs `tokenizer` (this model's) and `assistant_tokenizer`. Without it `model.assistant_model` drafts, if set;
            with `False` nobody does.
            `num_assistant_tokens`, `num_assistant_tokens_schedule` and `assistant_confidence_threshold` are this call's, else
            those of the assistant's generation config, which is never changed.

        Drafts change nothing but the time: greedy search gives the same text, sampling the same distribution, and processors,
        criteria and streamers see verified tokens only. What does not pay is paused.
        """
        named = dict(zip(POSITIONAL, args, strict=False))
        if len(args) > len(named) or named.keys() & kwargs.keys():
            raise TypeError(f"generate() got too many arguments, or one twice: {len(args) + 2} by place, {[*kwargs]}")
        kwargs |= named
        request = Request(prompt_progress=kwargs.pop("prompt_progress", None), tokenizer=kwargs.get("tokenizer"))
        request.observe_logits = kwargs.pop("observe_logits", None)
        seeds = kwargs.pop("seeds", None)
        request.numbers = Numbers(None if seeds is None else check_seeds(seeds))
        inside = current_request.get() is not None  # as an assistant's call is
        token = current_request.set(request)
        output = cache = None
        running = contextlib.ExitStack()
        try:
            running.enter_context(self.engine.call())  # type: ignore[attr-defined]
            if kwargs.get("custom_generate") is None:
                kwargs["custom_generate"] = method_for(self, inputs, generation_config, kwargs)
            cache = compat.take_cache(kwargs)
            if cache is not None:
                if isinstance(cache, LlamaCppCache):
                    running.enter_context(cache.used())
                self._align(cache, inputs, kwargs)
                compat.with_cache(kwargs, cache)
            request.given, request.mask = cache, kwargs.get("attention_mask")
            request.negative = kwargs.get("negative_prompt_ids"), kwargs.get("negative_prompt_attention_mask")
            output = super().generate(inputs, generation_config, **kwargs)  # type: ignore[misc]
            return output
        finally:
            running.close()
            current_request.reset(token)
            if not inside:
                self.engine.backend.rest()  # type: ignore[attr-defined]
            if request.guidance is not None:
                request.guidance.close()
            if cache is not None:
                cache.on_reorder = None
            kept = compat.cache_of(output) if output is not None and not isinstance(output, torch.Tensor) else None
            for own in request.caches:
                if own is not kept:
                    own.close()
            stats = request.stats(_new_tokens(output, request))
            self._called(stats)
            if output is not None and not isinstance(output, torch.Tensor):
                output.stats = stats

    def _called(self, stats: GenerateStats) -> None:
        """A `generate()` is over, on the thread that called it."""
        self.last_stats = stats

    def _align(self, cache: Any, inputs: Any, kwargs: dict[str, Any]) -> None:
        """Make a passed-in cache hold a strict prefix of the input, where the input is the whole history."""
        if not isinstance(cache, LlamaCppCache):
            raise InvalidInputError(
                f"a LlamaCppForCausalLM needs a LlamaCppCache, not a {type(cache).__name__}: LlamaCppCache(model)"
            )
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        mask = kwargs.get("attention_mask")
        past = cache.get_seq_length()
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not past or not ids.shape[1] or cache.has_embeddings:
            return
        rows = ids.shape[0]
        if mask is not None and mask.shape[-1] != ids.shape[1]:
            if mask.shape[-1] != past + ids.shape[1]:
                raise InvalidInputError(
                    f"attention_mask has {mask.shape[-1]} columns; with {ids.shape[1]} tokens in the input and {past} in the "
                    f"cache it needs {ids.shape[1]} (the input is the whole text) or {past + ids.shape[1]} (it goes on)"
                )
            return  # only the new tokens, and a mask of the whole length
        tokens, real = ids.cpu().numpy(), None if mask is None else mask.cpu().numpy() != 0
        if cache.batch_size != rows:  # as after beams or return sequences: each text goes on from the row that knows it best
            cache.batch_select_indices(torch.tensor(cache.best_rows(tokens, real)))
        known = cache.matches(tokens, real)
        if known == 0:
            logger.warning(
                "the input shares no token with the %d columns of the cache and is taken as a new text; to go on with new "
                "tokens only, pass an attention_mask of the whole length (%d)", past, past + ids.shape[1]
            )  # fmt: skip
        cache.truncate(min(known, ids.shape[1] - 1))

    # -- hooks of GenerationMixin ----------------------------------------------------------------------------------

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        next_sequence_length: int | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `forward` needs for the next step; no positions and no 4D masks, which llama.cpp makes itself."""
        if inputs_embeds is not None and is_first_iteration:
            if next_sequence_length is not None:
                inputs_embeds = inputs_embeds[:, -next_sequence_length:]
            model_inputs: dict[str, Any] = {"inputs_embeds": inputs_embeds}
        else:
            model_inputs = {
                "input_ids": input_ids if next_sequence_length is None else input_ids[:, -next_sequence_length:]
            }
        if attention_mask is not None:
            model_inputs["attention_mask"] = attention_mask
        # transformers' loops carry more than a forward pass takes (the tokenizer, positions); typos were caught before
        return model_inputs | {name: value for name, value in kwargs.items() if name in FORWARDED}

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        request = current_request.get()
        if request is not None:
            request.generation_config = generation_config
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic", "dynamic_full"):
            raise ValueError(
                f"cache_implementation={implementation!r} does not apply: the cache is llama.cpp's. Its types are set at "
                "loading: LlamaCppConfig(type_k=..., type_v=...)"
            )
        cache = model_kwargs.get(compat.CACHE_NAME)
        if cache is not None:
            cache._is_user_defined = True
        elif generation_config.use_cache is False:
            return
        else:
            cache = model_kwargs[compat.CACHE_NAME] = LlamaCppCache(self)  # type: ignore[arg-type]
            if request is not None:
                request.caches.append(cache)
        if request is not None and request.cells_full is not None:
            cache.on_reorder = request.cells_full.lineage.reordered

    def _supports_default_dynamic_cache(self) -> bool:  # type: ignore[override]
        return True

    def _prepare_attention_mask_for_generation(self, inputs_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """A mask that transformers makes up from the pad token: padding is what stands at an edge of a row. In between the
        token means something, such as the end of a turn."""
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, *args, **kwargs)  # type: ignore[misc]
        if mask is not None and mask.ndim == 2 and not bool(mask.all()):
            from_left = mask.cumsum(dim=1) > 0
            from_right = mask.flip(1).cumsum(dim=1).flip(1) > 0
            mask = (from_left & from_right).to(mask.dtype)
        if (request := current_request.get()) is not None:
            request.mask = mask
        return mask

    def _prepare_generated_length(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Stop where the context or the KV cells are full, as transformers stops at `max_length`; prompts that leave no room
        are an error at once."""
        generation_config = super()._prepare_generated_length(generation_config, *args, **kwargs)  # type: ignore[misc]
        request, inputs = current_request.get(), kwargs.get("inputs_tensor")
        if request is None or not isinstance(inputs, torch.Tensor) or inputs.ndim < 2 or not inputs.shape[0]:
            return generation_config
        texts = read_texts(inputs, request.mask, request.given)
        others = _other_side(generation_config, request, texts)
        length = kwargs.get("input_ids_length", 0)
        rows = (2 if others else 1) * len(texts.tokens) * _copies(generation_config)
        n_ctx, why = self._limit(generation_config, rows)
        if n_ctx is not None:
            longest = max([*texts.lengths, *map(len, others)])
            if longest >= n_ctx:
                raise ContextOverflowError(longest + 1, n_ctx, why=why)
            full = f"the context of n_ctx={n_ctx} is full" + (why and f" and does not slide ({why})")
            _shorten(generation_config, length, n_ctx - longest, full)
            self._fit_into_cells(generation_config, length, texts, others, request)
        return generation_config

    def _limit(self, generation_config: Any, rows: int) -> tuple[int | None, str]:
        """The most tokens a row of this call may have, `None` where a full context slides (`n_sink`), so that it goes on
        without end; and why it does not slide although it is asked to."""
        n_ctx: int = self.engine.n_ctx  # type: ignore[attr-defined]
        n_cells = self.engine.backend.limits.n_cells  # type: ignore[attr-defined]
        if self.engine.pool.keeping.n_sink is None:  # type: ignore[attr-defined]
            return n_ctx, ""
        if (generation_config.num_beams or 1) > 1 or contrastive.wants(generation_config):
            return n_ctx, "beams and the candidates of contrastive search share their cells, which would all move"
        if rows * n_ctx > n_cells:
            return n_ctx, f"{rows} rows need cells of their own, n_cells={rows * n_ctx}, and there are {n_cells}"
        return None, ""

    def _fit_into_cells(self, config: Any, length: int, texts: Texts, others: list[Any], request: Request) -> None:
        """The rows of a call share `n_cells`. Where they may not be enough, it ends when they are full: beams, which share
        cells, by a stopping criterion, and everything else after as many tokens as there is room for."""
        if not self.native.has_cells:  # type: ignore[attr-defined]
            return
        limits = self.engine.backend.limits  # type: ignore[attr-defined]
        # whatever the length, a row never has more than n_ctx cells
        wanted = min(config.max_length - length, self.engine.n_ctx - min([*texts.lengths, *map(len, others)]))  # type: ignore[attr-defined]
        sides = 2 if others else 1
        rows = sides * _copies(config) * len(texts.tokens)
        starting = [*texts.starting, *others]
        if sum(map(len, starting)) + texts.unshared + rows * wanted <= limits.n_cells:
            return
        sharing = Sharing.WHOLE if limits.stateful else Sharing.PREFIX
        if config.output_hidden_states or contrastive.wants(config):
            sharing = Sharing.EQUAL
        going_on = texts.going_on(limits.n_cells)
        room = Room(limits.n_cells, cells_of(starting, sharing) + going_on, rows)
        steps = room.steps
        if wanted > steps and (config.num_beams or 1) > 1 and config.use_cache is not False:
            families = len(texts.tokens) * (config.num_beam_groups or 1)
            request.cells_full = CellsFull(room, families, sides, wanted)
        elif wanted > steps:
            why = f"the KV cells are full (n_cells={limits.n_cells}, {rows} rows, whose prompts take {room.prompts})"
            _shorten(config, length, steps, why)
        if room.prompts < cells_of(starting, Sharing.EQUAL) + going_on:
            # what earlier calls left in memory may hold the common beginning several times, and rows that start from it would
            # not share it
            request.cold = True

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' processors, at the cost of what they decide (`decoding/warpers.py`)."""
        processors = self._processors(generation_config, *args, **kwargs)
        return processors if _plain.get() else Chain(processors)

    def _processors(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        """transformers' processors, with the guidance of its own (one more forward pass for each row and token) replaced."""
        check_scale(generation_config.guidance_scale)
        # by name: text-generation-webui puts a function in the place of transformers' that takes it no other way
        kwargs["generation_config"] = generation_config
        processors = super()._get_logits_processor(*args, **kwargs)  # type: ignore[misc]
        request = current_request.get()
        if request is not None and request.numbers.seeded and generation_config.do_sample and generation_config.num_beams > 1:
            raise UnsupportedFeatureError(
                "beams that sample draw from all beams at once, so that no row's seed decides: leave out seeds, or do_sample",
                "seeds",
            )
        if request is None:
            return processors
        given = kwargs.get("logits_processor") or ()
        for at, processor in enumerate(processors):
            made_here = not any(processor is theirs for theirs in given)
            if made_here and type(processor) is UnbatchedClassifierFreeGuidanceLogitsProcessor:
                negative, mask = kwargs.get("negative_prompt_ids"), kwargs.get("negative_prompt_attention_mask")
                request.guidance = Guidance(self, negative, mask)
                processors[at] = GuidanceProcessor(generation_config.guidance_scale, request.guidance, request)
                break
        if request.observe_logits is not None:
            processors.insert(0, LogitsObserver(request.observe_logits))
        return processors

    def _sample(
        self,
        input_ids: Any,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """transformers' greedy search and sampling, by our own loop where that can be."""
        loop = super()._sample  # type: ignore[misc]
        changed = synced_gpus or GenerationMixin._sample is not THEIR_LOOP
        if not _plain.get() and not changed and covers(input_ids):
            loop = functools.partial(token_by_token, self)
        else:
            model_kwargs["synced_gpus"] = synced_gpus
        return loop(
            input_ids, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
            generation_config=generation_config, streamer=streamer, **model_kwargs,
        )  # fmt: skip

    def _get_stopping_criteria(self, *args: Any, tokenizer: Any = None, **kwargs: Any) -> Any:
        request = current_request.get()
        if tokenizer is None and request is not None:
            tokenizer = request.tokenizer
        criteria = super()._get_stopping_criteria(*args, tokenizer=tokenizer, **kwargs)  # type: ignore[misc]
        if request is not None and request.cells_full is not None:
            criteria.append(request.cells_full)
        if self.engine.pool.keeping.n_sink is not None:  # type: ignore[attr-defined]
            for criterion in criteria:
                if isinstance(criterion, MaxLengthCriteria):
                    criterion.max_position_embeddings = None  # n_ctx is no length to warn of where a full context slides
        return criteria

    def heal_tokens(self, input_ids: Any, tokenizer: Any = None) -> Any:
        request = current_request.get()
        if tokenizer is None and request is not None:
            tokenizer = request.tokenizer
        return super().heal_tokens(input_ids, tokenizer)  # type: ignore[misc]

    def _prefill(self, input_ids: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        """`prefill_chunk_size` is the size of a decode here: the engine cuts prompts anyway, on every release alike."""
        request = current_request.get()
        chunk = generation_config.prefill_chunk_size
        if request is not None:
            request.input_length = input_ids.shape[1]
            request.n_batch = chunk
        generation_config.prefill_chunk_size = None
        try:
            return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        finally:
            generation_config.prefill_chunk_size = chunk


def _copies(config: Any) -> int:
    """Rows that each row of the input becomes."""
    return max(config.num_beams or 1, config.num_return_sequences or 1)


def _other_side(config: Any, request: Request, texts: Texts) -> list[Any]:
    """What guidance starts its unconditional rows from, one text for each that differs; none without guidance."""
    if config.guidance_scale in (None, 1):
        return []
    ids, mask = request.negative
    if isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.numel():
        return read_texts(ids, mask if isinstance(mask, torch.Tensor) else None).tokens
    return [text[-1:] for text in texts.tokens]


def _shorten(config: Any, length: int, room: int, why: str) -> None:
    if config.max_length > length + room:
        logger.warning(
            "generation will stop after %d new tokens, where %s; %d were allowed", room, why, config.max_length - length
        )
        config.max_length = length + room


def _new_tokens(output: Any, request: Request) -> int:
    """Generated tokens of all returned rows, up to and including each row's first end token."""
    if output is None:
        return 0
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    new = sequences[:, request.input_length :].cpu().numpy()
    ends = getattr(request.generation_config, "_eos_token_tensor", None)
    if ends is None or not new.size:
        return int(new.size)
    ended = np.isin(new, ends.cpu().numpy())
    return int(np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, new.shape[1]).sum())
