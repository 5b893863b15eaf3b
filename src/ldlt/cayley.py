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
harmless in float64.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ldlt.errors import ShapeError
from ldlt.gram import gram

__all__ = ["CayleyMap", "cayley"]


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
    found = CayleyMap(x, y)
    return found.a(), found.b()


class CayleyMap:
    r"""``[A B]`` of free X, Y, formed only when it is asked for.

    With :math:`A = 2 (I + Z^*)^{-1} - I` and :math:`B = -2 (I + Z^*)^{-1} Y^*` one LU factorisation and a solve per
    vector apply the maps; that is the better choice while there are fewer vectors than rows. The verbs on vectors are
    for real matrices, the vectors are rows.

    Args:
        x: Free matrix, ``(..., q, q)``.
        y: Free matrix, ``(..., p, q)``.
        largest: Frobenius norm of ``X - X^*`` and of ``Y^* Y`` above which they are scaled down; None for no limit.

    Raises:
        ShapeError: If X is not square or Y has another number of columns.
    """

    def __init__(self, x: Tensor, y: Tensor, largest: float | None = None) -> None:
        if x.dim() < 2 or y.dim() < 2 or x.shape[-1] != x.shape[-2] or x.shape[-1] != y.shape[-1]:
            raise ShapeError(f"expected X (..., q, q) and Y (..., p, q), got {tuple(x.shape)} and {tuple(y.shape)}")
        self.rows = x.shape[-1]
        self.eye = torch.eye(self.rows, dtype=x.dtype, device=x.device)
        skew, square = x.mH - x, gram(y)
        self.y = y.mH  # Y^*
        if largest is not None:
            share = _share(square, largest)
            skew, square, self.y = skew * _share(skew, largest), square * share, self.y * share.sqrt()
        self.shift = skew + square  # Z^*
        self.plus = _Factorised(self.eye + self.shift)
        self._a: Tensor | None = None
        self._b: Tensor | None = None

    def a(self) -> Tensor:
        """A ``(..., q, q)``."""
        if self._a is None:
            self._form(b=torch.compiler.is_compiling())
        assert self._a is not None
        return self._a

    def b(self) -> Tensor:
        """B ``(..., q, p)``."""
        if self._b is None:
            self._form(a=torch.compiler.is_compiling())
        assert self._b is not None
        return self._b

    def _form(self, a: bool = True, b: bool = True) -> None:
        """Form A, B, or both by one solve: what a compiler sees has no factorisation that two solves could share."""
        eye = self.eye.expand_as(self.shift)
        solved = self.plus.solve(torch.cat((eye, self.y), -1) if a and b else eye if a else self.y)
        if a:
            self._a = 2.0 * solved[..., : self.rows] - self.eye
        if b:
            self._b = -2.0 * (solved[..., self.rows :] if a else solved)

    def apply_a(self, v: Tensor) -> Tensor:
        """``A v`` for rows v ``(m, q)``."""
        return 2.0 * self.plus.solve(v.mT).mT - v

    def apply_b(self, v: Tensor) -> Tensor:
        """``B v`` for rows v ``(m, p)``."""
        return -2.0 * self.plus.solve((v @ self.y.mT).mT).mT

    def apply(self, v: Tensor) -> Tensor:
        """``[A B] v`` for rows v ``(m, q + p)``."""
        head = v[..., : self.rows]
        return 2.0 * self.plus.solve((head - v[..., self.rows :] @ self.y.mT).mT).mT - head

    def adjoint_a(self, v: Tensor) -> Tensor:
        """``A' v`` for rows v ``(m, q)``."""
        return 2.0 * self.plus.solve(v.mT, adjoint=True).mT - v

    def adjoint(self, v: Tensor) -> Tensor:
        """``[A B]' v`` for rows v ``(m, q)``."""
        solved = self.plus.solve(v.mT, adjoint=True).mT
        return torch.cat((2.0 * solved - v, -2.0 * solved @ self.y), dim=-1)


def _share(matrix: Tensor, largest: float) -> Tensor:
    """The factor that brings the Frobenius norm of a matrix down to ``largest``, 1 below; constant to autograd."""
    norm = torch.linalg.vector_norm(matrix.detach(), dim=(-2, -1), keepdim=True)
    return (largest / norm).clamp(max=1.0).to(matrix.real.dtype)


class _Factorised:
    """A matrix that is factorised once, at the first solve, for all solves and their gradients."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.factors: tuple[Tensor, Tensor, Tensor] | None = None

    def solve(self, rhs: Tensor, adjoint: bool = False) -> Tensor:
        """``M^{-1} R`` or ``M^{-*} R``; NaN, not an exception, where M is singular."""
        if torch.compiler.is_compiling():
            solution, info = torch.linalg.solve_ex(self.matrix.mH if adjoint else self.matrix, rhs)
            return torch.where((info == 0)[..., None, None], solution, torch.nan)
        if self.factors is None:
            self.factors = _factorise(self.matrix)
        return cast(Tensor, _Solve.apply(self.matrix, *self.factors, rhs, adjoint))


def _factorise(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``LU`` in one matrix, and how its rows are exchanged and put back: ``M[order] = LU``; NaN if M is singular."""
    with torch.no_grad():
        lu, pivots, info = torch.linalg.lu_factor_ex(matrix)
        lu = torch.where((info == 0)[..., None, None], lu, torch.nan)
        swaps, _, _ = torch.lu_unpack(lu, pivots, unpack_data=False)  # P, M = PLU
        swaps = swaps.real if swaps.is_complex() else swaps
        return lu, swaps.argmax(-2), swaps.argmax(-1)


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
