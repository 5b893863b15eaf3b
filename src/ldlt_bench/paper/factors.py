r"""Block :math:`LDL^\top` factors of the residual block in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from ldlt.block_ldlt import BlockFactors, right_divide
from ldlt_bench.paper.block import ResidualBlock

__all__ = ["closed_form_factors", "printed_last_pivot"]


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
    eye = torch.eye(sizes[0]).to(block.A)
    skip = block.B.mT @ block.A
    pivots: list[Tensor] = []
    rows: list[list[Tensor]] = [[block.A.new_zeros(p, q) for q in sizes[:i]] for i, p in enumerate(sizes)]
    base = block.bound**2 * eye - block.A.mT @ block.A
    sigma, gamma = torch.zeros_like(eye), eye  # Σ and Υ_j Γ_j
    for j, (weight, diagonal, (low, high)) in enumerate(zip(block.C, block.multipliers, block.slopes, strict=True)):
        scaled = diagonal[:, None] * weight
        pivot = base + 2 * high * low * (weight.mT @ scaled)
        scale = torch.linalg.matrix_norm(base.detach(), 2)
        divided = right_divide(torch.cat([(high + low) * scaled, gamma]), pivot, scale, j + 1)
        step, spread = divided[: sizes[j + 1]], divided[sizes[j + 1] :]  # s Λ C D⁻¹ and Υ Γ D⁻¹
        pivots.append(pivot)
        rows[j + 1][j] = rows[j + 1][j] - step
        rows[depth][j] = rows[depth][j] - skip @ spread
        sigma = sigma + spread @ gamma.mT
        base = 2 * torch.diag(diagonal) - (high + low) * (step @ scaled.mT)
        gamma = gamma @ step.mT
    cross = skip @ gamma
    pivots.append(base - block.B.mT @ block.B - skip @ sigma @ skip.mT - cross - cross.mT)
    lower = tuple((*row, torch.eye(size).to(block.A)) for row, size in zip(rows, sizes, strict=True))
    return BlockFactors(lower, tuple(pivots))


def printed_last_pivot(block: ResidualBlock) -> Tensor:
    r"""The last pivot :math:`D_{n+1}` of any block as printed, without the cross terms; shape ``(d_n, d_n)``.

    .. math::
        2\Lambda_n - B^\top B - B^\top A \Sigma A^\top B - s_n^2 \Lambda_n C_n D_n^{-1} C_n^\top \Lambda_n .

    The difference to ``closed_form_factors(block).D[-1]`` is :math:`B^\top F + F^\top B`.
    """
    *pivots, last = closed_form_factors(block).D
    gamma = torch.eye(block.sizes[0]).to(block.A)
    for pivot, weight, diagonal, slopes in zip(pivots, block.C, block.multipliers, block.slopes, strict=True):
        gamma = sum(slopes) * gamma @ torch.linalg.solve(pivot, weight.mT * diagonal)
    cross = block.B.mT @ block.A @ gamma
    return last + cross + cross.mT
