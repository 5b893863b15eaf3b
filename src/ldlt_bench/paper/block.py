"""The residual block of the paper and its linear matrix inequality, term by term."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ldlt.check import positive
from ldlt.errors import BoundError, ShapeError, SlopeError
from ldlt_bench.paper.roots import check_chain, check_multipliers

__all__ = ["ResidualBlock"]

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class ResidualBlock:
    r"""Explicit weights of one residual block, with the data of its certificate.

    .. math::
        x_+ = A x + B w_n, \qquad w_j = \sigma_j(C_j w_{j-1} + b_j), \qquad w_0 = x .

    The slopes of :math:`\sigma_j` lie in :math:`[m_j, L_j]`, the multipliers :math:`\Lambda_j` are positive
    diagonal matrices, and :math:`\ell` is the claimed bound. The block is :math:`\ell`-Lipschitz if
    :meth:`lmi` is positive semidefinite. Nothing here enforces that: this class states a claim, and
    :meth:`smallest_eigenvalue` tests it.

    Args:
        A: Skip from input to output, shape ``(d_out, d_0)``.
        B: Output map, shape ``(d_out, d_n)``.
        C: Hidden maps; the ``j``-th has shape ``(d_j, d_{j-1})``. At least one.
        multipliers: Diagonals of the multipliers, the ``j``-th of shape ``(d_j,)``, positive.
        slopes: Pairs ``(m_j, L_j)`` of finite numbers, ``m_j <= L_j``.
        bound: The Lipschitz bound, positive and finite.

    Raises:
        LdltError: If an argument is out of its range or does not fit the others.

    Example:
        >>> one = torch.ones(1, 1)
        >>> block = ResidualBlock(0 * one, one, (one,), (torch.ones(1),), ((0.0, 1.0),), 1.0)
        >>> block.lmi().tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """

    A: Tensor
    B: Tensor
    C: tuple[Tensor, ...]
    multipliers: tuple[Tensor, ...]
    slopes: tuple[tuple[float, float], ...]
    bound: float

    def __post_init__(self) -> None:
        for name in ("C", "multipliers", "slopes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_chain(self.A, self.C, self.B)
        if not len(self.multipliers) == len(self.slopes) == len(self.C):
            raise ShapeError(f"{len(self.C)} hidden maps need as many multipliers and intervals of slopes")
        if not self.A.is_floating_point():
            raise ShapeError(f"weights must be real floating point, not {self.A.dtype}")
        for tensor in (self.B, *self.C, *self.multipliers):
            if (tensor.dtype, tensor.device) != (self.A.dtype, self.A.device):
                raise ShapeError(f"mixed tensors: {tensor.dtype} on {tensor.device}, {self.A.dtype} on {self.A.device}")
        for low, high in self.slopes:
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                raise SlopeError(f"slopes {(low, high)} are not a finite interval (m, L) with m <= L")
        positive("bound", self.bound, BoundError)
        check_multipliers(self.C, self.multipliers)

    @property
    def depth(self) -> int:
        """Number ``n`` of hidden layers."""
        return len(self.C)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Block sizes ``(d_0, d_1, ..., d_n)`` of the matrix inequality."""
        return (self.A.shape[1], *(weight.shape[0] for weight in self.C))

    def lmi(self) -> Tensor:
        r"""The matrix :math:`M = -\bar M` that must be positive semidefinite.

        It is the cyclic block tridiagonal matrix of the paper with every sign reversed:

        .. math::
            M_{11} &= \ell^2 I + 2 L_1 m_1 C_1^\top \Lambda_1 C_1 - A^\top A, \\
            M_{jj} &= 2 \Lambda_{j-1} + 2 L_j m_j C_j^\top \Lambda_j C_j, \qquad 1 < j \le n, \\
            M_{(n+1)(n+1)} &= 2 \Lambda_n - B^\top B, \\
            M_{(j+1)j} &= -(L_j + m_j) \Lambda_j C_j, \qquad
            M_{(n+1)1} = -B^\top A .

        With one hidden layer the last two blocks are the same one, and add up.

        Returns:
            Dense symmetric matrix, shape ``(sum(sizes), sum(sizes))``, in the dtype of the weights.
        """
        last = self.depth
        rows = [[self.A.new_zeros(p, q) for q in self.sizes] for p in self.sizes]
        rows[0][0] = self.bound**2 * torch.eye(self.sizes[0]).to(self.A) - self.A.mT @ self.A
        for j, (weight, diagonal, (low, high)) in enumerate(zip(self.C, self.multipliers, self.slopes, strict=True)):
            scaled = diagonal[:, None] * weight
            rows[j][j] = rows[j][j] + 2 * high * low * (weight.mT @ scaled)
            rows[j + 1][j] = rows[j + 1][j] - (high + low) * scaled
            rows[j + 1][j + 1] = 2 * torch.diag(diagonal)
        rows[last][0] = rows[last][0] - self.B.mT @ self.A
        rows[last][last] = rows[last][last] - self.B.mT @ self.B
        lower = torch.cat([torch.cat(row, dim=1) for row in rows]).tril()
        return lower + lower.tril(-1).mT  # exactly symmetric, also after rounding

    @torch.no_grad()
    def smallest_eigenvalue(self) -> float:
        """Smallest eigenvalue of :meth:`lmi`, assembled and computed in float64.

        Negative (beyond rounding) means that this bound, with these multipliers, is not certified. It does
        not by itself mean that the network breaks the bound: see :func:`ldlt_bench.paper.violation` for that.
        """
        return float(torch.linalg.eigvalsh(self.double().lmi())[0])

    def double(self) -> ResidualBlock:
        """The same block in float64, without its gradients."""
        A, B, *rest = (t.detach().double() for t in (self.A, self.B, *self.C, *self.multipliers))
        return ResidualBlock(A, B, tuple(rest[: self.depth]), tuple(rest[self.depth :]), self.slopes, self.bound)

    def forward(
        self,
        x: Tensor,
        activations: Activation | Sequence[Activation] = torch.relu,
        biases: Sequence[Tensor | None] | None = None,
    ) -> Tensor:
        """Evaluate the block.

        Args:
            x: Inputs, shape ``(..., d_0)``.
            activations: One elementwise function for all hidden layers, or one for each.
            biases: One vector of shape ``(d_j,)`` (or ``None``) for each hidden layer; ``None`` for no biases.

        Returns:
            Outputs, shape ``(..., d_out)``.
        """
        functions = [activations] * self.depth if callable(activations) else list(activations)
        shifts = [None] * self.depth if biases is None else list(biases)
        if not len(functions) == len(shifts) == self.depth or x.shape[-1:] != (self.sizes[0],):
            raise ShapeError(f"{self.depth} activations and biases and inputs (..., {self.sizes[0]}) are needed")
        hidden = x
        for weight, function, shift in zip(self.C, functions, shifts, strict=True):
            hidden = function(torch.nn.functional.linear(hidden, weight, shift))
        return x @ self.A.mT + hidden @ self.B.mT

    __call__ = forward
