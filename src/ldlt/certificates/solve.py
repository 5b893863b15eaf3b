r"""The best multipliers: minimise ℓ subject to the matrix inequality of a given network.

Every multiplier that is feasible proves a bound, so a search may be stopped at any time and returns the best it has
met. It begins with two closed forms (:func:`product`, which is the product of norms, and :func:`layerwise`); then
moderate networks go through the interior-point method below, and what it leaves, or is too large for it, through
:mod:`ldlt.certificates.large`.

**Interior points.** With ``M(η) = Y P(η)^{-1} Y'``, ``P(η) = E + Σ_k η_k A_k``, ``A_k = d_kd_k' − v_kv_k'``, minimise
``τ`` subject to ``S = τI − M(η) ⪰ 0``: a matrix of the size of the output, convex in ``η``, with
:math:`∂S/∂η_k = B'A_kB`, ``B = P^{-1}Y'``, and the curvature
:math:`-\langle Z, ∂_k∂_lM\rangle = 2\operatorname{tr}(A_k\,BZB'\,A_lP^{-1})`. Dual variables are ``Z ⪰ 0`` with
``tr Z = 1`` and ``ξ ≥ 0``. Each step linearises ``ZS = μI`` and ``ξη = ωμ`` (the direction of Helmberg, Rendl,
Vanderbei and Wolkowicz) with the predictor and corrector of Mehrotra, and a barrier ``−κ \log\det P`` that is far
weaker than the one on ``S`` keeps ``P`` positive definite. The linear system is a sum of elementwise products, since

.. math:: \operatorname{tr}(A_kXA_lZ) = \sum_{a,b \in \{d, v\}} \pm (F X F')_{ak,bl} (F Z F')_{ak,bl} ,\qquad
    F = [d_1, …, d_n, v_1, …, v_n]' .

Networks of a few layers take five to ten steps. Deep ones, and those with ``c = 0``, where the layers are not coupled
by the objective, soon make it give up.

**Lower bounds** come from vectors, one per coordinate of ``z`` (rows of ``Z``, of any length), with
``‖w_j − c_jv_j‖ ≤ r_j‖v_j‖`` for every neuron (jointly over a group): ``‖YZ‖²/‖Z_x‖²`` is at most ``ℓ²`` of any
multipliers. Those of a step are repaired from the input to the output by shortening ``w_j − c_jv_j``.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ldlt.certificates import large
from ldlt.certificates.problem import Layer, Problem
from ldlt.covariance import mean_diagonal
from ldlt.errors import InfeasibleError, OptionError

__all__ = ["DENSE_COORDINATES", "SMALLEST", "TOLERANCE", "Solution", "Step", "bound_of", "minimise", "product"]

DENSE_COORDINATES = 1600
"""Up to this many coordinates (inputs and neurons) the interior-point method is used: some ten cubic steps."""

TOLERANCE = 1e-4
"""Default relative tolerance of ℓ."""

SMALLEST = 1e-12
"""Bound of a network that is constant: every positive number is one, and a certificate states one."""

_BOLD, _CENTRED = 0.7, 0.5  # θ of the start, for interior points and for descent
_CENTRE = 0.01  # κ / μ
_GROWTH = 0.05  # largest relative growth of τ in one step
_SHORTEST = 0.2  # step that must be possible
_PATIENCE = 20  # steps
_NEAR = 0.03  # gap from which on a lower bound is computed
_FAR = 10.0  # how much larger than the gap by μ the true one may be
_ROOM = 1.05  # factor of ℓ² that leads from a bound that is tight to the interior
_STRICT = 1e-7  # relative, by which products of norms are enlarged to be strictly feasible
_FLOOR = 1e-8
_LARGEST_LOG = math.log(sys.float_info.max)


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
        bound: ℓ at the multipliers, in float64.
        multipliers: Λ by activation, (features,), for the inequality of :mod:`ldlt.lmi`; infinite for neurons that were
            substituted (see :mod:`ldlt.certificates.problem`).
        lower: No multipliers prove less than this (up to rounding); 0 if nothing is known. The Lipschitz constant
            itself may be smaller.
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


class _Search:
    """The best point so far, and when to stop. Multipliers are those for an input of unit weight."""

    def __init__(
        self, problem: Problem, tolerance: float, time_limit: float | None, progress: Callable[[Step], object] | None
    ) -> None:
        self.problem, self.tolerance, self.progress = problem, tolerance, progress
        self.begin = time.perf_counter()
        self.time_limit = math.inf if time_limit is None else time_limit
        self.squared, self.lower = math.inf, 0.0
        self.best = torch.empty(0, dtype=torch.float64)
        self.history: list[Step] = []

    def late(self) -> bool:
        return time.perf_counter() - self.begin > self.time_limit

    def done(self) -> bool:
        return self.squared <= self.lower * (1 + self.tolerance) ** 2

    def offer(self, squared: float, multipliers: Tensor) -> None:
        if squared < self.squared:
            self.squared, self.best = squared, multipliers.detach().clone()

    def report(self, squared: float, multipliers: Tensor, lower: float = 0.0) -> bool:
        """Take a feasible point; returns whether to stop."""
        self.offer(squared, multipliers)
        self.lower = max(self.lower, lower)
        seconds = time.perf_counter() - self.begin
        self.history.append(Step(seconds, math.sqrt(self.squared), math.sqrt(min(self.lower, self.squared))))
        if self.progress is not None:
            self.progress(self.history[-1])
        return self.done()


def minimise(
    problem: Problem,
    *,
    start: Mapping[str, Tensor] | None = None,
    time_limit: float | None = None,
    tolerance: float = TOLERANCE,
    progress: Callable[[Step], object] | None = None,
) -> Solution:
    """The smallest bound that multipliers can prove.

    Args:
        problem: The network.
        start: Multipliers to begin with, in the form of :attr:`Solution.multipliers`. Ignored if they prove nothing.
        time_limit: Seconds after which to stop. A factorisation that has begun is finished.
        tolerance: Relative tolerance of ℓ.
        progress: Called after every step.

    Returns:
        The solution; valid also if the search was cut short, by the time limit or a ``KeyboardInterrupt``.

    Raises:
        InfeasibleError: If numbers overflow, so that not even a start is found.
    """
    if not (tolerance > 0 and (time_limit is None or time_limit >= 0)):
        raise OptionError("tolerance must be positive and time_limit must not be negative")
    if not problem.output:
        multipliers = problem.full(SMALLEST**2 * layerwise(problem, _CENTRED))
        return Solution(SMALLEST, multipliers, 0.0, True, "the output does not depend on the input")
    if not problem.layers:
        norm = problem.norm(problem.output[problem.input], None, problem.input)
        if not math.isfinite(norm):
            raise InfeasibleError("the map overflows: weights are too large for float64")
        return Solution(norm, problem.full(torch.empty(0, dtype=torch.float64)), norm, True, "the network is linear")
    search = _Search(problem, tolerance, time_limit, progress)
    try:
        reason = _run(search, start)
    except KeyboardInterrupt:
        if not math.isfinite(search.squared):
            raise
        reason = "interrupted"
    squared = search.squared
    bound, lower = math.sqrt(squared), min(math.sqrt(search.lower), math.sqrt(squared))
    return Solution(bound, problem.full(squared * search.best), lower, search.done(), reason, search.history)


def _run(search: _Search, start: Mapping[str, Tensor] | None) -> str:
    problem = search.problem
    with torch.inference_mode():
        plain = product(problem)[1]
        for found in (layerwise(problem, _BOLD), plain):
            search.offer(problem.squared(found), found)
        begin, given = layerwise(problem, _BOLD), None
        if start is not None:
            flat = problem.flat(start)
            scale = _least_scale(problem, flat) if bool((flat > 0).all() & flat.isfinite().all()) else math.inf
            if math.isfinite(scale) and (squared := problem.squared(flat / scale)) < search.squared:
                search.offer(squared, flat / scale)
                begin = given = flat / (_ROOM * scale)  # strictly inside
        if not math.isfinite(search.squared):
            raise InfeasibleError("no feasible start: weights or slopes are too large for float64")
        if search.squared == 0:
            return "the bound is zero"
        if search.report(search.squared, search.best):
            return "optimal within the tolerance"
        small = not problem.per_frequency and sum(problem.sizes.values()) <= DENSE_COORDINATES
        reason = _interior(search, begin) if small else "too large for interior points"
        near = given is not None
        if given is None:
            centred = layerwise(problem, _CENTRED)
            given = centred if math.isfinite(problem.squared(centred)) else plain / _ROOM
    if not search.done() and not search.late():
        options = {"tolerance": search.tolerance, "stop": search.late, "report": search.report, "near": near}
        stop = large.descend(problem, given, **options)  # type: ignore[arg-type]
        reason = f"{reason}; {stop}"
    return "optimal within the tolerance" if search.done() else "time limit" if search.late() else reason


# -- closed forms ------------------------------------------------------------------------------------------------------


def layerwise(problem: Problem, theta: float) -> Tensor:
    r"""Multipliers chosen from the input on.

    With ``T`` the covariance of what an activation reads, scaled by its radii,

    .. math:: \Lambda = \theta\,q / \lambda_{\max}(q^{1/2} T q^{1/2}) ,

    where ``1/q`` are the sums of the rows of the correlations of ``T``, times its diagonal. With ``q = 1`` these would
    be the multipliers of ECLipsE-Fast.
    """
    chosen: list[Tensor] = []

    def choose(layer: Layer, spread: Tensor) -> Tensor:
        form = 2 * layer.radius[:, None] * spread * layer.radius
        if layer.count < layer.size:  # members of a group may be constant
            top = form.diagonal(dim1=-2, dim2=-1).real.max()
            form = form + _FLOOR * top * torch.eye(layer.size, dtype=torch.float64)
        root = mean_diagonal(form).rsqrt()
        sums = (root[:, None] * form * root).abs().sum(-1).reshape(-1, layer.size).amax(0) / root**2
        guess = 1 / layer.grouped(sums, "amax")  # groups are as careful as their most careful member
        scale = guess[layer.shared].sqrt()
        scaled = scale[:, None] * form * scale
        largest = float(torch.linalg.eigvalsh(scaled)[..., -1].max()) if bool(scaled.isfinite().all()) else math.nan
        chosen.append(guess * (theta / largest))
        return chosen[-1]

    problem.covariance(choose)
    return torch.cat([*chosen, torch.empty(0, dtype=torch.float64)])


def product(problem: Problem) -> tuple[float, Tensor]:
    """The product of norms along the graph, and multipliers that prove it.

    With ``n_ab`` the norm of the map from block b to the pre-activation of layer a, times its largest slopes, let
    ``ℓ_a = Σ_b n_ab ℓ_b`` (the constant of layer a, by the triangle inequality) and ``p_b = Σ_a p_a n_ab`` (that of the
    output with respect to layer b). Then
    ``2Λ_a = (1 + |c|/r) p_a ℓ_y / ℓ_a`` satisfies the inequality with ``ℓ = ℓ_y``: by Cauchy and Schwarz
    ``‖v_a‖² ≤ ℓ_a Σ_b n_ab‖w_b‖²/ℓ_b``, so that the coefficients of every ``‖w_b‖²`` cancel, and
    ``(1 + |c|/r)(w − mv)(w − Lv) ≥ w² − (|c| + r)²v²``.

    Returns:
        The product, a little larger so that the multipliers are strictly feasible, and these, for an input of unit
        weight. Their bound is at most the product, and often far smaller.
    """
    strict = 1 + _STRICT
    gains = {}
    for layer in problem.layers:
        steep = layer.center.abs() + layer.radius
        gains[layer.name] = {b: strict * problem.norm(v, layer.name, b, steep) for b, v in layer.inputs.items()}
    last = {b: strict * problem.norm(y, None, b) for b, y in problem.output.items()}
    reach = {problem.input: 1.0}
    for name, gain in gains.items():
        reach[name] = sum(n * reach[b] for b, n in gain.items())
    bound = sum(n * reach[b] for b, n in last.items())
    pull = {b: last.get(b, 0.0) for b in problem.sizes}
    chosen = []
    for layer in reversed(problem.layers):
        # What nobody reads gets a little, which the room left by `strict` pays for.
        own = max(pull[layer.name], 1e-3 * _STRICT * bound / max(reach[layer.name], 1e-300))
        for b, n in gains[layer.name].items():
            pull[b] += n * own
        value = own / max(2 * reach[layer.name] * bound, 1e-300)
        chosen.append(layer.grouped((1 + layer.center.abs() / layer.radius) * value, "amax"))
    return bound, torch.cat([torch.empty(0, dtype=torch.float64), *chosen[::-1]])


def bound_of(problem: Problem, multipliers: Mapping[str, Tensor]) -> float:
    """The smallest ℓ that multipliers prove as they are (only the weight of the input is free); infinite if none."""
    if not problem.layers:
        return minimise(problem).bound
    flat = problem.flat(multipliers)
    if not bool((flat > 0).all() & flat.isfinite().all()):
        return math.inf
    with torch.inference_mode():
        return math.sqrt(_least_scale(problem, flat, 1e-12))


def _least_scale(problem: Problem, multipliers: Tensor, accuracy: float = 1e-7) -> float:
    """The smallest ``s = ℓ²`` with ``sE + Σ Λ_kA_k ⪰ Y'Y``, from above; infinite if there is none in sight."""

    def fits(log: float) -> bool:
        return problem.squared(multipliers / math.exp(log)) <= math.exp(log) * (1 + 1e-10)  # equal where c = 0

    guess = product(problem)[0]
    if not 0 < guess * guess < math.inf:
        return math.inf
    high = 2 * math.log(guess)
    step = 1.0
    while not fits(high):
        high, step = high + step, 2 * step
        if step > 200 or high > _LARGEST_LOG:
            return math.inf
    low, step = high - 1.0, 1.0
    while fits(low):
        high, low, step = low, low - 2 * step, 2 * step
        if step > 200:
            break
    while high - low > accuracy:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return math.exp(high)


