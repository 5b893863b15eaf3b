r"""Feasible and well-centred multipliers, layer by layer from the input on.

Read ``Q_0`` as the precision of a Gaussian over ``(x, w_1, …)`` with covariance ``G``. Adding the constraint of an
activation with pre-activation ``v = Jz`` keeps it positive definite if and only if ``Λ^{1/2} T Λ^{1/2} ≺ I``,
``T = 2 r JGJ' r``. Any such Λ continues, and there always is one. With a positive diagonal ``D``, a guess of its shape,

.. math::

    \Lambda = \theta\,D / \lambda_{\max}(D^{1/2} T D^{1/2}) ,\qquad \theta = 1/2 ,

keeps every pivot at least half of what it was. Then (Woodbury) ``G`` grows by ``GJ'((2r²Λ)^{-1} − JGJ')^{-1}JG``, and
``w = cv + e`` with ``cov(e) = (2Λ)^{-1}`` joins it. Only covariances of blocks that are read again are kept.

For a chain with ``D = I`` these are the multipliers of ECLipsE-Fast. A start chosen from the output backwards is as
easy to find but poorly centred in deep networks: for one of 10 layers the interior-point method took 56 steps from
there, and 15 from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ldlt.certificates.problem import Layer, Problem

__all__ = ["SHAPES", "feasible"]

_FLOOR = 1e-8


def _unit(matrix: Tensor) -> Tensor:
    return torch.ones(len(matrix), dtype=torch.float64)


def _diagonal(matrix: Tensor) -> Tensor:
    return 1 / matrix.diagonal()


def _rows(matrix: Tensor) -> Tensor:
    """Row sums of the correlations: unlike those of the matrix they do not depend on the scale of neurons."""
    root = matrix.diagonal().rsqrt()
    return root**2 / (root[:, None] * matrix * root).abs().sum(1)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {"unit": _unit, "diagonal": _diagonal, "rows": _rows}


class _Covariance:
    """Covariances of live blocks."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks: dict[tuple[str, str], Tensor] = {
            (problem.input, problem.input): torch.eye(problem.inputs, dtype=torch.float64)
        }
        self.live = [problem.input]

    def between(self, rows: dict[str, Tensor], block: str) -> Tensor:
        """``J G_{·,block}``."""
        terms = [v @ self.blocks[b, block] for b, v in rows.items()]
        return torch.stack(terms).sum(0) if len(terms) > 1 else terms[0]

    def keep(self, needed: set[str]) -> None:
        """Forget what nobody reads any more: marginalisation."""
        self.live = [b for b in self.live if b in needed]
        self.blocks = {k: v for k, v in self.blocks.items() if k[0] in needed and k[1] in needed}

    def form(self, rows: dict[str, Tensor], cross: dict[str, Tensor]) -> Tensor:
        """``J G J'`` from ``JG``."""
        total = torch.zeros((), dtype=torch.float64)
        for b, v in rows.items():
            total = total + cross[b] @ v.T
        return (total + total.T) / 2


def feasible(problem: Problem, shape: str = "rows", theta: float = 0.5) -> tuple[float, Tensor]:
    """Multipliers chosen layer by layer.

    Args:
        problem: The problem.
        shape: Key of :data:`SHAPES`.
        theta: How far to go to the boundary, 0 < θ < 1.

    Returns:
        ``ℓ²`` and Λ for an input of unit weight (multiply by ``ℓ²`` for the full inequality). The bound is infinite if
        numbers overflow.
    """
    last = {b: i for i, layer in enumerate(problem.layers) for b in layer.inputs}
    last.update(dict.fromkeys(problem.output, len(problem.layers)))
    covariance = _Covariance(problem)
    chosen: list[Tensor] = []
    for i, layer in enumerate(problem.layers):
        cross = {b: covariance.between(layer.inputs, b) for b in covariance.live}
        spread = covariance.form(layer.inputs, cross)
        value = _choose(layer, 2 * layer.radius[:, None] * spread * layer.radius, SHAPES[shape], theta)
        if value is None:
            return math.inf, torch.cat([*chosen, torch.ones(problem.multipliers, dtype=torch.float64)])
        chosen.append(value)
        each = value[layer.shared]
        factor, info = torch.linalg.cholesky_ex(torch.diag(1 / (2 * layer.radius**2 * each)) - spread)
        if int(info):
            return math.inf, torch.cat([*chosen, torch.ones(problem.multipliers, dtype=torch.float64)])
        covariance.keep({b for b in covariance.live if last.get(b, -1) >= i})
        half = {b: torch.linalg.solve_triangular(factor, cross[b], upper=False) for b in covariance.live}
        inner = torch.linalg.solve_triangular(factor, spread, upper=False)  # L^{-1} JGJ'
        later = {b for b in covariance.live if last.get(b, -1) > i}
        grown = {b: cross[b] + inner.T @ half[b] for b in covariance.live if b in later}  # JG after the inflation
        for a in later:
            for b in later:
                covariance.blocks[a, b] = covariance.blocks[a, b] + half[a].T @ half[b]
        covariance.keep(later)
        if last.get(layer.name, -1) > i:
            c = layer.center[:, None]
            own = c * (spread + inner.T @ inner) * layer.center + torch.diag(1 / (2 * each))
            for b in covariance.live:
                covariance.blocks[layer.name, b] = c * grown[b]
                covariance.blocks[b, layer.name] = (c * grown[b]).T
            covariance.blocks[layer.name, layer.name] = own
            covariance.live.append(layer.name)
    flat = torch.cat([torch.empty(0, dtype=torch.float64), *chosen])
    cross = {b: covariance.between(problem.output, b) for b in problem.output}
    if not cross:
        return 0.0, flat
    final = covariance.form(problem.output, cross)
    if not bool(final.isfinite().all()):
        return math.inf, flat
    return float(torch.linalg.eigvalsh(final)[-1]), flat


def _choose(layer: Layer, form: Tensor, shape: Callable[[Tensor], Tensor], theta: float) -> Tensor | None:
    """``θ D / λ_max(D^{1/2}TD^{1/2})``, equal within groups."""
    if not bool(form.isfinite().all()):
        return None
    if layer.count < layer.size:  # members of a group may be constant
        form = form + _FLOOR * form.diagonal().max() * torch.eye(len(form), dtype=torch.float64)
    guess = shape(form)
    if layer.count == layer.size:
        grouped, root = guess, guess.sqrt()
    else:  # groups are as careful as their most careful member
        grouped = torch.full((layer.count,), math.inf, dtype=torch.float64)
        grouped = grouped.scatter_reduce(0, layer.shared, guess, "amin")
        root = grouped[layer.shared].sqrt()
    largest = float(torch.linalg.eigvalsh(root[:, None] * form * root)[-1])
    return theta * grouped / largest if 0 < largest < math.inf else None
