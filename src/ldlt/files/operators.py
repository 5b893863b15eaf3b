"""The one table of ONNX operators: what each is in torch.

A rule turns a node into calls of torch functions. What is linear, which activations have slopes and what has none is
not known here: the network that is read is traced, and :mod:`ldlt.graph.operations` says it. Constants go through the
same rules and are folded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt import activations
from ldlt.errors import UnsupportedOpError
from ldlt.files.functions import NATIVE
from ldlt.files.message import BATCH, MOST_AXES
from ldlt.files.network import Node, Value, rows
from ldlt.graph.operations import TABLE

__all__ = ["MOVES", "OPERATORS", "refusal"]

Rule = Callable[[Node], Any]
"""Adds the steps of a node and returns its value, or a list of values."""

_FOREVER = 2**31 - 1  # files write it, or more, for the end of an axis of unknown size
_MANY = 2**31
_SELU_ALPHA, _SELU_GAMMA = 1.6732631921768188, 1.0507010221481323  # defaults of the operator, rounded to float32
_ROOT = math.sqrt(0.5)


def _as(found: Any, *form: Any) -> Any:
    """A value that is remembered as part of an activation."""
    return replace(found, form=form) if isinstance(found, Value) else found


def _activation(kind: type[nn.Module], options: dict[str, str]) -> Rule:
    return lambda n: n.call(kind(**{own: n.option(theirs) for theirs, own in options.items()}), n.inputs[0])


# -- sums, products and the activations that exporters split into them -------------------------------------------------


def _operands(n: Node) -> list[Any]:
    """The inputs, constants of one entry as numbers."""

    def number(value: Any, other: Any) -> Any:
        plain = isinstance(value, Tensor) and value.numel() == 1 and value.ndim <= getattr(other, "ndim", 0)
        return float(value) if plain and value.is_floating_point() and isinstance(other, Value) else value

    left, right = n.inputs
    return [number(left, right), number(right, left)]


def _near(value: Any, wanted: float) -> bool:
    return isinstance(value, float) and abs(value - wanted) < 2e-7 * abs(wanted)  # rounded to float32


def _binary(function: Callable[..., Tensor]) -> Rule:
    return lambda n: n.call(function, *_operands(n))


def _pairs(n: Node) -> list[tuple[Value, Any]]:
    left, right = _operands(n)
    return [(a, b) for a, b in ((left, right), (right, left)) if isinstance(a, Value)]


def _add(n: Node) -> Any:
    found = _binary(torch.add)(n)
    for value, number in _pairs(n):
        if value.form[:1] == ("erf",) and _near(number, 1.0):
            return _as(found, "gate", value.form[1], nn.GELU, 2.0)
    return found


def _mul(n: Node) -> Any:
    """A product, or an activation that is the product of its input and a gate: SiLU, GELU, ..."""
    for gate, value in _pairs(n):
        kind, found = gate.form[0] if gate.form else "", None
        if isinstance(value, float):
            if kind == "twice" and _near(value, 0.5):
                return n.call(gate.form[1](), gate.form[2])
            found = _binary(torch.mul)(n)
            return (
                _as(found, *gate.form[:3], gate.form[3] * value) if kind == "gate" else _as(found, "times", gate, value)
            )
        if kind == "gate" and isinstance(value, Value):
            source, factor = value.form[1:] if value.form[:1] == ("times",) else (value, 1.0)
            if gate.form[1] is source and _near(gate.form[3] * factor, 1.0):
                return n.call(gate.form[2](), source)
            if gate.form[1] is source and _near(gate.form[3] * factor, 2.0):
                return _as(_binary(torch.mul)(n), "twice", gate.form[2], source)
    return _binary(torch.mul)(n)


def _div(n: Node) -> Any:
    left, right = _operands(n)
    if right == 0 if isinstance(right, float) else isinstance(right, Tensor) and bool((right == 0).any()):
        raise n.refuse("divides by zero")
    found = n.call(torch.div, left, right)
    return _as(found, "times", left, 1 / right) if isinstance(right, float) else found


def _erf(n: Node) -> Any:
    x, found = n.inputs[0], n.call(torch.erf, n.inputs[0])
    scaled = isinstance(x, Value) and x.form[:1] == ("times",) and _near(x.form[2], _ROOT)
    return _as(found, "erf", x.form[1]) if scaled else found  # type: ignore[union-attr]


def _tanh(n: Node) -> Any:
    x, found = n.inputs[0], n.call(nn.Tanh(), n.inputs[0])
    soft = isinstance(x, Value) and x.form[:1] == ("softplus",)
    return _as(found, "gate", x.form[1], nn.Mish, 1.0) if soft else found  # type: ignore[union-attr]


# -- matrices and convolutions -----------------------------------------------------------------------------------------


def _weight(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def _gemm(n: Node) -> Any:
    """The affine map alpha x B + beta C."""
    alpha, beta = n.option("alpha"), n.option("beta")
    over, turned = n.flag("transA"), n.flag("transB")
    if isinstance(n.inputs[0], Value) and isinstance(n.inputs[1], Value):
        return n.call(torch.matmul, n.inputs[0], n.inputs[1])  # refused when it is traced
    if over or not isinstance(n.inputs[0], Value):
        raise n.refuse("sums over the batch; the data must be the first factor, not transposed")
    x, matrix = n.live(), n.constant(1)
    if matrix.ndim != 2 or x.ndim != 2:
        raise n.refuse(f"a matrix and one vector per sample are expected, not {tuple(matrix.shape)}, {x.shape}")
    matrix = (matrix if turned else matrix.T) if alpha == 1 else alpha * (matrix if turned else matrix.T)
    added = n.inputs[2] if n.has(2) and beta != 0 else None
    if isinstance(added, Value):
        return n.call(torch.add, n.call(F.linear, x, _weight(matrix)), n.call(torch.mul, added, beta))
    if added is None:
        return n.call(F.linear, x, _weight(matrix))
    bias = n.constant(2)
    if bias.ndim > 2 or (bias.ndim == 2 and len(bias) != 1) or bias.numel() not in (1, len(matrix)):
        raise n.refuse(f"a bias of shape {tuple(bias.shape)} does not fit {len(matrix)} outputs")
    bias = bias.reshape(-1).expand(len(matrix))
    return n.call(F.linear, x, _weight(matrix), _weight(bias if beta == 1 else beta * bias))


def _matmul(n: Node) -> Any:
    left, right = n.inputs
    if not isinstance(left, Value) or not isinstance(right, Tensor) or right.ndim > 2 or not right.ndim:
        return n.call(torch.matmul, left, right)
    if left.ndim < 2 or left.shape[-1:] != right.shape[:1]:
        raise n.refuse(f"a factor of shape {tuple(right.shape)} does not fit {left.shape} per sample")
    found = n.call(F.linear, left, _weight(n.constant(1).reshape(len(right), -1).T))
    return found if right.ndim == 2 else n.call(rows, found, left.shape[:-1])


def _batch_norm(n: Node) -> Any:
    """Normalisation with fixed statistics."""
    n.ignore("momentum")
    if n.flag("training_mode") or not n.flag("spatial", True) or n.outputs > 1:
        raise n.refuse("normalises with statistics of the batch; export the model in evaluation mode")
    scale, shift, mean, variance = (n.constant(i) for i in range(1, 5))
    epsilon, channels = n.option("epsilon"), n.live().shape[:1]
    if any(tuple(t.shape) != channels for t in (scale, shift, mean, variance)):
        raise n.refuse(f"scale, shift, mean and variance must have one entry for each channel of {n.live().shape}")
    if not bool((variance.double() + epsilon > 0).all()):
        raise n.refuse("a variance is not positive")
    return n.call(F.batch_norm, n.live(), mean, variance, _weight(scale), _weight(shift), False, 0.1, epsilon)


@dataclass(frozen=True)
class _Window:
    """How a window moves: entries for each axis, zeros before and behind."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    behind: tuple[int, ...]

    @property
    def even(self) -> bool:
        return self.before == self.behind

    @property
    def border(self) -> tuple[int, ...]:
        """As ``F.pad`` wants it: last axis first."""
        return tuple(p for pair in zip(self.before[::-1], self.behind[::-1], strict=True) for p in pair)


