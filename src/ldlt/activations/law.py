"""What is known of a class of activations, as one object."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ldlt.errors import SlopeError

__all__ = [
    "Bounds", "Functions", "Joint", "Law", "Piece", "Range", "exponential", "number", "piecewise", "ramp", "smooth",
    "wave",
]  # fmt: skip

V = TypeVar("V")
Range = tuple[Tensor, Tensor]
Bounds = Callable[[Any], tuple[float, float]]
Piece = tuple[float, float, Any]
"""``(start, end, slope)`` of a linear piece; the slope is a number, or a tensor with one entry per channel."""

_MARGIN = 1e-10  # far above the rounding of derivatives in float64, which is of order 1e-15
_NEAR = 1e-6  # a critical point this close counts as inside


class Functions(Protocol[V]):
    """Elementary functions of values of one type; their sums and products are those of the type itself.

    An activation is written once in them. With balls it becomes an enclosure, with tensors the activation itself.

    * ``constant``: a real constant of which this is the nearest float; a short dyadic number such as 0.5 or 3 is exact.
    * ``number``: a number of the program, as it is and as any precision reads it; ``rounded`` if it was once before.
    * ``channels``: a stored tensor, one entry or one per channel, as factors of ``x``.
    * ``clip``: ``min(max(x, low), high)``.
    * ``split``: ``right`` where ``x ≥ 0``, ``left`` elsewhere.
    * ``divide``, ``abs``, ``exp``, ``expm1``, ``log1p``, ``tanh``, ``erf``, ``atan``, ``sin``, ``cos``.
    """

    def constant(self, value: float) -> V: ...
    def number(self, value: float, rounded: bool = False) -> V: ...
    def channels(self, weight: Tensor, x: V) -> V: ...
    def clip(self, x: V, low: V | None = None, high: V | None = None) -> V: ...
    def split(self, x: V, right: V, left: V) -> V: ...
    def divide(self, x: V, y: V) -> V: ...
    def abs(self, x: V) -> V: ...
    def exp(self, x: V) -> V: ...
    def expm1(self, x: V) -> V: ...
    def log1p(self, x: V) -> V: ...
    def tanh(self, x: V) -> V: ...
    def erf(self, x: V) -> V: ...
    def atan(self, x: V) -> V: ...
    def sin(self, x: V) -> V: ...
    def cos(self, x: V) -> V: ...


@dataclass(frozen=True)
class Joint:
    """A nonlinearity that mixes groups of entries.

    Attributes:
        center: Of its sector.
        radius: Of its sector.
        size: Number of entries of a group, from the module; 0 for all along a dimension.
        owner: From the module and the numbers of the entries, of the shape of the input: the number of one entry of
            each group in the place of all of them.
        channels: Whether groups are consecutive entries of dimension 1.
    """

    center: float
    radius: float
    size: Callable[[Any], int]
    owner: Callable[[Any, Tensor], Tensor]
    channels: bool = True


@dataclass(frozen=True)
class Law:
    """An entry of the table of activations.

    Attributes:
        slopes: The exact infimum and supremum of the slopes, from the module; None for a joint nonlinearity.
        slopes_on: Bounds of the slopes on intervals, from the module and the ends, (features,) each in float64; without
            it those everywhere are taken.
        enclose: The function itself, from the module, a value and :class:`Functions`; without it nothing is known of
            its rounding.
        calls: Names of the ATen operations that compute it, separated by spaces; or by name what makes the module from
            the arguments behind the input, if it is not the class itself.
        cases: Keyword arguments with which modules are made to be tested.
        joint: What a joint nonlinearity mixes.
        refused: Why the whole class has no rule.
    """

    slopes: Bounds | None = None
    slopes_on: Callable[[Any, Tensor, Tensor], Range] | None = None
    enclose: Callable[[Any, Any, Functions[Any]], Any] | None = None
    calls: str | Mapping[str, Callable[..., nn.Module]] = ""
    cases: Sequence[Mapping[str, Any]] = ({},)
    joint: Joint | None = None
    refused: str = ""

    @property
    def names(self) -> list[str]:
        """Names of its calls."""
        return self.calls.split() if isinstance(self.calls, str) else [*self.calls]


def number(module: nn.Module, name: str, *, finite: bool = True) -> float:
    """An argument of a module as a float.

    Raises:
        SlopeError: It is no fixed number.
    """
    value, label = getattr(module, name), type(module).__name__
    if not isinstance(value, int | float):
        raise SlopeError(f"{label}: '{name}' must be a fixed number; for a learned slope use torch.nn.PReLU")
    if math.isnan(value) or (finite and math.isinf(value)):
        raise SlopeError(f"{label}: '{name}' must be a finite number, got {value}")
    return float(value)


# -- laws of slopes ----------------------------------------------------------------------------------------------------


def _hull(*parts: tuple[Tensor, Tensor], margin: float = _MARGIN) -> Range:
    """Least and largest of some values, each with a mask of where it counts, and a margin for their rounding."""
    low = torch.stack([torch.where(mask, value, math.inf) for mask, value in parts]).amin(0)
    high = torch.stack([torch.where(mask, value, -math.inf) for mask, value in parts]).amax(0)
    return low - margin, high + margin


def piecewise(pieces: Callable[[Any], Sequence[Piece]], enclose: Any, **more: Any) -> Law:
    """A continuous piecewise linear function: its slopes are those of the pieces that an interval touches.

    Args:
        pieces: From the module, pieces that cover the real line; empty ones do not count.
        enclose: See :class:`Law`.
        **more: Likewise.
    """

    def present(module: Any) -> list[tuple[float, float, Tensor]]:
        found = [(a, b, torch.as_tensor(s, dtype=torch.float64).detach().cpu()) for a, b, s in pieces(module) if a < b]
        if not all(bool(s.isfinite().all()) for *_, s in found):
            raise SlopeError(f"{type(module).__name__}: weight has entries that are not finite")
        return found

    def slopes(module: Any) -> tuple[float, float]:
        found = torch.cat([s.flatten() for *_, s in present(module)])
        return found.min().item(), found.max().item()

    def slopes_on(module: Any, low: Tensor, high: Tensor) -> Range:
        parts = []
        for start, end, slope in present(module):
            each = slope.reshape(-1, 1)
            parts.append(((low <= end) & (high >= start), each.expand(-1, len(low) // len(each)).reshape(-1)))
        return _hull(*parts, margin=0.0)

    return Law(slopes, slopes_on, enclose, **more)


def smooth(
    slopes: Bounds | tuple[float, float],
    critical: Callable[[Any], Sequence[float]] | Sequence[float],
    enclose: Any,
    **more: Any,
) -> Law:
    """A function with a continuous derivative (found by autograd) that is monotone between a few critical points.

    Args:
        slopes: Infimum and supremum of the derivative.
        critical: The critical points.
        enclose: See :class:`Law`.
        **more: Likewise.
    """

    def derivative(module: Any, x: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            point = x.detach().clone().requires_grad_()
            return torch.autograd.grad(module.forward(point.clone()).sum(), point)[0]

    def slopes_on(module: Any, low: Tensor, high: Tensor) -> Range:
        everywhere = torch.ones_like(low, dtype=torch.bool)
        parts = [(everywhere, derivative(module, low)), (everywhere, derivative(module, high))]
        for point in critical(module) if callable(critical) else critical:
            inside = (low - _NEAR <= point) & (high + _NEAR >= point)
            parts.append((inside, derivative(module, torch.full_like(low, point))))
        return _hull(*parts)

    return Law(_constant(slopes), slopes_on, enclose, **more)


def exponential(slopes: Any, scale: Callable[[Any], tuple[float, float, float]], enclose: Any, **more: Any) -> Law:
    """Slopes ``a e^{x/b}`` below zero and ``c`` above, for the ``a, b, c`` of the module: ELU and its kin."""

    def slopes_on(module: Any, low: Tensor, high: Tensor) -> Range:
        a, b, c = scale(module)
        ends = [(low < 0, a * torch.exp(end.clamp(max=0.0) / b)) for end in (low, high)]
        return _hull(*ends, (high >= 0, torch.full_like(low, c)))

    return Law(_constant(slopes), slopes_on, enclose, **more)


def ramp(end: float, low_slope: float, high_slope: float, enclose: Any, **more: Any) -> Law:
    """Slope 0 below ``−end``, 1 above ``end``, and between them linear from ``low_slope`` to ``high_slope``."""

    def slopes_on(module: Any, low: Tensor, high: Tensor) -> Range:
        middle, rise = (low_slope + high_slope) / 2, (high_slope - low_slope) / (2 * end)
        inside = (high >= -end) & (low <= end)
        ends = [(inside, middle + rise * x.clamp(-end, end)) for x in (low, high)]
        return _hull((low <= -end, torch.zeros_like(low)), (high >= end, torch.ones_like(low)), *ends)

    return Law(_constant((min(0.0, low_slope), max(1.0, high_slope))), slopes_on, enclose, **more)


def wave(phase: float, enclose: Any, **more: Any) -> Law:
    """Slopes ``cos(x + phase)``."""
    turn = 2 * math.pi

    def slopes_on(module: Any, low: Tensor, high: Tensor) -> Range:
        low, high = low + phase, high + phase
        far = (low.abs() > 1e6) | (high.abs() > 1e6)  # argument reduction loses digits: give up there

        def reached(point: float) -> Tensor:
            """Whether the interval contains the point, up to whole turns."""
            return far | (((high + _NEAR - point) / turn).floor() >= ((low - _NEAR - point) / turn).ceil())

        top = torch.where(reached(0.0), 1.0, torch.maximum(low.cos(), high.cos()))
        bottom = torch.where(reached(math.pi), -1.0, torch.minimum(low.cos(), high.cos()))
        return bottom - _MARGIN, top + _MARGIN

    return Law(_constant((-1.0, 1.0)), slopes_on, enclose, **more)


def _constant(slopes: Any) -> Bounds:
    return slopes if callable(slopes) else lambda module: slopes
