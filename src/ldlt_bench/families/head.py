r"""The normalised linear head: every logit 1-Lipschitz, and a constant for every pair of them.

.. math::

    y_c = \langle v_c / \|v_c\|, x \rangle + b_c .

**Certificate.** Behind an ℓ-Lipschitz body every logit is ℓ-Lipschitz, the difference of two is
:math:`\ell\,\|v_c - v_j\| \le 2\ell`-Lipschitz (v normalised), and the whole map
:math:`\ell\,\|V\|_2`-Lipschitz, which may exceed ℓ. Certified radius of a prediction c: :math:`\min_j (y_c -
y_j) / (\ell\,\|v_c - v_j\|)`.

Reference: S. Singla, S. Singla and S. Feizi, *Improved deterministic l2 robustness on CIFAR-10 and
CIFAR-100*, ICLR 2022 (last-layer normalisation).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ldlt.errors import InfeasibleError
from ldlt_bench.families.layer import Explicit, Layer, raise_zeros, uniform

__all__ = ["RowsHead", "normalize_rows", "pair_constants"]


def normalize_rows(weight: Tensor) -> Tensor:
    """Divide every row of ``(..., k, n)`` by its Euclidean norm; a row of zeros stays zero.

    Example:
        >>> normalize_rows(torch.tensor([[4.0, 0.0], [0.0, 0.0]]))
        tensor([[1., 0.],
                [0., 0.]])
    """
    return weight * raise_zeros(weight.square().sum(dim=-1, keepdim=True)).rsqrt()


def pair_constants(weight: Tensor) -> Tensor:
    """Compute ``‖v_c − v_j‖`` for all pairs of rows of ``(..., k, n)``, as ``(..., k, k)``.

    The differences are formed before they are squared, so close rows lose no accuracy and the diagonal is
    exactly zero.
    """
    return torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")


class RowsHead(Layer):
    """``x -> V x + b`` with rows of unit norm. Certificate: pair constants ``‖v_c − v_j‖``, joint ``‖V‖₂``.

    It starts like ``nn.Linear``. The map as a whole is *not* 1-Lipschitz in general.
    """

    def __init__(self, in_features: int, neurons: int) -> None:
        super().__init__(in_features, neurons, "identity")
        self.weight = uniform(neurons, in_features, fan_in=in_features)
        self.bias = uniform(neurons, fan_in=in_features)

    def explicit(self) -> Explicit:
        """Evaluate the normalised rows."""
        return Explicit(normalize_rows(self.weight), self.bias)

    def multiplier(self) -> Tensor:
        """Refuse: unit rows do not make the joint constant one, so there is no such Λ in general.

        Raises:
            InfeasibleError: Always.
        """
        raise InfeasibleError("a head with unit rows is not 1-Lipschitz as a whole; see pair_constants")
