r"""The constraint of the interior-point method, in two forms.

Both are *minimise τ subject to* ``S(η, τ) = C(η) + τR'R ⪰ 0``, with ``A_k = d_kd_k' − r_k²v_kv_k'`` of
:class:`~ldlt.certificates.dense.Dense`, ``P(η) = E + Σ_kη_kA_k`` and derivatives ``∂S/∂η_k = B'A_kB``:

=========  =============================  =====  ========  ===================================  =======
form       ``C``                          ``R``  ``τ``     ``B``                                size
=========  =============================  =====  ========  ===================================  =======
whole      ``P(η)``                       ``Y``  ``−1/ℓ²``  identity                             N
reduced    ``−M(η)``, ``M = YP^{-1}Y'``   ``I``  ``ℓ²``    ``P^{-1}Y'``, which depends on ``η``  k
=========  =============================  =====  ========  ===================================  =======

The reduced form is the Schur complement of the whole one: a matrix of the size of the output, and X of the whole problem
has the low rank of ``BGB'``. It is curved, with

.. math::

    -\langle G, \partial_k\partial_l S\rangle = 2\operatorname{tr}(A_k\,BGB'\,A_lP^{-1}) ,

but convex, and a network of a few layers is solved in half as many steps of a third of the cost. Nothing but the
objective keeps ``P`` positive definite there. That is not enough in deep networks, nor where ``c = 0`` uncouples the
layers; a barrier ``−κ \log\det P`` that is far weaker than the one on ``S`` helps a little.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from ldlt.certificates.dense import Dense
from ldlt.certificates.pairs import Corners

__all__ = ["Place", "Reduced", "Whole"]


class Place(ABC):
    """A constraint at multipliers η.

    Attributes:
        d: The problem.
        eta: η, (m,).
        fixed: ``C(η)``, (q, q).
        side: ``R``, (k, q).
        weight: Weight of the barrier on η relative to the one on S.
    """

    d: Dense
    eta: Tensor
    fixed: Tensor
    side: Tensor
    weight: float

    @classmethod
    @abstractmethod
    def at(cls, d: Dense, eta: Tensor) -> Place | None:
        """The constraint at η; None where it is not defined."""

    @abstractmethod
    def begin(self) -> float:
        """A strictly feasible τ, if there is one."""

    @abstractmethod
    def squared(self, tau: float) -> float:
        """``ℓ²`` that is proven here, in the unit of the problem, if ``S(η, τ) ⪰ 0``."""

    @abstractmethod
    def lifted(self, right: Tensor) -> Tensor:
        """``B right``, (N, ·)."""

    @abstractmethod
    def change(self, eta: Tensor) -> Tensor:
        """``Σ_k η_k ∂S/∂η_k``, (q, q)."""

    @abstractmethod
    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """``<∂S/∂η_k, left right'>``, (m,)."""

    @abstractmethod
    def traces(self, matrix: Tensor) -> Tensor:
        """``<∂S/∂η_k, M>`` for a symmetric M, (m,)."""

    @abstractmethod
    def system(self, dual: Tensor, inverse: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
        """``H`` (m, m) from G, ``S^{-1}`` and the weight κ; and ``κ <A_k, P^{-1}>`` (m,)."""

    @abstractmethod
    def lag(self, before: Place, change: Tensor) -> float:
        """By how much τ must grow for a step from another place, because S is not linear."""


class Whole(Place):
    """The whole matrix ``Z``."""

    weight = 1.0

    def __init__(self, d: Dense, eta: Tensor) -> None:
        self.d, self.eta, self.side = d, eta, d.output
        self.fixed = d.form(eta)

    @classmethod
    def at(cls, d: Dense, eta: Tensor) -> Whole | None:
        return cls(d, eta)

    def begin(self) -> float:
        return -0.9  # the start proves the unit of the problem

    def squared(self, tau: float) -> float:
        return -1 / tau if tau < 0 else float("inf")

    def lifted(self, right: Tensor) -> Tensor:
        return right

    def change(self, eta: Tensor) -> Tensor:
        return self.d.combine(eta)

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        return self.d.inner(left, right)

    def traces(self, matrix: Tensor) -> Tensor:
        return self.d.traces(matrix)

    def system(self, dual: Tensor, inverse: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
        return self.d.system(self.d.corners(dual), self.d.corners(inverse)), torch.zeros_like(self.eta)

    def lag(self, before: Place, change: Tensor) -> float:
        return 0.0


class Reduced(Place):
    """The Schur complement ``ℓ²I − YP^{-1}Y'``."""

    def __init__(self, d: Dense, eta: Tensor, factor: Tensor) -> None:
        self.d, self.eta, self.factor = d, eta, factor
        half = torch.linalg.solve_triangular(factor, d.output.mT, upper=False)
        self.fixed = -(half.mT @ half)
        self.basis = torch.linalg.solve_triangular(factor.mT, half, upper=True)  # B
        self.below = d.apply(self.basis)  # v_k'B
        self.beside = self.basis[d.inputs :] - d.center[:, None] * self.below  # d_k'B
        self.side = torch.eye(len(d.output), dtype=torch.float64)
        self.weight = min(1.0, len(d.output) / d.count)

    @classmethod
    def at(cls, d: Dense, eta: Tensor) -> Reduced | None:
        factor, info = torch.linalg.cholesky_ex(d.form(eta))
        return None if int(info) else cls(d, eta, factor)

    def begin(self) -> float:
        return 1.1 * self._largest()

    def _largest(self) -> float:
        return -float(torch.linalg.eigvalsh(self.fixed)[0])

    def squared(self, tau: float) -> float:
        return self._largest()

    def lifted(self, right: Tensor) -> Tensor:
        return self.basis @ right

    def change(self, eta: Tensor) -> Tensor:
        each = eta[self.d.shared][:, None]
        below = (self.d.radius**2)[:, None] * each * self.below
        return self.beside.mT @ (each * self.beside) - self.below.mT @ below

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        beside, below = (self.beside @ left) * (self.beside @ right), (self.below @ left) * (self.below @ right)
        return self.d.group(beside.sum(1) - self.d.radius**2 * below.sum(1))

    def traces(self, matrix: Tensor) -> Tensor:
        beside, below = (self.beside @ matrix) * self.beside, (self.below @ matrix) * self.below
        return self.d.group(beside.sum(1) - self.d.radius**2 * below.sum(1))

    def _corners(self, matrix: Tensor) -> Corners:
        beside = self.beside @ matrix
        return beside @ self.beside.mT, beside @ self.below.mT, self.below @ matrix @ self.below.mT

    def system(self, dual: Tensor, inverse: Tensor, kappa: float) -> tuple[Tensor, Tensor]:
        d = self.d
        form = d.corners(torch.cholesky_inverse(self.factor))
        # The product of κ/2 with S^{-1} is not part of the derivative; it is small where κ is.
        left = [a.add_(b, alpha=kappa / 2) for a, b in zip(self._corners(dual), form, strict=True)]
        right = [a.add_(b, alpha=2.0) for a, b in zip(self._corners(inverse), form, strict=True)]
        traces = d.group(form[0].diagonal() - d.radius**2 * form[2].diagonal())
        return d.system((left[0], left[1], left[2]), (right[0], right[1], right[2])), kappa * traces

    def lag(self, before: Place, change: Tensor) -> float:
        return max(0.0, float(torch.linalg.eigvalsh(before.fixed + change - self.fixed)[-1]))
