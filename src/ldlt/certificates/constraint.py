r"""The constraint of the interior-point method, in two forms.

Both are *minimise τ subject to* ``S(η, τ) = C(η) + τR'R ⪰ 0``, with ``A_k = d_kd_k' − v_kv_k'`` of
:class:`~ldlt.certificates.dense.Dense`, ``P(η) = E + Σ_kη_kA_k`` and derivatives ``∂S/∂η_k = B'A_kB``:

=========  =============================  =====  ========  ===================================  =======
form       ``C``                          ``R``  ``τ``     ``B``                                size
=========  =============================  =====  ========  ===================================  =======
whole      ``P(η)``                       ``Y``  ``−1/ℓ²``  identity                             N
reduced    ``−M(η)``, ``M = YP^{-1}Y'``   ``I``  ``ℓ²``    ``P^{-1}Y'``, which depends on ``η``  k
=========  =============================  =====  ========  ===================================  =======

The reduced form is the Schur complement of the whole one: a matrix of the size of the output, and the dual of the whole
problem has the low rank of ``BGB'``. It is curved, with

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
    def system(self, dual: Tensor, inverse: Tensor, share: float, mu: float) -> tuple[Tensor, Tensor]:
        """``H`` (m, m), and the pull of the barriers ``<∂S/∂η_k, S^{-1}> + κ/μ <A_k, P^{-1}>`` (m,).

        Args:
            dual: G.
            inverse: ``S^{-1}``.
            share: ``κ/μ``.
            mu: μ.
        """

    @abstractmethod
    def lag(self, before: Place, change: Tensor) -> float:
        """By how much τ must grow for a step from another place, for S to be no less than if it were linear."""


class Whole(Place):
    """The whole matrix ``Z``."""

    weight = 1.0

    def __init__(self, d: Dense, eta: Tensor) -> None:
        self.d, self.eta, self.side = d, eta, d.output
        self.fixed = d.combine(eta)
        self.fixed.diagonal()[: d.inputs] += 1.0

    @classmethod
    def at(cls, d: Dense, eta: Tensor) -> Whole | None:
        """The constraint at η."""
        return cls(d, eta)

    def begin(self) -> float:
        """A strictly feasible τ."""
        return -0.9  # the start proves the unit of the problem

    def squared(self, tau: float) -> float:
        """``ℓ²`` that is proven here."""
        return -1 / tau if tau < 0 else float("inf")

    def lifted(self, right: Tensor) -> Tensor:
        """``B right``, (N, ·)."""
        return right

    def change(self, eta: Tensor) -> Tensor:
        """``Σ_k η_k ∂S/∂η_k``, (q, q)."""
        return self.d.combine(eta)

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """``<∂S/∂η_k, left right'>``, (m,)."""
        return self.d.inner(left, right)

    def traces(self, matrix: Tensor) -> Tensor:
        """``<∂S/∂η_k, M>``, (m,)."""
        return self.d.inner(matrix, torch.eye(len(matrix), dtype=torch.float64))

    def system(self, dual: Tensor, inverse: Tensor, share: float, mu: float) -> tuple[Tensor, Tensor]:
        """``H`` (m, m), and the pull of the barriers (m,)."""
        one, two = self.d.space
        corners, pull = self.d.corners(inverse, one), self.d.traces(one)
        return self.d.system(self.d.corners(dual, two), corners), pull

    def lag(self, before: Place, change: Tensor) -> float:
        """By how much τ must grow for S to be no less than if it were linear."""
        return 0.0


class Reduced(Place):
    """The Schur complement ``ℓ²I − YP^{-1}Y'``."""

    def __init__(self, d: Dense, eta: Tensor, factor: Tensor) -> None:
        self.d, self.eta, self.factor = d, eta, factor
        half = torch.linalg.solve_triangular(factor, d.output.mT, upper=False)
        self.basis = torch.linalg.solve_triangular(factor.mT, half, upper=True)  # B, of the coordinates of d
        self.rows = d.rows(self.basis)  # F B
        self.tail = slice(len(d.center) - d.tail, len(d.center))
        self.spare = d.spread(eta)[self.tail].reciprocal()  # P^{-1} of the others, which is diagonal
        beside = self.rows[self.tail]
        torch.mul(self.spare[:, None], d.end.mT, out=beside)
        self.fixed = torch.addmm(half.mT @ half, d.end, beside).neg_()
        self.side = torch.eye(len(d.output), dtype=torch.float64)
        self.weight = min(1.0, len(d.output) / d.count)
        self._largest = -float(torch.linalg.eigvalsh(self.fixed)[0])

    @classmethod
    def at(cls, d: Dense, eta: Tensor) -> Reduced | None:
        """The constraint at η; None where ``P`` is not positive definite."""
        form = d.lower(eta)
        form.diagonal()[: d.inputs] += 1.0
        factor, info = torch.linalg.cholesky_ex(form)
        return None if int(info) else cls(d, eta, factor)

    def begin(self) -> float:
        """A strictly feasible τ."""
        return 1.1 * self._largest

    def squared(self, tau: float) -> float:
        """``ℓ²`` that is proven here."""
        return self._largest

    def lifted(self, right: Tensor) -> Tensor:
        """``B right``, (N, ·)."""
        below = self.rows[len(self.d.center) :][self.tail]
        return torch.cat([self.basis, torch.addcmul(self.rows[self.tail], self.d.slant[:, None], below)]) @ right

    def change(self, eta: Tensor) -> Tensor:
        """``Σ_k η_k ∂S/∂η_k``, (q, q)."""
        each = self.d.spread(eta)
        return self.rows.mT @ (torch.cat([each, -each])[:, None] * self.rows)

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """``<∂S/∂η_k, left right'>``, (m,)."""
        return self.d.sums((self.rows @ left) * (self.rows @ right))

    def traces(self, matrix: Tensor) -> Tensor:
        """``<∂S/∂η_k, M>``, (m,)."""
        return self.d.sums((self.rows @ matrix) * self.rows)

    def system(self, dual: Tensor, inverse: Tensor, share: float, mu: float) -> tuple[Tensor, Tensor]:
        """``H`` (m, m), and the pull of the barriers (m,)."""
        one, two = self.d.space
        form = self.d.corners(torch.cholesky_inverse(self.factor), one)
        form.beside.diagonal()[self.tail] = self.spare
        pull = self.traces(inverse) + share * self.d.traces(form)
        # The product of κ/2 with S^{-1} is not part of the derivative; it is small where κ is.
        left = form.update(self.rows, dual, share * mu / 2, two)
        return self.d.system(left, form.update(self.rows, inverse, 2.0, one)), pull

    def lag(self, before: Place, change: Tensor) -> float:
        """By how much τ must grow for S to be no less than if it were linear."""
        return max(0.0, float(torch.linalg.eigvalsh(before.fixed + change - self.fixed)[-1]))
