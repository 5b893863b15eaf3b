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
Rounding is covered by margins, not by a proof: what rests on a region is not called rigorous.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.errors import OptionError, ShapeError
from ldlt.graph import Activation, Affine, Constant, Graph, Input, Tensors, Wire, fold, lookup

__all__ = ["KINDS", "Ranges", "Region", "Rows", "doubles", "global_slopes", "nonzero", "push", "ranges"]

KINDS = ("ball", "box")

Rows = dict[str, Tensor]
"""A linear function of blocks: block -> (size of the block, *shape), the images of its unit vectors."""

_ROUNDING = 1e-9  # relative: deviations are sums of at most some 1e5 products in float64


@dataclass(frozen=True, eq=False)
class Region:
    r"""All inputs with :math:`\|x - \text{center}\| \le \text{radius}`.

    Attributes:
        kind: ``"ball"``: the Euclidean norm, and a radius with one element. ``"box"``: entry by entry, with one
            half-width per input.
        center: Center, of the shape of an input.
        radius: Radius or half-widths.
    """

    kind: str
    center: Tensor
    radius: Tensor

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"the region must be one of {', '.join(KINDS)}, not {self.kind!r}")
        shape = torch.Size([]) if self.kind == "ball" else self.center.shape
        if self.radius.shape != shape:
            raise ShapeError(f"the radius of a {self.kind} must have shape {tuple(shape)}")
        if not bool(self.center.isfinite().all() and self.radius.isfinite().all() and (self.radius >= 0).all()):
            raise OptionError("center and radius of a region must be finite, and the radius not negative")


# -- linear functions ------------------------------------------------------------------------------------------------


def doubles(graph: Graph, module: nn.Module) -> Tensors:
    """The tensors of a graph in float64 on the CPU, constants computed in it: for searches, without error bounds."""

    def wide(tensor: Tensor) -> Tensor:
        tensor = tensor.detach().cpu()
        return tensor.double() if tensor.is_floating_point() else tensor

    def widened(constant: Constant) -> Constant:
        kwargs = tuple(
            (k, torch.float64 if v in (torch.float16, torch.bfloat16, torch.float32) else v) for k, v in constant.kwargs
        )
        value = None if constant.value is None else wide(constant.value)
        return dataclasses.replace(constant, kwargs=kwargs, value=value)

    constants = {path: widened(c) for path, c in graph.constants.items()}
    return Graph(graph.nodes, graph.output, constants).tensors(lambda path: wide(lookup(module, path)))


def global_slopes(node: Activation, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Exact slope bounds ``(m, L)`` of an elementwise activation, (features,) each."""
    activation = node.resolve(module)
    if isinstance(activation, nn.PReLU):
        activations.slope_bounds(activation)  # refuses what is not finite
        weight = activation.weight.detach().double().cpu().reshape(-1, 1)
        spread = weight.expand(-1, node.features // len(weight)).reshape(-1)
        return spread.clamp(max=1.0), spread.clamp(min=1.0)
    low, high = activations.slope_bounds(activation)
    like = torch.ones(node.features, dtype=torch.float64)
    return low * like, high * like


def nonzero(rows: Rows) -> Rows:
    """Without the blocks that are zero."""
    return {b: r for b, r in rows.items() if r.numel() and any(float(end) != 0 for end in r.aminmax())}


def push(node: Wire, tensors: Tensors, parents: Sequence[Rows], graph: Graph) -> Rows:
    """Run a linear operation on the unit vectors of each block; parents without the block are zero there."""
    run = node.linear(tensors)
    found: Rows = {}
    for b in dict.fromkeys(b for p in parents for b in p):
        count = next(len(p[b]) for p in parents if b in p)
        shapes = [graph[n].shape for n in node.parents]
        found[b] = run(
            *(
                p[b] if b in p else torch.zeros(count, *s, dtype=torch.float64)
                for p, s in zip(parents, shapes, strict=True)
            )
        )
    return nonzero(found)


# -- ranges ------------------------------------------------------------------------------------------------------------


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
