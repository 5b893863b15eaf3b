"""Free parameters to explicit weights: one pure function that runs the rule over a graph in the order of its plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.engine.contraction import Contracted, Contraction, Head, Square
from ldlt.engine.factor import Frame, Generator, stacked
from ldlt.engine.linalg import BALANCE, MARGIN, bounded, positive
from ldlt.engine.plan import FreeTerm, Group, Plan, Step
from ldlt.engine.rule import Live, Maps, Neurons, Run, transport
from ldlt.graph import Activation, Affine, Convolution, Graph, Wire
from ldlt.graph.convolution import Cells, Spec
from ldlt.images.convolutions import CirculantWeight, Taps
from ldlt.images.grids import Layout, row_norms
from ldlt.images.torus import Torus

_LARGEST_MARGIN = 0.9995  # keeps I − UU^* of a given map away from singular in float32


@dataclass
class Blueprint:
    """Everything about a network that is not trained."""

    graph: Graph
    plan: Plan
    contraction: Contraction
    head: Head
    scales: Tensor | None = None  # of the outputs, (k,): their bounds in units of the declared one
    apart: bool = False  # whether each head has a bound of its own
    torus: Torus | None = None  # the graph on its torus, if convolutions keep their kernels
    power: int = 1  # which power of a covariance bounds the multipliers there
    wiring: dict[tuple[str, Cells], Taps] = field(default_factory=dict)  # responses of single taps by node and grid
    # For compilers, which do not see classes as they are: slopes of activations without parameters, and the settings
    # they were found for (None for PReLU). Anybody else looks anew.
    sectors: dict[str, tuple[activations.Sector | None, dict[str, Any]]] = field(default_factory=dict)

    def resolve(self, module: nn.Module) -> None:
        """Find the sectors."""
        for node in self.graph.activations:
            layer = node.resolve(module)
            if type(layer) is nn.PReLU:
                self.sectors[node.name] = (None, {})
            elif not any(True for _ in layer.parameters()):
                self.sectors[node.name] = (activations.sector(layer), _settings(layer))

    def normaliser(self, group: Group) -> Contraction | Head:
        """What makes the map of a group: the head for the last of those of a joint output, else the contraction."""
        followed = self.head.joint and not self.apart and group.name != self.plan.heads[-1].name
        return self.head if group.is_output and not followed else self.contraction

    def scaled(self, group: Group, matrix: Tensor, power: int = 1) -> Tensor:
        """The rows of a head's matrix in the units of their outputs."""
        if self.scales is None:
            return matrix
        scales = self.scales if group.rows is None else self.scales[list(group.rows)]
        return matrix * (scales**power).to(matrix)[:, None]

    def sector(self, node: Activation, module: nn.Module) -> activations.Sector:
        """The sector of an activation; PReLU's is a function of its current parameters."""
        layer = node.resolve(module)
        if torch.compiler.is_compiling() and node.name in self.sectors:
            known, settings = self.sectors[node.name]
            if known is None:
                return activations.learned_sector(cast(Tensor, layer.weight))
            if all(getattr(layer, key) == value for key, value in settings.items()):
                return known
        return activations.sector(layer)


def _settings(layer: nn.Module) -> dict[str, Any]:
    return {
        k: v for k, v in vars(layer).items() if isinstance(v, (int, float, str)) and k[0] != "_" and k != "training"
    }


@dataclass
class Free:
    """The free parameters."""

    weights: Mapping[str, Tensor]  # of the user's module by name: free matrices, and everything else as it is
    bound: Tensor  # ℓ, scalar
    extra: Mapping[str, Mapping[str, Tensor]]  # group -> role (``log_alpha``, ``log_multiplier``, …) -> tensor


@dataclass
class Explicit:
    """The explicit form of a network."""

    weights: dict[str, Tensor]  # by parameter name, only those that differ from the free ones
    multipliers: dict[str, Tensor]  # group -> Λ, one per row of the group
    bound: Tensor  # ℓ
    layout: Layout  # how the output lies on a grid
    # Makes F_y (k, q), on a grid (f, k, q) with k features per cell: the constant of the map ``a·y`` is ℓ‖F_y' a‖. And
    # the magnitudes of the outputs before cancellation, Σ_j |B_ij| s_j, (k,): a relative error of the weights changes
    # an output's row of F_y by that much at most.
    output: Callable[[], tuple[Tensor, Tensor]]
    watched: Tensor | None = None  # F_t of the value that was asked for, when it was made
    window: Tensor | None = None  # which features of a torus the output consists of


