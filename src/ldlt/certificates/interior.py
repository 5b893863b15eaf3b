r"""A primal-dual interior-point method for networks of moderate size.

Maximise ``s = 1/ℓ²`` subject to ``Z = Q_0(λ) − sY'Y ⪰ 0`` and ``λ ≥ 0``. The dual variables are ``X ⪰ 0`` and ``ξ ≥ 0``
with ``<A_k, X> = −ξ_k`` and ``<Y'Y, X> = 1``; the dual value is ``tr X_xx``. Each step linearises ``XZ = μI`` and
``ξλ = μ`` (the direction of Helmberg, Rendl, Vanderbei and Wolkowicz / Kojima, Shindoh and Hara / Monteiro) with the
predictor and corrector of Mehrotra. Every ``A_k = F_kS_kF_k'``, ``F_k = [e_k, v_k]``, has rank two, so the matrix of
the linear system,

.. math::

    H_{kl} = \operatorname{tr}(A_kXA_lZ^{-1}) = \operatorname{tr}(S_k\,[F_k'XF_l]\,S_l\,[F_l'Z^{-1}F_k]),

is a sum of elementwise products of n × n matrices.

Coordinates are scaled by the start: ``w_j → w_j √(2λ_j)``, which makes its pivots of order one, however deep the
network is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ldlt.certificates.dense import Dense
from ldlt.certificates.dual import lower_bound_squared
from ldlt.certificates.problem import Problem

__all__ = ["solve"]

_INSIDE = 0.9  # share of the s of the start at which to begin


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
    s: float
    z: Tensor
    x: Tensor
    xi: Tensor


class _Iterate:
    """A point ``(η, s, X, ξ)`` with ``Z`` and the linear system there."""

    def __init__(self, d: Dense, eta: Tensor, s: float) -> None:
        self.d, self.output_form = d, d.output.T @ d.output
        self.eta, self.s = eta, s
        self.z = self._form(eta, s)
        self.factor, info = torch.linalg.cholesky_ex(self.z)
        self.feasible = int(info) == 0
        if not self.feasible:
            return
        self.inverse = torch.cholesky_inverse(self.factor)
        mu = 1 / float((self.output_form * self.inverse).sum())  # centred, with <Y'Y, X> = 1
        self.x, self.xi = mu * self.inverse, mu / eta

    def _form(self, eta: Tensor, s: float) -> Tensor:
        """``Z``."""
        found = self.d.combine(eta) - s * self.output_form
        found.diagonal()[: self.d.inputs] += 1.0
        return found

    @property
    def mu(self) -> float:
        """Mean of the products that complementarity wants to be zero."""
        return (float((self.x * self.z).sum()) + float(self.xi @ self.eta)) / (len(self.z) + len(self.eta))

    def prepare(self) -> bool:
        """Factorise the linear system; returns whether that worked."""
        d = self.d
        matrix = torch.zeros(d.count + 1, d.count + 1, dtype=torch.float64)
        matrix[:-1, :-1] = d.system(d.corners(self.x), d.corners(self.inverse))
        matrix[:-1, :-1].diagonal().add_(self.xi / self.eta)
        xy, zy = self.x @ d.output.T, self.inverse @ d.output.T
        matrix[:-1, -1] = d.inner(xy, zy)
        matrix[-1, :-1] = matrix[:-1, -1]
        matrix[-1, -1] = float(((d.output @ xy) * (d.output @ zy)).sum())
        self.matrix, self.grade = matrix, matrix.diagonal().rsqrt()
        scaled = self.grade[:, None] * matrix * self.grade  # far better conditioned than the matrix looks
        self.traces = d.traces(self.inverse)
        self.output_trace = float((d.output.T * zy).sum())
        for exponent in range(-15, -5, 2):
            jitter = 10.0**exponent * torch.eye(len(scaled), dtype=torch.float64)
            self.system, info = torch.linalg.cholesky_ex(scaled + jitter)
            if int(info) == 0:
                return True
        return False

    def _solve(self, right: Tensor) -> Tensor:
        found = torch.zeros_like(right)
        for _ in range(2):  # one round of refinement takes the jitter out again
            rest = self.grade * (right - self.matrix @ found)
            found = found + self.grade * torch.cholesky_solve(rest[:, None], self.system)[:, 0]
        return found

    def direction(self, target: float, ahead: _Direction | None = None) -> _Direction:
        """Newton's direction towards ``μ = target``, with the second-order term of a direction found before."""
        right = torch.empty(len(self.eta) + 1, dtype=torch.float64)
        right[:-1] = target * (self.traces + 1 / self.eta)
        right[-1] = target * self.output_trace - 1
        bent, along = None, None
        if ahead is not None:
            half = ahead.x @ ahead.z @ self.inverse
            bent, along = (half + half.T) / 2, ahead.xi * ahead.eta / self.eta
            right[:-1] -= self.d.traces(bent) + along
            right[-1] -= float((bent * self.output_form).sum())
        step = self._solve(right)
        eta, s = step[:-1], -float(step[-1])
        z = self.d.combine(eta) - s * self.output_form
        half = self.x @ z @ self.inverse
        x = target * self.inverse - self.x - (half + half.T) / 2
        xi = target / self.eta - self.xi - self.xi / self.eta * eta
        if bent is not None and along is not None:
            x, xi = x - bent, xi - along
        return _Direction(eta, s, z, x, xi)

    def steps(self, to: _Direction, vectors: Tensor) -> tuple[float, float]:
        """Lengths of the primal and the dual step; ``vectors`` is the Cholesky factor of X."""
        primal = min(_longest(to.z, self.factor), _longest_vector(self.eta, to.eta))
        dual = min(_longest(to.x, vectors), _longest_vector(self.xi, to.xi))
        return primal, dual

    def ahead(self, to: _Direction, primal: float, dual: float) -> float:
        """μ after a step."""
        inner = float(((self.x + dual * to.x) * (self.z + primal * to.z)).sum())
        inner += float((self.xi + dual * to.xi) @ (self.eta + primal * to.eta))
        return inner / (len(self.z) + len(self.eta))

    def move(self, to: _Direction, primal: float, dual: float) -> bool:
        """Take a step, shorter if rounding demands it; returns whether there was any progress."""
        while primal > 1e-8:
            eta, s = self.eta + primal * to.eta, self.s + primal * to.s
            z = self._form(eta, s)
            factor, info = torch.linalg.cholesky_ex(z)
            if int(info) == 0 and bool((eta > 0).all()) and s > 0:
                break
            primal *= 0.7
        else:
            return False
        while int(torch.linalg.cholesky_ex(self.x + dual * to.x)[1]) and dual > 1e-8:
            dual *= 0.7
        self.eta, self.s, self.z, self.factor = eta, s, z, factor
        self.inverse = torch.cholesky_inverse(factor)
        self.x, self.xi = self.x + dual * to.x, self.xi + dual * to.xi
        return max(primal, dual) > 1e-6


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
    point = _Iterate(d, torch.ones(d.count, dtype=torch.float64), _INSIDE)
    if not point.feasible:
        return "the start is not strictly feasible"
    for _ in range(iterations):
        vectors, info = torch.linalg.cholesky_ex(point.x)
        lower = 0.0
        if int(info) == 0:
            split = (vectors / columns).split(list(problem.sizes.values()))
            lower = lower_bound_squared(problem, dict(zip(problem.sizes, split, strict=True)))
        if report(bound_squared / point.s, point.eta * multipliers, lower):
            return "optimal within the tolerance"
        if stop():
            return "time limit"
        if int(info) or not point.prepare():
            return "no further progress: singular to working precision"
        predictor = point.direction(0.0)
        primal, dual = point.steps(predictor, vectors)
        mu = point.mu
        share = (point.ahead(predictor, primal, dual) / mu) ** 2 if min(primal, dual) > 0.3 else 0.5
        corrector = point.direction(min(1.0, max(1e-4, share)) * mu, predictor)
        if not point.move(corrector, *point.steps(corrector, vectors)):
            return "no further progress"
    return "iteration limit"
