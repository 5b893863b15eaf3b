"""The graph that every module is turned into: an input, linear operations, free affine maps, activations.

A :class:`Graph` is plain data (it can be pickled and deep-copied). It names operations as ATen does and tensors by
their paths in the user's module; the tensors themselves stay there, and are read when the graph is run, through
:meth:`Graph.tensors`. Shapes never include the batch dimension, which is always the first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt.activations.layers import Masked
from ldlt.graph.convolution import Kernel

__all__ = [
    "BATCH", "Activation", "Affine", "Attr", "Constant", "Convolution", "Graph", "Input", "Node", "Ref", "Tensors",
    "Wire", "index_map", "lookup", "members", "replaced", "resolve",
]  # fmt: skip

Tensors = Callable[[str], Tensor]
"""What gives the tensors of a graph by their paths."""


@dataclass(frozen=True)
class Ref:
    """Place of the i-th parent in an argument template."""

    index: int


@dataclass(frozen=True)
class Attr:
    """Place of a tensor in an argument template: of the user's module, or a :class:`Constant` of the graph.

    Attributes:
        path: Its path.
        spread: Whether its first dimension is that of the batch, along which it is the same.
    """

    path: str
    spread: bool = False


class _Batch:
    """Place of the batch size in an argument template."""

    def __reduce__(self) -> str:
        return "BATCH"

    def __repr__(self) -> str:
        return "BATCH"


BATCH = _Batch()


@cache
def resolve(target: str) -> Callable[..., Any]:
    """The operation of a name such as ``"aten.add.Tensor"``."""
    found: Any = operator.attrgetter(target)(torch.ops)
    return found  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Call:
    """An ATen operation with templates of its arguments.

    Attributes:
        target: The operation, ``"aten.view.default"``.
        args: Positional arguments with :class:`Ref`, :class:`Attr` and ``BATCH`` in the place of values.
        kwargs: Keyword arguments, likewise.
        select: Which element of a tuple result (``split``, ``unbind``) this is.
    """

    target: str = ""
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    select: int | None = None

    @property
    def constants(self) -> list[str]:
        """Paths of the tensors it reads besides its parents, with repetitions."""
        return [a.path for a in members((self.args, [v for _, v in self.kwargs])) if isinstance(a, Attr)]

    def run(self, parents: Sequence[Tensor], tensors: Tensors) -> Tensor:
        """The result; constants of a call with parents come in the precision and on the device of the first of them."""
        like = parents[0] if parents else None

        def fill(arg: Any) -> Any:
            if isinstance(arg, Ref):
                return parents[arg.index]
            if arg is BATCH:
                return parents[0].shape[0]
            if not isinstance(arg, Attr):
                return arg
            found = tensors(arg.path)
            if like is None:
                return found
            if arg.spread:
                found = found.expand(like.shape[0], *found.shape[1:])
            return found.to(like) if found.is_floating_point() else found.to(like.device)

        options = {k: replaced(fill, v) for k, v in self.kwargs}
        result = resolve(self.target)(*(replaced(fill, a) for a in self.args), **options)
        found: Tensor = result if self.select is None else result[self.select]
        return found


def replaced(function: Callable[[Any], Any], arg: Any) -> Any:
    """An argument template with a function applied to each of its members."""
    return [replaced(function, a) for a in arg] if isinstance(arg, (tuple, list)) else function(arg)


def members(arg: Any) -> Iterator[Any]:
    """All that is in an argument template, however deep."""
    if isinstance(arg, (tuple, list)):
        for a in arg:
            yield from members(a)
    else:
        yield arg


@dataclass(frozen=True)
class Constant(Call):
    """A tensor that is computed from tensors of the module alone: ``weight * mask``, a parametrised weight.

    Attributes:
        value: The tensor, if there is no operation: one that the module's forward function made.
    """

    value: Tensor | None = field(default=None, compare=False)

    def make(self, tensors: Tensors) -> Tensor:
        """The tensor."""
        return self.run((), tensors) if self.value is None else self.value


@dataclass(frozen=True)
class Node:
    """A value: its name (the path of the layer that computes it, or that of its operation), feature shape, parents."""

    name: str
    shape: tuple[int, ...]
    parents: tuple[str, ...]

    @property
    def features(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Input(Node):
    """The input ``x``."""


@dataclass(frozen=True)
class Wire(Call, Node):
    """An operation that is linear in its parents, up to a constant that a ``"sum"`` may add.

    Attributes:
        role: ``"sum"`` (``scales`` weighs the parents; all have the shape of the result), ``"order"`` (same
            features in the same order, another shape), ``"rearrange"`` (features are moved, dropped or repeated, not
            mixed), ``"linear"`` (anything else that is linear).
        scales: Weights of the parents for ``"sum"``.
    """

    role: str = "linear"
    scales: tuple[float, ...] = ()

    @property
    def operation(self) -> str:
        """Name of the operation without its overload, the key of the table of operations."""
        space, name, _ = self.target.split(".")
        return name if space == "aten" else f"{space}::{name}"

    def bind(self, tensors: Tensors) -> Callable[..., Tensor]:
        """The function ``batches -> batch``."""
        if self.role == "order":
            return lambda x: x.reshape(x.shape[0], *self.shape)
        return lambda *parents: self.run(parents, tensors)

    def linear(self, tensors: Tensors) -> Callable[..., Tensor]:
        """As :meth:`bind`, without the constant that a sum may add."""
        if self.role != "sum":
            return self.bind(tensors)

        def total(*parents: Tensor) -> Tensor:
            found = self.scales[0] * parents[0]
            for scale, parent in zip(self.scales[1:], parents[1:], strict=True):
                found = found + scale * parent
            return found

        return total


@dataclass(frozen=True)
class Affine(Node):
    """``W y + b`` with a free matrix: ``weight`` and ``bias`` are paths of the user's module."""

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
    """A free affine map that is a convolution, with what it computes and the size of its kernel."""

    spec: Kernel = field(kw_only=True)
    kernel: tuple[int, ...] = ()

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.spec.run(x, weight, bias)

    def matrix(self, weight: Tensor, graph: Graph, exact: bool = False) -> Tensor:
        return self.spec.unrolled(weight, graph[self.parents[0]].shape, exact)


