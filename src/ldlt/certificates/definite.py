r"""A floating-point Cholesky factorisation as a proof that a matrix is positive semidefinite.

**Theorem.** Let ``A`` be a symmetric matrix in the ball ``(M, R)``, ``L`` *any* real lower triangular matrix, ``δ`` a
number, and ``E = M − δI − LL'``. If for some vector ``x > 0``

.. math:: (|E| + R)\,x \le e\,x \quad\text{entry by entry, with}\quad e \le δ,

then ``A ⪰ (δ − e) I ⪰ 0``.

*Proof.* ``A = LL' + δI + E + (A − M)``. The first term is positive semidefinite whatever ``L`` is. The spectral norm of
the symmetric matrix ``E + (A − M)`` is its spectral radius, not larger than that of ``|E| + R``, which is not
negative; and for such a matrix ``Bx ≤ ex`` with ``x > 0`` gives ``ρ(B) ≤ e`` (Collatz, Wielandt). ∎

So nothing has to be assumed about how ``L`` was found: an error in LAPACK, a blocked or recursive variant, a division
done as a product with a reciprocal, another precision or another machine may spoil the factor, and then the test fails,
but it cannot succeed wrongly. This is what is gained over the a-priori test of Rump (*Verification of positive
definiteness*, BIT 46 (2006)), where success of the factorisation of ``M − δI`` with
``δ ≥ (1 − γ_{N+1})^{-1} γ_{N+1} tr(M) + ‖R‖`` is the proof; there the factorisation itself is trusted.

``|E|`` is bounded from quantities that are computed: with ``T = fl(LL')``, from :mod:`ldlt.certificates.ball`,

.. math:: |E|_{ij} \le |T - M + δI|_{ij} + γ_{n_i}(|L||L|')_{ij} + 2Nτ,

``n_i`` the number of entries of row ``i`` of ``L`` that are not zero (a sum has no more terms than that), ``τ`` the
underflow term, and the first difference rounded upwards. ``(|L||L|')x`` costs two products with a vector, ``T`` as
much as the factorisation, and it is made panel by panel: beside ``M``, ``R`` and ``L`` no large matrix is held. The
order of the error is ``n u ‖|L|‖²``, in practice far below the a-priori ``N u tr(M)``: ``n`` and ``‖|L|‖`` see the
sparsity of ``L``, which is that of the network.

Before that, ``A`` is scaled to ``DAD`` with powers of two (without error, and ``DAD ⪰ 0`` iff ``A ⪰ 0``), so that its
diagonal lies in [1/2, 2) and ``δ`` is measured against every coordinate's own size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ldlt.certificates.ball import TINY, UNIT, Ball, add_up, divide_up, gamma, multiply_up, product_up

__all__ = ["Definite", "is_semidefinite", "rounding_error", "scaled"]

Array = NDArray[np.float64]
_PANEL = 256
_ATTEMPTS = 4


@dataclass(frozen=True)
class Definite:
    """Outcome of the test.

    Attributes:
        holds: Whether every symmetric matrix of the ball is proven positive semidefinite.
        margin: Proven lower bound of the smallest eigenvalue after scaling to a diagonal near one; -inf if none.
        error: ``e``, the size of the rounding errors on the same scale; NaN if no factor was found.
        reason: Why it failed; empty if it holds.
    """

    holds: bool
    margin: float
    error: float
    reason: str = ""


@np.errstate(all="ignore")  # overflow and NaN end in an error that is not finite
def is_semidefinite(matrix: Ball, safety: float = 1.0) -> Definite:
    """Test all symmetric matrices of a ball.

    Args:
        matrix: (N, N), of which the lower triangle is read. **It is scaled in place.**
        safety: Ask for ``δ ≥ safety · e``: more than 1 leaves room for another machine's rounding.
    """
    if not matrix.is_finite():
        return _failed("a number overflowed")
    size = len(matrix.mid)
    diagonal = matrix.mid.diagonal()
    if not (diagonal > 0).all():
        place = int(np.argmin(diagonal))
        return _failed(f"diagonal entry {place} is {diagonal[place]:.3g}, not positive")
    if size and not (diagonal.min() > 2.0**-400 and diagonal.max() < 2.0**400):
        return _failed("the diagonal spans too many orders of magnitude")
    mid, rad, _ = scaled(matrix)
    diagonal = mid.diagonal().copy()
    shift = _guess(mid, rad)
    failed = math.inf  # the smallest shift for which there was no factor
    error = math.nan
    for _ in range(_ATTEMPTS):
        np.fill_diagonal(mid, diagonal - shift)
        # check=False so that a failure is a result, not an exception; the strict upper triangle is not read.
        factor, info = torch.linalg.cholesky_ex(torch.from_numpy(mid), check_errors=False)
        np.fill_diagonal(mid, diagonal)
        if int(info):
            failed = min(failed, shift)
            shift /= 8
            continue
        lower = factor.tril_().numpy()
        del factor
        if not np.isfinite(lower).all():
            return _failed("the factor is not finite")
        error = rounding_error(mid, rad, lower, shift)
        del lower
        if not math.isfinite(error):
            return _failed("the rounding error is not finite")
        if safety * error <= shift:
            return Definite(True, float(np.nextafter(shift - error, -np.inf)), error)
        wanted = 1.25 * safety * error
        if wanted >= failed:
            break
        shift = wanted
    if math.isnan(error):
        return _failed("the matrix has a negative eigenvalue, or one that is zero up to rounding")
    return Definite(False, -math.inf, error, "the smallest eigenvalue is not larger than the rounding errors")


def _failed(reason: str) -> Definite:
    return Definite(False, -math.inf, math.nan, reason)


def scaled(matrix: Ball) -> tuple[Array, Array, Array]:
    """``DMD`` (exact) and ``DRD`` (upper bound) in place of ``M`` and ``R``, and ``D``; the diagonal is positive."""
    _, exponent = np.frexp(matrix.mid.diagonal())
    scale = np.ldexp(1.0, -(exponent // 2))
    mid = matrix.mid
    rad = np.zeros(mid.shape) if matrix.rad is None else matrix.rad
    for start in range(0, len(mid), _PANEL):
        rows = slice(start, start + _PANEL)
        both = scale[rows, None] * scale
        mid[rows] *= both
        rad[rows] = multiply_up(rad[rows], both)  # adds τ, which also covers an underflow of the midpoint
    return mid, rad, scale


def _guess(mid: Array, rad: Array) -> float:
    """A first ``δ``: about the size of the rounding errors. Any number would be valid."""
    sums = np.zeros(len(mid))
    radii = np.zeros(len(mid))
    for start in range(0, len(mid), _PANEL):
        rows = slice(start, start + _PANEL)
        for totals, source in ((sums, np.abs(mid[rows])), (radii, rad[rows])):
            panel = np.tril(source, start)
            totals[rows] += panel.sum(1)
            totals[:] += panel.sum(0)
    width = max(int(np.count_nonzero(mid[-1])), 8)
    return float(2 * radii.max(initial=0.0) + 4 * width * UNIT * sums.max(initial=0.0))


def rounding_error(mid: Array, rad: Array, lower: Array, shift: float) -> float:
    """``e`` of the theorem for ``M``, ``R`` (lower triangles), ``L`` and ``δ``."""
    size = len(mid)
    x = np.ones(size)
    for _ in range(4):  # towards the eigenvector of |L||L|', the larger part; any positive vector is valid
        x = _absolute(lower, _absolute_transposed(lower, x))
        x = np.maximum(x / x.max(), 1e-3)
    terms = np.zeros(size, dtype=np.int64)
    found = np.zeros(size)
    for start in range(0, size, _PANEL):
        stop = min(start + _PANEL, size)
        rows = lower[start:stop, :stop]
        terms[start:stop] = np.count_nonzero(rows, 1)
        product = rows @ lower[:stop, :stop].T  # T, columns up to the diagonal block
        residual = mid[start:stop, :stop] - product
        # Each of the two differences is off by at most u times its result.
        slack = UNIT * np.abs(residual)
        inside = np.arange(stop - start)
        residual[inside, inside + start] -= shift
        slack[inside, inside + start] += UNIT * np.abs(residual[inside, inside + start])
        panel = add_up(np.abs(residual), multiply_up(slack, 1 + 4 * UNIT), rad[start:stop, :stop])
        panel = np.tril(panel, start)
        found[start:stop] = add_up(found[start:stop], product_up(panel, x[:stop]))
        panel[inside, inside + start] = 0.0
        found[:stop] = add_up(found[:stop], product_up(np.ascontiguousarray(panel.T), x[start:stop]))
    bounds = np.array([gamma(n) for n in range(int(terms.max(initial=0)) + 1)])[terms]
    growth = _absolute(lower, _absolute_transposed(lower, x, up=True), up=True)
    under = multiply_up(np.float64(2 * size * TINY), add_up(x.sum(), size * size * UNIT))
    total = add_up(found, multiply_up(bounds, growth), under)
    return float(divide_up(total, x).max(initial=0.0))


def _absolute(lower: Array, x: Array, up: bool = False) -> Array:
    """``|L|x``, or an upper bound of it, without holding ``|L|``."""
    found = np.empty(len(lower))
    for start in range(0, len(lower), _PANEL):
        rows = np.abs(lower[start : start + _PANEL])
        found[start : start + _PANEL] = product_up(rows, x) if up else rows @ x
    return found


def _absolute_transposed(lower: Array, x: Array, up: bool = False) -> Array:
    """``|L|'x``, or an upper bound of it, without holding ``|L|``."""
    found = np.zeros(len(lower))
    for start in range(0, len(lower), _PANEL):
        columns = np.abs(lower[start : start + _PANEL]).T
        part = x[start : start + _PANEL]
        found = add_up(found, product_up(columns, part)) if up else found + columns @ part
    return found
