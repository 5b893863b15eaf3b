"""The one walk over a graph: a fold with an algebra, which says what each kind of node does to values of its type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor, nn

from ldlt.graph.nodes import Activation, Affine, Graph, Input, Node, Tensors, Wire

__all__ = ["Algebra", "Forward", "evaluate", "fold", "visit"]

T = TypeVar("T")


class Algebra(Protocol[T]):
    """What a walk computes; the value of a wire has the constant that a sum may add."""

    def input(self, node: Input) -> T: ...
    def wire(self, node: Wire, parents: Sequence[T]) -> T: ...
    def affine(self, node: Affine, parent: T) -> T: ...
    def activation(self, node: Activation, parent: T) -> T: ...


def fold(graph: Graph, algebra: Algebra[T]) -> dict[str, T]:
    """The values of all nodes by name, in topological order."""
    values: dict[str, T] = {}
    for node in graph.nodes:
        values[node.name] = visit(node, [values[p] for p in node.parents], algebra)
    return values


def visit(node: Node, parents: Sequence[T], algebra: Algebra[T]) -> T:
    """The value of one node from those of its parents."""
    if isinstance(node, Input):
        return algebra.input(node)
    if isinstance(node, Affine):
        return algebra.affine(node, parents[0])
    if isinstance(node, Activation):
        return algebra.activation(node, parents[0])
    assert isinstance(node, Wire)
    return algebra.wire(node, parents)


class Forward:
    """The algebra of batches of values: with the activations of a module, and what gives the tensors of the graph."""

    def __init__(self, module: nn.Module, tensors: Tensors, x: Tensor) -> None:
        self.module, self.tensors, self.x = module, tensors, x

    def input(self, node: Input) -> Tensor:
        return self.x

    def wire(self, node: Wire, parents: Sequence[Tensor]) -> Tensor:
        return node.bind(self.tensors)(*parents)

    def affine(self, node: Affine, parent: Tensor) -> Tensor:
        bias = None if node.bias is None else self.tensors(node.bias)
        return node.apply(parent, self.tensors(node.weight), bias)

    def activation(self, node: Activation, parent: Tensor) -> Tensor:
        return node.apply(self.module, parent.clone())  # it may work in place


def evaluate(graph: Graph, module: nn.Module, x: Tensor) -> Tensor:
    """The output of the graph for a batch, with the parameters and constants that the module has now."""
    return fold(graph, Forward(module, graph.tensors(module), x))[graph.output]
