r"""A primal-dual interior-point method for networks of moderate size.

Minimise ``τ`` subject to ``S(η, τ) ⪰ 0`` and ``η ≥ 0``, for the constraint in one of the two forms of
:mod:`ldlt.certificates.constraint`. The dual variables are ``G ⪰ 0`` and ``ξ ≥ 0`` with ``<∂S/∂η_k, G> = −ξ_k`` and
``<R'R, G> = 1``. Each step linearises ``GS = μI`` and ``ξη = ωμ`` (the direction of Helmberg, Rendl, Vanderbei and
Wolkowicz / Kojima, Shindoh and Hara / Monteiro) with the predictor and corrector of Mehrotra. In the whole form, every
``A_k = F_kS_kF_k'``, ``F_k = [e_k, v_k]``, has rank two, so the matrix of the linear system,

.. math::

    H_{kl} = \operatorname{tr}(A_kGA_lS^{-1}) = \operatorname{tr}(S_k\,[F_k'GF_l]\,S_l\,[F_l'S^{-1}F_k]),

is a sum of elementwise products of n × n matrices. In the reduced form ``BGB'`` takes the place of ``G``, and
``2P^{-1} + BS^{-1}B'`` that of ``S^{-1}``, for the curvature. It gives up as soon as it has to shorten its steps or its
gap is not what μ says.

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
_SHORTEST = 0.2  # step that the reduced form must be able to take
_PATIENCE = 20  # steps of the reduced form
_NEAR = 0.03  # gap from which on a lower bound is computed
_FAR = 10.0  # how much larger than that gap the gap of the reduced form may really be


def _longest(change: Tensor, factor: Tensor) -> float:
    """Step ≤ 1 that keeps ``LL' + step · change`` positive definite, nearly the largest.

    From the smallest eigenvalue of ``L^{-1} change L^{-T}``; for large matrices a lower bound on it by Lanczos steps
    (Ritz value less the norm of its residual).
    """
    size = len(factor)
    if size <= 200:
        half = torch.linalg.solve_triangular(factor, change, upper=False)
        least = float(torch.linalg.eigvalsh(torch.linalg.solve_triangular(factor, half.mT, upper=False))[0])
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
        mu = 1 / _dot(self.square, self.inverse)  # centred, with <R'R, G> = 1
        self._face(mu * self.inverse, mu * place.weight * self.over)

    def _go(self, place: Place, tau: float) -> bool:
        """Move η and τ; returns whether S is positive definite there, and stays if it is not."""
        s = place.fixed + tau * self.square
        factor, info = torch.linalg.cholesky_ex(s)
        if int(info):
            return False
        self.place, self.eta, self.tau, self.s, self.factor = place, place.eta, tau, s, factor
        self.inverse, self.over = torch.cholesky_inverse(factor), place.eta.reciprocal()
        return True

    def _face(self, dual: Tensor, xi: Tensor) -> None:
        """Set G and ξ, after η and τ."""
        self.dual, self.xi = dual, xi
        self.mu = self._mean(self.s, dual, self.eta, xi)
        self.gap = self.mu * self._weight / abs(self.tau)  # relative, if the dual point were feasible

    @property
    def _weight(self) -> float:
        return self.s.shape[0] + self.place.weight * self.eta.shape[0]

    def _mean(self, s: Tensor, dual: Tensor, eta: Tensor, xi: Tensor) -> float:
        """μ: the mean of the products that complementarity wants to be zero."""
        return (_dot(s, dual) + _dot(eta, xi)) / self._weight

    def prepare(self) -> bool:
        """Factorise the linear system; returns whether that worked."""
        place, m = self.place, self.eta.shape[0]
        self.ratio = self.xi * self.over
        matrix = torch.empty(m + 1, m + 1, dtype=torch.float64)
        inner = matrix[:-1, :-1]
        inner[:], pull = place.system(self.dual, self.inverse, _CENTRE, self.mu)
        inner.diagonal().add_(self.ratio)
        left, right = self.dual @ place.side.mT, self.inverse @ place.side.mT
        matrix[-1, :-1] = place.inner(left, right)
        matrix[:-1, -1] = matrix[-1, :-1]
        matrix[-1, -1] = _dot(place.side @ left, place.side @ right)
        self.matrix, self.grade = matrix, matrix.diagonal().rsqrt()
        scaled = self.grade[:, None] * matrix * self.grade  # far better conditioned than the matrix looks
        self.pull = torch.cat([pull + place.weight * self.over, _sum(place.side.mT * right)])
        for exponent in range(-15, -5, 2):
            scaled.diagonal().add_(10.0**exponent)
            self.factor_of_system, info = torch.linalg.cholesky_ex(scaled)
            if int(info) == 0:
                self.shaken = exponent > -15
                return True
        return False

    def _solve(self, right: Tensor) -> Tensor:
        found = self._roughly(right)
        if self.shaken:  # refinement takes the jitter out again
            found = found + self._roughly(right - self.matrix @ found)
        return found

    def _roughly(self, right: Tensor) -> Tensor:
        return self.grade * torch.cholesky_solve((self.grade * right)[:, None], self.factor_of_system)[:, 0]

    def direction(self, target: float, ahead: _Direction | None = None) -> _Direction:
        """Newton's direction towards ``μ = target``, with the second-order term of a direction found before."""
        right = target * self.pull
        right[-1] -= 1
        dual, xi = target * self.inverse - self.dual, target * self.place.weight * self.over - self.xi
        if ahead is not None:
            second = _symmetric(ahead.dual @ ahead.s @ self.inverse)
            along = ahead.xi * ahead.eta * self.over
            right -= torch.cat([self.place.traces(second) + along, _sum(second * self.square)])
            dual, xi = dual - second, xi - along
        step = self._solve(right)
        eta, tau = step[:-1], float(step[-1])
        bent = self.place.change(eta)
        s = bent + tau * self.square
        return _Direction(
            eta, tau, bent, s, dual - _symmetric(self.dual @ s @ self.inverse), xi.addcmul_(self.ratio, eta, value=-1.0)
        )

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
        while primal > 1e-8:
            eta = self.eta + primal * to.eta
            place = type(self.place).at(self.place.d, eta) if float(eta.min()) > 0 else None
            if place is not None:
                tau = self.tau + primal * to.tau + place.lag(self.place, primal * to.bent)
                if tau - self.tau <= _GROWTH * abs(self.tau) and self._go(place, tau):
                    break
            primal *= 0.7
        else:
            return 0.0
        while int(torch.linalg.cholesky_ex(self.dual + dual * to.dual)[1]) and dual > 1e-8:
            dual *= 0.7
        self._face(self.dual + dual * to.dual, self.xi + dual * to.xi)
        return primal


