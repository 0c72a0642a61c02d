"""Hidden states between the layers, read while llama.cpp computes.

`cb_eval` of `llama_context_params` is asked about every node of the graph before it is computed, and told when one that
it wanted is done (ggml-backend.h, `ggml_backend_sched_eval_callback`). It has to be there when a context is made, and
costs about 0.3 microseconds a node even where it wants none, so only contexts that are made for it have one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backend import DecodeStatus
from ..batch import Batch
from ..errors import DecodeError
from .graph import EMBEDDINGS, Node, layer_inputs, no_layers
from .library import llama_cpp

__all__ = ["LayerRecorder"]


class _Tensor(ctypes.Structure):
    """`ggml_tensor` of ggml.h up to its name. Read while learning, and believed only where ggml's own functions say
    the same."""

    _fields_ = (
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10), ("view_src", ctypes.c_void_p), ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p), ("name", ctypes.c_char * 64),
    )  # fmt: skip


_F32 = 0
"""`GGML_TYPE_F32`; part of the file format, so it never changes."""


class _Ggml:
    """The functions of ggml that are needed, from the library that is loaded already."""

    def __init__(self) -> None:
        pointer, i64, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
        self.name = self._function("ggml_get_name", ctypes.c_char_p, pointer)
        self.name_address = self._function("ggml_get_name", pointer, pointer)
        self.operation = self._function("ggml_op_desc", ctypes.c_char_p, pointer)
        self.n_bytes = self._function("ggml_nbytes", size, pointer)
        self.n_elements = self._function("ggml_nelements", i64, pointer)
        self.n_rows = self._function("ggml_nrows", i64, pointer)
        self.contiguous = self._function("ggml_is_contiguous", ctypes.c_bool, pointer)
        self.get = self._function("ggml_backend_tensor_get", None, pointer, pointer, size, size)

    @staticmethod
    def _function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        """A function object of its own, so that nobody else's types for the same function are touched."""
        for library in _libraries():
            try:
                return ctypes.CFUNCTYPE(result, *arguments)((name, library))
            except AttributeError:
                continue
        raise no_layers(f"the installed llama-cpp-python does not export {name}")


def _libraries() -> Iterator[Any]:
    """Where ggml's functions may be found: through libllama, which depends on them; on Windows only in their own."""
    module = llama_cpp.llama_cpp
    if hasattr(module, "_lib"):
        yield module._lib
    folder = Path(llama_cpp.__file__).parent / "lib"
    for pattern in ("*ggml-base.dll", "*ggml-base.so", "*ggml-base.dylib"):
        for file in sorted(folder.glob(pattern)):
            yield ctypes.CDLL(str(file))