def _window(n: Node, spatial: Sequence[int], kernel: Sequence[int] | None, transposed: bool = False) -> _Window:
    rank = len(spatial)
    strides, dilations = n.integers("strides") or [1] * rank, n.integers("dilations") or [1] * rank
    pads, mode = n.integers("pads") or [0] * (2 * rank), n.option("auto_pad")
    if kernel is None or not len(strides) == len(dilations) == len(kernel) == rank or len(pads) != 2 * rank:
        raise n.refuse(f"kernel_shape, strides, dilations and pads do not fit {rank} axes")
    sizes = [*strides, *dilations, *kernel]
    if min(sizes) < 1 or min(pads) < 0 or max(*sizes, *pads) >= _MANY:
        raise n.refuse("kernel_shape, strides, dilations or pads are impossible")
    if mode not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER") or (mode != "NOTSET" and any(pads)):
        raise n.refuse("auto_pad is not known, or given beside pads")
    before, behind = pads[:rank], pads[rank:]
    if mode.startswith("SAME"):
        if transposed:
            raise n.refuse("auto_pad has several meanings here; use pads")
        for i, (size, width, step, gap) in enumerate(zip(spatial, kernel, strides, dilations, strict=True)):
            total = (-(-size // step) - 1) * step + (width - 1) * gap + 1 - size
            if total < -1:  # some readers crop the input on both sides, others only behind
                raise n.refuse("auto_pad has no agreed meaning for a stride that leaves entries out; use pads")
            total = max(total, 0)
            before[i] = total // 2 if mode == "SAME_UPPER" else total - total // 2
            behind[i] = total - before[i]
    for size, width, gap, a, b in zip(spatial, kernel, dilations, before, behind, strict=True):
        if not transposed and size + a + b < (width - 1) * gap + 1:
            raise n.refuse(f"the window is larger than its input of {size}")
        n.build.spend(n.label, 0 if a + b < n.build.limits.features else _MANY * _MANY)
    return _Window(tuple(kernel), tuple(strides), tuple(dilations), tuple(before), tuple(behind))


_CONV: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_AVERAGE: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_LARGEST: dict[int, Any] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def _images(n: Node) -> tuple[Value, int]:
    x = n.live()
    if not 1 <= x.ndim - 2 <= 3:
        raise n.refuse(f"images of one to three axes are expected, not {x.shape} per sample")
    return x, x.ndim - 2


def _conv(transposed: bool) -> Rule:
    def rule(n: Node) -> Any:
        (x, rank), weight, groups = _images(n), n.constant(1), n.option("group")
        kernel = list(weight.shape[2:])
        if weight.ndim != rank + 2 or n.integers("kernel_shape") not in (None, kernel):
            raise n.refuse(
                f"a weight of shape {tuple(weight.shape)} does not fit {x.shape} per sample, or kernel_shape"
            )
        w, bias = _window(n, x.shape[1:], kernel, transposed), _weight(n.constant(2)) if n.has(2) else None
        if not transposed:
            x, padding = (x, w.before) if w.even else (n.call(F.pad, x, w.border), (0,) * rank)  # type: ignore[assignment]
            return n.call(_CONV[rank], x, _weight(weight), bias, w.stride, padding, w.dilation, groups)
        extra = tuple(n.integers("output_padding") or [0] * rank)
        if not w.even or n.integers("output_shape") is not None:
            raise n.refuse("uneven pads or an output_shape are not understood; use the same pads on both sides")
        return n.call(_TRANSPOSED[rank], x, _weight(weight), bias, w.stride, w.before, extra, groups, w.dilation)

    return rule


def _whole_windows(n: Node, x: Value, w: _Window) -> None:
    if n.flag("ceil_mode"):
        for size, k, s, d, a, b in zip(x.shape[1:], w.kernel, w.stride, w.dilation, w.before, w.behind, strict=True):
            if (size + a + b - (k - 1) * d - 1) % s:
                raise n.refuse("ceil_mode lets a window stick out; use padding instead")


def _average_pool(n: Node) -> Any:
    (x, rank), counted = _images(n), n.flag("count_include_pad")
    w = _window(n, x.shape[1:], n.integers("kernel_shape"))
    _whole_windows(n, x, w)
    if any(d > 1 for d in w.dilation) or (not counted and any(p >= k for p, k in zip(w.before, w.kernel, strict=True))):
        raise n.refuse("windows with gaps, or with nothing but padding in them, are not understood")
    if w.even and all(2 * p <= k for p, k in zip(w.before, w.kernel, strict=True)):
        return n.call(_AVERAGE[rank], x, w.kernel, w.stride, w.before, False, counted)
    found = n.call(_AVERAGE[rank], n.call(F.pad, x, w.border), w.kernel, w.stride)
    if counted:
        return found
    inside = F.pad(torch.ones(1, 1, *x.shape[1:], dtype=n.build.wide), w.border)  # of a size that has been allowed
    return n.call(torch.div, found, _AVERAGE[rank](inside, w.kernel, w.stride)[0])


def _max_pool(n: Node) -> Any:
    x, rank = _images(n)
    n.ignore("storage_order")  # of the indices, which are not computed here
    w = _window(n, x.shape[1:], n.integers("kernel_shape"))
    _whole_windows(n, x, w)
    if not w.even:
        raise n.refuse("uneven pads are not understood; use the same pads on both sides")
    found = n.call(_LARGEST[rank], x, w.kernel, w.stride, w.before, w.dilation)
    n.build.spend(n.label, math.prod(found.shape) * math.prod(w.kernel))  # its windows, when it is traced
    return found


def _reduce(function: Callable[..., Tensor]) -> Rule:
    def rule(n: Node) -> Any:
        x, axes = n.inputs[0], n.integers("axes", 1)
        keep, noop = n.flag("keepdims", True), n.flag("noop_with_empty_axes")
        if not axes and noop:
            return x
        if not axes:
            raise n.refuse("mixes the samples of the batch, too; name the axes")
        return n.call(function, x, tuple(n.axes(axes, x.ndim)), keep)  # type: ignore[union-attr]

    return rule


def _global(function: Callable[..., Tensor]) -> Rule:
    def rule(n: Node) -> Any:
        x, rank = _images(n)
        return n.call(function, x, tuple(range(2, 2 + rank)), True)

    return rule


def _sorted(x: Tensor, axis: int, descending: bool) -> Tensor:
    return torch.sort(x, axis, descending).values


def _top(n: Node) -> Any:
    """The largest entries along an axis: the first ones of a sort."""
    x, count = n.live(), n.integers("k", 1)
    axis = n.axis(n.option("axis"), x.ndim)
    size = n.shape(x)[axis]
    if axis == 0 or count is None or len(count) != 1 or not 1 <= count[0] <= size or not n.flag("sorted", True):
        raise n.refuse("is understood as the sorted largest or smallest entries along an axis behind the batch only")
    found = n.call(_sorted, x, axis, n.flag("largest", True))
    return found if count[0] == size else n.call(_part, found, axis, 0, count[0], 1)


def _extreme(pair: Callable[..., Tensor], low: bool) -> Rule:
    """The largest or smallest of several values; with a number, a limit."""

    def two(n: Node, a: Any, b: Any) -> Any:
        a, b = (b, a) if isinstance(b, Value) and not isinstance(a, Value) else (a, b)
        if isinstance(a, Value) and isinstance(b, Tensor) and b.numel() == 1 and b.ndim <= a.ndim:
            return n.call(activations.Clamp(float(b), None) if low else activations.Clamp(None, float(b)), a)
        return n.call(pair, a, b)

    return lambda n: reduce(lambda a, b: two(n, a, b), n.inputs)


# -- activations with arguments ----------------------------------------------------------------------------------------


def _prelu(n: Node) -> Any:
    x, slope = n.live(), n.constant(1)
    while slope.ndim > max(1, x.ndim - 1) and len(slope) == 1:
        slope = slope[0]
    channels = slope.ndim == x.ndim - 1 and slope.numel() == len(slope) == x.shape[0]
    if (slope.numel() != 1 and not channels) or not bool(slope.isfinite().all()):
        raise n.refuse("its slopes must be one finite number, or one for each channel (axis 1)")
    found = nn.PReLU(slope.numel(), device="meta")
    found.weight = nn.Parameter(slope.reshape(-1).clone())
    return n.call(found, x)


def _clip(n: Node) -> Any:
    limits: list[float | None] = []
    for name, place, none in (("min", 1, -math.inf), ("max", 2, math.inf)):
        value = n.option(name) if name in n.given else None
        if n.has(place):
            given = n.constant(place)
            if given.numel() != 1 or bool(given.isnan()):
                raise n.refuse(f"'{name}' must be one number")
            value = float(given)
        limits.append(None if value == none else value)
    if limits == [None, None]:
        return n.inputs[0]
    if any(v is not None and math.isinf(v) for v in limits):
        raise n.refuse("a limit is infinite")
    return n.call(activations.Clamp(*limits), n.inputs[0])


def _selu(n: Node) -> Any:
    alpha, gamma = n.option("alpha"), n.option("gamma")
    if abs(alpha - _SELU_ALPHA) < 1e-6 and abs(gamma - _SELU_GAMMA) < 1e-6:
        return n.call(nn.SELU(), n.inputs[0])
    return n.call(torch.mul, n.call(nn.ELU(alpha), n.inputs[0]), gamma)


def _hard_sigmoid(n: Node) -> Any:
    alpha, beta, x = n.option("alpha"), n.option("beta"), n.inputs[0]
    if abs(alpha - 1 / 6) < 1e-8 and beta == 0.5:
        return _as(n.call(nn.Hardsigmoid(), x), "gate", x, nn.Hardswish, 1.0)
    return n.call(nn.Hardtanh(0.0, 1.0), n.call(torch.add, n.call(torch.mul, x, alpha), beta))


def _shrink(n: Node) -> Any:
    bias, width = n.option("bias"), n.option("lambd")
    if bias != width or width < 0:
        raise n.refuse("jumps unless bias = lambd >= 0, so its slopes are unbounded")
    return n.call(nn.Softshrink(width), n.inputs[0])


def _swish(n: Node) -> Any:
    if n.option("alpha") != 1:
        raise n.refuse("only alpha = 1 is understood")
    return n.call(nn.SiLU(), n.inputs[0])


def _softmax(n: Node) -> Any:
    if n.opset < 13 and n.live().ndim != 2:
        raise n.refuse("joins several axes in this operator set; export with operator set 13 or a newer one")
    return n.call(nn.Softmax(n.axis(n.option("axis"), n.live().ndim)), n.live())


# -- entries that are moved, dropped or repeated -----------------------------------------------------------------------


def _reshaped(n: Node, x: Any, shape: Sequence[int]) -> Any:
    if not isinstance(x, Value):
        return n.call(torch.reshape, x, tuple(shape))
    if shape[0] != BATCH:
        raise n.refuse("moves the batch from the first axis")
    return x if tuple(shape[1:]) == x.shape else n.call(rows, x, tuple(shape[1:]))


def _reshape(n: Node) -> Any:
    x, keep = n.inputs[0], n.flag("allowzero")
    assert x is not None
    wanted, old = [int(v) for v in n.constant(1, torch.int64).reshape(-1)], n.shape(x)
    if not keep:
        if any(v == 0 and i >= len(old) for i, v in enumerate(wanted)):
            raise n.refuse("a 0 in the shape refers to an axis that does not exist")
        wanted = [old[i] if v == 0 else v for i, v in enumerate(wanted)]
    if isinstance(x, Tensor):
        return _reshaped(n, x, wanted)
    mixes = n.refuse(
        f"the shape {['batch' if v == BATCH else v for v in wanted[:9]]} does not keep the batch apart from {x.shape} "
        "per sample; keep the first axis"
    )
    first, rest = wanted[:1], wanted[1:]
    known = math.prod(v for v in rest if v != -1)
    # A file for batches of 1 says 1; one for batches of a fixed size says that size.
    if not first or first[0] not in (BATCH, -1, n.build.batch or 1) or known < 1 or min(rest, default=0) < -1:
        raise mixes
    rest = [math.prod(x.shape) // known if v == -1 else v for v in rest]
    if math.prod(rest) != math.prod(x.shape) or wanted.count(-1) > 1:
        raise mixes
    return _reshaped(n, x, [BATCH, *rest])


def _flatten(n: Node) -> Any:
    x = n.live()
    axis = n.option("axis")
    axis += x.ndim if axis < 0 else 0
    if not 1 <= axis <= x.ndim or math.prod(x.shape[: axis - 1]) != 1:
        raise n.refuse("joins the batch with other axes; use axis=1")
    return _reshaped(n, x, [BATCH, math.prod(x.shape)])


def _squeeze(n: Node) -> Any:
    x, axes = n.inputs[0], n.integers("axes", 1)
    shape = n.shape(x)
    if axes is None and isinstance(x, Value) and n.build.batch == 1:
        raise n.refuse("removes all axes of size 1, the batch among them; name the axes")
    places = [i for i, s in enumerate(shape) if s == 1] if axes is None else n.axes(axes, len(shape))
    if any(shape[i] != 1 for i in places):
        raise n.refuse(f"an axis of {shape[1:]} per sample is not of size 1")
    return _reshaped(n, x, [s for i, s in enumerate(shape) if i not in places])


def _unsqueeze(n: Node) -> Any:
    x, axes = n.inputs[0], n.integers("axes", 1)
    shape = n.shape(x)
    if axes is None or len(shape) + len(axes) > MOST_AXES:
        raise n.refuse("the new axes are missing or too many")
    found, rest = n.axes(axes, len(shape) + len(axes)), iter(shape)
    return _reshaped(n, x, [1 if i in found else next(rest) for i in range(len(shape) + len(axes))])


def _transpose(n: Node) -> Any:
    x = n.inputs[0]
    rank = len(n.shape(x))
    order = n.integers("perm")
    order = list(range(rank))[::-1] if order is None else order
    if sorted(order) != list(range(rank)):
        raise n.refuse(f"perm {order[:9]} is not an order of {rank} axes")
    return x if order == sorted(order) and isinstance(x, Value) else n.call(torch.permute, x, tuple(order))


def _part(x: Tensor, axis: int, start: int, stop: int, step: int) -> Tensor:
    """Every step-th entry along an axis; backwards for a negative step."""
    found = x[(*(slice(None),) * axis, slice(start, stop, abs(step)))]
    return found if step > 0 else found.flip(axis)


def _taken(n: Node, x: Any, axis: int, taken: range) -> Any:
    if not taken:
        raise n.refuse("the result has no entries")
    if taken == range(n.shape(x)[axis]):
        return x
    step = taken.step if len(taken) > 1 else 1  # any step for one entry is allowed in a file but not in torch
    return n.call(_part, x, axis, min(taken), max(taken) + 1, step)


def _slice(n: Node) -> Any:
    x, shape = n.inputs[0], n.shape(n.inputs[0])
    starts, ends = n.integers("starts", 1), n.integers("ends", 2)
    axes, steps = n.integers("axes", 3), n.integers("steps", 4)
    if starts is None or ends is None:
        raise n.refuse("starts and ends are missing")
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps) <= len(shape):
        raise n.refuse("starts, ends, axes and steps must have the same length, at most one entry per axis")
    n.axes(axes, len(shape))
    for start, end, given, step in zip(starts, ends, axes, steps, strict=True):
        axis = n.axis(given, len(shape))
        if step == 0:
            raise n.refuse("a step of 0")
        if shape[axis] == BATCH:
            if (start, step) != (0, 1) or end < _FOREVER:
                raise n.refuse("takes some samples of the batch; every sample must be treated alike")
            continue
        x = _taken(n, x, axis, range(*slice(start, end, step).indices(shape[axis])))
    return x


def _split(n: Node) -> Any:
    x, sizes, parts = n.live(), n.integers("split", 1), n.outputs
    axis = n.axis(n.option("axis"), x.ndim)
    length, count = n.shape(x)[axis], n.option("num_outputs", parts)
    if axis == 0:
        raise n.refuse("works along the batch axis; every sample must be treated by itself")
    if sizes is None:
        if count != parts or ("num_outputs" not in n.given and length % parts):
            raise n.refuse(f"{length} entries cannot be split into {parts} parts")
        each = -(-length // parts)
        sizes = [each] * (parts - 1) + [length - each * (parts - 1)]
    if len(sizes) != parts or min(sizes) < 1 or sum(sizes) != length:
        raise n.refuse(f"{length} entries cannot be split into parts of {sizes[:9]}")
    return [_taken(n, x, axis, range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(parts)]


def _gathered(x: Tensor, axis: int, index: Tensor) -> Tensor:
    found = x.index_select(axis, index.reshape(-1))
    return found.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])) if index.ndim != 1 else found


def _gather(n: Node) -> Any:
    x, index = n.inputs[0], n.constant(1, torch.int64)
    axis = n.axis(n.option("axis"), len(n.shape(x)))
    size = n.shape(x)[axis]
    if size == BATCH or bool(((index < -size) | (index >= size)).any()):
        raise n.refuse("an index is outside of its axis, or takes some samples of the batch")
    return n.call(_gathered, x, axis, torch.where(index < 0, index + size, index))


def _concat(n: Node) -> Any:
    live = [isinstance(v, Value) for v in n.inputs]
    if "axis" not in n.given or (any(live) and not all(live)):
        raise n.refuse("needs an axis, and no constant beside data; put that into the bias of the layer behind")
    axis = n.axis(n.option("axis"), len(n.shape(n.inputs[0])))
    return n.inputs[0] if len(live) == 1 else n.call(torch.cat, tuple(n.inputs), axis)


def _expanded(x: Tensor, shape: Sequence[int]) -> Tensor:
    return x.expand(x.shape[0], *shape)


def _expand(n: Node) -> Any:
    x, wanted = n.live(), [int(v) for v in n.constant(1, torch.int64).reshape(-1)]
    wanted = [1] * (x.ndim - len(wanted)) + wanted
    if len(wanted) != x.ndim or wanted[0] not in (1, BATCH) or min(wanted[1:], default=1) < 1:
        raise n.refuse("must keep the first axis the batch")
    shape = tuple(max(a, b) for a, b in zip(x.shape, wanted[1:], strict=True))
    return n.call(_expanded, x, shape) if shape != x.shape else x


_PADS = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def _pad(n: Node) -> Any:
    x, pads = n.live(), n.integers("pads", 1)
    mode, axes = _PADS.get(n.option("mode")), n.integers("axes", 3)
    axes = list(range(x.ndim)) if axes is None else [n.axis(a, x.ndim) for a in axes]
    if mode is None or pads is None or len(pads) != 2 * len(axes) or len(set(axes)) < len(axes):
        raise n.refuse("its mode is not known, or its pads do not fit the axes")
    value = float(n.constant(2)) if n.has(2) and n.constant(2).numel() == 1 else n.option("value", 0.0)
    around = [(0, 0)] * x.ndim
    for i, axis in enumerate(axes):
        around[axis] = (pads[i], pads[i + len(axes)])
    if around[0] != (0, 0) or not math.isfinite(value):
        raise n.refuse("adds samples to the batch, or numbers that are not finite")
    first = next((i for i, pair in enumerate(around) if pair != (0, 0)), None)
    if first is None:
        return x
    border = tuple(p for pair in around[: first - 1 : -1] for p in pair)
    if mode != "constant":
        border = tuple(p for pair in around[:1:-1] for p in pair)
        if first < 2:
            raise n.refuse("continues channels; only the axes behind them can be continued")
        return n.call(F.pad, x, border, mode)
    return n.call(F.pad, x, border, mode, value)


# -- no effect, or constants -------------------------------------------------------------------------------------------


def _same(n: Node) -> Any:
    n.ignore("ratio", "seed")
    if n.has(2) and bool(n.constant(2, torch.bool).any()):
        raise n.refuse("is random; export the model in evaluation mode")
    return n.inputs[0]


_KINDS = {1: torch.float32, 6: torch.int64, 7: torch.int64, 11: torch.float64}


def _cast(n: Node) -> Any:
    n.ignore("saturate", "round_mode")
    x, to = n.inputs[0], _KINDS.get(n.option("to"))
    assert x is not None
    if to is None or x.dtype.is_floating_point > to.is_floating_point or x.dtype == torch.bool:
        raise n.refuse("rounds to another type; only changes between 32- and 64-bit numbers are understood")
    if isinstance(x, Value):
        return replace(x, dtype=to)
    if to.is_floating_point and x.dtype == torch.int64 and bool((x == BATCH).any()):
        raise n.refuse("computes with the batch size; every sample must be treated alike")
    return n.call(Tensor.to, x, to)


def _shape(n: Node) -> Tensor:
    sizes = n.shape(n.inputs[0])
    first, last, rank = n.option("start", 0), n.option("end", len(sizes)), len(sizes)
    first, last = (max(0, min(rank, v + rank if v < 0 else v)) for v in (first, last))
    return torch.tensor(list(sizes)[first:last], dtype=torch.int64)


def _constant(n: Node) -> Tensor:
    if len(n.given) != 1:
        raise n.refuse("exactly one of value, value_float(s) and value_int(s) is expected")
    (name,) = n.given
    value = n.option(name)
    if name == "value":
        n.build.spend(n.label, math.prod(value.dims))
        return n.build.store.decode(value, n.label)
    found = torch.tensor(value, dtype=torch.float32 if "float" in name else torch.int64)
    n.build.spend(n.label, found.numel())
    if bool((found == BATCH).any()):
        raise n.refuse(f"the number {BATCH} is neither a size nor an index")
    return found


# -- the table ---------------------------------------------------------------------------------------------------------

OPERATORS: dict[str, Rule] = {
    **{name: _activation(kind, options) for name, (kind, options) in NATIVE.items()},
    "Add": _add,
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": _concat,
    "Constant": _constant,
    "Conv": _conv(False),
    "ConvTranspose": _conv(True),
    "Div": _div,
    "Dropout": _same,
    "Erf": _erf,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": _gather,
    "Gemm": _gemm,
    "GlobalAveragePool": _global(torch.mean),
    "GlobalMaxPool": _global(torch.amax),
    "HardSigmoid": _hard_sigmoid,
    "Identity": lambda n: n.inputs[0],
    "MatMul": _matmul,
    "Max": _extreme(torch.maximum, True),
    "MaxPool": _max_pool,
    "Min": _extreme(torch.minimum, False),
    "Mul": _mul,
    "Neg": lambda n: n.call(torch.neg, *n.inputs),
    "PRelu": _prelu,
    "Pad": _pad,
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceMin": _reduce(torch.amin),
    "ReduceSum": _reduce(torch.sum),
    "Reshape": _reshape,
    "Selu": _selu,
    "Shape": _shape,
    "Shrink": _shrink,
    "Sigmoid": lambda n: _as(n.call(nn.Sigmoid(), n.inputs[0]), "gate", n.inputs[0], nn.SiLU, 1.0),
    "Slice": _slice,
    "Softmax": _softmax,
    "Softplus": lambda n: _as(n.call(nn.Softplus(), n.inputs[0]), "softplus", n.inputs[0]),
    "Split": _split,
    "Squeeze": _squeeze,
    "Sub": _binary(torch.sub),
    "Sum": lambda n: reduce(lambda a, b: n.call(torch.add, a, b), n.inputs),
    "Swish": _swish,
    "Tanh": _tanh,
    "ThresholdedRelu": lambda n: n.call(nn.Threshold(n.option("alpha"), 0.0), n.inputs[0]),
    "TopK": _top,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
"""What is understood, by operator."""

MOVES = {"Cast", "Concat", "Gather", "Identity", "Reshape", "Shape", "Slice", "Squeeze", "Transpose", "Unsqueeze"}
"""Operators that only move entries, so that shapes with the mark of the batch may go through them."""


class _Nameless:
    """Stands for the reader of a program, of which a rule that refuses asks for no more than a name."""

    def label(self, node: Any) -> str:
        return ""

    def refusal(self, node: Any, reason: str) -> UnsupportedOpError:
        return UnsupportedOpError("", reason)


def refusal(name: str) -> str:
    """Why an operator is not understood: the reason that the table of operations gives for it in torch."""
    snake = re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower().removesuffix("alization").replace("hardmax", "argmax")
    if "Quant" in name or "Integer" in name:
        return "quantised operators are not continuous; export the model in floating point"
    if name in ("If", "Loop", "Scan"):
        return "branches and loops are not understood; export without control flow"
    if snake in TABLE:
        try:
            TABLE[snake].rule(_Nameless(), None)  # type: ignore[arg-type]
        except UnsupportedOpError as error:
            return f"{error.reason}. To certify what it reads, pass the name of its input as output_name"
        except Exception:
            pass
    known = f"the operator is not understood; known are {', '.join(sorted(OPERATORS))}"
    return f"{known}. Another operator set or exporter may write it in those"
