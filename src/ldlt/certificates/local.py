r"""Local bounds: the same matrix inequality with the slopes that occur in a region.

In a convex region (an l2 ball or a box) the segment between two points stays inside, so with slopes that hold for every
pre-activation met there the inequality bounds ``‖f(p) − f(q)‖ ≤ ℓ‖p − q‖`` for all p, q in the region.

Pre-activations are enclosed by affine forms: around the value ``v0`` at the centre,

.. math::

    v - v_0 = A\,(x - x_0) + \sum_i A_i e_i ,\qquad |e_i| \le r_i\,\mathrm{dev}(v_i) ,

where each activation adds ``w − w_0 = c(v − v_0) + e`` with the centre c and the radius r of its slopes on the interval
just found. A row of A contributes its l2 norm times the radius of a ball, or its absolute values times the half-widths
of a box. For the first layer this is exact; deeper, linear dependencies between neurons are kept, and nothing but the
radii is lost.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.certificates.problem import Problem, global_slopes, push
from ldlt.certificates.region import Region
from ldlt.certificates.slopes import slope_range
from ldlt.errors import ShapeError
from ldlt.graph import Activation, Affine, Graph, Input, Wire, lookup

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
        graph: What :func:`ldlt.trace.trace` returned for the module.
        module: The module.
        region: A ball or a box of input vectors.
    """
    if region.center.numel() != graph.input.features:
        raise ShapeError(f"the region has {region.center.numel()} coordinates, the input {graph.input.features}")
    twin = copy.deepcopy(module).double().cpu().eval()
    x0 = region.center.detach().double().cpu().reshape(1, *graph.input.shape)
    found = Ranges({}, {}, {})
    forms: dict[str, _Form] = {}
    noise: dict[str, Tensor] = {}  # largest |e| by activation
    with torch.no_grad():
        for node in graph.nodes:
            parents = [forms[p] for p in node.parents]
            if isinstance(node, Input):
                eye = torch.eye(node.features, dtype=torch.float64)
                forms[node.name] = _Form(x0, {node.name: eye.reshape(-1, *node.shape)})
            elif isinstance(node, Affine):
                weight = lookup(twin, node.weight)
                bias = None if node.bias is None else lookup(twin, node.bias)
                rows = {b: node.apply(r, weight) for b, r in parents[0].rows.items()}
                forms[node.name] = _Form(node.apply(parents[0].nominal, weight, bias), rows)
            elif isinstance(node, Activation):
                forms[node.name] = _activate(node, twin, parents[0], region, graph.input.name, noise, found)
            else:
                assert isinstance(node, Wire)
                forms[node.name] = _wire(node, twin, parents, graph)
    return found


def local_problem(graph: Graph, module: nn.Module, region: Region) -> Problem:
    """The problem whose bound holds for all pairs of points in the region."""
    return Problem.build(graph, module, ranges(graph, module, region).slopes)


def _activate(
    node: Activation,
    module: nn.Module,
    before: _Form,
    region: Region,
    source: str,
    noise: dict[str, Tensor],
    found: Ranges,
) -> _Form:
    activation = node.resolve(module)
    nominal = before.nominal.reshape(-1)
    reach = torch.zeros_like(nominal)
    for b, r in before.rows.items():
        flat = r.reshape(len(r), -1)
        reach += _reach(region, flat) if b == source else noise[b] @ flat.abs()
    reach = (1 + _ROUNDING) * reach + 1e-3 * _ROUNDING * (1 + nominal.abs())  # the value at the centre is rounded, too
    found.low[node.name], found.high[node.name] = nominal - reach, nominal + reach
    value = activation(before.nominal.clone())
    member = activations.mixed(activation, node.shape)
    if member is not None:
        # Sorting moves no entry further than the largest move in its group.
        width = torch.zeros(int(member.max()) + 1, dtype=reach.dtype).scatter_reduce(0, member, reach, "amax")
        noise[node.name] = width[member]
        rows = {}
    else:
        bounds = global_slopes(node, module)
        low, high = slope_range(activation, nominal - reach, nominal + reach, bounds)
        found.slopes[node.name] = (low, high)
        center = ((high + low) / 2).reshape(node.shape)
        noise[node.name] = (high - low) / 2 * reach
        rows = {b: r * center for b, r in before.rows.items()}
    if bool(noise[node.name].any()):
        rows[node.name] = torch.eye(node.features, dtype=torch.float64).reshape(-1, *node.shape)
    return _Form(value, rows)


def _wire(node: Wire, module: nn.Module, parents: list[_Form], graph: Graph) -> _Form:
    if node.role == "order":
        nominal = parents[0].nominal.reshape(1, *node.shape)
    elif node.target is None:
        nominal = node.scales[0] * parents[0].nominal
    else:  # with the constants that a sum may add
        nominal = node.bind(graph.tensors(module))(*(p.nominal for p in parents))
    return _Form(nominal, push(node, module, [p.rows for p in parents], graph))
