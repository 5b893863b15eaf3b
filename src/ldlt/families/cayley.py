r"""The Cayley transform of a free matrix: rows that are orthonormal by construction.

For free :math:`X \in \mathbb R^{q \times q}`, :math:`Y \in \mathbb R^{p \times q}` let
:math:`Z = X - X^\top + Y^\top Y`. Then

.. math::

    A^\top = (I + Z)^{-1} (I - Z), \qquad B^\top = -2\,Y (I + Z)^{-1}, \qquad A A^\top + B B^\top = I .

Indeed :math:`A^\top = (I - Z)(I + Z)^{-1}` as well, and with :math:`Z + Z^\top = 2\,Y^\top Y`

.. math::

    (I + Z)^\top (A A^\top + B B^\top) (I + Z) = (I - Z)^\top (I - Z) + 4\,Y^\top Y = (I + Z)^\top (I + Z) .

:math:`I + Z` is always invertible: its symmetric part is :math:`I + Y^\top Y \succeq I`.

**Rounding.** The error of orthogonality is at most of the order :math:`u\,\|Z\|` for unit roundoff :math:`u`:
harmless in float64. In float32 it was 2e-6 and 2e-5 for Gaussian free matrices of Frobenius norm 100 and
1000.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ldlt.errors import ShapeError
from ldlt.families.gram import gram
from ldlt.families.layer import raise_zeros

__all__ = ["CayleyMap", "cayley", "cayley_rows", "with_norm"]


def cayley(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Map free ``(X, Y)`` to ``(A, B)`` with ``AA' + BB' = I``. Leading axes are batched.

    Args:
        x: Free matrix, ``(..., q, q)``.
        y: Free matrix, ``(..., p, q)``; p = 0 is allowed and gives an orthogonal A.

    Returns:
        A of shape ``(..., q, q)`` and B of shape ``(..., q, p)``.

    Raises:
        ShapeError: If X is not square or Y has another number of columns.

    Example:
        >>> a, b = cayley(torch.randn(3, 3).double(), torch.randn(5, 3).double())
        >>> torch.allclose(a @ a.mT + b @ b.mT, torch.eye(3).double())
        True
    """
    if x.dim() < 2 or y.dim() < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] != y.shape[-1]:
        raise ShapeError(f"expected X (..., q, q) and Y (..., p, q), got {tuple(x.shape)} and {tuple(y.shape)}")
    q = x.shape[-1]
    eye = torch.eye(q, dtype=x.dtype, device=x.device)
    z = x.mT - x + gram(y)  # Z'
    rows = _solve(eye + z, torch.cat((eye - z, -2.0 * y.mT), dim=-1))
    return rows[..., :q], rows[..., q:]


def _solve(matrix: Tensor, rhs: Tensor) -> Tensor:
    """``M^{-1} R``, factorised once for value and gradient."""
    if torch.compiler.is_compiling():
        return torch.linalg.solve(matrix, rhs)
    return cast(Tensor, _Solve.apply(matrix, *_factorise(matrix), rhs, False))


def _factorise(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``LU`` in one matrix, and how its rows are exchanged and put back: ``M[order] = LU``."""
    with torch.no_grad():
        lu, pivots = torch.linalg.lu_factor(matrix)
        swaps, _, _ = torch.lu_unpack(lu, pivots, unpack_data=False)  # P, M = PLU
        places = torch.arange(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
        return lu, (swaps.mT @ places).long(), (swaps @ places).long()


def _taken(rows: Tensor, order: Tensor) -> Tensor:
    return rows[order] if order.dim() == 1 else rows.take_along_dim(order[..., None], -2)


class _Solve(torch.autograd.Function):
    """``M^{-1} R`` or ``M^{-T} R`` from a given factorisation ``M[order] = LU``.

    ``torch.linalg.solve`` factorises M anew for every right side and for every transpose, and ``lu_solve`` solves from
    the left, which takes a BLAS longer than the transposed system from the right.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, lu: Tensor, order: Tensor, back: Tensor, rhs: Tensor, adjoint: bool) -> Tensor:
        solve = torch.linalg.solve_triangular
        if adjoint:  # M' = U'L'P'
            half = solve(lu, rhs.contiguous().mT, upper=True, left=False)
            return _taken(solve(lu, half, upper=False, left=False, unitriangular=True).mT, back)
        half = solve(lu.mT, _taken(rhs, order).contiguous().mT, upper=True, left=False, unitriangular=True)
        return solve(lu.mT, half, upper=False, left=False).mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *factors, _, ctx.adjoint = inputs
        ctx.save_for_backward(*factors, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, Tensor, None]:
        *factors, output = ctx.saved_tensors
        grad = cast(Tensor, _Solve.apply(*factors, grads[0], not ctx.adjoint))
        # d(M^{-1}R) = M^{-1}(dR − dM M^{-1}R)
        outer = output @ grad.mT if ctx.adjoint else grad @ output.mT
        return -outer, None, None, None, grad, None


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
        self.factors = _factorise(self.shifted)

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
        return cast(Tensor, _Solve.apply(self.shifted, *self.factors, v.mT, False)).mT

    def _solve_adjoint(self, v: Tensor) -> Tensor:
        return cast(Tensor, _Solve.apply(self.shifted, *self.factors, v.mT, True)).mT


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
