r"""Matrices with error bounds: every operation returns a set that contains the exact result.

A :class:`Ball` ``(M, R)`` stands for all matrices ``A`` with :math:`|A - M| \le R`, entry by entry. *Enclosure*, the
theorem behind this module: if ``A`` lies in the ball ``a`` and ``B`` in ``b``, then ``A + B`` lies in ``a + b``,
``A * B`` (entry by entry) in ``a * b`` and ``A B`` in ``a @ b``, where the right-hand sides are computed in float64.

The arithmetic that is assumed is IEEE 754 double precision, rounded to nearest, with ``u = 2^-53``; results below the
normal range may be flushed to zero. :func:`arithmetic_is_ieee` looks for a processor that is set up otherwise. Then

* ``fl(a + b)`` misses ``a + b`` by exactly the number that Knuth's *two-sum* finds (no underflow in additions);
* :math:`|\mathrm{fl}(ab) - ab| \le u\,|\mathrm{fl}(ab)| + τ`, with ``τ = 2^-1021`` for underflow;
* an inner product of which ``n`` terms are not zero, summed in *any* order, with or without fused multiply-add, obeys
  :math:`|\mathrm{fl}(x'y) - x'y| \le γ_n |x|'|y| + 2nτ`, :math:`γ_n = nu/(1 - nu)`: Higham, *Accuracy and Stability of
  Numerical Algorithms* (2002), section 3.1. Terms that are zero are added without error and do not count; if the
  products themselves are exact (factors that are powers of two), ``n − 1`` roundings remain. Any conventional matrix
  product, blocked or threaded, is covered (OpenBLAS, MKL); algorithms of Strassen's kind are not.

Midpoint and radius with such a-priori bounds need no change of the rounding mode: S. M. Rump, *Fast and parallel
interval arithmetic*, BIT 39 (1999), and *Verification methods*, Acta Numerica 19 (2010), section 9. Radii are sums of
numbers that are not negative, rounded upwards: after one operation to the next float, after a product by the same
``γ_n``. An overflow ends in an infinity or NaN, never in a wrong finite number; whoever uses a ball checks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["TINY", "UNIT", "Ball", "add_up", "arithmetic_is_ieee", "divide_up", "gamma", "multiply_up", "product_up"]

Array = NDArray[np.float64]

UNIT = 2.0**-53
"""``u``, the largest relative error of one rounding."""

TINY = 2.0**-1021
"""``τ``, above the error of one operation that underflows, even if it is flushed to zero."""

# Smaller numbers may come from an underflow; far above its reach, so that no care is needed near the edge.
_SAFE = 2.0**-900


def arithmetic_is_ieee() -> bool:
    """Whether a few sums show double precision, rounded to nearest even, with gradual underflow."""
    one, half_ulp, least = (np.array([v]) for v in (1.0, UNIT, 2.0**-1022))
    even = one + half_ulp == one and (one + 2 * half_ulp) + half_ulp == one + 4 * half_ulp
    symmetric = -one - half_ulp == -one and one + 1.5 * half_ulp == one + 2 * half_ulp
    return bool(even and symmetric and (least * 0.5 != 0) and (least * 0.5) * 2 == least)


def gamma(count: int) -> float:
    """An upper bound of ``γ_n = nu/(1 − nu)``; 0 for n ≤ 0.

    Raises:
        OverflowError: ``nu`` is not small, which takes more than 10¹³ terms.
    """
    if count <= 0:
        return 0.0
    if count > 2**43:
        raise OverflowError("too many terms for an error bound")
    # nu and 1 − nu are rounded at most once; each step is moved to the safe side.
    return float(np.nextafter(count * UNIT / np.nextafter(1 - count * UNIT, 0.0), np.inf)) * (1 + 4 * UNIT)


def add_up(*terms: Any) -> Any:
    """Upper bound of a sum of numbers that are not negative."""
    total = terms[0]
    for term in terms[1:]:
        total = np.nextafter(total + term, np.inf)
    return total


def multiply_up(left: Any, right: Any) -> Any:
    """Upper bound of a product, entry by entry, of numbers that are not negative."""
    return np.nextafter(left * right, np.inf) + TINY


def divide_up(left: Any, right: Any) -> Any:
    """Upper bound of ``left / right ≥ 0``, entry by entry, with ``right > 0``."""
    return np.nextafter(left / right, np.inf) + TINY


def product_up(left: Array, right: Array) -> Array:
    r"""Upper bound of the product of matrices (or matrix and vector) that are not negative.

    From :math:`\mathrm{fl}(AB) \ge (1 - γ_n)AB - 2nτ` and :math:`(1 - γ_n)^{-1} \le 1 + 2γ_n`.
    """
    n = left.shape[-1]
    found: Array = left @ right
    return multiply_up(np.nextafter(found + 2 * n * TINY, np.inf), 1 + 2 * gamma(n + 2))


def _is_power(values: Array) -> NDArray[np.bool_]:
    """Whether an entry is zero or plus or minus a power of two of ordinary size: products with it are exact."""
    mantissa, exponent = np.frexp(values)
    return (mantissa == 0) | ((np.abs(mantissa) == 0.5) & (np.abs(exponent) < 60))


def _two_sum(left: Array, right: Array) -> tuple[Array, Array]:
    """``fl(a + b)`` and its exact error (Knuth)."""
    total = left + right
    virtual = total - left
    return total, (left - (total - virtual)) + (right - virtual)


@dataclass(frozen=True, eq=False)
class Ball:
    r"""All arrays ``A`` with :math:`|A - \text{mid}| \le \text{rad}`.

    Attributes:
        mid: Midpoints, float64.
        rad: Radii of the same shape, or None for a single exact array.
    """

    mid: Array
    rad: Array | None = None

    @classmethod
    def exact(cls, values: Any) -> Ball:
        """The array as it is; its entries must be float64 numbers (float32 converts without error)."""
        return cls(np.asarray(values, dtype=np.float64))

    @classmethod
    def between(cls, low: Any, high: Any) -> Ball:
        """The smallest ball found around ``[low, high]``, entry by entry."""
        low, high = np.asarray(low, dtype=np.float64), np.asarray(high, dtype=np.float64)
        if bool((low == high).all()):
            return cls(low)
        mid = low / 2 + high / 2
        return cls(mid, np.nextafter(np.maximum(high - mid, mid - low), np.inf))

    @classmethod
    def eye(cls, size: int) -> Ball:
        """The identity (size, size)."""
        return cls(np.eye(size))

    @classmethod
    def concatenate(cls, balls: Sequence[Ball], axis: int = 0) -> Ball:
        """Stack along an axis."""
        mid = np.concatenate([b.mid for b in balls], axis)
        if all(b.rad is None for b in balls):
            return cls(mid)
        return cls(mid, np.concatenate([b.radius for b in balls], axis))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the arrays."""
        return self.mid.shape

    @property
    def radius(self) -> Array:
        """Radii as an array."""
        return np.zeros(self.mid.shape) if self.rad is None else self.rad

    @property
    def magnitude(self) -> Array:
        """Upper bound of ``|A|``."""
        size: Array = np.abs(self.mid)
        return size if self.rad is None else np.where(self.rad == 0, size, add_up(size, self.rad))

    @property
    def T(self) -> Ball:
        """The transposes."""
        return Ball(self.mid.T, None if self.rad is None else self.rad.T)

    def __getitem__(self, index: Any) -> Ball:
        return Ball(self.mid[index], None if self.rad is None else self.rad[index])

    def __neg__(self) -> Ball:
        return Ball(-self.mid, self.rad)

    def __add__(self, other: Ball) -> Ball:
        mid, error = _two_sum(self.mid, other.mid)
        if self.rad is None and other.rad is None and not error.any():
            return Ball(mid)
        rad = add_up(np.abs(error), self.radius, other.radius)
        return Ball(mid, np.where((error == 0) & (self.radius == 0) & (other.radius == 0), 0.0, rad))

    def __sub__(self, other: Ball) -> Ball:
        return self + (-other)

    def __mul__(self, other: Ball) -> Ball:
        """Product entry by entry, with broadcasting."""
        mid: Array = self.mid * other.mid
        rounded = ~(_is_power(self.mid) | _is_power(other.mid)) | (
            (np.abs(mid) < _SAFE) & (self.mid != 0) & (other.mid != 0)
        )
        if self.rad is None and other.rad is None and not rounded.any():
            return Ball(mid)
        rad = np.where(rounded, UNIT * np.abs(mid) + TINY, 0.0)
        if self.rad is not None:
            rad = add_up(rad, multiply_up(self.rad, other.magnitude))
        if other.rad is not None:
            rad = add_up(rad, multiply_up(np.abs(self.mid), other.rad))
        nothing = (self.magnitude == 0) | (other.magnitude == 0)  # zero times a number is exact
        return Ball(mid, np.where(nothing, 0.0, rad))

    def __matmul__(self, other: Ball) -> Ball:
        r"""Product of matrices, (m, n) and (n, k).

        .. math:: |AB - \mathrm{fl}(M_A M_B)| \le |M_A|(R_B + γ|M_B|) + R_A(|M_B| + R_B) + 2nτ
        """
        n = self.shape[-1]
        mid: Array = self.mid @ other.mid
        left, right = np.abs(self.mid), np.abs(other.mid)
        terms = int(min((left != 0).sum(1).max(initial=0), (right != 0).sum(0).max(initial=0)))
        powers = bool(_is_power(self.mid).all() or _is_power(other.mid).all())
        small = any(bool(((a > 0) & (a < _SAFE)).any()) for a in (left, right))
        if terms <= 1 and powers and not small and self.rad is None and other.rad is None:
            return Ball(mid)  # at most one exact product in every sum
        bound = gamma(terms)
        inner = multiply_up(right, bound)
        if other.rad is not None:
            inner = add_up(inner, other.rad)
        rad = add_up(product_up(left, inner), np.float64(2 * n * TINY))
        if self.rad is not None:
            rad = add_up(rad, product_up(self.rad, other.magnitude))
        # Sums of zeros only are exact.
        inside = self.magnitude.any(0) & other.magnitude.any(1)
        rad[~self.magnitude[:, inside].any(1)] = 0.0
        rad[:, ~other.magnitude[inside].any(0)] = 0.0
        return Ball(mid, rad)

    def is_finite(self) -> bool:
        """Whether no entry overflowed."""
        return bool(np.isfinite(self.mid).all() and (self.rad is None or np.isfinite(self.rad).all()))
