r"""Spectral normalisation with the exact norm.

.. math::

    P = W / \|W\|_2, \qquad \|W\|_2^2 = \lambda_{\max}(W^\top W) .

**Certificate.** :math:`\|P\| = 1` up to rounding. The norm is that of a dense symmetric eigenvalue solver on
the smaller of the two Gram matrices, not a power iteration: an unconverged iteration underestimates the norm,
and the layer would not be 1-Lipschitz. The price is :math:`O(\min(m, n)^3)`: 3 to 5 Cholesky factorisations
of that size, 8 to 10 with a gradient (widths 64 to 512, one core). A zero matrix is left as it is.

Reference: T. Miyato, T. Kataoka, M. Koyama and Y. Yoshida, *Spectral normalization for generative adversarial
networks*, ICLR 2018 (there with a power iteration).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ldlt_bench.families.layer import Explicit, Layer, raise_zeros, uniform

__all__ = ["Spectral", "squared_norm"]


def squared_norm(weight: Tensor) -> Tensor:
    """Compute ``‖W‖₂²`` of ``(..., m, n)`` from the smaller Gram matrix; one if W vanishes.

    Example:
        >>> squared_norm(torch.tensor([[3.0, 4.0]]))
        tensor(25.)
    """
    m, n = weight.shape[-2:]
    gram = weight.mT @ weight if n <= m else weight @ weight.mT
    return raise_zeros(torch.linalg.eigvalsh(gram)[..., -1])


class Spectral(Layer):
    """``x -> σ(W x / ‖W‖₂ + b)``. Certificate: ``‖W/‖W‖₂‖ = 1``, from an exact norm.

    The activation may be any 1-Lipschitz one. W starts like ``nn.Linear``. Cost: one symmetric
    eigendecomposition of the smaller width.
    """

    def __init__(self, in_features: int, neurons: int, activation: str = "relu") -> None:
        super().__init__(in_features, neurons, activation)
        self.weight = uniform(neurons, in_features, fan_in=in_features)
        self.bias = uniform(neurons, fan_in=in_features)

    def explicit(self) -> Explicit:
        """Evaluate W / ‖W‖₂."""
        return Explicit(self.weight * squared_norm(self.weight).rsqrt()[..., None, None], self.bias)
