r"""SDP-based Lipschitz layers (SLL).

.. math::

    f(x) = x - 2\,W T^{-1} \sigma(W^\top x + b), \qquad
    T_{ii} = \sum_j |W^\top W|_{ij}\,\frac{q_j}{q_i}, \quad q > 0 .

**Certificate.** With :math:`\Lambda = 2\,T^{-1}` the cross terms of the quadratic form of
:mod:`ldlt_bench.families.layer` cancel and

.. math::

    Q = 4\,w^\top T^{-1} (T - W^\top W)\,T^{-1} w \ge 0,

because :math:`S(T - W^\top W)S`, :math:`S = \operatorname{diag}(q)`, has the diagonal :math:`q_i^2 T_{ii} -
q_i^2 |W^\top W|_{ii} = \sum_{j \ne i} |W^\top W|_{ij}\,q_i q_j`: it is diagonally dominant. A column of zeros
has :math:`T_{ii} = 0`; any positive value is then valid, and one is used.

Reference: A. Araujo, A. Havens, B. Delattre, A. Allauzen and B. Hu, *A unified algebraic perspective on
Lipschitz neural networks*, ICLR 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ldlt.cayley import gram
from ldlt_bench.families.layer import Explicit, Layer, raise_zeros, uniform

__all__ = ["SLL", "sll_diagonal"]

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


class SLL(Layer):
    """``x -> x − 2 W T^{-1} σ(W'x + b)``, ``T_ii = Σ_j |W'W|_ij q_j/q_i``. Certificate: ``Q ⪰ 0``, Λ = 2/T.

    As published, W starts Xavier-normal and log q standard normal. Cost: one Gram matrix of the number of
    neurons, and two products with the batch.
    """

    residual = True
    elementwise = True

    def __init__(self, in_features: int, neurons: int, activation: str = "relu") -> None:
        super().__init__(in_features, neurons, activation)
        self.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(in_features, neurons)))
        self.log_q = nn.Parameter(torch.randn(neurons))
        self.bias = uniform(neurons, fan_in=in_features)

    def multiplier(self) -> Tensor:
        """Λ = 2 T^{-1}."""
        return 2.0 / sll_diagonal(self.weight, self.log_q)

    def explicit(self) -> Explicit:
        """Evaluate W' and −2 W T^{-1}."""
        return Explicit(self.weight.mT, self.bias, -self.weight * self.multiplier()[..., None, :])
