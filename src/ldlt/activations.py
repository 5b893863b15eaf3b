r"""Incremental slope bounds of activations.

An elementwise activation :math:`\sigma` has slopes in :math:`[m, L]` when
:math:`m \le (\sigma(x) - \sigma(y)) / (x - y) \le L` for all :math:`x \ne y`. For a continuous piecewise
smooth function these are the infimum and the supremum of its derivative, and that is what
:func:`slope_bounds` returns: exact values as a function of the module's arguments, not samples.
:func:`sector` turns them into the center :math:`c = (L + m)/2` and the radius :math:`r = (L - m)/2` that the
rest of the package works with.

Whatever has no such bound is refused with a :exc:`~ldlt.errors.SlopeError` that says why; nothing is guessed.
Add your own elementwise activation with :func:`register`.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldlt.errors import LdltError, OptionError, ShapeError, SlopeError

__all__ = [
    "CALLS",
    "ELEMENTWISE",
    "MIN_RELATIVE_RADIUS",
    "Abs",
    "Atan",
    "Clamp",
    "Cos",
    "GroupSort",
    "MaxMin",
    "Sector",
    "Sin",
    "WindowSort",
    "from_call",
    "is_activation",
    "is_inplace",
    "mixed",
    "register",
    "sector",
    "slope_bounds",
    "spread",
]

Bounds = Callable[[Any], tuple[float, float]]

MIN_RELATIVE_RADIUS = 0.02
"""Least radius of a sector relative to its largest slope; keeps ``center / radius`` of linear ones finite."""

# The largest jump of Softplus that still counts as rounding: half an ulp of float32 at x = 20 is 9.5e-7.
_MAX_JUMP = 1e-6
# Softplus evaluates log1p(exp(βx)) below its threshold; exp overflows float32 above 88.72.
_MAX_THRESHOLD = 88.0


# ----------------------------------------------------------------------------------------- modules of our own


class Abs(nn.Module):
    """Absolute value, elementwise.

    >>> Abs()(torch.tensor([-2.0, 1.0]))
    tensor([2., 1.])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return ``|input|``."""
        return input.abs()


class Sin(nn.Module):
    """Sine, elementwise."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``sin(input)``."""
        return input.sin()


class Cos(nn.Module):
    """Cosine, elementwise."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``cos(input)``."""
        return input.cos()


class Atan(nn.Module):
    """Arc tangent, elementwise."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``atan(input)``."""
        return input.atan()


class Clamp(nn.Module):
    """``torch.clamp`` with fixed limits, of which one may be missing.

    Args:
        min: Lower limit, or None.
        max: Upper limit, or None. If it is below ``min`` the output is constant, as in ``torch.clamp``.

    >>> Clamp(min=0.5)(torch.tensor([-2.0, 1.0]))
    tensor([0.5000, 1.0000])
    """

    def __init__(self, min: float | None = None, max: float | None = None) -> None:
        super().__init__()
        if min is None and max is None:
            raise OptionError("Clamp needs at least one of 'min' and 'max'")
        self.min = min
        self.max = max

    def forward(self, input: Tensor) -> Tensor:
        """Return ``min(max(input, self.min), self.max)``."""
        return input.clamp(self.min, self.max)

    def extra_repr(self) -> str:
        """Return the limits."""
        return f"min={self.min}, max={self.max}"


