r"""Block :math:`LDL^\top` factors: by definition for any matrix, in closed form for the residual block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InfeasibleError, ShapeError
from .block import ResidualBlock

__all__ = ["BlockFactors", "block_ldlt", "closed_form_factors"]


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


def _divide(numerator: Tensor, pivot: Tensor, scale: Tensor, index: int) -> Tensor:
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
            lower[i].append(_divide(rest, pivot, scale, j + 1))
        lower[j].append(torch.eye(size, dtype=matrix.dtype, device=matrix.device))
        pivots.append(pivot)
    return BlockFactors(tuple(tuple(row) for row in lower), tuple(pivots))


def closed_form_factors(block: ResidualBlock) -> BlockFactors:
    r"""Factors of :meth:`ResidualBlock.lmi` in closed form, for any slopes and multipliers.

    With :math:`s_j = L_j + m_j`, the recursion of the paper, its slips corrected, reads

    .. math::
        D_1 &= \ell^2 I + 2 L_1 m_1 C_1^\top \Lambda_1 C_1 - A^\top A, \\
        D_{j+1} &= 2 \Lambda_j + 2 L_{j+1} m_{j+1} C_{j+1}^\top \Lambda_{j+1} C_{j+1}
                   - s_j^2 \Lambda_j C_j D_j^{-1} C_j^\top \Lambda_j, \\
        L_{(j+1)j} &= -s_j \Lambda_j C_j D_j^{-1}, \qquad
        L_{(n+1)j} = -J_j D_j^{-1} \quad (j < n), \qquad
        L_{(n+1)n} = -(J_n + s_n \Lambda_n C_n) D_n^{-1}, \\
        J_j &= \Upsilon_j B^\top A \Gamma_j, \qquad \Upsilon_j = \prod_{k<j} s_k, \qquad
        \Gamma_j = \prod_{k<j} D_k^{-1} C_k^\top \Lambda_k, \\
        D_{n+1} &= P_{n+1} - B^\top (I + A \Sigma A^\top) B - B^\top F - F^\top B,

    where :math:`P_{n+1} = 2\Lambda_n - s_n^2 \Lambda_n C_n D_n^{-1} C_n^\top \Lambda_n`,
    :math:`\Sigma = \sum_j \Upsilon_j^2 \Gamma_j D_j^{-1} \Gamma_j^\top` and
    :math:`F = \Upsilon_{n+1} A \Gamma_{n+1}`. The two terms with :math:`F` are those that the paper drops.

    Args:
        block: The residual block; it need not be feasible.

    Returns:
        The blocks of both factors, with explicit zeros where the structure has them.

    Raises:
        InfeasibleError: If a pivot other than the last is singular to working precision.
    """
    depth, sizes = block.depth, block.sizes
    eye = torch.eye(sizes[0], dtype=block.A.dtype, device=block.A.device)
    pivots: list[Tensor] = []
    below: list[Tensor] = []  # L_(j+1)j without the part that comes from the skip
    last: list[Tensor] = []  # the part of L_(n+1)j that comes from the skip
    base = block.bound**2 * eye - block.A.mT @ block.A
    sigma = torch.zeros_like(eye)
    gamma = eye  # Υ_j Γ_j
    for j, (weight, diagonal, (low, high)) in enumerate(zip(block.C, block.multipliers, block.slopes, strict=True)):
        scaled = diagonal.unsqueeze(-1) * weight
        pivot = base + 2 * high * low * (weight.mT @ scaled)
        scale = torch.linalg.matrix_norm(base.detach(), 2)
        divided = _divide(torch.cat([(high + low) * scaled, gamma]), pivot, scale, j + 1)
        step, spread = divided[: sizes[j + 1]], divided[sizes[j + 1] :]  # s Λ C D⁻¹ and Υ Γ D⁻¹
        pivots.append(pivot)
        below.append(-step)
        last.append(-(block.B.mT @ block.A) @ spread)
        sigma = sigma + spread @ gamma.mT
        base = 2 * torch.diag(diagonal) - (high + low) * (step @ scaled.mT)
        gamma = gamma @ step.mT
    cross = block.B.mT @ block.A @ gamma
    skip = block.B.mT @ block.A
    pivots.append(base - block.B.mT @ block.B - skip @ sigma @ skip.mT - cross - cross.mT)

    rows: list[tuple[Tensor, ...]] = []
    for i, size in enumerate(sizes):
        unit = torch.eye(size, dtype=block.A.dtype, device=block.A.device)
        row = [block.A.new_zeros(size, q) for q in sizes[:i]]
        if i > 0:
            row[i - 1] = below[i - 1]
        if i == depth:
            row = [entry + extra for entry, extra in zip(row, last, strict=True)]
        rows.append((*row, unit))
    return BlockFactors(tuple(rows), tuple(pivots))
