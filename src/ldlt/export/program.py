"""The one form in which networks are saved and exported: operations of ATen, layers, and tensors of its own.

A module of any class is traced, and its graph is written down with the numbers it has now. What is left is data: no
class of the user is needed to run it again, and none is looked for. Hooks, parametrisations and whatever else a module
computes with are operations of the graph, or are done before it is written.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.activations import WindowSort
from ldlt.errors import GraphError
from ldlt.evaluation import evaluating, reference
from ldlt.graph.convolution import Spec
from ldlt.graph.fold import Forward, visit
from ldlt.graph.nodes import BATCH, Activation, Affine, Attr, Convolution, Graph, Input, Node, Ref, Wire, lookup
from ldlt.images.convolutions import CircularConv, FrozenSpec

__all__ = ["POOLS", "Program", "Writer", "program_of"]

POOLS: dict[int, type[nn.Module]] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}


class _Run(Forward):
    """Layers are called as those of any module are."""

    def activation(self, node: Activation, parent: Tensor) -> Tensor:
        found: Tensor = node.resolve(self.module)(parent)
        return found


class Program(nn.Module):
    r"""A network as a list of values; a plain module, which is traced like any other.

    Args:
        nodes: The values, the input first: operations (:class:`~ldlt.graph.nodes.Wire`), and calls of layers, which are
            nodes of :class:`~ldlt.graph.nodes.Activation` with the layer's name as path. Shapes and roles are left
            open: they are found when the program is traced.
        output: Name of the value that is returned.
        tensors: By name; a parameter stays one.
        layers: By name.

    Shape:
        Input (batch, \*shape), output (batch, \*outputs).
    """

    def __init__(
        self, nodes: Sequence[Node], output: str, tensors: Mapping[str, Tensor], layers: Mapping[str, nn.Module]
    ) -> None:
        super().__init__()
        self.graph = Graph(tuple(nodes), output)
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        for name, layer in layers.items():
            self.add_module(name, layer)
        last = {p: n.name for n in self.graph.nodes for p in (n.name, *n.parents)}
        self._unread: dict[str, list[str]] = {n.name: [] for n in self.graph.nodes}  # after it, nobody reads these
        for name, reader in last.items():
            self._unread[reader] += [name] * (name != output)

    def forward(self, x: Tensor) -> Tensor:
        """The network's output."""
        values: dict[str, Tensor] = {}
        run = _Run(self, self.graph.tensors(self), x)
        for node in self.graph.nodes:
            values[node.name] = visit(node, [values[p] for p in node.parents], run)
            for unread in self._unread[node.name]:
                del values[unread]
        return values[self.graph.output]

    @property
    def activations(self) -> list[str]:
        """Names that :func:`~ldlt.graph.trace.trace` gives to its activations, in their order."""
        layers = [(str(n.path), n.resolve(self)) for n in self.graph.activations]
        found = [(p, isinstance(m, tuple(POOLS.values()))) for p, m in layers if not isinstance(m, CircularConv)]
        return [f"{path}__sort" if pools else path for path, pools in found]


