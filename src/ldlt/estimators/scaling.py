"""Location and scale of columns, and the layer that undoes a standardisation."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ldlt.estimators.rows import Array

__all__ = ["Restore", "location_and_scale"]


def location_and_scale(table: Array, weight: Array, *, common: bool = False) -> tuple[Array, Array]:
    r"""Weighted mean :math:`μ_j` and standard deviation :math:`σ_j` of the columns.

    Columns that are constant up to rounding get :math:`σ_j = 1`.

    Args:
        table: (n, d).
        weight: Positive (n,).
        common: One scale for all columns, the root mean square of those that are not constant.

    Returns:
        Two vectors (d,).
    """
    share = weight / weight.sum()
    low, high = table.min(axis=0), table.max(axis=0)
    # Differences from the middle, as shares of the half range: no offset cancels digits and no square overflows.
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    constant = half <= 8 * np.finfo(np.float64).eps * np.maximum(np.abs(low), np.abs(high))
    half = np.where(constant, 1.0, half)
    relative = (table - middle) / half
    mean = share @ relative
    scale = half * np.sqrt(share @ np.square(relative - mean))
    center = middle + half * mean
    if not common:
        return center, np.where(constant, 1.0, scale)
    varied = scale[~constant]
    largest = varied.max(initial=0.0)
    value = largest * np.sqrt(np.mean(np.square(varied / largest))) if len(varied) else 1.0
    return center, np.full_like(scale, value)


class Restore(nn.Module):
    """``y · scale + mean`` as a layer: from standardised outputs to the units of the target.

    Args:
        mean: (m,).
        scale: Positive (m,).
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", torch.as_tensor(mean).detach().clone())
        self.register_buffer("scale", torch.as_tensor(scale).detach().clone())

    def forward(self, y: Tensor) -> Tensor:
        """(batch, m) to (batch, m)."""
        return y * self.scale + self.mean
