r"""Convex potential layers (CPL).

.. math::

    f(x) = x - \frac{2}{\|W\|_2^2}\,W \sigma(W^\top x + b) .

**Certificate.** The layer is a step of gradient descent on a convex potential, of length at most two over its
smoothness. In the quadratic form of :mod:`ldlt_bench.families.layer`, with :math:`\Lambda = 2 h I`, :math:`h =
1/\|W\|_2^2`,

.. math::

    Q = 4 h\,w^\top (I - h\,W^\top W)\,w \ge 0 .

The norm is exact (:func:`ldlt_bench.families.spectral.squared_norm`). The published layer estimates it with power
iterations, whose result is a lower bound of the norm and no certificate. For W = 0 the layer is the identity.

Reference: L. Meunier, B. Delattre, A. Araujo and A. Allauzen, *A dynamical system perspective for Lipschitz
neural networks*, ICML 2022.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ldlt_bench.families.layer import Explicit, Layer, uniform
from ldlt_bench.families.spectral import squared_norm

__all__ = ["CPL"]


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

    def multiplier(self) -> Tensor:
        """Λ = 2/‖W‖² in every entry."""
        return (2.0 / squared_norm(self.weight))[..., None] * torch.ones_like(self.bias)

    def explicit(self) -> Explicit:
        """Evaluate W' and −2 W/‖W‖²."""
        return Explicit(self.weight.mT, self.bias, -self.weight * self.multiplier()[..., None, :])
