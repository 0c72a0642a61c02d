"""`LlamaCppForCausalLM`: a `PreTrainedModel` whose forward pass is llama.cpp's."""

from __future__ import annotations

import atexit
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationMixin, PreTrainedModel

from . import compat
from .cache import LlamaCppCache
from .config import LlamaCppConfig, LlamaCppModelConfig
from .engine import Engine, Usage
from .errors import ClosedError, InvalidInputError, UnsupportedFeatureError
from .files import HUB_ARGUMENTS, resolve_gguf
from .generation import LlamaCppGenerationMixin, default_generation_config
from .hidden import ONLY_LAST, LastHiddenState
from .memory_options import check_memory_options, open_folder
from .native import NativeBackend, NativeModel, accepted_names, build
from .request import GenerateStats, Request, current_request, outside
from .rows import Feed
from .tokenizer import LlamaCppTokenizer

__all__ = ["LlamaCppForCausalLM"]

IGNORED = frozenset({"cache_position", "return_dict", "synced_gpus", "is_first_iteration", "next_sequence_length"})
"""What transformers' loops may hand on to `forward` and what changes nothing here."""

STEPS = ("forward", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "__call__", "_call_impl")
"""What transformers' loops call in every step, and our own loop does not."""

LEAVE_SECONDS = 5.0
"""Calls on other threads get so long to end when the process does."""

GLOBAL_HOOKS = tuple(
    getattr(torch.nn.modules.module, name) for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
)
"""torch's hooks for all modules; dictionaries that it changes in place."""

FROM_PRETRAINED_IGNORED = frozenset({"device_map", "torch_dtype", "dtype", "low_cpu_mem_usage", "trust_remote_code",
                                     "_from_auto", "_commit_hash", "adapter_kwargs", "attn_implementation"})  # fmt: skip
"""Arguments of `from_pretrained` that say where and how torch keeps weights; here `n_gpu_layers` and the file do."""


