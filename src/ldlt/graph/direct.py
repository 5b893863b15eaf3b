"""Graphs of plain compositions without ``torch.export``, whose first call in a process takes seconds.

Layers of ``torch.nn`` in ``Sequential`` and the modules of ``ldlt.nn`` are run with a symbol in place of the input:
each layer adds the node that :mod:`ldlt.graph.trace` would make, and the symbols can be added to each other. Whatever
else is in a module leaves it to :func:`~ldlt.graph.trace.trace`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, cast

import torch
from torch import nn

from ldlt import activations
from ldlt.errors import LdltError
from ldlt.graph.builder import Builder
from ldlt.graph.checks import check_graph, hooks_of, require_ordinary
from ldlt.graph.convolution import Spec
from ldlt.graph.nodes import Activation, Affine, Attr, Convolution, Graph, Input, Node, Ref, Wire

__all__ = ["known_graph"]

_CONTAINERS = (nn.Sequential, nn.ModuleList)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SAME = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class _UnknownError(Exception):
    """Something that only :func:`~ldlt.graph.trace.trace` understands."""


def _require(known: bool) -> None:
    if not known:
        raise _UnknownError


class _Symbol:
    """A value of the graph, in place of a batch."""

    def __init__(self, builder: Builder, node: Node | str) -> None:
        self.builder, self.name = builder, node if isinstance(node, str) else builder.put(node)
        self.shape = builder.nodes[self.name].shape

    def __add__(self, other: object) -> _Symbol:
        _require(isinstance(other, _Symbol) and other.shape == self.shape)
        parents, args = (self.name, cast(_Symbol, other).name), (Ref(0), Ref(1))
        name = self.builder.unique("add")
        both = Wire(name, self.shape, parents, "aten.add.Tensor", args, role="sum", scales=(1.0, 1.0))
        return _Symbol(self.builder, both)


def _layer(builder: Builder, path: str, layer: Any, x: _Symbol) -> _Symbol:
    """What a layer makes of a value."""
    kind, name = type(layer), path.replace(".", "_")
    name = f"_{name}" if name[:1].isdigit() else name
    _require(isinstance(x, _Symbol) and bool(name) and not getattr(layer, "inplace", False))
    if kind in _SAME:
        return x
    if kind is nn.Flatten:
        _require((layer.start_dim, layer.end_dim) == (1, -1) and len(x.shape) > 1)
        return _Symbol(builder, builder.view(name, x.name, (builder.nodes[x.name].features,)))
    if kind is nn.Linear:
        _require(x.shape == (layer.in_features,))
        tensors = _tensors(path, layer, layer.out_features)
        return _Symbol(builder, Affine(name, (layer.out_features,), (x.name,), *tensors))
    if kind in _CONVOLUTIONS:
        spec, kernel, outputs = _convolution(layer, x)
        tensors = _tensors(path, layer, layer.out_channels)
        return _Symbol(builder, Convolution(name, outputs, (x.name,), *tensors, spec=spec, kernel=kernel))
    if "ldlt_standardise" in kind.__dict__:
        args = (Ref(0), Attr(f"{path}.mean"))
        names = builder.unique("sub"), builder.unique("div")
        builder.put(Wire(names[0], x.shape, (x.name,), "aten.sub.Tensor", args, role="sum", scales=(1.0,)))
        scaled = Wire(names[1], x.shape, names[:1], "aten.div.Tensor", (Ref(0), Attr(f"{path}.scale")))
        return _Symbol(builder, scaled)
    return _Symbol(builder, Activation(name, x.shape, (x.name,), path=path))


def _convolution(layer: Any, x: _Symbol) -> tuple[Spec, tuple[int, ...], tuple[int, ...]]:
    """Its arguments, its kernel, and the shape of what it makes; only those that are free maps."""
    spec, kernel = Spec.of(layer), tuple(layer.weight.shape[2:])
    circular = spec.mode == "circular" and all(n > 0 for n in spec.border)
    _require((circular or spec.mode == "zeros") and not isinstance(spec.padding, str) and len(x.shape) == spec.dims + 1)
    padding = (0,) * spec.dims if circular else spec.padding
    spec = dataclasses.replace(spec, padding=padding, output_padding=spec.output_padding if spec.transposed else ())
    tried = spec.run(torch.empty(1, *x.shape, device="meta"), torch.empty(layer.weight.shape, device="meta"))
    outputs = tuple(tried.shape[1:])
    _require(spec.cells(kernel, x.shape, outputs) is not None)
    return spec, kernel, outputs


def _tensors(path: str, layer: Any, outputs: int) -> tuple[str, str | None]:
    """Paths of weight and bias of a layer; its weight must be free."""
    _require(layer.weight.requires_grad and 0 not in layer.weight.shape)
    _require(layer.bias is None or layer.bias.shape == (outputs,))
    return f"{path}.weight", None if layer.bias is None else f"{path}.bias"


def _is_leaf(layer: nn.Module) -> bool:
    """Whether a module is a layer; refuses what is neither that nor known to be made of layers alone."""
    kind = type(layer)
    _require("forward" not in layer.__dict__ and not any(t in layer.__dict__ for t in layer._parameters))
    if kind in (nn.Linear, nn.Flatten, *_SAME, *_CONVOLUTIONS) or "ldlt_standardise" in kind.__dict__:
        return True
    if kind in _CONTAINERS or "ldlt_composed" in kind.__dict__:
        return False
    _require(kind in activations.TABLE and activations.is_activation(layer))
    return True


def known_graph(module: nn.Module, shape: tuple[int, ...]) -> Graph | None:
    """The graph of a composition of plain layers, as :func:`~ldlt.graph.trace.trace` gives it; None for anything else.

    Args:
        module: The module.
        shape: Shape of one sample.

    Raises:
        GraphError: A parameter is not finite, or no ordinary tensor.
    """
    require_ordinary(module)
    tensors = [t for m in module.modules() for t in m._parameters.values() if t is not None]
    shared, mixed = len({id(t) for t in tensors}) != len(tensors), len({(t.dtype, t.device) for t in tensors}) != 1
    if hooks_of(module) or shared or mixed:
        return None
    builder, swapped = Builder(module), []
    try:
        (name,) = inspect.signature(module.forward).parameters
        x = _Symbol(builder, Input(name, shape, ()))
        for path, layer in [(p, m) for p, m in module.named_modules() if _is_leaf(m)]:
            layer.__dict__["forward"] = functools.partial(_layer, builder, path, layer)
            swapped.append(layer)
        y = module(x)
        _require(isinstance(y, _Symbol))
    except Exception:  # the front door understands it, or says why not
        return None
    finally:
        for layer in swapped:
            del layer.__dict__["forward"]
    graph = Graph(tuple(builder.nodes.values()), y.name).pruned()
    try:
        for node in graph.activations:
            builder.suit(node)
    except LdltError:
        return None
    check_graph(module, graph)
    return graph
