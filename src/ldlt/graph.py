"""The small graph that every module is turned into: free affine maps, fixed linear wiring, activations.

A :class:`Graph` is plain data (it can be pickled and deep-copied); the tensors stay in the user's module. Values are
named after the nodes of the traced program. Shapes never include the batch dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt.activations import WindowSort
from ldlt.convolution import FrozenSpec, Spec

__all__ = [
    "Activation",
    "Affine",
    "Convolution",
    "Graph",
    "Input",
    "Node",
    "Wire",
    "evaluate",
    "index_map",
    "lookup",
]


@dataclass(frozen=True)
class Ref:
    """Place of the i-th parent in an argument template."""

    index: int


@dataclass(frozen=True)
class Attr:
    """Place of a tensor of the user's module (a buffer or a parameter) in an argument template."""

    path: str


class _Batch:
    """Place of the batch size in an argument template."""

    def __reduce__(self) -> str:
        return "BATCH"

    def __repr__(self) -> str:
        return "BATCH"


BATCH = _Batch()


@dataclass(frozen=True)
class Node:
    """A value of the graph.

    Attributes:
        name: Its name in the traced program.
        shape: Feature shape.
        parents: Names of the values it is made from.
    """

    name: str
    shape: tuple[int, ...]
    parents: tuple[str, ...]

    @property
    def features(self) -> int:
        """Number of features."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Input(Node):
    """The input ``x``."""


@dataclass(frozen=True)
class Affine(Node):
    """``W y + b`` with a free matrix: ``weight`` and ``bias`` are parameter names of the user's module."""

    weight: str = ""
    bias: str | None = None

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """What the layer computes for a batch."""
        return F.linear(x, weight, bias)

    def matrix(self, weight: Tensor, graph: Graph, exact: bool = False) -> Tensor:
        """The map as a matrix (features of the output, features of the input).

        With ``exact``, every entry is one of the weight's; a map that is not of this kind is refused.
        """
        return weight


@dataclass(frozen=True)
class Convolution(Affine):
    """A free affine map that is a convolution.

    Attributes:
        spec: What the layer computes.
        kernel: Size of its kernel.
    """

    spec: Spec | FrozenSpec = field(kw_only=True)
    kernel: tuple[int, ...] = ()

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: D102
        return self.spec.run(x, weight, bias)

    def matrix(self, weight: Tensor, graph: Graph, exact: bool = False) -> Tensor:  # noqa: D102
        return self.spec.unrolled(weight, graph[self.parents[0]].shape, exact)


@dataclass(frozen=True)
class Wire(Node):
    """A fixed linear operation, such as a sum, a concatenation, a slice, a product with a constant.

    Attributes:
        kind: ``"function"`` or ``"method"``: what ``target`` is; ``"dropout"`` marks a random identity.
        target: The function or the method's name (None for a negation and for the role ``"order"``).
        args: Positional arguments with :class:`Ref`, :class:`Attr` and ``BATCH`` in the place of values.
        kwargs: Keyword arguments, likewise.
        select: Which element of a tuple result (``chunk``, ``split``) this is.
        role: ``"sum"`` (``scales`` gives the weight of each parent), ``"order"`` (same features in the same order,
            another shape), ``"rearrange"`` (features are moved, dropped or repeated, not mixed), ``"linear"`` (anything
            else that is linear).
        scales: Weights of the parents for ``"sum"``.
    """

    kind: str = "function"
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    select: int | None = None
    role: str = "linear"
    scales: tuple[float, ...] = ()

    @property
    def constants(self) -> list[str]:
        """Paths of the tensors of the user's module it reads."""
        found: list[str] = []

        def look(arg: Any) -> None:
            if isinstance(arg, Attr):
                found.append(arg.path)
            elif isinstance(arg, (tuple, list)):
                for a in arg:
                    look(a)
            elif isinstance(arg, slice):
                look((arg.start, arg.stop, arg.step))

        look((self.args, tuple(v for _, v in self.kwargs)))
        return found

    def bind(self, module: Any) -> Callable[..., Tensor]:
        """The linear function ``batches -> batch``; ``module`` supplies constants (None if there are none)."""

        def run(*parents: Tensor) -> Tensor:
            def fill(arg: Any) -> Any:
                if isinstance(arg, Ref):
                    return parents[arg.index]
                if isinstance(arg, Attr):
                    constant = lookup(module, arg.path)
                    return constant.to(parents[0]) if constant.is_floating_point() else constant.to(parents[0].device)
                if arg is BATCH:
                    return parents[0].shape[0]
                if isinstance(arg, (tuple, list)):
                    return type(arg)(fill(a) for a in arg)
                if isinstance(arg, slice):
                    return slice(fill(arg.start), fill(arg.stop), fill(arg.step))
                return arg

            args = [fill(a) for a in self.args]
            kwargs = {k: fill(a) for k, a in self.kwargs}
            if self.kind == "method":
                result = getattr(args[0], self.target)(*args[1:], **kwargs)
            else:
                result = self.target(*args, **kwargs)
            return result if self.select is None else result[self.select]

        return run


