r"""Local bounds: the same matrix inequality with the slopes that occur in a region.

In a convex region (an l2 ball or a box) the segment between two points stays inside, so with slopes that hold for every
pre-activation met there the inequality bounds ``‖f(p) − f(q)‖ ≤ ℓ‖p − q‖`` for all p, q in the region.

Pre-activations are enclosed by affine forms: around the value ``v0`` at the centre,

.. math::

    v - v_0 = A\,(x - x_0) + \sum_i A_i e_i ,\qquad |e_i| \le r_i\,\mathrm{dev}(v_i) ,

where each activation adds ``w − w_0 = c(v − v_0) + e`` with the centre c and the radius r of its slopes on the interval
just found; for a group of entries that a softmax mixes, ``|e_i|`` is at most r times the norm of their deviations. A
row of A contributes its l2 norm times the radius of a ball, or its absolute values times the half-widths of a box. For
the first layer this is exact; deeper, linear dependencies between neurons are kept, and nothing but the radii is lost.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.certificates.enclosed import doubles
from ldlt.certificates.problem import Problem, global_slopes, push
from ldlt.certificates.region import Region
from ldlt.errors import ShapeError
from ldlt.graph import Activation, Affine, Graph, Input, Wire, fold

__all__ = ["Ranges", "local_problem", "ranges"]

_ROUNDING = 1e-9  # relative: deviations are sums of at most some 1e5 products in float64


@dataclass(frozen=True, eq=False)
class Ranges:
    """What happens in a region, by activation.

    Attributes:
        low: Lower ends of the pre-activations, (features,).
        high: Upper ends.
        slopes: ``(m, L)`` of elementwise activations, (features,) each.
    """

    low: dict[str, Tensor]
    high: dict[str, Tensor]
    slopes: dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _Form:
    """A value as an affine form: at the centre, (1, *shape), and by block, (size, *shape)."""

    nominal: Tensor
    rows: dict[str, Tensor]


def _reach(region: Region, rows: Tensor) -> Tensor:
    """Largest ``|Σ_i rows_ij (x − x_0)_i|`` for each j; rows (inputs, n)."""
    radius = region.radius.detach().double().cpu()
    if region.kind == "ball":
        return radius * torch.linalg.vector_norm(rows, dim=0)
    return radius.reshape(-1) @ rows.abs()


def ranges(graph: Graph, module: nn.Module, region: Region) -> Ranges:
    """Enclose all pre-activations and slopes in a region.

    Args:
        graph: What :func:`ldlt.graph.trace.trace` returned for the module.
        module: The module.
        region: A ball or a box of input vectors.
    """
    if region.center.numel() != graph.input.features:
        raise ShapeError(f"the region has {region.center.numel()} coordinates, the input {graph.input.features}")
    forms = _Forms(graph, module, region)
    with torch.no_grad():
        fold(graph, forms)
    return forms.found


def local_problem(graph: Graph, module: nn.Module, region: Region) -> Problem:
    """The problem whose bound holds for all pairs of points in the region."""
    return Problem.build(graph, module, ranges(graph, module, region).slopes)


class _Forms:
    """The algebra of affine forms in a region; collects what happens there."""

    def __init__(self, graph: Graph, module: nn.Module, region: Region) -> None:
        self.graph, self.region, self.tensors = graph, region, doubles(graph, module)
        self.module = copy.deepcopy(module).double().cpu().eval()
        self.found = Ranges({}, {}, {})
        self.noise: dict[str, Tensor] = {}  # largest |e| by activation

    def input(self, node: Input) -> _Form:
        eye = torch.eye(node.features, dtype=torch.float64)
        center = self.region.center.detach().double().cpu()
        return _Form(center.reshape(1, *node.shape), {node.name: eye.reshape(-1, *node.shape)})

    def wire(self, node: Wire, parents: Sequence[_Form]) -> _Form:
        nominal = node.bind(self.tensors)(*(p.nominal for p in parents))  # with the constants that a sum may add
        return _Form(nominal, push(node, self.tensors, [p.rows for p in parents], self.graph))

    def affine(self, node: Affine, parent: _Form) -> _Form:
        weight = self.tensors(node.weight)
        bias = None if node.bias is None else self.tensors(node.bias)
        rows = {b: node.apply(r, weight) for b, r in parent.rows.items()}
        return _Form(node.apply(parent.nominal, weight, bias), rows)

    def activation(self, node: Activation, before: _Form) -> _Form:
        activation = node.resolve(self.module)
        nominal = before.nominal.reshape(-1)
        reach = torch.zeros_like(nominal)
        for b, r in before.rows.items():
            flat = r.reshape(len(r), -1)
            reach += _reach(self.region, flat) if b == self.graph.input.name else self.noise[b] @ flat.abs()
        reach = (1 + _ROUNDING) * reach + 1e-3 * _ROUNDING * (1 + nominal.abs())  # the centre's value is rounded, too
        self.found.low[node.name], self.found.high[node.name] = nominal - reach, nominal + reach
        member = activations.mixed(activation, node.shape)
        if member is None:
            bounds = global_slopes(node, self.module)
            low, high = activations.slope_range(activation, nominal - reach, nominal + reach, bounds)
            self.found.slopes[node.name] = (low, high)
            center, noise = (high + low) / 2, (high - low) / 2 * reach
        else:
            sector, groups = activations.sector(activation), torch.zeros(int(member.max()) + 1, dtype=reach.dtype)
            if sector.group:  # sorting moves no entry further than the largest move in its group
                width = groups.scatter_reduce(0, member, reach, "amax")
            else:  # ‖e‖ ≤ r‖v − v_0‖ over the group
                width = float(sector.radius) * groups.scatter_add(0, member, reach**2).sqrt() * (1 + _ROUNDING)
            center, noise = float(sector.center) * torch.ones_like(reach), width[member]
        rows = {b: r * center.reshape(node.shape) for b, r in before.rows.items()} if bool(center.any()) else {}
        self.noise[node.name] = noise
        if bool(noise.any()):
            rows[node.name] = torch.eye(node.features, dtype=torch.float64).reshape(-1, *node.shape)
        return _Form(node.apply(self.module, before.nominal.clone()), rows)