# -- interior points ---------------------------------------------------------------------------------------------------


class _Corners(NamedTuple):
    """Blocks of ``F X F'`` for a symmetric X, (n, n) each: of d with d, of v with d, of v with v."""

    beside: Tensor
    cross: Tensor
    below: Tensor

    def traces(self) -> Tensor:
        """``tr(A_kX)``, (n,)."""
        return self.beside.diagonal() - self.below.diagonal()

    def update(self, rows: Tensor, middle: Tensor, scale: float) -> _Corners:
        """The corners of ``scale X + R middle R'`` from ``F R`` (2n, q)."""
        upper, lower = rows.split(len(self.beside))
        left, under = (rows @ middle).split(len(self.beside))
        return _Corners(
            torch.addmm(self.beside, left, upper.mT, beta=scale),
            torch.addmm(self.cross, under, upper.mT, beta=scale),
            torch.addmm(self.below, under, lower.mT, beta=scale),
        )


def _pair_products(x: _Corners, z: _Corners) -> Tensor:
    """``tr(A_kXA_lZ)`` (n, n)."""
    cross = x.cross * z.cross
    return (x.beside * z.beside).addcmul_(x.below, z.below).sub_(cross).sub_(cross.mT)


class _Place:
    """``M`` and its derivatives at multipliers ``η`` in units of others."""

    def __init__(self, problem: Problem, eta: Tensor, units: Tensor, covariance: Tensor) -> None:
        self.problem, self.eta, self.units, self.covariance = problem, eta, units, covariance
        output = problem.dense(problem.outputs, problem.output)
        self.basis = covariance @ output.mT  # B
        self.m = _symmetric(output @ self.basis)
        finite = bool(self.m.isfinite().all())
        self.largest = float(torch.linalg.eigvalsh(self.m)[-1]) if finite else math.inf
        self.weight = min(1.0, problem.outputs / problem.multipliers)  # of the barrier on η relative to that on S
        self.root = (2 * problem.spread(units)).sqrt()[:, None]
        self.center = torch.cat([layer.center / layer.radius for layer in problem.layers])

    @classmethod
    def at(cls, problem: Problem, multipliers: Tensor, units: Tensor) -> _Place | None:
        """At multipliers; None where ``P`` is not positive definite."""
        live, slack = problem.covariance(multipliers, everything=True)
        if not bool(slack.isfinite()) or not bool(live.matrix.isfinite().all()):
            return None
        place = cls(problem, multipliers / units, units, live.matrix)
        return place if 0 < place.largest < math.inf else None

    def before(self, right: Tensor) -> Tensor:
        """``v`` of all neurons from the blocks of ``z``, (n, q), times their radii."""
        parts = dict(zip(self.problem.sizes, right.split(list(self.problem.sizes.values())), strict=True))
        return torch.cat([layer.radius[:, None] * layer.apply(parts) for layer in self.problem.layers])

    def prepare(self) -> None:
        """What derivatives need: ``F B`` and the corners of ``P^{-1}``, in the units of η."""
        hidden = slice(self.problem.inputs, None)
        below = self.root * self.before(self.basis)
        self.rows = torch.cat(
            [torch.addcmul(self.root * self.basis[hidden], self.center[:, None], below, value=-1), below]
        )
        half = self.root * self.before(self.covariance)
        c, root = self.center, self.root[:, 0]
        beneath = self.before(half.mT.contiguous()).mT * root
        beneath = (beneath + beneath.mT) / 2
        aside = half[:, hidden] * root  # v with e
        beside = self.root * self.covariance[hidden, hidden] * root - aside.mT * c  # e with d
        cross = torch.addcmul(aside, beneath, c, value=-1)
        self.corners = _Corners(torch.addcmul(beside, c[:, None], cross, value=-1), cross, beneath)

    def sums(self, products: Tensor) -> Tensor:
        """``Σ_q (products_dq − products_vq)`` by multiplier, (2n, q) -> (m,)."""
        beside, below = products.sum(1).split(len(self.center))
        return self.problem.grouped(beside - below)

    def traces(self, matrix: Tensor) -> Tensor:
        """``<∂S/∂η_k, matrix>``, (m,)."""
        return self.sums((self.rows @ matrix) * self.rows)

    def change(self, eta: Tensor) -> Tensor:
        """``Σ_k η_k ∂S/∂η_k``."""
        each = self.problem.spread(eta)
        return self.rows.mT @ (torch.cat([each, -each])[:, None] * self.rows)

    def system(self, dual: Tensor, inverse: Tensor, mu: float) -> tuple[Tensor, Tensor]:
        """The second derivatives (m, m), and the pull of the barriers (m,)."""
        pull = self.traces(inverse) + _CENTRE * self.problem.grouped(self.corners.traces())
        # The product of κ/2 with S^{-1} is not part of the derivative; it is small where κ is.
        left = self.corners.update(self.rows, dual, _CENTRE * mu / 2)
        found = _pair_products(left, self.corners.update(self.rows, inverse, 2.0))
        return self.problem.grouped(self.problem.grouped(found).mT), pull

    def repaired(self, vectors: Tensor) -> float:
        """``‖YZ‖²/‖Z_x‖²`` of vectors that obey the constraints, near given ones (N, q)."""
        problem = self.problem
        parts = dict(zip(problem.sizes, vectors.split(list(problem.sizes.values())), strict=True))
        norm = float(parts[problem.input].square().sum())
        if not 0 < norm < math.inf:
            return 0.0
        fixed = {problem.input: parts[problem.input]}
        for layer in problem.layers:
            v = layer.apply(fixed)
            # The residual of the given vectors keeps its direction; its length is cut where it is too long.
            residual = parts[layer.name] - layer.center[:, None] * layer.apply(parts)
            have = layer.grouped(residual.square().sum(1), "sum")
            may = layer.grouped(layer.radius**2 * v.square().sum(1), "sum")
            factor = (may / have.clamp(min=1e-300)).sqrt().nan_to_num(0.0).clamp(max=1.0)[layer.shared]
            fixed[layer.name] = torch.addcmul(layer.center[:, None] * v, factor[:, None], residual)
        y = torch.stack([m @ fixed[b] for b, m in problem.output.items()]).sum(0)
        found = float(y.square().sum()) / norm
        return found if found < math.inf else 0.0


