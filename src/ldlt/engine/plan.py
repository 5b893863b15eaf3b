"""Which maps of a graph are normalised, where, and in which order: decided once, from the structure alone.

For every activation the planner follows its input back through sums and rearrangements to the affine maps it is made
of. Rows of the input that are a plain sum of free maps, each used here first, are *normalised*. All other rows, such as
an identity skip that goes straight into the activation, keep their map and get a *bounded* multiplier. Affine maps that
no activation and no output normalises stay as they are: they only transport generators.

In a graph with convolutions the plan also says on which grid of cells (``ldlt.images.grids``) each step is done: the
finest one that all operations up to it commute with. The pixels of one channel then share a multiplier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.errors import GraphError
from ldlt.graph import Activation, Affine, Graph, Input, Wire, index_map
from ldlt.graph.convolution import Cells, meet, natural
from ldlt.images.convolutions import node_cells
from ldlt.images.grids import Layout, cell_rows, phases
from ldlt.images.torus import Torus

OUTPUT = "(output)"
"""Name of the output's group."""
LARGEST = 2**28
"""Entries of a dense generator above which a network is refused."""


@dataclass(frozen=True)
class FreeTerm:
    """One free map inside a group: rows of an affine map, with its input split into members."""

    affine: str
    rows: tuple[int, ...] | None  # of its weight, in the order of the group (None: all, in order)
    scale: float  # factor with which it enters the sum
    members: tuple[str, ...]  # values its input is a concatenation of


@dataclass(frozen=True)
class Group:
    """Rows of one activation (or of the output) that are eliminated together."""

    name: str  # unique, also the key of its parameters
    node: str  # the activation, or OUTPUT
    value: str  # what the rows belong to: the pre-activation or the output
    rows: tuple[int, ...] | None  # None: all
    terms: tuple[FreeTerm, ...]  # the free maps to normalise; none if the map is given
    size: int

    @property
    def is_output(self) -> bool:
        """Whether these are rows of the output."""
        return self.node == OUTPUT

    @property
    def free(self) -> bool:
        """Whether the group's map is normalised."""
        return bool(self.terms)

    @property
    def members(self) -> list[str]:
        """Values that the group's free maps read."""
        return [m for t in self.terms for m in t.members]

    @property
    def needs(self) -> list[str]:
        """Values whose generators its elimination reads."""
        return self.members if self.free else [self.value]


@dataclass(frozen=True)
class Step:
    """One step of the sweep: one of the first three."""

    transport: str | None = None  # the value whose generator is computed from its parents'
    group: str | None = None  # the group that is eliminated
    joins: str | None = None  # the activation whose groups are put together
    live: tuple[str, ...] = ()  # values that are read later
    cells: Cells = None  # the grid it is done on

    @property
    def name(self) -> str:
        """What the step makes."""
        return self.transport or self.group or self.joins or ""


@dataclass(frozen=True)
class Place:
    """Where the rows of a group lie on the grid of its step; None: all, in order. Without a grid there is one cell."""

    layout: Layout
    rows: Tensor | None  # local features of the group's value
    features: Tensor | None  # the features they are in the first cell
    terms: tuple[Tensor | None, ...]  # local rows of each term's affine map
    shared: Tensor | None  # for each row of a cell the number of its multiplier (None: each has its own)
    every: Tensor | None  # for each row of the group, likewise

    @property
    def count(self) -> int:
        """Number of multipliers where they are shared."""
        return 0 if self.every is None else int(self.every.max()) + 1


@dataclass(frozen=True)
class Plan:
    """The sweep."""

    steps: tuple[Step, ...]
    groups: dict[str, Group]  # by name
    heads: tuple[Group, ...]  # groups of the output in the order of choice; one without free maps if it has none
    cells: Cells = None  # the grid at the start
    places: dict[str, Place] = field(default_factory=dict)  # by group
    images: frozenset[str] = frozenset()  # activations whose multipliers belong to channels
    straight: frozenset[str] = frozenset()  # groups whose value is all that is live until its only reader

    @property
    def output(self) -> Group:
        """The first head: the only one, unless the output is a concatenation."""
        return self.heads[0]

    @property
    def all_groups(self) -> list[Group]:
        """The groups, the output's last."""
        return [*self.groups.values(), *self.heads]

    @property
    def normalised(self) -> set[str]:
        """Affine nodes with at least one normalised row."""
        return {t.affine for g in self.all_groups for t in g.terms}

    def parts(self, node: str) -> list[Group]:
        """Groups of an activation or of the output."""
        return [g for g in self.all_groups if g.node == node]

    def join(self, node: str, values: Mapping[str, Tensor]) -> Tensor:
        """Vectors of the groups of one node in the order of its features."""
        groups = self.parts(node)
        found = torch.cat([values[g.name] for g in groups])
        rows = [r for g in groups for r in g.rows or ()]
        return found[torch.tensor(rows).argsort()] if rows else found


