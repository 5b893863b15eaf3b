r"""From multipliers and a bound that were found to ones that can be proven, near them.

**Tight networks.** A network built here has ``Q ⪰ 0`` with a smallest eigenvalue near zero, and its weights were
rounded once after that. Raising ℓ alone does not do: it lifts the directions of ``x`` only. With ``S_i`` the constraint
of activation ``i`` (linear in ``Λ_i``), ``S_0 = ℓ²‖x‖²`` and ``P = Σ_i S_i``, two moves lift everything else:

1. *Output.* Scaling ``Λ`` and ``ℓ²`` by ``t > 1`` turns ``Q`` into ``tP − Y'Y = tQ + (t − 1)Y'Y``, and whenever
   ``P ≻ 0`` there is a ``t`` that makes it positive definite, the least one being ``t = λ_max(YP^{-1}Y')``. This is
   the exact optimum along that ray, found with one factorisation.
2. *Hidden layers* (``P`` itself singular: contractions of norm one). Let ``i`` have level ``d_i``, the number of
   activations on the longest path to it, ``d`` the largest level, and take ``P_ε = Σ_i (1 + ε)^{d − d_i} S_i``, which
   raises ℓ² by ``(1 + ε)^d`` and each multiplier by less than those before it. If ``P ⪰ 0`` then ``P_ε ≻ 0``.

   *Proof.* Let ``P^{(j)}`` be the sum of the ``S_i`` up to level ``j``. Summation by parts gives
   ``P_ε = P + Σ_{j<d} ((1 + ε)^{d−j} − (1 + ε)^{d−j−1}) P^{(j)}`` with positive weights. ``P^{(j)} ⪰ 0``: it does
   not depend on later coordinates; set them to ``w = cv`` in turn, which makes later ``S_i = −2r²‖v‖²_Λ ≤ 0``, so
   ``P^{(j)}(z) ≥ P(z) ≥ 0``. If ``P_ε(z) = 0`` then all ``P^{(j)}(z) = 0``, hence level by level ``S_j(z) = 0``
   with ``x = 0``, then ``v_1 = 0``, then ``w_1 = 0``, and so on: ``z = 0``. ∎

The factor on ℓ is then ``√(t (1 + ε)^d)``; ε is chosen to make it small. If the multipliers are of another scale than
the bound (those of a network whose single outputs were bounded, say), the weight of ``S_0`` relative to the others is
searched, too; the inequality is convex in ``(Λ, ℓ²)``, so this has one minimum. All this is ordinary floating point:
the numbers it ends with, rounded as they are, go through :class:`ldlt.certificates.proof.Prover`, which alone decides.
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
from ldlt.certificates.eliminate import eliminate, prove_on_torus
from ldlt.certificates.enclose import Network
from ldlt.certificates.proof import Proof, Prover, bordered
from ldlt.certificates.torus import TorusNetwork

__all__ = ["settle", "settle_gram", "settle_on_torus"]

# What is found here must pass on other machines, too, whose rounding errors differ a little.
_SAFETY = 1.5
_SLACKS = (1.0, 3.0, 10.0, 100.0)  # factors on the estimate of the rounding errors
_LARGE = 1e-8
_SMALL = 1500  # up to this size factorisations are cheap and the search is finer

Cost = Callable[[tuple[float, float]], float]
"""Logarithm of the factor on ℓ² at a pair (ε, weight of the input)."""


def settle(
    prover: Prover,
    multipliers: Mapping[str, Tensor],
    bound: float,
    largest: float = 1 + 1e-3,
    least: float = 1.0,
    late: Callable[[], bool] = bool,
) -> Proof:
    """Prove the smallest bound found near a given one, with multipliers moved as little as needed.

    Args:
        prover: The network.
        multipliers: ``Λ`` by activation, the start.
        bound: ℓ, the start.
        largest: Largest factor on ℓ.
        least: Smallest factor on ℓ; below 1 the bound may turn out smaller than the given one.
        late: Whether time is up: what is proven by then is returned, after one attempt at least.

    Returns:
        A proof whose ``bound`` and ``multipliers`` are the ones proven; or the failed proof of the given ones.
    """
    best = first = prover.prove(multipliers, bound, None, _SAFETY)
    search = None if first.holds and (least >= 1 or late()) else _search(prover, first, late)
    if search is None:
        return first
    for slack in _SLACKS:
        with np.errstate(all="ignore"):
            found = search.run(slack, least < 1)
        if found is None:
            continue
        moved, ell = found
        if ell > largest * first.bound:
            break
        proof = prover.prove(moved, max(ell, least * first.bound), None, _SAFETY)
        if proof.holds:
            return proof if not best.holds or proof.bound < best.bound else best
    return best


def settle_gram(prover: Prover, proof: Proof) -> Proof:
    """Prove the smallest ``G`` found for the multipliers of a proof: a constant for every direction of the output.

    Returns:
        A proof with :attr:`Proof.gram`; or one that does not hold, with a reason.
    """
    search = _search(prover, proof, bool) if proof.holds else None
    for slack in _SLACKS:
        with np.errstate(all="ignore"):
            gram = None if search is None else search.gram(slack)
        if gram is not None:
            found = prover.prove(proof.multipliers, proof.bound, gram, _SAFETY)
            if found.holds:
                return found
    return Proof(False, proof.bound, -math.inf, proof.reason or "no constants of directions could be proven")


def settle_on_torus(network: TorusNetwork, multipliers: Mapping[str, Tensor], bound: float) -> Proof:
    """Prove the smallest bound near a given one per frequency, with constants of output directions.

    The second move first, by growing ε, until the multipliers are feasible beyond rounding; then the first, for which
    the elimination gives the factor.
    """
    depth = len(network.sites)
    for eps in (0.0, 1e-10, 1e-8, 1e-6, 1e-4):
        lifted = {s.name: multipliers[s.name] * (1 + eps) ** (depth - i) for i, s in enumerate(network.sites, 1)}
        ell = bound * (1 + eps) ** (depth / 2)
        found = eliminate(network, lifted, ell)
        if found.form is None:
            continue
        mid, room = (found.form.mid + found.form.mid.mH) / 2, 1e-9 + 1e-12 * found.form.mid.shape[-1]
        error = float(found.form.rad.max())
        square = max(float(torch.linalg.eigvalsh(mid).max()) + error, 1e-300) * (1 + room)
        last = math.sqrt(square) * (1 + room)
        scaled = {n: m * (last / ell) ** 2 for n, m in found.multipliers.items()}
        gram = None
        if len(mid) == 1:
            gram = mid[0].real / square
            top = float(gram.diagonal().max())
            gram.diagonal().mul_(1 + room).add_(4 * error / square + room * top)
        for wanted in (gram, None):
            proof = prove_on_torus(network, scaled, last, wanted)
            if proof.holds:
                return proof
    return Proof(False, bound, -math.inf, found.reason or proof.reason, found.multipliers)


def _search(prover: Prover, first: Proof, late: Callable[[], bool]) -> _Moves | None:
    """A search from the numbers of a proof that was tried; None if they were refused."""
    if prover.network is None or len(first.multipliers) != len(prover.graph.activations) or math.isnan(first.bound):
        return None
    return _Moves(prover.network, {n: v.numpy() for n, v in first.multipliers.items()}, first.bound, late)


@dataclass(frozen=True)
class _Point:
    """``G = Y(P_ε − e D^{-2})^{-1}Y'`` and what was needed for it."""

    gram: Tensor
    error: float


