r"""The best multipliers of large, deep or uncoupled networks: L-BFGS on a smooth function of one elimination.

Variables are ``θ = log(D / diag T)``, ``D = (2r²Λ)^{-1}``, with ``T`` the covariance of what the activation reads (see
:mod:`ldlt.covariance`): a change in one layer leaves the later ones as feasible as they were, and rescaled
neurons change nothing. The objective is

.. math:: \tfrac1p\log\sum_i λ_i(M)^p - \tfrac{β}{n}\sum_{\text{layers}} \log\det(I - D^{-1}T) ,

a smoothed ``log ℓ²`` and a barrier. The barrier is what couples layers with ``c = 0``, such as sorting ones, whose
objective does not see how close ``D`` is to ``T``. The sharpness ``p`` grows and ``β`` falls in stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ldlt.certificates.problem import Layer, Problem
from ldlt.covariance import mean_diagonal, smooth_maximum

__all__ = ["descend"]

_STAGES = ((10, 3.0), (30, 1.0), (30, 0.3), (100, 0.1), (100, 0.03), (300, 0.01), (300, 3e-3), (1000, 3e-4))  # p, β
_COARSE = ((30, 0.1), (100, 0.01))  # of networks per frequency, whose steps are long
_LATER = 2  # stage to begin with near an optimum
_STEPS = 60  # of each stage
_MEMORY = 20
_PROGRESS = 3e-4  # in log ℓ², over p: less is not worth another step

Report = Callable[[float, Tensor], bool]


class _Objective:
    """The objective and its gradient; tells of every feasible point."""

    def __init__(self, problem: Problem, report: Report) -> None:
        self.problem, self.report, self.stopped = problem, report, False
        self.counts = [layer.count for layer in problem.layers]

    def _scale(self, layer: Layer, spread: Tensor) -> Tensor:
        """``2 r² diag T`` by multiplier: the mean of its group."""
        return layer.grouped(2 * layer.radius**2 * mean_diagonal(spread), "mean")

    def coordinates(self, multipliers: Tensor) -> Tensor:
        """θ of multipliers."""
        parts, found = iter(multipliers.split(self.counts)), []

        def choose(layer: Layer, spread: Tensor) -> Tensor:
            value = next(parts)
            found.append(-(self._scale(layer, spread) * value).log())
            return value

        with torch.no_grad():
            self.problem.covariance(choose)
        return torch.cat(found)

    def __call__(self, theta: Tensor, sharpness: float, barrier: float) -> tuple[float, Tensor]:
        """The value and the gradient; infinite and zero where ``θ`` is not feasible."""
        nowhere = math.inf, torch.zeros_like(theta)
        free = theta.detach().clone().requires_grad_()
        chosen: list[Tensor] = []

        def choose(layer: Layer, spread: Tensor) -> Tensor:
            chosen.append((-free.split(self.counts)[len(chosen)]).exp() / self._scale(layer, spread))
            return chosen[-1]

        with torch.enable_grad():
            live, slack = self.problem.covariance(choose)
            form = self.problem.form(live)
            if not bool(slack.isfinite()) or not bool(form.isfinite().all()):
                return nowhere
            value = smooth_maximum(form, sharpness) - barrier / self.problem.neurons * slack
        exact = float(torch.linalg.eigvalsh(form.detach())[..., -1].max())
        self.stopped = self.report(exact, torch.cat(chosen).detach())
        (gradient,) = torch.autograd.grad(value, free)
        return (float(value.detach()), gradient) if bool(gradient.isfinite().all()) else nowhere


def descend(
    problem: Problem,
    multipliers: Tensor,
    *,
    tolerance: float,
    stop: Callable[[], bool],
    report: Report,
    near: bool = False,
) -> str:
    """Minimise from a feasible start.

    Args:
        problem: The problem.
        multipliers: Λ for an input of unit weight.
        tolerance: Relative tolerance of ℓ: smoothing finer than that is left out.
        stop: Whether time is up.
        report: Takes ``ℓ²`` and its Λ; returns whether to stop.
        near: Whether the start is near an optimum, so that the first stages would only lead away from it.

    Returns:
        Why it stopped.
    """
    objective = _Objective(problem, report)
    theta = objective.coordinates(multipliers)
    if not bool(theta.isfinite().all()):
        return "the start is not feasible"
    stages = _COARSE if problem.per_frequency else _STAGES[_LATER if near else 0 :]
    for sharpness, barrier in stages:
        theta = _stage(objective, theta, sharpness, barrier, stop)
        if objective.stopped:
            return "optimal within the tolerance"
        if stop():
            return "time limit"
        if 0.1 / sharpness < tolerance and barrier < 10 * tolerance:
            break
    return "no further progress"


def _stage(objective: _Objective, theta: Tensor, sharpness: float, barrier: float, stop: Callable[[], bool]) -> Tensor:
    """L-BFGS with a backtracking line search at one smoothing."""
    value, gradient = objective(theta, sharpness, barrier)
    pairs: list[tuple[Tensor, Tensor, float]] = []
    for _ in range(_STEPS):
        if objective.stopped or stop():
            break
        direction = -_quasi_newton(gradient, pairs)
        slope = float(gradient @ direction)
        if not slope < 0:
            break
        length, after, there = min(1.0, 2.0 / float(direction.abs().max())), math.inf, gradient
        for _ in range(30):
            after, there = objective(theta + length * direction, sharpness, barrier)
            if after <= value + 1e-4 * length * slope or objective.stopped or stop():
                break
            length *= 0.4
        if not after < value:
            break
        move, bend = length * direction, there - gradient
        product = float(move @ bend)
        if product > 1e-12 * float(move.norm() * bend.norm()):
            pairs = [*pairs[1 - _MEMORY :], (move, bend, product)]
        gain, theta, value, gradient = value - after, theta + move, after, there
        if gain < (30 if objective.problem.per_frequency else 1) * _PROGRESS / sharpness:
            break
    return theta


def _quasi_newton(gradient: Tensor, pairs: list[tuple[Tensor, Tensor, float]]) -> Tensor:
    """The inverse Hessian of the pairs (change, change of the gradient, their product), times the gradient."""
    found, shares = gradient.clone(), []
    for move, bend, product in reversed(pairs):
        shares.append(float(move @ found) / product)
        found -= shares[-1] * bend
    if pairs:
        found *= pairs[-1][2] / float(pairs[-1][1] @ pairs[-1][1])
    else:
        found *= 0.1 / max(float(gradient.abs().max()), 1e-300)
    for (move, bend, product), share in zip(pairs, reversed(shares), strict=True):
        found += (share - float(bend @ found) / product) * move
    return found
