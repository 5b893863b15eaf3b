"""Graphs of plain compositions without ``torch.export``, whose first call in a process takes seconds.

Layers of ``torch.nn`` in ``Sequential`` and the modules of ``ldlt.nn`` are run with a symbol in place of the input:
each layer adds the node that :mod:`ldlt.graph.trace` would make, and the symbols can be added to each other. Whatever
else is in a module leaves it to :func:`~ldlt.graph.trace.trace`.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import nn

from ldlt import activations
from ldlt.errors import LdltError
from ldlt.graph.convolution import Spec
from ldlt.graph.nodes import BATCH, Activation, Affine, Attr, Convolution, Graph, Input, Node, Ref, Wire
from ldlt.graph.trace import check_graph, hooks_of, require_finite

__all__ = ["known_graph"]

_CONTAINERS = (nn.Sequential, nn.ModuleList)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SAME = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class _UnknownError(Exception):
    """Something that only :func:`~ldlt.graph.trace.trace` understands."""


class _Symbol:
    """A value of the graph, in place of a batch."""

    def __init__(self, builder: _Builder, name: str) -> None:
        self.builder, self.name = builder, name

    def __add__(self, other: object) -> _Symbol:
        left, nodes = self.builder.nodes[self.name], self.builder.nodes
        if not isinstance(other, _Symbol) or nodes[other.name].shape != left.shape:
            raise _UnknownError
        own = {"args": (Ref(0), Ref(1)), "role": "sum", "scales": (1.0, 1.0)}
        name = self.builder.named("add")
        return self.builder.put(Wire(name, left.shape, (self.name, other.name), "aten.add.Tensor", **own))  # type: ignore[arg-type]


class _Builder:
    """Collects nodes."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.nodes: dict[str, Node] = {}

    def named(self, operation: str) -> str:
        """A name for a value that no layer of torch.nn makes."""
        name, again = operation, 0
        while name in self.nodes:
            again += 1
            name = f"{operation}_{again}"
        return name

    def put(self, node: Node) -> _Symbol:
        if node.name in self.nodes:  # a layer that is used twice, or names that meet
            raise _UnknownError
        self.nodes[node.name] = node
        return _Symbol(self, node.name)

    def layer(self, path: str, layer: Any, x: _Symbol) -> _Symbol:
        """What a layer makes of a value."""
        kind, shape = type(layer), self.nodes[x.name].shape
        name = path.replace(".", "_")
        name = f"_{name}" if name[:1].isdigit() else name
        if not isinstance(x, _Symbol) or not name:
            raise _UnknownError
        if kind in _SAME:
            return x
        if kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1) and len(shape) > 1:
            count = torch.Size(shape).numel()
            args = (Ref(0), [BATCH, count])
            return self.put(Wire(name, (count,), (x.name,), "aten.view.default", args, role="order"))
        if kind is nn.Linear and shape == (layer.in_features,):
            return self.put(Affine(name, (layer.out_features,), (x.name,), **_tensors(path, layer)))
        if kind in _CONVOLUTIONS:
            return self._convolution(name, path, cast(Any, layer), x, shape)
        if "ldlt_standardise" in kind.__dict__:
            return self._standardised(path, x, shape)
        if kind in (nn.Linear, nn.Flatten) or getattr(layer, "inplace", False):
            raise _UnknownError
        return self.put(Activation(name, shape, (x.name,), path=path))

    def _convolution(self, name: str, path: str, layer: Any, x: _Symbol, shape: tuple[int, ...]) -> _Symbol:
        spec, dims = Spec.of(layer), layer.weight.ndim - 2
        circular = spec.mode == "circular" and all(n > 0 for n in spec.border)
        if isinstance(spec.padding, str) or not (circular or spec.mode == "zeros") or len(shape) != dims + 1:
            raise _UnknownError
        if circular:
            spec = Spec(**{**spec.__dict__, "padding": (0,) * dims})
        if not spec.transposed:
            spec = Spec(**{**spec.__dict__, "output_padding": ()})
        kernel = tuple(layer.weight.shape[2:])
        result = spec.run(torch.empty(1, *shape, device="meta"), torch.empty(layer.weight.shape, device="meta"))
        outputs = tuple(result.shape[1:])
        if spec.cells(kernel, shape, outputs) is None:
            raise _UnknownError
        return self.put(Convolution(name, outputs, (x.name,), spec=spec, kernel=kernel, **_tensors(path, layer)))

    def _standardised(self, path: str, x: _Symbol, shape: tuple[int, ...]) -> _Symbol:
        args = (Ref(0), Attr(f"{path}.mean"))
        shifted = Wire(self.named("sub"), shape, (x.name,), "aten.sub.Tensor", args, role="sum", scales=(1.0,))
        self.put(shifted)
        return self.put(
            Wire(self.named("div"), shape, (shifted.name,), "aten.div.Tensor", (Ref(0), Attr(f"{path}.scale")))
        )


def _tensors(path: str, layer: Any) -> dict[str, Any]:
    """The tensors of a layer by their roles; its weight must be free."""
    if not layer.weight.requires_grad or 0 in layer.weight.shape:
        raise _UnknownError
    return {"weight": f"{path}.weight", "bias": None if layer.bias is None else f"{path}.bias"}


def _is_leaf(layer: nn.Module) -> bool:
    """Whether a module is a layer; refuses what is neither that nor known to be made of layers alone."""
    kind = type(layer)
    if "forward" in layer.__dict__ or any(t in layer.__dict__ for t in layer._parameters):
        raise _UnknownError
    if kind in (nn.Linear, nn.Flatten, *_SAME, *_CONVOLUTIONS) or "ldlt_standardise" in kind.__dict__:
        return True
    if kind in _CONTAINERS or "ldlt_composed" in kind.__dict__:
        return False
    if activations.is_activation(layer):
        return True
    raise _UnknownError


def known_graph(module: nn.Module, shape: tuple[int, ...]) -> Graph | None:
    """The graph of a composition of plain layers, as :func:`~ldlt.graph.trace.trace` gives it; None for anything else.

    Args:
        module: The module.
        shape: Shape of one sample.

    Raises:
        GraphError: A parameter is not finite.
    """
    tensors = [t for m in module.modules() for t in m._parameters.values() if t is not None]
    if (
        hooks_of(module)
        or len({id(t) for t in tensors}) != len(tensors)
        or any(type(t) is not nn.Parameter for t in tensors)
    ):
        return None
    if len({t.dtype for t in tensors}) != 1 or len({t.device for t in tensors}) != 1:
        return None
    builder, swapped = _Builder(module), []
    names = [*inspect.signature(module.forward).parameters]
    if len(names) != 1:
        return None
    x = builder.put(Input(names[0], shape, ()))
    try:
        layers = [(path, layer) for path, layer in module.named_modules() if _is_leaf(layer)]
        for path, layer in layers:
            layer.__dict__["forward"] = lambda x, p=path, m=layer: builder.layer(p, m, x)
            swapped.append(layer)
        y = module(x)
    except Exception:  # the front door understands it, or says why not
        return None
    finally:
        for layer in swapped:
            del layer.__dict__["forward"]
    if not isinstance(y, _Symbol):
        return None
    require_finite(module)
    graph = Graph(tuple(builder.nodes.values()), y.name).pruned()
    try:
        for node in graph.activations:
            activations.sector(node.resolve(module), node.shape[0])
            activations.mixed(node.resolve(module), node.shape)
    except LdltError:
        return None  # the tracer says it with the name of the node
    check_graph(module, graph)
    return graph