class Writer:
    """Writes the graph of a module as a program.

    Args:
        model: The module.
        graph: What :func:`~ldlt.graph.trace.trace` returned for it.
    """

    def __init__(self, model: nn.Module, graph: Graph) -> None:
        self.model, self.graph = model, graph
        self.read = graph.tensors(model)
        self.nodes: list[Node] = []
        self.tensors: dict[str, Tensor] = {}
        self.layers: dict[str, nn.Module] = {}
        self.names: dict[str, str] = {}  # of tensors, by path
        self.places: dict[str, str] = {}  # of values, by node
        self.free = {p for n in graph.affines for p in (n.weight, n.bias)}

    def write(self) -> Program:
        """The program."""
        pools = {first: rest for n in self.graph.activations for first, *rest in [self._pool(n)] if rest}
        inner = {name for rest in pools.values() for name in rest}
        with torch.no_grad():
            for node in self.graph.nodes:
                if node.name in pools:
                    assert isinstance(node, Activation)
                    window: Any = node.resolve(self.model).window
                    self.places[pools[node.name][-1]] = self.layer(POOLS[len(window)](window), node)
                elif node.name not in inner:
                    self.places[node.name] = self._write(node)
        return Program(self.nodes, self.places[self.graph.output], self.tensors, self.layers).eval()

    def _write(self, node: Node) -> str:
        if isinstance(node, Input):
            self.nodes.append(Input("0", (), ()))
            return "0"
        if isinstance(node, Activation):
            return self.activation(node)
        if isinstance(node, Convolution):
            return self.convolution(node)
        if isinstance(node, Affine):
            return self.operation(node, "aten.linear.default", Ref(0), *map(self.hold, (node.weight, node.bias)))
        assert isinstance(node, Wire)
        return self.wire(node)

    def wire(self, node: Wire) -> str:
        """An operation."""
        if node.role == "order":  # written as it runs on values that are not contiguous
            return self.operation(node, "aten.reshape.default", Ref(0), [BATCH, *node.shape])
        kwargs = tuple((k, self._renamed(v)) for k, v in node.kwargs)
        return self.operation(node, node.target, *map(self._renamed, node.args), kwargs=kwargs, select=node.select)

    def convolution(self, node: Convolution) -> str:
        """A convolution: a layer if it is frozen, or an operation behind its padding."""
        if isinstance(node.spec, FrozenSpec):
            bias = None if node.bias is None else self.read(node.bias)
            return self.layer(CircularConv(self.read(node.weight), node.spec.inputs, node.spec.outputs, bias), node)
        assert isinstance(node.spec, Spec)
        source = None
        if node.spec.mode != "zeros":
            source = self.operation(node, "aten.pad.default", Ref(0), list(node.spec.border), node.spec.mode)
        return self.convolved(node, node.spec, source)

    def convolved(self, node: Convolution, spec: Spec, source: str | None) -> str:
        """A convolution without padding of its own kind."""
        padding = spec.padding if isinstance(spec.padding, str) else list(spec.padding)
        options = [list(spec.stride), padding, list(spec.dilation), spec.groups]
        kind, overload = "conv", "padding" if isinstance(padding, str) else "default"
        if spec.transposed:
            kind, overload = "conv_transpose", "default" if spec.dims == 1 else "input"
            options = [list(spec.stride), padding, list(spec.output_padding), spec.groups, list(spec.dilation)]
        weights = map(self.hold, (node.weight, node.bias))
        return self.operation(node, f"aten.{kind}{spec.dims}d.{overload}", Ref(0), *weights, *options, source=source)

    def activation(self, node: Activation) -> str:
        """An activation: a copy of it, as a layer."""
        layer = copy.deepcopy(node.resolve(self.model))
        if getattr(layer, "inplace", False):
            layer.inplace = False  # type: ignore[assignment]
        layer._forward_hooks.clear()  # they are operations of the graph
        layer._forward_pre_hooks.clear()
        return self.layer(layer, node)

    def _pool(self, node: Activation) -> list[str]:
        """Names of a sort of windows and of what takes their first entries alone: max-pooling."""
        layer, found = node.resolve(self.model), [node.name]
        if isinstance(layer, WindowSort) and len(layer.window) in POOLS:
            for place, width in enumerate(layer.window, 2):
                readers = [n for n in self.graph.nodes if found[-1] in n.parents]
                args = (Ref(0), place, 0, 2**62, width)
                if len(readers) != 1 or getattr(readers[0], "args", None) != args or found[-1] == self.graph.output:
                    return [node.name]
                found.append(readers[0].name)
        return found

    # -- what is written -----------------------------------------------------------------------------------------------

    def operation(
        self, node: Node, target: str, *args: Any, kwargs: Any = (), select: Any = None, source: str | None = None
    ) -> str:
        """Add an operation on the parents of a node, or on another value."""
        parents = tuple(self.places[p] for p in node.parents) if source is None else (source,)
        return self._put(Wire(str(len(self.nodes)), (), parents, target, args, kwargs, select))

    def layer(self, layer: nn.Module, node: Node) -> str:
        """Add a call of a layer on the parent of a node."""
        name = f"layer_{len(self.layers)}"
        self.layers[name] = layer
        return self._put(Activation(str(len(self.nodes)), (), (self.places[node.parents[0]],), path=name))

    def _put(self, node: Node) -> str:
        self.nodes.append(node)
        return node.name

    def hold(self, path: str | None) -> Attr | None:
        """A tensor of the program, with its numbers now."""
        if path is None:
            return None
        if path not in self.names:
            self.names[path] = name = f"tensor_{len(self.tensors)}"
            found = self.read(path).detach().clone(memory_format=torch.contiguous_format)
            found = found.to(reference(self.model).dtype) if found.is_floating_point() else found
            own = path not in self.graph.constants and isinstance(lookup(self.model, path), nn.Parameter)
            self.tensors[name] = nn.Parameter(found, path in self.free) if own else found
        return Attr(self.names[path])

    def _renamed(self, arg: Any) -> Any:
        if isinstance(arg, Attr):
            held = self.hold(arg.path)
            assert held is not None
            return Attr(held.path, arg.spread)
        return [self._renamed(a) for a in arg] if isinstance(arg, (tuple, list)) else arg


def program_of(model: nn.Module, graph: Graph) -> Program:
    """A copy of a plain network as a program, in evaluation mode.

    Args:
        model: A network of plain weights.
        graph: What :func:`~ldlt.graph.trace.trace` returned for it.
    """
    program, like = Writer(model, graph).write(), reference(model)
    x = torch.randn(3, *graph.input.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(like)
    with torch.no_grad(), evaluating(model):
        wanted, found = model(x.clone()), program(x.clone())
    tolerance = torch.finfo(like.dtype).eps ** 0.75
    if found.shape != wanted.shape or not bool((found - wanted).abs().max() <= tolerance * (1 + wanted.abs().max())):
        raise GraphError("what the model computes is not what was written down of it; please report this")
    return program