def _groups(input: Tensor, size: int, name: str) -> Tensor:
    """Split dimension 1 into ``(d // size, size)``."""
    if input.dim() < 2 or input.shape[1] % size:
        raise ShapeError(
            f"{name} sorts groups of {size} along dimension 1 of a (batch, d, ...) tensor, so d must be "
            f"divisible by {size}; got shape {tuple(input.shape)}"
        )
    return input.unflatten(1, (input.shape[1] // size, size))


class GroupSort(nn.Module):
    r"""Sort each group of consecutive entries of dimension 1, ascending.

    1-Lipschitz jointly over a group: by the rearrangement inequality sorting never moves two vectors apart,
    :math:`\|\mathrm{sort}\,x - \mathrm{sort}\,y\| \le \|x - y\|`. Its Jacobian is a permutation, so it keeps
    the norms of gradients.

    Args:
        group_size: Entries per group, a divisor of the size of dimension 1.

    >>> GroupSort(3)(torch.tensor([[3.0, 1.0, 2.0, 9.0, 8.0, 7.0]]))
    tensor([[1., 2., 3., 7., 8., 9.]])
    """

    def __init__(self, group_size: int) -> None:
        super().__init__()
        if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
            raise OptionError(f"group_size must be a positive integer, got {group_size!r}")
        self.group_size = group_size

    def forward(self, input: Tensor) -> Tensor:
        """Sort ``input`` (batch, d, ...) within groups of dimension 1."""
        return _groups(input, self.group_size, "GroupSort").sort(dim=2).values.flatten(1, 2)

    def extra_repr(self) -> str:
        """Return the group size."""
        return f"group_size={self.group_size}"


class WindowSort(nn.Module):
    r"""Sort the entries of each window of an image, channel by channel, in descending order.

    1-Lipschitz jointly over a window, like :class:`GroupSort`. Its first entries are max-pooling over disjoint windows.

    Args:
        window: Size of the windows along each spatial dimension, divisors of the image's sizes.

    >>> WindowSort((2,))(torch.tensor([[[3.0, 5.0, 2.0, 1.0]]]))
    tensor([[[5., 3., 2., 1.]]])
    """

    def __init__(self, window: tuple[int, ...]) -> None:
        super().__init__()
        if not window or any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in window):
            raise OptionError(f"window must be a tuple of positive integers, got {window!r}")
        self.window = tuple(window)

    def forward(self, input: Tensor) -> Tensor:
        """Sort ``input`` (batch, channels, *spatial) within windows."""
        sizes = input.shape[2:]
        if len(sizes) != len(self.window) or any(n % w for n, w in zip(sizes, self.window, strict=True)):
            raise ShapeError(f"WindowSort sorts windows of {self.window}, which do not divide {tuple(sizes)}")
        d = len(sizes)
        split = [k for n, w in zip(sizes, self.window, strict=True) for k in (n // w, w)]
        order = [0, 1, *range(2, 2 + 2 * d, 2), *range(3, 3 + 2 * d, 2)]
        windows = input.reshape(*input.shape[:2], *split).permute(order)
        ordered = windows.flatten(2 + d).sort(-1, descending=True).values.reshape(windows.shape)
        back = [0, 1, *(i for j in range(d) for i in (2 + j, 2 + d + j))]
        return ordered.permute(back).reshape(input.shape)

    def extra_repr(self) -> str:
        """Return the window."""
        return f"window={self.window}"


def _sorted_pairs(pairs: Tensor) -> Tensor:
    """(batch, d/2, 2, ...) with the pairs in descending order."""
    a, b = pairs.unbind(2)
    return torch.stack((torch.maximum(a, b), torch.minimum(a, b)), 2)


class _SortedPairs(torch.autograd.Function):
    """:func:`_sorted_pairs`, with the gradient permuted back by arithmetic.

    For the gradients ``g, h`` of maximum and minimum, ``e = (g − h) [a > b]`` gives those of ``a`` and ``b`` as
    ``h + e`` and ``g − e``. Autograd's own, by masks and with ties shared, took six times as long.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(pairs: Tensor) -> Tensor:
        return _sorted_pairs(pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        a, b = ctx.saved_tensors[0].unbind(2)
        g, h = grads[0].unbind(2)
        e = torch.ops.aten.threshold_backward(g - h, a - b, 0)
        return torch.stack((h + e, g - e), 2)


class MaxMin(nn.Module):
    """Replace each pair of consecutive entries of dimension 1 by its (maximum, minimum).

    1-Lipschitz jointly over a pair, like :class:`GroupSort` with groups of two (in descending order).

    >>> MaxMin()(torch.tensor([[1.0, 2.0, 4.0, 3.0]]))
    tensor([[2., 1., 4., 3.]])
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the pairs of ``input`` (batch, d, ...) as (maximum, minimum)."""
        pairs = _groups(input, 2, "MaxMin")
        return (_SortedPairs.apply(pairs) if pairs.requires_grad else _sorted_pairs(pairs)).flatten(1, 2)  # type: ignore[no-untyped-call]


# ------------------------------------------------------------------------------------------- the slope bounds


def _number(module: nn.Module, name: str, *, finite: bool = True) -> float:
    """Read an argument of a module as a float; refuse what is not a fixed number."""
    value = getattr(module, name)
    label = type(module).__name__
    if not isinstance(value, int | float):
        raise SlopeError(
            f"{label}: '{name}' must be a fixed number, got {type(value).__name__}; "
            "for a learned slope use torch.nn.PReLU"
        )
    value = float(value)
    if math.isnan(value) or (finite and math.isinf(value)):
        raise SlopeError(f"{label}: '{name}' must be a finite number, got {value}")
    return value


def _elu(module: nn.ELU) -> tuple[float, float]:
    """σ' = 1 for x > 0 and α eˣ for x < 0, which fills (0, α] (or [α, 0)): hull of {0, 1, α}."""
    alpha = _number(module, "alpha")
    return min(0.0, alpha), max(1.0, alpha)


def _celu(module: nn.CELU) -> tuple[float, float]:
    """σ' = 1 for x > 0 and exp(x/α) ∈ (0, 1] for x ≤ 0, if α > 0; for α < 0 that grows without bound."""
    alpha = _number(module, "alpha")
    if alpha <= 0:
        raise SlopeError(f"CELU(alpha={alpha}): slope exp(x/alpha), x < 0, is bounded for alpha > 0 only; use ELU")
    return 0.0, 1.0


def _gelu(module: nn.GELU) -> tuple[float, float]:
    """Extrema where σ'' = 0; σ(x) − σ(−x) = x gives σ'(x) + σ'(−x) = 1, hence m = 1 − L.

    'none': σ' = Φ + xφ, σ'' = φ(x)(2 − x²) = 0 at x = ±√2, so L = (1 + erf 1)/2 + 1/(e√π).
    'tanh': u = √(2/π)(x + 0.044715 x³), σ'' = sech²u (u' + x u''/2 − x u'² tanh u) = 0
    at x = ±1.41850400879082835….
    """
    if module.approximate == "none":
        return -0.1289041451851547863407, 1.128904145185154786341
    if module.approximate == "tanh":
        return -0.1289930686587717654559, 1.128993068658771765456
    raise SlopeError(f"GELU: approximate must be 'none' or 'tanh', got {module.approximate!r}")


def _leaky_relu(module: nn.LeakyReLU) -> tuple[float, float]:
    """σ' ∈ {1, a}."""
    slope = _number(module, "negative_slope")
    return min(1.0, slope), max(1.0, slope)


def _prelu(module: nn.PReLU) -> tuple[float, float]:
    """σ' ∈ {1, aᵢ} with the current weights aᵢ, over all channels."""
    weight = module.weight.detach()
    low, high = weight.amin().item(), weight.amax().item()
    if not (math.isfinite(low) and math.isfinite(high)):
        raise SlopeError(f"{type(module).__name__}: weight has entries that are not finite")
    return min(1.0, low), max(1.0, high)


def _rrelu(module: nn.RReLU) -> tuple[float, float]:
    """σ' ∈ {1, a}, a drawn from [lower, upper] in training, its middle in evaluation: hull {1, lower, upper}.

    In training the bound is that of each draw: two calls on different inputs compare only with the same draw.
    """
    lower, upper = _number(module, "lower"), _number(module, "upper")
    return min(1.0, lower, upper), max(1.0, lower, upper)


def _softplus(module: nn.Softplus) -> tuple[float, float]:
    """σ' = 1/(1 + exp(−βx)) ∈ (0, 1) for either sign of β, and 1 where βx > threshold.

    PyTorch switches to the identity there, which makes σ jump down by log1p(exp(−threshold))/|β|, and across
    a jump slopes are unbounded. The default jump, 2.1e-9, is below the rounding of float32 at that point
    (x = 20) and counts as such; above 1e-6 it is a real discontinuity. Past 88, exp overflows float32 and
    the output is infinite.
    """
    beta, threshold = _number(module, "beta"), _number(module, "threshold")
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


def _softshrink(module: nn.Softshrink) -> tuple[float, float]:
    """σ' = 0 for |x| < λ and 1 outside; λ = 0 is the identity. PyTorch does not run λ < 0."""
    lambd = _number(module, "lambd")
    if lambd < 0:
        raise SlopeError(f"Softshrink(lambd={lambd}): lambd must not be negative")
    return (0.0, 1.0) if lambd else (1.0, 1.0)


def _hardshrink(module: nn.Hardshrink) -> tuple[float, float]:
    """σ(x) = x for |x| > λ, else 0: jumps by λ at ±λ; λ = 0 is the identity."""
    lambd = _number(module, "lambd")
    if lambd != 0:
        raise SlopeError(f"Hardshrink(lambd={lambd}): jumps at ±lambd, so its slopes are unbounded; use Softshrink")
    return 1.0, 1.0


def _threshold(module: nn.Threshold) -> tuple[float, float]:
    """σ(x) = x for x > t, else v: jumps by t − v unless v = t, and is then max(x, t) with σ' ∈ {0, 1}."""
    threshold, value = _number(module, "threshold"), _number(module, "value")
    if threshold != value:
        raise SlopeError(
            f"Threshold(threshold={threshold}, value={value}): jumps by {threshold - value:g}, so its "
            "slopes are unbounded; use value = threshold, or ReLU"
        )
    return 0.0, 1.0


def _clipped(low: float, high: float) -> tuple[float, float]:
    """σ' = 1 between the limits and 0 outside: constant if low ≥ high, the identity if both are infinite."""
    if low >= high:
        return 0.0, 0.0
    return (1.0, 1.0) if math.isinf(low) and math.isinf(high) else (0.0, 1.0)


def _hardtanh(module: nn.Hardtanh) -> tuple[float, float]:
    """σ' = 1 for min_val < x < max_val, 0 outside, whatever the limits."""
    return _clipped(_number(module, "min_val", finite=False), _number(module, "max_val", finite=False))


def _clamp_bounds(module: Clamp) -> tuple[float, float]:
    """σ' = 1 between the limits, 0 outside; a missing limit is infinite."""
    low = -math.inf if module.min is None else _number(module, "min", finite=False)
    high = math.inf if module.max is None else _number(module, "max", finite=False)
    return _clipped(low, high)


def _fixed(low: float, high: float) -> Bounds:
    return lambda module: (low, high)


_BOUNDS: dict[type[nn.Module], Bounds] = {
    nn.CELU: _celu,
    nn.ELU: _elu,
    nn.GELU: _gelu,
    nn.Hardshrink: _hardshrink,
    nn.Hardsigmoid: _fixed(0.0, 1.0 / 6.0),  # σ = relu6(x + 3)/6, σ' ∈ {0, 1/6}
    nn.Hardswish: _fixed(-0.5, 1.5),  # σ = x relu6(x + 3)/6, σ' = x/3 + 1/2 on (−3, 3), 0 or 1 outside
    nn.Hardtanh: _hardtanh,
    nn.Identity: _fixed(1.0, 1.0),  # σ' = 1
    nn.LeakyReLU: _leaky_relu,
    nn.LogSigmoid: _fixed(0.0, 1.0),  # σ' = 1/(1 + eˣ) ∈ (0, 1)
    # σ = x T, T = tanh(s), s = log(1 + eˣ), p = s' = 1/(1 + e⁻ˣ), σ' = T + x p (1 − T²);
    # σ'' = (1 − T²) p (2 + x(1 − p − 2pT)) = 0 at x = −2.25637639636079312… (m) and 1.49057117948542845… (L)
    nn.Mish: _fixed(-0.1125261223894625564073, 1.088498161251727861228),
    nn.PReLU: _prelu,
    nn.ReLU: _fixed(0.0, 1.0),  # σ' ∈ {0, 1}
    nn.ReLU6: _hardtanh,  # Hardtanh(0, 6)
    nn.RReLU: _rrelu,
    # σ' = s αeˣ ∈ (0, sα] for x < 0, s for x > 0, with s = 1.0507009873554804934…, α = 1.6732632423543772848…
    nn.SELU: _fixed(0.0, 1.758099340847376859940),
    # σ' = p + x p(1 − p), p = 1/(1 + e⁻ˣ); σ'' = 0 ⇔ x tanh(x/2) = 2 at x = ±2.39935728051546766…;
    # m = 1 − L as for GELU
    nn.SiLU: _fixed(-0.09983932012886691695818, 1.099839320128866916958),
    nn.Sigmoid: _fixed(0.0, 0.25),  # σ' = p(1 − p) ≤ 1/4, at x = 0
    nn.Softplus: _softplus,
    nn.Softshrink: _softshrink,
    nn.Softsign: _fixed(0.0, 1.0),  # σ' = 1/(1 + |x|)² ∈ (0, 1]
    nn.Tanh: _fixed(0.0, 1.0),  # σ' = 1 − tanh² ∈ (0, 1]
    nn.Tanhshrink: _fixed(0.0, 1.0),  # σ' = tanh² ∈ [0, 1)
    nn.Threshold: _threshold,
    Abs: _fixed(-1.0, 1.0),  # σ' ∈ {−1, 1}
    Atan: _fixed(0.0, 1.0),  # σ' = 1/(1 + x²) ∈ (0, 1]
    Clamp: _clamp_bounds,
    Cos: _fixed(-1.0, 1.0),  # σ' = −sin x
    Sin: _fixed(-1.0, 1.0),  # σ' = cos x
}

ELEMENTWISE: tuple[type[nn.Module], ...] = tuple(_BOUNDS)
"""The elementwise activations known from the start (some of them are refused for some of their arguments)."""

_JOINT: dict[type[nn.Module], Callable[[Any], int]] = {
    GroupSort: lambda module: module.group_size,
    MaxMin: lambda module: 2,
    WindowSort: lambda module: math.prod(module.window),
    nn.Softmax: lambda module: 0,
}

_LOGITS = "let the network end in logits and apply it outside of the certified map, as part of the loss"
_REFUSED: dict[type[nn.Module], str] = {
    nn.GLU: "multiplies one half of its input by a gate made from the other, so its slopes are unbounded; "
    "use an elementwise activation such as SiLU",
    nn.LogSoftmax: f"mixes the entries along a dimension; {_LOGITS}",
    nn.MultiheadAttention: "mixes tokens with weights that depend on them, and is not Lipschitz; "
    "mix tokens by linear maps, with elementwise activations between them",
    nn.Softmax2d: f"mixes the channels; {_LOGITS}",
    nn.Softmin: f"mixes the entries along a dimension; {_LOGITS}",
}


def _find(module: nn.Module, table: Mapping[type[nn.Module], Any]) -> type[nn.Module] | None:
    """Return the class of ``table`` whose forward ``module`` runs: an overridden one does not inherit."""
    if not isinstance(module, nn.Module):
        raise OptionError(f"expected an instance of torch.nn.Module, got {module!r}")
    forward = getattr(module.forward, "__func__", None)
    return next(
        (cls for cls in type(module).__mro__ if cls in table and getattr(cls, "forward", None) is forward),
        None,
    )


def _unknown(module: nn.Module) -> SlopeError:
    """Say why ``module`` has no slope bounds."""
    name = type(module).__name__
    for cls, reason in _REFUSED.items():
        if isinstance(module, cls):
            return SlopeError(f"{name} is not an elementwise activation: it {reason}")
    base = next((cls for cls in type(module).__mro__ if cls in _BOUNDS or cls in _JOINT), None)
    why = f"overrides the forward of {base.__name__}" if base else "is not an activation with known slope bounds"
    return SlopeError(
        f"{name} {why}; if it acts elementwise, state its slopes with "
        f"ldlt.activations.register({name}, lambda module: (m, L)), else use one of "
        "ldlt.activations.ELEMENTWISE, GroupSort or MaxMin"
    )


def is_activation(module: nn.Module) -> bool:
    """Return whether the class of a module has a rule: elementwise (built in or registered) or joint.

    The rule may still refuse its arguments: ``Hardshrink`` is an activation that :func:`sector` refuses.
    Modules that are refused as a class, such as ``Softmin``, are none.

    >>> is_activation(nn.ReLU()), is_activation(MaxMin()), is_activation(nn.Softmin(dim=1))
    (True, True, False)
    """
    return _find(module, _BOUNDS) is not None or _find(module, _JOINT) is not None


def slope_bounds(module: nn.Module) -> tuple[float, float]:
    """Return the exact infimum and supremum ``(m, L)`` of the slopes of an elementwise activation.

    Irrational constants are correctly rounded to float64. For :class:`torch.nn.PReLU` they are those of the
    current weights, over all channels. A subclass is taken for its base class only if it does not override
    ``forward``.

    Args:
        module: An activation: one of :data:`ELEMENTWISE`, or of a class given to :func:`register`.

    Raises:
        SlopeError: If the slopes are unbounded or unknown, or the nonlinearity is not elementwise.

    >>> slope_bounds(nn.LeakyReLU(0.1))
    (0.1, 1.0)
    >>> slope_bounds(nn.Sigmoid())
    (0.0, 0.25)
    """
    cls = _find(module, _BOUNDS)
    if cls is None:
        if _find(module, _JOINT):
            raise SlopeError(
                f"{type(module).__name__} is a joint nonlinearity: it is 1-Lipschitz over a group of entries "
                "but has no slope bounds entry by entry; sector() describes it (center, radius, group)"
            )
        raise _unknown(module)
    bounds = _BOUNDS[cls](module)
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError) as error:
        raise SlopeError(f"{cls.__name__}: slope bounds must be a pair of numbers (m, L), got {bounds!r}") from error
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise SlopeError(f"{cls.__name__}: slope bounds must be finite with m <= L, got ({low}, {high})")
    return low, high


@overload
def register(cls: type[nn.Module], bounds: Bounds) -> Bounds: ...
@overload
def register(cls: type[nn.Module]) -> Callable[[Bounds], Bounds]: ...
def register(cls: type[nn.Module], bounds: Bounds | None = None) -> Bounds | Callable[[Bounds], Bounds]:
    """State the slope bounds of your own elementwise activation.

    The bounds are trusted: the certificate holds if they do. Only their form (finite, ``m <= L``) is checked,
    on each use. Registering a class again replaces its bounds; the built-in ones are fixed.

    Args:
        cls: Subclass of :class:`torch.nn.Module` that acts elementwise.
        bounds: Function of an instance that returns ``(m, L)``. Without it, ``register(cls)`` is a decorator.

    Returns:
        ``bounds``, or the decorator.

    Raises:
        OptionError: If ``cls`` is not a module class or is built in, or ``bounds`` is not callable.

    >>> class Snake(nn.Module):
    ...     def forward(self, x):
    ...         return x + x.sin() ** 2
    >>> @register(Snake)
    ... def snake(module):  # 1 + sin(2x)
    ...     return 0.0, 2.0
    >>> slope_bounds(Snake())
    (0.0, 2.0)
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise OptionError(f"register needs a subclass of torch.nn.Module, got {cls!r}")
    if cls in ELEMENTWISE or cls in _JOINT or cls in _REFUSED:
        raise OptionError(f"{cls.__name__} is built in and its rule is fixed; subclass it with your own forward")

    def add(function: Bounds) -> Bounds:
        if not callable(function):
            raise OptionError(f"bounds of {cls.__name__} must be a function of the module, got {function!r}")
        _BOUNDS[cls] = function
        return function

    return add if bounds is None else add(bounds)


# ---------------------------------------------------------------------------------------------------- sectors


@dataclass(frozen=True)
class Sector:
    r"""The constraint :math:`\|\Delta w - c\,\Delta v\| \le r\,\|\Delta v\|` on :math:`w = \sigma(v)`.

    Attributes:
        center: c, a float or a tensor with one element or one per channel.
        radius: r > 0, likewise.
        group: None if the constraint holds entry by entry, else the number g of entries over which it holds jointly (0:
            all along a dimension); :func:`mixed` says which ones they are. Sorting has c = 0 and r = 1. Softmax is the
            gradient of a convex function whose curvature is at most 1/2, so that c = r = 1/4.
    """

    center: Tensor | float
    radius: Tensor | float
    group: int | None = None

    @property
    def rho(self) -> Tensor | float:
        """Return ``center / radius`` (1 for ReLU)."""
        return self.center / self.radius


def sector(module: nn.Module, size: int | None = None) -> Sector:
    """Return the sector of an activation.

    The radius is at least :data:`MIN_RELATIVE_RADIUS` times the largest absolute slope; a wider sector is
    still valid. For :class:`torch.nn.PReLU`, center and radius are differentiable functions of the current
    weight, in its dtype.

    Args:
        module: An elementwise activation (see :func:`slope_bounds`), :class:`GroupSort` or :class:`MaxMin`.
        size: Size of dimension 1 (features or channels) of its input, to check that the module fits it.

    Raises:
        SlopeError: If the module has no sector.
        ShapeError: If the module does not fit ``size``.

    >>> sector(nn.ReLU())
    Sector(center=0.5, radius=0.5, group=None)
    >>> sector(MaxMin())
    Sector(center=0.0, radius=1.0, group=2)
    """
    joint = _find(module, _JOINT)
    if joint is not None:
        group = _JOINT[joint](module)
        if joint is nn.Softmax:
            return Sector(0.25, 0.25, group)
        if size is not None and joint is not WindowSort and size % group:
            raise ShapeError(f"{joint.__name__} sorts groups of {group}, which do not divide {size} entries")
        return Sector(0.0, 1.0, group)
    if _find(module, _BOUNDS) is nn.PReLU:
        assert isinstance(module.weight, Tensor)
        if size is not None and module.weight.numel() not in (1, size):
            raise ShapeError(
                f"{type(module).__name__} has {module.weight.numel()} slopes, its input has {size} channels"
            )
        return learned_sector(module.weight)
    low, high = slope_bounds(module)
    scale = max(abs(low), abs(high)) or 1.0  # a constant has slopes 0 only; any radius will do
    return Sector((high + low) / 2.0, max((high - low) / 2.0, MIN_RELATIVE_RADIUS * scale))


def learned_sector(weight: Tensor) -> Sector:
    """Return the sector of slopes 1 and ``weight``, one per channel: that of :class:`torch.nn.PReLU`."""
    weight = weight.flatten()
    least = MIN_RELATIVE_RADIUS * weight.abs().clamp(min=1.0)
    return Sector((1.0 + weight) / 2.0, torch.maximum((1.0 - weight).abs() / 2.0, least))


def spread(module: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Center and radius of an activation for every entry of its input, (features,) each, in float64.

    Args:
        module: An activation.
        shape: Shape of its input, without the batch dimension.
    """
    found, features = sector(module), math.prod(shape)

    def wide(value: Tensor | float) -> Tensor:
        flat = torch.as_tensor(value, dtype=torch.float64).detach().reshape(-1, 1)
        return flat.expand(-1, features // len(flat)).reshape(-1)

    return wide(found.center), wide(found.radius)


def mixed(module: nn.Module, shape: tuple[int, ...]) -> Tensor | None:
    """Which entries a joint nonlinearity mixes: a group number for every entry of its input, in flattened order.

    Args:
        module: An activation.
        shape: Shape of its input, without the batch dimension.

    Returns:
        (features,), numbers counted from 0; None for an elementwise activation.

    >>> mixed(MaxMin(), (4,)), mixed(WindowSort((2,)), (1, 4)), mixed(nn.ReLU(), (4,))
    (tensor([0, 0, 1, 1]), tensor([0, 0, 1, 1]), None)
    """
    joint = _find(module, _JOINT)
    if joint is None:
        return None
    labels = torch.arange(math.prod(shape)).reshape(shape)
    if joint is nn.Softmax:
        dim = module.dim
        if not isinstance(dim, int) or not -len(shape) <= dim <= len(shape) or dim == 0:
            raise SlopeError(f"Softmax(dim={dim!r}) must act along a dimension behind the batch; name it")
        axis = dim - 1 if dim > 0 else dim
        labels = labels.index_select(axis, torch.zeros(shape[axis], dtype=torch.long))
    elif joint is WindowSort:
        window = module.window
        assert isinstance(window, tuple)
        for d, w in enumerate(window, 1):
            labels = labels.index_select(d, torch.arange(shape[d]) // w * w)
    else:
        labels = labels.index_select(0, torch.arange(shape[0]) // _JOINT[joint](module) * _JOINT[joint](module))
    return torch.unique(labels, return_inverse=True)[1].reshape(-1)


# -------------------------------------------------------------------------------------- functions and methods


def _from_clamp(min: float | None = None, max: float | None = None) -> nn.Module:
    if min is not None and max is not None and min < max:
        return nn.Hardtanh(min, max)
    return Clamp(min, max)


def _from_rrelu(lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> nn.Module:
    return nn.RReLU(lower, upper, inplace).train(bool(training))


def _from_prelu(weight: Tensor) -> nn.Module:
    if not isinstance(weight, Tensor) or (weight.requires_grad and not weight.is_leaf):
        raise SlopeError(
            "prelu called as a function has a weight that is computed elsewhere, so its slopes are unknown; "
            "use the module torch.nn.PReLU"
        )
    module = nn.PReLU(weight.numel(), device="meta")
    # A Parameter is shared, so that its gradient and its updates are those of the caller.
    module.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight.detach(), weight.requires_grad)
    return module


def _along(cls: type[nn.Module]) -> Callable[..., nn.Module]:
    """Softmax and its kin are built only to be refused by name; their dtype and stack level do not matter."""
    return lambda dim=-1, *args, **kwargs: cls(dim)


# Name of a function or method -> what to call with the arguments behind its input; most classes take them.
CALLS: dict[str, Callable[..., nn.Module]] = {
    "abs": Abs,
    "absolute": Abs,
    "arctan": Atan,
    "atan": Atan,
    "celu": nn.CELU,
    "clamp": _from_clamp,
    "clamp_max": lambda max: Clamp(max=max),
    "clamp_min": lambda min: Clamp(min=min),
    "clip": _from_clamp,
    "cos": Cos,
    "elu": nn.ELU,
    "expit": nn.Sigmoid,
    "gelu": nn.GELU,
    "glu": _along(nn.GLU),
    "hardshrink": nn.Hardshrink,
    "hardsigmoid": nn.Hardsigmoid,
    "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh,
    "leaky_relu": nn.LeakyReLU,
    "log_softmax": _along(nn.LogSoftmax),
    "logsigmoid": nn.LogSigmoid,
    "mish": nn.Mish,
    "prelu": _from_prelu,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "rrelu": _from_rrelu,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "sin": Sin,
    "softmax": _along(nn.Softmax),
    "softmin": _along(nn.Softmin),
    "softplus": nn.Softplus,
    "softshrink": nn.Softshrink,
    "softsign": nn.Softsign,
    "tanh": nn.Tanh,
    "tanhshrink": nn.Tanhshrink,
    "threshold": nn.Threshold,
}


def _call_targets() -> dict[Any, str]:
    """Map each function of PyTorch and each method name of ``CALLS``, or its in-place form, to its name."""
    targets: dict[Any, str] = {builtins.abs: "abs", operator.abs: "abs"}
    for name in CALLS:
        for form in (name, f"{name}_"):
            found = (getattr(space, form, None) for space in (torch, F, torch.special, torch._C._nn))
            targets.update({function: form for function in found if function is not None})
            if hasattr(torch.Tensor, form):
                targets[form] = form
    return targets


_TARGETS = _call_targets()


def _build(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[nn.Module, bool] | None:
    """Return the module of a call and whether the call is in place, or None if it is not an activation."""
    form = _TARGETS.get(target)
    if form is None:
        return None
    name = form.removesuffix("_")
    options = {key: value for key, value in (kwargs or {}).items() if key not in ("input", "self")}
    for value in (*args, *options.values()):
        if name != "prelu" and not isinstance(value, int | float | str | torch.dtype | None):
            raise SlopeError(
                f"{form}: an argument is not a number but a {type(value).__name__}, so the slopes are not "
                "fixed; use numbers, or torch.nn.PReLU for a learned slope"
            )
    try:
        module = CALLS[name](*args, **options)
    except LdltError:
        raise
    except (AssertionError, TypeError, ValueError) as error:
        raise OptionError(f"{form}: arguments {tuple(args)!r}, {options!r} do not fit: {error}") from error
    return module, form.endswith("_") or bool(getattr(module, "inplace", False))


def from_call(target: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> nn.Module | None:
    """Return the module that is equivalent to calling an activation as a function or a method.

    The module never works in place, also where the call does; :func:`is_inplace` tells. Softmax, log-softmax,
    softmin and GLU give their module too, which :func:`slope_bounds` then refuses by name.

    Args:
        target: Function (``torch.relu``, ``torch.nn.functional.gelu``, ``abs``, ...) or name of a tensor
            method (``"clamp_"``).
        args: Positional arguments behind the input.
        kwargs: Keyword arguments; ``input`` is ignored.

    Returns:
        A new module, or None if ``target`` is not an activation.

    Raises:
        SlopeError: If an argument that fixes the slopes is not a number (for ``prelu``: not a given tensor).
        OptionError: If the arguments do not fit the function.

    >>> from_call(torch.nn.functional.leaky_relu, (0.2,), {"inplace": True})
    LeakyReLU(negative_slope=0.2)
    >>> from_call("clamp", (), {"min": 0.0})
    Clamp(min=0.0, max=None)
    >>> from_call(torch.nn.functional.dropout) is None
    True
    """
    built = _build(target, args, kwargs)
    if built is None:
        return None
    module: Any = built[0]
    if hasattr(module, "inplace"):
        module.inplace = False
    return module


def is_inplace(target: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether an activation call overwrites its input.

    If so, whoever reads that input later sees the output: check that nobody does.

    Args:
        target: As in :func:`from_call`.
        args: As in :func:`from_call`.
        kwargs: As in :func:`from_call`.

    >>> is_inplace("relu_"), is_inplace(torch.nn.functional.relu, (True,)), is_inplace(torch.relu)
    (True, True, False)
    """
    built = _build(target, args, kwargs)
    return built is not None and built[1]