@dataclass(frozen=True)
class Activation(Node):
    """``σ(v)``.

    Attributes:
        module: A parameter-free activation, or None if it is a submodule of the user's module.
        path: Path of that submodule (it may have parameters: PReLU).
    """

    module: nn.Module | None = None
    path: str | None = None

    def resolve(self, root: nn.Module) -> nn.Module:
        """The activation as a module."""
        return self.module if self.path is None else lookup(root, self.path)  # type: ignore[return-value]


def lookup(root: Any, path: str) -> Any:
    """Find what a dotted path names in a module."""
    for part in path.split("."):
        root = getattr(root, part)
    return root


@dataclass(frozen=True)
class Graph:
    """An acyclic graph in topological order, with the name of its output value."""

    nodes: tuple[Node, ...]
    output: str

    def __getitem__(self, name: str) -> Node:
        return self.index[name]

    @property
    def index(self) -> dict[str, Node]:
        """Nodes by name."""
        found = self.__dict__.get("_index")
        if found is None:
            found = {n.name: n for n in self.nodes}
            object.__setattr__(self, "_index", found)
        return found

    @property
    def input(self) -> Input:
        """The input node."""
        return next(n for n in self.nodes if isinstance(n, Input))

    @property
    def activations(self) -> list[Activation]:
        """Activation nodes in topological order."""
        return [n for n in self.nodes if isinstance(n, Activation)]

    @property
    def affines(self) -> list[Affine]:
        """Free affine maps in topological order."""
        return [n for n in self.nodes if isinstance(n, Affine)]

    @property
    def has_images(self) -> bool:
        """Whether some tensors are images, with features that are tied to each other over positions."""
        return any(
            isinstance(n, Convolution) or (isinstance(n, Activation) and isinstance(n.module, WindowSort))
            for n in self.nodes
        )

    def pruned(self) -> Graph:
        """Without the values the output does not depend on."""
        needed = {self.output}
        for n in reversed(self.nodes):
            if n.name in needed:
                needed.update(n.parents)
        return Graph(tuple(n for n in self.nodes if n.name in needed or isinstance(n, Input)), self.output)


def index_map(graph: Mapping[str, Node], wire: Wire, module: nn.Module) -> Tensor:
    """Run a rearranging operation on labels of its parents' features; one label per feature of the result.

    The features of all parents are counted through, in the order of the parents.
    """
    labels, start = [], 0
    for name in wire.parents:
        parent = graph[name]
        index = torch.arange(start, start + parent.features, dtype=torch.float64)
        labels.append(index.reshape(1, *parent.shape))
        start += parent.features
    with torch.no_grad():
        return wire.bind(module)(*labels).reshape(-1).long()


def evaluate(graph: Graph, module: nn.Module, x: Tensor) -> Tensor:
    """The output of the graph for a batch, with the parameters and constants that the module has now."""
    values: dict[str, Tensor] = {}
    for node in graph.nodes:
        parents = [values[p] for p in node.parents]
        if isinstance(node, Input):
            values[node.name] = x
        elif isinstance(node, Affine):
            bias = None if node.bias is None else lookup(module, node.bias)
            values[node.name] = node.apply(parents[0], lookup(module, node.weight), bias)
        elif isinstance(node, Activation):
            values[node.name] = node.resolve(module)(parents[0].clone())
        else:
            assert isinstance(node, Wire)
            if node.role == "order":
                values[node.name] = parents[0].reshape(-1, *node.shape)
            elif node.target is None:
                values[node.name] = node.scales[0] * parents[0]
            else:
                values[node.name] = node.bind(module)(*parents)
    return values[graph.output]
