r"""Almost-orthogonal layers (AOL).

.. math::

    P = W D^{-1/2}, \qquad D_{ii} = \sum_j |W^\top W|_{ij} .

**Certificate.** :math:`D - W^\top W` is symmetric and diagonally dominant with a non-negative diagonal, hence
:math:`\succeq 0`, hence :math:`P^\top P = D^{-1/2} W^\top W D^{-1/2} \preceq I`, that is :math:`\|P\| \le 1`,
for every W. A column of zeros has :math:`D_{ii} = 0`; any positive value is then valid, and one is used.

Reference: B. Prach and C. H. Lampert, *Almost-orthogonal layers for efficient general-purpose Lipschitz
networks*, ECCV 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ldlt.cayley import gram
from ldlt_bench.families.layer import Explicit, Layer, raise_zeros, uniform

__all__ = ["AOL", "aol"]


def aol(weight: Tensor) -> Tensor:
    """Rescale the columns of ``(..., m, n)`` so that the spectral norm is at most one.

    Example:
        >>> aol(torch.tensor([[3.0, 0.0], [0.0, 0.0]]))
        tensor([[1., 0.],
                [0., 0.]])
    """
    row_sums = gram(weight).abs().sum(dim=-1)
    return weight * raise_zeros(row_sums).rsqrt()[..., None, :]


class AOL(Layer):
    """``x -> σ(W D^{-1/2} x + b)``, ``D_ii = Σ_j |W'W|_ij``. Certificate: ``‖W D^{-1/2}‖ <= 1``.

    The activation may be any 1-Lipschitz one. The start is semi-orthogonal; a layer that does not lose width
    starts as an isometry, with D = I. Cost: one Gram matrix of the input width.
    """

    def __init__(self, in_features: int, neurons: int, activation: str = "relu") -> None:
        super().__init__(in_features, neurons, activation)
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(neurons, in_features)))
        self.bias = uniform(neurons, fan_in=in_features)

    def explicit(self) -> Explicit:
        """Evaluate the rescaled matrix."""
        return Explicit(aol(self.weight), self.bias)
