r"""Certified radii of predictions.

Within a Euclidean ball of radius ``ε`` around an input, no output difference :math:`y_c - y_j` can fall by more than
:math:`ε\, ℓ_{cj}`. The prediction ``c`` is therefore certified for

.. math:: ε < \min_{j ≠ c} \frac{y_c - y_j}{ℓ_{cj}} .
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ldlt.errors import OptionError, ShapeError

__all__ = ["certified_accuracy", "certified_radius"]


class PairBounds(Protocol):
    """Anything that knows the constants of its pairs of outputs: a network built here, or a certificate."""

    def pair_bounds(self) -> Tensor:
        """Constants of all pairs, (k, k)."""


def certified_radius(logits: Tensor, pair_bounds: Tensor | PairBounds) -> Tensor:
    """Certified radius of the predicted class of every sample.

    Args:
        logits: (batch, k), k ≥ 2.
        pair_bounds: (k, k), the constant of ``y_c − y_j`` for every pair, or a network or certificate with a method
            ``pair_bounds``.

    Returns:
        (batch,) in float64. Ties and rows with NaN have radius zero.
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
    predicted = torch.nan_to_num(values, nan=-torch.inf).argmax(1)
    margins = values.gather(1, predicted[:, None]) - values  # (batch, k)
    radii = margins / pair_bounds.to(values)[predicted]
    radii.scatter_(1, predicted[:, None], torch.inf)
    radius = radii.min(1).values
    broken = ~torch.isfinite(values).all(1) | torch.isnan(radius)
    return torch.where(broken, 0.0, radius).clamp_min(0.0)


def certified_accuracy(
    logits: Tensor, labels: Tensor, pair_bounds: Tensor | PairBounds, radii: Sequence[float] = (0.0,)
) -> dict[float, float]:
    """Share of samples that are classified correctly *and* certified beyond each radius.

    Args:
        logits: (batch, k).
        labels: (batch,), the true classes.
        pair_bounds: As for :func:`certified_radius`.
        radii: Radii; at radius 0 a tie counts as wrong.
    """
    if tuple(labels.shape) != tuple(logits.shape[:1]):
        raise ShapeError(f"labels must have shape ({logits.shape[0]},), not {tuple(labels.shape)}")
    radius = certified_radius(logits, pair_bounds)
    correct = torch.nan_to_num(logits.detach().double(), nan=-torch.inf).argmax(1) == labels.to(logits.device)
    return {float(r): float((correct & (radius > r)).double().mean()) for r in radii}
