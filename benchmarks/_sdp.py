"""The multipliers of :func:`ldlt.certificates.minimise` by cvxpy's solvers: the oracle for small networks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ldlt.certificates import Problem, Solution
from ldlt.certificates.solve import layerwise
from ldlt.errors import InfeasibleError, MissingExtraError


def solve_sdp(problem: Problem, *, solver: str = "SCS", **options: Any) -> Solution:
    """Minimise ``ℓ²`` over Λ with cvxpy, for networks of up to some hundred neurons.

    Args:
        problem: The network, with neurons and an output that depends on the input.
        solver: A solver of cvxpy for semidefinite programs. Measured on 8-30-30-5: ``"SCS"`` took 1.2 s to within 2e-7
            of the optimum, ``"CLARABEL"`` 14 s to within 4e-9.
        options: For the solver; for SCS its tolerances are 1e-8 unless given.

    Returns:
        A solution whose ``bound`` is evaluated at the solver's multipliers, made feasible by the smallest increase out
        of a few, and whose ``lower`` is the solver's own value (exact up to the solver's error only).

    Raises:
        MissingExtraError: If cvxpy is not installed.
        InfeasibleError: If the solver fails.
    """
    try:
        import cvxpy as cp
    except ImportError as error:
        raise MissingExtraError("cvxpy", "peers") from error
    start = layerwise(problem, 0.5)  # solvers want numbers of order one: scale by a feasible point
    squared = problem.squared(start)
    each = 2 * problem.spread(start)
    units = torch.cat([torch.ones(problem.inputs, dtype=torch.float64), each.sqrt()])

    def dense(rows: int, blocks: dict[str, Tensor]) -> Tensor:
        return problem.dense(rows, blocks) / units

    def eye(size: int) -> Tensor:
        return torch.eye(size, dtype=torch.float64)

    ratio = cp.Variable(problem.multipliers, nonneg=True)  # λ / start, for an output scaled by 1/ℓ_start
    t = cp.Variable()
    x = dense(problem.inputs, {problem.input: eye(problem.inputs)})
    form, first = t * (x.T @ x).numpy(), 0
    for layer, scale in zip(problem.layers, each.split([layer.size for layer in problem.layers]), strict=True):
        spread = torch.zeros(layer.size, problem.multipliers, dtype=torch.float64)
        spread[torch.arange(layer.size), first + layer.shared] = 1.0
        first += layer.count
        weight = cp.diag(spread.numpy() @ ratio)
        v = scale.sqrt()[:, None] * dense(layer.size, layer.inputs)
        own = scale.sqrt()[:, None] * dense(layer.size, {layer.name: eye(layer.size)})
        shifted = (own - layer.center[:, None] * v).numpy()
        rest = (layer.radius[:, None] * v).numpy()
        form = form + shifted.T @ weight @ shifted - rest.T @ weight @ rest
    y = dense(problem.outputs, problem.output) / math.sqrt(squared)
    form = form - (y.T @ y).numpy()
    task = cp.Problem(cp.Minimize(t), [(form + form.T) / 2 >> 0])
    if solver == "SCS":
        options = {"eps_abs": 1e-8, "eps_rel": 1e-8, "max_iters": 200_000, **options}
    try:
        task.solve(solver=solver, **options)
    except cp.error.SolverError as error:
        raise InfeasibleError(f"{solver} failed: {error}") from error
    if ratio.value is None or t.value is None:
        raise InfeasibleError(f"{solver} found no solution: {task.status}")
    value = float(t.value)
    base = torch.from_numpy(ratio.value).double().clamp(min=1e-12) * start / max(value, 1e-300)
    # Multipliers for an input of unit weight; mixing in the feasible start moves them inside.
    candidates = [(1 - slack) * base + slack * start for slack in (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)]
    best, flat = min(((problem.squared(c), c) for c in candidates), key=lambda pair: pair[0])
    if not math.isfinite(best):
        raise InfeasibleError(f"{solver} found multipliers that prove nothing ({task.status})")
    lower = math.sqrt(max(value, 0.0) * squared)
    return Solution(
        math.sqrt(best), problem.full(best * flat), lower, task.status == "optimal", f"{solver}: {task.status}"
    )