@dataclass(frozen=True)
class Activation(Node):
    """``σ(v)``: a ``module`` without parameters, or the ``path`` of a submodule of the user's module."""

    module: nn.Module | None = None
    path: str | None = None
    masked: bool = False  # whether its slopes are taken to contain 0

    def resolve(self, root: nn.Module) -> nn.Module:
        found: nn.Module = self.module if self.path is None else lookup(root, self.path)  # type: ignore[assignment]
        return Masked(found) if self.masked else found

    def apply(self, root: nn.Module, x: Tensor) -> Tensor:
        """Its value for a batch, without the hooks of the module, which are operations of the graph."""
        found: Tensor = self.resolve(root).forward(x)
        return found


def lookup(root: Any, path: str) -> Any:
    """Find what a dotted path names in a module."""
    return operator.attrgetter(path)(root) if path else root


@dataclass(frozen=True)
class Graph:
    """An acyclic graph in topological order.

    Attributes:
        nodes: The values.
        output: Name of the output value.
        constants: Tensors that are computed from those of the module, by the path that :class:`Attr` names.
    """

    nodes: tuple[Node, ...]
    output: str
    constants: Mapping[str, Constant] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Node:
        return self.index[name]

    @cached_property
    def index(self) -> dict[str, Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def input(self) -> Input:
        return next(n for n in self.nodes if isinstance(n, Input))

    @cached_property
    def activations(self) -> list[Activation]:
        return [n for n in self.nodes if isinstance(n, Activation)]

    @cached_property
    def affines(self) -> list[Affine]:
        return [n for n in self.nodes if isinstance(n, Affine)]

    @cached_property
    def has_images(self) -> bool:
        """Whether some free map is a convolution: channels then share multipliers over positions."""
        return any(isinstance(n, Convolution) for n in self.nodes)

    def tensors(self, source: nn.Module | Mapping[str, Tensor] | Tensors) -> Tensors:
        """What gives the tensors of the graph: those of a module as they are now, and constants computed from them.

        Constants are computed once, in the precision of the tensors they come from. Do not keep it beyond a pass.

        Args:
            source: The module, its tensors by path, or a function of the path.
        """
        if isinstance(source, nn.Module):
            read: Tensors = lambda path: lookup(source, path)  # noqa: E731
        elif isinstance(source, Mapping):
            read = source.__getitem__
        else:
            read = source
        made: dict[str, Tensor] = {}

        def get(path: str) -> Tensor:
            constant = self.constants.get(path)
            if constant is None:
                return read(path)
            if path not in made:
                made[path] = constant.make(get)
            return made[path]

        return get

    def sources(self, path: str) -> set[str]:
        """Paths of the tensors of the module that a tensor of the graph is computed from."""
        constant = self.constants.get(path)
        if constant is None:
            return {path}
        return {p for a in constant.constants for p in self.sources(a)}

    def structural(self, node: Wire) -> bool:
        """Whether a node reads no tensor of the module: it then does the same after a state is loaded."""
        return not any(self.sources(path) for path in node.constants)

    def pruned(self) -> Graph:
        """Without the values and constants the output does not depend on."""
        needed = {self.output}
        for n in reversed(self.nodes):
            if n.name in needed:
                needed.update(n.parents)
        nodes = tuple(n for n in self.nodes if n.name in needed or isinstance(n, Input))
        read = {p for n in nodes if isinstance(n, Wire) for p in n.constants}
        for path in reversed([*self.constants]):  # each is made of earlier ones
            if path in read:
                read.update(self.constants[path].constants)
        return Graph(nodes, self.output, {p: c for p, c in self.constants.items() if p in read})


def index_map(graph: Mapping[str, Node], wire: Wire, tensors: Tensors) -> Tensor:
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
        return wire.bind(tensors)(*labels).reshape(-1).long()