class LlamaCppForCausalLM(LlamaCppGenerationMixin, PreTrainedModel, GenerationMixin):
    """A GGUF model with the whole `generate()` toolbox.

    >>> model = LlamaCppForCausalLM.from_pretrained("model.gguf", quantization_config=LlamaCppConfig(n_ctx=8192))
    >>> ids = model.tokenizer("The capital of France is", return_tensors="pt").input_ids
    >>> print(model.tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))

    Several threads may call one model. `close()` (or leaving a `with` block) frees native memory.
    """

    config_class = LlamaCppModelConfig
    main_input_name = "input_ids"
    base_model_prefix = ""
    _supports_sdpa = True
    _supports_flash_attn = True
    _is_stateful = False
    _tied_weights_keys = None

    def __init__(self, config: LlamaCppModelConfig, engine: Engine, native: NativeModel, options: LlamaCppConfig) -> None:
        super().__init__(config)
        self.engine = engine
        self.native = native
        self.quantization_config = options
        self.generation_config = default_generation_config(native)
        self.loss_type = "ForCausalLM"
        self.last_stats = GenerateStats()
        self.assistant_model: Any = None
        """The assistant hook: what drafts in every `generate()` that names no other assistant; `None` switches it off."""
        self.assistant_tokenizer: Any = None
        """The hook's tokenizer, where its vocabulary is another one."""
        self._tokenizer: Any = None
        self._load_lock = threading.Lock()
        self.training = False
        # a model that is dropped without close() must not keep its memory
        self._finalizer = weakref.finalize(self, _free, engine, native)
        self._finalizer.atexit = False
        _open_models.add(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "assistant_model":  # torch would make it a part of this model, with all its parameters
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    # -- loading -------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: str | Path,
        *model_args: Any,
        gguf_file: str | None = None,
        quantization_config: LlamaCppConfig | dict[str, Any] | None = None,
        config: Any = None,
        **kwargs: Any,
    ) -> LlamaCppForCausalLM:
        """Load a GGUF.

        `pretrained_model_name_or_path`: a `.gguf` file, a folder with one, a shard of a split model, or a hub repository
        id. Options come in `quantization_config`, or directly by name (`n_ctx=8192`); a name given twice must agree.
        Hub arguments (`revision`, `cache_dir`, `token`, `local_files_only`, …) are passed on.

        Raises `ModelLoadError`, `OptionError`, `UnknownOptionError`.
        """
        if model_args:
            raise TypeError(f"from_pretrained takes one positional argument, the model; {len(model_args)} more were given")
        hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
        given = quantization_config.to_dict() if isinstance(quantization_config, LlamaCppConfig) else dict(
            quantization_config or {}
        )
        for name, value in kwargs.items():
            if name in FROM_PRETRAINED_IGNORED and name not in accepted_names():
                continue
            if name in given and given[name] != value:
                raise InvalidInputError(f"{name} is given twice: {given[name]!r} in quantization_config, {value!r} beside it")
            given[name] = value
        options = LlamaCppConfig(**given)
        return cls._load(resolve_gguf(pretrained_model_name_or_path, gguf_file, **hub), options)

    @classmethod
    def _load(cls, path: Path, options: LlamaCppConfig) -> LlamaCppForCausalLM:
        native = NativeModel(path, build(options.options))
        backend = None
        try:
            n_ctx = options.n_ctx or native.n_ctx_train
            backend = NativeBackend(native, options.n_cells or n_ctx, options.n_seq_max)
            check_memory_options(options, n_ctx, backend)
            folder = open_folder(options, backend)
        except BaseException:
            if backend is not None:
                backend.close()
            native.close()
            raise
        engine = Engine(
            backend, n_ctx, options.prefix_reuse, options.host_cache_bytes, options.n_sink, options.reuse_min_chunk, folder
        )
        model = cls(LlamaCppModelConfig.from_native(native, n_ctx), engine, native, options)
        model.name_or_path = model.config._name_or_path = str(path)
        return model

    @property
    def tokenizer(self) -> LlamaCppTokenizer:
        """The GGUF's own tokenizer, made when first asked for."""
        with self._load_lock:
            if self._tokenizer is None:
                if self.engine.closed:
                    raise ClosedError("the model was closed; load it again with from_pretrained()")
                self._tokenizer = LlamaCppTokenizer.from_vocab(
                    self.native.vocab, self.native.metadata, name_or_path=str(self.native.path)
                )
            return self._tokenizer

    # -- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free native memory; idempotent. A call that runs on another thread gets a `ClosedError` at its next decode.

        The tokenizer stays usable: it opens the vocabulary again when asked. A model that is garbage collected is closed
        as well.
        """
        self._finalizer()

    def __enter__(self) -> LlamaCppForCausalLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def forget(self) -> None:
        """Drop everything that is kept for prefix reuse: the next call is a cold one."""
        self.engine.forget()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UnsupportedFeatureError("a loaded GGUF cannot be copied; load it a second time with from_pretrained()", "copy")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedFeatureError(f"the weights are a GGUF already: copy {self.native.path}", "save_pretrained")

    # -- what transformers asks of a model -------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where results come from: logits are CPU tensors, wherever llama.cpp computes."""
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def get_input_embeddings(self) -> Any:
        return None

    def get_output_embeddings(self) -> Any:
        return None

    def has_changed_steps(self) -> bool:
        """Whether somebody put something between the steps of a generation loop and the engine: a subclass or an instance
        with a forward pass of its own, or a hook of torch."""
        if any(getattr(type(self), name) is not step or name in vars(self) for name, step in OWN_STEPS.items()):
            return True
        hooks = (self._forward_hooks, self._forward_pre_hooks, *GLOBAL_HOOKS)
        return any(hooks)

    def can_generate(self) -> bool:  # type: ignore[override]
        return True

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Bytes of the weights."""
        return self.native.n_bytes

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        return 0 if only_trainable else self.native.n_params

    # -- the forward pass ------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: LlamaCppCache | None = None,
        cache: LlamaCppCache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_hidden_states: bool | str | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """One pass over new tokens.

        Args:
            input_ids: int64 `(batch, length)`, ids in `[0, vocab_size)`.
            attention_mask: `(batch, past + length)` of 0 and 1, padding on the left or on the right.
            cache, past_key_values: a `LlamaCppCache` to go on with; both names work on every release.
            inputs_embeds: float `(batch, length, hidden_size)` instead of `input_ids`.
            labels: int64 `(batch, length)`, -100 is ignored; the loss is transformers' own.
            logits_to_keep: the last `n` columns (0: all), or an index tensor of columns.
            output_hidden_states: True gives `hidden_states`, `n_layer + 1` tensors `(batch, length, hidden_size)` with
                zeros in masked columns: `[0]` what goes into the first layer, `[i]` into layer `i`, `[-1]` what comes out
                of the last one after the final norm. Where llama.cpp does not show what is between the layers of an
                architecture, all but `[-1]` raise `UnsupportedFeatureError` when they are looked at. "last" wants `[-1]`
                only, which costs less: the first call with True makes the context again (see `Backend.record_layers`), the
                prompts of a batch are evaluated one after the other, and the states are held twice while they are sorted.

        Returns:
            `CausalLMOutputWithPast`; logits float32 `(batch, kept, vocab_size)` on the device of the input. A masked
            column answers with the logits of the token before it, and with zeros before a row's first token.

        Raises:
            InvalidInputError: shapes, a mask with holes, ids outside the vocabulary.
            ContextOverflowError, CacheFullError: nothing was stored.
            UnsupportedFeatureError: attentions, which llama.cpp does not give.
        """
        unknown = kwargs.keys() - IGNORED - {"position_ids", "num_items_in_batch"}
        unknown = {name for name in unknown if kwargs[name] is not None}
        if unknown:
            raise TypeError(f"forward() got unexpected arguments: {', '.join(sorted(unknown))}")
        if output_attentions:
            raise UnsupportedFeatureError("llama.cpp does not give attention weights", "output_attentions")
        past = cache if cache is not None else past_key_values
        if past is not None and not isinstance(past, LlamaCppCache):
            raise InvalidInputError(
                f"a LlamaCppForCausalLM needs a LlamaCppCache, not a {type(past).__name__}: LlamaCppCache(model)"
            )
        own = past is None
        past = LlamaCppCache(self) if past is None else past
        if past._engine is not self.engine:
            raise InvalidInputError("this cache belongs to another model; make one with LlamaCppCache(model)")
        source = inputs_embeds if inputs_embeds is not None else input_ids
        if source is None or (input_ids is not None and inputs_embeds is not None):
            raise InvalidInputError("pass either input_ids or inputs_embeds")
        try:
            feed, past_mask = self.read_input(input_ids, inputs_embeds, attention_mask, past, logits_to_keep)
            feed.want_hidden = bool(output_hidden_states)
            missing = self._want_layers(feed, output_hidden_states)
            _check_positions(kwargs.get("position_ids"), attention_mask, past, feed)
            rows, vectors = self._feed(past, feed, past_mask, own)
            logits = torch.from_numpy(rows)
            if source.device.type != "cpu":
                logits = logits.to(source.device)
            loss = None
            if labels is not None:
                loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **_loss_arguments(kwargs))
        except BaseException:
            if own:
                past.close()
            raise
        hidden = None
        if vectors is not None:
            hidden = _hidden_states(feed, vectors, missing, self.config.num_hidden_layers, source.device)
        if own and use_cache is False:
            past.close()
            past = None
        output = compat.model_output(loss, logits, past, hidden)
        return output.to_tuple() if return_dict is False else output

    def _want_layers(self, feed: Feed, output_hidden_states: bool | str | None) -> str | None:
        """Ask for all layers' inputs too, where they are wanted and can be had; else the reason why they are missing."""
        if output_hidden_states is not True:
            if output_hidden_states not in (None, False, "last"):
                raise InvalidInputError(f'output_hidden_states={output_hidden_states!r}; True, False and "last" can be')
            return ONLY_LAST
        if (problem := self.engine.no_layers()) is not None:
            return str(problem)
        feed.want_layers = tuple(range(self.config.num_hidden_layers))
        return None

    def _feed(
        self, past: LlamaCppCache, feed: Feed, past_mask: npt.NDArray[np.bool_] | None, own: bool
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
        with past.used():
            request = current_request.get()
            if request is None:
                return past.feed(feed, past_mask, Usage())
            return self._feed_for(request, past, feed, past_mask, own)

    def _feed_for(
        self, request: Request, past: LlamaCppCache, feed: Feed, past_mask: npt.NDArray[np.bool_] | None, own: bool
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32] | None]:
        """As a part of that call."""
        if request.want_layers and not feed.want_layers:
            feed.want_layers = request.want_layers
        guided = request.guidance is not None and not own and request.guidance.guides(past)
        store = request.guidance.feed if guided else past.feed
        if request.prompt_done is not None:
            answer = store(feed, past_mask, request.usage)
            request.layers = feed.layers
            return answer
        feed.progress, feed.n_batch, feed.prompt = outside(request.prompt_progress), request.n_batch, True
        feed.cold = request.cold
        feed.hidden_from = request.hidden_known
        answer = store(feed, past_mask, request.usage)
        request.layers = feed.layers
        request.prompt_finished(past.n_tokens + (past.companion.n_tokens if past.companion is not None else 0))
        return answer

    def read_input(
        self,
        input_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        past: LlamaCppCache,
        logits_to_keep: int | torch.Tensor,
    ) -> tuple[Feed, npt.NDArray[np.bool_] | None]:
        """Tensors to arrays, with every check that needs no model."""
        ids = embeds = None
        if inputs_embeds is not None:
            if inputs_embeds.ndim != 3:
                shape = tuple(inputs_embeds.shape)
                raise InvalidInputError(f"inputs_embeds has shape {shape}; (batch, length, hidden_size) is needed")
            embeds = inputs_embeds.detach().to("cpu", torch.float32).numpy()
            n_rows, n_columns = embeds.shape[:2]
        else:
            assert input_ids is not None
            if input_ids.ndim != 2 or input_ids.dtype.is_floating_point:
                raise InvalidInputError(
                    f"input_ids has shape {tuple(input_ids.shape)} and type {input_ids.dtype}; integers of shape "
                    "(batch, length) are needed"
                )
            wide = input_ids.detach().cpu().numpy()
            n_rows, n_columns = wide.shape
            if wide.size and not (int(wide.min()) >= 0 and int(wide.max()) < self.config.vocab_size):
                wide = self._check_ids(wide, attention_mask)
            ids = wide.astype(np.int32)
        if n_rows == 0 or n_columns == 0:
            raise InvalidInputError(f"the input is empty: {n_rows} rows of {n_columns} tokens; at least one token is needed")
        mask, past_mask = _masks(attention_mask, n_rows, n_columns, past.get_seq_length())
        if isinstance(logits_to_keep, int):
            kept = np.arange(n_columns)[-logits_to_keep:] if logits_to_keep else np.arange(n_columns)
        else:
            kept = np.arange(n_columns)[logits_to_keep.detach().cpu().numpy()]
        if kept.ndim != 1:
            raise InvalidInputError(f"logits_to_keep has {kept.ndim} dimensions; an int or an index tensor of one is needed")
        return Feed(ids, embeds, mask, kept, n_rows, n_columns), past_mask

    def _check_ids(self, ids: npt.NDArray[Any], attention_mask: torch.Tensor | None) -> npt.NDArray[Any]:
        """Ids outside the vocabulary are fine under the mask (people pad with -1 or -100), and an error elsewhere."""
        bad = (ids < 0) | (ids >= self.config.vocab_size)
        if attention_mask is not None and attention_mask.ndim == 2 and attention_mask.shape[1] >= ids.shape[1]:
            hidden = attention_mask[:, -ids.shape[1] :].cpu().numpy() == 0
            if hidden.shape == ids.shape and not (bad & ~hidden).any():
                return np.where(bad, 0, ids)
        raise InvalidInputError(
            f"token id {ids[bad][0]} is outside the vocabulary 0 .. {self.config.vocab_size - 1}"
        )


