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
    validated with. Beside the result this takes memory for a number per row.

    Args:
        x: Features (n, d).
        target: Targets (n, t).
        weight: Weights (n,), not negative, not all zero.
    """
    kept = np.flatnonzero(weight > 0)
    mixed = np.zeros(len(kept), dtype=np.uint64)
    for column in (*x.T, *target.T):  # a hash of each row; adding 0 turns −0 into 0
        mixed = (mixed ^ (column[kept] + 0.0).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    order = np.argsort(mixed, kind="stable")
    new = np.ones(len(kept), dtype=bool)
    new[1:] = mixed[order[1:]] != mixed[order[:-1]]
    alike = np.flatnonzero(~new)
    for i in np.array_split(alike, max(1, len(alike) // 2**14)):  # two rows may have the same hash
        one, other = kept[order[i]], kept[order[i - 1]]
        new[i] = (x[one] != x[other]).any(axis=1) | (target[one] != target[other]).any(axis=1)
    first = np.flatnonzero(new)
    total: Array = np.add.reduceat(weight[kept[order]], first)
    points = kept[order[first]]
    rows = Rows(x[points], target[points], total)
    np.add(rows.x, 0.0, out=rows.x)
    np.add(rows.target, 0.0, out=rows.target)
    return rows


def location_and_scale(
    table: Array, weight: Array, number: npt.NDArray[np.bool_] | bool = True, *, common: bool = False
) -> tuple[Array, Array]:
    r"""Weighted mean :math:`μ_j` and standard deviation :math:`σ_j` of the columns (d,).

    Columns that are constant up to rounding, and those that are not numbers, get :math:`σ_j = 1`.

    Args:
        table: (n, d).
        weight: Positive (n,).
        number: Which columns are numbers, not categories.
        common: One scale for all columns, the root mean square over numbers that are not constant.
    """
    share = weight / weight.sum()
    found = [_location_and_scale(column, share) for column in table.T]
    center, scale, varied = (np.array(part) for part in zip(*found, strict=True))
    varied = varied & number
    if not common:
        return center, np.where(varied, scale, 1.0)
    kept = scale[varied]
    largest = kept.max(initial=0.0)
    value = largest * np.sqrt(np.mean(np.square(kept / largest))) if len(kept) else 1.0
    return center, np.full_like(scale, value)


def _location_and_scale(column: Array, share: Array) -> tuple[float, float, bool]:
    """Of one column (n,), and whether it is more than a constant."""
    low, high = column.min(), column.max()
    # Differences from the middle, as shares of the half range: no offset cancels digits and no square overflows.
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    varied = half > 8 * np.finfo(np.float64).eps * max(abs(low), abs(high))
    half = half if varied else 1.0
    relative = (column - middle) / half
    mean = share @ relative
    return middle + half * mean, half * np.sqrt(share @ np.square(relative - mean)), bool(varied)


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