def _dot(left: Tensor, right: Tensor) -> float:
    return float(torch.dot(left.reshape(-1), right.reshape(-1)))


def _sum(matrix: Tensor) -> Tensor:
    return matrix.sum().reshape(1)


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


@torch.inference_mode()  # less to do for each of many small operations
def solve(
    problem: Problem,
    multipliers: Tensor,
    bound_squared: float,
    *,
    stop: Callable[[], bool],
    report: Callable[[float, Tensor, float], bool],
    reduced: bool = False,
    near: float = _NEAR,
    iterations: int = 80,
) -> str:
    """Minimise the bound from a feasible start, until something stops it.

    Args:
        problem: The problem.
        multipliers: Feasible Λ for an input of unit weight, with
        bound_squared: the ``ℓ²`` that it certifies.
        stop: Whether time is up.
        report: Takes ``ℓ²``, its Λ and a lower bound on the best ``ℓ²``; returns whether to stop.
        reduced: Use the reduced form, which gives up where it is not at home.
        near: Relative gap of ``ℓ²``, by μ, from which on lower bounds are computed.
        iterations: Largest number of steps.

    Returns:
        Why it stopped.
    """
    if reduced and not all(bool(layer.center.all()) for layer in problem.layers):
        return "layers are not coupled in the reduced form"
    d = Dense.build(problem, multipliers, math.sqrt(bound_squared), opened=reduced)
    columns = torch.cat([torch.ones(d.inputs, dtype=torch.float64), d.scale])[:, None]
    form: type[Place] = Reduced if reduced else Whole
    place = form.at(d, torch.ones(d.count, dtype=torch.float64))
    point = None if place is None else _Iterate(place)
    if point is None or not point.feasible:
        return "the start is not strictly feasible"
    for _ in range(min(iterations, _PATIENCE) if reduced else iterations):
        vectors, info = torch.linalg.cholesky_ex(point.dual)
        late, lower = stop(), 0.0
        if int(info) == 0 and (point.gap < near or late):  # before, it would be of no use
            split = (point.place.lifted(vectors) / columns).split(list(problem.sizes.values()))
            lower = lower_bound_squared(problem, dict(zip(problem.sizes, split, strict=True)))
        squared = bound_squared * point.place.squared(point.tau)
        if report(squared, point.eta * multipliers, lower):
            return "optimal within the tolerance"
        if late:
            return "time limit"
        if reduced and point.gap < min(near, _NEAR) and squared > lower * (1 + _FAR * point.gap + 1e-4):
            return "the path was left"
        if int(info) or not point.prepare():
            return "no further progress: singular to working precision"
        predictor = point.direction(0.0)
        primal, dual = point.steps(predictor, vectors)
        share = (point.ahead(predictor, primal, dual) / point.mu) ** 2 if min(primal, dual) > 0.3 else 0.5
        corrector = point.direction(min(1.0, max(1e-4, share)) * point.mu, predictor)
        if not point.move(corrector, *point.steps(corrector, vectors)) > (_SHORTEST if reduced else 1e-6):
            return "no further progress"
    return "iteration limit"
