"""Rows of a table with their weights, location and scale of columns: what an estimator is trained on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

__all__ = ["Array", "Restore", "Rows", "location_and_scale", "merge"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """Features ``x`` (n, d), targets (n, t), a class's number or what is to be regressed, positive weights (n,)."""

    x: Array
    target: Array
    weight: Array

    def __len__(self) -> int:
        return len(self.x)

    def at(self, index: npt.NDArray[np.int64]) -> Rows:
        """Some of the rows."""
        return Rows(self.x[index], self.target[index], self.weight[index])

    def split(self, fraction: float, random: np.random.Generator, *, by_target: bool) -> tuple[Rows, Rows]:
        """Rows to train on and a fraction of rows to validate with, at least one of each.

        Args:
            fraction: Share of the validation rows.
            random: Decides which.
            by_target: Take that share of every class.

        Raises:
            ValueError: There are fewer than two rows.
        """
        n = len(self)
        if n < 2:
            raise ValueError(
                "there is only one sample (equal rows count once); early_stopping needs two, one to validate with"
            )
        order = random.permutation(n)
        if by_target:
            order = order[np.argsort(self.target[order, 0], kind="stable")]
        # Every (1/fraction)-th row of that order, which takes the share of each class, give or take one row.
        held = np.diff(np.floor(np.arange(1, n + 1) * fraction), prepend=0.0) > 0
        if by_target:  # one row of every class to train on
            held[np.unique(self.target[order, 0], return_index=True)[1]] = False
        held[0] = False
        held[-1] |= not held.any()
        return self.at(order[~held]), self.at(order[held])


def merge(x: Array, target: Array, weight: Array) -> Rows:
    """Rows of weight zero removed, equal rows merged into one with the sum of their weights, all in a fixed order.

    Training sees a set of weighted points, whatever the order of the rows and however often a point is repeated: a
    weight of two is the same as a second copy, to the last bit. Nor can copies of one point be both trained on and
    validated with.

    Args:
        x: Features (n, d).
        target: Targets (n, t).
        weight: Weights (n,), not negative, not all zero.
    """
    kept = weight > 0
    # Adding 0 turns −0 into 0.
    table = np.concatenate([x[kept], target[kept]], axis=1) + 0.0
    points, place = np.unique(table, axis=0, return_inverse=True)
    total: Array = np.bincount(place.reshape(-1), weights=weight[kept], minlength=len(points)).astype(np.float64)
    d = x.shape[1]
    return Rows(np.ascontiguousarray(points[:, :d]), np.ascontiguousarray(points[:, d:]), total)


def location_and_scale(table: Array, weight: Array, *, common: bool = False) -> tuple[Array, Array]:
    r"""Weighted mean :math:`μ_j` and standard deviation :math:`σ_j` of the columns (d,).

    Columns that are constant up to rounding get :math:`σ_j = 1`.

    Args:
        table: (n, d).
        weight: Positive (n,).
        common: One scale for all columns, the root mean square of those that are not constant.
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
    """``y · scale + mean`` (batch, m): from standardised outputs to the units of the target."""

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().clone())
        self.register_buffer("scale", scale.detach().clone())

    def forward(self, y: Tensor) -> Tensor:
        """(batch, m) to (batch, m)."""
        return y * self.scale + self.mean