@dataclass
class _Origin:
    """Where the rows of a value come from: affine node -> (row or −1, scale), and which rows have a fixed part."""

    terms: dict[str, tuple[Tensor, Tensor]]
    fixed: Tensor


def _origins(graph: Graph, module: nn.Module) -> dict[str, _Origin]:
    out: dict[str, _Origin] = {}
    for node in graph.nodes:
        n, parents = node.features, [out[p] for p in node.parents]
        if isinstance(node, Affine):
            row = (torch.arange(n), torch.ones(n, dtype=torch.double))
            out[node.name] = _Origin({node.name: row}, torch.zeros(n, dtype=torch.bool))
        elif not isinstance(node, Wire) or node.role == "linear" or not graph.structural(node):
            out[node.name] = _Origin({}, torch.ones(n, dtype=torch.bool))
        elif node.role == "order":
            out[node.name] = parents[0]
        elif node.role == "sum":
            out[node.name] = _summed(parents, node.scales)
        else:
            out[node.name] = _gathered(parents, index_map(graph.index, node, graph.tensors(module)))
    return out


def _summed(parents: list[_Origin], scales: Iterable[float]) -> _Origin:
    terms: dict[str, tuple[Tensor, Tensor]] = {}
    fixed = torch.stack([o.fixed for o in parents]).any(0)
    for origin, scale in zip(parents, scales, strict=True):
        for name, (index, factor) in origin.terms.items():
            if name in terms:  # the same matrix twice in one sum: its rows are not free
                fixed = fixed | (index >= 0)
                old, weights = terms[name]
                terms[name] = (torch.where(old >= 0, old, index), weights)
            else:
                terms[name] = (index, factor * scale)
    return _Origin(terms, fixed)


def _gathered(parents: list[_Origin], source: Tensor) -> _Origin:
    def column(origin: _Origin, name: str) -> tuple[Tensor, Tensor]:
        none = (torch.full((len(origin.fixed),), -1), torch.ones(len(origin.fixed), dtype=torch.double))
        return origin.terms.get(name, none)

    terms = {}
    for name in dict.fromkeys(a for o in parents for a in o.terms):
        index, factor = (torch.cat(parts)[source] for parts in zip(*(column(o, name) for o in parents), strict=True))
        terms[name] = (index, factor)
    return _Origin(terms, torch.cat([o.fixed for o in parents])[source])


def _members(graph: Graph, value: str, module: nn.Module) -> tuple[str, ...]:
    """A concatenation of vectors, or of images along their channels, is split into its parts; else one member."""
    node = graph[value]
    if not isinstance(node, Wire):
        return (value,)
    parents = [graph[p] for p in node.parents]
    if node.role == "order" and parents[0].shape == node.shape:
        return _members(graph, node.parents[0], module)
    stacks = node.role == "rearrange" and len(parents) > 1 and all(p.shape[1:] == node.shape[1:] for p in parents)
    if not stacks or not graph.structural(node) or sum(p.features for p in parents) != node.features:
        return (value,)
    moved = index_map(graph.index, node, graph.tensors(module))
    if not bool((moved == torch.arange(node.features)).all()):
        return (value,)
    parts = tuple(m for p in node.parents for m in _members(graph, p, module))
    return parts if len(set(parts)) == len(parts) else (value,)


_Rows = tuple[list[int], tuple[str, ...]]  # rows, and the free maps they are a sum of


