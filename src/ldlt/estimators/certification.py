r"""Certificates of deployed models: standardisation, network, and what turns its outputs into the target's units.

A network that was built with the constant ℓ on standardised inputs has, behind the layer ``x ↦ (x − μ)/σ``, at most
the constant :math:`ℓ/\min_j σ_j` in the units of the data. That is far from the best: the network is not as steep along
every feature. So the multipliers it was built with are only where the search for the best ones of the whole model
starts. The multipliers found, and those of the construction, are then proven for the numbers as they are stored, and
the better certificate of the two is returned.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ldlt.certificates import Certificate, issue
from ldlt.certificates.problem import Problem
from ldlt.certificates.solve import DENSE_COORDINATES, bound_of, minimise
from ldlt.errors import InfeasibleError
from ldlt.graph.trace import trace

__all__ = ["certificate_of", "typical_constant"]


def certificate_of(
    model: nn.Module,
    features: int,
    multipliers: Sequence[Tensor],
    bound: float,
    *,
    time_limit: float | None,
    quality: Callable[[Certificate], float],
) -> Certificate:
    """The better of two certificates: from the best multipliers found, and from those of the construction.

    The search minimises the constant of the whole map; single outputs and pairs of outputs, which is what users ask
    for, may be better off with the multipliers of the construction.

    Args:
        model: The deployed model, of plain weights.
        features: Number of its inputs.
        multipliers: By which the model satisfies its inequality, in the order of its activations.
        bound: A constant that holds by construction, up to rounding.
        time_limit: Seconds for the search; None is no limit.
        quality: The smaller the better.

    Returns:
        A rigorous certificate, or one with the status ``"not certified"`` and a reason.
    """
    graph = trace(model, (features,))
    problem = Problem.build(graph, model)
    names = [a.name for a in graph.activations]
    built = {n: m.detach().double() for n, m in zip(names, multipliers, strict=True)}
    candidates: list[Certificate] = []

    def prove(found: dict[str, Tensor], bound: float, method: str) -> None:
        # A little more than a bound evaluated in floating point; of a constant network, more than zero.
        room = max((1 + 1e-9) * bound, sys.float_info.min)
        candidates.append(issue(model, (features,), found, room, method=method))

    with contextlib.suppress(InfeasibleError, OverflowError):  # too large for the search; the construction may do
        solution = minimise(problem, start=built, time_limit=time_limit)
        prove(solution.multipliers, solution.bound, "optimal")
        if candidates[0].is_certified and sum(problem.sizes.values()) > DENSE_COORDINATES:
            return candidates[0]  # a second proof would take long
    # On the boundary of what is feasible the bound is not found in floating point, but the proof's own search finds it.
    least = bound_of(problem, built) if names else math.inf
    prove(built, least if math.isfinite(least) else bound, "by construction")
    return min(candidates, key=lambda c: (not c.is_certified, quality(c) if c.is_certified else 0.0))


def typical_constant(constants: Tensor) -> float:
    """Geometric mean of the positive ones among some constants, so that no unit weighs more than another."""
    positive = constants[constants > 0]
    return float(torch.exp(positive.log().mean())) if len(positive) else 0.0
