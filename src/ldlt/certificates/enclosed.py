r"""The tensors of a graph, enclosed: what the module stores is exact, what is computed from it gets an error bound.

A parameter in float32 or float64 is a number. A constant of the graph, ``weight * mask`` or the scale of a batch
normalisation, is that of real arithmetic, enclosed in a :class:`~ldlt.certificates.ball.Ball`: operations that move
entries act on midpoint and radius, elementwise arithmetic and products of matrices follow the rules of balls. Any other
operation is refused, because its rounding is not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ldlt.certificates.ball import TINY, UNIT, Array, Ball
from ldlt.errors import GraphError
from ldlt.graph import Attr, Constant, Graph, Tensors, lookup, resolve
from ldlt.graph.operations import TABLE

__all__ = ["Enclosed", "doubles", "inverse", "precisions", "readings"]

_EMPTY = {"new_ones", "new_zeros", "ones_like", "zeros_like"}
_FULL = {"full", "full_like", "new_full", "scalar_tensor"}
_FILLED = {"constant_pad_nd", "masked_fill", "pad", "where"}  # their numbers are entries
_PRODUCTS = {TABLE[n].rule for n in ("linear", "conv1d", "conv_transpose1d", "addmm")}
_COMPARISONS = {"eq", "ge", "gt", "le", "lt", "ne"}
_SAME = {TABLE["clone"].rule}
_MOVES = {TABLE["view"].rule, TABLE["cat"].rule}
_PARTS = {"tril", "triu"}
_WHOLES = {"_to_copy", "add", "arange", "eye", "mul", "neg", "ones", "sub", "sum", "tril", "triu", "zeros"}
_WHOLE = 2**8  # whole numbers up to here are exact in every type


def precisions(module: nn.Module) -> tuple[torch.dtype, ...]:
    """Floating-point types of a network's parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return tuple(sorted({t.dtype for t in tensors if t.is_floating_point()}, key=str))


def readings(value: float, kinds: Iterable[torch.dtype]) -> list[float]:
    """A number, and what it becomes in each of these types."""
    return [value, *(float(torch.tensor(value, dtype=torch.float64).to(kind)) for kind in kinds)]


