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
    """One node, in the order of computation. `is_state`: float32, contiguous, one vector of `n_embd` for each token of the
    batch. `sources`: the names of what it is computed from."""

    name: str
    is_state: bool
    sources: tuple[str, ...]

    @property
    def layer(self) -> int | None:
        found = _IN_LAYER.search(self.name)
        return int(found[1]) if found else None

    def reads(self, name: str) -> bool:
        return any(name in (source, _COPY.sub(r"\1", source)) for source in self.sources)


def no_layers(reason: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"the hidden states between the layers are not available: {reason}. The last one is, hidden_states[-1]",
        "output_hidden_states",
    )


def layer_inputs(nodes: List[Node], n_layer: int) -> list[str]:
    """The names of the nodes that are the inputs of the layers 0 .. n_layer - 1.

    For layer `i > 0` that is `l_out-<i - 1>`, if there is exactly one such node, it has the shape of hidden states, and
    a node of layer `i` reads it. For layer 0 it is the node in front of all layers that the first node of layer 0 to
    read such a one reads: the embeddings, scaled, normalised or with positions added as the architecture has it.

    Raises `UnsupportedFeatureError` where that does not hold.
    """
    by_name: dict[str, list[Node]] = {}
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        by_name.setdefault(node.name, []).append(node)
        if node.layer is not None:
            readers.setdefault(node.layer, []).append(node)
    names = [_first_input(nodes, by_name, readers.get(0, []))]
    for layer in range(1, n_layer):
        name = f"l_out-{layer - 1}"
        found = by_name.get(name, [])
        if len(found) != 1:
            raise no_layers(f"llama.cpp's graph of this architecture has {len(found)} nodes {name!r}")
        if not found[0].is_state:
            raise no_layers(f"the node {name!r} of this architecture is no hidden state")
        if not any(node.reads(name) for node in readers.get(layer, [])):
            raise no_layers(f"layer {layer} of this architecture does not read {name!r}")
        names.append(name)
    return names


def _first_input(nodes: List[Node], by_name: dict[str, list[Node]], readers: List[Node]) -> str:
    before: list[str] = []
    for node in nodes:
        if node.layer is not None:
            break
        if node.is_state and len(by_name[node.name]) == 1 and not _UNNAMED.match(node.name):
            before.append(node.name)
    for reader in readers:
        for name in before:
            if reader.reads(name):
                return name
    raise no_layers("llama.cpp's graph of this architecture does not show what goes into the first layer")
