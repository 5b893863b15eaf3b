"""Nodes that read constants only: exporters leave transposed weights and computed shapes behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ldlt.onnx.file import BATCH, decode
from ldlt.onnx.node import Node, Value, broadcast

__all__ = ["KINDS", "fold", "gather_indices", "new_axes", "shape_of"]

KINDS = {1: torch.float32, 6: torch.int64, 7: torch.int64, 11: torch.float64}
"""Element types that a Cast may aim at, by protobuf number."""


def fold(node: Node) -> Value:
    """The value of a node without inputs that depend on the network's input."""
    rule = _FOLD.get(node.raw.operator)
    if rule is None:
        raise node.refuse("all its inputs are constants; fold constants before saving the file")
    return rule(node)


def _new(node: Node, shape: Sequence[int]) -> None:
    node.build.spend(node.label, math.prod(shape))


def _first(node: Node) -> Tensor:
    value = node.constant(0)
    assert value is not None  # the number of inputs was checked
    return value


def _constant(node: Node) -> Tensor:
    given = [
        name
        for name in ("value", "value_float", "value_floats", "value_int", "value_ints")
        if name in node.raw.attributes
    ]
    if len(given) != 1:
        raise node.refuse("exactly one of value, value_float(s) and value_int(s) is expected")
    name = given[0]
    value = node.attribute(name, object)
    if name == "value":
        if not hasattr(value, "raw_data"):
            raise node.refuse("the attribute 'value' must be a tensor")
        _new(node, value.dims)
        return decode(value)
    dtype = torch.float32 if "float" in name else torch.int64
    kind = float if dtype == torch.float32 else int
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(v, kind) for v in items) or isinstance(value, list) != name.endswith("s") or BATCH in items:
        raise node.refuse(f"the attribute '{name}' has a wrong type")
    _new(node, (len(items),))
    return torch.tensor(value, dtype=dtype)


def _identity(node: Node) -> Tensor:
    return _first(node)


def _cast(node: Node) -> Tensor:
    node.ignore("saturate", "round_mode")
    value, to = _first(node), node.integer("to", 0)
    if to not in KINDS or value.dtype == torch.bool:
        raise node.refuse("only changes between 32- and 64-bit numbers are understood")
    dtype = KINDS[to]
    if value.is_floating_point() and dtype == torch.int64:
        raise node.refuse("rounding to whole numbers is not understood; fold constants before saving the file")
    if dtype != torch.int64:
        _no_batch(node, value)
    _new(node, value.shape)
    return value.to(dtype)


def _no_batch(node: Node, *values: Tensor) -> None:
    if any(v.dtype == torch.int64 and bool((v == BATCH).any()) for v in values):
        raise node.refuse("computes with the batch size; every sample must be treated alike")


def _transpose(node: Node) -> Tensor:
    value = _first(node)
    order = node.integers("perm")
    order = list(range(value.ndim))[::-1] if order is None else order
    if sorted(order) != list(range(value.ndim)):
        raise node.refuse(f"perm {order} is not an order of {value.ndim} axes")
    return value.permute(order)


def _reshape(node: Node) -> Tensor:
    value, shape = _first(node), node.integers("shape", 1)
    zero = node.flag("allowzero")
    if shape is None or not value.numel():
        raise node.refuse("the new shape or the values are missing")
    if not zero:
        if any(s == 0 and i >= value.ndim for i, s in enumerate(shape)):
            raise node.refuse(f"shape {shape} refers to an axis that does not exist")
        shape = [value.shape[i] if s == 0 else s for i, s in enumerate(shape)]
    known = math.prod(s for s in shape if s != -1)
    if len(shape) > 8 or min(shape, default=0) < -1 or shape.count(-1) > 1 or (-1 in shape and known == 0):
        raise node.refuse(f"impossible shape {shape[:9]}")
    if value.numel() != known if -1 not in shape else value.numel() % known:
        raise node.refuse(f"{value.numel()} entries do not fit the shape {shape}")
    return value.reshape(shape)


