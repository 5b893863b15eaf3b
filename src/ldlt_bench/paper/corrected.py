"""The paper's construction, in its own order (skip, hidden maps, output), with the output map corrected."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ldlt.check import positive
from ldlt.errors import BoundError, ShapeError, SlopeError
from ldlt_bench.paper.block import ResidualBlock
from ldlt_bench.paper.roots import (
    Alpha,
    Root,
    alpha_values,
    check_chain,
    check_multipliers,
    contraction,
    gram_root,
    left_solve,
    right_solve,
)

__all__ = ["corrected_block"]

RELU = (0.0, 1.0)


def corrected_block(
    W_A: Tensor,
    W: Sequence[Tensor],
    W_B: Tensor,
    *,
    multipliers: Sequence[Tensor] | None = None,
    slopes: Sequence[tuple[float, float]] | None = None,
    alpha: Alpha = 1.0,
    bound: float = 1.0,
    root: Root = "symmetric",
    tight: bool = False,
) -> ResidualBlock:
    r"""Residual block that is Lipschitz with the given bound, for every choice of free parameters.

    With :math:`U = W (\alpha I + W^\top W)^{-1/2}` for each free matrix, :math:`s_j = L_j + m_j` and
    :math:`\rho_j = s_j / (L_j - m_j)`, in the paper's order:

    .. math::
        A &= \ell\, U_A, \qquad P_1 = \ell^2 I - A^\top A, \\
        C_j &= \frac{\sqrt 2}{L_j - m_j} \Lambda_j^{-1/2} U_j P_j^{1/2}, \qquad
        D_j = P_j + 2 L_j m_j C_j^\top \Lambda_j C_j, \\
        P_{j+1} &= 2 \Lambda_j - s_j^2 \Lambda_j C_j D_j^{-1} C_j^\top \Lambda_j
                 = 2 \alpha_j \Lambda_j^{1/2} (\alpha_j I + \rho_j^2 W_j W_j^\top)^{-1} \Lambda_j^{1/2}, \\
        B &= S^{-1/2} U_B (P_{n+1} + F^\top S^{-1} F)^{1/2} - S^{-1} F,

    where :math:`S = I + A \Sigma A^\top`, :math:`F = \Upsilon_{n+1} A \Gamma_{n+1}` as in
    :func:`~ldlt_bench.paper.closed_form_factors`. The last pivot of the matrix inequality is then
    :math:`K^\top (I - U_B^\top U_B) K \succeq 0` with :math:`K` the last root above.
    Every positive definite matrix is carried as a root and none is formed by a subtraction, so the result is
    exact up to rounding, also for contractions close to norm one. It is differentiable once in all tensors.

    Args:
        W_A: Free matrix of the skip, shape ``(d_out, d_0)``.
        W: Free matrices of the hidden maps, the ``j``-th of shape ``(d_j, d_{j-1})``.
        W_B: Free matrix of the output map, shape ``(d_out, d_n)``.
        multipliers: Positive diagonals :math:`\Lambda_j`, shape ``(d_j,)`` each; identity by default.
        slopes: Pairs ``(m_j, L_j)``, ``m_j < L_j``; those of ReLU by default.
        alpha: One positive number for all free matrices, or one for each in the order of the arguments. Zero
            is allowed for the last if ``W_B`` has full column rank.
        bound: The Lipschitz bound :math:`\ell`.
        root: ``"symmetric"`` or ``"cholesky"`` roots: the same family of networks, differently parameterised.
        tight: Use the orthogonal polar factor of ``W_B`` for :math:`U_B` (its ``alpha`` is then unused). The
            matrix inequality is then singular: in general no smaller bound is certified by these multipliers.
            Its gradient needs distinct singular values.

    Returns:
        The explicit block; its matrix inequality holds.

    Raises:
        LdltError: If an argument is out of its range or does not fit the others.

    Example:
        >>> free = torch.ones(1, 1, dtype=torch.float64)
        >>> block = corrected_block(free, [free], free, tight=True)
        >>> abs(block.smallest_eigenvalue()) < 1e-12
        True
    """
    check_chain(W_A, W, W_B)
    positive("bound", bound, BoundError)
    diagonals = [w.new_ones(w.shape[0]) for w in W] if multipliers is None else list(multipliers)
    intervals = [RELU] * len(W) if slopes is None else list(slopes)
    if not len(diagonals) == len(intervals) == len(W):
        raise ShapeError(f"{len(W)} hidden maps need as many multipliers and intervals of slopes")
    check_multipliers(W, diagonals)
    alphas = alpha_values(alpha, len(W) + 2, W_A)

    # P_j is carried as V with V'V = P_j^{-1}; V^{-T} is then a root of P_j.
    unit, gram = contraction(W_A, alphas[0], root)
    A = bound * unit
    # I - U'U = α (R R')^{-1}: the order of R and R' matters unless the root is symmetric.
    V = gram_root(gram.mT / (bound * alphas[0].sqrt()), root)
    gamma = torch.eye(W_A.shape[1], dtype=W_A.dtype, device=W_A.device)
    spread: list[Tensor] = []  # A Υ_j Γ_j D_j^{-1/2}: their squares add up to A Σ A'
    C: list[Tensor] = []
    for weight, diagonal, (low, high), a in zip(W, diagonals, intervals, alphas[1:-1], strict=True):
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise SlopeError(f"slopes {(low, high)} are not a finite interval (m, L) with m < L")
        rho = (high + low) / (high - low)
        unit, gram = contraction(weight, a, root)
        lift = diagonal.sqrt().unsqueeze(-1)
        C.append(math.sqrt(2) / (high - low) * left_solve(V, unit.mT, root).mT / lift)
        # D_j^{-1} = Y Y' with Y = V' R E^{-1}, E'E = αI + ρ²W'W
        _, inner = contraction(rho * weight, a, root)
        Y = right_solve(V.mT @ gram, inner, root)
        spread.append(A @ gamma @ Y)
        gamma = (high + low) * gamma @ Y @ (Y.mT @ C[-1].mT * diagonal)
        eye = torch.eye(weight.shape[0], dtype=weight.dtype, device=weight.device)
        V = gram_root(torch.cat([rho * weight.mT, a.sqrt() * eye]) / (lift.mT * (2 * a).sqrt()), root)

    skip = torch.eye(W_A.shape[0], dtype=W_A.dtype, device=W_A.device)
    S = gram_root(torch.cat([skip, *(part.mT for part in spread)]), root)
    F = left_solve(S, A @ gamma, root, transpose=True)  # R^{-T} F with R'R the matrix S of the formula
    identity = torch.eye(V.shape[0], dtype=V.dtype, device=V.device)
    # Reversing the order of the columns twice makes the triangular root a lower one, as V^{-T} is.
    K = gram_root(torch.cat([right_solve(identity, V, root).mT, F]).flip(-1), root).flip(-2, -1)
    if tight:
        left, _, right = torch.linalg.svd(W_B, full_matrices=False)
        unit = left @ right
    else:
        unit, _ = contraction(W_B, alphas[-1], root)
    B = left_solve(S, unit @ K - F, root)
    return ResidualBlock(A, B, tuple(C), tuple(diagonals), tuple(intervals), bound)
