"""Operators that move, drop or repeat entries of a sample."""

from __future__ import annotations

import math
import operator
from dataclasses import replace

import torch

from ldlt.onnx.constants import KINDS, gather_indices, new_axes, shape_of
from ldlt.onnx.file import BATCH
from ldlt.onnx.node import Node, Value
from ldlt.onnx.program import Data, Slot

__all__ = [
    "cast",
    "concat",
    "dropout",
    "flatten",
    "gather",
    "identity",
    "reshape",
    "shape",
    "slice_",
    "split",
    "squeeze",
    "transpose",
    "unsqueeze",
]


def identity(node: Node) -> list[Value]:
    """The same value."""
    return [node.data(0)]


def dropout(node: Node) -> list[Value]:
    """The same value: dropout is off in inference."""
    node.ignore("ratio", "seed")
    mode = node.constant(2)
    if mode is not None and bool(mode.any()):
        raise node.refuse("is random; export the model in evaluation mode")
    return [node.data(0)]


def cast(node: Node) -> list[Value]:
    """The same value under another type."""
    node.ignore("saturate", "round_mode")
    to = KINDS.get(node.integer("to", 0))
    if to is None or not to.is_floating_point:
        raise node.refuse("rounds to another type; only FLOAT and DOUBLE leave values as they are")
    return [replace(node.data(0), dtype=to)]


