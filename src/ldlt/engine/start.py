r"""Start values of the free parameters.

**Matrices.** ``W = s √α · (semi-)orthogonal``. On a chain whose contractions all have norm ``u = s/√(1 + s²)`` the
explicit hidden maps are orthogonal times

.. math:: \frac1r \sqrt{\frac{u^2 (1 - u^2)}{1 - (1 - ρ^2) u^2}} \;\le\; \frac{1}{r (1 + |ρ|)} = \frac1L ,

with equality for ``s² = 1/|ρ|``: 1 for slopes [0, 1], and without limit for a joint nonlinearity (ρ = 0), where ``s²
= 2n`` loses a fifth of the signal over the whole depth ``n``. ``gain`` multiplies it. With ``k`` activations whose
input stays live beside them (residual blocks) ``s²`` is divided by ``k``, so that the stack inflates by a constant; so
are the maps that no activation normalises.

**Biases.** With zero biases the signal of a ReLU network decays like :math:`2^{-n/2}`. On standard normal inputs the
default puts the mean of each pre-activation at the point nearest to zero where the mean squared slope is ``1 − 1/(2n)``
of the best there is: half of the signal then reaches the end at any depth. ``placing`` multiplies the mean: what is
gained in signal is lost in nonlinearity.
"""

from __future__ import annotations

import copy
import math
from functools import cache
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.check import choice
from ldlt.engine.linalg import MARGIN, unbounded
from ldlt.engine.plan import Group
from ldlt.graph import Activation, Affine, Convolution, Graph, Wire, lookup
from ldlt.graph.convolution import Spec
from ldlt.graph.fold import Forward, visit
from ldlt.images.torus import Torus

if TYPE_CHECKING:
    from ldlt.engine.network import Lipschitz

INITS = ("default", "orthogonal", "keep")
_PROBE = 256


def initialise(net: Lipschitz, how: str, gain: float, alpha: float, placing: float = 1.0) -> None:
    """Set the free matrices and biases of a network.

    Args:
        net: The network.
        how: ``"default"``: orthogonal matrices and placed biases. ``"orthogonal"``: matrices only, biases stay.
            ``"keep"``: nothing is changed.
        gain: Norm of the free matrices in units of ``√α``; the contractions then have norm ``gain/√(1 + gain²)``.
        alpha: Start value of α.
        placing: Means of the pre-activations, in units of the place above.
    """
    if choice("init", how, INITS) != "keep":
        _orthogonal(net, gain, alpha)
        if net._blueprint.torus is not None:
            _alive(net, net._blueprint.torus)
    if how == "default":
        _place(net, placing)


@torch.no_grad()
def _orthogonal(net: Lipschitz, gain: float, alpha: float) -> None:
    depth = _depth(net.graph)
    groups = [(net.plan.groups[s.group], s.live) for s in net.plan.steps if s.group is not None]
    residual = {g.name for g, live in groups if set(g.members) & set(live)}  # a parent is still read after them
    shrink = 1 / math.sqrt(max(len(residual), 1))
    for affine in net.graph.affines:
        if affine.name not in net.plan.normalised:
            _start(affine, net.module.get_parameter(affine.weight), shrink)
    for group in net.plan.all_groups:
        part = net._blueprint.normaliser(group)
        best, node = shrink if group.name in residual else 1.0, net.graph.index.get(group.node)
        if isinstance(node, Activation):  # s = |ρ|^{-1/2}, at most √(2n)
            rho = float(torch.as_tensor(activations.sector(node.resolve(net.module)).rho).abs().mean())
            best /= math.sqrt(max(rho, 1 / (2 * depth)))
        for term in group.terms:
            affine = cast(Affine, net.graph[term.affine])
            weight = net.module.get_parameter(affine.weight)
            size = part.free_gain(gain * best, alpha) / math.sqrt(len(group.terms))
            if isinstance(affine, Convolution):
                _start(affine, weight, size)
                continue
            start = torch.empty(group.size, weight.shape[1], dtype=weight.dtype, device=weight.device)
            nn.init.orthogonal_(start, size)
            weight[slice(None) if term.rows is None else list(term.rows)] = start


