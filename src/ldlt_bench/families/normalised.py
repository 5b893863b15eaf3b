r"""Layers ``x -> σ(P x + b)`` whose matrix is a free one, divided: AOL, spectral normalisation, and the head.

With :math:`\|P\| \le 1` the activation may be any 1-Lipschitz one.

**Certificates.** AOL: :math:`P = W D^{-1/2}`, :math:`D_{ii} = \sum_j |W^\top W|_{ij}`; :math:`D - W^\top W` is
symmetric and diagonally dominant with a non-negative diagonal, hence :math:`\succeq 0`, that is :math:`P^\top P \preceq
I`, for every W. Spectral: :math:`P = W/\|W\|_2`, :math:`\|W\|_2^2 = \lambda_{\max}(W^\top W)` from a dense eigenvalue
solver on the smaller Gram matrix, not a power iteration, which underestimates the norm until it has converged. It
costs 3 to 5 Cholesky factorisations of that size, 8 to 10 with a gradient (widths 64 to 512, one core). Head:
:math:`y_c = \langle v_c/\|v_c\|, x\rangle + b_c`; behind an ℓ-Lipschitz body the difference of two logits is
:math:`\ell\,\|v_c - v_j\|`-Lipschitz (v normalised), and the whole map :math:`\ell\,\|V\|_2`-Lipschitz.

References: B. Prach and C. H. Lampert, *Almost-orthogonal layers for efficient general-purpose Lipschitz networks*,
ECCV 2022. T. Miyato, T. Kataoka, M. Koyama and Y. Yoshida, *Spectral normalization for generative adversarial
networks*, ICLR 2018 (there with a power iteration). S. Singla, S. Singla and S. Feizi, *Improved deterministic l2
robustness on CIFAR-10 and CIFAR-100*, ICLR 2022 (last-layer normalisation).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ldlt.cayley import gram
from ldlt.errors import InfeasibleError
from ldlt_bench.families.layer import Explicit, Layer, raise_zeros, uniform

__all__ = ["AOL", "RowsHead", "Spectral", "aol", "normalize_rows", "pair_constants", "squared_norm"]


def aol(weight: Tensor) -> Tensor:
    """Rescale the columns of ``(..., m, n)`` so that the spectral norm is at most one.

    Example:
        >>> aol(torch.tensor([[3.0, 0.0], [0.0, 0.0]]))
        tensor([[1., 0.],
                [0., 0.]])
    """
    return weight * raise_zeros(gram(weight).abs().sum(dim=-1)).rsqrt()[..., None, :]


def squared_norm(weight: Tensor) -> Tensor:
    """Compute ``‖W‖₂²`` of ``(..., m, n)`` from the smaller Gram matrix; one if W vanishes.

    Example:
        >>> squared_norm(torch.tensor([[3.0, 4.0]]))
        tensor(25.)
    """
    m, n = weight.shape[-2:]
    smaller = weight.mT @ weight if n <= m else weight @ weight.mT
    return raise_zeros(torch.linalg.eigvalsh(smaller)[..., -1])


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

    The differences are formed before they are squared, so close rows lose no accuracy and the diagonal is zero.
    """
    return torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")


class AOL(Layer):
    """``x -> σ(W D^{-1/2} x + b)``, ``D_ii = Σ_j |W'W|_ij``. Certificate: ``‖W D^{-1/2}‖ <= 1``.

    The start is semi-orthogonal; a layer that does not lose width starts as an isometry, with D = I. Cost: one Gram
    matrix of the input width.
    """

    def __init__(self, in_features: int, neurons: int, activation: str = "relu") -> None:
        super().__init__(in_features, neurons, activation)
        self.weight = nn.Parameter(nn.init.orthogonal_(torch.empty(neurons, in_features)))
        self.bias = uniform(neurons, fan_in=in_features)

    def explicit(self) -> Explicit:
        """Evaluate the rescaled matrix."""
        return Explicit(aol(self.weight), self.bias)


class Spectral(Layer):
    """``x -> σ(W x / ‖W‖₂ + b)``. Certificate: ``‖W/‖W‖₂‖ = 1``, from an exact norm. Starts like ``nn.Linear``."""

    def __init__(self, in_features: int, neurons: int, activation: str = "relu") -> None:
        super().__init__(in_features, neurons, activation)
        self.weight = uniform(neurons, in_features, fan_in=in_features)
        self.bias = uniform(neurons, fan_in=in_features)

    def explicit(self) -> Explicit:
        """Evaluate W / ‖W‖₂."""
        return Explicit(self.weight * squared_norm(self.weight).rsqrt()[..., None, None], self.bias)


class RowsHead(Spectral):
    """``x -> V x + b`` with rows of unit norm. Certificate: pair constants ``‖v_c − v_j‖``, joint ``‖V‖₂``.

    It starts like ``nn.Linear``. The map as a whole is *not* 1-Lipschitz in general.
    """

    def __init__(self, in_features: int, neurons: int) -> None:
        super().__init__(in_features, neurons, "identity")

    def explicit(self) -> Explicit:
        """Evaluate the normalised rows."""
        return Explicit(normalize_rows(self.weight), self.bias)

    def multiplier(self) -> Tensor:
        """Refuse: unit rows do not make the joint constant one, so there is no such Λ in general."""
        raise InfeasibleError("a head with unit rows is not 1-Lipschitz as a whole; see pair_constants")
