r"""Cholesky factor of a Gram matrix, with its gradient carried in the factor's own frame.

For a free matrix :math:`W` and :math:`\alpha > 0`

.. math:: M M^* = \alpha I + W W^*, \qquad U = M^{-1} W, \qquad U U^* = I - \alpha M^{-1} M^{-*} \prec I .

Every later use of ``M`` is a solve or a product. Write a perturbation as :math:`dM = M E` with ``E`` lower triangular. Then

.. math:: E = \Phi(M^{-1}\, d(MM^*)\, M^{-*}), \qquad d(M^{-1}B) = M^{-1} dB - E M^{-1} B, \qquad d(MB) = M\,dB + M E B ,

with :math:`\Phi` = lower triangle, diagonal halved. So the cotangent of ``E`` costs one matrix product per use and no triangular
solve, and the whole backward pass of Gram + Cholesky + solve needs a single solve:

.. math:: \bar W = M^{-*}\bigl(\bar U + (P + P^*)\,U\bigr), \qquad P = \Phi(\bar E - \bar U U^*) .

``torch.linalg.cholesky`` followed by ``solve_triangular`` needs four solves and three products more for the same gradient.
To that end :class:`Triangular` holds ``value`` (``M``, constant to autograd) and ``frame`` (``E``, a zero tensor that carries the
gradient). Second derivatives work: the backward formulas are written with the same differentiable verbs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

__all__ = ["Triangular", "gram_cholesky"]

_BLOCK = 192  # below this size LAPACK's own Cholesky is faster than the blocked one


def _cholesky(gram: Tensor) -> Tensor:
    """Lower Cholesky factor; NaN (not an exception) where the matrix is not positive definite.

    Large matrices are split in two, so that most of the work is matrix products: LAPACK's ``potrf`` ran at a fifth of the
    speed of ``gemm`` at size 512. Only the lower triangle of ``gram`` is read.
    """
    n = gram.shape[-1]
    if n <= _BLOCK:
        factor, info = torch.linalg.cholesky_ex(gram)
        return torch.where((info == 0)[..., None, None], factor, torch.nan)
    h = n // 2
    top = _cholesky(gram[..., :h, :h])
    side = torch.linalg.solve_triangular(top.mH, gram[..., h:, :h], upper=True, left=False)
    rest = _cholesky(gram[..., h:, h:] - side @ side.mH)
    zero = torch.zeros_like(side).mT
    return torch.cat([torch.cat([top, zero], -1), torch.cat([side, rest], -1)], -2)


def _phi(matrix: Tensor) -> Tensor:
    """Lower triangle with the diagonal halved: ``phi(S) + phi(S)^* = S`` for Hermitian S."""
    lower = matrix.tril()
    return lower - torch.diag_embed(lower.diagonal(dim1=-2, dim2=-1)) / 2


class _Contract(torch.autograd.Function):
    """``(W, alpha) -> (U, M, E)``; see the module docstring. ``alpha`` is a scalar or one number per row."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gram = weight @ weight.mH
        gram = gram + torch.diag_embed(alpha.to(gram.dtype).expand(gram.shape[:-1]))
        factor = _cholesky(gram)
        contraction = torch.linalg.solve_triangular(factor, weight, upper=False)
        return contraction, factor, torch.zeros_like(factor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        contraction, factor, frame = output
        ctx.mark_non_differentiable(factor)
        ctx.save_for_backward(*inputs, contraction, factor, frame)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, alpha, contraction, factor, frame = ctx.saved_tensors
        grad_u, _, grad_e = grads
        tri = Triangular(factor, frame)
        total = grad_e - grad_u @ contraction.mH
        half = _phi(total)
        grad_w = tri.solve_adjoint(grad_u + (half + half.mH) @ contraction)
        grad_alpha = None
        if ctx.needs_input_grad[1]:
            if alpha.ndim == 0:
                # U(tW, t²α) = U(W, α) and M(tW, t²α) = t M: the derivative along the scaling is tr(Ē), so no solve is needed.
                trace = grad_e.diagonal(dim1=-2, dim2=-1).real.sum()
                grad_alpha = (trace - (grad_w * weight.conj()).real.sum()) / (2 * alpha)
            else:
                # ᾱ = diag(M^{-*} P M^{-1})
                left = tri.solve_adjoint(half)
                inverse = tri.solve(torch.eye(half.shape[-1], dtype=half.dtype, device=half.device).expand_as(half))
                grad_alpha = (left * inverse.mT).sum(-1).real
        return grad_w, grad_alpha


class _Solve(torch.autograd.Function):
    """``M^{-1} B`` or ``M^{-*} B``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: Tensor, frame: Tensor, rhs: Tensor, adjoint: bool) -> Tensor:
        matrix = factor.mH if adjoint else factor
        return torch.linalg.solve_triangular(matrix, rhs, upper=adjoint)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        factor, frame, rhs, ctx.adjoint = inputs
        ctx.save_for_backward(factor, frame, rhs if ctx.adjoint else output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, Tensor, None]:
        factor, frame, kept = ctx.saved_tensors
        tri = Triangular(factor, frame)
        (grad,) = grads
        if ctx.adjoint:  # d(M^{-*}B) = M^{-*}(dB − E^*B)
            grad_rhs = tri.solve(grad)
            grad_frame = -(kept @ grad_rhs.mH) if ctx.needs_input_grad[1] else None
        else:  # d(M^{-1}B) = M^{-1}dB − E M^{-1}B
            grad_rhs = tri.solve_adjoint(grad)
            grad_frame = -(grad @ kept.mH) if ctx.needs_input_grad[1] else None
        return None, grad_frame, grad_rhs, None


class _Dense(torch.autograd.Function):
    """``M`` itself, with gradient: ``dM = M E``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factor: Tensor, frame: Tensor) -> Tensor:
        return factor.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        factor, frame = ctx.saved_tensors
        return None, Triangular(factor, frame).dense().mH @ grads[0]


class Triangular:
    """A lower-triangular factor ``M`` (..., n, n) that can be solved with, multiplied with and differentiated."""

    def __init__(self, value: Tensor, frame: Tensor) -> None:
        self.value = value
        self.frame = frame

    def solve(self, rhs: Tensor) -> Tensor:
        """``M^{-1} rhs``, rhs (..., n, k)."""
        return cast(Tensor, _Solve.apply(self.value, self.frame, rhs, False))

    def solve_adjoint(self, rhs: Tensor) -> Tensor:
        """``M^{-*} rhs``, rhs (..., n, k)."""
        return cast(Tensor, _Solve.apply(self.value, self.frame, rhs, True))

    def dense(self) -> Tensor:
        """``M`` as an ordinary tensor."""
        return cast(Tensor, _Dense.apply(self.value, self.frame))


def gram_cholesky(weight: Tensor, alpha: Tensor) -> tuple[Tensor, Triangular]:
    """``U = M^{-1} W`` and ``M`` with ``M M^* = diag(alpha) + W W^*``.

    Args:
        weight: (..., n, k), real or complex.
        alpha: Positive scalar (shape ``()``) or vector (n,), real.
    """
    contraction, value, frame = _Contract.apply(weight, alpha)  # type: ignore[misc]
    return contraction, Triangular(value, frame)
