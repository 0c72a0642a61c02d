"""Which node of llama.cpp's computation graph is the input of which layer.

llama.cpp gives its nodes names: `name-<layer>` inside a layer, and `l_out-<layer>` for what a layer hands to the next
one (`llm_graph_context::cb`). Names are a convention of each architecture and no promise, so they are believed only as
far as the graph itself bears them out: see `layer_inputs`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as List
from dataclasses import dataclass

from ..errors import UnsupportedFeatureError

__all__ = ["EMBEDDINGS", "Node", "layer_inputs", "no_layers"]

_COPY = re.compile(r"^[^#]+#(.+)#\d+$")
"""What the scheduler calls a tensor it copied to another device: `<backend>#<name>#<number>`."""

_IN_LAYER = re.compile(r"-(\d+)( \(.*\))?$")
_UNNAMED = re.compile(r"^(node|leaf)_\d+$")

EMBEDDINGS = ("embd", "inp_embd")
"""What the embeddings are called: a node that looks tokens up, or the tensor that was given instead of tokens."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node, in the order of computation.

    `address` is its own and `sources` those of what it is computed from, with their names. `is_state`: float32,
    contiguous, one vector of `n_embd` for each token of the batch. `operation` is ggml's word for it.
    """

    address: int
    name: str
    is_state: bool
    operation: str
    sources: tuple[tuple[int, str], ...]

    @property
    def layer(self) -> int | None:
        found = _IN_LAYER.search(self.name)
        return int(found[1]) if found else None

    def reads(self, other: Node) -> bool:
        """Directly, or a copy of it on another device."""
        return any(address == other.address or _copied(name) == other.name for address, name in self.sources)

    def reads_name(self, name: str) -> bool:
        return any(name in (source, _copied(source)) for _, source in self.sources)


def _copied(name: str) -> str | None:
    found = _COPY.match(name)
    return found[1] if found else None


def no_layers(reason: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"the hidden states between the layers are not available: {reason}. The last one is, hidden_states[-1]",
        "output_hidden_states",
    )


def layer_inputs(nodes: List[Node], n_layer: int) -> list[str]:
    """The names of the nodes that are the inputs of the layers 0 .. n_layer - 1.

    For layer `i > 0` that is `l_out-<i - 1>`, if there is exactly one such node, it has the shape of hidden states, and
    a node of layer `i` reads it. For layer 0 it is where the residual stream begins: see `_first_input`.

    Raises `UnsupportedFeatureError` where that does not hold.
    """
    by_name: dict[str, list[Node]] = {}
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        by_name.setdefault(node.name, []).append(node)
        if node.layer is not None:
            readers.setdefault(node.layer, []).append(node)
    names = [_first_input(nodes, by_name)]
    for layer in range(1, n_layer):
        name = f"l_out-{layer - 1}"
        found = by_name.get(name, [])
        if len(found) != 1:
            raise no_layers(f"llama.cpp's graph of this architecture has {len(found)} nodes {name!r}")
        if not found[0].is_state:
            raise no_layers(f"the node {name!r} of this architecture is no hidden state")
        if not any(node.reads(found[0]) for node in readers.get(layer, [])):
            raise no_layers(f"layer {layer} of this architecture does not read {name!r}")
        names.append(name)
    return names


def _first_input(nodes: List[Node], by_name: dict[str, list[Node]]) -> str:
    """The first state that a node of layer 0 reads and that is added to something else later on, as the residual is; made
    without any product of matrices, which is how a layer begins.

    It may be the embeddings, or what an architecture makes of them first: scaled (Gemma), with positions added (GPT-2),
    normalised (Bloom, where llama.cpp counts that as layer 0).
    """
    mixed: set[int] = set()
    mixed_names: set[str | None] = set()
    for node in nodes:
        after = any(address in mixed or _copied(name) in mixed_names for address, name in node.sources)
        if after or node.operation.startswith("MUL_MAT"):
            mixed.add(node.address)
            mixed_names.add(node.name)
            continue
        readers = [other for other in nodes if other.reads(node)] if node.is_state else []
        if len(readers) < 2 or all(reader.layer != 0 for reader in readers):
            continue
        # the last layer goes on with the rows that are outputs: where it is the first one too, these are added
        rows = [reader for reader in readers if reader.operation == "GET_ROWS"]
        readers += [other for other in nodes if any(other.reads(row) for row in rows)]
        if any(reader.operation == "ADD" for reader in readers):
            if len(by_name[node.name]) == 1 and not _UNNAMED.match(node.name):
                return node.name
            break
    raise no_layers("llama.cpp's graph of this architecture does not show what goes into the first layer")