class LayerRecorder:
    """One context's `cb_eval`. `callback` goes into the parameters, and must live as long as the context.

    First it has to `learn` from one decode which node is the input of which layer; then each `recording` keeps
    those of one decode. Outside of both it wants nothing.
    """

    def __init__(self, n_layer: int, n_embd: int) -> None:
        self.n_layer, self.n_embd = n_layer, n_embd
        self._ggml = _Ggml()
        self._names: list[bytes] = []
        self._nodes: list[Node] | None = None
        self._given: npt.NDArray[np.float32] | None = None
        self._slots: dict[bytes, int] = {}
        self._rows: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self._n_tokens = 0
        self._wanted: list[int] = []
        self._filled: list[int] = []
        self._error: BaseException | None = None
        self._states: npt.NDArray[np.float32] | None = None
        self._problem: str | None = None
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._on_node)

    # -- learning ------------------------------------------------------------------------------------------------

    def learn(self, decode: Callable[[Batch], DecodeStatus], n_tokens: int) -> None:
        """Learn which nodes to keep from a decode of `n_tokens` tokens, whose numbers are for nobody, in an empty context.
        It leaves sequence 0 behind. Raises `UnsupportedFeatureError` where the graph does not show every layer."""
        positions = np.arange(n_tokens, dtype=np.int32)
        last = (positions == n_tokens - 1).astype(np.int8)
        nodes: list[Node] = []
        self._nodes, self._error, self._n_tokens = nodes, None, n_tokens
        try:
            status = decode(Batch(np.zeros(n_tokens, np.int32), None, positions, np.zeros(n_tokens, np.int32), last, 1))
        except DecodeError as error:
            raise no_layers(f"a first try failed ({error})") from error
        finally:
            self._nodes = None
        self._reraise()
        if status is not DecodeStatus.OK:
            raise no_layers(f"a first try failed ({status})")
        self._names = [name.encode() for name in layer_inputs(nodes, self.n_layer)]

    def _node(self, address: int) -> Node:
        tensor = _Tensor.from_address(address)
        shape = list(tensor.ne)
        same_name = self._ggml.name_address(address) == address + _Tensor.name.offset
        if not same_name or int(np.prod(shape)) != self._ggml.n_elements(address):
            raise no_layers("the installed llama.cpp lays out its tensors in another way")
        state = shape == [self.n_embd, self._n_tokens, 1, 1] and tensor.type == _F32
        return Node(
            address=address,
            name=_text(self._ggml.name(address)),
            is_state=state and self._ggml.contiguous(address),
            operation=_text(self._ggml.operation(address)),
            sources=tuple((source, _text(self._ggml.name(source))) for source in tensor.src if source),
        )

    # -- recording -----------------------------------------------------------------------------------------------

    @contextmanager
    def recording(
        self, layers: tuple[int, ...], rows: npt.NDArray[np.intp], n_tokens: int, embeds: npt.NDArray[np.float32] | None
    ) -> Iterator[None]:
        """Keep the inputs of `layers` at the tokens `rows` of the one decode inside, which has `n_tokens` tokens (or
        `embeds` instead) and is computed as one ubatch. `states()` gives them."""
        self._states = np.empty((len(rows), len(layers), self.n_embd), np.float32)
        self._rows, self._n_tokens, self._problem, self._error = rows, n_tokens, None, None
        self._wanted, self._filled = [0] * len(layers), [0] * len(layers)
        self._slots = {self._names[layer]: slot for slot, layer in enumerate(layers)}
        first = self._names[0]
        self._given = embeds if first in self._slots and first.decode() in EMBEDDINGS else None
        try:
            yield
        finally:
            self._slots, self._given = {}, None
        self._reraise()
        if self._wanted != self._filled:
            # an exception between the interpreter and our own `try` made ggml leave out the rest of the graph
            raise DecodeError("recording the hidden states was interrupted", -1)

    def states(self) -> npt.NDArray[np.float32]:
        """`(rows, layers, n_embd)` of the last recording, the caller's to keep. Raises `UnsupportedFeatureError` where the
        decode did not show each layer exactly once and whole."""
        if self._states is None:
            raise no_layers("the last decode did not record them")
        if self._problem is None and any(count != 1 for count in self._filled):
            self._problem = "this batch was computed in parts, or not through every layer"
        if self._problem is not None:
            raise no_layers(self._problem)
        return self._states

    def forget(self) -> None:
        """There was a decode that recorded nothing."""
        self._states = None

    def _reraise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _on_node(self, address: int, ask: bool, _user_data: Any) -> bool:
        """ggml's question. No exception may leave it: where it answers false to "done", ggml skips what follows."""
        nodes = self._nodes
        if not self._slots and nodes is None:
            return not ask
        try:
            if nodes is not None:
                if ask and self._error is None:
                    nodes.append(self._node(address))
                return not ask
            slot = self._slots.get(self._ggml.name(address))
            if self._given is not None and ask and slot is None:
                self._take_given(self._node(address))
            if slot is None:
                return not ask
            if ask:
                self._given = None if slot == 0 else self._given
                self._wanted[slot] += 1
                return True
            self._read(address, slot)
            self._filled[slot] += 1
        except BaseException as error:
            self._error = self._error or error
            return not ask
        return True

    def _take_given(self, node: Node) -> None:
        """Embeddings that were given may go into layer 0 as they are, without a node that would show them."""
        first = self._names[0]
        if node.layer == 0 and node.reads_name(first.decode()):
            slot = self._slots[first]
            assert self._given is not None and self._states is not None
            self._states[:, slot] = self._given[self._rows]
            self._wanted[slot] += 1
            self._filled[slot] += 1
        if node.layer is not None:
            self._given = None

    def _read(self, address: int, slot: int) -> None:
        ggml, row_bytes = self._ggml, 4 * self.n_embd
        n = ggml.n_rows(address)
        whole = n == self._n_tokens and ggml.n_elements(address) == n * self.n_embd
        # what ggml would assert, and so end the process
        if not (whole and ggml.contiguous(address) and ggml.n_bytes(address) == n * row_bytes):
            self._problem = f"a layer's input came as {n} rows, where the batch has {self._n_tokens} tokens"
            return
        first, last = int(self._rows[0]), int(self._rows[-1])
        part = np.empty((last + 1 - first, self.n_embd), np.float32)
        ggml.get(address, part.ctypes.data, first * row_bytes, part.nbytes)
        assert self._states is not None
        self._states[:, slot] = part[self._rows - first]


def _text(name: bytes | None) -> str:
    return (name or b"").decode("utf-8", "replace")