@torch.no_grad()
def _alive(net: Lipschitz, torus: Torus) -> None:
    """Start values of convolutions that keep their kernels: orthogonal, and what is added to a skip is small.

    With θ = 1/2 a chain of orthogonal kernels passes on its covariance as it is. Of ``b`` branches that are added to
    something live each gets the gain ``1/b``, and θ = 1/(2b): the whole stack inflates by a constant.
    """
    graph, plan = torus.graph, net.plan
    sums = [n for n in graph.nodes if isinstance(n, Wire) and n.role == "sum" and len(n.parents) > 1]
    sums = [n for n in sums if n.name in torus.sheets]
    gain = 1 / max(len(sums), 2)
    depth: dict[str, int] = {}
    for node in graph.nodes:
        depth[node.name] = max((depth[p] for p in node.parents), default=0) + isinstance(node, Activation)
    small = set()
    for node in sums:
        branch: str | None = max(node.parents, key=depth.__getitem__)
        while branch in torus.operators and not torus.operators[branch].weight:
            (branch, *_) = torus.operators[branch].node.parents
        small.add(branch)
    trained = {n for n, p in net.module.named_parameters() if p.requires_grad}
    for name, operator in torus.operators.items():
        if operator.weight in trained and operator.ring is not None and operator.node.name not in plan.normalised:
            _kernel(net.module.get_parameter(operator.weight), operator.ring, gain if name in small else 1.0)
    for step in plan.steps:
        group = plan.groups.get(step.group or "")
        if group is not None and not group.free and torus.image(group.value) in torus.sheets:
            beside = {torus.image(v) for v in step.live} - {torus.image(group.value), group.name}
            share = gain / 2 if sums and beside else 0.5
            net._parameter("margin", group.name).fill_(unbounded(math.log(share / (1 - share)), MARGIN))


def _start(affine: Affine, weight: Tensor, size: float) -> None:
    """Fill a weight so that its map is ``size`` times (semi-)orthogonal."""
    if isinstance(affine, Convolution):
        assert isinstance(affine.spec, Spec)
        _kernel(weight, affine.spec, size)
    else:
        nn.init.orthogonal_(weight, size)


