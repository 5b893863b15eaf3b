r"""A barrier method without large matrices, for large networks.

With ``M = YQ_0(Λ)^{-1}Y'`` and ``s = 1/ℓ²``, minimising over s alone in the barrier of ``Q_0(Λ) − sY'Y ⪰ 0``,
``Λ ≥ 0``, leaves

.. math::

    F_\tau(\Lambda) = \min_s\bigl(-\tau\log s - \log\det(I - sM)\bigr) - \log\det Q_0(\Lambda) - \sum_j\log\lambda_j ,

convex in Λ, with minimisers that approach the optimum as τ grows. With ``A_j = F_jS_jF_j'``, ``F_j = [e_j, v_j]``, of
rank two, ``U = Q_0^{-1}Y'`` and ``D = s(I − sM)^{-1}``, its Hessian is

.. math::

    H_{jl} = \operatorname{tr}\bigl(A_j(2UDU' + Q_0^{-1})A_lQ_0^{-1}\bigr)
        - \langle A_j, U\,dD_l\,U'\rangle + \delta_{jl}\lambda_j^{-2} .

The terms with U cost only triangular solves with as many columns as there are outputs, so they are used exactly, by
conjugate gradients. Of ``tr(A_jQ_0^{-1}A_lQ_0^{-1})`` only the blocks of one layer with itself are kept. They come from
the selected inverse of ``Q_0`` (the blocks on the pattern of its factor), and with them the blocks of H on its
diagonal, the preconditioner.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ldlt.certificates.dual import lower_bound_squared
from ldlt.certificates.elimination import Factor, apply, apply_adjoint, eliminate
from ldlt.certificates.pairs import Corners, pair_products
from ldlt.certificates.problem import Layer, Problem

__all__ = ["descend"]

_PATIENCE = 10  # steps over which progress is measured
_CG_STEPS = 60


def _grouped(layer: Layer, each: Tensor) -> Tensor:
    """Sum a matrix over the neurons of each multiplier, (n, n) -> (count, count)."""
    if layer.count == layer.size:
        return each
    zeros = torch.zeros(layer.count, layer.size, dtype=torch.float64).index_add_(0, layer.shared, each)
    return torch.zeros(layer.count, layer.count, dtype=torch.float64).index_add_(1, layer.shared, zeros)


class _State:
    """The barrier at one Λ."""

    def __init__(self, problem: Problem, multipliers: Tensor, tau: float, factor: Factor) -> None:
        self.problem, self.multipliers, self.factor = problem, multipliers, factor
        self.half = factor.half({b: y.T for b, y in problem.output.items()})
        gram = torch.zeros(problem.outputs, problem.outputs, dtype=torch.float64)
        for h in self.half.values():
            gram = torch.addmm(gram, h.T, h)
        self.values, self.basis = torch.linalg.eigh((gram + gram.T) / 2)
        self.values = self.values.clamp(min=0.0)
        self.exact = float(self.values[-1])
        logdet = sum(float((p if p.ndim == 1 else p.diagonal()).log().sum()) for p in factor.pivots.values())
        self.rest = -2 * logdet - float(multipliers.log().sum())
        self.set(tau)

    def set(self, tau: float) -> None:
        """Minimise over s: ``τ = Σ sμ_i/(1 − sμ_i)``, by Newton's method on ``1/(1 − sμ_max)``."""
        self.tau = tau
        ratio = self.values / self.exact
        low, high = 0.0, 1.0
        for _ in range(200):  # bisection in u = 1 − s μ_max is monotone and cannot fail
            u = math.sqrt(low * high) if low > 0 else high / 16
            q = (1 - u) * ratio
            if float((q / (1 - q)).sum()) > tau:
                low = u
            else:
                high = u
            if high <= low * (1 + 1e-14) or high < 1e-15:
                break
        self.gap = high
        self.s = (1 - self.gap) / self.exact
        self.room = (1 - ratio) + self.gap * ratio  # 1 − sμ, without cancellation
        self.slope = self.s / self.room
        self.value = -tau * math.log(self.s) - float(self.room.log().sum()) + self.rest

    def prepare(self) -> None:
        """What derivatives need."""
        p = self.problem
        # The solutions are kept in the eigenbasis of M, where D is diagonal.
        self.solution = self._complete({b: u @ self.basis for b, u in self.factor.back(self.half).items()})
        self.before = {layer.name: apply(layer, self.solution) for layer in p.layers}
        inverse = self.factor.selected_inverse()
        self.hessians: list[Tensor] = []  # tr(A Q^{-1} A Q^{-1}) of each layer, with the 1/λ²
        self.factors: list[Tensor] = []
        gradients = []
        for layer, own in zip(p.layers, p.split(self.multipliers).values(), strict=True):
            corners = _corners(layer, inverse)
            total = torch.zeros(layer.count, dtype=torch.float64).index_add_(0, layer.shared, corners.traces())
            gradients.append(-2 * total - 1 / own)
            b = layer.radius[:, None] * self.before[layer.name]
            a = torch.addcmul(self.solution[layer.name], layer.center[:, None], self.before[layer.name], value=-1.0)
            each = torch.cat([a, b])
            barrier = 4 * _grouped(layer, pair_products(corners, corners))
            barrier.diagonal().add_(own**-2)
            dual = Corners.of((2 * each * self.slope) @ each.T)
            whole = barrier + 4 * _grouped(layer, pair_products(dual, corners))
            grade = own[:, None] * own
            self.hessians.append(barrier * grade)
            scaled = whole * grade
            shift = 1e-12 * float(scaled.diagonal().max())
            while True:
                factor, info = torch.linalg.cholesky_ex(scaled + shift * torch.eye(layer.count, dtype=torch.float64))
                if int(info) == 0:
                    break
                shift *= 100
            self.factors.append(factor)
        flat = torch.cat(gradients)
        self.gradient = self.multipliers * (flat - self._rows(self.solution, self.before, self.slope))

    def _complete(self, vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Zeros for the blocks that nothing reaches."""
        for layer in self.problem.layers:
            if layer.name not in vectors:
                vectors[layer.name] = torch.zeros(layer.size, self.problem.outputs, dtype=torch.float64)
        return vectors

    def _rows(self, left: dict[str, Tensor], left_before: dict[str, Tensor], weight: Tensor) -> Tensor:
        """``<A_j, left W U'>`` per multiplier, W (k, k) or the diagonal of one."""
        parts = []
        for layer in self.problem.layers:
            a, b = self.solution[layer.name], self.before[layer.name]
            a, b = (a * weight, b * weight) if weight.ndim == 1 else (a @ weight, b @ weight)
            c = layer.center[:, None]
            one, two = left[layer.name], left_before[layer.name]
            each = ((one - c * two) * (a - c * b)).sum(1) - layer.radius**2 * (two * b).sum(1)
            parts.append(torch.zeros(layer.count, dtype=torch.float64).index_add_(0, layer.shared, 2 * each))
        return torch.cat(parts)

    def _weighted(self, direction: Tensor) -> dict[str, Tensor]:
        """``A(δ) U`` by block."""
        found: dict[str, Tensor] = {}
        for layer, delta in zip(self.problem.layers, self.problem.split(direction).values(), strict=True):
            a, b = self.solution[layer.name], self.before[layer.name]
            weight = 2 * delta[layer.shared][:, None]
            c = layer.center[:, None]
            own = weight * (a - c * b)
            found[layer.name] = found[layer.name] + own if layer.name in found else own
            apply_adjoint(layer, -weight * (c * a - layer.product[:, None] * b), found)
        return found

    def curvature(self, relative: Tensor) -> Tensor:
        """The Hessian in relative changes of Λ, times a vector."""
        right = self._weighted(self.multipliers * relative)
        change = self._complete(self.factor.solve(right))  # −dU
        before = {layer.name: apply(layer, change) for layer in self.problem.layers}
        found = 2 * self._rows(change, before, self.slope)
        inner = torch.zeros(self.problem.outputs, self.problem.outputs, dtype=torch.float64)
        for b, r in right.items():
            if b in self.solution:
                inner = torch.addmm(inner, self.solution[b].T, r)
        found += self._rows(self.solution, self.before, self._second((inner + inner.T) / 2))
        parts = [h @ d for h, d in zip(self.hessians, self.problem.split(relative).values(), strict=True)]
        return self.multipliers * found + torch.cat(parts)

    def _second(self, inner: Tensor) -> Tensor:
        """Derivative of D along ``inner``: that of ``s(I − sM)^{-1}`` with s following M."""
        found = self.slope[:, None] * inner * self.slope
        # d/dM of τ = Σ sμ/(1 − sμ): s moves by −s Σ sμ'/(1−sμ)² / Σ sμ/(1−sμ)²
        inverse_square = self.room**-2
        ds = -(self.s**2) * float((inverse_square * inner.diagonal()).sum())
        ds /= float((inverse_square * self.s * self.values).sum())
        return found + torch.diag(ds * inverse_square)

    def precondition(self, residual: Tensor) -> Tensor:
        """Divide by the diagonal blocks of the Hessian."""
        parts = self.problem.split(residual).values()
        return torch.cat([torch.cholesky_solve(r[:, None], f)[:, 0] for f, r in zip(self.factors, parts, strict=True)])

    def lower(self) -> float:
        """Lower bound on the best ``ℓ²`` from the vectors ``UD^{1/2}``."""
        root = self.slope.sqrt()
        return lower_bound_squared(self.problem, {b: u * root for b, u in self.solution.items()})


def _corners(layer: Layer, inverse: dict[tuple[str, str], Tensor]) -> Corners:
    """Those of ``Q^{-1}`` for one layer."""

    def block(a: str, b: str) -> Tensor:
        return inverse[a, b] if (a, b) in inverse else inverse[b, a].T

    found = Corners(*torch.zeros(3, layer.size, layer.size, dtype=torch.float64).unbind())
    maps = {b: layer.radius[:, None] * v for b, v in layer.inputs.items()}
    found.beside.copy_(block(layer.name, layer.name))
    for b, v in maps.items():
        found.cross.addmm_(v, block(b, layer.name))
        for a, u in maps.items():
            found.below.addmm_(u, block(a, b) @ v.T)
    return found.slant(layer.center / layer.radius)


def _state(problem: Problem, multipliers: Tensor, tau: float) -> _State | None:
    factor, _, _ = eliminate(problem, multipliers)
    if factor is None:
        return None
    state = _State(problem, multipliers, tau, factor)
    return state if 0 < state.exact < math.inf and math.isfinite(state.value) else None


def _newton_step(state: _State, stop: Callable[[], bool]) -> Tensor:
    """Relative change of Λ by preconditioned conjugate gradients."""
    residual = -state.gradient
    direction = torch.zeros_like(residual)
    z = state.precondition(residual)
    search, rho = z.clone(), float(residual @ z)
    target = 0.02 * rho
    for _ in range(_CG_STEPS):
        product = state.curvature(search)
        bend = float(search @ product)
        if not bend > 0:
            break
        step = rho / bend
        direction += step * search
        residual -= step * product
        z = state.precondition(residual)
        new = float(residual @ z)
        if not new > target or stop():
            break
        search = z + (new / rho) * search
        rho = new
    return direction if bool(direction.any()) else z


def _move(multipliers: Tensor, relative: Tensor) -> Tensor:
    """``λ(1 + d)`` upwards, ``λ/(1 − d)`` downwards: the same to first order, and positive."""
    return multipliers * torch.where(relative > 0, 1 + relative, 1 / (1 - relative.clamp(max=0.0)))


def descend(
    problem: Problem,
    multipliers: Tensor,
    *,
    tolerance: float,
    stop: Callable[[], bool],
    report: Callable[[float, Tensor, float], bool],
    iterations: int = 500,
) -> str:
    """Minimise the bound from a feasible start.

    Args:
        problem: The problem.
        multipliers: Feasible Λ for an input of unit weight.
        tolerance: Relative gain in ``ℓ²`` over a few steps below which to give up.
        stop: Whether time is up.
        report: Takes ``ℓ²``, its Λ and a lower bound on the best ``ℓ²``; returns whether to stop.
        iterations: Largest number of steps.

    Returns:
        Why it stopped.
    """
    size = sum(problem.sizes.values()) + problem.multipliers
    tau = float(size)
    state = _state(problem, multipliers, tau)
    if state is None:
        return "the start is not strictly feasible"
    guess, history = 1.0, [state.exact]
    for _ in range(iterations):
        state.prepare()
        if report(state.exact, state.multipliers, state.lower()):
            return "optimal within the tolerance"
        if stop():
            return "time limit"
        direction = _newton_step(state, stop)
        descent = float(state.gradient @ direction)
        step, new = guess, None
        while step > 1e-4:
            new = _state(problem, _move(state.multipliers, step * direction), tau)
            if new is not None and new.value <= state.value + 0.1 * step * descent:
                break
            new = None
            step *= 0.5
        # Far from the path steps stay short for a while: trying full ones each time would double the work.
        guess = 1.0 if new is None else min(1.0, 4 * step)
        state = state if new is None else new
        history.append(state.exact)
        if new is None or (step > 0.4 and -descent < 0.5 * size):
            if size / tau < 1e-2 * tolerance:
                return "no further progress"
            tau *= 4.0
            state.set(tau)
        if len(history) > _PATIENCE and math.log(min(history[:-_PATIENCE]) / min(history)) < tolerance:
            return "no further progress"
    return "iteration limit"