class _Planner:
    """Divides rows into groups; ``demoted`` are the activations that must keep their maps."""

    def __init__(self, graph: Graph, module: nn.Module, demoted: set[str]) -> None:
        self.graph, self.module, self.demoted = graph, module, demoted
        self.origins = _origins(graph, module)
        self.ancestors: dict[str, set[str]] = {}  # affine nodes each value depends on, itself included
        for node in graph.nodes:
            own = {node.name} if isinstance(node, Affine) else set()
            self.ancestors[node.name] = own.union(*(self.ancestors[p] for p in node.parents))
        self.owned: dict[str, Tensor] = {}  # affine -> rows that a group normalises
        self.owners: dict[str, list[str]] = {}  # affine -> activations that normalise its rows

    def split(self, node: Activation) -> list[Group]:
        """Groups of the rows that feed an activation."""
        value = node.parents[0]
        origin, n = self.origins[value], self.graph[value].features
        free, bounded = self._signatures(node.name, origin, n)
        joint = activations.sector(node.resolve(self.module)).group is not None
        if joint and len(free) + bool(bounded) > 1:  # rows that are mixed are never split
            free, bounded = [], list(range(n))
        groups = self._groups(node.name, value, origin, free, bounded)
        for term in (t for g in groups for t in g.terms):
            count = self.graph[term.affine].features
            taken = self.owned.setdefault(term.affine, torch.zeros(count, dtype=torch.bool))
            taken[slice(None) if term.rows is None else list(term.rows)] = True
            self.owners.setdefault(term.affine, []).append(node.name)
        return groups

    def output(self) -> list[Group]:
        """The groups of the output: free maps, each of some rows, or all of it as a given map."""
        value = self.graph.output
        origin, n = self.origins[value], self.graph[value].features
        free, bounded = self._signatures(OUTPUT, origin, n)
        groups = self._groups(OUTPUT, value, origin, free, bounded)
        chosen = {t.affine for g in groups for t in g.terms}
        read = {a for g in groups for m in g.members for a in self.ancestors[m]}
        return self._groups(OUTPUT, value, origin, [], list(range(n))) if bounded or chosen & read else groups

    def _groups(self, node: str, value: str, origin: _Origin, free: list[_Rows], bounded: list[int]) -> list[Group]:
        parts = [(rows, tuple(self._term(name, origin, rows) for name in names)) for rows, names in free]
        parts += [(bounded, ())] if bounded else []
        if len(parts) == 1:
            return [Group(node, node, value, None, parts[0][1], len(parts[0][0]))]
        return [Group(f"{node}__{k}", node, value, tuple(r), t, len(r)) for k, (r, t) in enumerate(parts)]

    def _signatures(self, node: str, origin: _Origin, n: int) -> tuple[list[_Rows], list[int]]:
        """Rows by the set of free maps they are a sum of, and the rows that are no such sum."""
        blocked = origin.fixed | (node in self.demoted)
        present = {a: index >= 0 for a, (index, _) in origin.terms.items()}
        for a, (index, scale) in origin.terms.items():
            used, here = index[present[a]], present[a]
            taken = self.owned.get(a)
            if len(torch.unique(used)) != len(used) or (taken is not None and bool(taken[used].any())):
                blocked = blocked | here
            elif len(used):
                blocked = blocked | (here & (scale != scale[here][0]))
        by: dict[tuple[str, ...], list[int]] = {}
        unblocked = torch.nonzero(~blocked).flatten()
        if len(unblocked):
            table = torch.stack([present[a] for a in origin.terms], 1)[unblocked]
            kinds, which = torch.unique(table, dim=0, return_inverse=True)
            for k, used in enumerate(kinds.tolist()):
                by[tuple(a for a, u in zip(origin.terms, used, strict=True) if u)] = unblocked[which == k].tolist()
        free = []
        bounded = [int(r) for r in torch.nonzero(blocked).flatten()]
        for names, rows in sorted(by.items(), key=lambda item: item[1][0]):
            # A map whose output another member already depends on cannot be chosen last.
            inputs = {self.graph[a].parents[0] for a in names}
            if any(a in self.ancestors[y] for a in names for y in inputs):
                bounded += rows
            else:
                free.append((rows, names))
        return free, sorted(bounded)

    def _term(self, name: str, origin: _Origin, rows: list[int]) -> FreeTerm:
        index, scale = origin.terms[name]
        kept = index[rows]
        full = len(kept) == self.graph[name].features and bool((kept == torch.arange(len(kept))).all())
        members = _members(self.graph, self.graph[name].parents[0], self.module)
        return FreeTerm(name, None if full else tuple(kept.tolist()), float(scale[rows][0]), members)


