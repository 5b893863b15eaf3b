"""The same semidefinite program by a general solver: the oracle for small networks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ldlt.certificates.elimination import bound_squared
from ldlt.certificates.optimise import Solution, without_search
from ldlt.certificates.problem import Problem
from ldlt.certificates.start import feasible
from ldlt.errors import InfeasibleError, MissingExtraError

__all__ = ["solve_sdp"]


def solve_sdp(problem: Problem, *, solver: str = "SCS", **options: Any) -> Solution:
    """Minimise ``ℓ²`` over Λ with cvxpy, for networks of up to some hundred neurons.

    Args:
        problem: The network.
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
        import cvxpy as cp  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("cvxpy", "certify") from error
    simple = without_search(problem)
    if simple is not None:
        return simple
    # Solvers want numbers of order one: scale by a feasible point.
    squared, start = feasible(problem)
    parts = problem.split(start)
    offsets = problem.offsets
    units = torch.ones(sum(problem.sizes.values()), dtype=torch.float64)
    for layer in problem.layers:
        here = slice(offsets[layer.name], offsets[layer.name] + layer.size)
        units[here] = (2 * parts[layer.name][layer.shared]).sqrt()

    def dense(rows: int, blocks: dict[str, Tensor]) -> Tensor:
        return problem.dense(rows, blocks) / units

    ratio = cp.Variable(problem.multipliers, nonneg=True)  # λ / start, for an output scaled by 1/ℓ_start
    t = cp.Variable()
    eye = dense(problem.inputs, {problem.input: torch.eye(problem.inputs, dtype=torch.float64)})
    form = t * (eye.T @ eye).numpy()
    first = 0
    for layer in problem.layers:
        spread = torch.zeros(layer.size, problem.multipliers, dtype=torch.float64)
        spread[torch.arange(layer.size), first + layer.shared] = 1.0
        first += layer.count
        weight = cp.diag(spread.numpy() @ ratio)
        scale = (2 * parts[layer.name][layer.shared]).sqrt()[:, None]
        v = scale * dense(layer.size, layer.inputs)
        own = scale * dense(layer.size, {layer.name: torch.eye(layer.size, dtype=torch.float64)})
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
    base = torch.from_numpy(ratio.value).double().clamp(min=1e-12) * start
    best = math.inf
    flat = base
    for slack in (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3):
        # Λ of the full inequality is ℓ²_start · λ; mixing in the feasible start moves it inside.
        candidate = squared * ((1 - slack) * base + slack * start)
        found, _ = bound_squared(problem, candidate)
        if found < best:
            best, flat = found, candidate
    if not math.isfinite(best):
        raise InfeasibleError(f"{solver} found multipliers that prove nothing ({task.status})")
    lower = math.sqrt(max(value, 0.0) * squared)
    return Solution(math.sqrt(best), problem.full(flat), lower, task.status == "optimal", f"{solver}: {task.status}")
