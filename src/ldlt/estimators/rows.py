"""Rows of a table with their weights: what an estimator is trained on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Array", "Rows", "merge"]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Rows:
    """Features, targets and weights.

    Attributes:
        x: Features (n, d).
        target: Targets (n, t): a class's number, or what is to be regressed.
        weight: Positive weights (n,).
    """

    x: Array
    target: Array
    weight: Array

    def __len__(self) -> int:
        return len(self.x)

    def at(self, index: npt.NDArray[np.int64]) -> Rows:
        """Some of the rows."""
        return Rows(self.x[index], self.target[index], self.weight[index])

    def split(self, fraction: float, random: np.random.Generator, *, by_target: bool) -> tuple[Rows, Rows]:
        """Rows to train on and rows to validate with, at least one of each.

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
        passed = np.floor(np.arange(1, n + 1) * fraction)
        held = np.diff(passed, prepend=0.0) > 0
        if by_target:  # one row of every class to train on
            held[np.unique(self.target[order, 0], return_index=True)[1]] = False
        held[0] = False
        if not held.any():
            held[-1] = True
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