def doubles(graph: Graph, module: nn.Module) -> Tensors:
    """The tensors of a graph in float64 on the CPU, constants computed in it: for searches, without error bounds."""

    def wide(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu()
        return tensor.double() if tensor.is_floating_point() else tensor

    def widened(constant: Constant) -> Constant:
        kwargs = tuple(
            (k, torch.float64 if v in (torch.float16, torch.bfloat16, torch.float32) else v) for k, v in constant.kwargs
        )
        value = None if constant.value is None else wide(constant.value)
        return dataclasses.replace(constant, kwargs=kwargs, value=value)

    constants = {path: widened(c) for path, c in graph.constants.items()}
    return Graph(graph.nodes, graph.output, constants).tensors(lambda path: wide(lookup(module, path)))


class Enclosed:
    """The tensors of a graph by their paths: balls for real numbers, tensors for whole numbers and truth values.

    Args:
        graph: A traced graph.
        module: The module it was traced from; its tensors are read, never changed.
    """

    def __init__(self, graph: Graph, module: nn.Module) -> None:
        self.graph, self.module, self.kinds = graph, module, precisions(module)
        self._made: dict[str, Ball | Tensor] = {}

    def __call__(self, path: str) -> Ball | Tensor:
        """What a path names.

        Raises:
            GraphError: An entry is not a finite real number, or its rounding is not known.
        """
        if path not in self._made:
            constant = self.graph.constants.get(path)
            if constant is None:
                self._made[path] = _stored(path, lookup(self.module, path))
            elif constant.value is not None:
                self._made[path] = _stored(path, constant.value)
            else:
                self._made[path] = self._computed(path, constant)
        return self._made[path]

    def exact(self, path: str) -> Ball:
        """A stored tensor of real numbers, in float64."""
        found = self(path)
        if not isinstance(found, Ball):
            raise GraphError(f"'{path}' is not of a real floating-point type")
        return found

    def number(self, value: float) -> Ball:
        """A number of the program, as it is and as the precision of the network reads it."""
        found = readings(float(value), self.kinds)
        return Ball.between(min(found), max(found))

    def _computed(self, path: str, constant: Constant) -> Ball | Tensor:
        operation = constant.target.split(".")[1]
        args, kwargs = _each(self._argument, constant.args), {k: _each(self._argument, v) for k, v in constant.kwargs}
        balls = [a for a in _members([args, list(kwargs.values())]) if isinstance(a, Ball)]
        entry = TABLE.get(operation)

        def run(part: Callable[[Ball], Array]) -> Tensor:
            def pick(arg: Any) -> Any:
                return torch.from_numpy(np.array(part(arg))) if isinstance(arg, Ball) else arg

            given = [float(part(self.number(a))) if operation in _FILLED and _is_number(a) else a for a in args]
            result = resolve(constant.target)(*_each(pick, given), **{k: _each(pick, v) for k, v in kwargs.items()})
            found: Tensor = result if constant.select is None else result[constant.select]
            return found

        def mid(ball: Ball) -> Array:
            return ball.mid

        def rad(ball: Ball) -> Array:
            return ball.radius

        def is_zero(arg: Any) -> bool:
            return isinstance(arg, Ball) and not arg.magnitude.any()

        found: Ball | Tensor | None = None
        if operation in _FULL and _is_number(args[-1]) and run(mid).is_floating_point():
            found = Ball.exact(np.ones(run(mid).shape)) * self.number(args[-1])
        elif operation in _EMPTY:
            found = Ball.exact(run(mid).double().numpy())
        elif not balls:
            made = run(mid)
            whole = made.double()
            if not made.is_floating_point():
                found = made
            elif operation in _WHOLES and bool((whole == whole.round()).all() & (whole.abs() <= _WHOLE).all()):
                found = Ball.exact(whole.numpy())
        elif operation in _COMPARISONS and all(b.rad is None for b in balls):
            sharp = all(len(set(readings(float(a), self.kinds))) == 1 for a in args if _is_number(a))
            found = run(mid) if sharp else None
        elif entry is not None and entry.rule in _SAME and len(balls) == 1:
            made = run(mid)
            if not made.is_floating_point() or bool((made.double() == torch.from_numpy(np.array(balls[0].mid))).all()):
                found = balls[0] if made.is_floating_point() else None
        elif (
            operation in _PARTS | _FILLED
            or (entry is not None and entry.rule in _MOVES)
            or (entry is not None and entry.rule in _PRODUCTS and any(map(is_zero, args[:3])))  # of zero, and a bias
        ):
            radius = run(rad).double().numpy()
            found = Ball(run(mid).double().numpy(), radius if radius.any() else None)
        elif operation in _RULES and (not kwargs or (set(kwargs) == {"alpha"} and operation in ("add", "sub"))):
            if operation not in _COUNTED:
                args = [self._real(a) for a in args]
            if kwargs:
                args[1] = args[1] * self.number(kwargs["alpha"])
            found = _RULES[operation](*args)
        if found is None:
            raise GraphError(f"the rounding of the constant '{path[1:]}' ({operation}) is not known")
        if isinstance(found, Ball) and not found.is_finite():
            raise GraphError(f"the constant '{path[1:]}' has entries that are not finite")
        return found

    def _argument(self, arg: Any) -> Any:
        return self(arg.path) if isinstance(arg, Attr) else arg

    def _real(self, arg: Any) -> Ball:
        """An argument as real numbers."""
        if isinstance(arg, Ball):
            return arg
        if _is_number(arg):
            return self.number(arg)
        if isinstance(arg, Tensor) and bool((arg.double().abs() <= _WHOLE).all()):
            return Ball.exact(arg.double().numpy())
        raise GraphError("the rounding of a constant is not known: an argument is no real number")


def _stored(path: str, tensor: Tensor) -> Ball | Tensor:
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype.itemsize > 8):
        raise GraphError(f"'{path}' is not of a real floating-point type")
    values = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return values
    if not bool(values.isfinite().all()):
        raise GraphError(f"'{path}' has entries that are not finite")
    return Ball.exact(values.double().numpy())


def _each(function: Callable[[Any], Any], arg: Any) -> Any:
    return [_each(function, a) for a in arg] if isinstance(arg, (tuple, list)) else function(arg)


def _members(arg: Any) -> Iterable[Any]:
    if isinstance(arg, (tuple, list)):
        for a in arg:
            yield from _members(a)
    else:
        yield arg


