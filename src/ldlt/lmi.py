r"""The Lipschitz matrix inequality from its definition, and its block ``LDL'`` factors.

This module knows nothing of the rule that builds networks: it is the yardstick. With ``z = (x, w_1, …, w_n)``, every
pre-activation is a linear function ``v_i = V_i z``, the output is ``y = Y z``, and

.. math::

    z'Qz = \ell^2\|x\|^2 + \sum_i 2\bigl(\|w_i - c_i v_i\|^2_{\Lambda_i} - r_i^2\|v_i\|^2_{\Lambda_i}\bigr) - \|y\|^2 .

The network is ℓ-Lipschitz if ``Q ⪰ 0``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt import activations
from ldlt.block_ldlt import BlockFactors, block_ldlt
from ldlt.circulant import CirculantWeight
from ldlt.graph import Activation, Affine, Graph, Input, Wire
from ldlt.grid import operator_norm

if TYPE_CHECKING:
    from ldlt.network import Lipschitz

__all__ = ["BlockFactors", "MatrixInequality", "assemble", "block_ldlt", "from_graph", "residual"]


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
        weights: Explicit matrices by parameter name.
        multipliers: ``Λ`` by activation node, (features,).
        bound: ℓ.
        gain: Factor of the output.
    """
    blocks = [graph.input, *graph.activations]
    sizes = [b.features for b in blocks]
    total = sum(sizes)
    like = torch.zeros((), dtype=torch.float64)
    unit = torch.eye(total, dtype=torch.float64)
    own = dict(zip([b.name for b in blocks], unit.split(sizes, 1), strict=True))  # (N, size): coordinates of each block
    values: dict[str, Tensor] = {}
    form = torch.zeros(total, total, dtype=torch.float64)
    for node in graph.nodes:
        if isinstance(node, Input):
            values[node.name] = own[node.name].reshape(total, *node.shape)
            form += bound**2 * own[node.name] @ own[node.name].T
        elif isinstance(node, Affine):
            explicit = weights[node.weight].detach()
            if isinstance(explicit, CirculantWeight):
                matrix = explicit.matrix().double()
            else:
                matrix = node.matrix(explicit.double(), graph)
            value = F.linear(values[node.parents[0]].flatten(1), matrix)
            # A matrix may have other rows than the layer, such as one difference of two outputs; an image may not.
            values[node.name] = value if len(node.shape) == 1 else value.reshape(total, *node.shape)
        elif isinstance(node, Activation):
            v, w = values[node.parents[0]].reshape(total, -1), own[node.name]
            form += _constraint(node, module, v, w, multipliers[node.name].detach().double())
            values[node.name] = w.reshape(total, *node.shape)
        else:
            assert isinstance(node, Wire)
            parents = [values[p] for p in node.parents]
            if node.role == "sum":
                values[node.name] = sum(s * p for s, p in zip(node.scales, parents, strict=True)) + like
            elif node.role == "order":
                values[node.name] = parents[0].reshape(total, *node.shape)
            else:
                values[node.name] = node.bind(module)(*parents)
    y = gain * values[graph.output].reshape(total, -1)
    scale = float(torch.linalg.matrix_norm(form, 2))
    form -= y @ y.T
    return MatrixInequality((form + form.T) / 2, tuple(b.name for b in blocks), tuple(sizes), scale)


def _constraint(node: Activation, module: nn.Module, v: Tensor, w: Tensor, multiplier: Tensor) -> Tensor:
    """``2(‖w − cv‖²_Λ − r²‖v‖²_Λ)`` as a matrix, for v, w (N, features) in coordinates."""
    sector = activations.sector(node.resolve(module))

    def spread(value: Tensor | float) -> Tensor:
        flat = torch.as_tensor(value, dtype=torch.float64).detach().reshape(-1, 1)
        return flat.expand(-1, node.features // len(flat)).reshape(-1)

    center, radius = spread(sector.center), spread(sector.radius)
    shifted = w - center * v
    return 2 * ((shifted * multiplier) @ shifted.T - (v * (radius**2 * multiplier)) @ v.T)


def assemble(net: Lipschitz) -> MatrixInequality:
    """``Q`` of a network built here, at its current parameters, with its own multipliers and declared bound.

    For the head ``"rows"`` the inequality is that of the reported :attr:`~ldlt.Lipschitz.bound`, with multipliers
    scaled alike.
    """
    with torch.no_grad():
        found = net._sweep(torch.float64)
        weights = {**net._free(torch.float64).weights, **found.weights}
        names = [a.name for a in net.graph.activations]
        from ldlt.network import join_groups  # noqa: PLC0415

        multipliers = {n: join_groups(net.plan, n, found.multipliers) for n in names}
        ell, gain = float(found.bound), 1.0
        if not net.plan.output.free:
            gain = float(net._gain(found))
        elif not net._blueprint.head.joint:
            # Scaling Q by τ scales ℓ² and Λ: the joint bound is ℓ√τ with τ = ‖U‖².
            tau = float(operator_norm(found.output)) ** 2
            ell, multipliers = ell * tau**0.5, {n: tau * m for n, m in multipliers.items()}
        return from_graph(net.graph, net.module, weights, multipliers, ell, gain)


def residual(net: Lipschitz) -> float:
    """Smallest eigenvalue of ``Q`` relative to its scale: not below ``-1e-12`` or so for a network built here."""
    return assemble(net).residual
