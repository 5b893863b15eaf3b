r"""Orthogonal layers by the Cayley transform.

.. math::

    P = [A \; B] \text{ of } Z = X - X^\top + Y^\top Y \text{ for the free matrix } [X \; Y^\top]

(:mod:`ldlt.engine.linalg`), transposed if the layer is wider behind than in front.

**Certificate.** :math:`P P^\top = I` if the layer is square or loses width, :math:`P^\top P = I` if it gains
width: all singular values are one, so :math:`\|P\| = 1` exactly. The square P covers the rotations without
eigenvalue −1.

Reference: A. Trockman and J. Z. Kolter, *Orthogonalizing convolutional layers with the Cayley transform*,
ICLR 2021 (dense form).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ldlt.cayley import CayleyMap
from ldlt_bench.families.layer import Explicit, Layer, raise_zeros, uniform

__all__ = ["Orthogonal", "cayley_rows", "wide_map", "with_norm"]


def wide_map(weight: Tensor) -> CayleyMap:
    """``[A B]`` of a wide free matrix ``[X Y']``, ``(..., q, n)`` with q ≤ n."""
    q = weight.shape[-2]
    return CayleyMap(weight[..., :q], weight[..., q:].mT)


def cayley_rows(weight: Tensor) -> Tensor:
    """Map a free matrix to one of the same shape with orthonormal rows (columns, if there are fewer).

    The dense form of Trockman & Kolter (2021): ``[A B]`` for a free ``[X Y']`` when the matrix is wide, the
    transpose when it is tall.

    Args:
        weight: Free matrix, ``(..., m, n)``.
    """
    m, n = weight.shape[-2:]
    if m > n:
        return cayley_rows(weight.mT).mT
    found = wide_map(weight)
    return torch.cat((found.a(), found.b()), dim=-1)


def with_norm(weight: Tensor, gain: Tensor) -> Tensor:
    """Rescale a free matrix to Frobenius norm ``|gain|`` (a zero matrix stays zero).

    Both published Cayley layers train the norm of the free matrix apart from its direction.
    """
    square = weight.square().sum(dim=(-2, -1), keepdim=True)
    return gain[..., None, None] * weight * raise_zeros(square).rsqrt()


class Orthogonal(Layer):
    """``x -> σ(P x + b)`` with a semi-orthogonal P. Certificate: all singular values of P are one.

    The activation may be any 1-Lipschitz one. As published, the free matrix starts uniform on ±1/√in_features
    and its Frobenius norm is a parameter of its own (``gain``). Cost: one LU solve of the smaller width.
    """

    def __init__(self, in_features: int, neurons: int, activation: str = "relu") -> None:
        super().__init__(in_features, neurons, activation)
        self.weight = uniform(neurons, in_features, fan_in=in_features)
        self.gain = nn.Parameter(self.weight.detach().norm())
        self.bias = uniform(neurons, fan_in=in_features)

    def explicit(self) -> Explicit:
        """Evaluate the semi-orthogonal matrix."""
        return Explicit(cayley_rows(with_norm(self.weight, self.gain)), self.bias)

    def branch(self, x: Tensor) -> Tensor:
        """Evaluate the layer; a batch that is smaller than the matrix is solved for, not multiplied."""
        if torch.compiler.is_compiling() or x.shape[:-1].numel() >= min(self.neurons, self.in_features):
            return super().branch(x)
        free, rows = with_norm(self.weight, self.gain), x.reshape(-1, x.shape[-1])
        wide = self.neurons <= self.in_features
        y = wide_map(free).apply(rows) if wide else wide_map(free.mT).adjoint(rows)
        return self.activation(y.reshape(*x.shape[:-1], self.neurons) + self.bias)  # type: ignore[no-any-return]
