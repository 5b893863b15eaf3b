r"""A primal-dual interior-point method for networks of moderate size.

Minimise ``τ`` subject to ``S(η, τ) ⪰ 0`` and ``η ≥ 0``, for the constraint in one of the two forms of
:mod:`ldlt.certificates.constraint`. The dual variables are ``G ⪰ 0`` and ``ξ ≥ 0`` with ``<∂S/∂η_k, G> = −ξ_k`` and
``<R'R, G> = 1``. Each step linearises ``GS = μI`` and ``ξη = ωμ`` (the direction of Helmberg, Rendl, Vanderbei and
Wolkowicz / Kojima, Shindoh and Hara / Monteiro) with the predictor and corrector of Mehrotra. In the whole form, every
``A_k = F_kS_kF_k'``, ``F_k = [e_k, v_k]``, has rank two, so the matrix of the linear system,

.. math::

    H_{kl} = \operatorname{tr}(A_kGA_lS^{-1}) = \operatorname{tr}(S_k\,[F_k'GF_l]\,S_l\,[F_l'S^{-1}F_k]),

is a sum of elementwise products of n × n matrices. In the reduced form ``BGB'`` takes the place of ``G``, and
``2P^{-1} + BS^{-1}B'`` that of ``S^{-1}``, for the curvature. It is tried first, and left as soon as it has to shorten
its steps.

Coordinates are scaled by the start: ``w_j → w_j √(2λ_j)``, which makes its pivots of order one, however deep the
network is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ldlt.certificates.constraint import Place, Reduced, Whole
from ldlt.certificates.dense import Dense
from ldlt.certificates.dual import lower_bound_squared
from ldlt.certificates.problem import Problem

__all__ = ["solve"]

_CENTRE = 0.01  # κ / μ
_GROWTH = 0.05  # largest relative growth of τ in one step
_SHORTEST = 0.2  # share of a step that the reduced form must be able to go


def _longest(change: Tensor, factor: Tensor) -> float:
    """Step ≤ 1 that keeps ``LL' + step · change`` positive definite, nearly the largest.

    From the smallest eigenvalue of ``L^{-1} change L^{-T}``; for large matrices a lower bound on it by Lanczos steps
    (Ritz value less the norm of its residual).
    """
    size = len(factor)
    if size <= 200:
        half = torch.linalg.solve_triangular(factor, change, upper=False)
        whole = torch.linalg.solve_triangular(factor, half.T, upper=False)
        least = float(torch.linalg.eigvalsh((whole + whole.T) / 2)[0])
    else:
        least = _least_eigenvalue(change, factor)
    return 1.0 if least > -0.95 else 0.95 / -least


def _least_eigenvalue(change: Tensor, factor: Tensor, steps: int = 30) -> float:
    """Lower estimate of the smallest eigenvalue of ``L^{-1} change L^{-T}``."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(factor), 1, generator=generator, dtype=torch.float64)
    basis = [vector / vector.norm()]
    diagonal: list[float] = []
    beside: list[float] = []
    estimate = 0.0
    for k in range(steps):
        image = torch.linalg.solve_triangular(factor.mT, basis[-1], upper=True)
        image = torch.linalg.solve_triangular(factor, change @ image, upper=False)
        diagonal.append(float(basis[-1].T @ image))
        matrix = torch.cat(basis, 1)
        image = image - matrix @ (matrix.T @ image)  # full orthogonalisation: few, short vectors
        image = image - matrix @ (matrix.T @ image)
        norm = float(image.norm())
        small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        if beside:
            off = torch.tensor(beside, dtype=torch.float64)
            small = small + torch.diag(off, 1) + torch.diag(off, -1)
        values, vectors = torch.linalg.eigh(small)
        error = norm * abs(float(vectors[-1, 0]))
        estimate = float(values[0]) - error
        if norm < 1e-10 or (k >= 5 and error < 0.03 * abs(float(values[0]))):
            break
        beside.append(norm)
        basis.append(image / norm)
    return estimate


def _longest_vector(vector: Tensor, change: Tensor) -> float:
    least = float((change / vector).min())
    return 1.0 if least > -0.95 else 0.95 / -least


