r"""Rounding of a forward pass: how far computed logits are from those of the network in real arithmetic.

A certificate is about the network in real arithmetic with its stored weights; logits are computed in floating point.
:func:`forward_error` bounds the difference for given inputs, so that it can be charged to the margins of a radius.

The bound is *a posteriori*. The traced graph is evaluated once more in float64, node by node, with error bounds
(:class:`~ldlt.certificates.ball.Ball`), which gives :math:`|\tilde y - y| \le d` for the real output ``y``; then

.. math:: |\hat y - y| \le |\hat y - \tilde y| + d

holds for the logits :math:`\hat y` that the model returned, however it computed them: in any precision, in any order of
summation, fused, on any device. For a float32 network ``d`` is negligible, and the bound is the error itself. ``d`` is
carried along as follows, with ``u = 2^-53`` and ``τ`` for underflow.

* Affine maps: :math:`d ← |W|d + γ_n|W||\tilde x| + 2nτ`, :math:`γ_n = nu/(1 - nu)`, in any order of summation, with or
  without fused multiply-add (Higham, *Accuracy and Stability of Numerical Algorithms*, 2002, section 3.1); the error of
  adding the bias is computed exactly (Knuth's two-sum).
* Sums, multiples, means, products with constants: likewise, by the rules of :mod:`ldlt.certificates.enclose`.
* Elementwise activations: :math:`d ← \max(|m|, |L|)\,d` plus the rounding of ``σ`` at :math:`\tilde v`; for a monotone
  ``σ`` no more than what the images of :math:`\tilde v ± d` allow. Sorting passes on the largest ``d`` of a group.

Entry by entry, ``|W|`` makes errors grow by some :math:`\sqrt n` per layer, without need. So a bound on the Euclidean
norm of all errors of a value is carried along, too: a map multiplies it by (a proven bound of) :math:`\|W\|_2`, an
activation by the largest slope, and the roundings of the step are added. Each description improves the other. In a
network whose layers have norms near one, errors grow with its depth, not exponentially.

What is assumed: IEEE 754 arithmetic in float64, rounded to nearest, with a conventional matrix product (see
:mod:`ldlt.certificates.ball`), and that ``exp``, ``expm1``, ``log1p``, ``tanh``, ``erf`` and ``atan`` of PyTorch on the
CPU in float64 are within :math:`2^{-50}|f| + τ` of the truth (four units in the last place; their vendors claim about
one), ``sin`` and ``cos`` within :math:`2^{-50}`. Comparisons, and what follows from sums, products and quotients, need
no assumption. A number written into the program, such as the slope of a leaky ReLU, may be read in float64 or in the
precision of the network: both readings are covered, as in certificates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldlt import activations
from ldlt.certificates.ball import TINY, UNIT, Ball, add_up, arithmetic_is_ieee, divide_up, multiply_up, product_up
from ldlt.certificates.definite import is_semidefinite
from ldlt.certificates.enclose import Maps, Slopes, precisions, readings
from ldlt.engine.network import Lipschitz
from ldlt.errors import GraphError, OptionError, ShapeError
from ldlt.evaluation import evaluating
from ldlt.graph import Activation, Affine, Graph, Input, Wire, fold
from ldlt.graph.trace import trace

__all__ = ["ACCURACY", "forward_error"]

ACCURACY = 2.0**-50
"""Assumed relative error of the elementary functions in float64."""

Array = NDArray[np.float64]

_POINTS = "points"
_LARGEST = 1024  # of the smaller side of a matrix whose spectral norm is bounded by a factorisation


def forward_error(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    r"""Logits of a network, and a bound on their rounding error.

    Args:
        model: A plain module of the operations that :class:`ldlt.Lipschitz` accepts; of a network that was built by
            it, what ``freeze()`` returns. It is run in evaluation mode.
        x: Inputs (batch, \*shape) in the precision of the model. They are taken as exact.

    Returns:
        ``logits`` (batch, k) as the model computes them, and ``error`` (batch, k) in float64 with
        ``|logits − y| ≤ error``, entry by entry, for the output ``y`` of the network in real arithmetic. The error is
        infinite where something overflowed or an input is not finite. It belongs to these logits: another batch size
        or machine may round differently.

    Raises:
        GraphError: The network computes its weights while running, or has an operation whose rounding is not known.
        OptionError: ``x`` has another precision, or the processor does not follow IEEE 754.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        >>> logits, error = forward_error(model, torch.randn(5, 8))
        >>> error.shape, bool((error < 1e-6).all())
        (torch.Size([5, 3]), True)
    """
    _refuse(model, x)
    graph = trace(model, tuple(x.shape[1:]))
    with evaluating(model), torch.no_grad():
        logits: Tensor = model(x.detach().clone())  # an activation in place may overwrite its input
    points = Ball.exact(x.detach().double().cpu().reshape(len(x), graph.input.features).numpy().T)
    with np.errstate(all="ignore"):  # what overflows ends in an infinite error
        found = fold(graph, _Evaluation(graph, model, points))[graph.output].ball
        computed = logits.detach().double().cpu().numpy().T
        error = add_up(np.nextafter(np.abs(computed - found.mid), np.inf), found.radius)
    error[~np.isfinite(error)] = np.inf
    return logits.detach(), torch.tensor(error.T, device=logits.device)


def _refuse(model: nn.Module, x: Tensor) -> None:
    if not isinstance(model, nn.Module):
        raise GraphError(f"the model must be a torch.nn.Module, not {type(model).__name__}")
    if any(isinstance(m, Lipschitz) for m in model.modules()):
        raise GraphError(
            "a Lipschitz network computes its weights while it runs, with rounding that is not bounded here: pass "
            "net.freeze(), whose weights are plain numbers"
        )
    if not isinstance(x, Tensor) or x.ndim < 2:
        raise ShapeError("x must be a batch of inputs, (batch, *shape)")
    kinds = precisions(model) or (x.dtype,)
    if x.dtype not in kinds or not x.is_floating_point():
        raise OptionError(f"x is {x.dtype} but the network is {kinds[0]}: convert it with x.to({kinds[0]})")
    if not arithmetic_is_ieee():
        raise OptionError(
            "the processor does not round to nearest or flushes small numbers to zero, so rounding errors cannot be "
            "bounded: call torch.set_flush_denormal(False)"
        )


@dataclass(frozen=True, eq=False)
class _Value:
    """A value of the graph, enclosed in two ways.

    Attributes:
        ball: Entry by entry, (features, batch).
        norm: Bound on the Euclidean norm of the error of each sample, (batch,).
    """

    ball: Ball
    norm: Array

    @classmethod
    def of(cls, ball: Ball, norm: Array) -> _Value:
        """Each description improved by the other."""
        if ball.rad is None:
            return cls(ball, np.zeros(ball.shape[1]))
        return cls(Ball(ball.mid, np.minimum(ball.rad, norm)), np.minimum(norm, _length(ball.rad)))


class _Evaluation(Maps):
    """The algebra of values at given points, which are the columns of one block.

    Args:
        graph: A traced graph.
        module: Its module.
        points: Inputs, (features, batch).
    """

    def __init__(self, graph: Graph, module: nn.Module, points: Ball) -> None:
        super().__init__(graph, module)
        self.points = points
        self.made: dict[str, list[Ball]] = {}

    def input(self, node: Input) -> _Value:
        return _Value.of(self.points, np.zeros(self.points.shape[1]))

    def affine(self, node: Affine, value: _Value) -> _Value:
        weight = self.free(node)
        shift = None
        if node.bias is not None:  # one number per feature, or per channel
            bias = _real(self.enclosed(node.bias))
            bias = bias[np.repeat(np.arange(len(bias.mid)), node.features // len(bias.mid))]
            shift = bias[:, None]
        own = weight @ Ball(value.ball.mid)
        own = own if shift is None else own + shift
        if value.ball.rad is None:
            return _Value.of(own, _length(own.radius))
        size = np.abs(weight.mid)
        passed = np.minimum(
            product_up(size, value.ball.rad),
            multiply_up(_length(size.T)[:, None], value.norm),  # Cauchy, Schwarz
        )
        norm = np.minimum(multiply_up(_norm(weight), value.norm), _length(passed))
        return _Value.of(Ball(own.mid, add_up(own.radius, passed)), add_up(norm, _length(own.radius)))

    def wire(self, node: Wire, values: Sequence[_Value]) -> _Value:
        full = self.combine(node, [{_POINTS: v.ball} for v in values])[_POINTS]
        own = self.combine(node, [{_POINTS: Ball(v.ball.mid)} for v in values])[_POINTS]
        shift = self._shift(node)
        if shift is not None:
            full, own = full + shift, own + shift
        norm = _length(own.radius)
        for gain, value in zip(self._gains(node), values, strict=True):
            norm = add_up(norm, multiply_up(gain, value.norm))
        return _Value.of(full, norm)

    def matrices(self, node: Wire) -> list[Ball]:
        """They are asked for several times."""
        if node.name not in self.made:
            self.made[node.name] = super().matrices(node)
        return self.made[node.name]

    def _gains(self, node: Wire) -> list[float]:
        """By how much the operation multiplies Euclidean norms, for each parent."""
        if node.role == "order":
            return [1.0]
        if node.role == "sum":
            return [float(self.scale(node, s).magnitude) for s in node.scales]
        if node.role == "rearrange":  # a feature that is repeated c times counts √c times
            ends = np.cumsum([0, *(self.graph[p].features for p in node.parents)])
            counts = np.bincount(self.source(node), minlength=int(ends[-1]))
            parts = [counts[a:b].max(initial=0) for a, b in pairwise(ends)]
            return [float(np.nextafter(np.sqrt(c), np.inf)) if c > 1 else float(c) for c in parts]
        return [_norm(m) if m.mid.ndim == 2 else float(m.magnitude.max(initial=0.0)) for m in self.matrices(node)]

    def _shift(self, node: Wire) -> Ball | None:
        """The constant that a sum adds, (features, 1): its value where all parents are zero."""
        if node.role != "sum":
            return None
        tensors = {p: _real(self.enclosed(p)) for p in node.constants}
        zeros = [torch.zeros(1, *self.graph[p].shape, dtype=torch.float64) for p in node.parents]

        def run(part: Callable[[Ball], Array]) -> Array:
            with torch.no_grad():
                found = node.bind(lambda path: torch.from_numpy(np.array(part(tensors[path]))))(*zeros)
            return found.reshape(-1, 1).numpy()  # type: ignore[no-any-return]

        constant = run(lambda b: b.mid)
        factors = [float(a) for a in (*node.args, *(v for _, v in node.kwargs)) if isinstance(a, int | float)]
        rad = np.abs(run(lambda b: b.radius) - run(lambda b: np.zeros(b.shape)))
        if not constant.any() and not rad.any():
            return None
        if all(f in (1.0, -1.0) for f in factors):
            return Ball(constant, rad if rad.any() else None)
        # A number in the place of the constant, alpha in front of it, or both: at most two readings and one rounding.
        kinds = precisions(self.module)
        spread = sum(max(abs(r - f) for r in readings(f, kinds)) / abs(f) for f in factors if f)
        size = add_up(np.abs(constant), rad)
        return Ball(constant, add_up(rad, multiply_up(size, 4 * spread + 8 * UNIT)))

    def activation(self, node: Activation, value: _Value) -> _Value:
        activation = node.resolve(self.module)
        slopes = Slopes.of(node, self.module)
        if slopes.mixed is not None and activations.sector(activation).group == 0:
            gain = float(slopes.high.max(initial=0.0))
            mixture = _softmax(value.ball.mid, slopes.mixed)
            lengths = np.zeros((slopes.mixed.max() + 1, value.ball.shape[1]))
            np.add.at(lengths, slopes.mixed, multiply_up(value.ball.radius, value.ball.radius))
            passed = multiply_up(gain, np.sqrt(lengths * (1 + len(slopes.mixed) * 4 * UNIT)) * (1 + 4 * UNIT))
            norm = add_up(multiply_up(gain, value.norm), _length(mixture.radius))
            return _Value.of(Ball(mixture.mid, add_up(mixture.radius, passed[slopes.mixed])), norm)
        if slopes.mixed is not None:
            return _Value.of(_sorted(activation, node.shape, value.ball, slopes.mixed), value.norm)
        functions = _Balls(self.enclosed.number)

        def at(points: Array) -> Ball:
            try:
                return activations.enclose(activation, Ball.exact(points), functions)
            except GraphError as error:
                raise GraphError(f"node '{node.name}': {error}") from error

        mid, old = value.ball.mid, value.ball.rad
        own = at(mid)
        if old is None:
            return _Value.of(own, _length(own.radius))
        steepest = np.maximum(np.abs(slopes.low), np.abs(slopes.high))
        rad = add_up(own.radius, multiply_up(steepest[:, None], old))
        monotone = (slopes.low >= 0) | (slopes.high <= 0)
        if monotone.any():  # the image of an interval lies between those of its ends
            ends = [at(np.nextafter(mid + s * old, s * np.inf)) for s in (-1, 1)]
            reach = [add_up(np.nextafter(np.abs(e.mid - own.mid), np.inf), e.radius) for e in ends]
            rad = np.where(monotone[:, None], np.minimum(rad, np.maximum(*reach)), rad)
        norm = add_up(_length(own.radius), multiply_up(steepest.max(initial=0.0), value.norm))
        return _Value.of(Ball(own.mid, rad), norm)


def _length(radii: Array) -> Array:
    """Upper bound of the Euclidean norms of columns that are not negative."""
    squares = multiply_up(radii, radii)
    return np.nextafter(np.sqrt(product_up(np.ones(len(radii)), squares)), np.inf)


def _norm(matrix: Ball) -> float:
    r"""Upper bound of :math:`\|A\|_2` on a ball.

    The least of :math:`\sqrt{\|A\|_1\|A\|_∞}`, the Frobenius norm and, for matrices that are worth it, a number ``s``
    that is proven by :math:`s^2I - A'A ⪰ 0`.
    """
    size = matrix.magnitude
    columns, rows = product_up(np.ones(len(size)), size), product_up(size, np.ones(size.shape[1]))
    whole = float(np.nextafter(np.sqrt(multiply_up(columns.max(initial=0.0), rows.max(initial=0.0))), np.inf))
    crude = min(whole, float(_length(_length(size)[:, None])[0]))
    least = float(_length(size).max(initial=0.0))  # the longest column
    if min(size.shape) > _LARGEST or not 1.01 * least < crude < np.inf:
        return crude
    factor = matrix if size.shape[0] >= size.shape[1] else matrix.T
    gram = factor.T @ factor
    top = float(torch.linalg.eigvalsh(torch.tensor(gram.mid))[-1]) * (1 + 1e-6)
    if not is_semidefinite(Ball(np.diag(np.full(len(gram.mid), top))) - gram).holds:
        return crude
    return min(crude, float(np.nextafter(np.sqrt(top), np.inf)))


def _real(tensor: Ball | Tensor) -> Ball:
    """A constant as real numbers; whole ones are small enough to be exact."""
    return tensor if isinstance(tensor, Ball) else Ball.exact(tensor.double().numpy())


def _softmax(points: Array, mixed: NDArray[np.int64]) -> Ball:
    """``exp(v − max v)`` over its sum, group by group, at exact points."""
    largest = np.full((mixed.max() + 1, points.shape[1]), -np.inf)
    np.maximum.at(largest, mixed, points)
    functions = _Balls(Ball.exact)
    top = functions.exp(Ball.exact(points) - Ball.exact(largest[mixed]))
    groups = Ball.exact((np.arange(mixed.max() + 1)[:, None] == mixed).astype(np.float64))
    return functions.divide(top, (groups @ top)[mixed])


def _sorted(activation: nn.Module, shape: tuple[int, ...], value: Ball, mixed: NDArray[np.int64]) -> Ball:
    """Comparisons are exact, and sorting is 1-Lipschitz in the largest entry of a group."""
    points = torch.tensor(value.mid.T).reshape(-1, *shape)
    mid: Array = activation.forward(points).flatten(1).numpy().T
    if value.rad is None:
        return Ball(mid)
    largest = np.zeros((mixed.max() + 1, value.shape[1]))
    np.maximum.at(largest, mixed, value.rad)
    return Ball(mid, largest[mixed])


# -- elementary functions ----------------------------------------------------------------------------------------------


class _Balls:
    """The elementary functions of :class:`ldlt.activations.Functions`, of balls.

    Args:
        read: Encloses a number of the program in all its readings.
    """

    def __init__(self, read: Callable[[float], Ball]) -> None:
        self.read = read

    def constant(self, value: float) -> Ball:
        if value * 2.0**10 == round(value * 2.0**10) and abs(value) <= 2.0**10:
            return Ball.exact(value)
        return Ball.between(np.nextafter(value, -np.inf), np.nextafter(value, np.inf))

    def number(self, value: float, rounded: bool = False) -> Ball:
        found = self.read(value)
        if not rounded:
            return found
        return Ball(found.mid, add_up(found.radius, 2 * UNIT * np.abs(found.mid), np.float64(TINY)))

    def channels(self, weight: Tensor, x: Ball) -> Ball:
        values = weight.detach().double().cpu().numpy().reshape(-1)
        return Ball.exact(np.repeat(values, x.shape[0] // len(values))[:, None])

    def clip(self, x: Ball, low: Ball | None = None, high: Ball | None = None) -> Ball:
        """It moves no further than ``x`` and the limits do."""
        mid, rad = x.mid, x.radius
        if low is not None:
            mid, rad = np.maximum(mid, low.mid), np.maximum(rad, low.radius)
        if high is not None:
            mid, rad = np.minimum(mid, high.mid), np.maximum(rad, high.radius)
        return Ball(mid, rad)

    def split(self, x: Ball, right: Ball, left: Ball) -> Ball:
        """Both where the sign is not known."""
        sure = (np.abs(x.mid) > x.radius) | (x.radius == 0)
        found = _choose(x.mid >= 0, right, left)
        if bool(sure.all()):
            return found
        other = _choose(x.mid >= 0, left, right)
        reach = add_up(np.nextafter(np.abs(other.mid - found.mid), np.inf), other.radius)
        return Ball(found.mid, np.where(sure, found.radius, np.maximum(found.radius, reach)))

    def divide(self, x: Ball, y: Ball) -> Ball:
        r""":math:`|a'/b' - q| \le (r_a + |q|r_b)/|b'|` around ``q = a/b``, and one rounding."""
        if y.rad is None and bool((np.abs(np.frexp(y.mid)[0]) == 0.5).all()):  # a power of two
            return x * Ball.exact(1 / y.mid)
        mid: Array = x.mid / y.mid
        size = np.nextafter(np.abs(mid), np.inf)
        least = np.nextafter(np.abs(y.mid) - y.radius, -np.inf)
        spread = divide_up(add_up(x.radius, multiply_up(size, y.radius)), np.maximum(least, 0.0))
        return Ball(mid, np.where(least > 0, add_up(2 * UNIT * size, spread, np.float64(TINY)), np.inf))

    def abs(self, x: Ball) -> Ball:
        return Ball(np.abs(x.mid), x.rad)

    def exp(self, x: Ball) -> Ball:
        return _function(torch.exp, x, _steepest(x))

    def expm1(self, x: Ball) -> Ball:
        return _function(torch.expm1, x, _steepest(x))

    def log1p(self, x: Ball) -> Ball:
        """Slope ``1/(1 + x)``."""
        least = np.nextafter(1 + np.nextafter(x.mid - x.radius, -np.inf), -np.inf)
        return _function(torch.log1p, x, np.where(least > 0, divide_up(1.0, np.maximum(least, 0.0)), np.inf))

    def tanh(self, x: Ball) -> Ball:
        """Slope ``sech² ≤ 4exp(−2|ξ|)``, ``ξ`` in the ball: without it, large arguments would keep their errors."""
        nearest = np.maximum(np.abs(x.mid) - x.radius, 0.0)
        return _function(torch.tanh, x, np.minimum(1.0, 4.001 * np.exp(-2 * nearest) + 1e-300))

    def erf(self, x: Ball) -> Ball:
        return _function(torch.erf, x, 1.13)  # 2/√π

    def atan(self, x: Ball) -> Ball:
        return _function(torch.atan, x)

    def sin(self, x: Ball) -> Ball:
        return _wave(torch.sin, x)

    def cos(self, x: Ball) -> Ball:
        return _wave(torch.cos, x)


def _function(function: Callable[[Tensor], Tensor], x: Ball, slope: Any = 1.0) -> Ball:
    """A function of PyTorch with the accuracy that is assumed, and with slopes up to ``slope`` on the balls."""
    mid: Array = function(torch.tensor(x.mid)).numpy()
    rad = add_up(ACCURACY * np.abs(mid), np.float64(TINY))
    return Ball(mid, rad if x.rad is None else add_up(rad, multiply_up(slope, x.rad)))


def _wave(function: Callable[[Tensor], Tensor], x: Ball) -> Ball:
    """Sine or cosine: small values come from a reduction, hence the absolute error."""
    mid: Array = function(torch.tensor(x.mid)).numpy()
    return Ball(mid, add_up(np.full(mid.shape, ACCURACY), x.radius))


def _steepest(x: Ball) -> Array:
    """The exponential at the upper ends, rounded upwards."""
    top: Array = torch.exp(torch.tensor(np.nextafter(x.mid + x.radius, np.inf))).numpy()
    return multiply_up(top, 1 + 2 * ACCURACY)  # type: ignore[no-any-return]


def _choose(mask: NDArray[np.bool_], yes: Ball, no: Ball) -> Ball:
    return Ball(np.where(mask, yes.mid, no.mid), np.where(mask, yes.radius, no.radius))
