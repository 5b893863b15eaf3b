r"""The best multipliers: minimise ℓ subject to the matrix inequality of a given network.

Every multiplier that is feasible proves a bound, so the search may be stopped at any time and returns the best bound it
has met. Networks of moderate size are solved to optimality by a primal-dual interior-point method
(:mod:`ldlt.certificates.interior`), large ones by a barrier method without large matrices
(:mod:`ldlt.certificates.descent`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ldlt.certificates import descent, interior
from ldlt.certificates.elimination import bound_squared
from ldlt.certificates.layerwise import eclipse
from ldlt.certificates.problem import Problem
from ldlt.certificates.start import SHAPES, feasible
from ldlt.errors import InfeasibleError, OptionError

__all__ = ["DENSE_COORDINATES", "TOLERANCE", "Solution", "Step", "bound_of", "minimise", "without_search"]

DENSE_COORDINATES = 1600
"""Up to this many coordinates (inputs and neurons) the dense interior-point method is used: some 20 cubic steps."""

TOLERANCE = 1e-4
"""Default relative tolerance of ℓ."""

_GREEDY_WIDTH = 1100  # widest layer for which a semidefinite program per layer is cheap enough as a start
_ATTEMPTS = 3  # starts of the interior-point method, if rounding stops it
_BOLD, _CENTRED = 0.7, 0.5  # θ of the start, for the reduced form and for the other methods
_ROOM = 1.05  # factor of ℓ² that leads from a bound that is tight to the interior
_LONGEST_START = 0.6  # share of the time limit that may go into the start


@dataclass(frozen=True)
class Step:
    """One line of the history.

    Attributes:
        seconds: Since the start.
        bound: Best ℓ so far.
        lower: Best lower bound on the smallest ℓ that any multipliers can prove.
    """

    seconds: float
    bound: float
    lower: float


@dataclass(frozen=True, eq=False)
class Solution:
    """What was found.

    Attributes:
        bound: ℓ, evaluated exactly (in float64) at the multipliers.
        multipliers: Λ by activation, (features,), for the inequality of :mod:`ldlt.lmi`; infinite for neurons that were
            substituted (see :mod:`ldlt.certificates.problem`).
        lower: No multipliers prove less than this (up to rounding). The Lipschitz constant itself may be smaller.
        converged: Whether ``bound ≤ lower (1 + tolerance)``.
        reason: Why the search ended.
        history: Progress.
    """

    bound: float
    multipliers: dict[str, Tensor]
    lower: float
    converged: bool
    reason: str
    history: list[Step] = field(default_factory=list)

    @property
    def gap(self) -> float:
        """``bound / lower − 1``."""
        return self.bound / self.lower - 1 if self.lower > 0 else (0.0 if self.bound == 0 else math.inf)


def bound_of(problem: Problem, multipliers: Mapping[str, Tensor]) -> float:
    """ℓ that multipliers prove: ``ℓ² = λ_max(Q_xh Q_hh^{-1} Q_hx − Q_xx)``; infinite if ``Q_hh`` is not positive."""
    flat = problem.flat(multipliers)
    if not bool((flat > 0).all() & flat.isfinite().all()):
        return math.inf
    return math.sqrt(bound_squared(problem, flat)[0])


class _Search:
    """The best point so far, and when to stop."""

    def __init__(
        self, problem: Problem, tolerance: float, time_limit: float | None, progress: Callable[[Step], object] | None
    ) -> None:
        self.problem, self.tolerance, self.progress = problem, tolerance, progress
        self.begin = time.perf_counter()
        self.time_limit = math.inf if time_limit is None else time_limit
        self.squared, self.lower = math.inf, 0.0
        self.best = torch.empty(0, dtype=torch.float64)
        self.history: list[Step] = []

    def elapsed(self) -> float:
        return time.perf_counter() - self.begin

    def late(self) -> bool:
        return self.elapsed() > self.time_limit

    def offer(self, squared: float, multipliers: Tensor) -> None:
        """Take a feasible point if it is the best; Λ for an input of unit weight."""
        if squared < self.squared:
            self.squared, self.best = squared, multipliers.clone()

    def report(self, squared: float, multipliers: Tensor, lower: float) -> bool:
        self.offer(squared, multipliers)
        self.lower = max(self.lower, lower)
        step = Step(self.elapsed(), math.sqrt(self.squared), math.sqrt(min(self.lower, self.squared)))
        self.history.append(step)
        if self.progress is not None:
            self.progress(step)
        return self.done()

    def done(self) -> bool:
        return self.squared <= self.lower * (1 + self.tolerance) ** 2


SMALLEST = 1e-12
"""Bound of a network that is constant: every positive number is one, and a certificate states one."""


def without_search(problem: Problem) -> Solution | None:
    """The solution of a network that is constant or linear; None for any other."""
    if not problem.output:
        multipliers = problem.full(_small(problem, SMALLEST))
        return Solution(SMALLEST, multipliers, 0.0, True, "the output does not depend on the input")
    if not problem.layers:
        norm = float(torch.linalg.matrix_norm(problem.output[problem.input], 2))
        return Solution(norm, problem.full(torch.empty(0, dtype=torch.float64)), norm, True, "the network is linear")
    return None


def _small(problem: Problem, bound: float) -> Tensor:
    r"""Multipliers that keep the form without an output positive.

    From :math:`\|w - cv\|^2 \ge \tfrac12\|w\|^2 - c^2\|v\|^2` the form is at least :math:`ℓ^2\|x\|^2 +
    \sum_i \bigl(Λ_i\|w_i\|^2 - 2Λ_i(c_i^2 + r_i^2)\|v_i\|^2\bigr)`: each layer may take a tenth of the least of what
    comes before it.
    """
    least, parts = bound**2, []
    for layer in problem.layers:
        size = sum(float(block.square().sum()) for block in layer.inputs.values())
        slope = float((layer.center.square() + layer.radius.square()).max())
        least *= 0.05 / (1 + slope * size)
        parts.append(torch.full((layer.count,), least, dtype=torch.float64))
    return torch.cat([*parts, torch.empty(0, dtype=torch.float64)])


def minimise(
    problem: Problem,
    *,
    start: Mapping[str, Tensor] | None = None,
    time_limit: float | None = None,
    tolerance: float = TOLERANCE,
    progress: Callable[[Step], object] | None = None,
    dense: bool | None = None,
) -> Solution:
    """The smallest bound that multipliers can prove.

    Args:
        problem: The network.
        start: Multipliers to begin with, in the form of :attr:`Solution.multipliers`. Ignored if they prove nothing.
        time_limit: Seconds after which to stop. A factorisation that has begun is finished.
        tolerance: Relative tolerance of ℓ.
        progress: Called after every step.
        dense: Force the interior-point method (True) or the method for large networks (False).

    Returns:
        The solution; valid also if the search was cut short, by the time limit or a ``KeyboardInterrupt``.

    Raises:
        InfeasibleError: If numbers overflow, so that not even a start is found.
    """
    if not (tolerance > 0 and (time_limit is None or time_limit >= 0)):
        raise OptionError("tolerance must be positive and time_limit must not be negative")
    simple = without_search(problem)
    if simple is not None:
        return simple
    search = _Search(problem, tolerance, time_limit, progress)
    dense = sum(problem.sizes.values()) <= DENSE_COORDINATES if dense is None else dense
    try:
        reason = _run(search, start, dense)
    except KeyboardInterrupt:
        if not math.isfinite(search.squared):
            raise
        reason = "interrupted"
    return _finish(search, reason)


@torch.inference_mode()
def _run(search: _Search, start: Mapping[str, Tensor] | None, dense: bool) -> str:
    problem = search.problem
    begin = _begin(search, start, dense, _BOLD if dense else _CENTRED)
    if not math.isfinite(search.squared):
        raise InfeasibleError("no feasible start: weights or slopes are too large for float64")
    if search.squared == 0:
        return "the bound is zero"
    if not dense:
        return descent.descend(problem, begin[1], tolerance=search.tolerance, stop=search.late, report=search.report)

    def solve(reduced: bool) -> str:
        return interior.solve(problem, begin[1], begin[0], stop=search.late, report=search.report, reduced=reduced)

    reason = solve(reduced=True)
    if search.done() or search.late():
        return reason
    begin = _begin(search, start, dense, _CENTRED)
    for _ in range(_ATTEMPTS):
        reason = solve(reduced=False)
        if search.done() or search.late():
            break
        # Rounding was the limit: begin again in the coordinates of the best point.
        begin = (_ROOM * search.squared, search.best / _ROOM)
    return reason


def _begin(search: _Search, start: Mapping[str, Tensor] | None, dense: bool, theta: float) -> tuple[float, Tensor]:
    """The best of the feasible points at hand, strictly inside."""
    found = _feasible(search, dense, theta)
    if start is not None:
        given = search.problem.flat(start)
        if bool((given > 0).all() & given.isfinite().all()):
            squared, _ = bound_squared(search.problem, given)
            # Strictly inside, or no barrier is finite there: a bound a little larger makes room.
            if 0 < squared < found[0]:
                search.offer(squared, given / squared)
                found = (_ROOM * squared, given / (_ROOM * squared))
    return found


def _feasible(search: _Search, dense: bool, theta: float) -> tuple[float, Tensor]:
    """A feasible point from nothing."""
    problem = search.problem
    found = feasible(problem, theta=theta)
    if not math.isfinite(found[0]):
        found = min((feasible(problem, shape) for shape in SHAPES), key=lambda pair: pair[0])
    search.offer(*found)
    if not dense and problem.is_chain and max(layer.size for layer in problem.layers) <= _GREEDY_WIDTH:
        # In deep chains the first-order coupling of layers is all that matters at first: choose them one by one.
        try:
            bound, multipliers = eclipse(
                problem, tolerance=0.3, stop=lambda: search.elapsed() > _LONGEST_START * search.time_limit
            )
        except InfeasibleError:
            return found
        if bound**2 < found[0]:
            found = (bound**2, multipliers / bound**2)
            search.offer(*found)
    return found


def _finish(search: _Search, reason: str) -> Solution:
    """Scale the multipliers to the full inequality and evaluate their bound once more, from the definition."""
    problem = search.problem
    squared, multipliers = search.squared, search.squared * search.best  # no longer tensors of the inference mode
    exact, _ = bound_squared(problem, multipliers)
    if not exact <= squared * (1 + 1e-9):
        # The best point may be singular to working precision: a slightly larger bound is safe.
        for slack in (1e-9, 1e-7, 1e-5, 1e-3):
            multipliers = squared * (1 + slack) * search.best
            exact, _ = bound_squared(problem, multipliers)
            if exact <= squared * (1 + 2 * slack):
                break
    bound = math.sqrt(exact)
    lower = min(math.sqrt(search.lower), bound)
    search.history.append(Step(search.elapsed(), bound, lower))
    converged = bound <= lower * (1 + search.tolerance)
    return Solution(bound, problem.full(multipliers), lower, converged, reason, search.history)