def _kernel(weight: Tensor, spec: Spec, size: float) -> None:
    """An orthogonal matrix in the middle, as many taps as it moves between outputs: it is one at every frequency."""
    weight.zero_()
    used = [min(k, s) for k, s in zip(weight.shape[2:], spec.stride, strict=True)]
    middle = tuple(slice((k - u) // 2, (k - u) // 2 + u) for k, u in zip(weight.shape[2:], used, strict=True))
    for part in weight.split(weight.shape[0] // spec.groups):
        block = torch.empty(len(part), part.shape[1] * math.prod(used), dtype=weight.dtype, device=weight.device)
        nn.init.orthogonal_(block, size)
        part[(slice(None), slice(None), *middle)] = block.reshape(len(part), part.shape[1], *used)


def _depth(graph: Graph) -> int:
    """Largest number of activations on a path from the input to the output, at least one."""
    depth: dict[str, int] = {}
    for node in graph.nodes:
        depth[node.name] = max((depth[p] for p in node.parents), default=0) + isinstance(node, Activation)
    return max(depth[graph.output], 1)


@cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.hermite_e.hermegauss(41)


def _place_for(module: nn.Module, spread: float, depth: int) -> float:
    """Mean nearest to 0 where ``E σ'(mean + spread·z)²``, z standard normal, is ``1 − 1/(2 depth)`` of its maximum."""
    if activations.sector(module).group is not None or not spread > 0:
        return 0.0
    nodes, weights = _quadrature()
    means = np.linspace(-8 * spread - 4, 8 * spread + 4, 401)
    points = torch.from_numpy(means[:, None] + spread * nodes[None]).reshape(-1, 1)
    act = copy.deepcopy(module).double().cpu().eval()
    channels = max((p.numel() for p in act.parameters()), default=1)  # of a PReLU, masked or not
    step = 1e-4
    slope = (act((points + step).expand(-1, channels)) - act((points - step).expand(-1, channels)))[:, 0] / (2 * step)
    energy = (slope.reshape(len(means), -1).numpy() ** 2 @ weights) / weights.sum()
    good = energy >= (1 - 1 / (2 * depth)) * energy.max()
    return float(means[good][np.abs(means[good]).argmin()])


@torch.no_grad()
def _place(net: Lipschitz, placing: float) -> None:
    """Run the graph, and move the biases of each activation's input when it is reached."""
    graph, module = net.graph, net.module
    like = next(p for p in module.parameters() if p.is_floating_point())
    for affine in graph.affines:
        if affine.bias is not None:
            module.get_parameter(affine.bias).zero_()
    explicit, depth = net.explicit(), _depth(graph)
    tensors = graph.tensors(lambda path: explicit[path] if path in explicit else lookup(module, path))
    count = min(_PROBE, max(4, 2**20 // max(n.features for n in graph.nodes)))
    forward = Forward(module, tensors, torch.randn(count, *net.input_shape, dtype=like.dtype, device=like.device))
    values: dict[str, Tensor] = {}
    for node in graph.nodes:
        if isinstance(node, Activation):
            (source,) = node.parents
            flat = values[source].flatten(1).clone()  # (samples, features)
            if net._blueprint.torus is not None and source in net._blueprint.torus.sheets:
                values[source] = _lift(net, node, values[source], placing, depth)
                flat = values[source].flatten(1)
            for group in net.plan.groups.values():
                if group.node == node.name:
                    _shift(net, group, node, flat, placing, depth)
            values[source] = flat.reshape(values[source].shape)
        values[node.name] = visit(node, [values[p] for p in node.parents], forward)


def _lift(net: Lipschitz, node: Activation, value: Tensor, placing: float, depth: int) -> Tensor:
    """Move the bias of the channels that an activation reads, and the value (samples, channels, ...) itself."""
    bias = _bias(net, node.parents[0])
    if bias is None or len(bias) != value.shape[1] or type(node.module) is nn.Identity:
        return value
    axes = [0, *range(2, value.ndim)]
    spread = float(value.std(axes).mean())
    step = placing * _place_for(node.resolve(net.module), spread, depth) - value.mean(axes)
    bias += step.to(bias)
    return value + step.reshape(-1, *(1,) * (value.ndim - 2))


def _bias(net: Lipschitz, name: str) -> Tensor | None:
    """The nearest trained vector that is added to a value."""
    node, trained = net.graph[name], dict(net.module.named_parameters())
    while isinstance(node, Wire) and node.role in ("sum", "linear"):
        for path in (p for c in node.constants for p in sorted(net.graph.sources(c)) if node.role == "sum"):
            if path in trained and path.endswith("bias") and trained[path].requires_grad:
                return trained[path]
        node = net.graph[node.parents[0]]
    affine = node if isinstance(node, Convolution) else None
    return trained.get(affine.bias or "") if affine is not None else None


def _shift(net: Lipschitz, group: Group, node: Activation, flat: Tensor, placing: float, depth: int) -> None:
    """Move the first bias of a group, and what it adds to (samples, features)."""
    for term in group.terms:
        affine = net.graph[term.affine]
        if not isinstance(affine, Affine) or affine.bias is None:
            continue
        rows = slice(None) if group.rows is None else list(group.rows)
        v = flat[:, rows]
        delta = placing * _place_for(node.resolve(net.module), float(v.std(0).mean()), depth) - v.mean(0)
        where = slice(None) if term.rows is None else list(term.rows)
        step = delta
        if isinstance(affine, Convolution):  # one bias for all pixels of a channel
            shift = delta.new_zeros(affine.features)
            count = shift.clone()
            shift[where], count[where] = delta, 1
            pixels = math.prod(affine.shape[1:])
            step = shift.reshape(-1, pixels).sum(1) / count.reshape(-1, pixels).sum(1).clamp_min(1)
            delta = step.repeat_interleave(pixels)[where]
            where = slice(None)
        flat[:, rows] = v + delta
        parameter = net.module.get_parameter(affine.bias)
        parameter[where] += (step / term.scale).to(parameter)
        return
