"""Free parameters to explicit weights: one pure function that runs the rule over a graph in the order of its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt import activations
from ldlt.contraction import Contracted, Contraction
from ldlt.elimination import Elimination, Slopes
from ldlt.generator import Frame, FrameChoice, Generator, combine, linear
from ldlt.graph import Activation, Affine, Graph, Wire
from ldlt.heads import Head
from ldlt.plan import FreeTerm, Group, Plan

__all__ = ["Blueprint", "Explicit", "Free", "sweep"]


@dataclass
class Blueprint:
    """Everything about a network that is not a tensor: graph, plan, structural decisions, contraction and head."""

    graph: Graph
    plan: Plan
    contraction: Contraction
    head: Head
    choices: dict[str, FrameChoice | None] = field(default_factory=dict)


@dataclass
class Free:
    """The free parameters.

    Attributes:
        weights: Parameters of the user's module by name: free matrices, and everything else as it is.
        bound: ℓ, scalar.
        extra: Group -> role (``log_alpha``, ``skew``, ``log_multiplier``, ``log_balance``, ``margin``) -> tensor.
    """

    weights: Mapping[str, Tensor]
    bound: Tensor
    extra: Mapping[str, Mapping[str, Tensor]]


@dataclass
class Explicit:
    """The explicit form of a network.

    Attributes:
        weights: Explicit matrices by parameter name (only those that differ from the free ones).
        multipliers: Group -> ``Λ``.
        output: ``F_y`` (k, q): the generator of the output; the constant of the map ``a·y`` is ``ℓ‖F_y' a‖``.
        bound: ℓ.
        inverse: Group -> free tensors by role, when the sweep was run backwards (see :func:`sweep`).
    """

    weights: dict[str, Tensor]
    multipliers: dict[str, Tensor]
    output: Tensor
    bound: Tensor
    inverse: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def _slopes(node: Activation, group: Group, module: nn.Module, like: Tensor) -> Slopes:
    """Sector of the neurons of a group; PReLU's is a function of its current parameters."""
    sector = activations.sector(node.resolve(module))

    def per_neuron(value: Tensor | float) -> Tensor | float:
        if not isinstance(value, Tensor):
            return value
        flat = value.reshape(-1).to(like)
        if len(flat) != node.features:  # one number for all, or one per channel
            flat = flat.reshape(-1, 1).expand(-1, node.features // len(flat)).reshape(-1)
        return flat if group.rows is None else flat[list(group.rows)]

    return Slopes(per_neuron(sector.center), per_neuron(sector.radius), sector.group)


_LARGEST_MARGIN = 0.9995  # keeps I − UU^* of a given map away from singular in float32


class _Run:
    def __init__(
        self, blueprint: Blueprint, module: nn.Module, free: Free, target: Explicit | None, batch: int | None
    ) -> None:
        self.blueprint, self.module, self.free, self.target = blueprint, module, free, target
        self.batch = batch
        self.graph, self.plan = blueprint.graph, blueprint.plan
        source = self.graph.input
        self.state = Elimination(source.name, source.shape, free.bound, blueprint.choices, blueprint.contraction.unit)
        self.weights: dict[str, Tensor] = {}  # parameter name -> explicit matrix so far
        self.multipliers: dict[str, Tensor] = {}
        self.inverse: dict[str, dict[str, Tensor]] = {}
        self.transported = {s.transport for s in self.plan.steps if s.transport is not None}

    # -- wiring ------------------------------------------------------------------------------------------------------

    def transport(self, name: str) -> None:
        node = self.graph[name]
        parents = [self.state.live[p] for p in node.parents]
        if isinstance(node, Affine):
            weight = self.weights.get(node.weight, self.free.weights[node.weight])
            gen = linear(lambda x: F.linear(x, weight), parents, node.shape)
        else:
            assert isinstance(node, Wire)
            if node.role == "order":
                gen = parents[0].reshaped(node.shape)
            elif node.role == "sum":
                gen = combine(list(zip(parents, node.scales, strict=True)), node.shape)
            else:
                gen = linear(node.bind(self.module), parents, node.shape)
        self.state.live[name] = gen

    def join(self, name: str) -> None:
        """Put the groups of one activation together."""
        names, places = self.plan.parts(name)
        parts = [self.state.live[n] for n in names]
        gen = parts[0]
        if places is not None:
            gen = linear(lambda *xs: torch.cat(xs, -1)[:, places], parts, (len(places),))
        self.state.live[name] = gen.reshaped(self.graph[name].shape)

    # -- groups ------------------------------------------------------------------------------------------------------

    def eliminate(self, group: Group, survivors: Sequence[str]) -> None:
        node = self.graph[group.node]
        assert isinstance(node, Activation)
        slopes = _slopes(node, group, self.module, self.free.bound)
        extra = self.free.extra[group.name]
        if not group.free:
            value = self.state.live[group.value].rows(None if group.rows is None else torch.tensor(group.rows))
            margin = _LARGEST_MARGIN * torch.sigmoid(extra["margin"])
            balance = extra["log_balance"].exp()
            self.multipliers[group.name] = self.state.given(group.name, value, slopes, balance, margin, survivors)
            return
        frame = self._frame(group, survivors)
        multiplier = extra["log_multiplier"].exp()
        if slopes.group is not None:
            multiplier = multiplier.repeat_interleave(slopes.group)
        if self.target is not None:
            multiplier = self.target.multipliers[group.name]
        contracted = self._contract(group, frame, slopes, multiplier, extra)
        lazy = self._lazy(group)
        maps = self.state.hidden(group.name, frame, contracted, slopes, multiplier, survivors, lazy)
        self._assign(group, maps)
        self.multipliers[group.name] = multiplier

    def _lazy(self, group: Group) -> bool:
        """Whether the group's map is better applied to the batch factor by factor than multiplied out."""
        if self.batch is None or len(group.terms) != 1 or len(group.terms[0].members) != 1:
            return False
        term = group.terms[0]
        plain = term.rows is None and term.scale == 1 and term.affine not in self.transported
        return plain and self.batch < min(group.size, self.graph[term.members[0]].features)

    def _frame(self, group: Group, survivors: Sequence[str]) -> Frame:
        members = [m for t in group.terms for m in t.members]
        return self.state.factor(group.name, members, survivors)

    def _split(self, term: FreeTerm, matrix: Tensor) -> list[Tensor]:
        """Columns of a term's matrix by member, rows in the order of the group."""
        matrix = matrix if term.rows is None else matrix[list(term.rows)]
        return list(matrix.split([self.graph[m].features for m in term.members], -1))

    def _contract(
        self, group: Group, frame: Frame, slopes: Slopes, multiplier: Tensor, extra: Mapping[str, Tensor]
    ) -> Contracted:
        contraction = self.blueprint.contraction
        if self.target is None:
            return contraction(self._project(group, frame), dict(extra))
        # Backwards: U = √2 r Λ^{1/2} C F, then the free parameters that give it.
        scale = 2**0.5 * slopes.radius * multiplier.sqrt()
        matrix = frame.multiply([scale[:, None] * x for x in self._given_maps(group, self.target)])
        weight, others = contraction.invert(matrix, dict(extra))
        self._remember(group, frame.lift(weight), others)
        return contraction(weight, others)

    def _project(self, group: Group, frame: Frame) -> Tensor:
        parts = [x for t in group.terms for x in self._split(t, self.free.weights[self.plan.weights[t.affine]])]
        return frame.project(parts)

    def _given_maps(self, group: Group, target: Explicit) -> list[Tensor]:
        return [t.scale * x for t in group.terms for x in self._split(t, target.weights[self.plan.weights[t.affine]])]

    def _remember(self, group: Group, weights: list[Tensor], others: dict[str, Tensor]) -> None:
        found = dict(others)
        position = 0
        for term in group.terms:
            count = len(term.members)
            found[self.plan.weights[term.affine]] = torch.cat(weights[position : position + count], -1)
            position += count
        self.inverse[group.name] = found

    def _assign(self, group: Group, maps: list[Tensor]) -> None:
        """Store the explicit rows of the group's affine maps."""
        position = 0
        for term in group.terms:
            count = len(term.members)
            matrix = torch.cat(maps[position : position + count], -1) if count > 1 else maps[position]
            if term.scale != 1:
                matrix = matrix / term.scale
            position += count
            name = self.plan.weights[term.affine]
            if term.rows is not None:
                base = self.weights.get(name, self.free.weights[name])
                matrix = base.index_copy(0, torch.tensor(term.rows, device=base.device), matrix)
            self.weights[name] = matrix

    # -- output ------------------------------------------------------------------------------------------------------

    def finish(self) -> Tensor:
        group = self.plan.output
        if not group.free:
            return self._flat(self.state.live[group.value])
        frame = self._frame(group, ())
        head, extra = self.blueprint.head, dict(self.free.extra[group.name])
        if self.target is None:
            matrix = head(self._project(group, frame), extra)
        else:
            wanted = frame.multiply(self._given_maps(group, self.target))
            weight, others = head.invert(wanted, extra)
            self._remember(group, frame.lift(weight), others)
            matrix = head(weight, others)
        self._assign(group, self.state.output(frame, matrix))
        return matrix

    @staticmethod
    def _flat(gen: Generator) -> Tensor:
        """``F_y`` (k, q)."""
        return torch.cat([gen.flat(b) for b in gen.blocks], 0).mH

    def run(self) -> Explicit:
        for step in self.plan.steps:
            if step.transport is not None:
                self.transport(step.transport)
            elif step.group is not None:
                self.eliminate(self.plan.groups[step.group], step.live)
            elif step.joins is not None:
                self.join(step.joins)
            self.state.keep(step.live)
        output = self.finish()
        return Explicit(self.weights, self.multipliers, output, self.free.bound, self.inverse)


def sweep(
    blueprint: Blueprint,
    module: nn.Module,
    free: Free,
    target: Explicit | None = None,
    batch: int | None = None,
) -> Explicit:
    """Run the rule over a graph.

    Args:
        blueprint: Structure of the network. Missing structural decisions are made at the given point and stored in it.
        module: The user's module; its constants and its activations are read, its matrices come from ``free``.
        free: The free parameters.
        target: Explicit weights and multipliers to be reproduced: the sweep then runs backwards, from maps to free
            parameters, which it returns in ``inverse``.
        batch: Size of the batch the weights are made for: maps that are larger may come in factored form. None: all are
            explicit.

    Raises:
        InfeasibleError: ``target`` does not satisfy the matrix inequality strictly.
    """
    return _Run(blueprint, module, free, target, batch).run()
