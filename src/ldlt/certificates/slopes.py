r"""Slopes of activations over intervals.

The chord slopes of ``σ`` on ``[l, h]`` lie in the closed hull of its derivative there. The derivative of every
activation here is monotone between a few known points, so its range is attained at the ends of the interval, at those
points, or on either side of a jump. Smooth derivatives get an outward margin for their rounding; piecewise linear ones
are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.activations import Abs, Atan, Clamp, Cos, Sin

__all__ = ["slope_range"]

Range = tuple[Tensor, Tensor]
Rule = Callable[[Any, Tensor, Tensor], Range]

_MARGIN = 1e-10  # far above the rounding of the derivatives below, which is of order 1e-15
_NEAR = 1e-6  # a critical point this close counts as inside


def slope_range(module: nn.Module, low: Tensor, high: Tensor, bounds: Range) -> Range:
    """Bounds on the slopes of an elementwise activation over intervals.

    Args:
        module: The activation.
        low: Lower ends, (features,), float64.
        high: Upper ends.
        bounds: Global slope bounds ``(m, L)``, (features,) each: the answer for unknown activations, and a limit for
            all.

    Returns:
        ``(m, L)``, (features,) each.
    """
    forward = getattr(module.forward, "__func__", None)
    kind = next((c for c in type(module).__mro__ if c in _RULES and getattr(c, "forward", None) is forward), None)
    m, upper = bounds
    if kind is None:
        return m, upper
    found_low, found_high = _RULES[kind](module, low, high)
    finite = low.isfinite() & high.isfinite() & (low <= high)
    found_low = torch.where(finite, torch.maximum(found_low, m), m)
    found_high = torch.where(finite, torch.minimum(found_high, upper), upper)
    return torch.minimum(found_low, found_high), torch.maximum(found_low, found_high)


def _hull(*parts: tuple[Tensor, Tensor]) -> Range:
    """Hull of values, each with a mask of where it counts."""
    low = torch.stack([torch.where(mask, value, math.inf) for mask, value in parts]).amin(0)
    high = torch.stack([torch.where(mask, value, -math.inf) for mask, value in parts]).amax(0)
    return low, high


def _smooth(derivative: Callable[[Any, Tensor], Tensor], critical: Callable[[Any], tuple[float, ...]]) -> Rule:
    """A continuous derivative that is monotone between its critical points."""

    def rule(module: Any, low: Tensor, high: Tensor) -> Range:
        everywhere = torch.ones_like(low, dtype=torch.bool)
        parts = [(everywhere, derivative(module, low)), (everywhere, derivative(module, high))]
        for point in critical(module):
            inside = (low - _NEAR <= point) & (high + _NEAR >= point)
            parts.append((inside, derivative(module, torch.full_like(low, point))))
        found = _hull(*parts)
        return found[0] - _MARGIN, found[1] + _MARGIN

    return rule


def _pieces(pieces: Callable[[Any, Tensor], list[tuple[float, float, Any]]]) -> Rule:
    """Piecewise linear: (start, end, slope) each. An end that touches the interval counts."""

    def rule(module: Any, low: Tensor, high: Tensor) -> Range:
        parts = []
        for start, end, slope in pieces(module, low):
            value = torch.as_tensor(slope, dtype=torch.float64).expand_as(low)
            parts.append(((low <= end) & (high >= start), value))
        return _hull(*parts)

    return rule


def _clip(low: float, high: float, slope: float = 1.0) -> list[tuple[float, float, Any]]:
    inf = math.inf
    if low >= high:
        return [(-inf, inf, 0.0)]
    return [(-inf, low, 0.0), (low, high, slope), (high, inf, 0.0)]


def _two(negative: Callable[[Any, Tensor], list[Any]]) -> Rule:
    """Slope one above zero, others below."""
    inf = math.inf
    return _pieces(lambda m, like: [(0.0, inf, 1.0), *((-inf, 0.0, s) for s in negative(m, like))])


def _prelu(module: nn.PReLU, like: Tensor) -> list[Any]:
    weight = module.weight.detach().double().cpu().reshape(-1, 1)
    return [weight.expand(-1, len(like) // len(weight)).reshape(-1)]


def _exponential(scale: Callable[[Any], tuple[float, float, float]]) -> Rule:
    """``a e^{x/b}`` below zero, ``c`` above: ELU and its kin."""

    def rule(module: Any, low: Tensor, high: Tensor) -> Range:
        a, b, c = scale(module)
        left = low < 0
        parts = [
            (left, a * torch.exp(low.clamp(max=0.0) / b)),
            (left, a * torch.exp(high.clamp(max=0.0) / b)),
            (high >= 0, torch.full_like(low, c)),
        ]
        found = _hull(*parts)
        return found[0] - _MARGIN, found[1] + _MARGIN

    return rule


def _hardswish(module: nn.Hardswish, low: Tensor, high: Tensor) -> Range:
    inside = (high >= -3) & (low <= 3)
    found = _hull(
        (low <= -3, torch.zeros_like(low)),
        (high >= 3, torch.ones_like(low)),
        (inside, low.clamp(-3, 3) / 3 + 0.5),
        (inside, high.clamp(-3, 3) / 3 + 0.5),
    )
    return found[0] - _MARGIN, found[1] + _MARGIN


def _cosine(low: Tensor, high: Tensor) -> Range:
    """Range of the cosine."""
    turn = 2 * math.pi

    def contains(phase: float) -> Tensor:
        return torch.floor((high + _NEAR - phase) / turn) >= torch.ceil((low - _NEAR - phase) / turn)

    far = (low.abs() > 1e6) | (high.abs() > 1e6)  # argument reduction loses digits: give up there
    top = torch.where(contains(0.0) | far, 1.0, torch.maximum(low.cos(), high.cos()))
    bottom = torch.where(contains(math.pi) | far, -1.0, torch.minimum(low.cos(), high.cos()))
    return bottom - _MARGIN, top + _MARGIN


def _gelu(module: nn.GELU, x: Tensor) -> Tensor:
    if module.approximate == "tanh":
        a, b = math.sqrt(2 / math.pi), 0.044715
        x = x.clamp(-30, 30)  # constant to rounding beyond, and finite
        t = torch.tanh(a * (x + b * x**3))
        return (1 + t) / 2 + x * (1 - t * t) * a * (1 + 3 * b * x * x) / 2
    x = x.clamp(-40, 40)
    return torch.special.ndtr(x) + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _silu(module: Any, x: Tensor) -> Tensor:
    x = x.clamp(-700, 700)
    p = torch.sigmoid(x)
    return p + x * p * torch.sigmoid(-x)


def _mish(module: Any, x: Tensor) -> Tensor:
    x = x.clamp(-700, 700)
    t = torch.tanh(nn.functional.softplus(x))
    return t + x * torch.sigmoid(x) * (1 - t * t)


def _zero(module: Any) -> tuple[float, ...]:
    return (0.0,)


def _none(module: Any) -> tuple[float, ...]:
    return ()


def _gelu_turns(module: nn.GELU) -> tuple[float, ...]:
    point = 1.41850400879082835 if module.approximate == "tanh" else math.sqrt(2)
    return (-point, point)


def _limits(module: Clamp) -> tuple[float, float]:
    return (-math.inf if module.min is None else module.min), (math.inf if module.max is None else module.max)


_INF = math.inf
_RULES: dict[type[nn.Module], Rule] = {
    Abs: _pieces(lambda m, _: [(-_INF, 0.0, -1.0), (0.0, _INF, 1.0)]),
    Atan: _smooth(lambda m, x: 1 / (1 + x * x), _zero),
    Clamp: _pieces(lambda m, _: _clip(*_limits(m))),
    Cos: lambda m, low, high: _cosine(low + math.pi / 2, high + math.pi / 2),
    Sin: lambda m, low, high: _cosine(low, high),
    nn.CELU: _exponential(lambda m: (1.0, m.alpha, 1.0)),
    nn.ELU: _exponential(lambda m: (m.alpha, 1.0, 1.0)),
    nn.GELU: _smooth(_gelu, _gelu_turns),
    nn.Hardsigmoid: _pieces(lambda m, _: _clip(-3.0, 3.0, 1 / 6)),
    nn.Hardswish: _hardswish,
    nn.Hardtanh: _pieces(lambda m, _: _clip(m.min_val, m.max_val)),
    nn.LeakyReLU: _two(lambda m, _: [m.negative_slope]),
    nn.LogSigmoid: _smooth(lambda m, x: torch.sigmoid(-x), _none),
    nn.Mish: _smooth(_mish, lambda m: (-2.25637639636079312, 1.49057117948542845)),
    nn.PReLU: _two(_prelu),
    nn.ReLU: _two(lambda m, _: [0.0]),
    nn.ReLU6: _pieces(lambda m, _: _clip(0.0, 6.0)),
    nn.RReLU: _two(lambda m, _: [m.lower, m.upper]),
    nn.SELU: _exponential(lambda m: (1.758099340847376859940, 1.0, 1.0507009873554804934)),
    nn.SiLU: _smooth(_silu, lambda m: (-2.39935728051546766, 2.39935728051546766)),
    nn.Sigmoid: _smooth(lambda m, x: torch.sigmoid(x) * torch.sigmoid(-x), _zero),
    # PyTorch switches to slope one where βx > threshold, which is the limit of the logistic function up to the margin.
    nn.Softplus: _smooth(lambda m, x: torch.where(m.beta * x > m.threshold, 1.0, torch.sigmoid(m.beta * x)), _none),
    nn.Softshrink: _pieces(
        lambda m, _: (
            [(-_INF, -m.lambd, 1.0), (-m.lambd, m.lambd, 0.0), (m.lambd, _INF, 1.0)]
            if m.lambd
            else [(-_INF, _INF, 1.0)]
        )
    ),
    nn.Softsign: _smooth(lambda m, x: (1 + x.abs()) ** -2, _zero),
    nn.Tanh: _smooth(lambda m, x: 1 - x.tanh() ** 2, _zero),
    nn.Tanhshrink: _smooth(lambda m, x: x.tanh() ** 2, _zero),
    nn.Threshold: _pieces(lambda m, _: [(-_INF, m.threshold, 0.0), (m.threshold, _INF, 1.0)]),
}