class _Direction(NamedTuple):
    """Changes of all variables."""

    eta: Tensor
    tau: float
    s: Tensor
    dual: Tensor
    xi: Tensor


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2


def _dot(left: Tensor, right: Tensor) -> float:
    return float(torch.dot(left.reshape(-1), right.reshape(-1)))


def _longest(change: Tensor, factor: Tensor) -> float:
    """Step ≤ 1 that keeps ``LL' + step · change`` positive definite, nearly the largest."""
    half = torch.linalg.solve_triangular(factor, change, upper=False)
    least = float(torch.linalg.eigvalsh(torch.linalg.solve_triangular(factor, half.mT, upper=False))[0])
    return 1.0 if least > -0.95 else 0.95 / -least


def _longest_vector(vector: Tensor, change: Tensor) -> float:
    least = float((change / vector).min())
    return 1.0 if least > -0.95 else 0.95 / -least


class _Iterate:
    """A point ``(η, τ, Z, ξ)`` with ``S`` and the linear system there."""

    def __init__(self, place: _Place) -> None:
        if self._go(place, 1.1 * place.largest):  # centred, with tr Z = 1
            mu = 1 / float(self.inverse.diagonal().sum())
            self._face(mu * self.inverse, mu * place.weight / place.eta)

    def _go(self, place: _Place, tau: float) -> bool:
        """Move η and τ; returns whether S is positive definite there, and stays if it is not."""
        s = -place.m
        s.diagonal().add_(tau)
        factor, info = torch.linalg.cholesky_ex(s)
        if int(info):
            return False
        self.place, self.tau, self.s, self.factor = place, tau, s, factor
        self.inverse = torch.cholesky_inverse(factor)
        return True

    def _face(self, dual: Tensor, xi: Tensor) -> None:
        """Set Z and ξ, after η and τ."""
        self.dual, self.xi = dual, xi
        self.mu = self._mean(self.s, dual, self.place.eta, xi)
        self.gap = self.mu * self._weight / self.tau  # relative, if the dual point were feasible

    @property
    def _weight(self) -> float:
        return len(self.s) + self.place.weight * len(self.place.eta)

    def _mean(self, s: Tensor, dual: Tensor, eta: Tensor, xi: Tensor) -> float:
        """μ: the mean of the products that complementarity wants to be zero."""
        return (_dot(s, dual) + _dot(eta, xi)) / self._weight

    def prepare(self) -> bool:
        """Factorise the linear system; returns whether that worked."""
        place, eta = self.place, self.place.eta
        place.prepare()
        inner, pull = place.system(self.dual, self.inverse, self.mu)
        beside = place.sums((place.rows @ self.dual) * (place.rows @ self.inverse))[:, None]
        inner = inner + torch.diag(self.xi / eta)
        corner = torch.full((1, 1), _dot(self.dual, self.inverse), dtype=torch.float64)
        self.matrix = torch.cat([torch.cat([inner, beside], 1), torch.cat([beside.mT, corner], 1)])
        self.grade = self.matrix.diagonal().rsqrt()
        scaled = self.grade[:, None] * self.matrix * self.grade  # far better conditioned than the matrix looks
        self.pull = torch.cat([pull + place.weight / eta, self.inverse.diagonal().sum()[None]])
        for exponent in range(-15, -5, 2):
            scaled.diagonal().add_(10.0**exponent)
            self.factor_of_system, info = torch.linalg.cholesky_ex(scaled)
            if int(info) == 0:
                return True
        return False

    def _solve(self, right: Tensor) -> Tensor:
        def roughly(part: Tensor) -> Tensor:
            return self.grade * torch.cholesky_solve((self.grade * part)[:, None], self.factor_of_system)[:, 0]

        found = roughly(right)
        return found + roughly(right - self.matrix @ found)  # takes the jitter out again

    def direction(self, target: float, ahead: _Direction | None = None) -> _Direction:
        """Newton's direction towards ``μ = target``, with the second-order term of a direction found before."""
        eta = self.place.eta
        right = target * self.pull
        right[-1] -= 1
        dual, xi = target * self.inverse - self.dual, target * self.place.weight / eta - self.xi
        if ahead is not None:
            second = _symmetric(ahead.dual @ ahead.s @ self.inverse)
            along = ahead.xi * ahead.eta / eta
            right -= torch.cat([self.place.traces(second) + along, second.diagonal().sum()[None]])
            dual, xi = dual - second, xi - along
        step = self._solve(right)
        move, tau = step[:-1], float(step[-1])
        s = self.place.change(move)
        s.diagonal().add_(tau)
        dual = dual - _symmetric(self.dual @ s @ self.inverse)
        return _Direction(move, tau, s, dual, xi - self.xi / eta * move)

    def steps(self, to: _Direction, vectors: Tensor) -> tuple[float, float]:
        """Lengths of the primal and the dual step; ``vectors`` is the Cholesky factor of Z."""
        primal = min(_longest(to.s, self.factor), _longest_vector(self.place.eta, to.eta))
        return primal, min(_longest(to.dual, vectors), _longest_vector(self.xi, to.xi))

    def ahead(self, to: _Direction, primal: float, dual: float) -> float:
        """μ after a step."""
        s, z = self.s + primal * to.s, self.dual + dual * to.dual
        return self._mean(s, z, self.place.eta + primal * to.eta, self.xi + dual * to.xi)

    def move(self, to: _Direction, primal: float, dual: float) -> float:
        """Take a step, shorter if rounding or curvature demands it; returns the length of the primal step."""
        before = self.place
        while primal > 1e-8:
            eta = before.eta + primal * to.eta
            place = _Place.at(before.problem, eta * before.units, before.units) if float(eta.min()) > 0 else None
            if place is not None:
                # By how much τ must grow for S to be no less than if it were linear.
                bent = primal * to.s + place.m - before.m
                bent.diagonal().sub_(primal * to.tau)
                tau = self.tau + primal * to.tau + max(0.0, float(torch.linalg.eigvalsh(bent)[-1]))
                if tau - self.tau <= _GROWTH * self.tau and self._go(place, tau):
                    break
            primal *= 0.7
        else:
            return 0.0
        while int(torch.linalg.cholesky_ex(self.dual + dual * to.dual)[1]) and dual > 1e-8:
            dual *= 0.7
        self._face(self.dual + dual * to.dual, self.xi + dual * to.xi)
        return primal


