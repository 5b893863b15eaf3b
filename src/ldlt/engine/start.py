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
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.check import choice
from ldlt.engine.plan import Group
from ldlt.graph import Activation, Affine, Convolution, Graph, lookup
from ldlt.graph.convolution import Spec
from ldlt.graph.fold import Forward, visit

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


def _start(affine: Affine, weight: Tensor, size: float) -> None:
    """Fill a weight so that its map is ``size`` times (semi-)orthogonal."""
    if not isinstance(affine, Convolution):
        nn.init.orthogonal_(weight, size)
        return
    # An orthogonal matrix in the middle, as many taps as it moves between outputs: it is one at every frequency.
    weight.zero_()
    spec = affine.spec
    assert isinstance(spec, Spec)
    used = [min(k, s) for k, s in zip(affine.kernel, spec.stride, strict=True)]
    middle = tuple(slice((k - u) // 2, (k - u) // 2 + u) for k, u in zip(affine.kernel, used, strict=True))
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


def _place_for(module: nn.Module, spread: float, depth: int) -> float:
    """Mean nearest to 0 where ``E σ'(mean + spread·z)²``, z standard normal, is ``1 − 1/(2 depth)`` of its maximum."""
    if activations.sector(module).group is not None or not spread > 0:
        return 0.0
    nodes, weights = np.polynomial.hermite_e.hermegauss(41)
    means = np.linspace(-8 * spread - 4, 8 * spread + 4, 401)
    points = torch.from_numpy(means[:, None] + spread * nodes[None]).reshape(-1, 1)
    act = copy.deepcopy(module).double().cpu().eval()
    channels = act.weight.numel() if isinstance(act, nn.PReLU) else 1
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
    forward = Forward(module, tensors, torch.randn(_PROBE, *net.input_shape, dtype=like.dtype, device=like.device))
    values: dict[str, Tensor] = {}
    for node in graph.nodes:
        if isinstance(node, Activation):
            (source,) = node.parents
            flat = values[source].flatten(1).clone()  # (samples, features)
            for group in net.plan.groups.values():
                if group.node == node.name:
                    _shift(net, group, node, flat, placing, depth)
            values[source] = flat.reshape(values[source].shape)
        values[node.name] = visit(node, [values[p] for p in node.parents], forward)


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