@dataclass(frozen=True, eq=False)
class _Direction:
    """Changes of all variables."""

    eta: Tensor
    tau: float
    bent: Tensor  # Σ_k η_k ∂S/∂η_k, the part of S that is due to η
    s: Tensor
    dual: Tensor
    xi: Tensor


class _Iterate:
    """A point ``(η, τ, G, ξ)`` with ``S`` and the linear system there."""

    def __init__(self, place: Place) -> None:
        self.square = place.side.mT @ place.side
        self.feasible = self._go(place, place.begin())
        if not self.feasible:
            return
        mu = 1 / float((self.square * self.inverse).sum())  # centred, with <R'R, G> = 1
        self.dual, self.xi = mu * self.inverse, mu * place.weight / self.eta

    def _go(self, place: Place, tau: float) -> bool:
        """Move η and τ; returns whether S is positive definite there, and stays if it is not."""
        s = place.fixed + tau * self.square
        factor, info = torch.linalg.cholesky_ex(s)
        if int(info):
            return False
        self.place, self.eta, self.tau, self.s, self.factor = place, place.eta, tau, s, factor
        self.inverse = torch.cholesky_inverse(factor)
        return True

    def _mean(self, s: Tensor, dual: Tensor, eta: Tensor, xi: Tensor) -> float:
        return (float((s * dual).sum()) + float(xi @ eta)) / (len(s) + self.place.weight * len(eta))

    @property
    def mu(self) -> float:
        """Mean of the products that complementarity wants to be zero."""
        return self._mean(self.s, self.dual, self.eta, self.xi)

    def prepare(self) -> bool:
        """Factorise the linear system; returns whether that worked."""
        place, m = self.place, len(self.eta)
        matrix = torch.empty(m + 1, m + 1, dtype=torch.float64)
        matrix[:-1, :-1], centre = place.system(self.dual, self.inverse, _CENTRE * self.mu)
        matrix[:-1, :-1].diagonal().add_(self.xi / self.eta)
        left, right = self.dual @ place.side.mT, self.inverse @ place.side.mT
        matrix[:-1, -1] = place.inner(left, right)
        matrix[-1, :-1] = matrix[:-1, -1]
        matrix[-1, -1] = float(((place.side @ left) * (place.side @ right)).sum())
        self.matrix, self.grade = matrix, matrix.diagonal().rsqrt()
        scaled = self.grade[:, None] * matrix * self.grade  # far better conditioned than the matrix looks
        self.pull = place.traces(self.inverse) + place.weight / self.eta + centre / self.mu
        self.pull_of_output = float((place.side.mT * right).sum())
        for exponent in range(-15, -5, 2):
            scaled.diagonal().add_(10.0**exponent)
            self.factor_of_system, info = torch.linalg.cholesky_ex(scaled)
            if int(info) == 0:
                return True
        return False

    def _solve(self, right: Tensor) -> Tensor:
        found = torch.zeros_like(right)
        for _ in range(2):  # one round of refinement takes the jitter out again
            rest = self.grade * (right - self.matrix @ found)
            found = found + self.grade * torch.cholesky_solve(rest[:, None], self.factor_of_system)[:, 0]
        return found

    def direction(self, target: float, ahead: _Direction | None = None) -> _Direction:
        """Newton's direction towards ``μ = target``, with the second-order term of a direction found before."""
        right = torch.empty(len(self.eta) + 1, dtype=torch.float64)
        right[:-1] = target * self.pull
        right[-1] = target * self.pull_of_output - 1
        second, along = None, None
        if ahead is not None:
            second = _symmetric(ahead.dual @ ahead.s @ self.inverse)
            along = ahead.xi * ahead.eta / self.eta
            right[:-1] -= self.place.traces(second) + along
            right[-1] -= float((second * self.square).sum())
        step = self._solve(right)
        eta, tau = step[:-1], float(step[-1])
        bent = self.place.change(eta)
        s = bent + tau * self.square
        dual = target * self.inverse - self.dual - _symmetric(self.dual @ s @ self.inverse)
        xi = target * self.place.weight / self.eta - self.xi - self.xi / self.eta * eta
        if second is not None and along is not None:
            dual, xi = dual - second, xi - along
        return _Direction(eta, tau, bent, s, dual, xi)

    def steps(self, to: _Direction, vectors: Tensor) -> tuple[float, float]:
        """Lengths of the primal and the dual step; ``vectors`` is the Cholesky factor of G."""
        primal = min(_longest(to.s, self.factor), _longest_vector(self.eta, to.eta))
        dual = min(_longest(to.dual, vectors), _longest_vector(self.xi, to.xi))
        return primal, dual

    def ahead(self, to: _Direction, primal: float, dual: float) -> float:
        """μ after a step."""
        s, g = self.s + primal * to.s, self.dual + dual * to.dual
        return self._mean(s, g, self.eta + primal * to.eta, self.xi + dual * to.xi)

    def move(self, to: _Direction, primal: float, dual: float) -> float:
        """Take a step, shorter if rounding or curvature demands it; returns the length of the primal step."""
        while int(torch.linalg.cholesky_ex(self.dual + dual * to.dual)[1]) and dual > 1e-8:
            dual *= 0.7
        self.dual, self.xi = self.dual + dual * to.dual, self.xi + dual * to.xi
        while primal > 1e-8:
            eta = self.eta + primal * to.eta
            place = type(self.place).at(self.place.d, eta) if bool((eta > 0).all()) else None
            if place is not None:
                tau = self.tau + primal * to.tau + place.lag(self.place, primal * to.bent)
                if tau - self.tau <= _GROWTH * abs(self.tau) and self._go(place, tau):
                    return primal
            primal *= 0.7
        return 0.0


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def solve(
    problem: Problem,
    multipliers: Tensor,
    bound_squared: float,
    *,
    stop: Callable[[], bool],
    report: Callable[[float, Tensor, float], bool],
    iterations: int = 80,
) -> str:
    """Minimise the bound from a feasible start.

    Args:
        problem: The problem.
        multipliers: Feasible Λ for an input of unit weight, with
        bound_squared: the ``ℓ²`` that it certifies.
        stop: Whether time is up.
        report: Takes ``ℓ²``, its Λ and a lower bound on the best ``ℓ²``; returns whether to stop.
        iterations: Largest number of steps.

    Returns:
        Why it stopped.
    """
    d = Dense.build(problem, multipliers, math.sqrt(bound_squared))
    columns = torch.cat([torch.ones(d.inputs, dtype=torch.float64), d.scale])[:, None]

    def follow(form: type[Place], shortest: float) -> tuple[bool, str]:
        """Whether this is the end, and why."""
        place = form.at(d, torch.ones(d.count, dtype=torch.float64))
        point = None if place is None else _Iterate(place)
        if point is None or not point.feasible:
            return False, "the start is not strictly feasible"
        for _ in range(iterations):
            vectors, info = torch.linalg.cholesky_ex(point.dual)
            lower = 0.0
            if int(info) == 0:
                split = (point.place.lifted(vectors) / columns).split(list(problem.sizes.values()))
                lower = lower_bound_squared(problem, dict(zip(problem.sizes, split, strict=True)))
            squared = bound_squared * point.place.squared(point.tau)
            if report(squared, point.eta * multipliers, lower):
                return True, "optimal within the tolerance"
            if stop():
                return True, "time limit"
            if int(info) or not point.prepare():
                return False, "no further progress: singular to working precision"
            predictor = point.direction(0.0)
            primal, dual = point.steps(predictor, vectors)
            mu = point.mu
            share = (point.ahead(predictor, primal, dual) / mu) ** 2 if min(primal, dual) > 0.3 else 0.5
            corrector = point.direction(min(1.0, max(1e-4, share)) * mu, predictor)
            primal, dual = point.steps(corrector, vectors)
            if not max(point.move(corrector, primal, dual), 1e-300) > shortest:
                return False, "no further progress"
        return False, "iteration limit"

    over, reason = follow(Reduced, _SHORTEST) if bool((d.center != 0).all()) else (False, "")
    return reason if over else follow(Whole, 1e-6)[1]
