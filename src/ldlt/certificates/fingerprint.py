"""A fingerprint of a stored network: SHA-256 over its graph and the exact bytes of its tensors.

The text that is hashed is the same on every platform: names and numbers are written out with their lengths, floats in
hexadecimal, tensors as little-endian bytes in row-major order. Tensors come in the order of their names, with dtype and
shape; every parameter and buffer of the module counts, whether or not the graph reads it. So one changed bit, name,
shape, type or operation changes the fingerprint, and nothing else does: not the device, the memory layout, the mode of
training or, in the graph that :func:`traced` gives, ``requires_grad``.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ldlt.errors import GraphError
from ldlt.graph import BATCH, Activation, Affine, Attr, Convolution, Graph, Input, Ref, Wire
from ldlt.graph.trace import trace

__all__ = ["fingerprint", "traced"]

_IGNORED = {"training", "inplace"}  # they do not change the function


def fingerprint(graph: Graph, module: nn.Module) -> str:
    """SHA-256 in hexadecimal, 64 characters.

    Args:
        graph: What :func:`ldlt.graph.trace.trace` returned for the module.
        module: The network.

    Raises:
        GraphError: A part of the network that has no canonical form.
    """
    digest, put = _hash()
    put("ldlt network", 2, graph.output, len(graph.nodes))
    for node in graph.nodes:
        put(type(node).__name__, node.name, node.shape, node.parents)
        if isinstance(node, Affine):
            put(node.weight, node.bias)
            if isinstance(node, Convolution):
                spec: Any = node.spec
                put(node.kernel, type(spec).__name__, dataclasses.astuple(spec))
        elif isinstance(node, Wire):
            put(node.role, node.scales)
            if node.role != "order":  # a reshape is fixed by its shape; how it is written does not matter
                put(node.target, node.args, node.kwargs, node.select)
        elif isinstance(node, Activation):
            _put_activation(put, node, module)
        elif not isinstance(node, Input):
            raise GraphError(f"node '{node.name}' has no canonical form")
    for path, constant in sorted(graph.constants.items()):
        put(path, constant.target, constant.args, constant.kwargs, constant.select)
        if constant.value is not None:
            put(str(constant.value.dtype), tuple(constant.value.shape), _bytes(path, constant.value))
    _put_tensors(put, module)
    return digest.hexdigest()


def traced(module: nn.Module, input_shape: Sequence[int]) -> Graph:
    """The graph that certificates are about, in which frozen parameters are like others."""
    frozen = [p for p in module.parameters() if not p.requires_grad and p.is_floating_point() and not p.is_inference()]
    try:
        for p in frozen:
            p.requires_grad_(True)
        return trace(module, tuple(input_shape))
    finally:
        for p in frozen:
            p.requires_grad_(False)


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
    if isinstance(item, Ref):
        return f"parent {item.index}"
    if isinstance(item, Attr):
        return f"tensor{' of a batch' * item.spread} " + _text(item.path)
    if item is BATCH:
        return "batch"
    if isinstance(item, (torch.dtype, torch.layout, torch.memory_format, enum.Enum)):
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
