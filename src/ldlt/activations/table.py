"""The one table of activations: slopes, slopes on intervals, the function itself, its calls, its cases."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.activations.law import Functions, Joint, Law, Piece, exponential, number, piecewise, ramp, smooth, wave
from ldlt.activations.layers import Abs, Atan, Clamp, Cos, GroupSort, MaxMin, Sin, WindowSort
from ldlt.errors import GraphError, SlopeError

__all__ = ["TABLE"]

_INF = math.inf
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
_SELU_STEEPEST = 1.758099340847376859940  # their product
_MAX_JUMP = 1e-6  # of Softplus, which still counts as rounding: half an ulp of float32 at x = 20 is 9.5e-7
_MAX_THRESHOLD = 88.0  # Softplus evaluates exp(βx) below its threshold, which overflows float32 above 88.72

F = Functions[Any]

# -- slopes, where they depend on arguments ----------------------------------------------------------------------------


def _clipped(low: float, high: float, slope: float = 1.0) -> list[Piece]:
    """A slope between two limits and 0 outside; constant if they are equal or in the wrong order."""
    if low >= high:
        return [(-_INF, _INF, 0.0)]
    return [(-_INF, low, 0.0), (low, high, slope), (high, _INF, 0.0)]


def _limits(module: Any, low: str, high: str) -> list[Piece]:
    ends = [
        end if getattr(module, name) is None else number(module, name, finite=False)
        for name, end in ((low, -_INF), (high, _INF))
    ]
    return _clipped(*ends)


def _kink(left: Any, right: Any = 1.0, at: float = 0.0) -> list[Piece]:
    return [(-_INF, at, left), (at, _INF, right)]


def _rrelu(module: nn.RReLU) -> list[Piece]:
    """σ' ∈ {1, a}, a drawn from [lower, upper] in training, its middle in evaluation.

    In training the bound is that of each draw: two calls on different inputs compare only with the same draw.
    """
    return [*_kink(number(module, "lower")), (-_INF, 0.0, number(module, "upper"))]


def _softshrink(module: nn.Softshrink) -> list[Piece]:
    """σ' = 0 for |x| < λ and 1 outside; λ = 0 is the identity. PyTorch does not run λ < 0."""
    limit = number(module, "lambd")
    if limit < 0:
        raise SlopeError(f"Softshrink(lambd={limit}): lambd must not be negative")
    return [(-_INF, -limit, 1.0), (-limit, limit, 0.0), (limit, _INF, 1.0)]


def _hardshrink(module: nn.Hardshrink) -> list[Piece]:
    """σ(x) = x for |x| > λ, else 0: jumps by λ at ±λ; λ = 0 is the identity."""
    limit = number(module, "lambd")
    if limit != 0:
        raise SlopeError(f"Hardshrink(lambd={limit}): jumps at ±lambd, so its slopes are unbounded; use Softshrink")
    return [(-_INF, _INF, 1.0)]


def _threshold(module: nn.Threshold) -> list[Piece]:
    """σ(x) = x for x > t, else v: jumps by t − v unless v = t, and is then max(x, t) with σ' ∈ {0, 1}."""
    threshold, value = number(module, "threshold"), number(module, "value")
    if threshold != value:
        raise SlopeError(
            f"Threshold(threshold={threshold}, value={value}): jumps, so slopes are unbounded; use value = threshold"
        )
    return _kink(0.0, at=threshold)


def _elu(module: nn.ELU) -> tuple[float, float]:
    """σ' = 1 for x > 0 and α eˣ for x < 0, which fills (0, α] (or [α, 0)): hull of {0, 1, α}."""
    alpha = number(module, "alpha")
    return min(0.0, alpha), max(1.0, alpha)


def _celu(module: nn.CELU) -> tuple[float, float]:
    """σ' = 1 for x > 0 and exp(x/α) ∈ (0, 1] for x ≤ 0, if α > 0; for α < 0 that grows without bound."""
    alpha = number(module, "alpha")
    if alpha <= 0:
        raise SlopeError(f"CELU(alpha={alpha}): slope exp(x/alpha), x < 0, is bounded for alpha > 0 only; use ELU")
    return 0.0, 1.0


_GELUS = {
    "none": (-0.1289041451851547863407, 1.128904145185154786341, math.sqrt(2)),
    "tanh": (-0.1289930686587717654559, 1.128993068658771765456, 1.41850400879082835),
}
"""Least and largest slope of GELU, and ± where.

σ'' = 0 there; σ(x) − σ(−x) = x gives σ'(x) + σ'(−x) = 1, hence m = 1 − L. 'none': σ' = Φ + xφ, σ'' = φ(x)(2 − x²), so
L = (1 + erf 1)/2 + 1/(e√π). 'tanh': u = √(2/π)(x + 0.044715 x³), σ'' = sech²u (u' + x u''/2 − x u'² tanh u).
"""


