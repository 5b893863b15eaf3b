r"""A stored network with error bounds: its tensors, its linear maps and the slopes of its activations, enclosed.

**Tensors.** A parameter in float32 or float64 is a number, and a certificate is about that number. A constant of the
graph, ``weight * mask`` or the scale of a batch normalisation, is that of real arithmetic, enclosed in a
:class:`~ldlt.certificates.ball.Ball`: operations that move entries act on midpoint and radius, elementwise arithmetic
and products of matrices follow the rules of balls. Any other operation is refused: its rounding is not known.

**Linear maps.** The coordinates ``z`` are the input and the activations. A value of the graph is kept as a dictionary
*block of z → matrix* (features, size of the block), without the blocks it does not depend on. Linear operations in
between have entries that are found by running them on unit vectors in float64. The table of operations says how many
roundings that takes: none for sums, rearrangements and products with one constant, since every sum then has one term
that is not zero and every product a factor 0 or 1. A quotient or a mean is rounded, which a radius accounts for.

**Slopes.** The inequality uses the sector of an activation only through ``m + L`` and ``mL``:

.. math:: \|w - cv\|^2 - r^2\|v\|^2 = (w - mv)(w - Lv) = w^2 - (m + L)vw + mLv^2 ,

and it is valid for every ``[m, L]`` that contains the slopes. Those of :func:`ldlt.activations.slope_bounds` are exact
or correctly rounded to float64, hence moved by one float outwards unless they are short dyadic numbers such as 0, 1,
1/4, -1/2, 3/2 (no rounded constant of that table is one). A number given to a module, such as the slope of a leaky
ReLU, is rounded to the precision of the network when it is used; both readings are covered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldlt import activations
from ldlt.certificates.ball import TINY, UNIT, Array, Ball
from ldlt.errors import GraphError, ShapeError, SlopeError
from ldlt.graph import Activation, Affine, Attr, Constant, Graph, Input, Ref, Wire, fold, index_map, lookup, resolve
from ldlt.graph.operations import TABLE

__all__ = ["Blocks", "Enclosed", "Maps", "Network", "Slopes", "UnknownRounding", "inverse", "precisions", "readings"]

Blocks = dict[str, Ball]
"""A linear function of the coordinates: block → (features, size of the block)."""


class UnknownRounding(GraphError):
    """An operation whose rounding is not known, so that nothing it takes part in can be proven."""


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
            raise UnknownRounding(f"the rounding of the constant '{path[1:]}' ({operation}) is not known")
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
        raise UnknownRounding("the rounding of a constant is not known: an argument is no real number")


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
        raise UnknownRounding("the rounding of a product of more than two dimensions is not known")
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
        raise UnknownRounding("the rounding of a normalised vector is not known")
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


# -- slopes ------------------------------------------------------------------------------------------------------------


class Slopes:
    """Slope bounds of one activation node.

    Args:
        low: m, (features,).
        high: L, (features,).
        mixed: None, or for every entry the number of the group that is mixed; then the inequality is that of the whole
            group, with m = c − r and L = c + r.
    """

    def __init__(
        self, low: NDArray[np.float64], high: NDArray[np.float64], mixed: NDArray[np.int64] | None = None
    ) -> None:
        self.low, self.high, self.mixed = low, high, mixed

    @classmethod
    def of(cls, node: Activation, module: nn.Module, given: tuple[Tensor, Tensor] | None = None) -> Slopes:
        """Slopes of a node, valid for all inputs unless others are given.

        Args:
            node: The activation.
            module: The network.
            given: Slopes ``(m, L)``, (features,) each, that the caller has proven in some other way.
        """
        activation = node.resolve(module)
        sector = activations.sector(activation, node.shape[0] if node.shape else 1)  # refuses what does not fit
        mixed = activations.mixed(activation, node.shape)
        one = np.ones(node.features)
        if mixed is not None:
            center, radius = float(sector.center), float(sector.radius)  # halves and quarters
            return cls((center - radius) * one, (center + radius) * one, mixed.numpy())
        kinds = precisions(module)
        if given is not None:
            low, high = (t.detach().double().cpu().numpy().reshape(-1) for t in given)
            if len(low) != node.features or len(high) != node.features:
                raise ShapeError(f"slopes of '{node.name}' must have {node.features} entries")
            if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
                raise SlopeError(f"slopes of '{node.name}' must be finite with m <= L")
            return cls(low, high)
        if isinstance(activation, nn.PReLU) and type(activation).forward is nn.PReLU.forward:
            activations.slope_bounds(activation)  # refuses what is not finite
            weight = activation.weight.detach().double().cpu().numpy().reshape(-1)
            if node.features % len(weight) or (len(weight) > 1 and node.shape[:1] != (len(weight),)):
                raise ShapeError(f"'{node.name}' has {len(weight)} slopes for features of shape {node.shape}")
            spread = np.repeat(weight, node.features // len(weight))
            return cls(np.minimum(spread, 1.0), np.maximum(spread, 1.0))
        m, ell = activations.slope_bounds(activation)
        return cls(min(outward(m, kinds, -1)) * one, max(outward(ell, kinds, 1)) * one)

    @property
    def total(self) -> Ball:
        """``m + L``, (features,)."""
        return Ball.exact(self.low) + Ball.exact(self.high)

    @property
    def product(self) -> Ball:
        """``mL``, (features,)."""
        return Ball.exact(self.low) * Ball.exact(self.high)

    @property
    def hull(self) -> Ball:
        """``[m, L]``, (features,)."""
        return Ball.between(self.low, self.high)


def outward(value: float, kinds: Iterable[torch.dtype], direction: int) -> list[float]:
    """Readings of a number that may have been rounded, moved by one float in a direction unless it is dyadic."""
    if value * 2.0**10 == round(value * 2.0**10) and abs(value) <= 2.0**10:
        return [value]
    return [float(np.nextafter(v, direction * np.inf)) for v in readings(value, kinds)]


# -- linear maps -------------------------------------------------------------------------------------------------------


class Maps:
    """The linear maps of a stored network, with error bounds.

    Args:
        graph: A traced graph.
        module: The module it was traced from; its tensors are read, never changed.

    Attributes:
        enclosed: The tensors of the graph.
    """

    def __init__(self, graph: Graph, module: nn.Module) -> None:
        self.graph, self.module, self.enclosed = graph, module, Enclosed(graph, module)

    def free(self, node: Affine) -> Ball:
        """The matrix of a free map."""
        weight = torch.from_numpy(self.enclosed.exact(node.weight).mid)
        return Ball.exact(node.matrix(weight, self.graph, exact=True).numpy())

    def combine(self, node: Wire, parents: Sequence[Blocks]) -> Blocks:
        """A linear operation on linear functions of coordinates, without the constant that a sum may add."""
        if node.role == "order":
            return parents[0]
        if node.role == "rearrange":
            return self._rearrange(node, parents)
        if node.role == "sum":
            matrices = [self.scale(node, s) for s in node.scales]
            if any(self.graph[p].shape != node.shape for p in node.parents):
                raise GraphError(f"node '{node.name}': a sum of different shapes")
        else:
            matrices = self.matrices(node)
        found: Blocks = {}
        for matrix, parent in zip(matrices, parents, strict=True):
            for b, block in parent.items():
                term = matrix @ block if matrix.mid.ndim == 2 else matrix[..., None] * block
                found[b] = found[b] + term if b in found else term
        return found

    def source(self, node: Wire) -> np.ndarray:
        """Which feature of its parents, counted through, each feature of a rearrangement is."""
        found: np.ndarray = index_map(self.graph.index, node, self.graph.tensors(self.module)).cpu().numpy()
        total = sum(self.graph[p].features for p in node.parents)
        if len(found) != node.features or (len(found) and (found.min() < 0 or found.max() >= total)):
            raise ShapeError(f"node '{node.name}' does not rearrange its inputs")
        return found

    def _rearrange(self, node: Wire, parents: Sequence[Blocks]) -> Blocks:
        source = self.source(node)
        counts = [self.graph[p].features for p in node.parents]
        found: Blocks = {}
        for b in dict.fromkeys(b for p in parents for b in p):
            size = next(p[b].shape[1] for p in parents if b in p)
            rows = [p.get(b, Ball(np.zeros((n, size)))) for p, n in zip(parents, counts, strict=True)]
            found[b] = Ball.concatenate(rows)[source]
        return found

    def scale(self, node: Wire, scale: float) -> Ball:
        """The weight of a parent in a sum: as given, and as the precision of the network reads it."""
        if not TABLE[node.operation].roundings:
            return self.enclosed.number(scale)
        numbers = [a for a in (*node.args, *(v for _, v in node.kwargs)) if isinstance(a, int | float)]
        if len(numbers) != 1 or not numbers[0]:
            raise GraphError(f"node '{node.name}': one number was expected")
        number = self.enclosed.number(numbers[0])
        if TABLE[node.operation].rule is TABLE["div"].rule:
            return inverse(number)
        width = number.radius + np.abs(number.mid - numbers[0])  # of a weight w, and hence of 1 − w
        return Ball(np.asarray(scale), np.nextafter(width * (1 + 4 * UNIT), np.inf) + 4 * UNIT)

    def matrices(self, node: Wire) -> list[Ball]:
        """The matrix of a linear operation for each of its parents, (features, features of the parent).

        That of a product with a constant of its own shape is diagonal: (features,).
        """
        entry = TABLE.get(node.operation)
        tensors = {p: self.enclosed(p) for p in node.constants}
        real = [b for b in map(tensors.__getitem__, node.constants) if isinstance(b, Ball) and b.magnitude.any()]
        whole = [t for t in tensors.values() if isinstance(t, Tensor) and t.dtype != torch.bool]
        if entry is None or entry.roundings is None or len(real) + len(whole) > 1 or _sums(node):
            raise UnknownRounding(f"node '{node.name}': the rounding of its operation is not known")
        uncertain = any(b.rad is not None for b in real)
        times, over = (entry.rule is TABLE[n].rule for n in ("mul", "div"))
        if (times or over) and real and self.graph[node.parents[0]].shape == node.shape:
            factor = real[0] if times else inverse(real[0])
            spread = factor * Ball.exact(np.ones((1, *node.shape)))
            return [Ball(spread.mid.reshape(-1), None if spread.rad is None else spread.rad.reshape(-1))]
        if uncertain and entry.roundings:
            raise UnknownRounding(f"node '{node.name}': the rounding of its operation is not known")

        def run(place: int, part: Any) -> Array:
            """The operation on unit vectors of one parent, with a part of each ball in the place of constants."""

            def get(path: str) -> Tensor:
                found = tensors[path]
                return torch.from_numpy(np.array(part(found))) if isinstance(found, Ball) else found

            size = self.graph[node.parents[place]].features
            units = [torch.zeros(size, *self.graph[p].shape, dtype=torch.float64) for p in node.parents]
            units[place] = torch.eye(size, dtype=torch.float64).reshape(units[place].shape)
            with torch.no_grad():
                image = node.bind(get)(*units)
            if (
                image.dtype != torch.float64
                or image.numel() != size * node.features
                or not bool(image.isfinite().all())
            ):
                raise GraphError(f"node '{node.name}': its result has another type or shape, or is not finite")
            return np.ascontiguousarray(image.detach().cpu().reshape(size, node.features).numpy().T)

        found = []
        for place in range(len(node.parents)):
            matrix, rad = run(place, lambda b: b.mid), None
            if entry.roundings:
                rad = 4 * entry.roundings * UNIT * np.abs(matrix) + TINY * (matrix != 0)
            elif uncertain:  # entries are those of one constant, 0 or 1
                rad = np.abs(run(place, lambda b: b.radius) - run(place, lambda b: np.zeros(b.shape)))
            found.append(Ball(matrix, rad))
        return found


class Network(Maps):
    """The stored network as the matrix inequality sees it.

    Args:
        graph: A traced graph.
        module: The module it was traced from; its tensors are read, never changed.
        substituted: Neurons ``w = sv`` that are no coordinates, by activation, (features,) booleans. ``s`` is any
            slope of the neuron: the enclosure covers all of them, so this is sound, and useful where there is only
            one or where ``v`` is constant.
        slopes: Slopes ``(m, L)`` by activation in place of the global ones, (features,) each. They are trusted.

    Attributes:
        sizes: Sizes of the blocks of ``z``: the input, then the activations in topological order.
        kept: Indices of the neurons that are coordinates, by activation.
        inputs: ``V`` of the kept neurons, by activation.
        slopes: Slopes of all neurons, by activation.
        levels: Number of activations on the longest path to each block; 0 for the input.
        output: ``Y``.
        outputs: Number of outputs.

    Raises:
        GraphError: An operation whose rounding is not known, or weights that are not finite real numbers.
    """

    def __init__(
        self,
        graph: Graph,
        module: nn.Module,
        substituted: Mapping[str, np.ndarray] | None = None,
        slopes: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(graph, module)
        self._substituted, self._given = substituted, {} if slopes is None else slopes
        self.sizes: dict[str, int] = {}
        self.kept: dict[str, np.ndarray] = {}
        self.inputs: dict[str, Blocks] = {}
        self.slopes: dict[str, Slopes] = {}
        self.output: Blocks = fold(graph, self)[graph.output]
        self.outputs = graph[graph.output].features
        depth: dict[str, int] = {}
        for node in graph.nodes:
            depth[node.name] = max((depth[p] for p in node.parents), default=0) + isinstance(node, Activation)
        self.levels = {name: depth[name] for name in (graph.input.name, *(a.name for a in graph.activations))}

    def input(self, node: Input) -> Blocks:
        """The coordinates of the input."""
        self.sizes[node.name] = node.features
        return {node.name: Ball.eye(node.features)}

    def wire(self, node: Wire, parents: Sequence[Blocks]) -> Blocks:
        """A linear operation."""
        return self.combine(node, parents)

    def affine(self, node: Affine, parent: Blocks) -> Blocks:
        """A free map."""
        weight = self.free(node)
        return {b: weight @ block for b, block in parent.items()}

    def activation(self, node: Activation, parent: Blocks) -> Blocks:
        """New coordinates, and what is put in for neurons that are none."""
        slopes = self.slopes[node.name] = Slopes.of(node, self.module, self._given.get(node.name))
        drop = np.zeros(node.features, dtype=bool) if self._substituted is None else self._substituted[node.name]
        kept = self.kept[node.name] = np.flatnonzero(~drop)
        value: Blocks = {}
        if len(kept):
            self.sizes[node.name] = len(kept)
            self.inputs[node.name] = {b: block[kept] for b, block in parent.items()}
            value[node.name] = Ball(np.eye(node.features)[:, kept])
        if drop.any():
            alive = np.any([block.magnitude.any(1) for block in parent.values()], 0)
            wide = slopes.high - slopes.low > 1e-3 * np.abs(slopes.high)
            if (drop & alive & wide).any():
                place = int(np.flatnonzero(drop & alive & wide)[0])
                raise GraphError(f"neuron {place} of '{node.name}' has more than one slope and cannot be left out")
            factor = slopes.hull * Ball.exact(drop.astype(np.float64))
            for b, block in parent.items():
                value[b] = factor[:, None] * block
        return value


def _sums(node: Wire) -> bool:
    """Whether an ``einsum`` adds up entries of a constant."""
    if node.operation != "einsum":
        return False
    equation, operands = node.args[0], node.args[1]
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    return "->" not in equation or any(
        letter not in right and all(letter not in other for j, other in enumerate(terms) if j != i)
        for i, term in enumerate(terms)
        if not isinstance(operands[i], Ref)
        for letter in term
    )