def _interior(search: _Search, start: Tensor) -> str:
    """Minimise from a strictly feasible start, until something stops it; returns why it stopped."""
    problem = search.problem
    if not all(bool(layer.center.all()) for layer in problem.layers):
        return "layers are not coupled by the objective"
    place = _Place.at(problem, start, start)
    if place is None:
        return "the start is not strictly feasible"
    point = _Iterate(place)
    for _ in range(_PATIENCE):
        vectors, info = torch.linalg.cholesky_ex(point.dual)
        late, lower = search.late(), 0.0
        if int(info) == 0 and (point.gap < _NEAR or late):  # before, it would be of no use
            lower = point.place.repaired(point.place.basis @ vectors)
        if search.report(point.place.largest, point.place.eta * start, lower):
            return "optimal within the tolerance"
        if late:
            return "time limit"
        if point.gap < _NEAR and point.place.largest > lower * (1 + _FAR * point.gap + 1e-4):
            return "the path was left"
        if int(info) or not point.prepare():
            return "singular to working precision"
        predictor = point.direction(0.0)
        primal, dual = point.steps(predictor, vectors)
        share = (point.ahead(predictor, primal, dual) / point.mu) ** 2 if min(primal, dual) > 0.3 else 0.5
        corrector = point.direction(min(1.0, max(1e-4, share)) * point.mu, predictor)
        if not point.move(corrector, *point.steps(corrector, vectors)) > _SHORTEST:
            return "no further progress of interior points"
    return "iteration limit of interior points"