OWN_STEPS = {name: getattr(LlamaCppForCausalLM, name) for name in STEPS}
"""As they are before anybody changes them."""


def _hidden_states(
    feed: Feed, last: npt.NDArray[np.float32], missing: str | None, n_layer: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    final = torch.from_numpy(last).to(device)
    if missing is not None or feed.layers is None:
        return LastHiddenState(final, n_layer, missing or ONLY_LAST)
    return (*(torch.from_numpy(states).to(device) for states in feed.layers), final)


def _free(engine: Engine, native: NativeModel) -> None:
    with engine.lock:
        engine.close()
        native.close()


_open_models: weakref.WeakSet[LlamaCppForCausalLM] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before llama.cpp itself is torn down its contexts are freed. Daemon threads that still generate are let out with a
    `ClosedError`: Python ends them wherever they are, and inside torch that takes the process with it."""
    models = list(_open_models)
    for model in models:
        model.close()
    for model in models:
        model.engine.scheduler.wait_until_left(LEAVE_SECONDS)


def _masks(
    attention_mask: torch.Tensor | None, n_rows: int, n_columns: int, past: int
) -> tuple[npt.NDArray[np.bool_] | None, npt.NDArray[np.bool_] | None]:
    """The mask of the new columns (`None`: nothing masked) and what it says about the columns before."""
    if attention_mask is None:
        return None, None
    if tuple(attention_mask.shape) != (n_rows, past + n_columns):
        raise InvalidInputError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; (batch, past + length) = "
            f"({n_rows}, {past} + {n_columns}) is needed"
        )
    whole = attention_mask.detach().cpu().numpy() != 0
    new = whole[:, past:]
    if new.all():
        return None, whole[:, :past]
    changes = np.diff(new.astype(np.int8), axis=1, prepend=0, append=0)
    for index in np.flatnonzero((changes == 1).sum(axis=1) > 1):
        raise InvalidInputError(
            f"row {index} of attention_mask has a hole: the new columns {np.flatnonzero(~new[index])[:8].tolist()} are masked "
            "between others that are not; padding belongs on the left or on the right"
        )
    return new, whole[:, :past]


def _check_positions(
    position_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, past: LlamaCppCache, feed: Feed
) -> None:
    """Positions are llama.cpp's own: `0, 1, 2, …` over a row's tokens. Others that a caller passes must say the same."""
    if position_ids is None:
        return
    given = np.broadcast_to(position_ids.detach().cpu().numpy(), (feed.n_rows, feed.n_columns))
    mask = np.ones((feed.n_rows, feed.n_columns), np.bool_) if feed.mask is None else feed.mask
    expected = np.cumsum(mask, axis=1) - 1 + np.array(past.row_lengths(feed.n_rows))[:, None]
    if not (given == expected)[mask].all():
        raise UnsupportedFeatureError(
            "llama.cpp numbers a row's tokens 0, 1, 2, … and takes no other position_ids; leave them out", "position_ids"
        )


def _loss_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in ("num_items_in_batch",) if kwargs.get(name) is not None}
