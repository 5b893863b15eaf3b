"""Layers of orthonormal rows from the Cayley transform (:mod:`ldlt.cayley`), for dense real matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ldlt.cayley import cayley, factorise, solve_factored
from ldlt.families.layer import raise_zeros
from ldlt.gram import gram

__all__ = ["CayleyMap", "cayley", "cayley_rows", "with_norm"]


class CayleyMap:
    """``[A B]`` of a wide free matrix ``[X Y']``, applied to few vectors without being formed.

    With ``A = 2 (I + Z')^{-1} − I``, ``B = −2 (I + Z')^{-1} Y'`` and rows of vectors: one LU factorisation and a solve
    per vector, the better choice while there are fewer vectors than rows.

    Args:
        weight: Free matrix, ``(q, n)`` with q ≤ n.
    """

    def __init__(self, weight: Tensor) -> None:
        q = weight.shape[-2]
        x, self.y = weight[..., :q], weight[..., q:]  # X and Y'
        self.shifted = torch.eye(q, dtype=x.dtype, device=x.device) + x.mT - x + gram(self.y.mT)  # I + Z'
        self.factors = factorise(self.shifted)

    def b(self, v: Tensor) -> Tensor:
        """``B v`` for rows v ``(b, n − q)``."""
        return -2.0 * self._solve(v @ self.y.mT)

    def rows(self, v: Tensor) -> Tensor:
        """``[A B] v`` for rows v ``(b, n)``."""
        q = self.shifted.shape[-1]
        head = v[..., :q]
        return 2.0 * self._solve(head - v[..., q:] @ self.y.mT) - head

    def a_adjoint(self, v: Tensor) -> Tensor:
        """``A' v`` for rows v ``(b, q)``."""
        return 2.0 * self._solve_adjoint(v) - v

    def adjoint(self, v: Tensor) -> Tensor:
        """``[A B]' v`` for rows v ``(b, q)``."""
        solved = self._solve_adjoint(v)
        return torch.cat((2.0 * solved - v, -2.0 * solved @ self.y), dim=-1)

    def _solve(self, v: Tensor) -> Tensor:
        return solve_factored(self.shifted, self.factors, v.mT, False).mT

    def _solve_adjoint(self, v: Tensor) -> Tensor:
        return solve_factored(self.shifted, self.factors, v.mT, True).mT


def cayley_rows(weight: Tensor) -> Tensor:
    """Map a free matrix to one of the same shape with orthonormal rows (columns, if there are fewer).

    The dense form of Trockman & Kolter (2021): ``[A B]`` for a free ``[X Y']`` when the matrix is wide, the
    transpose when it is tall.

    Args:
        weight: Free matrix, ``(..., m, n)``.
    """
    m, n = weight.shape[-2:]
    if m > n:
        return cayley_rows(weight.mT).mT
    return torch.cat(cayley(weight[..., :m], weight[..., m:].mT), dim=-1)


def with_norm(weight: Tensor, gain: Tensor) -> Tensor:
    """Rescale a free matrix to Frobenius norm ``|gain|`` (a zero matrix stays zero).

    Both published Cayley layers train the norm of the free matrix apart from its direction.
    """
    square = weight.square().sum(dim=(-2, -1), keepdim=True)
    return gain[..., None, None] * weight * raise_zeros(square).rsqrt()
