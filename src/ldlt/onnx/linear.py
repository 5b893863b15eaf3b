"""Operators that are linear maps: products with matrices, sums, multiples, normalisation with fixed statistics."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

from torch import Tensor, nn

from ldlt.onnx.node import PRODUCT, Node, Value, broadcast
from ldlt.onnx.program import Data, Slot

__all__ = [
    "add_data",
    "batch_norm",
    "div",
    "gemm",
    "matmul",
    "mul",
    "neg",
    "per_sample",
    "reduce_with",
    "sum_all",
    "sum_with",
]


def gemm(node: Node) -> list[Value]:
    """The affine map alpha x B + beta C, with constants B and C (C may be data)."""
    alpha, beta = node.number("alpha", 1.0), node.number("beta", 1.0)
    over, turned = node.flag("transA"), node.flag("transB")
    if isinstance(node.inputs[0], Data) and isinstance(node.inputs[1], Data):
        raise node.refuse(PRODUCT)
    if over or not isinstance(node.inputs[0], Data):
        raise node.refuse("sums over the batch; the data must be the first factor, not transposed")
    source, matrix = node.data(0), node.weight(1)
    if matrix.ndim != 2 or len(source.shape) != 1:
        raise node.refuse(f"a matrix and one vector per sample are expected, not {tuple(matrix.shape)}, {source.shape}")
    matrix = matrix if turned else matrix.T
    if matrix.shape[1] != source.shape[0]:
        raise node.refuse(f"a factor of shape {tuple(matrix.T.shape)} does not fit {source.shape} per sample")
    if alpha != 1:
        matrix = matrix * alpha
    added = node.inputs[2] if len(node.inputs) > 2 and beta != 0 else None
    if isinstance(added, Data):
        product = node.build.linear(node.label, source, matrix)
        return [add_data(node, product, node.build.scale(node.label, added, beta), operator.add, product.shape)]
    bias = None
    if added is not None:
        bias = per_sample(node, node.weight(2), 2)
        if bias.ndim > 1 or bias.numel() not in (1, len(matrix)):
            raise node.refuse(f"a bias of shape {tuple(bias.shape)} does not fit {len(matrix)} outputs")
        bias = bias.reshape(-1).expand(len(matrix)) * beta
    return [node.build.linear(node.label, source, matrix, bias)]


def matmul(node: Node) -> list[Value]:
    """A product with a constant, on either side."""
    left, right = node.inputs
    if isinstance(left, Data) and isinstance(right, Data):
        raise node.refuse(PRODUCT)
    return [_times_matrix(node) if isinstance(left, Data) else _matrix_times(node)]


def _times_matrix(node: Node) -> Data:
    source, matrix = node.data(0), node.weight(1)
    build, what = node.build, node.label
    if not source.shape or not matrix.ndim or matrix.shape[max(0, matrix.ndim - 2)] != source.shape[-1]:
        raise node.refuse(f"a factor of shape {tuple(matrix.shape)} does not fit {source.shape} per sample")
    if matrix.ndim == 1:
        return build.reshape(what, build.linear(what, source, matrix[None]), source.shape[:-1])
    if matrix.ndim > len(source.shape) + 1 or (matrix.ndim == len(source.shape) + 1 > 2 and len(matrix) != 1):
        raise node.refuse("has another matrix for each sample, or moves the batch; the factor has too many axes")
    if matrix.ndim == len(source.shape) + 1 > 2:
        matrix = matrix[0]
    if math.prod(matrix.shape[:-2]) == 1:
        return build.linear(what, source, matrix.reshape(matrix.shape[-2:]).T)
    # several matrices, one for each entry of an axis
    lead = broadcast(source.shape[:-2], matrix.shape[:-2])
    if lead is None:
        raise node.refuse(f"a factor of shape {tuple(matrix.shape)} does not fit {source.shape} per sample")
    shape = (*lead, source.shape[-2], matrix.shape[-1])
    return node.apply(source, shape, operator.matmul, Slot(source.slot), build.hold(what, matrix))


def _matrix_times(node: Node) -> Data:
    matrix, source = node.weight(0), node.data(1)
    build, what, rank = node.build, node.label, len(source.shape)
    if rank < 2:
        raise node.refuse("sums over the batch; the constant must be the second factor")
    while matrix.ndim > 2 and matrix.ndim <= rank + 1 and len(matrix) == 1:
        matrix = matrix[0]
    if not 1 <= matrix.ndim <= 2 or matrix.shape[-1] != source.shape[-2]:
        raise node.refuse(f"a factor of shape {tuple(matrix.shape)} does not fit {source.shape} per sample")
    swap = [*range(rank - 2), rank - 1, rank - 2]
    product = build.linear(what, build.permute(what, source, swap), matrix.reshape(-1, matrix.shape[-1]))
    if matrix.ndim == 1:
        return build.reshape(what, product, product.shape[:-1])
    return build.permute(what, product, swap)


def per_sample(node: Node, constant: Tensor, rank: int) -> Tensor:
    """A constant without the batch axis, for a value with ``rank`` axes, the batch included."""
    if constant.ndim > rank:
        raise node.refuse(f"a constant of shape {tuple(constant.shape)} moves the batch from the first axis")
    if constant.ndim < rank:
        return constant
    if len(constant) != 1:
        raise node.refuse(f"a constant of shape {tuple(constant.shape)} differs from sample to sample of the batch")
    return constant[0]


def add_data(
    node: Node, left: Data, right: Data, rule: Callable[..., Tensor], wanted: tuple[int, ...] | None = None
) -> Data:
    """A sum or difference of two values of one shape, up to axes of size 1."""
    shape = broadcast(left.shape, right.shape) if len(left.shape) == len(right.shape) else None
    if shape is None or wanted not in (None, shape):
        raise node.refuse(f"values of shapes {left.shape} and {right.shape} per sample cannot be combined")
    return node.apply(left, shape, rule, Slot(left.slot), Slot(right.slot))


def _operand(node: Node, source: Data, constant: Tensor, divide: bool = False) -> tuple[Data, float | Tensor]:
    """Data in the shape of the result, and a constant: a number if it has one entry."""
    constant = per_sample(node, constant, len(source.shape) + 1)
    shape = broadcast(source.shape, constant.shape)
    if shape is None:
        raise node.refuse(f"a constant of shape {tuple(constant.shape)} does not fit {source.shape} per sample")
    if not bool((1 / constant if divide else constant).isfinite().all()):
        raise node.refuse("divides by zero" if divide else "a constant is infinite or not a number")
    source = node.build.expand(node.label, source, shape)
    return source, (float(constant) if constant.numel() == 1 else constant)


def sum_with(rule: Callable[..., Tensor]) -> Callable[[Node], list[Value]]:
    """A sum or difference, of data and data or of data and a constant."""

    def run(node: Node) -> list[Value]:
        left, right = node.inputs
        if isinstance(left, Data) and isinstance(right, Data):
            return [add_data(node, left, right, rule)]
        first = isinstance(left, Data)
        source, constant = _operand(node, node.data(0 if first else 1), node.weight(1 if first else 0))
        held = node.build.hold(node.label, constant) if isinstance(constant, Tensor) else constant
        pair = (Slot(source.slot), held) if first else (held, Slot(source.slot))
        return [node.apply(source, source.shape, rule, *pair)]

    return run


def mul(node: Node) -> list[Value]:
    """A product with a constant, or SiLU in two nodes."""
    left, right = node.inputs
    if isinstance(left, Data) and isinstance(right, Data):
        for gate, value in ((left, right), (right, left)):
            if gate.gate_of == value.slot and gate.shape == value.shape:  # how exporters write SiLU
                return [node.activation(value, nn.SiLU())]
        raise node.refuse(PRODUCT)
    place = 0 if isinstance(left, Data) else 1
    source, factor = _operand(node, node.data(place), node.weight(1 - place))
    if isinstance(factor, float):
        return [node.build.scale(node.label, source, factor)]
    held = node.build.hold(node.label, factor)
    return [node.apply(source, source.shape, operator.mul, Slot(source.slot), held)]


def div(node: Node) -> list[Value]:
    """A quotient by a constant."""
    if not isinstance(node.inputs[0], Data) or isinstance(node.inputs[1], Data):
        raise node.refuse(PRODUCT)
    source, divisor = _operand(node, node.data(0), node.weight(1), divide=True)
    held = node.build.hold(node.label, divisor) if isinstance(divisor, Tensor) else divisor
    if isinstance(held, float) and not math.isfinite(held):
        raise node.refuse("a constant is infinite or not a number")
    return [node.apply(source, source.shape, operator.truediv, Slot(source.slot), held)]


def neg(node: Node) -> list[Value]:
    """The negative."""
    source = node.data(0)
    return [node.apply(source, source.shape, operator.neg, Slot(source.slot))]


def sum_all(node: Node) -> list[Value]:
    """A sum of several values."""
    if not all(isinstance(v, Data) for v in node.inputs):
        raise node.refuse("adds constants and data; use Add")
    total = node.data(0)
    for place in range(1, len(node.inputs)):
        total = add_data(node, total, node.data(place), operator.add)
    return [total]


def batch_norm(node: Node) -> list[Value]:
    """Normalisation with fixed statistics: a factor and an offset for each channel."""
    node.ignore("momentum")
    if node.flag("training_mode") or not node.flag("spatial", True):
        raise node.refuse("normalises with statistics of the batch; export the model in evaluation mode")
    epsilon, source = node.number("epsilon", 1e-5), node.data(0)
    parts = [node.weight(i) for i in range(1, 5)]
    if not source.shape or any(p.shape != source.shape[:1] for p in parts):
        raise node.refuse(f"scale, shift, mean and variance must have one entry for each channel of {source.shape}")
    scale, shift, mean, variance = (p.double() for p in parts)
    if not bool((variance + epsilon > 0).all()):
        raise node.refuse("a variance is not positive")
    factor = scale / (variance + epsilon).sqrt()
    offset = shift - mean * factor
    column = (-1, *(1,) * (len(source.shape) - 1))
    held = [node.build.hold(node.label, t.to(node.build.wide).reshape(column)) for t in (factor, offset)]
    scaled = node.apply(source, source.shape, operator.mul, Slot(source.slot), held[0])
    return [node.apply(scaled, source.shape, operator.add, Slot(scaled.slot), held[1])]


def reduce_with(rule: Callable[..., Tensor]) -> Callable[[Node], list[Value]]:
    """A sum or mean over axes of a sample."""

    def run(node: Node) -> list[Value]:
        source, axes = node.data(0), node.integers("axes", 1)
        keep, noop = node.flag("keepdims", True), node.flag("noop_with_empty_axes")
        if not axes and noop:
            return [source]
        if not axes:
            raise node.refuse("sums over the batch, too; name the axes")
        places = [node.feature_axis(a, source) for a in node.axes(axes, len(source.shape) + 1)]
        shape = [1 if i in places else s for i, s in enumerate(source.shape, 1) if keep or i not in places]
        return [node.apply(source, shape, rule, Slot(source.slot), tuple(places), keep)]

    return run
