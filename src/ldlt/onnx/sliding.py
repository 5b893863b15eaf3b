"""Convolution and average pooling: operators that move a window, as matrices."""

from __future__ import annotations

import math
import operator

import torch
from torch import nn

from ldlt.onnx.node import Node, Value
from ldlt.onnx.program import Slot
from ldlt.onnx.windows import Axis, average, same_axis, unroll

__all__ = ["average_pool", "conv", "global_average_pool", "max_pool"]

_MANY = 2**31


def _axes(node: Node, spatial: tuple[int, ...], kernel: list[int]) -> list[Axis]:
    """How the window moves, from the attributes that convolution and pooling share."""
    rank = len(spatial)
    strides, dilations = node.integers("strides") or [1] * rank, node.integers("dilations") or [1] * rank
    pads, mode = node.integers("pads") or [0] * (2 * rank), node.text("auto_pad", "NOTSET")
    if not len(strides) == len(dilations) == len(kernel) == rank or len(pads) != 2 * rank:
        raise node.refuse(f"kernel_shape, strides, dilations and pads do not fit {rank} axes")
    if min(*strides, *dilations, *kernel) < 1 or min(pads) < 0 or max(*strides, *dilations, *kernel, *pads) >= _MANY:
        raise node.refuse("kernel_shape, strides, dilations or pads are impossible")
    if mode not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER") or (mode != "NOTSET" and any(pads)):
        raise node.refuse("auto_pad is not known, or given beside pads")
    found = []
    for i, size in enumerate(spatial):
        step, spread, width = strides[i], dilations[i], kernel[i]
        if mode.startswith("SAME"):
            out, before, total = same_axis(size, width, step, spread, mode == "SAME_UPPER")
            if total < -1:  # some readers crop the input on both sides, others only behind
                raise node.refuse("auto_pad has no agreed meaning for a stride that leaves entries out; use pads")
        else:
            before = pads[i]
            out = (size + before + pads[rank + i] - (width - 1) * spread - 1) // step + 1
        if out < 1:
            raise node.refuse(f"the window is larger than its input of {size}")
        found.append(Axis(size, out, width, step, before, spread))
    return found


def conv(node: Node) -> list[Value]:
    """A convolution as a dense layer on the flattened sample."""
    source, weight = node.data(0), node.weight(1)
    rank, groups = len(source.shape) - 1, node.integer("group", 1)
    if rank not in (1, 2) or weight.ndim != rank + 2:
        raise node.refuse(f"convolutions over one or two axes are understood, not {source.shape} per sample")
    kernel = node.integers("kernel_shape")
    if kernel not in (None, list(weight.shape[2:])):
        raise node.refuse("kernel_shape is not the shape of the weight")
    channels, *spatial = source.shape
    rows, columns = weight.shape[:2]
    if groups < 1 or min(weight.shape) < 1 or columns * groups != channels or rows % groups:
        raise node.refuse(f"a weight of shape {tuple(weight.shape)} does not fit {channels} channels, {groups} groups")
    axes = _axes(node, tuple(spatial), list(weight.shape[2:]))
    positions = math.prod(a.out for a in axes)
    _unrolled(node, rows * positions, source.features)
    bias = node.weight(2) if node.constant(2) is not None else None
    if bias is not None and bias.shape != (rows,):
        raise node.refuse(f"a bias of shape {tuple(bias.shape)} does not fit {rows} channels")
    matrix = unroll(weight, groups, axes)
    spread = None if bias is None else bias.repeat_interleave(positions)
    flat = node.build.reshape(node.label, source, (source.features,))
    product = node.build.linear(node.label, flat, matrix, spread)
    return [node.build.reshape(node.label, product, (rows, *(a.out for a in axes)))]


def _unrolled(node: Node, rows: int, columns: int) -> None:
    limits = node.build.limits
    if rows > limits.features or rows * columns > limits.unrolled:
        raise node.refuse(
            f"as a matrix it has {rows} x {columns} entries, more than {limits.unrolled}; use a smaller input or a "
            "larger stride, or raise the limit 'unrolled'"
        )


def average_pool(node: Node) -> list[Value]:
    """Average pooling as a constant matrix on each channel."""
    source, kernel = node.data(0), node.integers("kernel_shape")
    rank = len(source.shape) - 1
    if rank not in (1, 2) or kernel is None:
        raise node.refuse(f"pooling over one or two axes is understood, not {source.shape} per sample")
    axes = _axes(node, source.shape[1:], kernel)
    if node.flag("ceil_mode"):
        pads = node.integers("pads") or [0] * (2 * rank)
        for i, a in enumerate(axes):
            if (a.size + a.before + pads[rank + i] - (a.kernel - 1) * a.dilation - 1) % a.stride:
                raise node.refuse("ceil_mode lets a window stick out; use padding instead")
    size, out = math.prod(source.shape[1:]), math.prod(a.out for a in axes)
    _unrolled(node, out, size)
    matrix = average(axes, node.flag("count_include_pad"))
    if not bool(matrix.isfinite().all()):
        raise node.refuse("a window sees nothing but padding")
    build, what = node.build, node.label
    flat = build.reshape(what, source, (source.shape[0], size))
    held = build.hold(what, matrix.T.to(build.wide))
    pooled = node.apply(flat, (source.shape[0], out), operator.matmul, Slot(flat.slot), held)
    return [build.reshape(what, pooled, (source.shape[0], *(a.out for a in axes)))]


def max_pool(node: Node) -> list[Value]:
    """The maximum over windows that do not overlap: the first entries of a sort."""
    source, kernel = node.data(0), node.integers("kernel_shape")
    rank = len(source.shape) - 1
    if rank not in (1, 2) or kernel is None:
        raise node.refuse(f"pooling over one or two axes is understood, not {source.shape} per sample")
    node.ignore("storage_order")  # of the indices, which are not computed here
    axes = _axes(node, source.shape[1:], kernel)
    node.flag("ceil_mode")  # without a rest there is nothing to round
    if any(a.stride != a.kernel or a.before or a.dilation != 1 or a.out * a.kernel != a.size for a in axes):
        raise node.refuse(
            "takes a maximum over windows that overlap or do not divide the input; use disjoint windows, or use "
            "AveragePool or a stride"
        )
    module = (nn.MaxPool1d if rank == 1 else nn.MaxPool2d)(tuple(kernel))
    return [node.build.layer(node.label, source, (source.shape[0], *(a.out for a in axes)), module)]


def global_average_pool(node: Node) -> list[Value]:
    """The mean of each channel."""
    source = node.data(0)
    if len(source.shape) < 2:
        raise node.refuse("there is no axis to average over")
    shape = (source.shape[0], *(1,) * (len(source.shape) - 1))
    axes = tuple(range(2, len(source.shape) + 1))
    return [node.apply(source, shape, torch.mean, Slot(source.slot), axes, True)]
