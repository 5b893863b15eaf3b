r"""The Cayley transform of free matrices, and Gram matrices.

For free X (q, q), Y (p, q) let :math:`Z = X - X^* + Y^* Y`. Then

.. math:: A^* = (I + Z)^{-1} (I - Z), \qquad B^* = -2\,Y (I + Z)^{-1}, \qquad A A^* + B B^* = I ,

because :math:`(I - Z)^*(I - Z) + 4\,Y^* Y = (I + Z)^*(I + Z)` for :math:`Z + Z^* = 2\,Y^* Y`; :math:`I + Z` is always
invertible. Rounding costs orthogonality of the order :math:`u\,\|Z\|`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ldlt.engine.linalg import Function
from ldlt.errors import ShapeError

__all__ = ["CayleyMap", "cayley", "gram"]


class _Gram(Function):
    """``W^*W``: ``W̄ = W (Ḡ + Ḡ^*)`` is one product, where the rule of a product of two matrices takes two."""

    @staticmethod
    def forward(weight: Tensor) -> Tensor:
        return weight.mH @ weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return cast(Tensor, weight @ (grads[0] + grads[0].mH))


def gram(weight: Tensor) -> Tensor:
    """Return ``W^*W`` ``(..., n, n)`` of W ``(..., m, n)``, real or complex.

    Example:
        >>> gram(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2.],
                [2., 4.]])
    """
    if torch.compiler.is_compiling():  # the compiler breaks its graph at functions with a gradient of their own
        return weight.mH @ weight
    return cast(Tensor, _Gram.apply(weight))


def cayley(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Map free ``(X, Y)`` to ``A (..., q, q)`` and ``B (..., q, p)`` with ``AA^* + BB^* = I``; see :class:`CayleyMap`.

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
    vector apply the maps, which is better while there are fewer vectors (rows of real matrices) than rows.

    Args:
        x: Free matrix, ``(..., q, q)``; leading axes are batched, real or complex.
        y: Free matrix, ``(..., p, q)``; p = 0 is allowed and gives an orthogonal A.
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
            self._form(True, torch.compiler.is_compiling())
        return cast(Tensor, self._a)

    def b(self) -> Tensor:
        """B ``(..., q, p)``."""
        if self._b is None:
            self._form(torch.compiler.is_compiling(), True)
        return cast(Tensor, self._b)

    def _form(self, a: bool, b: bool) -> None:
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
    """A matrix that is factorised once, at the first solve, for all solves and their gradients: ``M[order] = LU``."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.factors: tuple[Tensor, Tensor, Tensor] | None = None

    def solve(self, rhs: Tensor, adjoint: bool = False) -> Tensor:
        """``M^{-1} R`` or ``M^{-*} R``; NaN, not an exception, where M is singular."""
        if torch.compiler.is_compiling():
            solution, info = torch.linalg.solve_ex(self.matrix.mH if adjoint else self.matrix, rhs)
            return torch.where((info == 0)[..., None, None], solution, torch.nan)
        if self.factors is None:
            with torch.no_grad():
                lu, pivots, info = torch.linalg.lu_factor_ex(self.matrix)
                lu = torch.where((info == 0)[..., None, None], lu, torch.nan)
                swaps, _, _ = torch.lu_unpack(lu, pivots, unpack_data=False)  # P, M = PLU
                swaps = swaps.real if swaps.is_complex() else swaps
                self.factors = lu, swaps.argmax(-2), swaps.argmax(-1)
        return cast(Tensor, _LUSolve.apply(self.matrix, *self.factors, rhs, adjoint))


def _taken(rows: Tensor, order: Tensor) -> Tensor:
    return rows[order] if order.dim() == 1 else rows.take_along_dim(order[..., None], -2)


class _LUSolve(Function):
    """``M^{-1} R`` or ``M^{-*} R`` from a given factorisation ``M[order] = LU``.

    ``torch.linalg.solve`` factorises M anew for every right side and for every transpose, and ``lu_solve`` solves from
    the left, which takes a BLAS longer than the transposed system from the right.
    """

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
        grad = cast(Tensor, _LUSolve.apply(*factors, grads[0], not ctx.adjoint))
        # d(M^{-1}R) = M^{-1}(dR − dM M^{-1}R)
        outer = output @ grad.mH if ctx.adjoint else grad @ output.mH
        return -outer, None, None, None, grad, None
