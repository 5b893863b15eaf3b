"""A fingerprint of a stored network: SHA-256 over its graph and the exact bytes of its tensors.

The text that is hashed is the same on every platform: names and numbers are written out with their lengths, floats in
hexadecimal, tensors as little-endian bytes in row-major order. Tensors come in the order of their names, with dtype and
shape; every parameter and buffer of the module counts, whether or not the graph reads it. So one changed bit, name,
shape, type or operation changes the fingerprint, and nothing else does: not the device, the memory layout, the mode of
training or ``requires_grad``.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ldlt.errors import GraphError
from ldlt.graph import BATCH, Activation, Affine, Attr, Convolution, Graph, Input, Ref, Wire

__all__ = ["fingerprint", "tensor_fingerprint"]

_IGNORED = {"training", "inplace"}  # they do not change the function


def fingerprint(graph: Graph, module: nn.Module) -> str:
    """SHA-256 in hexadecimal, 64 characters.

    Args:
        graph: What :func:`ldlt.trace.trace` returned for the module.
        module: The network.

    Raises:
        GraphError: A part of the network that has no canonical form.
    """
    digest, put = _hash()
    put("ldlt network", 1, graph.output, len(graph.nodes))
    for node in graph.nodes:
        put(type(node).__name__, node.name, node.shape, node.parents)
        if isinstance(node, Affine):
            put(node.weight, node.bias)
            if isinstance(node, Convolution):
                put(node.kernel, type(node.spec).__name__, dataclasses.astuple(node.spec))
        elif isinstance(node, Wire):
            put(node.kind, node.role, node.select, node.scales)
            if node.role != "order":  # a reshape is fixed by its shape; how it is written does not matter
                put(_name(node.target), node.args, node.kwargs)
        elif isinstance(node, Activation):
            _put_activation(put, node, module)
        elif not isinstance(node, Input):
            raise GraphError(f"node '{node.name}' has no canonical form")
    _put_tensors(put, module)
    return digest.hexdigest()


def tensor_fingerprint(module: nn.Module) -> str:
    """As :func:`fingerprint`, for a module that is not turned into a graph: its tensors only."""
    digest, put = _hash()
    put("ldlt tensors", 1)
    _put_tensors(put, module)
    return digest.hexdigest()


def _hash() -> tuple[Any, Callable[..., None]]:
    digest = hashlib.sha256()

    def put(*items: Any) -> None:
        for item in items:
            data = item if isinstance(item, bytes) else _text(item).encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)

    return digest, put


def _put_tensors(put: Callable[..., None], module: nn.Module) -> None:
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    put(len(tensors))
    for name in sorted(tensors):
        put(name, str(tensors[name].dtype), tuple(tensors[name].shape), _bytes(name, tensors[name]))


def _put_activation(put: Any, node: Activation, module: nn.Module) -> None:
    """Class, path, arguments and tensors of an activation."""
    activation = node.resolve(module)
    put(node.path, type(activation).__module__, type(activation).__qualname__)
    options = {k: v for k, v in vars(activation).items() if not k.startswith("_") and k not in _IGNORED}
    put(tuple(sorted(options.items())))
    if node.path is None:  # not a part of the module, whose tensors are hashed below
        for name, tensor in sorted(activation.state_dict().items()):
            put(name, str(tensor.dtype), tuple(tensor.shape), _bytes(name, tensor))


def _name(target: Any) -> Any:
    return target if target is None or isinstance(target, str) else getattr(target, "__name__", None) or repr(target)


def _text(item: Any) -> str:
    """An unambiguous form of plain data."""
    if item is None or isinstance(item, bool):
        return f"{item}"
    if isinstance(item, int):
        return f"int {int(item)}"
    if isinstance(item, float):
        return f"float {item.hex()}"
    if isinstance(item, str):
        return f"str {len(item)} {item}"
    if isinstance(item, (tuple, list)):
        parts = [_text(i) for i in item]
        return f"tuple {len(parts)} " + " ".join(f"{len(p)}:{p}" for p in parts)
    if isinstance(item, slice):
        return "slice " + _text((item.start, item.stop, item.step))
    if isinstance(item, Ref):
        return f"parent {item.index}"
    if isinstance(item, Attr):
        return "tensor " + _text(item.path)
    if item is BATCH:
        return "batch"
    if item is Ellipsis:
        return "ellipsis"
    if isinstance(item, (torch.dtype, enum.Enum)):
        return f"name {item}"
    raise GraphError(f"{type(item).__name__} has no canonical form")


def _bytes(name: str, tensor: Tensor) -> bytes:
    """The bytes of a tensor, little-endian, row by row."""
    if tensor.is_meta or tensor.is_complex() or tensor.is_quantized or tensor.layout != torch.strided:
        raise GraphError(f"'{name}' is not an ordinary tensor of real numbers")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw: np.ndarray = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    if sys.byteorder == "big" and tensor.element_size() > 1:
        raw = raw.reshape(-1, tensor.element_size())[:, ::-1]
    return raw.tobytes()
