"""The verbs with which a graph is made, node by node."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ldlt import activations
from ldlt.errors import GraphError, LdltError, UnsupportedOpError
from ldlt.graph.nodes import BATCH, Activation, Attr, Constant, Graph, Node, Ref, Wire, index_map

__all__ = ["Builder"]


class Builder:
    """Collects the values and constants of the graph of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.nodes: dict[str, Node] = {}
        self.constants: dict[str, Constant] = {}
        self.taken: set[str] = set()
        self.graph = Graph((), "", self.constants)  # constants are added while it is used
        self.tensors = self.graph.tensors(module)

    def unique(self, name: str) -> str:
        """A name that no other value has."""
        found = free(name, self.taken)
        self.taken.add(found)
        return found

    def put(self, value: Node) -> str:
        if value.name in self.nodes:
            raise GraphError(f"two values are called '{value.name}'; rename a layer")
        self.nodes[value.name] = value
        self.taken.add(value.name)
        return value.name

    def keep(self, path: str, constant: Constant) -> Attr:
        """Add a constant, under a path that no tensor of a module can have."""
        path = free(path if path.startswith("=") else f"={path}", self.constants)
        self.constants[path] = constant
        return Attr(path)

    def move(self, name: str, source: str | Sequence[str], target: str, *args: Any) -> str:
        """Add an ATen operation that moves, drops or repeats features; its shape is found by trying it."""
        parents = (source,) if isinstance(source, str) else tuple(source)
        wire = Wire(name, (), parents, f"aten.{target}", args, role="rearrange")
        tried = wire.bind(self.tensors)(*(torch.empty(1, *self.nodes[p].shape, device="meta") for p in parents))
        return self.put(dataclasses.replace(wire, shape=tuple(tried.shape[1:])))

    def gather(self, name: str, source: str, index: torch.Tensor) -> str:
        """Add the entries of a vector with these numbers, end to end."""
        table = self.keep(f"{name}.index", Constant(value=index.reshape(-1)))
        return self.move(name, source, "index_select.default", Ref(0), 1, table)

    def view(self, name: str, source: str, shape: Sequence[int]) -> str:
        """Add the same features in another shape."""
        return self.put(Wire(name, tuple(shape), (source,), *viewed(shape), role="order"))

    def opposite(self, name: str, source: str) -> str:
        """Add minus a value."""
        shape, args = self.nodes[source].shape, (Ref(0),)
        return self.put(Wire(name, shape, (source,), "aten.neg.default", args, role="sum", scales=(-1.0,)))

    def ordered(self, wire: Wire) -> Wire:
        """Mark a rearrangement that only changes the shape, however it is written, and always will."""
        if wire.role != "rearrange" or len(wire.parents) != 1 or not self.graph.structural(wire):
            return wire
        count = self.nodes[wire.parents[0]].features
        if wire.features != count or bool((index_map(self.nodes, wire, self.tensors) != torch.arange(count)).any()):
            return wire
        return Wire(wire.name, wire.shape, wire.parents, *viewed(wire.shape), role="order")

    def activate(self, name: str, source: str, module: nn.Module | None = None, path: str | None = None) -> str:
        """Add a nonlinearity that suits its input; one number per sample becomes a vector for it."""
        shape = self.nodes[source].shape
        if 0 in shape:
            raise UnsupportedOpError(name, "its input has no features; leave it out")
        node = Activation(name, shape or (1,), (source,), module=module, path=path)
        self.suit(node)
        if shape:
            return self.put(node)
        if activations.mixed(node.resolve(self.module), node.shape) is not None:
            raise UnsupportedOpError(name, "it mixes the samples of a batch")
        vector = self.view(self.unique(f"{name}__vector"), source, (1,))
        self.put(dataclasses.replace(node, parents=(vector,)))
        return self.view(self.unique(f"{name}__number"), name, ())

    def suit(self, node: Activation) -> None:
        """Refuse a nonlinearity without a law, or one that does not fit its input."""
        try:
            activations.sector(node.resolve(self.module), node.shape[0] if node.shape else 1)
            activations.mixed(node.resolve(self.module), node.shape)
        except LdltError as error:
            raise UnsupportedOpError(node.name, str(error)) from error


def free(name: str, taken: Any) -> str:
    """The name, with a number if it is taken."""
    found, again = name, 0
    while found in taken:
        again += 1
        found = f"{name}_{again}"
    return found


def viewed(shape: Sequence[int]) -> tuple[str, tuple[Any, ...]]:
    """Target and arguments of a change of shape."""
    return "aten.view.default", (Ref(0), [BATCH, *shape])
