"""One llama.cpp context behind the `Backend` interface.

Nothing a caller passes may reach an assert in llama.cpp, because those kill the process: sizes and ids are checked here
before the call, and every return value is read.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backend import DecodeStatus, Limits
from ..batch import Batch, tokens_batch
from ..errors import ClosedError, DecodeError, ModelLoadError, OptionError, StateError, UnsupportedFeatureError
from .graph import no_layers
from .layers import LayerRecorder
from .library import llama_cpp, recent_errors
from .model import NativeModel
from .params import KV_TYPES
from .workers import give_back

__all__ = ["NativeBackend"]

OUTPUT_BYTES = 64 << 20
"""Logits of one decode take at most about this much; asking for more rows means more decodes, not more memory."""

QUANTISED_BLOCK = 32
"""Numbers in one block of every quantised type a KV cache may have (ggml's `QK8_0` and its like)."""

PARTIAL = 1
"""`LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`."""

CELL_PADDING = 256
"""llama.cpp rounds the buffer up to this; asking for a multiple avoids its warning."""


class NativeBackend:
    """See `Backend`. `n_cells` KV cells, `n_seq_max` sequence ids; `None` takes 64, or 8 for models with a state."""

    def __init__(self, model: NativeModel, n_cells: int, n_seq_max: int | None = None) -> None:
        self.model = model
        self._context: Any = None
        self._memory: Any = None
        self._rows: npt.NDArray[np.intp] | None = None
        self._n_tokens = 0
        self._recorder: LayerRecorder | None = None
        self._no_layers: tuple[str, str | None] | None = None
        source = model.params.context
        self._params = type(source).from_buffer_copy(source)  # a copy of its own; model.params keeps what it points to
        self._params.n_ctx = -(-n_cells // CELL_PADDING) * CELL_PADDING
        self._n_batch, self._n_outputs = int(source.n_batch), int(source.n_outputs_max)
        limit = int(llama_cpp.llama_max_parallel_sequences())
        window = not self._params.swa_full and llama_cpp.llama_model_n_swa(model.pointer) > 0
        # with swa_full=False llama.cpp keeps a window for each sequence: many would take what the option saves
        n_seq_max = n_seq_max if n_seq_max is not None else (8 if model.has_state or window else 64)
        if not 1 <= n_seq_max <= limit:
            raise OptionError(f"n_seq_max={n_seq_max} is outside 1 .. {limit}", "n_seq_max")
        self._check_k_type()
        self._make(n_seq_max)

    # -- making and freeing ------------------------------------------------------------------------------------

    def _make(self, n_seq_max: int, recorder: LayerRecorder | None = None) -> None:
        params = self._params
        if recorder is not None or self._recorder is not None:  # a `cb_eval` of the user's own stays
            params.cb_eval = type(params.cb_eval)() if recorder is None else recorder.callback
        self._recorder = recorder
        params.n_seq_max = n_seq_max
        # llama.cpp asserts room for one row of logits per sequence; our decodes stay as small as was asked for
        params.n_batch = max(self._n_batch, n_seq_max)
        params.n_outputs_max = max(self._n_outputs, n_seq_max) if self._n_outputs else 0
        params.kv_unified = True
        if hasattr(params, "n_outputs_max_per_seq") and params.n_outputs_max_per_seq == 1:
            params.n_outputs_max_per_seq = 0  # the default of 1 is for llama.cpp's own samplers; 0: as n_outputs_max
        with recent_errors() as lines:
            context = llama_cpp.llama_init_from_model(self.model.pointer, params)
        if not context:
            raise self._explain(lines)
        self._context = context
        self._memory = llama_cpp.llama_get_memory(context)
        if not self._memory:
            self.close()
            raise ModelLoadError(f"{self.model.path} has no memory for sequences: it is no causal language model")
        if self.model.lora is not None:
            self._set_lora()
        self._embeddings_on = bool(params.embeddings)
        self._read_limits(limit=int(llama_cpp.llama_max_parallel_sequences()))
        self._make_batch(self._limits.n_batch)

    def _check_k_type(self) -> None:
        """Without flash attention llama.cpp does not check that heads fill whole blocks of a quantised K cache, and answers
        NaN where they do not."""
        names = {number: name for name, number in KV_TYPES.items()}
        name = names.get(self._params.type_k, str(self._params.type_k))
        if name not in ("f32", "f16", "bf16") and self.model.n_embd_head_k % QUANTISED_BLOCK:
            raise OptionError(
                f"type_k={name!r} stores blocks of {QUANTISED_BLOCK} numbers, and this model's heads have "
                f"{self.model.n_embd_head_k}: set type_k='f16'",
                "type_k",
            )

    def _explain(self, lines: list[str]) -> ModelLoadError | OptionError:
        names = {number: name for name, number in KV_TYPES.items()}
        type_v = names.get(self._params.type_v, str(self._params.type_v))
        if type_v not in ("f32", "f16", "bf16") and self._params.flash_attn_type == 0:
            return OptionError(
                f"type_v={type_v!r} (a quantised V cache) needs flash attention, and flash_attn=False switches it off: "
                "set flash_attn=True, or type_v='f16'",
                "type_v",
            )
        reason = "; ".join(dict.fromkeys(lines)) or "no reason given, most often too little memory"
        return ModelLoadError(
            f"llama.cpp cannot make a context of {self._params.n_ctx} cells for {self.model.path}: {reason}. A smaller "
            "n_ctx or n_batch needs less memory.",
            str(self.model.path),
        )

    def _set_lora(self) -> None:
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(self.model.lora)
        scales = (ctypes.c_float * 1)(self.model.params.lora_scale)
        status = llama_cpp.llama_set_adapters_lora(self._context, adapters, 1, scales)
        if status:
            raise ModelLoadError(f"llama.cpp cannot use the LoRA {self.model.params.lora_path} (status {status})")

    def _read_limits(self, limit: int) -> None:
        context, model = self._context, self.model
        vocab = model.vocab.n_tokens
        rows = max(1, OUTPUT_BYTES // (4 * vocab))
        if self._n_outputs:
            rows = min(rows, self._n_outputs)
        n_batch = min(int(llama_cpp.llama_n_batch(context)), self._n_batch)
        swa_kept = bool(self._params.swa_full)
        self._limits = Limits(
            n_vocab=vocab,
            n_embd=int(llama_cpp.llama_model_n_embd_out(model.pointer)),
            n_embd_inp=int(llama_cpp.llama_model_n_embd_inp(model.pointer)),
            n_layer=model.n_layer,
            n_ctx_train=model.n_ctx_train,
            n_cells=int(llama_cpp.llama_n_ctx(context)),
            n_batch=n_batch,
            n_ubatch=min(int(llama_cpp.llama_n_ubatch(context)), n_batch),
            n_seq_max=int(llama_cpp.llama_n_seq_max(context)),
            n_seq_limit=limit,
            n_outputs=min(rows, n_batch),
            n_swa=int(llama_cpp.llama_model_n_swa(model.pointer)),
            swa_full=swa_kept,
            recurrent=model.has_state,
            # ggml aborts the process where it is to rotate BF16
            can_shift=model.can_shift
            and self._params.type_k != KV_TYPES["bf16"]
            and bool(llama_cpp.llama_memory_can_shift(self._memory)),
        )

    def _make_batch(self, size: int) -> None:
        """Arrays for one batch, written through numpy; llama.cpp reads them during the decode only."""
        self._token = np.zeros(size, np.int32)
        self._pos = np.zeros(size, np.int32)
        self._n_seq = np.ones(size, np.int32)
        self._seq = np.zeros(size, np.int32)
        self._out = np.zeros(size, np.int8)
        self._seq_pointers = self._seq.ctypes.data + 4 * np.arange(size, dtype=np.uintp)
        batch = llama_cpp.llama_batch()
        fields = dict(batch._fields_)
        for name, array in (("token", self._token), ("pos", self._pos), ("n_seq_id", self._n_seq),
                            ("seq_id", self._seq_pointers), ("logits", self._out)):
            setattr(batch, name, ctypes.cast(array.ctypes.data, fields[name]))
        # a pointer of its own: what `batch.token` answers is a view of the struct, and turns NULL when that field does
        self._token_pointer = ctypes.cast(self._token.ctypes.data, fields["token"])
        self._embd_type = fields["embd"]
        self._embeds_last = False
        self._batch = batch
        self._views = tuple(memoryview(array) for array in (self._token, self._pos, self._seq, self._out))  # type: ignore[arg-type]
        self._most_rows = min(size, self._limits.n_outputs)
        self._seen = 0, np.empty((0, 0), np.float32)

    def close(self) -> None:
        if self._context is not None:
            llama_cpp.llama_free(self._context)
            self._context = self._memory = None

    # -- what there is -----------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        return self._limits

    def read_back(self) -> dict[str, Any]:
        """The parameters in force, by field name: asked of llama.cpp where it answers, else as they were passed."""
        values = {name: getattr(self.model.params.model, name) for name, _ in self.model.params.model._fields_}
        values |= {name: getattr(self._params, name) for name, _ in self._params._fields_}
        for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_threads", "n_threads_batch"):
            function = getattr(llama_cpp, f"llama_{name}", None)
            if function is not None:
                values[name] = int(function(self._context))
        values |= {"n_batch": self._limits.n_batch, "n_outputs_max": self._n_outputs}
        values["pooling_type"] = int(llama_cpp.llama_pooling_type(self._context))
        return values

    # -- decoding ----------------------------------------------------------------------------------------------

    def decode(self, batch: Batch) -> DecodeStatus:
        if self._context is None:
            raise ClosedError("there is no llama.cpp context any more; load the model again with from_pretrained()")
        n = batch.n_tokens
        if not 0 < n <= self._limits.n_batch or batch.n_outputs > self._limits.n_outputs:
            raise DecodeError(f"a batch of {n} tokens and {batch.n_outputs} rows breaks the limits {self._limits}", -1)
        if batch.want_embeddings != self._embeddings_on and not self._params.embeddings:
            llama_cpp.llama_set_embeddings(self._context, batch.want_embeddings)
            self._embeddings_on = batch.want_embeddings
        native = self._batch
        native.n_tokens = n
        if batch.tokens is not None:
            self._token[:n] = batch.tokens
            native.token, native.embd, self._embeds_last = self._token_pointer, None, False
        else:
            assert batch.embeds is not None
            self._embeds_last = True  # first: an interrupt must not leave the pointer to who decodes tokens
            native.token, native.embd = None, ctypes.cast(batch.embeds.ctypes.data, self._embd_type)
        self._pos[:n] = batch.positions
        self._seq[:n] = batch.seq_ids
        self._out[:n] = batch.outputs
        # with embeddings on llama.cpp makes every token of the batch an output row, whatever was asked for
        self._rows = np.flatnonzero(batch.outputs) if self._embeddings_on and batch.n_outputs < n else None
        self._n_tokens = n
        with self._recording(batch):
            return _status(llama_cpp.llama_decode(self._context, native), n)

    def decode_tokens(self, tokens: list[int], positions: list[int], seq_ids: list[int]) -> DecodeStatus:
        n = len(tokens)
        if self._recorder is not None or self._embeddings_on or not 0 < n <= self._most_rows or self._context is None:
            return self.decode(tokens_batch(tokens, positions, seq_ids))
        token, pos, seq, out = self._views
        for index in range(n):
            token[index], pos[index], seq[index], out[index] = tokens[index], positions[index], seq_ids[index], 1
        native = self._batch
        native.n_tokens = n
        if self._embeds_last:
            native.token, native.embd, self._embeds_last = self._token_pointer, None, False
        self._rows, self._n_tokens = None, n
        return _status(llama_cpp.llama_decode(self._context, native), n)

    def _recording(self, batch: Batch) -> AbstractContextManager[None]:
        if self._recorder is None:
            if batch.layers:
                raise DecodeError("layers are asked of a context that does not record them", -1)
            return nullcontext()
        if not batch.layers:
            self._recorder.forget()
            return nullcontext()
        n = batch.n_tokens
        if n > self._limits.n_ubatch or len(np.unique(batch.seq_ids)) not in (1, n):
            # llama.cpp might cut it, or take its tokens in another order
            raise DecodeError(f"the layers of {n} tokens of several sequences cannot be told apart", -1)
        return self._recorder.recording(batch.layers, np.flatnonzero(batch.outputs), n, batch.embeds)

    def rest(self) -> None:
        give_back()

    def logits(self, n_outputs: int) -> npt.NDArray[np.float32]:
        if self._rows is None:  # the buffer seldom moves, and making an array of it costs more than finding the token
            pointer = llama_cpp.llama_get_logits(self._context)
            if pointer and ctypes.addressof(pointer.contents) == self._seen[0] and n_outputs <= len(self._seen[1]):
                return self._seen[1][:n_outputs]
            view = self._view(llama_cpp.llama_get_logits, n_outputs, self._limits.n_vocab)
            self._seen = view.ctypes.data, view
            return view
        return self._view(llama_cpp.llama_get_logits, n_outputs, self._limits.n_vocab)

    def embeddings(self, n_outputs: int) -> npt.NDArray[np.float32]:
        return self._view(llama_cpp.llama_get_embeddings, n_outputs, self._limits.n_embd)

    def layers(self, n_outputs: int) -> npt.NDArray[np.float32]:
        if self._recorder is None:
            raise DecodeError("this context does not record layers", -1)
        return self._recorder.states()

    def _view(self, function: Any, rows: int, columns: int) -> npt.NDArray[np.float32]:
        address = ctypes.cast(function(self._context), ctypes.c_void_p).value
        if not address:
            raise DecodeError(f"{function.__name__} returned NULL; the last decode has no output rows", -1)
        if self._rows is not None:
            rows = self._n_tokens
        memory = (ctypes.c_float * (rows * columns)).from_address(address)
        view = np.ctypeslib.as_array(memory).reshape(rows, columns)
        return view if self._rows is None else view[self._rows]

    # -- memory ------------------------------------------------------------------------------------------------

    def _check_id(self, seq_id: int) -> int:
        if self._context is None:
            raise ClosedError("there is no llama.cpp context any more; load the model again with from_pretrained()")
        if not 0 <= seq_id < self._limits.n_seq_max:
            raise IndexError(f"sequence id {seq_id} is outside 0 .. {self._limits.n_seq_max - 1}")
        return seq_id

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, self._check_id(seq_id), p0, p1))

    def seq_copy(self, source: int, target: int) -> None:
        llama_cpp.llama_memory_seq_cp(self._memory, self._check_id(source), self._check_id(target), -1, -1)

    def seq_join(self, source: int, target: int) -> None:
        self.seq_copy(source, target)

    def seq_shift(self, seq_id: int, p0: int, delta: int) -> None:
        if not self._limits.can_shift or p0 < 0 or p0 + delta < 0:
            raise DecodeError(f"positions from {p0} on cannot be moved by {delta}", -1)
        llama_cpp.llama_memory_seq_add(self._memory, self._check_id(seq_id), p0, -1, delta)

    def pos_min(self, seq_id: int) -> int:
        return int(llama_cpp.llama_memory_seq_pos_min(self._memory, self._check_id(seq_id)))

    def pos_max(self, seq_id: int) -> int:
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, self._check_id(seq_id)))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)

    @property
    def fingerprint(self) -> dict[str, int | str]:
        params, model = self._params, self.model
        types = {number: name for name, number in KV_TYPES.items()}
        lora = "" if model.params.lora_path is None else f"{model.params.lora_path} x {model.params.lora_scale}"
        return {
            "metadata": model.metadata_hash, "bytes": model.n_bytes, "lora": lora,
            "type_k": types.get(params.type_k, str(params.type_k)), "type_v": types.get(params.type_v, str(params.type_v)),
            "flash_attn": int(params.flash_attn_type), "swa_full": bool(params.swa_full),
            "rope": f"{params.rope_scaling_type} {params.rope_freq_base} {params.rope_freq_scale}",
        }  # fmt: skip

    def state_size(self, seq_id: int) -> int:
        return int(llama_cpp.llama_state_seq_get_size(self._context, self._check_id(seq_id)))

    def state_save(self, seq_id: int, partial: bool = False) -> memoryview:
        flags = PARTIAL if partial else 0
        size = int(llama_cpp.llama_state_seq_get_size_ext(self._context, self._check_id(seq_id), flags))
        buffer = np.empty(size, np.uint8)  # not zeroed first: this is a copy of many megabytes
        written = int(llama_cpp.llama_state_seq_get_data_ext(self._context, _bytes_at(buffer), size, seq_id, flags))
        if not 0 < written <= size:
            raise StateError(f"llama.cpp wrote {written} of {size} bytes of sequence {seq_id}")
        return buffer[:written].data

    def state_load(self, seq_id: int, state: memoryview | bytes, partial: bool = False) -> bool:
        flags = PARTIAL if partial else 0
        buffer = np.frombuffer(state, np.uint8)
        read = int(
            llama_cpp.llama_state_seq_set_data_ext(
                self._context, _bytes_at(buffer), len(buffer), self._check_id(seq_id), flags
            )
        )
        if read == len(buffer):
            return True
        self.seq_remove(seq_id, -1, -1)
        return False

    def grow(self, n_seq_max: int) -> None:
        old = self._limits.n_seq_max
        if not old < n_seq_max <= self._limits.n_seq_limit:
            raise IndexError(f"n_seq_max={n_seq_max} is outside {old + 1} .. {self._limits.n_seq_limit}")
        self._make_again(n_seq_max, self._recorder)

    @property
    def records_layers(self) -> bool:
        return self._recorder is not None

    def record_layers(self, on: bool) -> None:
        if on == self.records_layers:
            return
        if not on:
            self._make_again(self._limits.n_seq_max, None)
            return
        if self._no_layers is not None:
            raise UnsupportedFeatureError(*self._no_layers)
        try:
            if self._params.cb_eval:
                raise no_layers("cb_eval is set, and llama.cpp takes one callback")
            recorder = LayerRecorder(self.model.n_layer, self.model.n_embd)
            self._make_again(self._limits.n_seq_max, recorder)
        except UnsupportedFeatureError as error:
            self._no_layers = str(error), error.feature
            raise

    def _make_again(self, n_seq_max: int, recorder: LayerRecorder | None) -> None:
        """A context with these properties that holds what this one holds. Where it cannot be made, nothing changes."""
        before = self._limits.n_seq_max, self._recorder
        size = int(llama_cpp.llama_state_get_size(self._context))
        buffer = (ctypes.c_uint8 * size)()
        written = int(llama_cpp.llama_state_get_data(self._context, buffer, size))
        self.close()
        try:
            self._make(n_seq_max, recorder)
            if recorder is not None and recorder is not before[1]:
                recorder.learn(self.decode, min(2, self._limits.n_ubatch))
                self.clear()
        except BaseException:  # also an interrupt while a recorder learns: what is held must not be lost to it
            self.close()
            self._make(*before)
            self._restore(buffer, written)
            raise
        self._restore(buffer, written)

    def _restore(self, buffer: Any, size: int) -> None:
        read = int(llama_cpp.llama_state_set_data(self._context, buffer, size))
        if read != size:
            self.clear()
            raise StateError(f"llama.cpp restored {read} of {size} bytes of its memory; all sequences were dropped")


def _status(code: int, n: int) -> DecodeStatus:
    if 0 <= code <= 2:
        return DecodeStatus(code)
    reason = "the batch is invalid" if code == -1 else "the computation failed"
    raise DecodeError(f"llama_decode returned {code}: {reason} ({n} tokens)", code)


def _bytes_at(buffer: npt.NDArray[np.uint8]) -> Any:
    """The array's memory as llama.cpp's `uint8_t *`; the array must outlive the call."""
    return ctypes.cast(buffer.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