class Sweep:
    """One run of the rule over a graph.

    Args:
        blueprint: Structure of the network.
        module: The user's module; its constants and its activations are read, its matrices come from ``free``.
        free: The free parameters.
        batch: Size of the batch the weights are made for: larger maps may come in factored form. None: all explicit.
        watch: A value of the graph whose generator is wanted.
    """

    def __init__(
        self, blueprint: Blueprint, module: nn.Module, free: Free, batch: int | None = None, watch: str | None = None
    ) -> None:
        self.blueprint, self.module, self.given, self.batch, self.watch = blueprint, module, free, batch, watch
        self.graph, self.plan = blueprint.graph, blueprint.plan
        self.tensors = self.graph.tensors(module)
        source = self.graph.input
        self.live = Live(source.name, Layout.of(source.shape, self.plan.cells), free.bound, blueprint.contraction.unit)
        self.weights: dict[str, Tensor] = {}  # parameter name -> explicit matrix so far
        self.multipliers: dict[str, Tensor] = {}
        self.watched: Tensor | None = None
        self.transported = {s.transport for s in self.plan.steps if s.transport is not None}

    def run(self) -> Explicit:
        """The explicit form."""
        for step in self.plan.steps:
            node: Any = self.graph.index.get(step.transport or "")
            if step.cells is None and self.live.cells is not None and _makes_vector(node):
                parents = {p: self.graph[p].shape for p in node.parents}
                self.live.leave_grid(node.name, node.bind(self.tensors), parents, step.live)
            else:
                self.live.coarsen(step.cells)
                if node is not None:
                    self._transport(node)
                elif step.group is not None:
                    self._eliminate(self.plan.groups[step.group], step)
                elif step.joins is not None:
                    self.live[step.joins] = self._joined(step.joins, self.live.live)
            # What is eliminated later does not change the constant of a value.
            if self.watch == step.name:
                self.watched = self.live[step.name].matrix()
            self.live.keep(step.live)
        layout, output = self._heads() if self.plan.output.free else self._given_output()
        return Explicit(self.weights, self.multipliers, self.given.bound, layout, output, self.watched)

    def _transport(self, node: Affine | Wire) -> None:
        parents, cells = [self.live[p] for p in node.parents], self.live.cells
        if isinstance(node, Wire) and node.role == "order":
            self.live[node.name] = parents[0]
            return
        move: Maps | Run
        if isinstance(node, Affine):
            move = Maps([self._matrix(node, cells)])
        elif node.role == "sum":
            move = Maps([float(s) for s in node.scales])
        else:
            shapes = [self.graph[p].shape for p in node.parents]
            move = Run(node.linear(self.tensors), shapes, cells, node.role == "rearrange")
        # A sum lies like its parents: flattened images stay images.
        summed = isinstance(node, Wire) and node.role == "sum"
        layout = parents[0].layout if summed else Layout.of(node.shape, cells)
        self.live[node.name] = transport(move, parents, layout)

    def _matrix(self, node: Affine, cells: Cells) -> Tensor:
        """What a map is on a grid: the explicit one, or the free one where it is not known yet."""
        known = self.weights.get(node.weight)
        if isinstance(known, CirculantWeight):
            return known.on(cells)
        return self._free_matrix(node, cells) if known is None else known

    def _free_matrix(self, node: Affine, cells: Cells) -> Tensor:
        weight = self.given.weights[node.weight]
        if not isinstance(node, Convolution):
            return weight
        assert isinstance(node.spec, Spec)
        key = (node.name, cells)
        if key not in self.blueprint.wiring:
            inputs = self.graph[node.parents[0]].shape
            self.blueprint.wiring[key] = Taps(node.spec, node.kernel, inputs, node.shape, cells)
        return self.blueprint.wiring[key](weight)

    def _joined(self, node: str, generators: Mapping[str, Generator]) -> Generator:
        """The groups of one activation, or of the output, put together."""
        groups = self.plan.parts(node)
        gens = [generators[g.name] for g in groups]
        if len(gens) == 1:
            return gens[0]
        layout = Layout.of(self.graph[groups[0].value].shape, gens[0].layout.cells)
        return replace(stacked(gens, layout).rows(self._order(groups)), layout=layout)

    def _order(self, groups: Sequence[Group]) -> Any:
        rows = [r for g in groups if (r := self.plan.places[g.name].rows) is not None]
        return self._here(torch.cat(rows).argsort())

    def _neurons(self, group: Group, survivors: Sequence[str]) -> Neurons:
        node, place = cast(Activation, self.graph[group.node]), self.plan.places[group.name]
        sector = self.blueprint.sector(node, self.module)

        def per_neuron(value: Tensor | float) -> Tensor | float:
            if not isinstance(value, Tensor):
                return value
            flat = value.reshape(-1, 1).to(self.given.bound)  # one number for all, one per channel, or one per feature
            flat = flat.expand(-1, node.features // len(flat)).reshape(-1)
            return flat if place.features is None else flat[self._here(place.features)]

        center, radius = per_neuron(sector.center), per_neuron(sector.radius)
        return Neurons(group.name, place.layout, survivors, center, radius, self._here(place.shared), place.count)

    def _here(self, index: Tensor | None) -> Any:
        return None if index is None else index.to(self.given.bound.device)

    def _eliminate(self, group: Group, step: Step) -> None:
        place, extra, new = self.plan.places[group.name], self.given.extra[group.name], self._neurons(group, step.live)
        if group.free:
            frame = self.live.factor(group.members, step.live)
            multiplier = self._multiplier(group, new)
            contracted = self._contracted(group, frame, new, multiplier)
            self._assign(group, self.live.free(new, frame, contracted, multiplier, self._lazy(group)))
        else:
            margin = _LARGEST_MARGIN * torch.sigmoid(bounded(extra["margin"], MARGIN))
            balance = positive(extra["log_balance"], BALANCE)
            if group.node in self.plan.images:
                balance = balance[new.shared]
            multiplier = self.live.given(new, self.live[group.value].rows(self._here(place.rows)), balance, margin)
        if place.every is not None and new.shared is not None:  # from those of a cell to every row
            values = multiplier.new_zeros(new.count).index_copy(0, new.shared, multiplier)
            multiplier = values[self._here(place.every)]
        self.multipliers[group.name] = multiplier

    def _multiplier(self, group: Group, new: Neurons) -> Tensor:
        found = positive(self.given.extra[group.name]["log_multiplier"])
        return found if new.shared is None else found[new.shared]

    def _contracted(self, group: Group, frame: Frame, new: Neurons | None, multiplier: Tensor | None) -> Contracted:
        """``(U, K)`` of a group; without neurons, of a head that others follow."""
        contraction = self.blueprint.contraction
        return contraction(self._project(group, frame), self._extra(group), self._straight(group, new))

    def _straight(self, group: Group, new: Neurons | None) -> bool:
        """Whether ``K`` is only divided by."""
        rho = None if new is None else new.rho
        return group.name in self.plan.straight and isinstance(rho, float | int) and abs(rho) in (0, 1)

    def _headed(self, group: Group, frame: Frame) -> Tensor:
        cells = self.plan.places[group.name].layout.cells
        options = () if cells is None else (cells,)
        return self.blueprint.head(self._project(group, frame), self._extra(group), *options)

    def _lazy(self, group: Group) -> bool:
        """Whether the group's map is better applied to the batch factor by factor than multiplied out."""
        if self.batch is None or len(group.members) != 1:
            return False
        (term,) = group.terms
        plain = term.rows is None and term.scale == 1 and term.affine not in self.transported
        plain = plain and not isinstance(self.graph[term.affine], Convolution)
        return plain and self.batch < min(group.size, self.graph[term.members[0]].features)

    def _project(self, group: Group, frame: Frame) -> Tensor:
        cells = self.plan.places[group.name].layout.cells
        return frame.project(self._split(group, lambda affine: self._free_matrix(affine, cells)))

    def _terms(self, group: Group) -> Iterable[tuple[FreeTerm, Tensor | None, Affine]]:
        for term, rows in zip(group.terms, self.plan.places[group.name].terms, strict=True):
            yield term, self._here(rows), cast(Affine, self.graph[term.affine])

    def _split(self, group: Group, matrix: Callable[[Affine], Tensor]) -> list[Tensor]:
        """Columns of the terms' matrices by member, rows in the order of the group."""
        found: list[Tensor] = []
        cells = self.plan.places[group.name].layout.cells
        for term, rows, node in self._terms(group):
            x = matrix(node) if rows is None else matrix(node)[..., rows, :]
            sizes = [Layout.of(self.graph[m].shape, cells).features for m in term.members]
            found += x.split(sizes, -1) if len(sizes) > 1 else [x]
        return found

    def _extra(self, group: Group) -> dict[str, Tensor]:
        """The contraction's other parameters; a square one of channels is used at every pixel of a cell."""
        found, place = dict(self.given.extra[group.name]), self.plan.places[group.name]
        if "skew" in found and len(found["skew"]) != place.layout.features:
            shape = self.graph[group.value].shape
            features = torch.arange(math.prod(shape)) if place.features is None else place.features
            pixels = math.prod(shape[1:])
            owner, pixel = torch.unique(features // pixels, return_inverse=True)[1], features % pixels
            found["skew"] = found["skew"][owner][:, owner] * (pixel[:, None] == pixel)
        return found

    def _assign(self, group: Group, maps: Sequence[Tensor]) -> None:
        """Store the explicit rows of the group's affine maps."""
        cells, waiting = self.plan.places[group.name].layout.cells, list(maps)
        for term, rows, node in self._terms(group):
            own, waiting = waiting[: len(term.members)], waiting[len(term.members) :]
            matrix = torch.cat(own, -1) if len(own) > 1 else own[0]
            matrix = matrix if term.scale == 1 else matrix / term.scale
            if rows is not None:
                matrix = self._matrix(node, cells).index_copy(-2, rows, matrix)
            if isinstance(node, Convolution):
                assert isinstance(node.spec, Spec)
                inputs, like = self.graph[node.parents[0]].shape, self.given.weights[node.weight]
                matrix = CirculantWeight(matrix, cells, node.spec, inputs, node.shape, like)
            self.weights[node.weight] = matrix

    def _given_output(self) -> tuple[Layout, Callable[[], tuple[Tensor, Tensor]]]:
        gen = self.live[self.plan.output.value]
        return gen.layout, lambda: (gen.matrix(), gen.magnitude())

    def _heads(self) -> tuple[Layout, Callable[[], tuple[Tensor, Tensor]]]:
        """Choose the output's maps; the layout of the output, and what makes ``F_y`` and its magnitudes.

        With several heads, each but the last is a strict contraction that inflates what the others read: the stack of
        all has norm one at most. Heads that are bounded row by row do not see each other.
        """
        groups, head, places = self.plan.heads, self.blueprint.head, self.plan.places
        cells = places[groups[0].name].layout.cells
        self.live.keep([m for g in groups for m in g.members])
        self.live.coarsen(cells)
        before, found = dict(self.live.live), {}
        for k, group in enumerate(groups):
            later = [m for g in groups[k + 1 :] for m in g.members]
            frame = self.live.factor(group.members, later)
            followed = self.blueprint.normaliser(group) is not head
            strict = self._contracted(group, frame, None, None) if followed else None
            # What inflates others must be what is used: only a head that nothing follows is projected once more.
            matrix = head.settle(frame.soften(self._headed(group, frame)), cells) if strict is None else strict.matrix
            matrix = self.blueprint.scaled(group, matrix)
            maps = frame.right_divide(matrix)
            self._assign(group, maps)
            if strict is not None:
                self.live.observe(frame, strict, later)
            found[group.name] = (maps, [before[m] for m in group.members])
        if len(groups) == 1:
            return places[groups[0].name].layout, lambda: (matrix, _magnitude(maps, frame.members, cells))

        def output() -> tuple[Tensor, Tensor]:
            gens = {n: transport(Maps(maps), read, places[n].layout) for n, (maps, read) in found.items()}
            sizes = torch.cat([_magnitude(*found[g.name], cells) for g in groups])
            return self._joined(groups[0].node, gens).matrix(), sizes[self._order(groups)]

        return Layout.of(self.graph[groups[0].value].shape, cells), output


def _makes_vector(node: Any) -> bool:
    """Whether a node makes a vector from images by a fixed operation."""
    return isinstance(node, Wire) and node.role in ("linear", "rearrange") and len(node.shape) == 1


def _magnitude(maps: Sequence[Tensor], members: Sequence[Generator], cells: Cells) -> Tensor:
    """``Σ_j |B_ij| s_j`` of output maps (k, d), or on a grid (f, k, d), and the members they read."""
    found = []
    for matrix, member in zip(maps, members, strict=True):
        singular = any(isinstance(v, Square) and v.singular for v in member.blocks.values())
        # |w_i| changes by at most (|c| + r)|v_i|, and v_i = C_i F ξ with |C_i F| ≤ 1/(√2 r √Λ_i): (1 + |ρ|) times s.
        sized = matrix.detach() * (2 * member.size if singular else member.magnitude())
        if cells is None:
            found.append(sized.abs().sum(-1))
        else:  # by Cauchy and Schwarz, over all cells
            found.append(math.sqrt(math.prod(cells) * sized.shape[-1]) * row_norms(sized, cells))
    return torch.stack(found).sum(0)