def _gelu(module: nn.GELU) -> tuple[float, float]:
    if module.approximate not in _GELUS:
        raise SlopeError(f"GELU: approximate must be 'none' or 'tanh', got {module.approximate!r}")
    return _GELUS[module.approximate][:2]


def _softplus(module: nn.Softplus) -> tuple[float, float]:
    """σ' = 1/(1 + exp(−βx)) ∈ (0, 1) for either sign of β, and 1 where βx > threshold.

    PyTorch switches to the identity there, which makes σ jump down by log1p(exp(−threshold))/|β|, and across
    a jump slopes are unbounded. The default jump, 2.1e-9, is below the rounding of float32 at that point
    (x = 20) and counts as such; a larger one is a real discontinuity.
    """
    beta, threshold = number(module, "beta"), number(module, "threshold")
    label = f"Softplus(beta={beta}, threshold={threshold})"
    if beta == 0:
        raise SlopeError(f"{label}: beta must not be zero")
    if threshold > _MAX_THRESHOLD:
        raise SlopeError(f"{label}: overflows float32 below its threshold; use at most {_MAX_THRESHOLD:g}")
    # log1p(exp(−t)) = max(−t, 0) + log1p(exp(−|t|)), which cannot overflow
    jump = (max(-threshold, 0.0) + math.log1p(math.exp(-abs(threshold)))) / abs(beta)
    if jump > _MAX_JUMP:
        raise SlopeError(f"{label}: jumps by {jump:.2g} at x = {threshold / beta:g}; raise 'threshold' (default 20)")
    return 0.0, 1.0


# -- the functions themselves ------------------------------------------------------------------------------------------


def _leaky(x: Any, slope: Any, f: F) -> Any:
    return f.split(x, x, slope * x)


def _rrelu_value(module: nn.RReLU, x: Any, f: F) -> Any:
    if module.training and module.lower != module.upper:
        raise GraphError("RReLU in training mode is random: there is nothing to compare its outputs with")
    return _leaky(x, f.number((module.lower + module.upper) / 2, rounded=True), f)


def _grown(x: Any, f: F) -> Any:
    """``exp(x) − 1`` below zero, zero above."""
    return f.expm1(f.clip(x, high=f.constant(0.0)))


def _celu_value(module: nn.CELU, x: Any, f: F) -> Any:
    alpha = f.number(module.alpha)
    return f.split(x, x, alpha * _grown(f.divide(x, alpha), f))


def _sigmoid_value(x: Any, f: F) -> Any:
    """``1/(1 + t)`` or ``t/(1 + t)`` with ``t = exp(−|x|)``: accurate on both sides."""
    t, one = f.exp(-f.abs(x)), f.constant(1.0)
    return f.divide(f.split(x, one, t), one + t)


def _softplus_value(x: Any, f: F) -> Any:
    """``max(x, 0) + log(1 + exp(−|x|))``: without the jump that PyTorch makes at its threshold."""
    return f.clip(x, low=f.constant(0.0)) + f.log1p(f.exp(-f.abs(x)))


def _gelu_value(module: nn.GELU, x: Any, f: F) -> Any:
    if module.approximate == "tanh":
        root = f.constant(0.79788456080286535588)  # √(2/π)
        inner = f.tanh(root * (x + f.constant(0.044715) * (x * x * x)))
    else:
        inner = f.erf(x * f.constant(0.70710678118654752440))
    return (f.constant(0.5) * x) * (f.constant(1.0) + inner)


def _hardsigmoid_value(x: Any, f: F) -> Any:
    return f.constant(1 / 6) * f.clip(x + f.constant(3.0), f.constant(0.0), f.constant(6.0))


def _softshrink_value(module: nn.Softshrink, x: Any, f: F) -> Any:
    limit = f.number(module.lambd)
    return x - f.clip(x, -limit, limit)


def _between(low: str, high: str, **more: Any) -> Law:
    """A clamp with these limits."""

    def value(module: Any, x: Any, f: F) -> Any:
        limits = (getattr(module, name) for name in (low, high))
        return f.clip(x, *(None if limit is None else f.number(limit) for limit in limits))

    return piecewise(lambda module: _limits(module, low, high), value, **more)


# -- groups of entries, and classes as a whole -------------------------------------------------------------------------


