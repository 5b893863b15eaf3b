r"""Sandwich layers (LBDN).

.. math::

    f(h) = \sqrt 2\,A^\top \Psi\,\sigma(\sqrt 2\,\Psi^{-1} B h + b), \qquad A A^\top + B B^\top = I, \qquad
    \Psi = \operatorname{diag}(e^{d}),

with :math:`[A \; B]` the Cayley transform (:mod:`ldlt.engine.linalg`) of free X, Y.

**Certificate.** With :math:`\Lambda = \Psi^2` and :math:`u = \Psi w` the quadratic form of
:mod:`ldlt_bench.families.layer` is a square,

.. math::

    Q = \|h\|^2 + 2\|u\|^2 - 2\sqrt 2\,u^\top B h - 2\|A^\top u\|^2 = \|h - \sqrt 2\,B^\top u\|^2 \ge 0 .

A stack of these layers with the output map :math:`h \mapsto B h + b`, :math:`B B^\top = I - A A^\top \preceq
I`, is the LBDN. It equals a feed-forward ``ldlt`` network with the Cayley contraction.

Reference: R. Wang and I. R. Manchester, *Direct parameterization of Lipschitz-bounded deep networks*, ICML
2023.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ldlt.cayley import CayleyMap
from ldlt_bench.families.layer import Explicit, Layer, uniform
from ldlt_bench.families.orthogonal import wide_map, with_norm

__all__ = ["Sandwich", "SandwichOutput"]


class SandwichOutput(Layer):
    """``h -> σ(B h + b)`` with ``AA' + BB' = I``; the output layer of a Sandwich network if σ = id.

    Certificate: ``BB' = I − AA' ⪯ I``. The free matrix ``weight = [X Y']`` starts uniform on
    ±1/√(in_features + neurons), its Frobenius norm is a parameter of its own (``gain``), both as published.
    Cost: one LU solve of the output width.
    """

    def __init__(self, in_features: int, neurons: int, activation: str = "identity") -> None:
        super().__init__(in_features, neurons, activation)
        self.weight = uniform(neurons, neurons + in_features, fan_in=neurons + in_features)
        self.gain = nn.Parameter(self.weight.detach().norm())
        self.bias = uniform(neurons, fan_in=neurons + in_features)

    def blocks(self) -> tuple[Tensor, Tensor]:
        """Return A ``(neurons, neurons)`` and B ``(neurons, in_features)``."""
        found = self._map()
        return found.a(), found.b()

    def _map(self) -> CayleyMap:
        return wide_map(with_norm(self.weight, self.gain))

    def explicit(self) -> Explicit:
        """Evaluate B."""
        return Explicit(self._map().b(), self.bias)


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
        factors = self._map()
        psi = math.sqrt(2.0) * torch.exp(self.log_psi)
        w = self.activation(2.0 * factors.apply_b(x.reshape(-1, x.shape[-1])) / psi + self.bias)
        y = factors.adjoint_a(w * psi)
        return y.reshape(*x.shape[:-1], self.neurons)