def concat(node: Node) -> list[Value]:
    """Values side by side."""
    if not all(isinstance(v, Data) for v in node.inputs):
        raise node.refuse("joins a constant to the data; put it into the bias of the layer behind")
    parts = [node.data(i) for i in range(len(node.inputs))]
    if "axis" not in node.raw.attributes:
        raise node.refuse("needs an axis")
    first = parts[0]
    axis = node.feature_axis(node.integer("axis", 1), first) - 1
    for part in parts:
        rest = [s for i, s in enumerate(part.shape) if i != axis]
        if len(part.shape) != len(first.shape) or rest != [s for i, s in enumerate(first.shape) if i != axis]:
            raise node.refuse(f"shapes {first.shape} and {part.shape} per sample do not fit")
    if len(parts) == 1:
        return [first]
    shape = list(first.shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return [node.apply(first, shape, torch.cat, tuple(Slot(p.slot) for p in parts), axis + 1)]


def flatten(node: Node) -> list[Value]:
    """All entries of a sample in one axis."""
    source = node.data(0)
    axis, rank = node.integer("axis", 1), len(source.shape) + 1
    if not -rank <= axis <= rank:
        raise node.refuse(f"there is no axis {axis} among {rank}")
    axis += rank if axis < 0 else 0
    if axis == 0 or math.prod(source.shape[: axis - 1]) != 1:
        raise node.refuse("joins the batch with other axes; use axis=1")
    return [node.build.reshape(node.label, source, (source.features,))]


def reshape(node: Node) -> list[Value]:
    """Another shape that keeps the batch apart."""
    source, keep_zero = node.data(0), node.flag("allowzero")
    wanted = [int(v) for v in node.indices(1).reshape(-1)]
    mixes = node.refuse(
        f"the shape {['batch' if v == BATCH else v for v in wanted[:9]]} does not keep the batch apart from "
        f"{source.shape} per sample; keep the first axis"
    )
    if not 1 <= len(wanted) <= 8 or wanted.count(-1) > 1:
        raise mixes
    first, *rest = wanted
    if not keep_zero:
        if any(v == 0 and i >= len(source.shape) for i, v in enumerate(rest)):
            raise node.refuse("a 0 in the shape refers to an axis that does not exist")
        rest = [source.shape[i] if v == 0 else v for i, v in enumerate(rest)]
    # A file for batches of 1 says 1; one for batches of a fixed size says that size.
    batch = {BATCH, -1, *([] if keep_zero else [0]), 1 if node.build.batch is None else node.build.batch}
    known = math.prod(v for v in rest if v != -1)
    if first not in batch or known < 1 or min(rest, default=0) < -1:
        raise mixes
    rest = [source.features // known if v == -1 else v for v in rest]
    if math.prod(rest) != source.features:
        raise mixes
    return [node.build.reshape(node.label, source, rest)]


def transpose(node: Node) -> list[Value]:
    """Another order of axes."""
    source = node.data(0)
    rank = len(source.shape) + 1
    order = node.integers("perm")
    order = list(range(rank))[::-1] if order is None else order
    if sorted(order) != list(range(rank)):
        raise node.refuse(f"perm {order[:9]} is not an order of {rank} axes")
    if order[0] != 0:
        raise node.refuse("moves the batch from the first axis")
    return [node.build.permute(node.label, source, [i - 1 for i in order[1:]])]


def squeeze(node: Node) -> list[Value]:
    """Without axes of size 1."""
    source, axes = node.data(0), node.integers("axes", 1)
    if axes is None:
        if node.build.batch == 1:
            raise node.refuse("removes all axes of size 1, the batch among them; name the axes")
        places = [i for i, s in enumerate(source.shape, 1) if s == 1]
    else:
        places = [node.feature_axis(a, source) for a in node.axes(axes, len(source.shape) + 1)]
    if any(source.shape[i - 1] != 1 for i in places):
        raise node.refuse(f"an axis of {source.shape} per sample is not of size 1")
    return [node.build.reshape(node.label, source, [s for i, s in enumerate(source.shape, 1) if i not in places])]


def unsqueeze(node: Node) -> list[Value]:
    """With more axes of size 1."""
    source = node.data(0)
    shape = new_axes(node, (BATCH, *source.shape))
    if shape[0] != BATCH:
        raise node.refuse("moves the batch from the first axis")
    return [node.build.reshape(node.label, source, shape[1:])]


def shape(node: Node) -> list[Value]:
    """The sizes, with a mark in the place of the batch."""
    return [shape_of(node, (BATCH, *node.data(0).shape))]


def _part(node: Node, source: Data, axis: int, taken: range) -> Data:
    """Some entries along an axis (counted with the batch)."""
    shape = list(source.shape)
    shape[axis - 1] = len(taken)
    if not taken:
        raise node.refuse(f"the result, of shape {tuple(shape)} per sample, has no entries")
    if taken == range(source.shape[axis - 1]):
        return source
    # an end beyond the axis, or a step of any size for one entry, is allowed in a file but not in torch
    step = abs(taken.step) if len(taken) > 1 else 1
    index = (*(slice(None),) * axis, slice(min(taken), max(taken) + 1, step))
    found = node.apply(source, shape, operator.getitem, Slot(source.slot), index)
    return (
        found if taken.step > 0 or len(taken) == 1 else node.apply(found, shape, torch.flip, Slot(found.slot), (axis,))
    )


def slice_(node: Node) -> list[Value]:
    """Ranges of entries."""
    source = node.data(0)
    for axis, taken in node.ranges((None, *source.shape)).items():
        source = _part(node, source, axis, taken)
    return [source]


def split(node: Node) -> list[Value]:
    """Consecutive ranges of entries."""
    source, sizes, parts = node.data(0), node.integers("split", 1), len(node.raw.outputs)
    axis = node.feature_axis(node.integer("axis", 0), source)
    length, count = source.shape[axis - 1], node.integer("num_outputs", parts)
    if sizes is None:
        if count != parts or ("num_outputs" not in node.raw.attributes and length % parts):
            raise node.refuse(f"{length} entries cannot be split into {parts} parts")
        each = -(-length // parts)
        sizes = [each] * (parts - 1) + [length - each * (parts - 1)]
    if len(sizes) != parts or min(sizes) < 1 or sum(sizes) != length:
        raise node.refuse(f"{length} entries cannot be split into parts of {sizes[:9]}")
    found: list[Value] = []
    start = 0
    for size in sizes:
        found.append(_part(node, source, axis, range(start, start + size)))
        start += size
    return found


def gather(node: Node) -> list[Value]:
    """Entries at constant places."""
    source = node.data(0)
    axis = node.feature_axis(node.integer("axis", 0), source)
    index = gather_indices(node, source.shape[axis - 1])
    shape = (*source.shape[: axis - 1], *index.shape, *source.shape[axis:])
    if index.ndim == 0:
        return [node.apply(source, shape, torch.select, Slot(source.slot), axis, int(index))]
    place = (*(slice(None),) * axis, node.build.hold(node.label, index))
    return [node.apply(source, shape, operator.getitem, Slot(source.slot), place)]
