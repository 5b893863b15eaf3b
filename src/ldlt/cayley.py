r"""The Cayley transform of a free matrix: rows that are orthonormal by construction.

For free :math:`X \in \mathbb C^{q \times q}`, :math:`Y \in \mathbb C^{p \times q}` let
:math:`Z = X - X^* + Y^* Y`. Then

.. math::

    A^* = (I + Z)^{-1} (I - Z), \qquad B^* = -2\,Y (I + Z)^{-1}, \qquad A A^* + B B^* = I .

Indeed :math:`A^* = (I - Z)(I + Z)^{-1}` as well, and with :math:`Z + Z^* = 2\,Y^* Y`

.. math::

    (I + Z)^* (A A^* + B B^*) (I + Z) = (I - Z)^* (I - Z) + 4\,Y^* Y = (I + Z)^* (I + Z) .

:math:`I + Z` is always invertible: its symmetric part is :math:`I + Y^* Y \succeq I`.

**Rounding.** The error of orthogonality is at most of the order :math:`u\,\|Z\|` for unit roundoff :math:`u`:
harmless in float64. In float32 it was 2e-6 and 2e-5 for Gaussian free matrices of Frobenius norm 100 and
1000.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ldlt.errors import ShapeError
from ldlt.gram import gram

__all__ = ["cayley", "factorise", "solve_factored"]


def cayley(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Map free ``(X, Y)`` to ``(A, B)`` with ``AA^* + BB^* = I``. Leading axes are batched; real or complex.

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
    z = x.mH - x + gram(y)  # Z^*
    rows = _solve(eye + z, torch.cat((eye - z, -2.0 * y.mH), dim=-1))
    return rows[..., :q], rows[..., q:]


def _solve(matrix: Tensor, rhs: Tensor) -> Tensor:
    """``M^{-1} R``, factorised once for value and gradient."""
    if torch.compiler.is_compiling():
        return torch.linalg.solve(matrix, rhs)
    return solve_factored(matrix, factorise(matrix), rhs, False)


def factorise(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``LU`` in one matrix, and how its rows are exchanged and put back: ``M[order] = LU``."""
    with torch.no_grad():
        lu, pivots = torch.linalg.lu_factor(matrix)
        swaps, _, _ = torch.lu_unpack(lu, pivots, unpack_data=False)  # P, M = PLU
        swaps = swaps.real if swaps.is_complex() else swaps
        places = torch.arange(matrix.shape[-1], dtype=swaps.dtype, device=matrix.device)
        return lu, (swaps.mT @ places).long(), (swaps @ places).long()


def solve_factored(matrix: Tensor, factors: tuple[Tensor, Tensor, Tensor], rhs: Tensor, adjoint: bool) -> Tensor:
    """``M^{-1} R`` or, if ``adjoint``, ``M^{-*} R``, with the factors of :func:`factorise`."""
    return cast(Tensor, _Solve.apply(matrix, *factors, rhs, adjoint))


def _taken(rows: Tensor, order: Tensor) -> Tensor:
    return rows[order] if order.dim() == 1 else rows.take_along_dim(order[..., None], -2)


class _Solve(torch.autograd.Function):
    """``M^{-1} R`` or ``M^{-*} R`` from a given factorisation ``M[order] = LU``.

    ``torch.linalg.solve`` factorises M anew for every right side and for every transpose, and ``lu_solve`` solves from
    the left, which takes a BLAS longer than the transposed system from the right.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, lu: Tensor, order: Tensor, back: Tensor, rhs: Tensor, adjoint: bool) -> Tensor:
        solve = torch.linalg.solve_triangular
        if adjoint:  # M^* R is the conjugate of M' R̄, and M' = U'L'P'
            half = solve(lu, rhs.conj().contiguous().mT, upper=True, left=False)
            return _taken(solve(lu, half, upper=False, left=False, unitriangular=True).mT, back).conj()
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
        outer = output @ grad.mH if ctx.adjoint else grad @ output.mH
        return -outer, None, None, None, grad, None
