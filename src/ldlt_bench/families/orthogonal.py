r"""Layers by the Cayley transform :math:`[A\;B]`, :math:`A A^\top + B B^\top = I` (:mod:`ldlt.cayley`).

Orthogonal: :math:`\sigma(P x + b)` with :math:`P = [A\;B]` of the free matrix :math:`[X\;Y^\top]`, transposed if the
layer gains width. **Certificate.** :math:`P P^\top = I` or :math:`P^\top P = I`: all singular values are one. The
square P covers the rotations without eigenvalue −1.

Sandwich (LBDN), :math:`\Psi = \operatorname{diag}(e^{d})`:

.. math::

    f(h) = \sqrt 2\,A^\top \Psi\,\sigma(\sqrt 2\,\Psi^{-1} B h + b) .

**Certificate.** With :math:`\Lambda = \Psi^2` and :math:`u = \Psi w` the quadratic form of
:mod:`ldlt_bench.families.layer` is a square,

.. math::

    Q = \|h\|^2 + 2\|u\|^2 - 2\sqrt 2\,u^\top B h - 2\|A^\top u\|^2 = \|h - \sqrt 2\,B^\top u\|^2 \ge 0 .

A stack of these layers with the output map :math:`h \mapsto B h + b`, :math:`B B^\top \preceq I`, is the LBDN. It
equals a feed-forward ``ldlt`` network with the Cayley contraction.

References: A. Trockman and J. Z. Kolter, *Orthogonalizing convolutional layers with the Cayley transform*, ICLR 2021
(dense form). R. Wang and I. R. Manchester, *Direct parameterization of Lipschitz-bounded deep networks*, ICML 2023.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ldlt.cayley import CayleyMap
from ldlt_bench.families.layer import Explicit, Layer, raise_zeros, uniform

__all__ = ["Orthogonal", "Sandwich", "SandwichOutput", "cayley_rows", "wide_map"]


def wide_map(weight: Tensor) -> CayleyMap:
    """``[A B]`` of a wide free matrix ``[X Y']``, ``(..., q, n)`` with q ≤ n."""
    q = weight.shape[-2]
    return CayleyMap(weight[..., :q], weight[..., q:].mT)


def cayley_rows(weight: Tensor) -> Tensor:
    """Map a free matrix ``(..., m, n)`` to one of the same shape with orthonormal rows (columns, if there are fewer).

    The dense form of Trockman & Kolter (2021): ``[A B]`` for a free ``[X Y']`` if wide, the transpose if tall.
    """
    m, n = weight.shape[-2:]
    if m > n:
        return cayley_rows(weight.mT).mT
    found = wide_map(weight)
    return torch.cat((found.a(), found.b()), dim=-1)


class _Cayley(Layer):
    """A layer with a free matrix whose Frobenius norm is a parameter of its own (``gain``), as published."""

    def __init__(self, in_features: int, neurons: int, columns: int, activation: str) -> None:
        super().__init__(in_features, neurons, activation)
        self.weight = uniform(neurons, columns, fan_in=columns)
        self.gain = nn.Parameter(self.weight.detach().norm())
        self.bias = uniform(neurons, fan_in=columns)

    def free(self) -> Tensor:
        """The free matrix at its norm (a zero matrix stays zero)."""
        square = self.weight.square().sum(dim=(-2, -1), keepdim=True)
        return self.gain[..., None, None] * self.weight * raise_zeros(square).rsqrt()


class Orthogonal(_Cayley):
    """``x -> σ(P x + b)`` with a semi-orthogonal P. Certificate: all singular values of P are one.

    The activation may be any 1-Lipschitz one. As published, the free matrix starts uniform on ±1/√in_features. Cost:
    one LU solve of the smaller width.
    """

    def __init__(self, in_features: int, neurons: int, activation: str = "relu") -> None:
        super().__init__(in_features, neurons, in_features, activation)

    def explicit(self) -> Explicit:
        """Evaluate the semi-orthogonal matrix."""
        return Explicit(cayley_rows(self.free()), self.bias)

    def branch(self, x: Tensor) -> Tensor:
        """Evaluate the layer; a batch that is smaller than the matrix is solved for, not multiplied."""
        if torch.compiler.is_compiling() or x.shape[:-1].numel() >= min(self.neurons, self.in_features):
            return super().branch(x)
        free, rows = self.free(), x.reshape(-1, x.shape[-1])
        wide = self.neurons <= self.in_features
        y = wide_map(free).apply(rows) if wide else wide_map(free.mT).adjoint(rows)
        return self.activation(y.reshape(*x.shape[:-1], self.neurons) + self.bias)  # type: ignore[no-any-return]


class SandwichOutput(_Cayley):
    """``h -> σ(B h + b)`` with ``AA' + BB' = I``; the output layer of a Sandwich network if σ = id.

    Certificate: ``BB' = I − AA' ⪯ I``. The free matrix ``weight = [X Y']`` starts uniform on ±1/√(in_features +
    neurons), as published. Cost: one LU solve of the output width.
    """

    def __init__(self, in_features: int, neurons: int, activation: str = "identity") -> None:
        super().__init__(in_features, neurons, neurons + in_features, activation)

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Return A ``(neurons, neurons)`` and B ``(neurons, in_features)``."""
        found = wide_map(self.free())
        return found.a(), found.b()

    def explicit(self) -> Explicit:
        """Evaluate B."""
        return Explicit(wide_map(self.free()).b(), self.bias)


class Sandwich(SandwichOutput):
    """``h -> √2 A'Ψ σ(√2 Ψ^{-1} B h + b)``. Certificate: ``Q = ‖h − √2 B'Ψw‖²`` with Λ = Ψ².

    The start is that of :class:`SandwichOutput`, with Ψ = I. Cost: one LU solve of the output width, and two
    products with the batch.
    """

    elementwise = True

    def __init__(self, in_features: int, neurons: int, activation: str = "relu") -> None:
        super().__init__(in_features, neurons, activation)
        self.log_psi = nn.Parameter(torch.zeros(neurons))

    def multiplier(self) -> Tensor:
        """Λ = Ψ²."""
        return torch.exp(2.0 * self.log_psi)

    def explicit(self) -> Explicit:
        """Evaluate √2 Ψ^{-1} B and √2 A'Ψ."""
        a, b = self.blocks()
        inner = math.sqrt(2.0) * torch.exp(-self.log_psi)[..., :, None] * b
        outer = math.sqrt(2.0) * torch.exp(self.log_psi)[..., None, :] * a.mT
        return Explicit(inner, self.bias, outer)

    def branch(self, x: Tensor) -> Tensor:
        """Evaluate the layer; a batch that is smaller than the layer is solved for, not multiplied."""
        if torch.compiler.is_compiling() or x.shape[:-1].numel() >= self.neurons:
            return super().branch(x)
        found = wide_map(self.free())
        psi = math.sqrt(2.0) * torch.exp(self.log_psi)
        w = self.activation(2.0 * found.apply_b(x.reshape(-1, x.shape[-1])) / psi + self.bias)
        return found.adjoint_a(w * psi).reshape(*x.shape[:-1], self.neurons)
