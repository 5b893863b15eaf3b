"""The parameterisation backwards: from explicit weights and multipliers to free parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ldlt.engine.contraction import Contracted
from ldlt.engine.factor import Frame
from ldlt.engine.linalg import unbounded
from ldlt.engine.plan import Group
from ldlt.engine.rule import Neurons
from ldlt.engine.sweep import Sweep
from ldlt.errors import InfeasibleError, ShapeError
from ldlt.graph import Convolution

if TYPE_CHECKING:
    from ldlt.engine.network import Lipschitz


class Inversion(Sweep):
    """A sweep in which the free matrices are found from the explicit ones."""

    explicit: Mapping[str, Tensor]  # by parameter name
    wanted: Mapping[str, Tensor]  # group -> Λ
    inverse: dict[str, dict[str, Tensor]]  # group -> free tensors by role, or by the name of the parameter

    def _multiplier(self, group: Group, new: Neurons) -> Tensor:
        return self.wanted[group.name]

    def _contracted(self, group: Group, frame: Frame, new: Neurons | None, multiplier: Tensor | None) -> Contracted:
        matrix = self._normalised(group, frame)
        if new is not None and multiplier is not None:
            matrix = (2**0.5 * new.radius * multiplier.sqrt())[:, None] * matrix  # U = √2 r Λ^{1/2} C F
        contraction = self.blueprint.contraction  # of its part in the range
        weight, others = contraction.invert(frame.soften(_hardened(frame, matrix)), self._extra(group))
        self._remember(group, frame, weight, others)
        return contraction(weight, others, self._straight(group, new))

    def _headed(self, group: Group, frame: Frame) -> Tensor:
        head, matrix = self.blueprint.head, self.blueprint.scaled(group, self._normalised(group, frame), -1)
        weight, others = head.invert(_hardened(frame, matrix), self._extra(group))
        self._remember(group, frame, weight, others)
        return head(weight, others)

    def _normalised(self, group: Group, frame: Frame) -> Tensor:
        """``C F`` (n, width) for explicit maps C."""
        scales = [t.scale for t in group.terms for _ in t.members]
        parts = self._split(group, lambda affine: self.explicit[affine.weight])
        return frame.multiply([s * x for s, x in zip(scales, parts, strict=True)])

    def _remember(self, group: Group, frame: Frame, weight: Tensor, others: dict[str, Tensor]) -> None:
        """Free matrices that :meth:`Frame.project` takes to this one."""
        parts = frame.split(_hardened(frame, weight))
        found, waiting = dict(others), list(parts)
        for term, _, node in self._terms(group):
            own, waiting = waiting[: len(term.members)], waiting[len(term.members) :]
            found[node.weight] = torch.cat(own, -1)
        self.inverse[group.name] = found


def _hardened(frame: Frame, matrix: Tensor) -> Tensor:
    """``matrix P^{-1}``, as far as the soft projection can be inverted: softening gives back what lies in the range."""
    parts = []
    for piece, x in frame.spans(matrix):
        eye = torch.eye(piece.width, dtype=matrix.dtype, device=matrix.device)
        soft = piece.soften(eye)
        parts.append(x @ torch.linalg.solve(soft @ soft + torch.finfo(matrix.dtype).eps * eye, soft))
    return torch.cat(parts, -1)


def _split(net: Lipschitz, multipliers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Multipliers by group in float64, if the network can have them."""
    found = {}
    for group in net.plan.groups.values():
        value = multipliers[group.node].detach().double()
        value = value if group.rows is None else value[list(group.rows)]
        shared = value.reshape(len(net._parameter("log_multiplier", group.name)), -1)
        if not bool((value > 0).all()) or not torch.allclose(shared, shared[:, :1], rtol=1e-9):
            raise InfeasibleError(
                f"the multipliers of '{group.node}' must be positive, and equal where it mixes entries"
            )
        found[group.name] = value
    return found


def load_explicit(net: Lipschitz, weights: Mapping[str, Tensor], multipliers: Mapping[str, Tensor]) -> None:
    """See :meth:`ldlt.Lipschitz.load_explicit`."""
    convolutions = [a.name for a in net.graph.affines if isinstance(a, Convolution)]
    if convolutions:
        raise InfeasibleError(
            f"node '{convolutions[0]}' is a convolution, whose explicit map has no kernel of the layer's size; only "
            "networks of Linear layers can be inverted"
        )
    kept = [g.node for g in net.plan.groups.values() if not g.free]
    if kept or not net.plan.output.free:
        raise InfeasibleError(f"node '{(kept or [net.graph.output])[0]}' has a given map, which cannot be inverted")
    missing = [n for n, _ in net.module.named_parameters() if n not in weights]
    missing += [a.name for a in net.graph.activations if a.name not in multipliers]
    if missing:
        raise ShapeError(f"no value was given for '{missing[0]}'")
    wanted = _split(net, multipliers)
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        for name, p in net.module.named_parameters():
            p.copy_(weights[name])  # maps that are not normalised, biases and slopes are what they are
        run = Inversion(net._blueprint, net.module, net._free(torch.float64))
        run.explicit, run.wanted, run.inverse = {n: w.detach().double() for n, w in weights.items()}, wanted, {}
        try:
            run.run()
        except InfeasibleError:
            net.load_state_dict(before)
            raise
        for group in net.plan.all_groups:
            for role, value in run.inverse[group.name].items():
                _store(net, group, role, value)
        for name, value in wanted.items():
            stored = net._parameter("log_multiplier", name)
            stored.copy_(unbounded(value.log().reshape(len(stored), -1)[:, 0]))


def _store(net: Lipschitz, group: Group, role: str, value: Tensor) -> None:
    if role in net._roles:
        net._parameter(role, group.name).copy_(value)
        return
    (rows,) = {t.rows for t in group.terms if getattr(net.graph[t.affine], "weight", "") == role}
    target = net.module.get_parameter(role)
    target[slice(None) if rows is None else list(rows)] = value.to(target)
