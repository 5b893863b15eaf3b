r"""Batches of matrices with one error bound each: the norm-wise counterpart of :mod:`ldlt.certificates.ball`.

A :class:`Near` ``(M, ρ)`` stands for all real or complex matrices ``A`` with :math:`\|A - M\|_F \le ρ`, batch by
batch. With ``u = 2^-53``, an inner product of ``n`` complex numbers misses by at most :math:`8(n + 4)u` times that of
the absolute values, whether products of complex numbers take four or three multiplications; hence

.. math:: \|\mathrm{fl}(AB) - AB\|_F \le 8(n + 4)u\,\|A\|_F\|B\|_F .

Radii are computed in floating point and multiplied by ``1 + 2^-30`` (their sums have far less than 2²⁰ terms that
matter), plus ``1e-140`` for what underflows.

:func:`positive_by` proves a lower bound of eigenvalues as :mod:`ldlt.certificates.definite` does: the factor is not
trusted. :func:`roots` are roots of unity whose errors are known, from integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ldlt.certificates.ball import UNIT, Ball

__all__ = ["ROOT", "Near", "norm", "positive_by", "product_error", "raised", "roots"]

_UP = 1 + 2.0**-30
_LEAST = 1e-140
_BITS = 160

ROOT = 2 * UNIT
"""Bound of the error of a root of unity."""


def raised(value: Tensor) -> Tensor:
    """Above a number that was computed from others that are not negative."""
    return value * _UP + _LEAST


def norm(matrix: Tensor) -> Tensor:
    """Upper bounds of Frobenius norms, (…)."""
    flat = matrix.resolve_conj().flatten(-2)
    return raised(torch.linalg.vector_norm(torch.view_as_real(flat).flatten(-2) if flat.is_complex() else flat, dim=-1))


def product_error(terms: int, left: Tensor, right: Tensor) -> Tensor:
    """Bound of the error of a product of matrices with these norms."""
    return raised(8 * (terms + 4) * UNIT * left * right)


@dataclass(frozen=True, eq=False)
class Near:
    """All matrices near some.

    Attributes:
        mid: (…, m, n), float64 or complex128.
        rad: Bounds of the Frobenius norms of the errors, (…), float64.
    """

    mid: Tensor
    rad: Tensor

    @classmethod
    def of(cls, ball: Ball) -> Near:
        """The matrices of a ball, in a batch of one."""
        mid = torch.from_numpy(ball.mid.copy())[None]
        if ball.rad is None:
            return cls(mid, mid.new_zeros(1))
        return cls(mid, norm(torch.from_numpy(ball.rad.copy())[None]))

    @property
    def size(self) -> Tensor:
        """Upper bounds of the norms."""
        return raised(norm(self.mid) + self.rad)

    @property
    def mH(self) -> Near:
        """The adjoints."""
        return Near(self.mid.mH, self.rad)

    def __add__(self, other: Near) -> Near:
        mid = self.mid + other.mid
        return Near(mid, raised(self.rad + other.rad + 2 * UNIT * norm(mid)))

    def __matmul__(self, other: Near) -> Near:
        left, right = self.mid, other.mid
        if left.is_complex() != right.is_complex():
            left, right = left.to(torch.complex128), right.to(torch.complex128)
        error = product_error(left.shape[-1], norm(left), norm(right))
        return Near(left @ right, raised(error + self.rad * other.size + norm(left) * other.rad))

    def __getitem__(self, index: Tensor) -> Near:
        """Some of the batch."""
        return Near(self.mid[index], self.rad[index])

    def scaled(self, rows: Tensor | float, columns: Tensor | float) -> Near:
        """``diag(rows) A diag(columns)`` with powers of two, (m,) and (n,): without rounding."""
        rows, columns = torch.as_tensor(rows, dtype=torch.float64), torch.as_tensor(columns, dtype=torch.float64)
        mid = rows.reshape(-1, 1) * self.mid * columns
        return Near(mid, raised(self.rad * rows.max() * columns.max()))

    def times(self, factor: float) -> Near:
        """A multiple by the quotient of two small whole numbers, rounded once."""
        mid = self.mid * factor
        return Near(mid, raised(self.rad * abs(factor) + 4 * UNIT * norm(mid)))


def positive_by(matrix: Near, wanted: Tensor) -> Tensor:
    r"""Which Hermitian matrices of a batch have no eigenvalue below ``wanted``, (…) booleans.

    With any lower triangular ``L``, :math:`A - μI = LL^* + (A - μI - LL^*) \succeq 0` if the last term has a norm of
    at most the ``δ`` by which ``L`` was shifted further.
    """
    mid, n = matrix.mid, matrix.mid.shape[-1]
    trace = mid.diagonal(dim1=-2, dim2=-1).abs().sum(-1)  # the squared norm of the factor
    shift = raised(1.001 * matrix.rad + 32 * (n + 4) * UNIT * (norm(mid) + trace))
    lower = mid.clone()
    lower.diagonal(dim1=-2, dim2=-1).sub_((wanted + shift)[..., None])
    factor, info = torch.linalg.cholesky_ex(lower)
    factor = factor.tril()
    rest = factor @ factor.mH - lower
    # `lower` itself misses by the rounding of its diagonal.
    error = (
        norm(rest) + product_error(n, norm(factor), norm(factor)) + 4 * UNIT * (norm(lower) + norm(mid)) + matrix.rad
    )
    return (info == 0) & (raised(error) <= shift)  # NaN compares as false


@lru_cache(maxsize=64)
def roots(count: int) -> Tensor:
    r"""``exp(2πi k / count)`` for all k, (count,) complex128, each within :data:`ROOT` of it.

    Cosine and sine come from their series in whole numbers of 160 bits, so that only the rounding to float64 remains.
    """
    one = 1 << _BITS

    def arctan(inverse: int) -> int:
        power, total, k = one // inverse, 0, 0
        while power:
            total += (-1) ** k * (power // (2 * k + 1))
            power //= inverse * inverse
            k += 1
        return total

    turn = 8 * (4 * arctan(5) - arctan(239))  # 2π, by Machin's formula

    def value(k: int) -> complex:
        angle, term, k_th = turn * k // count, one, 0
        parts = [0, 0]
        while term:
            parts[k_th % 2] += (-1) ** (k_th // 2) * term
            k_th += 1
            term = term * angle // one // k_th
        return complex(parts[0] / one, parts[1] / one)  # quotients of whole numbers are rounded correctly

    return torch.tensor([value(k if 2 * k <= count else k - count) for k in range(count)], dtype=torch.complex128)