class _Moves:
    """Looks along the two moves from given multipliers and bound.

    Args:
        network: The network.
        multipliers: ``Λ`` by activation.
        bound: ℓ.
        late: Whether time is up: nothing new is tried then.
    """

    def __init__(
        self, network: Network, multipliers: Mapping[str, Array], bound: float, late: Callable[[], bool]
    ) -> None:
        self.network, self.multipliers, self.bound, self.late = network, multipliers, bound, late
        self.depth = max(network.levels.values())
        self.small = sum(network.sizes.values()) <= _SMALL
        self.error = math.nan  # rounding errors of the proof, relative to a diagonal of one

    def run(self, slack: float, improve: bool) -> tuple[dict[str, Tensor], float] | None:
        """Multipliers and the smallest bound whose smallest scaled eigenvalue exceeds the rounding errors.

        Args:
            slack: Factor on the estimate of the rounding errors.
            improve: Whether to look for a bound below the given one, too.
        """
        tried: dict[tuple[float, float], float] = {}

        def cost(point: tuple[float, float]) -> float:
            if point not in tried:
                tried[point] = math.inf if tried and self.late() else self._cost(*point, slack)
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
        moved = {n: torch.from_numpy(v) for n, v in self._scaled(eps, t).items()}
        return moved, self.bound * math.exp(tried[best] / 2) * (1 + 2**-52)

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

    def gram(self, slack: float) -> Tensor | None:
        """A symmetric ``G`` with room for rounding errors."""
        point = self._point(0.0, 1.0, slack)
        if point is None:
            return None
        gram = (point.gram + point.gram.mT) / 2
        diagonal = gram.diagonal()
        floor = 1e-16 * max(float(diagonal.max()), 1e-200)  # outputs that are constant
        diagonal += 4 * point.error * diagonal.clone() + floor
        return gram

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
