r"""Square roots of positive definite matrices, in the two flavours that the paper uses.

A *root* of :math:`M = G^\top G` is any :math:`R` with :math:`R^\top R = M`. The symmetric one is unique and
takes a singular value decomposition of :math:`G`; the upper triangular one (Cholesky) takes a QR
factorisation. The product :math:`G^\top G` is never formed, so no digits are lost to squaring. Two roots of
one matrix differ by an orthogonal factor.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ldlt.errors import OptionError, ShapeError

__all__ = ["Root", "contraction", "gram_root", "left_solve", "right_solve"]

Root = Literal["symmetric", "cholesky"]


class _SymmetricRoot(torch.autograd.Function):
    """Symmetric root of ``G'G`` whose derivative has no poles at repeated singular values.

    Differentiating an eigendecomposition divides by the gaps of the spectrum. The root itself is smooth: its
    derivative solves a Sylvester equation, which in the eigenbasis divides by sums of singular values
    instead.
    """

    @staticmethod
    def forward(ctx: Any, generator: Tensor) -> Tensor:
        _, values, vectors = torch.linalg.svd(generator, full_matrices=False)
        ctx.save_for_backward(generator, values, vectors)
        return (vectors.mT * values) @ vectors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        generator, values, vectors = ctx.saved_tensors
        inner = vectors @ (grad + grad.mT) @ vectors.mT
        return generator @ vectors.mT @ (inner / (values.unsqueeze(-1) + values)) @ vectors


def gram_root(generator: Tensor, kind: Root = "symmetric") -> Tensor:
    r"""Root :math:`R` of a Gram matrix: :math:`R^\top R = G^\top G`.

    Args:
        generator: The matrix :math:`G` with full column rank, shape ``(k, d)``, ``k >= d``.
        kind: ``"symmetric"``, or ``"cholesky"`` for the upper triangular root with positive diagonal.

    Returns:
        The root, shape ``(d, d)``, once differentiable.

    Raises:
        ShapeError: If the generator is not a matrix with at least as many rows as columns.
        OptionError: If ``kind`` is unknown.

    Example:
        >>> gram_root(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).diagonal().tolist()
        [3.0, 2.0]
    """
    if generator.dim() != 2 or generator.shape[0] < generator.shape[1]:
        raise ShapeError(f"a generator of shape {tuple(generator.shape)} has no full column rank")
    if kind == "symmetric":
        return _SymmetricRoot.apply(generator)
    if kind == "cholesky":
        upper = torch.linalg.qr(generator).R
        signs = torch.where(upper.diagonal() < 0, -1.0, 1.0).to(upper.dtype)
        return signs.unsqueeze(-1) * upper
    raise OptionError(f"root '{kind}' is neither 'symmetric' nor 'cholesky'")


def left_solve(factor: Tensor, rhs: Tensor, kind: Root, *, transpose: bool = False) -> Tensor:
    r"""Apply :math:`R^{-1}` (or :math:`R^{-\top}`) from the left, with the structure of the root in mind."""
    matrix = factor.mT if transpose else factor
    if kind == "cholesky":
        return torch.linalg.solve_triangular(matrix, rhs, upper=not transpose)
    return torch.linalg.solve(matrix, rhs)


def right_solve(lhs: Tensor, factor: Tensor, kind: Root) -> Tensor:
    r"""Apply :math:`R^{-1}` from the right."""
    return left_solve(factor, lhs.mT, kind, transpose=True).mT


def contraction(weight: Tensor, alpha: Tensor, kind: Root) -> tuple[Tensor, Tensor]:
    r"""The paper's map from a free matrix to a contraction, :math:`U = W R^{-1}`.

    Here :math:`R^\top R = \alpha I + W^\top W`, hence :math:`\|U\|_2^2 = \|W\|_2^2 / (\alpha + \|W\|_2^2) <
    1`.

    Args:
        weight: The free matrix :math:`W`, shape ``(p, d)``.
        alpha: Positive scalar tensor; zero is allowed if ``weight`` has full column rank.
        kind: Which root to use.

    Returns:
        ``(U, R)`` of shapes ``(p, d)`` and ``(d, d)``.
    """
    eye = torch.eye(weight.shape[-1], dtype=weight.dtype, device=weight.device)
    upper = gram_root(torch.cat([weight, alpha.sqrt() * eye]), kind)
    return right_solve(weight, upper, kind), upper
