"""Floating-point search for multipliers and constants that can be proven; nothing here is trusted.

See :mod:`ldlt.certificates.proof` for the two moves ``t`` and ``ε`` and why they are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ldlt.certificates.ball import Array, Ball
from ldlt.certificates.definite import rounding_error, scaled
from ldlt.certificates.form import bordered
from ldlt.certificates.linear import Network

__all__ = ["Search"]

Cost = Callable[[tuple[float, float]], float]
"""Logarithm of the factor on ℓ² at a pair (ε, weight of the input)."""

_LARGE = 1e-8
_SMALL = 1500  # up to this size factorisations are cheap and the search is finer


@dataclass(frozen=True)
class _Point:
    """``G = Y(P_ε − e D^{-2})^{-1}Y'`` and what was needed for it."""

    gram: Tensor
    error: float


class Search:
    """Looks along the two moves from given multipliers and bound.

    Args:
        network: The network.
        multipliers: ``Λ`` by activation.
        bound: ℓ.
    """

    def __init__(self, network: Network, multipliers: Mapping[str, Array], bound: float) -> None:
        self.network, self.multipliers, self.bound = network, multipliers, bound
        self.depth = max(network.levels.values())
        self.small = sum(network.sizes.values()) <= _SMALL
        self.error = math.nan  # rounding errors of the proof, relative to a diagonal of one

    def run(self, slack: float, improve: bool = False) -> tuple[dict[str, Array], float] | None:
        """Multipliers and the smallest bound whose smallest scaled eigenvalue exceeds the rounding errors.

        Args:
            slack: Factor on the estimate of the rounding errors.
            improve: Whether to look for a bound below the given one, too.
        """
        tried: dict[tuple[float, float], float] = {}

        def cost(point: tuple[float, float]) -> float:
            if point not in tried:
                tried[point] = self._cost(*point, slack)
            return tried[point]

        # At ε = 0 only the output is lifted; with no loss there, nothing is to be gained from the rest.
        start = (0.0, 1.0)
        tight = cost(start)
        if self.depth and not (tight < 1e-7 and tight - self._cost(*start, 0.0) < 1e-9):
            self._lift(1.0, cost, tried)
        if self.depth and (improve or not tried[min(tried, key=cost)] < 1e-7):
            # Multipliers of another scale than the bound: an inequality for every single output, for instance.
            self._share(min(tried, key=cost)[0], cost)
            self._lift(min(tried, key=cost)[1], cost, tried)
        best = min(tried, key=cost)
        if not math.isfinite(tried[best]):
            return None
        eps, share = best
        t = math.exp(tried[best]) / ((1 + eps) ** self.depth * share)
        return self._scaled(eps, t), self.bound * math.exp(tried[best] / 2) * (1 + 2**-52)

    def _lift(self, share: float, cost: Cost, tried: Mapping[tuple[float, float], float]) -> None:
        """Try values of ε: powers of ten, then between the best and its neighbours."""
        for decade in range(-13, -2, 1 if self.small else 2):
            cost((10.0**decade, share))
        width = 1.0 if self.small else 2.0
        for _ in range(4 if self.small else 2):
            width /= 2
            eps = min((p for p in tried if p[1] == share), key=cost)[0]
            if eps:
                cost((eps * 10.0**width, share))
                cost((eps * 10.0**-width, share))

    def _share(self, eps: float, cost: Cost) -> None:
        """Try other weights of the input relative to the multipliers: the cost has one minimum."""
        step, best = math.log(2.0), 0.0

        def at(log: float) -> float:
            return cost((eps, math.exp(log)))

        for _ in range(40):  # walk until it grows on both sides
            better = min((best - step, best + step), key=at)
            if not at(better) < at(best):
                break
            best = better
        for _ in range(16 if self.small else 8):
            step /= 2
            best = min((best, best - step, best + step), key=at)

    def gram(self, slack: float) -> Array | None:
        """A symmetric ``G`` with room for rounding errors."""
        point = self._point(0.0, 1.0, slack)
        if point is None:
            return None
        gram = (point.gram + point.gram.mT) / 2
        diagonal = gram.diagonal()
        floor = 1e-16 * max(float(diagonal.max()), 1e-200)  # outputs that are constant
        diagonal += 4 * point.error * diagonal.clone() + floor
        found: Array = gram.numpy()
        return found

    def _scaled(self, eps: float, t: float = 1.0) -> dict[str, Array]:
        levels = self.network.levels
        return {n: v * (t * (1 + eps) ** (self.depth - levels[n])) for n, v in self.multipliers.items()}

    def _cost(self, eps: float, share: float, slack: float) -> float:
        """Logarithm of the factor on ℓ²; infinite if there is none."""
        point = self._point(eps, share, slack)
        if point is None:
            return math.inf
        top = float(torch.linalg.eigvalsh(point.gram)[-1]) / (1 - point.error)
        return math.inf if not top > 0 else math.log(top * share) + self.depth * math.log1p(eps)

    def _point(self, eps: float, share: float, slack: float) -> _Point | None:
        k = self.network.outputs
        bound = self.bound * math.sqrt(share * (1 + eps) ** self.depth)
        whole = bordered(self.network, self._scaled(eps), bound, np.eye(k))
        size = len(whole.mid) - k
        rows = torch.from_numpy(whole.mid[size:, :size].copy())
        rad = None if whole.rad is None else whole.rad[:size, :size]
        inner = Ball(whole.mid[:size, :size], rad)
        if not inner.is_finite() or not (inner.mid.diagonal() > 0).all():
            return None
        mid, radii, scale = scaled(inner)
        diagonal = mid.diagonal().copy()
        if not self.error < _LARGE:  # not known, or measured where the matrix was nearly singular
            self.error = self._estimate(mid, radii, diagonal)
            if whole.rad is not None:  # the output map, too
                self.error += 2 * float(np.linalg.norm(whole.rad[size:, :size] * scale))
        error = min(slack * self.error, 0.5)
        np.fill_diagonal(mid, diagonal - error)
        factor, info = torch.linalg.cholesky_ex(torch.from_numpy(mid))
        if int(info):
            return None
        half = torch.linalg.solve_triangular(factor, (rows * torch.from_numpy(scale)).mT, upper=False)
        gram = half.mT @ half
        return _Point(gram, error) if bool(gram.isfinite().all()) else None

    @staticmethod
    def _estimate(mid: Array, rad: Array, diagonal: Array) -> float:
        """Rounding errors of the proof: measured with any factor at hand, doubled twice for what the border adds."""
        for shift in (1e-12, 1e-9, 1e-7, 1e-5, 1e-3):
            np.fill_diagonal(mid, diagonal + shift)
            factor, info = torch.linalg.cholesky_ex(torch.from_numpy(mid))
            if not int(info):
                np.fill_diagonal(mid, diagonal)
                return 4 * rounding_error(mid, rad, factor.tril_().numpy(), -shift)
        return 1e-6
