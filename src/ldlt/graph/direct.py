"""Graphs of plain compositions without ``torch.export``, whose first call in a process takes seconds.

Layers of ``torch.nn`` in ``Sequential`` and the modules of ``ldlt.nn`` are run with a symbol in place of the input:
each layer adds the node that :mod:`ldlt.graph.trace` would make, and the symbols can be added to each other. Whatever
else is in a module leaves it to :func:`~ldlt.graph.trace.trace`.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

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


class _Symbol:
    """A value of the graph, in place of a batch."""

    def __init__(self, builder: _Direct, name: str) -> None:
        self.builder, self.name = builder, name

    @property
    def shape(self) -> tuple[int, ...]:
        """Feature shape."""
        return self.builder.nodes[self.name].shape

    def __add__(self, other: object) -> _Symbol:
        if not isinstance(other, _Symbol) or other.shape != self.shape:
            raise _UnknownError
        parents, args = (self.name, other.name), (Ref(0), Ref(1))
        name = self.builder.unique("add")
        return self.builder.symbol(
            Wire(name, self.shape, parents, "aten.add.Tensor", args, role="sum", scales=(1.0, 1.0))
        )


class _Direct(Builder):
    """Adds the nodes of layers."""

    def symbol(self, node: Node) -> _Symbol:
        """Add a value; names that meet are left to the tracer."""
        return _Symbol(self, self.put(node))

    def layer(self, path: str, layer: Any, x: _Symbol) -> _Symbol:
        """What a layer makes of a value."""
        kind, name = type(layer), path.replace(".", "_")
        name = f"_{name}" if name[:1].isdigit() else name
        if not isinstance(x, _Symbol) or not name or getattr(layer, "inplace", False):
            raise _UnknownError
        if kind in _SAME:
            return x
        if kind is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1) and len(x.shape) > 1:
            return _Symbol(self, self.view(name, x.name, (self.nodes[x.name].features,)))
        if kind is nn.Linear and x.shape == (layer.in_features,):
            return self.symbol(Affine(name, (layer.out_features,), (x.name,), *_tensors(path, layer)))
        if kind in _CONVOLUTIONS:
            return self.symbol(self._convolution(name, path, layer, x))
        if "ldlt_standardise" in kind.__dict__:
            args = (Ref(0), Attr(f"{path}.mean"))
            names = self.unique("sub"), self.unique("div")
            self.put(Wire(names[0], x.shape, (x.name,), "aten.sub.Tensor", args, role="sum", scales=(1.0,)))
            return self.symbol(Wire(names[1], x.shape, names[:1], "aten.div.Tensor", (Ref(0), Attr(f"{path}.scale"))))
        if kind in (nn.Linear, nn.Flatten):
            raise _UnknownError
        return self.symbol(Activation(name, x.shape, (x.name,), path=path))

    def _convolution(self, name: str, path: str, layer: Any, x: _Symbol) -> Convolution:
        spec, kernel = Spec.of(layer), tuple(layer.weight.shape[2:])
        circular = spec.mode == "circular" and all(n > 0 for n in spec.border)
        if isinstance(spec.padding, str) or not (circular or spec.mode == "zeros") or len(x.shape) != spec.dims + 1:
            raise _UnknownError
        padding = (0,) * spec.dims if circular else spec.padding
        outputs_padding = spec.output_padding if spec.transposed else ()
        spec = dataclasses.replace(spec, padding=padding, output_padding=outputs_padding)
        tried = spec.run(torch.empty(1, *x.shape, device="meta"), torch.empty(layer.weight.shape, device="meta"))
        outputs = tuple(tried.shape[1:])
        if spec.cells(kernel, x.shape, outputs) is None:
            raise _UnknownError
        return Convolution(name, outputs, (x.name,), *_tensors(path, layer), spec=spec, kernel=kernel)


def _tensors(path: str, layer: Any) -> tuple[str, str | None]:
    """Paths of weight and bias of a layer; its weight must be free."""
    outputs = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    plain = layer.bias is None or layer.bias.shape == (outputs,)
    if not layer.weight.requires_grad or 0 in layer.weight.shape or not plain:
        raise _UnknownError
    return f"{path}.weight", None if layer.bias is None else f"{path}.bias"


def _is_leaf(layer: nn.Module) -> bool:
    """Whether a module is a layer; refuses what is neither that nor known to be made of layers alone."""
    kind = type(layer)
    if "forward" in layer.__dict__ or any(t in layer.__dict__ for t in layer._parameters):
        raise _UnknownError
    if kind in (nn.Linear, nn.Flatten, *_SAME, *_CONVOLUTIONS) or "ldlt_standardise" in kind.__dict__:
        return True
    if kind in _CONTAINERS or "ldlt_composed" in kind.__dict__:
        return False
    if kind in activations.TABLE and activations.is_activation(layer):
        return True
    raise _UnknownError


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
    try:
        names = [*inspect.signature(module.forward).parameters]
    except ValueError:
        return None
    shared = len({id(t) for t in tensors}) != len(tensors) or any(type(t) is not nn.Parameter for t in tensors)
    mixed = len({t.dtype for t in tensors}) != 1 or len({t.device for t in tensors}) != 1
    if hooks_of(module) or shared or mixed or len(names) != 1:
        return None
    builder, swapped = _Direct(module), []
    x = builder.symbol(Input(names[0], shape, ()))
    try:
        for path, layer in [(p, m) for p, m in module.named_modules() if _is_leaf(m)]:
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
    graph = Graph(tuple(builder.nodes.values()), y.name).pruned()
    try:
        for node in graph.activations:
            builder.suit(node)
    except LdltError:
        return None
    check_graph(module, graph)
    return graph
