"""Free parameters to explicit weights: one pure function that runs the rule over a graph in the order of its plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt import activations
from ldlt.circulant import CirculantWeight
from ldlt.contraction import Contracted, Contraction
from ldlt.convolution import Spec, Taps
from ldlt.elimination import Elimination, Slopes
from ldlt.generator import (
    Frame,
    Generator,
    Square,
    any_sizes,
    combine,
    linear,
    matrix_sizes,
    moved_sizes,
    reduced,
    through,
)
from ldlt.graph import Activation, Affine, Convolution, Graph, Wire
from ldlt.grid import Cells, Layout, local, row_norms
from ldlt.heads import Head
from ldlt.plan import Group, Place, Plan, Step
from ldlt.scalars import BALANCE, MARGIN, bounded, positive
from ldlt.wiring import local_maps

__all__ = ["Blueprint", "Explicit", "Free", "sweep"]


@dataclass
class Blueprint:
    """Everything about a network that is not trained: graph, plan, contraction and head.

    Attributes:
        graph: The traced graph.
        plan: What is normalised, in which order.
        contraction: Free matrices to contractions.
        head: Free matrix to the output contraction.
        wiring: Maps on grids of operations that have no tensor of the module in them, and the responses of single taps
            of convolutions, by (node, grid).
    """

    graph: Graph
    plan: Plan
    contraction: Contraction
    head: Head
    wiring: dict[tuple[str, Cells], Any] = field(default_factory=dict)


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
        weights: Explicit matrices by parameter name (only those that differ from the free ones); those of
            convolutions are :class:`~ldlt.circulant.CirculantWeight`.
        multipliers: Group -> ``Λ``, one per row of the group.
        output: ``F_y`` (k, q): the generator of the output; the constant of the map ``a·y`` is ``ℓ‖F_y' a‖``.
        bound: ℓ.
        inverse: Group -> free tensors by role, when the sweep was run backwards (see :func:`sweep`).
        layout: How the output lies on a grid, if it does: ``output`` is then (f, k, q) with k features per cell.
        watched: ``F_t`` of the value that was asked for, when it was made.
        magnitude: Makes the magnitudes of the outputs before cancellation, ``Σ_j |B_ij| s_j``, (k,) or one per local
            feature: a relative error of the weights changes an output's row of ``F_y`` by that much at most.
    """

    weights: dict[str, Tensor]
    multipliers: dict[str, Tensor]
    output: Tensor
    bound: Tensor
    inverse: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    layout: Layout | None = None
    watched: Tensor | None = None
    magnitude: Callable[[], Tensor] | None = None