def new_axes(node: Node, shape: Sequence[int]) -> list[int]:
    """The shape after ``Unsqueeze``."""
    axes = node.integers("axes", 1)
    if axes is None or len(shape) + len(axes) > 8:
        raise node.refuse("the new axes are missing or too many")
    found = node.axes(axes, len(shape) + len(axes))
    rest = iter(shape)
    return [1 if i in found else next(rest) for i in range(len(shape) + len(axes))]


def _unsqueeze(node: Node) -> Tensor:
    value = _first(node)
    return value.reshape(new_axes(node, value.shape))


def _squeeze(node: Node) -> Tensor:
    value, axes = _first(node), node.integers("axes", 1)
    axes = [i for i, s in enumerate(value.shape) if s == 1] if axes is None else node.axes(axes, value.ndim)
    if any(value.shape[a] != 1 for a in axes):
        raise node.refuse(f"an axis of shape {tuple(value.shape)} is not of size 1")
    return value.reshape([s for i, s in enumerate(value.shape) if i not in axes])


def _concat(node: Node) -> Tensor:
    values = [v for v in node.inputs if isinstance(v, Tensor)]
    first = values[0]
    axis = node.axis(node.integer("axis", 0), first.ndim) if first.ndim else None
    if axis is None or "axis" not in node.raw.attributes:
        raise node.refuse("needs an axis")
    for v in values:
        same = v.dtype == first.dtype and v.ndim == first.ndim
        if not same or any(a != b for i, (a, b) in enumerate(zip(v.shape, first.shape, strict=True)) if i != axis):
            raise node.refuse("the shapes or types of its inputs do not fit")
    _new(node, (sum(v.numel() for v in values),))
    return torch.cat(values, axis)


def _slice(node: Node) -> Tensor:
    value = _first(node)
    ranges = node.ranges(value.shape)
    _new(node, value.shape)
    for axis, taken in ranges.items():
        value = value.index_select(axis, torch.tensor(list(taken), dtype=torch.int64))
    return value


def gather_indices(node: Node, size: int) -> Tensor:
    """The indices of ``Gather``, counted from the front."""
    index = node.indices(1)
    if bool(((index < -size) | (index >= size)).any()):
        raise node.refuse(f"an index is outside of an axis of size {size}")
    return torch.where(index < 0, index + size, index)


def _gather(node: Node) -> Tensor:
    value = _first(node)
    if not value.ndim:
        raise node.refuse("its input has no axis")
    axis = node.axis(node.integer("axis", 0), value.ndim)
    index = gather_indices(node, value.shape[axis])
    shape = (*value.shape[:axis], *index.shape, *value.shape[axis + 1 :])
    _new(node, shape)
    return value.index_select(axis, index.reshape(-1)).reshape(shape)


def shape_of(node: Node, sizes: Sequence[int]) -> Tensor:
    """``Shape``, of a value with these sizes."""
    first, last, rank = node.integer("start", 0), node.integer("end", len(sizes)), len(sizes)
    first, last = (max(0, min(rank, v + rank if v < 0 else v)) for v in (first, last))
    return torch.tensor(list(sizes)[first:last], dtype=torch.int64)


def _arithmetic(rule: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Node], Tensor]:
    def run(node: Node) -> Tensor:
        left, right = node.weight(0), node.weight(1)
        shape = broadcast(left.shape, right.shape)
        if shape is None:
            raise node.refuse(f"shapes {tuple(left.shape)} and {tuple(right.shape)} do not fit")
        _new(node, shape)
        return rule(left, right)

    return run


def _negate(node: Node) -> Tensor:
    value = node.weight(0)
    _new(node, value.shape)
    return -value


_FOLD: dict[str, Callable[[Node], Tensor]] = {
    "Add": _arithmetic(torch.add),
    "Cast": _cast,
    "Concat": _concat,
    "Constant": _constant,
    "Div": _arithmetic(torch.div),
    "Gather": _gather,
    "Identity": _identity,
    "Mul": _arithmetic(torch.mul),
    "Neg": _negate,
    "Reshape": _reshape,
    "Shape": lambda node: shape_of(node, _first(node).shape),
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Sub": _arithmetic(torch.sub),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
