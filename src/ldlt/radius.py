r"""Certified radii of predictions.

Within a Euclidean ball of radius ``ε`` around an input, no output difference :math:`y_c - y_j` can fall by more than
:math:`ε\, ℓ_{cj}`. The prediction ``c`` is therefore certified for

.. math:: ε < \min_{j ≠ c} \frac{y_c - y_j}{ℓ_{cj}} .

The logits ``y`` are those of the network in real arithmetic. Computed ones :math:`\hat y` with
:math:`|\hat y - y| \le e` (:func:`ldlt.forward_error`) certify

.. math:: ε < \min_{j ≠ c} \frac{\hat y_c - \hat y_j - e_c - e_j}{ℓ_{cj}} ,

where every operation is rounded downwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ldlt.errors import OptionError, ShapeError

__all__ = ["Curve", "certified_accuracy", "certified_curve", "certified_radius"]


class PairBounds(Protocol):
    """Anything that knows the constants of its pairs of outputs: a network built here, or a certificate."""

    def pair_bounds(self) -> Tensor:
        """Constants of all pairs, (k, k)."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Certified accuracy as a function of the radius: a step function, exactly.

    Attributes:
        radii: 0 and the radii at which the accuracy falls, (n,), strictly increasing, float64.
        accuracy: Share of samples that are right and certified *beyond* each of them, (n,); constant up to the next.
    """

    radii: Tensor
    accuracy: Tensor

    def at(self, radius: float) -> float:
        """Accuracy at a radius ≥ 0, which must be exceeded."""
        if not radius >= 0:
            raise OptionError(f"a radius must not be negative, it is {radius!r}")
        place = torch.searchsorted(self.radii, float(radius), right=True) - 1
        return float(self.accuracy[place])

    @property
    def area(self) -> float:
        """Integral of the curve: the average certified radius, with 0 for samples that are wrong."""
        return float((self.accuracy[:-1] * self.radii.diff()).sum())


def certified_radius(
    logits: Tensor,
    pair_bounds: Tensor | PairBounds,
    *,
    error: Tensor | float | None = None,
    scale: Tensor | float | None = None,
) -> Tensor:
    r"""Certified radius of the predicted class of every sample.

    Args:
        logits: (batch, k), k ≥ 2.
        pair_bounds: (k, k), the constant of ``y_c − y_j`` for every pair, or a network or certificate with a method
            ``pair_bounds``.
        error: Bound on the error of the logits, (batch, k) or one number, as from :func:`ldlt.forward_error`. The
            margins are reduced by it and all that follows is rounded downwards (also if it is 0). Without it the
            logits are taken as exact and the formula is evaluated in float64.
        scale: For inputs that were standardised before the network, ``x = (raw − mean) / scale``: their scale, a
            number or a tensor of the shape of an input. The radius is then in raw units:
            :math:`\|Δx\| \le \|Δ\text{raw}\| / \min(\text{scale})`, so it is multiplied by the smallest scale. That is
            exact for a common scale. Where scales differ, bounds of the network
            ``nn.Sequential(ldlt.nn.Standardise(mean, scale), net)`` give larger radii.

    Returns:
        (batch,) in float64. Ties, rows with NaN and margins within the error have radius zero.
    """
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise ShapeError(f"logits must have shape (batch, k) with k ≥ 2, not {tuple(logits.shape)}")
    k = logits.shape[1]
    if not isinstance(pair_bounds, Tensor):
        if not callable(getattr(pair_bounds, "pair_bounds", None)):
            raise OptionError(
                "pair_bounds must be a (k, k) tensor, or a network or certificate that has them, not "
                f"{type(pair_bounds).__name__}"
            )
        pair_bounds = pair_bounds.pair_bounds()
    if tuple(pair_bounds.shape) != (k, k):
        raise ShapeError(f"pair_bounds must have shape ({k}, {k}), not {tuple(pair_bounds.shape)}")
    values = logits.detach().double()
    predicted = _predicted(values)
    margins = values.gather(1, predicted[:, None]) - values  # (batch, k)
    constants = pair_bounds.to(values)[predicted]
    if error is not None:
        spread = _checked_error(error, values)
        charge = _up(spread.gather(1, predicted[:, None]) + spread)
        margins = _down(_down(margins) - charge)
    radii = margins / constants
    if error is not None:  # a constant of zero divides exactly
        radii = torch.where(constants == 0, radii, _down(radii))
    radii.scatter_(1, predicted[:, None], torch.inf)
    radius = radii.min(1).values
    broken = ~torch.isfinite(values).all(1) | torch.isnan(radius)
    radius = torch.where(broken, 0.0, radius).clamp_min(0.0)
    if scale is None:
        return radius
    raw = radius * _smallest(scale)
    return raw if error is None else torch.where(radius.isinf(), radius, _down(raw).clamp_min(0.0))


def certified_curve(
    logits: Tensor,
    labels: Tensor,
    pair_bounds: Tensor | PairBounds,
    *,
    error: Tensor | float | None = None,
    scale: Tensor | float | None = None,
) -> Curve:
    """Certified accuracy at every radius at once.

    Args:
        logits: (batch, k), at least one sample.
        labels: (batch,), the true classes.
        pair_bounds: As for :func:`certified_radius`.
        error: As for :func:`certified_radius`.
        scale: As for :func:`certified_radius`; the radii are then in raw units.

    Example:
        >>> logits = torch.tensor([[3.0, 1.0], [2.0, 1.0], [0.0, 1.0]])
        >>> curve = certified_curve(logits, torch.tensor([0, 0, 0]), torch.ones(2, 2))
        >>> curve.radii.tolist(), [round(a, 2) for a in curve.accuracy.tolist()], curve.area
        ([0.0, 1.0, 2.0], [0.67, 0.33, 0.0], 1.0)
    """
    if tuple(labels.shape) != tuple(logits.shape[:1]) or not len(labels):
        raise ShapeError(f"labels must have shape ({logits.shape[0]},), not {tuple(labels.shape)}, at least one sample")
    radius = certified_radius(logits, pair_bounds, error=error, scale=scale)
    counted = radius[_predicted(logits.detach().double()) == labels.to(logits.device)].sort().values
    radii = torch.cat([counted.new_zeros(1), counted]).unique()
    above = len(counted) - torch.searchsorted(counted, radii, right=True)
    return Curve(radii, above.double() / len(radius))


def certified_accuracy(
    logits: Tensor,
    labels: Tensor,
    pair_bounds: Tensor | PairBounds,
    radii: Sequence[float] = (0.0,),
    *,
    error: Tensor | float | None = None,
    scale: Tensor | float | None = None,
) -> dict[float, float]:
    """Share of samples that are classified correctly *and* certified beyond each of some radii.

    At radius 0 a tie counts as wrong. The arguments are those of :func:`certified_curve`.
    """
    curve = certified_curve(logits, labels, pair_bounds, error=error, scale=scale)
    return {float(r): curve.at(float(r)) for r in radii}


def _predicted(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, nan=-torch.inf).argmax(1)


def _checked_error(error: Tensor | float, values: Tensor) -> Tensor:
    """The error as (batch, k)."""
    found = torch.as_tensor(error, dtype=torch.float64, device=values.device).detach()
    if found.ndim and found.shape != values.shape:
        raise ShapeError(f"error must be a number or have the shape {tuple(values.shape)} of the logits")
    if not bool((found >= 0).all()):  # NaN, too
        raise OptionError("error must not be negative or NaN; where it is unknown, pass infinity")
    return found.expand(values.shape)


def _smallest(scale: Tensor | float) -> float:
    found = torch.as_tensor(scale, dtype=torch.float64).detach()
    if not found.numel() or not bool((found.isfinite() & (found > 0)).all()):
        raise OptionError("scale must be positive and finite: the numbers the inputs were divided by")
    return float(found.min())


def _down(values: Tensor) -> Tensor:
    """The next float below: a lower bound of what was rounded to nearest."""
    return torch.nextafter(values, torch.full_like(values, -torch.inf))


def _up(values: Tensor) -> Tensor:
    return torch.nextafter(values, torch.full_like(values, torch.inf))