def _slopes(node: Activation, place: Place, module: nn.Module, like: Tensor) -> Slopes:
    """Sector of the neurons of a group; PReLU's is a function of its current parameters."""
    sector = activations.sector(node.resolve(module))

    def per_neuron(value: Tensor | float) -> Tensor | float:
        if not isinstance(value, Tensor):
            return value
        flat = value.reshape(-1).to(like)
        if len(flat) != node.features:  # one number for all, or one per channel
            flat = flat.reshape(-1, 1).expand(-1, node.features // len(flat)).reshape(-1)
        return flat if place.features is None else flat[place.features.to(flat.device)]

    shared = None if place.shared is None else place.shared.to(like.device)
    return Slopes(per_neuron(sector.center), per_neuron(sector.radius), shared, place.count)


_LARGEST_MARGIN = 0.9995  # keeps I − UU^* of a given map away from singular in float32


class _Run:
    def __init__(
        self,
        blueprint: Blueprint,
        module: nn.Module,
        free: Free,
        target: Explicit | None,
        batch: int | None,
        watch: str | None,
    ) -> None:
        self.blueprint, self.module, self.free, self.target = blueprint, module, free, target
        self.batch, self.watch = batch, watch
        self.watched: Tensor | None = None
        self.magnitude: Callable[[], Tensor] | None = None
        self.graph, self.plan = blueprint.graph, blueprint.plan
        self.tensors = self.graph.tensors(module)
        source = self.graph.input
        self.state = Elimination(source.name, source.shape, free.bound, blueprint.contraction.unit, self.plan.cells)
        self.weights: dict[str, Tensor] = {}  # parameter name -> explicit matrix so far
        self.multipliers: dict[str, Tensor] = {}
        self.inverse: dict[str, dict[str, Tensor]] = {}
        self.transported = {s.transport for s in self.plan.steps if s.transport is not None}

    # -- wiring ------------------------------------------------------------------------------------------------------

    def transport(self, name: str) -> None:
        node = self.graph[name]
        parents = [self.state.live[p] for p in node.parents]
        cells = self.state.cells
        if isinstance(node, Convolution):
            spectrum = self._transfer(node, cells)
            layout = Layout.of(node.shape, cells)
            if layout is None:
                gen = self._matrix(spectrum, parents[0], node.shape)
            else:
                gen = through(parents, [spectrum], node.shape, layout)
        elif isinstance(node, Affine):
            gen = self._matrix(self.weights.get(node.weight, self.free.weights[node.weight]), parents[0], node.shape)
        else:
            assert isinstance(node, Wire)
            if node.role == "order":
                gen = parents[0].reshaped(node.shape)
            elif node.role == "sum":
                gen = combine(list(zip(parents, node.scales, strict=True)), node.shape)
            elif cells is not None:
                gen = self._rewire(node, parents, cells)
            else:
                run = node.linear(self.tensors)
                sizes = moved_sizes if node.role == "rearrange" else any_sizes
                gen = linear(run, parents, node.shape, sizes(run, parents))
        self.state.live[name] = gen

    @staticmethod
    def _matrix(matrix: Tensor, parent: Generator, shape: tuple[int, ...]) -> Generator:
        """The generator of a matrix times a tensor."""
        run = lambda x: F.linear(x.flatten(1), matrix).reshape(-1, *shape)  # noqa: E731
        return linear(run, [parent], shape, matrix_sizes(matrix, parent.size))

    def _rewire(self, node: Wire, parents: list[Generator], cells: tuple[int, ...]) -> Generator:
        """A fixed operation on a grid."""
        layout = Layout.of(node.shape, cells)
        assert layout is not None
        maps = self.blueprint.wiring.get((node.name, cells))
        if maps is None:
            maps = local_maps(node, self.tensors, [self.graph[p].shape for p in node.parents], cells)
            if not node.constants:  # what depends on a tensor of the module is made anew in every pass
                self.blueprint.wiring[node.name, cells] = maps
        like = self.free.bound
        used = [
            m.to(like.device) if not (m.is_floating_point() or m.is_complex()) else m.to(like.device, _kind(m, like))
            for m in maps
        ]
        return through(parents, used, node.shape, layout)

    def leave_grid(self, step: Step) -> None:
        """Make a vector from images (a mean over positions, say) before the images themselves become dense."""
        node = self.graph[step.name]
        assert isinstance(node, Wire)
        parents = [self.state.live[p] for p in node.parents]
        shapes = [self.graph[p].shape for p in node.parents]
        gen = reduced(node.bind(self.tensors), parents, shapes, node.shape, self.state.noise)
        self.state.keep([v for v in step.live if v != step.name])
        self.state.coarsen(None, alone=False)  # the new vector shares its noise with what stays
        gen.sizes = self.state.sizes
        self.state.live[step.name] = gen

    def join(self, name: str) -> None:
        """Put the groups of one activation together."""
        node = self.graph[name]
        names, _ = self.plan.parts(name)
        parts = [self.state.live[n] for n in names]
        gen = parts[0]
        if len(parts) > 1:
            rows = [self.plan.places[n].rows for n in names]
            order = torch.cat([r for r in rows if r is not None]).argsort()
            gen = self._sorted(parts, order.to(self.free.bound.device), node.shape)
        self.state.live[name] = gen.reshaped(node.shape)

    def _sorted(self, parts: list[Generator], order: Tensor, shape: tuple[int, ...]) -> Generator:
        layout = Layout.of(shape, self.state.cells)
        if layout is None:
            gather = lambda *xs: torch.cat(xs, -1)[:, order]  # noqa: E731
            return linear(gather, parts, (len(order),), moved_sizes(gather, parts))
        maps, start = [], 0
        for part in parts:
            index = order - start
            maps.append(torch.where((index >= 0) & (index < part.features), index, -1))
            start += part.features
        return through(parts, maps, shape, layout)

    # -- groups ------------------------------------------------------------------------------------------------------

    def eliminate(self, group: Group, survivors: Sequence[str]) -> None:
        node = self.graph[group.node]
        assert isinstance(node, Activation)
        place = self.plan.places[group.name]
        slopes = _slopes(node, place, self.module, self.free.bound)
        extra = dict(self.free.extra[group.name])
        if not group.free:
            rows = place.rows
            value = self.state.live[group.value].rows(None if rows is None else rows.to(self.free.bound.device))
            margin = _LARGEST_MARGIN * torch.sigmoid(bounded(extra["margin"], MARGIN))
            balance = positive(extra["log_balance"], BALANCE)
            if group.node in self.plan.images:
                assert slopes.shared is not None
                balance = balance[slopes.shared]
            multiplier = self.state.given(group.name, value, slopes, balance, margin, survivors, place.layout)
            self._keep_multiplier(group, multiplier, slopes)
            return
        frame = self._frame(group, survivors)
        multiplier = positive(extra["log_multiplier"])
        if slopes.shared is not None:
            multiplier = multiplier[slopes.shared]
        if self.target is not None:
            multiplier = self.target.multipliers[group.name]
        contracted = self._contract(group, frame, slopes, multiplier, extra)
        lazy = self._lazy(group)
        maps = self.state.hidden(
            group.name, frame, contracted, slopes, multiplier, survivors, lazy, layout=place.layout
        )
        self._assign(group, maps)
        self._keep_multiplier(group, multiplier, slopes)

    def _keep_multiplier(self, group: Group, multiplier: Tensor, slopes: Slopes) -> None:
        """Remember ``Λ`` for every row of a group, from those of a cell."""
        shared = self.plan.shared[group.name]
        if shared is not None and slopes.shared is not None:
            values = multiplier.new_zeros(slopes.count)
            multiplier = values.index_copy(0, slopes.shared, multiplier)[shared.to(multiplier.device)]
        self.multipliers[group.name] = multiplier

    def _lazy(self, group: Group) -> bool:
        """Whether the group's map is better applied to the batch factor by factor than multiplied out."""
        if self.batch is None or len(group.terms) != 1 or len(group.terms[0].members) != 1:
            return False
        term = group.terms[0]
        plain = term.rows is None and term.scale == 1 and term.affine not in self.transported
        plain = plain and not isinstance(self.graph[term.affine], Convolution)
        return plain and self.batch < min(group.size, self.graph[term.members[0]].features)

    def _frame(self, group: Group, survivors: Sequence[str]) -> Frame:
        members = [m for t in group.terms for m in t.members]
        return self.state.factor(members, survivors)

    def _taps(self, node: Convolution, cells: Cells) -> Taps:
        """The response of a convolution's taps on a grid, found once."""
        key = (node.name, cells)
        if key not in self.blueprint.wiring:
            inputs = self.graph[node.parents[0]].shape
            assert isinstance(node.spec, Spec)
            self.blueprint.wiring[key] = Taps(node.spec, node.kernel, inputs, node.shape, cells)
        found: Taps = self.blueprint.wiring[key]
        return found

    def _transfer(self, node: Convolution, cells: Cells) -> Tensor:
        """What a convolution is on a grid: the explicit map, or the free one where it is not known yet."""
        known = self.weights.get(node.weight)
        if isinstance(known, CirculantWeight):
            return known.on(cells)
        return self._taps(node, cells)(self.free.weights[node.weight])

    def _free_matrix(self, affine: str, cells: Cells) -> Tensor:
        node = self.graph[affine]
        weight = self.free.weights[self.plan.weights[affine]]
        return self._taps(node, cells)(weight) if isinstance(node, Convolution) else weight

    def _split(self, group: Group, term: int, matrix: Tensor) -> list[Tensor]:
        """Columns of a term's matrix by member, rows in the order of the group."""
        place = self.plan.places[group.name]
        rows = place.terms[term]
        matrix = matrix if rows is None else matrix[..., rows.to(matrix.device), :]
        members = [self.graph[m] for m in group.terms[term].members]
        sizes = [m.features if place.cells is None else local(m.shape, place.cells) for m in members]
        return list(matrix.split(sizes, -1))

    def _contract(
        self, group: Group, frame: Frame, slopes: Slopes, multiplier: Tensor, extra: Mapping[str, Tensor]
    ) -> Contracted:
        contraction = self.blueprint.contraction
        rho = slopes.rho
        straight = group.name in self.plan.straight and not isinstance(rho, Tensor) and abs(rho) in (0, 1)
        if self.target is None:
            return contraction(self._project(group, frame), self._spread_extra(group, extra), straight)
        # Backwards: U = √2 r Λ^{1/2} C F, its part in the range, then the free parameters that give it.
        scale = 2**0.5 * slopes.radius * multiplier.sqrt()
        matrix = frame.multiply([scale[:, None] * x for x in self._given_maps(group, self.target)])
        weight, others = contraction.invert(frame.soften(frame.harden(matrix)), dict(extra))
        self._remember(group, frame.lift(weight), others)
        return contraction(weight, others, straight)

    def _spread_extra(self, group: Group, extra: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The contraction's other parameters; a square one of channels is used at every pixel of a cell."""
        found = dict(extra)
        place = self.plan.places[group.name]
        if "skew" in found and len(found["skew"]) != self._rows(group):
            owner, pixel = _channels(group, self.graph[group.value].shape, place)
            found["skew"] = found["skew"][owner][:, owner] * (pixel[:, None] == pixel)
        return found

    def _rows(self, group: Group) -> int:
        layout = self.plan.places[group.name].layout
        return group.size if layout is None else layout.features

    def _project(self, group: Group, frame: Frame) -> Tensor:
        cells = self.plan.places[group.name].cells
        parts = [
            x for i, t in enumerate(group.terms) for x in self._split(group, i, self._free_matrix(t.affine, cells))
        ]
        return frame.project(parts)

    def _given_maps(self, group: Group, target: Explicit) -> list[Tensor]:
        maps = [self._split(group, i, target.weights[self.plan.weights[t.affine]]) for i, t in enumerate(group.terms)]
        return [t.scale * x for t, parts in zip(group.terms, maps, strict=True) for x in parts]

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
        place = self.plan.places[group.name]
        for term, rows in zip(group.terms, place.terms, strict=True):
            count = len(term.members)
            matrix = torch.cat(maps[position : position + count], -1) if count > 1 else maps[position]
            if term.scale != 1:
                matrix = matrix / term.scale
            position += count
            node = self.graph[term.affine]
            name = self.plan.weights[term.affine]
            if rows is not None:
                if isinstance(node, Convolution):
                    base = self._transfer(node, place.cells)
                else:
                    base = self.weights.get(name, self.free.weights[name])
                matrix = base.index_copy(-2, rows.to(base.device), matrix)
            if isinstance(node, Convolution):
                inputs = self.graph[node.parents[0]].shape
                assert isinstance(node.spec, Spec)
                matrix = CirculantWeight(matrix, place.cells, node.spec, inputs, node.shape, self.free.weights[name])
            self.weights[name] = matrix

    # -- output ------------------------------------------------------------------------------------------------------

    def finish(self) -> Tensor:
        group = self.plan.output
        if not group.free:
            gen = self.state.live[group.value]
            self.magnitude = gen.magnitude
            return self._flat(gen)
        place = self.plan.places[group.name]
        self.state.keep([m for t in group.terms for m in t.members])
        self.state.coarsen(place.cells)
        frame = self._frame(group, ())
        head, extra = self.blueprint.head, self._spread_extra(group, self.free.extra[group.name])
        if self.target is None:
            free = self._project(group, frame)
            matrix = head(free, extra) if place.cells is None else head(free, extra, place.cells)
        else:
            wanted = frame.harden(frame.multiply(self._given_maps(group, self.target)))
            weight, others = head.invert(wanted, extra)
            self._remember(group, frame.lift(weight), others)
            matrix = head(weight, others)
        matrix = head.settle(frame.soften(matrix), place.cells)
        maps = self.state.output(frame, matrix)
        self._assign(group, maps)
        self.magnitude = lambda: _magnitude(maps, frame, place.cells)
        return matrix

    @staticmethod
    def _flat(gen: Generator) -> Tensor:
        """``F_y`` (k, q)."""
        return torch.cat([gen.flat(b) for b in gen.blocks], -2).mH

    def run(self) -> Explicit:
        for step in self.plan.steps:
            if step.cells != self.state.cells:
                if step.cells is None and self._leaves_grid(step):
                    self.leave_grid(step)
                    self._look(step)
                    continue
                self.state.coarsen(step.cells)
            if step.transport is not None:
                self.transport(step.transport)
            elif step.group is not None:
                self.eliminate(self.plan.groups[step.group], step.live)
            elif step.joins is not None:
                self.join(step.joins)
            self._look(step)
            self.state.keep(step.live)
        output = self.finish()
        group = self.plan.output
        layout = self.plan.places[group.name].layout if group.free else self.state.live[group.value].layout
        return Explicit(
            self.weights, self.multipliers, output, self.free.bound, self.inverse, layout, self.watched, self.magnitude
        )

    def _look(self, step: Step) -> None:
        """Keep the generator of the value that is asked for; what is eliminated later does not change its constant."""
        if self.watch is not None and self.watch in (step.transport, step.joins):
            self.watched = self._flat(self.state.live[self.watch])

    def _leaves_grid(self, step: Step) -> bool:
        """Whether a step makes a vector from images by a fixed operation."""
        node = self.graph.index.get(step.transport or "")
        return isinstance(node, Wire) and node.role in ("linear", "rearrange") and len(node.shape) == 1


def _magnitude(maps: Sequence[Tensor], frame: Frame, cells: Cells) -> Tensor:
    """``Σ_j |B_ij| s_j`` of output maps (k, d), or on a grid (f, k, d), and the members they read."""
    total: Tensor | None = None
    for matrix, member in zip(maps, frame.members, strict=True):
        sized = matrix.detach() * _reach(member)
        if cells is None:
            own = sized.abs().sum(-1)
        else:  # by Cauchy and Schwarz, over all cells
            own = math.sqrt(math.prod(cells) * sized.shape[-1]) * row_norms(sized, cells)
        total = own if total is None else total + own
    assert total is not None
    return total


def _reach(member: Generator) -> Tensor:
    """Magnitudes of a member's features that bound their slopes, in units of 1/ℓ."""
    singular = any(isinstance(v, Square) and v.root.divides_only for v in member.blocks.values())
    # |w_i| changes by at most (|c| + r)|v_i|, and v_i = C_i F ξ with |C_i F| ≤ 1/(√2 r √Λ_i): (1 + |ρ|) times the size.
    return 2 * member.size if singular else member.magnitude()


def _kind(constant: Tensor, like: Tensor) -> torch.dtype:
    return like.dtype.to_complex() if constant.is_complex() else like.dtype


def _channels(group: Group, shape: tuple[int, ...], place: Place) -> tuple[Tensor, Tensor]:
    """Channel (counted through those of the group) and pixel of every row of a cell."""
    pixels = math.prod(shape[1:])
    features = torch.arange(math.prod(shape)) if place.features is None else place.features
    return torch.unique(features // pixels, return_inverse=True)[1], features % pixels


def sweep(
    blueprint: Blueprint,
    module: nn.Module,
    free: Free,
    target: Explicit | None = None,
    batch: int | None = None,
    watch: str | None = None,
) -> Explicit:
    """Run the rule over a graph.

    Args:
        blueprint: Structure of the network.
        module: The user's module; its constants and its activations are read, its matrices come from ``free``.
        free: The free parameters.
        target: Explicit weights and multipliers to be reproduced: the sweep then runs backwards, from maps to free
            parameters, which it returns in ``inverse``.
        batch: Size of the batch the weights are made for: maps that are larger may come in factored form. None: all are
            explicit.
        watch: A value of the graph whose generator is wanted.

    Raises:
        InfeasibleError: ``target`` does not satisfy the matrix inequality strictly.
    """
    return _Run(blueprint, module, free, target, batch, watch).run()
