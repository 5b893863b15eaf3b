r"""Residual layers: a step along a convex potential, SLL and CPL.

.. math::

    f(x) = x - 2\,W T^{-1} \sigma(W^\top x + b), \qquad W^\top W \preceq T \text{ diagonal} .

**Certificate.** With :math:`\Lambda = 2\,T^{-1}` the cross terms of the quadratic form of
:mod:`ldlt_bench.families.layer` cancel and :math:`Q = 4\,w^\top T^{-1} (T - W^\top W)\,T^{-1} w \ge 0`.

SLL takes :math:`T_{ii} = \sum_j |W^\top W|_{ij}\,q_j/q_i`, q > 0: with :math:`S = \operatorname{diag}(q)` the matrix
:math:`S(T - W^\top W)S` is diagonally dominant. A column of zeros has :math:`T_{ii} = 0`; any positive value is then
valid, and one is used. CPL takes :math:`T = \|W\|_2^2 I`, with the exact norm
(:func:`~ldlt_bench.families.normalised.squared_norm`; the published layer estimates it by power iterations, from below,
which is no certificate). For W = 0 the layer is the identity.

References: A. Araujo, A. Havens, B. Delattre, A. Allauzen and B. Hu, *A unified algebraic perspective on Lipschitz
neural networks*, ICLR 2023. L. Meunier, B. Delattre, A. Araujo and A. Allauzen, *A dynamical system perspective for
Lipschitz neural networks*, ICML 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ldlt.cayley import gram
from ldlt_bench.families.layer import Explicit, Layer, raise_zeros, uniform
from ldlt_bench.families.normalised import squared_norm

__all__ = ["CPL", "SLL", "sll_diagonal"]

_LEAST = -60.0  # of log q, below the largest


def sll_diagonal(weight: Tensor, log_q: Tensor) -> Tensor:
    """Compute the diagonal T with ``W'W ⪯ T``.

    Args:
        weight: W, ``(..., n, m)``.
        log_q: Logarithm of q, ``(..., m)``.

    Returns:
        The diagonal of T, ``(..., m)``, positive.

    Example:
        >>> sll_diagonal(torch.ones(1, 2), torch.zeros(2))
        tensor([2., 2.])
    """
    # Every q > 0 is valid, and only ratios count: the largest is 1, and none is so small that T would overflow.
    q = torch.exp((log_q - log_q.detach().amax(-1, keepdim=True)).clamp_min(_LEAST))
    return raise_zeros((gram(weight).abs() @ q[..., None])[..., 0] / q)


class CPL(Layer):
    """``x -> x − (2/‖W‖²) W σ(W'x + b)``. Certificate: ``Q ⪰ 0`` with Λ = 2/‖W‖².

    W starts Xavier-normal, as published. Cost: one symmetric eigendecomposition of the smaller of width and
    neurons, and two products with the batch.
    """

    residual = True
    elementwise = True

    def __init__(self, in_features: int, neurons: int, activation: str = "relu") -> None:
        super().__init__(in_features, neurons, activation)
        self.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(in_features, neurons)))
        self.bias = uniform(neurons, fan_in=in_features)

    def diagonal(self) -> Tensor:
        """T, ``(neurons,)``."""
        return squared_norm(self.weight)[..., None] * torch.ones_like(self.bias)

    def multiplier(self) -> Tensor:
        """Λ = 2 T^{-1}."""
        return 2.0 / self.diagonal()

    def explicit(self) -> Explicit:
        """Evaluate W' and −2 W T^{-1}."""
        return Explicit(self.weight.mT, self.bias, -self.weight * self.multiplier()[..., None, :])


class SLL(CPL):
    """``x -> x − 2 W T^{-1} σ(W'x + b)``, ``T_ii = Σ_j |W'W|_ij q_j/q_i``. Certificate: ``Q ⪰ 0``, Λ = 2/T.

    As published, W starts Xavier-normal and log q standard normal. Cost: one Gram matrix of the number of
    neurons, and two products with the batch.
    """

    def __init__(self, in_features: int, neurons: int, activation: str = "relu") -> None:
        super().__init__(in_features, neurons, activation)
        self.log_q = nn.Parameter(torch.randn(neurons))

    def diagonal(self) -> Tensor:
        """T, ``(neurons,)``."""
        return sll_diagonal(self.weight, self.log_q)
