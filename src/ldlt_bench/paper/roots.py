r"""Square roots of positive definite matrices, in the two flavours that the paper uses.

A *root* of :math:`M = G^\top G` is any :math:`R` with :math:`R^\top R = M`. The symmetric one is unique and
takes a singular value decomposition of :math:`G`; the upper triangular one (Cholesky) takes a QR
factorisation. The product :math:`G^\top G` is never formed, so no digits are lost to squaring. Two roots of
one matrix differ by an orthogonal factor.

Below them, the checks on free parameters that the constructions share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ldlt.errors import OptionError, ShapeError

__all__ = [
    "Alpha",
    "Root",
    "alpha_values",
    "check_chain",
    "check_multipliers",
    "contraction",
    "gram_root",
    "left_solve",
    "right_solve",
]

Root = Literal["symmetric", "cholesky"]
Alpha = float | Tensor | Sequence[float | Tensor]


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
        LdltError: If an argument is out of its range or does not fit the others.

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


def _visible() -> bool:
    """Whether values can be looked at: under ``vmap`` they cannot."""
    return not torch._C._are_functorch_transforms_active()


def alpha_values(alpha: Alpha, count: int, like: Tensor) -> list[Tensor]:
    """One scalar tensor for each free matrix, from one common number or one number each."""
    single = isinstance(alpha, (int, float)) or (isinstance(alpha, Tensor) and alpha.dim() == 0)
    values = [alpha] * count if single else list(alpha)  # type: ignore[arg-type]
    if len(values) != count:
        raise ShapeError(f"{count} values of alpha are needed (skip, hidden maps, output), not {len(values)}")
    tensors = [torch.as_tensor(value, dtype=like.dtype, device=like.device) for value in values]
    for k, value in enumerate(tensors):
        if not _visible():
            continue
        positive = bool(value.detach() > 0) or (k == count - 1 and bool(value.detach() == 0))
        if value.dim() != 0 or not positive or not bool(torch.isfinite(value.detach())):
            raise OptionError(f"alpha[{k}] = {value.tolist()} is not a positive finite number")
    return tensors


def check_chain(W_A: Tensor, W: Sequence[Tensor], W_B: Tensor) -> None:
    """Refuse free matrices that do not form a residual block."""
    if not W:
        raise ShapeError("a residual block needs at least one hidden map")
    if any(matrix.dim() != 2 for matrix in (W_A, *W, W_B)):
        raise ShapeError("free parameters must be matrices")
    widths = [W_A.shape[1], *(matrix.shape[0] for matrix in W)]
    if [matrix.shape[1] for matrix in (*W, W_B)] != widths or W_B.shape[0] != W_A.shape[0]:
        shapes = [tuple(matrix.shape) for matrix in (W_A, *W, W_B)]
        raise ShapeError(f"free matrices of shapes {shapes} do not form a residual block")


def check_multipliers(W: Sequence[Tensor], multipliers: Sequence[Tensor]) -> None:
    """Refuse multipliers that are not one positive vector for each hidden layer."""
    for j, (weight, diagonal) in enumerate(zip(W, multipliers, strict=True)):
        if diagonal.shape != (weight.shape[0],):
            raise ShapeError(f"multipliers[{j}] has shape {tuple(diagonal.shape)}, not {(weight.shape[0],)}")
        values = diagonal.detach()
        if _visible() and not bool((torch.isfinite(values) & (values > 0)).all()):
            raise OptionError(f"multipliers[{j}] has an entry that is not positive and finite")
