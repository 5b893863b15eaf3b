"""Operators that act entry by entry with bounded slopes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ldlt import activations
from ldlt.onnx.linear import per_sample
from ldlt.onnx.node import Node, Value
from ldlt.onnx.program import Slot

__all__ = [
    "celu",
    "clip",
    "elu",
    "gelu",
    "hard_sigmoid",
    "leaky_relu",
    "plain",
    "prelu",
    "selu",
    "shrink",
    "sigmoid",
    "sort",
    "swish",
]

_SELU_ALPHA, _SELU_GAMMA = 1.6732631921768188, 1.0507010221481323  # defaults of the operator, rounded to float32


def plain(make: Callable[[], nn.Module]) -> Callable[[Node], list[Value]]:
    """An activation without arguments."""
    return lambda node: [node.activation(node.data(0), make())]


def sigmoid(node: Node) -> list[Value]:
    """Sigmoid, remembered as a possible gate."""
    source = node.data(0)
    return [replace(node.activation(source, nn.Sigmoid()), gate_of=source.slot)]


def leaky_relu(node: Node) -> list[Value]:
    """Slope alpha below zero."""
    return [node.activation(node.data(0), nn.LeakyReLU(node.number("alpha", 0.01)))]


def elu(node: Node) -> list[Value]:
    """ELU: alpha (exp x - 1) below zero."""
    return [node.activation(node.data(0), nn.ELU(node.number("alpha", 1.0)))]


def celu(node: Node) -> list[Value]:
    """CELU: alpha (exp(x / alpha) - 1) below zero."""
    alpha = node.number("alpha", 1.0)
    if alpha <= 0:
        raise node.refuse("its slope is bounded for a positive alpha only")
    return [node.activation(node.data(0), nn.CELU(alpha))]


def selu(node: Node) -> list[Value]:
    """SELU: gamma times ELU; the usual constants are one activation."""
    alpha, gamma = node.number("alpha", _SELU_ALPHA), node.number("gamma", _SELU_GAMMA)
    if abs(alpha - _SELU_ALPHA) < 1e-6 and abs(gamma - _SELU_GAMMA) < 1e-6:
        return [node.activation(node.data(0), nn.SELU())]
    return [node.build.scale(node.label, node.activation(node.data(0), nn.ELU(alpha)), gamma)]


def gelu(node: Node) -> list[Value]:
    """GELU: x Φ(x), or its approximation."""
    form = node.text("approximate", "none")
    if form not in ("none", "tanh"):
        raise node.refuse("'approximate' must be 'none' or 'tanh'")
    return [node.activation(node.data(0), nn.GELU(approximate=form))]


def hard_sigmoid(node: Node) -> list[Value]:
    """The line alpha x + beta, cut off at 0 and 1."""
    alpha, beta = node.number("alpha", 0.2), node.number("beta", 0.5)
    if abs(alpha - 1 / 6) < 1e-8 and beta == 0.5:
        return [node.activation(node.data(0), nn.Hardsigmoid())]
    scaled = node.build.scale(node.label, node.data(0), alpha)
    moved = node.apply(scaled, scaled.shape, operator.add, Slot(scaled.slot), beta)
    return [node.activation(moved, nn.Hardtanh(0.0, 1.0))]


def swish(node: Node) -> list[Value]:
    """SiLU: x sigmoid(alpha x)."""
    if node.number("alpha", 1.0) != 1:
        raise node.refuse("only alpha = 1 is understood")
    return [node.activation(node.data(0), nn.SiLU())]


def sort(node: Node) -> list[Value]:
    """TopK that keeps all entries: a sort of the last axis, which is 1-Lipschitz over each group."""
    source, count, rank = node.data(0), node.integers("k", 1), len(node.data(0).shape) + 1
    axis = node.feature_axis(node.integer("axis", -1), source)
    size = source.shape[axis - 1]
    if count != [size] or axis != rank - 1 or not node.flag("sorted", True):
        raise node.refuse(
            "is understood as a sort of the whole last axis only; for the largest logits pass the name of its input as "
            "output_name"
        )
    flat = node.build.reshape(node.label, source, (source.features,))
    descending = node.flag("largest", True)
    if descending and size == 2:
        return [node.build.reshape(node.label, node.activation(flat, activations.MaxMin()), source.shape)]
    found = node.build.reshape(node.label, node.activation(flat, activations.GroupSort(size)), source.shape)
    if descending and size > 1:
        found = node.apply(found, found.shape, torch.flip, Slot(found.slot), (axis,))
    return [found]


def shrink(node: Node) -> list[Value]:
    """Towards zero by lambd."""
    bias, width = node.number("bias", 0.0), node.number("lambd", 0.5)
    if bias != width or width < 0:
        raise node.refuse("jumps unless bias = lambd >= 0, so its slopes are unbounded")
    return [node.activation(node.data(0), nn.Softshrink(width))]


def prelu(node: Node) -> list[Value]:
    """Slopes below zero from a constant."""
    source = node.data(0)
    slope = per_sample(node, node.weight(1), len(source.shape) + 1)
    channels = slope.ndim == len(source.shape) > 0 and slope.numel() == len(slope) == source.shape[0]
    if slope.numel() != 1 and not channels:
        raise node.refuse("its slopes must be one number, or one for each channel (axis 1)")
    layer = nn.PReLU(slope.numel(), device="meta")
    layer.weight = nn.Parameter(slope.reshape(-1).to(node.build.wide, copy=True))
    if not bool(layer.weight.isfinite().all()):
        raise node.refuse("a slope is infinite or not a number")
    return [node.activation(source, layer)]


def clip(node: Node) -> list[Value]:
    """Cut off at constants."""
    limits: list[float | None] = []
    for name, place in (("min", 1), ("max", 2)):
        value = node.attribute(name, float)
        if node.constant(place) is not None:
            given = node.weight(place)
            if value is not None or given.numel() != 1:
                raise node.refuse(f"'{name}' must be one number")
            value = float(given)
        if value is not None and math.isnan(value):
            raise node.refuse(f"'{name}' is not a number")
        limits.append(value)
    low, high = limits
    low, high = None if low == -math.inf else low, None if high == math.inf else high
    if low is None and high is None:
        return [node.data(0)]
    if math.inf in (low, high) or -math.inf in (low, high):
        raise node.refuse("a limit is infinite")
    return [node.activation(node.data(0), activations.Clamp(low, high))]
