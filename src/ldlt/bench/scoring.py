"""Accuracy and certified accuracy of a model on some rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ldlt.bench.models import Model
from ldlt.bench.protocol import CURVE, RADII
from ldlt.radius import certified_radius

__all__ = ["Score", "score"]


@dataclass(frozen=True)
class Score:
    """What a model achieves.

    Attributes:
        metrics: ``accuracy`` and the columns of ``RADII``: share of rows that are right, and certified beyond a radius.
        curve: The same at the radii of ``CURVE``.
        radius: Mean over all rows of the certified radius, at most 1, of those that are right.
    """

    metrics: dict[str, float]
    curve: list[float]
    radius: float

    @property
    def rank(self) -> tuple[float, float]:
        """What a search maximises: the mean of the five metrics, then the mean radius."""
        return sum(self.metrics.values()) / len(self.metrics), self.radius


@torch.no_grad()
def score(model: Model, x: Tensor, labels: Tensor) -> Score:
    """Score a model, in the precision it was trained in; the radii use the constants of all pairs of logits."""
    logits = model.module(x)
    radius = certified_radius(logits, model.pair_bounds())
    right = (torch.nan_to_num(logits, nan=-torch.inf).argmax(1) == labels) & logits.isfinite().all(1)
    radius = torch.where(right, radius, -1.0)

    def share(r: float) -> float:
        return float((radius > r).double().mean())

    metrics = {"accuracy": float(right.double().mean()), **{name: share(r) for name, r in RADII.items()}}
    return Score(metrics, [share(r) for r in CURVE], float(radius.clamp(0.0, 1.0).mean()))
