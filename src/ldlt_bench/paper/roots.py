r"""Square roots of positive definite matrices, in the two flavours that the paper uses.

A *root* of :math:`M = G^\top G` is any :math:`R` with :math:`R^\top R = M`. The symmetric one is unique and
takes a singular value decomposition of :math:`G`; the upper triangular one (Cholesky) takes a QR
factorisation. The product :math:`G^\top G` is never formed, so no digits are lost to squaring. Two roots of
one matrix differ by an orthogonal factor.

Below them, the checks on free parameters that the constructions share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ldlt.check import choice
from ldlt.errors import OptionError, ShapeError

Root = Literal["symmetric", "cholesky"]
Alpha = float | Tensor | Sequence[float | Tensor]


class _SymmetricRoot(torch.autograd.Function):
    """Symmetric root of ``G'G``: its derivative divides by sums of singular values, not by their gaps."""

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
    r"""Root :math:`R` of a Gram matrix, :math:`R^\top R = G^\top G`; G (k, d) has full column rank.

    Example:
        >>> gram_root(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).diagonal().tolist()
        [3.0, 2.0]
    """
    choice("root", kind, ("symmetric", "cholesky"))
    if generator.dim() != 2 or generator.shape[0] < generator.shape[1]:
        raise ShapeError(f"a generator of shape {tuple(generator.shape)} has no full column rank")
    if kind == "symmetric":
        return cast(Tensor, _SymmetricRoot.apply(generator))
    upper = torch.linalg.qr(generator).R
    return torch.where(upper.diagonal() < 0, -1.0, 1.0).to(upper)[:, None] * upper


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
    r"""The paper's :math:`(U, R)`: :math:`U = W R^{-1}`, :math:`R^\top R = \alpha I + W^\top W`, hence ``‖U‖ < 1``."""
    eye = torch.eye(weight.shape[-1]).to(weight)
    upper = gram_root(torch.cat([weight, alpha.sqrt() * eye]), kind)
    return right_solve(weight, upper, kind), upper


def _visible() -> bool:
    """Whether values can be looked at: under ``vmap`` they cannot."""
    return not torch._C._are_functorch_transforms_active()


def alpha_values(alpha: Alpha, count: int, like: Tensor) -> list[Tensor]:
    """One scalar tensor for each free matrix, from one common number or one number each."""
    single = isinstance(alpha, int | float) or (isinstance(alpha, Tensor) and alpha.dim() == 0)
    given: Any = [alpha] * count if single else alpha
    values = [torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in given]
    if len(values) != count or any(value.dim() for value in values):
        raise ShapeError(f"{count} values of alpha are needed (skip, hidden maps, output), not {len(values)}")
    for k, number in enumerate([float(value.detach()) for value in values] if _visible() else []):
        if not 0 <= number < math.inf or (number == 0 and k < count - 1):
            raise OptionError(f"alpha[{k}] = {number} is not a positive finite number")
    return values


def check_chain(A: Tensor, W: Sequence[Tensor], B: Tensor) -> None:
    """Refuse matrices that do not form a residual block."""
    shapes = [tuple(matrix.shape) for matrix in (A, *W, B)]
    if not W or any(len(shape) != 2 for shape in shapes):
        raise ShapeError(f"a residual block needs matrices, and at least one hidden one; not shapes {shapes}")
    widths = [A.shape[1], *(matrix.shape[0] for matrix in W)]
    if [matrix.shape[1] for matrix in (*W, B)] != widths or B.shape[0] != A.shape[0]:
        raise ShapeError(f"matrices of shapes {shapes} do not form a residual block")


def check_multipliers(W: Sequence[Tensor], multipliers: Sequence[Tensor]) -> None:
    """Refuse multipliers that are not one positive vector for each hidden layer."""
    for weight, diagonal in zip(W, multipliers, strict=True):
        if diagonal.shape != weight.shape[:1]:
            raise ShapeError(f"multipliers of shape {tuple(diagonal.shape)}, not {tuple(weight.shape[:1])}")
        values = diagonal.detach()
        if _visible() and not bool((torch.isfinite(values) & (values > 0)).all()):
            raise OptionError("a multiplier is not positive and finite")