class _Cycle(Exception):
    def __init__(self, activation: str) -> None:
        super().__init__(activation)
        self.activation = activation


class _Order:
    """Emits steps so that everything is available when it is needed."""

    def __init__(self, graph: Graph, groups: dict[str, list[Group]], owners: dict[str, list[str]]) -> None:
        self.graph, self.groups, self.owners = graph, groups, owners
        self.steps: list[Step] = []
        self.done: set[str] = set()
        self.active: dict[str, None] = {}  # in the order of descent

    def need(self, values: Iterable[str]) -> None:
        for v in values:
            self.ensure(v)

    def ensure(self, name: str) -> None:
        if name in self.done:
            return
        if name in self.active:
            # The graph has no cycle, so this one passes through an activation that owns a map; the innermost gives way.
            owning = {o for names in self.owners.values() for o in names}
            raise _Cycle(next(a for a in reversed(self.active) if a in owning))
        self.active[name] = None
        node = self.graph[name]
        if isinstance(node, Activation):
            for group in self.groups[name]:
                self.need(group.needs)
                self.steps.append(Step(group=group.name))
            self.steps += [Step(joins=name)] if len(self.groups[name]) > 1 else []  # else it bears the same name
        elif not isinstance(node, Input):
            self.need(node.parents)
            for owner in self.owners.get(name, []):  # a map can transport only once its weight is known
                if owner in self.active:
                    raise _Cycle(owner)
                self.ensure(owner)
            self.steps.append(Step(transport=name))
        del self.active[name]
        self.done.add(name)


def _with_liveness(steps: list[Step], graph: Graph, groups: dict[str, Group], heads: list[Group]) -> tuple[Step, ...]:
    """Add to each step the values that are read later."""
    live = {v for g in heads for v in g.needs}
    out: list[Step] = []
    for step in reversed(steps):
        out.append(replace(step, live=tuple(sorted(live))))
        live.discard(step.name)
        if step.transport is not None:
            live |= set(graph[step.transport].parents)
        elif step.group is not None:
            live |= set(groups[step.group].needs)
        else:
            live |= {g.name for g in groups.values() if g.node == step.joins}
    return tuple(reversed(out))


def thins(torus: Torus, step: Step) -> bool:
    """Whether a step is a stride on a torus."""
    found = torus.operators.get(step.transport or "")
    return found is not None and math.prod(found.stride) > 1


def ordered(steps: Sequence[Step], graph: Graph, torus: Torus, groups: Mapping[str, Group]) -> list[Step]:
    """Images before vectors, fine grids before coarse ones, strides before eliminations: what is live stays small."""

    def value(step: Step) -> str:
        return groups[step.group].value if step.group is not None else step.name

    def needs(step: Step) -> Sequence[str]:
        if step.group is not None:
            return groups[step.group].needs
        return [g.name for g in groups.values() if g.node == step.joins] if step.joins else graph[step.name].parents

    def rank(item: tuple[int, Step]) -> tuple[Any, ...]:
        place, step = item
        sheet = torus.sheets.get(value(step))
        if sheet is None:
            return (value(step) not in torus.flat, 0, 0, place)
        return (False, -math.prod(sheet.sides), not thins(torus, step), place)

    made = {s.name for s in steps}
    waiting = dict(enumerate(steps))
    done: set[str] = set()
    found: list[Step] = []
    while waiting:
        ready = [(i, s) for i, s in waiting.items() if all(n in done or n not in made for n in needs(s))]
        # A map that a group normalises can transport only behind it: the first of all steps that are left always can.
        owners = {t.affine: i for i, s in waiting.items() if s.group for t in groups[s.group].terms}
        ready = [(i, s) for i, s in ready if owners.get(s.transport or "", -1) in (-1, i)]
        place, step = min(ready, key=rank)
        del waiting[place]
        done.add(step.name)
        found.append(step)
    return found