def _consecutive(module: Any, labels: Tensor) -> Tensor:
    size = 2 if isinstance(module, MaxMin) else module.group_size
    return labels.index_select(0, torch.arange(labels.shape[0]) // size * size)


def _windows(module: Any, labels: Tensor) -> Tensor:
    for d, w in enumerate(module.window, 1):
        labels = labels.index_select(d, torch.arange(labels.shape[d]) // w * w)
    return labels


def _line(module: nn.Softmax, labels: Tensor) -> Tensor:
    dim = module.dim
    if not isinstance(dim, int) or not -labels.ndim <= dim <= labels.ndim or dim == 0:
        raise SlopeError(f"Softmax(dim={dim!r}) must act along a dimension behind the batch; name it")
    axis = dim - 1 if dim > 0 else dim
    return labels.index_select(axis, torch.zeros(labels.shape[axis], dtype=torch.long))


def _called_rrelu(lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any, **__: Any) -> nn.Module:
    return nn.RReLU(lower, upper).train(bool(training))


def _along(cls: type[nn.Module], *names: str) -> dict[str, Any]:
    """The dtype and the stack level that softmax and its kin are called with do not matter."""
    return dict.fromkeys(names, lambda dim=-1, *args, **kwargs: cls(dim))


_LOGITS = "let the network end in logits and apply it outside of the certified map, as part of the loss"

TABLE: dict[type[nn.Module], Law] = {
    nn.CELU: exponential(_celu, lambda m: (1.0, m.alpha, 1.0), _celu_value, calls="celu", cases=({}, {"alpha": 0.5})),
    nn.ELU: exponential(
        _elu, lambda m: (m.alpha, 1.0, 1.0), lambda m, x, f: f.split(x, x, f.number(m.alpha) * _grown(x, f)),
        calls="elu", cases=({}, {"alpha": 2.0}, {"alpha": -0.5}),
    ),
    nn.GELU: smooth(
        _gelu, lambda m: (-_GELUS[m.approximate][2], _GELUS[m.approximate][2]), _gelu_value, calls="gelu",
        cases=({}, {"approximate": "tanh"}),
    ),
    nn.Hardshrink: piecewise(_hardshrink, lambda m, x, f: x, calls="hardshrink", cases=({"lambd": 0.0}, {})),
    nn.Hardsigmoid: piecewise(  # σ = relu6(x + 3)/6
        lambda m: _clipped(-3.0, 3.0, 1.0 / 6.0), lambda m, x, f: _hardsigmoid_value(x, f), calls="hardsigmoid"
    ),
    nn.Hardswish: ramp(  # σ = x relu6(x + 3)/6
        3.0, -0.5, 1.5, lambda m, x, f: x * _hardsigmoid_value(x, f), calls="hardswish"
    ),
    nn.Hardtanh: _between("min_val", "max_val", calls="hardtanh", cases=({}, {"min_val": -0.2, "max_val": 3.0})),
    nn.Identity: piecewise(lambda m: [(-_INF, _INF, 1.0)], lambda m, x, f: x),
    nn.LeakyReLU: piecewise(
        lambda m: _kink(number(m, "negative_slope")), lambda m, x, f: _leaky(x, f.number(m.negative_slope), f),
        calls="leaky_relu",
        cases=({}, {"negative_slope": 0.2}, {"negative_slope": -0.5}, {"negative_slope": 3.0}),
    ),
    nn.LogSigmoid: smooth(  # σ' = 1/(1 + eˣ)
        (0.0, 1.0), (), lambda m, x, f: -_softplus_value(-x, f), calls="log_sigmoid logsigmoid"
    ),
    # σ = x T, T = tanh(s), s = log(1 + eˣ), p = s' = 1/(1 + e⁻ˣ), σ' = T + x p (1 − T²);
    # σ'' = (1 − T²) p (2 + x(1 − p − 2pT)) = 0 at the critical points
    nn.Mish: smooth(
        (-0.1125261223894625564073, 1.088498161251727861228), (-2.25637639636079312, 1.49057117948542845),
        lambda m, x, f: x * f.tanh(_softplus_value(x, f)), calls="mish",
    ),
    nn.PReLU: piecewise(  # the current weights, over all channels
        lambda m: _kink(m.weight), lambda m, x, f: _leaky(x, f.channels(m.weight, x), f), calls="prelu",
        cases=({}, {"init": -0.7}, {"init": 1.0}),
    ),
    nn.ReLU: piecewise(lambda m: _kink(0.0), lambda m, x, f: f.clip(x, low=f.constant(0.0)), calls="relu"),
    nn.ReLU6: _between("min_val", "max_val", calls="relu6"),
    nn.RReLU: piecewise(_rrelu, _rrelu_value, calls={"rrelu": _called_rrelu}),
    nn.SELU: exponential(  # σ' = s αeˣ ∈ (0, sα] for x < 0, s for x > 0
        (0.0, _SELU_STEEPEST), lambda m: (_SELU_STEEPEST, 1.0, _SELU_SCALE),
        lambda m, x, f: f.constant(_SELU_SCALE) * f.split(x, x, f.constant(_SELU_ALPHA) * _grown(x, f)), calls="selu",
    ),
    # σ' = p + x p(1 − p), p = 1/(1 + e⁻ˣ); σ'' = 0 ⇔ x tanh(x/2) = 2; m = 1 − L as for GELU
    nn.SiLU: smooth(
        (-0.09983932012886691695818, 1.099839320128866916958), (-2.39935728051546766, 2.39935728051546766),
        lambda m, x, f: x * _sigmoid_value(x, f), calls="silu",
    ),
    nn.Sigmoid: smooth(  # σ' = p(1 − p) ≤ 1/4, at x = 0
        (0.0, 0.25), (0.0,), lambda m, x, f: _sigmoid_value(x, f), calls="sigmoid special_expit"
    ),
    nn.Softplus: smooth(
        _softplus, (), lambda m, x, f: f.divide(_softplus_value(f.number(m.beta) * x, f), f.number(m.beta)),
        calls="softplus", cases=({}, {"beta": 3.0}, {"threshold": 1.0}),
    ),
    nn.Softshrink: piecewise(_softshrink, _softshrink_value, calls="softshrink", cases=({}, {"lambd": 0.0})),
    nn.Softsign: smooth(  # σ' = 1/(1 + |x|)²
        (0.0, 1.0), (0.0,), lambda m, x, f: f.divide(x, f.constant(1.0) + f.abs(x)), calls="softsign"
    ),
    nn.Tanh: smooth((0.0, 1.0), (0.0,), lambda m, x, f: f.tanh(x), calls="tanh"),
    nn.Tanhshrink: smooth((0.0, 1.0), (0.0,), lambda m, x, f: x - f.tanh(x), calls="tanhshrink"),
    nn.Threshold: piecewise(
        _threshold, lambda m, x, f: f.clip(x, low=f.number(m.threshold)), calls="threshold",
        cases=({"threshold": 0.3, "value": 0.3}, {"threshold": 0.1, "value": 20.0}),
    ),
    Abs: piecewise(lambda m: _kink(-1.0), lambda m, x, f: f.abs(x), calls="abs absolute"),
    Atan: smooth((0.0, 1.0), (0.0,), lambda m, x, f: f.atan(x), calls="atan arctan"),
    Clamp: _between(
        "min", "max",
        calls={"clamp": Clamp, "clip": Clamp, "clamp_min": Clamp, "clamp_max": lambda max: Clamp(max=max)},
        cases=({"min": -1.0, "max": 1.0}, {"min": 0.0}, {"max": 0.2}, {"min": 1.0, "max": -1.0}),
    ),
    Cos: wave(math.pi / 2, lambda m, x, f: f.cos(x), calls="cos"),
    Sin: wave(0.0, lambda m, x, f: f.sin(x), calls="sin"),
    # Sorting moves no two vectors apart; softmax is the gradient of a convex function of curvature at most 1/2.
    GroupSort: Law(joint=Joint(0.0, 1.0, lambda m: m.group_size, _consecutive), cases=({"group_size": 3},)),
    MaxMin: Law(joint=Joint(0.0, 1.0, lambda m: 2, _consecutive)),
    WindowSort: Law(joint=Joint(0.0, 1.0, lambda m: math.prod(m.window), _windows, channels=False), cases=()),
    nn.Softmax: Law(
        joint=Joint(0.25, 0.25, lambda m: 0, _line, channels=False), calls=_along(nn.Softmax, "softmax", "_softmax"),
        cases=({"dim": 1},),
    ),
    nn.GLU: Law(
        refused="multiplies one half of its input by a gate made from the other, so its slopes are unbounded; "
        "use an elementwise activation such as SiLU",
        calls=_along(nn.GLU, "glu"),
    ),
    nn.LogSoftmax: Law(
        refused=f"mixes the entries along a dimension; {_LOGITS}",
        calls=_along(nn.LogSoftmax, "log_softmax", "_log_softmax"),
    ),
    nn.MultiheadAttention: Law(
        refused="mixes tokens with weights that depend on them, and is not Lipschitz; "
        "mix tokens by linear maps, with elementwise activations between them"
    ),
    nn.Softmax2d: Law(refused=f"mixes the channels; {_LOGITS}"),
    nn.Softmin: Law(refused=f"mixes the entries along a dimension; {_LOGITS}", calls=_along(nn.Softmin, "softmin")),
}  # fmt: skip