def _is_number(arg: Any) -> bool:
    return isinstance(arg, (int, float)) and not isinstance(arg, bool)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _monotone(function: Callable[[Array], Array], x: Ball, signed: bool = False) -> Ball:
    """A monotone function of one or two correctly rounded operations, on numbers that are not zero, or positive."""
    low, high = (
        (x.mid, x.mid) if x.rad is None else (np.nextafter(x.mid - x.rad, -np.inf), np.nextafter(x.mid + x.rad, np.inf))
    )
    if not bool(((low > 0) | ((high < 0) & signed)).all()):
        raise GraphError("a constant is a quotient by a number that may be zero, or a root of one that may be negative")
    ends = np.stack([function(low), function(high)])
    slack = 4 * UNIT * np.abs(ends).max(0) + TINY
    return Ball.between(ends.min(0) - slack, ends.max(0) + slack)


def inverse(x: Ball) -> Ball:
    """``1 / x``, entry by entry.

    Raises:
        GraphError: Some entry may be zero.
    """
    if x.rad is None and bool((np.abs(np.frexp(x.mid)[0]) == 0.5).all()):
        return Ball.exact(1 / x.mid)
    return _monotone(lambda t: 1 / t, x, signed=True)


def _root(x: Ball) -> Ball:
    return _monotone(np.sqrt, x)


def _inverse_root(x: Ball) -> Ball:
    return _monotone(lambda t: 1 / np.sqrt(t), x)


def _absolute(x: Ball) -> Ball:
    return Ball(np.abs(x.mid), x.rad)


def _product(left: Ball, right: Ball) -> Ball:
    """Of matrices and vectors."""
    if not 0 < min(left.mid.ndim, right.mid.ndim) <= max(left.mid.ndim, right.mid.ndim) < 3:
        raise GraphError("the rounding of a product of more than two dimensions is not known")
    first = left[None] if left.mid.ndim == 1 else left
    second = right[:, None] if right.mid.ndim == 1 else right
    shape = left.shape[:-1] + (right.shape[1:] if right.mid.ndim == 2 else ())
    found = first @ second
    return Ball(found.mid.reshape(shape), found.radius.reshape(shape))


def _total(x: Ball, dims: Any = None, keep: bool = False) -> Ball:
    """The sum over some dimensions, or all."""
    axes = (
        list(range(x.mid.ndim))
        if not dims
        else sorted({d % x.mid.ndim for d in ([dims] if isinstance(dims, int) else dims)})
    )
    shape = [1 if i in axes else n for i, n in enumerate(x.shape)]

    def rows(values: Array) -> Array:
        moved = np.moveaxis(values, axes, range(len(axes)))
        return moved.reshape(int(np.prod(moved.shape[: len(axes)])), -1)

    lines = Ball(rows(x.mid), None if x.rad is None else rows(x.rad))
    found = Ball.exact(np.ones((1, len(lines.mid)))) @ lines
    shape = shape if keep else [n for i, n in enumerate(x.shape) if i not in axes]
    return Ball(found.mid.reshape(shape), found.radius.reshape(shape))


def _mean(x: Ball, dims: Any = None, keep: bool = False) -> Ball:
    found = _total(x, dims, keep)
    return found * inverse(Ball.exact(float(x.mid.size // found.mid.size)))


def _normed(x: Ball, size: Ball, dim: int = 0) -> Ball:
    """``g v / ‖v‖``, the norm over all dimensions but one."""
    if x.mid.ndim < 2:
        raise GraphError("the rounding of a normalised vector is not known")
    dims = [d for d in range(x.mid.ndim) if dim == -1 or d != dim]
    return x * (size * _inverse_root(_total(x * x, dims, keep=True)))


_RULES: dict[str, Callable[..., Ball]] = {
    "_weight_norm": _normed,
    "abs": _absolute,
    "add": lambda a, b: a + b,
    "div": lambda a, b: a * inverse(b),
    "mean": _mean,
    "mul": lambda a, b: a * b,
    "neg": lambda a: -a,
    "reciprocal": inverse,
    "rsqrt": _inverse_root,
    "rsub": lambda a, b: b - a,
    "sqrt": _root,
    "square": lambda a: a * a,
    "sub": lambda a, b: a - b,
    "sum": _total,
    **dict.fromkeys(("matmul", "mm", "mv", "dot", "vdot"), _product),
}
_COUNTED = {"sum", "mean", "_weight_norm"}  # their numbers are dimensions
