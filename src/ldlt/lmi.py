r"""The Lipschitz matrix inequality from its definition, and its block ``LDL'`` factors.

This module knows nothing of the rule that builds networks: it is the yardstick. With ``z = (x, w_1, …, w_n)``, every
pre-activation is a linear function ``v_i = V_i z``, the output is ``y = Y z``, and

.. math::

    z'Qz = \ell^2\|x\|^2 + \sum_i 2\bigl(\|w_i - c_i v_i\|^2_{\Lambda_i} - r_i^2\|v_i\|^2_{\Lambda_i}\bigr) - \|y\|^2 .

The network is ℓ-Lipschitz if ``Q ⪰ 0``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt import activations
from ldlt.block_ldlt import BlockFactors, block_ldlt
from ldlt.graph import Activation, Affine, Graph, Input, Wire, fold

__all__ = ["BlockFactors", "MatrixInequality", "assemble", "block_ldlt", "from_graph", "residual"]


class _Network(Protocol):
    """What is asked of a network: see :class:`ldlt.Lipschitz`."""

    module: nn.Module

    @property
    def graph(self) -> Graph: ...
    @property
    def bound(self) -> float: ...
    @property
    def declared_bound(self) -> float: ...
    def explicit(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]: ...
    def multipliers(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]: ...
    def output_gain(self, dtype: torch.dtype | None = None) -> float: ...


@dataclass(frozen=True)
class MatrixInequality:
    """The matrix ``Q`` of a network.

    Attributes:
        matrix: ``Q`` (N, N), float64.
        names: Names of its blocks: the input, then the activations in topological order.
        sizes: Sizes of its blocks.
        scale: Norm of the form without its output term, which rounding errors are measured against (``Q`` itself is
            zero for a network that is tight in every direction).
    """

    matrix: Tensor
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    scale: float

    @property
    def smallest(self) -> float:
        """Smallest eigenvalue; the inequality holds if it is not negative."""
        return float(torch.linalg.eigvalsh(self.matrix)[0])

    @property
    def residual(self) -> float:
        """Smallest eigenvalue relative to the scale."""
        return self.smallest / (self.scale or 1.0)  # Q = 0 for the bound zero of an output that is constant

    def factors(self) -> BlockFactors:
        """Block ``LDL'``: unit lower triangular ``L`` and block diagonal ``D``, one block per name."""
        return block_ldlt(self.matrix, self.sizes)


def from_graph(
    graph: Graph,
    module: nn.Module,
    weights: Mapping[str, Tensor],
    multipliers: Mapping[str, Tensor],
    bound: float,
    gain: float = 1.0,
) -> MatrixInequality:
    """Assemble ``Q`` densely, by running the graph on unit vectors.

    Args:
        graph: A traced graph.
        module: The module it was traced from (for its constants and activations).
        weights: Explicit matrices by parameter name; what has a method ``matrix`` is asked for it.
        multipliers: ``Λ`` by activation node, (features,).
        bound: ℓ.
        gain: Factor of the output.
    """
    form = _Form(graph, module, weights, multipliers, bound)
    y = gain * fold(graph, form)[graph.output].reshape(form.total, -1)
    scale = float(torch.linalg.matrix_norm(form.matrix, 2))
    matrix = form.matrix - y @ y.T
    return MatrixInequality((matrix + matrix.T) / 2, tuple(form.own), tuple(form.sizes), scale)


class _Form:
    """Values as linear functions of ``z``, (N, *shape), and the form without its output term."""

    def __init__(
        self,
        graph: Graph,
        module: nn.Module,
        weights: Mapping[str, Tensor],
        multipliers: Mapping[str, Tensor],
        bound: float,
    ) -> None:
        self.graph, self.module, self.weights, self.multipliers = graph, module, weights, multipliers
        self.tensors = graph.tensors(module)
        blocks = [graph.input, *graph.activations]
        self.sizes = [b.features for b in blocks]
        self.total = sum(self.sizes)
        unit = torch.eye(self.total, dtype=torch.float64)
        self.own = dict(zip([b.name for b in blocks], unit.split(self.sizes, 1), strict=True))
        x = self.own[graph.input.name]
        self.matrix = bound**2 * x @ x.T

    def input(self, node: Input) -> Tensor:
        return self.own[node.name].reshape(-1, *node.shape)

    def wire(self, node: Wire, parents: Sequence[Tensor]) -> Tensor:
        return node.linear(self.tensors)(*parents).detach()

    def affine(self, node: Affine, parent: Tensor) -> Tensor:
        explicit: Any = self.weights[node.weight].detach()
        # An explicit convolution is an operator on whole images, which knows its matrix.
        matrix = (
            explicit.matrix().double() if hasattr(explicit, "matrix") else node.matrix(explicit.double(), self.graph)
        )
        value = F.linear(parent.flatten(1), matrix)
        # A matrix may have other rows than the layer, such as one difference of two outputs; an image may not.
        return value if len(node.shape) == 1 else value.reshape(-1, *node.shape)

    def activation(self, node: Activation, parent: Tensor) -> Tensor:
        v, w = parent.reshape(self.total, -1), self.own[node.name]
        center, radius = activations.spread(node.resolve(self.module), node.shape)
        multiplier = self.multipliers[node.name].detach().double()
        shifted = w - center * v
        self.matrix = self.matrix + 2 * ((shifted * multiplier) @ shifted.T - (v * (radius**2 * multiplier)) @ v.T)
        return w.reshape(-1, *node.shape)


def assemble(net: _Network) -> MatrixInequality:
    """``Q`` of a network built here, at its current parameters, with its own multipliers and reported bound.

    For the head ``"rows"``, whose joint bound is larger than the declared one, the multipliers are scaled alike:
    scaling ``Q`` by ``τ`` scales ``ℓ²`` and ``Λ``.
    """
    with torch.no_grad():
        bound = net.bound
        tau = (bound / net.declared_bound) ** 2
        multipliers = {n: tau * m for n, m in net.multipliers(torch.float64).items()}
        gain = net.output_gain(torch.float64)
        return from_graph(net.graph, net.module, net.explicit(torch.float64), multipliers, bound, gain)


def residual(net: _Network) -> float:
    """Smallest eigenvalue of ``Q`` relative to its scale: not below ``-1e-12`` or so for a network built here."""
    return assemble(net).residual