class _Grids:
    """Chooses the grid of every step, and finds where the rows of the groups lie on it."""

    def __init__(self, graph: Graph, module: nn.Module, plan: Plan, torus: Torus | None = None) -> None:
        self.graph, self.module, self.plan, self.torus = graph, module, plan, torus
        self.cells: dict[str, Cells] = {}  # node -> finest grid of the operation
        self.images: dict[str, tuple[int, ...] | None] = {}  # value -> the shape in which it lies on a grid
        for node in graph.nodes if graph.has_images and torus is None else ():
            parents = [self.images[p] for p in node.parents]
            image: tuple[int, ...] | None = node.shape if len(node.shape) > 1 else None
            if isinstance(node, Wire) and node.role in ("order", "sum"):
                image = parents[0] if all(p == parents[0] for p in parents) else None
                cells = None if image is None else natural(image)
            else:
                plain = all(p == self.graph[q].shape for p, q in zip(parents, node.parents, strict=True))
                cells = node_cells(graph, module, node) if image and plain else None
                image = image if cells is not None else None
            self.cells[node.name], self.images[node.name] = cells, image

    def _wanted(self, group: Group) -> Cells:
        """The finest grid for a group."""
        if not group.free and group.is_output:
            image = self.images[group.value]
            return None if image is None else natural(image)
        found = [self.cells[t.affine] for t in group.terms]
        return reduce(meet, found if group.is_output else [*found, self.cells[group.node]])

    def _shared(self, group: Group) -> Tensor | None:
        """For each row of a group the number of its multiplier; None if each has its own."""
        node = self.graph.index.get(group.node)
        if not isinstance(node, Activation):
            return None
        owner = groups = activations.mixed(node.resolve(self.module), node.shape)
        if self._tied(node):
            pixels = math.prod(node.shape[1:] if self.torus is None else self.torus.sheets[node.name].window)
            owner = torch.arange(node.features // pixels).repeat_interleave(pixels)
            if groups is not None:  # channels that are mixed share one, too
                first = torch.full((int(groups.max()) + 1,), len(owner)).scatter_reduce(0, groups, owner, "amin")
                owner = first[groups]
        if owner is None:
            return None
        return torch.unique(owner if group.rows is None else owner[list(group.rows)], return_inverse=True)[1]

    def _tied(self, node: Activation) -> bool:
        if self.torus is not None:
            return node.name in self.torus.sheets
        return self.graph.has_images and len(node.shape) > 1

    def place(self) -> Plan:
        """The plan with grids."""
        plan = self.plan
        cells = start = self.cells.get(self.graph.input.name)
        steps, places = [], {}
        for step in plan.steps:
            if cells is not None and not self._passes(step):
                wanted = self._wanted(plan.groups[step.group]) if step.group else self.cells[step.name]
                cells = meet(cells, wanted)
            if step.group is not None:
                places[step.group] = self._place(plan.groups[step.group], cells)
                cells = places[step.group].layout.cells
            steps.append(replace(step, cells=cells))
        while True:  # all heads lie on one grid
            for head in plan.heads:
                cells = None if cells is None else meet(cells, self._wanted(head))
            found = {g.name: self._place(g, cells) for g in plan.heads}
            if all(p.layout.cells == cells for p in found.values()):
                break
            cells = None
        images = frozenset(a.name for a in self.graph.activations if self._tied(a))
        return replace(plan, steps=tuple(steps), cells=start, places=places | found, images=images)

    def _passes(self, step: Step) -> bool:
        """Whether a step only renames: it does not ask for a grid."""
        node = self.graph.index.get(step.transport or "")
        return isinstance(node, Wire) and node.role == "order" and self.images[node.name] is not None

    def _place(self, group: Group, cells: Cells) -> Place:
        """Where a group's rows lie, on the given grid or, if they lie differently in its cells, in a single cell."""
        shape = self.images[group.value] if cells is not None else (self.graph[group.value].features,)
        shared, count = self._shared(group), math.prod(cells or ())
        misfit = shape is None or (cells is not None and not _divides(shape[1:], cells))
        if misfit or group.size % count:  # no image, or one of a coarser grid
            return self._place(group, None)
        assert shape is not None
        cell, where = cell_rows(shape, cells)
        rows = torch.arange(len(cell)) if group.rows is None else torch.tensor(group.rows)
        order = torch.argsort(cell[rows], stable=True).reshape(count, -1)
        found = _same_in_cells(cell[rows][order], where[rows][order])
        terms: list[tuple[Tensor | None, int]] = []
        for term in group.terms:
            affine = self.graph[term.affine]
            used = torch.arange(len(rows)) if term.rows is None else torch.tensor(term.rows)
            at, place = cell_rows(affine.shape, cells)
            terms.append((_same_in_cells(at[used][order], place[used][order]), affine.features // count))
        if found is None or any(t is None for t, _ in terms):
            return self._place(group, None)
        parts = () if cells is None else phases(shape, cells) if group.rows is None else (1,) * len(cells)
        return Place(
            Layout(cells, parts, len(found)),
            _unless_all(found, len(cell) // count),
            _unless_all(rows[order[0]], len(cell)),
            tuple(_unless_all(t, n) for t, n in terms if t is not None),
            None if shared is None else shared[order[0]],
            shared,
        )


def _divides(pixels: tuple[int, ...], cells: tuple[int, ...]) -> bool:
    return len(pixels) == len(cells) and all(n % c == 0 for n, c in zip(pixels, cells, strict=True))


def _same_in_cells(cell: Tensor, where: Tensor) -> Tensor | None:
    """The local rows of tables (cells, n) with one line per cell, if they are the same in all of them."""
    even = bool((cell == torch.arange(len(cell))[:, None]).all()) and bool((where == where[:1]).all())
    return where[0] if even else None


def _unless_all(rows: Tensor, count: int) -> Tensor | None:
    return None if len(rows) == count and bool((rows == torch.arange(count)).all()) else rows


def _straight(plan: Plan, graph: Graph) -> frozenset[str]:
    """See :class:`Plan`: on such a stretch, the factor of a covariance is only divided by."""
    found, start, value = set(), "", ""  # the group that such a stretch began with, and what is live now
    for step in plan.steps:
        node = graph.index.get(step.transport or "")
        reader = plan.groups.get(step.group or "")
        if reader is not None:
            if start and reader.needs == [value] and reader.free and value not in step.live:
                found.add(start)
            start = value = reader.name if len(plan.parts(reader.node)) == 1 else ""
        elif isinstance(node, Wire) and node.role == "order":
            value = node.name
        else:
            start = ""
        start = start if len(step.live) <= 1 else ""
    if start and len(plan.heads) == 1 and plan.output.free and plan.output.needs == [value]:
        found.add(start)
    return frozenset(found)


def make_plan(graph: Graph, module: nn.Module, torus: Torus | None = None) -> Plan:
    """The plan of a graph that was traced from a module; on a torus activations of images keep their maps."""
    demoted: set[str] = set() if torus is None else {a.name for a in graph.activations if a.name in torus.sheets}
    while True:
        try:
            planner = _Planner(graph, module, demoted)
            groups = {act.name: planner.split(act) for act in graph.activations}
            heads = planner.output()
            order = _Order(graph, groups, planner.owners)
            order.need(act.name for act in graph.activations)
            order.need(v for g in heads for v in g.needs)
            flat = {g.name: g for gs in groups.values() for g in gs}
            steps = order.steps if torus is None else ordered(order.steps, graph, torus, flat)
            plan = Plan(_with_liveness(steps, graph, flat, heads), flat, tuple(heads))
            plan = _Grids(graph, module, plan, torus).place()
            return plan if torus is not None else replace(plan, straight=_straight(plan, graph))
        except RecursionError as error:
            raise GraphError("the graph has too long a chain of operations without an activation") from error
        except _Cycle as cycle:
            if cycle.activation in demoted:
                raise GraphError(f"the maps that feed '{cycle.activation}' depend on each other in a cycle") from cycle
            demoted.add(cycle.activation)  # two free maps that each need the other first: keep one of them as it is


def largest_dense(plan: Plan, graph: Graph) -> tuple[int, str]:
    """Entries of the largest dense generators of a sweep, from shapes alone, and at which value."""
    found = [(0, "")]
    for step in (s for s in plan.steps if s.cells is None):
        node = plan.groups[step.group].value if step.group else step.name
        values = {node, *graph[node].parents, *(plan.groups[n].value if n in plan.groups else n for n in step.live)}
        found.append((sum(graph[v].features for v in values) ** 2, node))  # noise is compressed to what is live
    return max(found, key=lambda f: f[0])
