r"""Block :math:`LDL^\top` factorisation of a symmetric matrix, from its definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ldlt.errors import InfeasibleError, ShapeError

__all__ = ["BlockFactors", "block_ldlt", "right_divide"]


@dataclass(frozen=True, eq=False)
class BlockFactors:
    r"""Blocks of :math:`M = L D L^\top`.

    Attributes:
        L: Rows of the unit lower triangular factor; ``L[i][j]`` for ``j <= i``, identities on the diagonal.
        D: Blocks of the block diagonal factor (the pivots). :math:`M \succeq 0` if and only if each is, as
            long as all but the last are invertible.
    """

    L: tuple[tuple[Tensor, ...], ...]
    D: tuple[Tensor, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Block sizes."""
        return tuple(pivot.shape[0] for pivot in self.D)

    def dense(self) -> tuple[Tensor, Tensor]:
        """Both factors as dense matrices, ``(L, D)``."""
        lower = torch.cat(
            [
                torch.cat([*row, *(self.D[0].new_zeros(row[-1].shape[0], q) for q in self.sizes[len(row) :])], dim=1)
                for row in self.L
            ]
        )
        return lower, torch.block_diag(*self.D)

    def product(self) -> Tensor:
        r"""The matrix :math:`L D L^\top` that was factorised."""
        lower, pivots = self.dense()
        return lower @ pivots @ lower.mT


def right_divide(numerator: Tensor, pivot: Tensor, scale: Tensor, index: int) -> Tensor:
    """Right division by a pivot, refused if the pivot is singular to working precision."""
    spectrum = torch.linalg.svdvals(pivot.detach())
    unit = torch.finfo(pivot.dtype).eps * pivot.shape[0]
    if not bool(spectrum[-1] > unit * torch.maximum(scale, spectrum[0])):
        raise InfeasibleError(f"pivot {index} is singular to working precision: no block factorisation without it")
    return torch.linalg.solve(pivot, numerator, left=False)


def block_ldlt(matrix: Tensor, sizes: Sequence[int]) -> BlockFactors:
    r"""Block :math:`LDL^\top` factorisation from its definition.

    .. math::
        D_j = M_{jj} - \sum_{k<j} L_{jk} D_k L_{jk}^\top, \qquad
        L_{ij} = \Bigl(M_{ij} - \sum_{k<j} L_{ik} D_k L_{jk}^\top\Bigr) D_j^{-1}, \quad i > j .

    No pivoting takes place and the matrix may be indefinite; only the last pivot may be singular.

    Args:
        matrix: Symmetric matrix, shape ``(d, d)``.
        sizes: Positive block sizes with sum ``d``.

    Returns:
        The blocks of both factors.

    Raises:
        ShapeError: If the matrix is not square and symmetric or the sizes do not add up.
        InfeasibleError: If a pivot other than the last is singular to working precision.

    Example:
        >>> factors = block_ldlt(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), [1, 1])
        >>> factors.L[1][0].item(), factors.D[1].item()
        (0.5, 1.5)
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1] or not matrix.is_floating_point():
        raise ShapeError(f"a square real matrix is needed, not {tuple(matrix.shape)} of {matrix.dtype}")
    if not sizes or min(sizes) < 1 or sum(sizes) != matrix.shape[0]:
        raise ShapeError(f"block sizes {tuple(sizes)} do not split {matrix.shape[0]} rows")
    asymmetry = (matrix - matrix.mT).detach().abs().max()
    if not bool(asymmetry <= 100 * torch.finfo(matrix.dtype).eps * matrix.detach().abs().max()):
        raise ShapeError("the matrix is not symmetric")

    source = [torch.split(row, list(sizes), dim=1) for row in torch.split(matrix, list(sizes), dim=0)]
    lower: list[list[Tensor]] = [[] for _ in sizes]
    pivots: list[Tensor] = []
    for j, size in enumerate(sizes):
        scaled = [lower[j][k] @ pivots[k] for k in range(j)]
        pivot = source[j][j] - sum((scaled[k] @ lower[j][k].mT for k in range(j)), matrix.new_zeros(()))
        scale = torch.linalg.matrix_norm(source[j][j].detach(), 2)
        for i in range(j + 1, len(sizes)):
            rest = source[i][j] - sum((lower[i][k] @ scaled[k].mT for k in range(j)), matrix.new_zeros(()))
            lower[i].append(right_divide(rest, pivot, scale, j + 1))
        lower[j].append(torch.eye(size, dtype=matrix.dtype, device=matrix.device))
        pivots.append(pivot)
    return BlockFactors(tuple(tuple(row) for row in lower), tuple(pivots))
