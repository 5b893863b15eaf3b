"""Which maps of a graph are normalised, where, and in which order: decided once, from the structure alone.

For every activation the planner follows its input back through sums and rearrangements to the affine maps it is made
of. Rows of the input that are a plain sum of free maps, each used here first, are *normalised* (theory: "hidden
map"). All other rows, such as an identity skip that goes straight into the activation, keep their map and get a
*bounded* multiplier. Affine maps that no activation and no output normalises stay as they are: they only transport
generators.

In a graph with convolutions the plan also says on which grid of cells (``ldlt.grid``) each step is done: the finest one
that all operations up to it commute with. Neurons that are the pixels of one channel then share a multiplier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.errors import GraphError
from ldlt.graph import Activation, Affine, Graph, Input, Wire, index_map
from ldlt.grid import Cells, Layout, cell_rows, meet, natural, phases
from ldlt.wiring import node_cells

__all__ = ["FreeTerm", "Group", "Place", "Plan", "Step", "make_plan"]


@dataclass(frozen=True)
class FreeTerm:
    """One free map inside a group: rows of an affine map, with its input split into members.

    Attributes:
        affine: Name of the affine node.
        rows: Rows of its weight, in the order of the group (None: all, in order).
        scale: Factor with which it enters the sum.
        members: Values its input is a concatenation of, in order.
    """

    affine: str
    rows: tuple[int, ...] | None
    scale: float
    members: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Rows of one activation (or of the output) that are eliminated together.

    Attributes:
        name: Unique name, also the key of its parameters.
        node: The activation node, or the output value.
        value: The value the rows belong to (the pre-activation or the output).
        rows: Which rows (None: all).
        terms: The free maps to normalise; empty for a bounded group.
        size: Number of rows.
    """

    name: str
    node: str
    value: str
    rows: tuple[int, ...] | None
    terms: tuple[FreeTerm, ...]
    size: int

    @property
    def is_output(self) -> bool:
        """Whether these are the rows of the output."""
        return self.name == "(output)"

    @property
    def free(self) -> bool:
        """Whether the group's map is normalised."""
        return bool(self.terms)


@dataclass(frozen=True)
class Step:
    """One step of the sweep.

    Attributes:
        transport: The value whose generator is computed from its parents', or None.
        group: The group that is eliminated, or None.
        joins: The activation whose groups are put together, or None.
        live: Values that are needed after this step.
        cells: The grid it is done on (None: dense).
    """

    transport: str | None = None
    group: str | None = None
    joins: str | None = None
    live: tuple[str, ...] = ()
    cells: Cells = None

    @property
    def name(self) -> str:
        """What the step makes."""
        return self.transport or self.group or self.joins or ""


@dataclass(frozen=True)
class Place:
    """Where the rows of a group lie on the grid of its step. In the dense representation there is one cell.

    Attributes:
        cells: The grid.
        layout: Of the group's rows; None in the dense representation.
        rows: Local features of the group's value (None: all, in order).
        features: The features they are in the first cell (None: all, in order).
        terms: Local rows of each term's affine map (None: all, in order).
        shared: For each row the number of its multiplier (None: each has its own).
        count: Number of multipliers where they are shared.
    """

    cells: Cells
    layout: Layout | None
    rows: Tensor | None
    features: Tensor | None
    terms: tuple[Tensor | None, ...]
    shared: Tensor | None
    count: int = 0


@dataclass(frozen=True)
class Plan:
    """The sweep.

    Attributes:
        steps: In order.
        groups: By name.
        output: The output's group.
        weights: Affine node -> parameter name.
        cells: The grid at the start; None if everything is dense.
        places: Group -> where its rows lie.
        shared: Group -> for each of its rows the number of its multiplier, or None.
        images: Activations whose multipliers belong to channels.
        straight: Groups after which nothing but their own value is live, up to the next group, its only reader.
    """

    steps: tuple[Step, ...]
    groups: dict[str, Group]
    output: Group
    weights: dict[str, str]
    cells: Cells = None
    places: dict[str, Place] = None  # type: ignore[assignment]
    shared: dict[str, Tensor | None] = None  # type: ignore[assignment]
    images: frozenset[str] = frozenset()
    straight: frozenset[str] = frozenset()

    def parts(self, node: str) -> tuple[list[str], list[int] | None]:
        """Groups of an activation, and the places of its features among their concatenated rows (None: in order)."""
        groups = [g for g in self.groups.values() if g.node == node]
        if len(groups) == 1:
            return [groups[0].name], None
        rows = [r for g in groups for r in g.rows or ()]
        return [g.name for g in groups], sorted(range(len(rows)), key=rows.__getitem__)

    @property
    def normalised(self) -> set[str]:
        """Affine nodes with at least one normalised row."""
        return {t.affine for g in [*self.groups.values(), self.output] for t in g.terms}


@dataclass
class _Origin:
    """Where the rows of a value come from: affine node -> (row or −1, scale), and which rows have a fixed part."""

    terms: dict[str, tuple[Tensor, Tensor]]
    fixed: Tensor


def _origins(graph: Graph, module: nn.Module) -> dict[str, _Origin]:
    out: dict[str, _Origin] = {}
    for node in graph.nodes:
        n = node.features
        if isinstance(node, Affine):
            out[node.name] = _Origin(
                {node.name: (torch.arange(n), torch.ones(n, dtype=torch.double))},
                torch.zeros(n, dtype=torch.bool),
            )
        elif isinstance(node, Wire) and node.role in ("sum", "order", "rearrange"):
            out[node.name] = _moved(graph, node, out, module)
        else:
            out[node.name] = _Origin({}, torch.ones(n, dtype=torch.bool))
    return out


def _moved(graph: Graph, node: Wire, known: dict[str, _Origin], module: nn.Module) -> _Origin:
    parents = [known[p] for p in node.parents]
    if node.role == "order":
        return parents[0]
    n = node.features
    if node.role == "sum":
        terms: dict[str, tuple[Tensor, Tensor]] = {}
        fixed = torch.zeros(n, dtype=torch.bool)
        for origin, scale in zip(parents, node.scales, strict=True):
            fixed |= origin.fixed
            for name, (index, factor) in origin.terms.items():
                if name in terms:  # the same matrix twice in one sum: its rows are not free
                    fixed |= index >= 0
                    old, weights = terms[name]
                    terms[name] = (torch.where(old >= 0, old, index), weights)
                else:
                    terms[name] = (index, factor * scale)
        return _Origin(terms, fixed)
    sizes = [graph[p].features for p in node.parents]
    source = index_map(graph.index, node, graph.tensors(module))
    names = list(dict.fromkeys(a for o in parents for a in o.terms))
    terms = {}
    for name in names:
        index = torch.cat(
            [o.terms[name][0] if name in o.terms else torch.full((s,), -1) for o, s in zip(parents, sizes, strict=True)]
        )
        factor = torch.cat(
            [
                o.terms[name][1] if name in o.terms else torch.ones(s, dtype=torch.double)
                for o, s in zip(parents, sizes, strict=True)
            ]
        )
        terms[name] = (index[source], factor[source])
    fixed = torch.cat([o.fixed for o in parents])[source]
    return _Origin(terms, fixed)


def _ancestors(graph: Graph) -> dict[str, set[str]]:
    """Affine nodes each value depends on, itself included."""
    out: dict[str, set[str]] = {}
    for node in graph.nodes:
        found = {node.name} if isinstance(node, Affine) else set()
        out[node.name] = found.union(*(out[p] for p in node.parents))
    return out


def _members(graph: Graph, value: str, module: nn.Module) -> tuple[str, ...]:
    """A concatenation of vectors, or of images along their channels, is split into its parts; else one member."""
    node = graph[value]
    if not isinstance(node, Wire):
        return (value,)
    if node.role == "order" and graph[node.parents[0]].shape == node.shape:
        return _members(graph, node.parents[0], module)
    if node.role != "rearrange" or len(node.parents) < 2:
        return (value,)
    if any(graph[p].shape[1:] != node.shape[1:] for p in node.parents):
        return (value,)
    if sum(graph[p].features for p in node.parents) != node.features:
        return (value,)
    moved = index_map(graph.index, node, graph.tensors(module))
    if not bool((moved == torch.arange(node.features)).all()):
        return (value,)
    parts = tuple(m for p in node.parents for m in _members(graph, p, module))
    return parts if len(set(parts)) == len(parts) else (value,)


class _Planner:
    def __init__(
        self, graph: Graph, module: nn.Module, joint: set[str], demoted: set[str], dense: frozenset[str]
    ) -> None:
        self.graph, self.module, self.joint, self.demoted, self.dense = graph, module, joint, demoted, dense
        self.origins = _origins(graph, module)
        self.ancestors = _ancestors(graph)
        self.owned: dict[str, Tensor] = {}  # affine -> rows that a group normalises
        self.owners: dict[str, list[str]] = {}  # affine -> activations that normalise its rows

    # -- groups ------------------------------------------------------------------------------------------------------

    def split(self, node: str, value: str) -> list[Group]:
        """Groups of the rows of ``value`` that feed ``node``."""
        origin = self.origins[value]
        n = self.graph[value].features
        free, bounded = self._signatures(node, origin, n)
        if node in self.joint and (len(free) + bool(bounded)) > 1:
            free, bounded = [], list(range(n))
        groups = []
        for rows, names in free:
            terms = tuple(self._term(name, origin, rows) for name in names)
            for name, term in zip(names, terms, strict=True):
                index = range(self.graph[name].features) if term.rows is None else term.rows
                self.owned.setdefault(name, torch.zeros(self.graph[name].features, dtype=torch.bool))[list(index)] = (
                    True
                )
                self.owners.setdefault(name, []).append(node)
            groups.append((rows, terms))
        if bounded:
            groups.append((bounded, ()))
        several = len(groups) > 1
        return [
            Group(
                f"{node}__{k}" if several else node,
                node,
                value,
                tuple(rows) if several else None,
                terms,
                len(rows),
            )
            for k, (rows, terms) in enumerate(groups)
        ]

    def _signatures(
        self, node: str, origin: _Origin, n: int
    ) -> tuple[list[tuple[list[int], tuple[str, ...]]], list[int]]:
        """Rows by the set of free maps they are a sum of, and the rows that are no such sum."""
        blocked = origin.fixed.clone()
        if node in self.demoted:
            blocked[:] = True
        present = {a: index >= 0 for a, (index, _) in origin.terms.items()}
        for a, (index, scale) in origin.terms.items():
            used = index[present[a]]
            taken = self.owned.get(a)
            if len(torch.unique(used)) != len(used) or (taken is not None and bool(taken[used].any())):
                blocked |= present[a]
            blocked |= present[a] & (scale != scale[present[a]][0] if bool(present[a].any()) else False)
        by: dict[tuple[str, ...], list[int]] = {}
        unblocked = torch.nonzero(~blocked).flatten()
        if len(unblocked):
            table = torch.stack([present[a] for a in origin.terms], 1)[unblocked]
            kinds, which = torch.unique(table, dim=0, return_inverse=True)
            for k, used in enumerate(kinds.tolist()):
                by[tuple(a for a, u in zip(origin.terms, used, strict=True) if u)] = unblocked[which == k].tolist()
            by = dict(sorted(by.items(), key=lambda item: item[1][0]))
        free = []
        bounded = [int(r) for r in torch.nonzero(blocked).flatten()]
        for names, rows in by.items():
            # A map whose output another member already depends on cannot be chosen last.
            inputs = {self.graph[a].parents[0] for a in names}
            if any(a in self.ancestors[y] for a in names for y in inputs):
                bounded += rows
            else:
                free.append((rows, names))
        return free, sorted(bounded)

    def _term(self, name: str, origin: _Origin, rows: list[int]) -> FreeTerm:
        index, scale = origin.terms[name]
        chosen = index[rows]
        full = len(chosen) == self.graph[name].features and bool((chosen == torch.arange(len(chosen))).all())
        return FreeTerm(
            name,
            None if full else tuple(int(i) for i in chosen),
            float(scale[rows][0]),
            _members(self.graph, self.graph[name].parents[0], self.module),
        )

    # -- order -------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        groups: dict[str, list[Group]] = {}
        for act in self.graph.activations:
            groups[act.name] = self.split(act.name, act.parents[0])
        output = self._output()
        order = _Order(self.graph, groups, self.owners)
        for act in self.graph.activations:
            order.ensure(act.name)
        order.need(_needs(output))
        flat = {g.name: g for gs in groups.values() for g in gs}
        steps = _with_liveness(order.steps, self.graph, flat, output)
        weights = {a.name: a.weight for a in self.graph.affines}
        plan = Plan(steps, flat, output, weights)
        return _Grids(self.graph, self.module, plan, self.dense).place()

    def _output(self) -> Group:
        value = self.graph.output
        origin = self.origins[value]
        n = self.graph[value].features
        free, bounded = self._signatures("(output)", origin, n)
        if bounded or len(free) != 1:
            return Group("(output)", "(output)", value, None, (), n)
        rows, names = free[0]
        return Group("(output)", "(output)", value, None, tuple(self._term(a, origin, rows) for a in names), n)


class _Grids:
    """Chooses the grid of every step, and finds where the rows of the groups lie on it."""

    def __init__(self, graph: Graph, module: nn.Module, plan: Plan, dense: frozenset[str]) -> None:
        self.graph, self.module, self.plan, self.dense = graph, module, plan, dense
        self.cells: dict[str, Cells] = {}  # node -> finest grid of the operation
        self.images: dict[str, tuple[int, ...] | None] = {}  # value -> the shape in which it lies on a grid
        if graph.has_images:
            for node in graph.nodes:
                self._visit(node.name)

    def _visit(self, name: str) -> None:
        node = self.graph[name]
        parents = [self.images[p] for p in node.parents]
        image: tuple[int, ...] | None = node.shape if len(node.shape) > 1 else None
        if isinstance(node, Wire) and node.role == "order":
            image = parents[0]
            self.cells[name] = None if image is None else natural(image)
        elif isinstance(node, Wire) and node.role == "sum":
            image = parents[0] if all(p == parents[0] for p in parents) else None
            self.cells[name] = None if image is None else natural(image)
        else:
            plain = all(p == self.graph[q].shape for p, q in zip(parents, node.parents, strict=True))
            self.cells[name] = node_cells(self.graph, self.module, node) if image and plain else None
            image = image if self.cells[name] is not None else None
        self.images[name] = image

    def _group_cells(self, group: Group) -> Cells:
        """The finest grid for a group."""
        if group.name in self.dense:
            return None
        if not group.free and group.is_output:
            image = self.images[group.value]
            return None if image is None else natural(image)
        cells = self.cells[group.terms[0].affine if group.free else group.node]
        for term in group.terms:
            cells = meet(cells, self.cells[term.affine])
        return cells if group.is_output else meet(cells, self.cells[group.node])

    def _shared(self, group: Group) -> Tensor | None:
        """For each row of a group the number of its multiplier; None if each has its own."""
        if group.is_output:
            return None
        node = self.graph[group.node]
        assert isinstance(node, Activation)
        groups = activations.mixed(node.resolve(self.module), node.shape)
        if not self._tied(node):
            owner = groups
        else:
            owner = torch.arange(node.shape[0]).repeat_interleave(math.prod(node.shape[1:]))
            if groups is not None:  # channels that are mixed share one, too
                first = torch.full((int(groups.max()) + 1,), len(owner)).scatter_reduce(0, groups, owner, "amin")
                owner = first[groups]
        if owner is None:
            return None
        return torch.unique(owner if group.rows is None else owner[list(group.rows)], return_inverse=True)[1]

    def _tied(self, node: Activation) -> bool:
        return self.graph.has_images and len(node.shape) > 1

    def place(self) -> Plan:
        """The plan with grids."""
        plan = self.plan
        groups = {**plan.groups, plan.output.name: plan.output}
        shared = {name: self._shared(g) for name, g in groups.items()}
        cells = start = self.cells.get(self.graph.input.name)
        steps, places = [], {}
        for step in plan.steps:
            if cells is not None and not self._passes(step):
                wanted = self._group_cells(groups[step.group]) if step.group else self.cells[step.name]
                cells = meet(cells, wanted)
            if step.group is not None:
                places[step.group], cells = self._place(groups[step.group], cells, shared[step.group])
            steps.append(replace(step, cells=cells))
        cells = None if cells is None else meet(cells, self._group_cells(plan.output))
        places[plan.output.name], _ = self._place(plan.output, cells, None)
        images = frozenset(a.name for a in self.graph.activations if self._tied(a))
        found = replace(plan, steps=tuple(steps), cells=start, places=places, shared=shared, images=images)
        return replace(found, straight=_straight(found, self.graph))

    def _passes(self, step: Step) -> bool:
        """Whether a step only renames: it does not ask for a grid."""
        node = self.graph.index.get(step.transport or "")
        return isinstance(node, Wire) and node.role == "order" and self.images[node.name] is not None

    def _place(self, group: Group, cells: Cells, shared: Tensor | None) -> tuple[Place, Cells]:
        """Where a group's rows lie, on the given grid or, if they lie differently in its cells, in a single cell."""
        if cells is not None:
            found = self._on_grid(group, cells, shared)
            if found is not None:
                return found, cells
        rows = None if group.rows is None else torch.tensor(group.rows)
        terms = tuple(None if t.rows is None else torch.tensor(t.rows) for t in group.terms)
        return Place(None, None, rows, rows, terms, shared, _count(shared)), None

    def _on_grid(self, group: Group, cells: tuple[int, ...], shared: Tensor | None) -> Place | None:
        image = self.images[group.value]
        if image is None:
            return None
        count = math.prod(cells)
        cell, where = cell_rows(image, cells)
        rows = torch.arange(len(cell)) if group.rows is None else torch.tensor(group.rows)
        if len(rows) % count:
            return None
        order = torch.argsort(cell[rows], stable=True).reshape(count, -1)
        found = _same_in_cells(cell[rows][order], where[rows][order])
        terms = []
        for term in group.terms:
            used = torch.arange(len(rows)) if term.rows is None else torch.tensor(term.rows)
            at, place = cell_rows(self.graph[term.affine].shape, cells)
            terms.append(_same_in_cells(at[used][order], place[used][order]))
        if found is None or any(t is None for t in terms):
            return None
        parts = phases(image, cells) if group.rows is None else (1,) * len(cells)
        return Place(
            cells,
            Layout(cells, parts, len(found)),
            _unless_all(found, len(cell) // count),
            rows[order[0]],
            tuple(
                _unless_all(t, self.graph[term.affine].features // count)
                for t, term in zip(terms, group.terms, strict=True)
                if t is not None
            ),
            None if shared is None else shared[order[0]],
            _count(shared),
        )


def _count(shared: Tensor | None) -> int:
    return 0 if shared is None else int(shared.max()) + 1


def _same_in_cells(cell: Tensor, where: Tensor) -> Tensor | None:
    """The local rows of tables (cells, n) with one line per cell, if they are the same in all of them."""
    even = bool((cell == torch.arange(len(cell))[:, None]).all()) and bool((where == where[:1]).all())
    return where[0] if even else None


def _unless_all(rows: Tensor, count: int) -> Tensor | None:
    return None if len(rows) == count and bool((rows == torch.arange(count)).all()) else rows


def _straight(plan: Plan, graph: Graph) -> frozenset[str]:
    """See :class:`Plan`: on such a stretch, the factor of a covariance is only divided by."""
    found = set()
    for i, step in enumerate(plan.steps):
        if step.group is None or len(plan.parts(plan.groups[step.group].node)[0]) > 1:
            continue
        value, alone = step.group, True
        for later in plan.steps[i:]:
            if later is not step and later.group is not None:
                break
            node = graph.index.get(later.transport or "")
            ordered = isinstance(node, Wire) and node.role == "order"
            alone = alone and len(later.live) <= 1 and (later.transport is None or ordered)
            value = later.name
        else:
            later = Step(group=plan.output.name)
        reader = plan.output if later.group == plan.output.name else plan.groups[later.group or ""]
        if alone and reader.free and _needs(reader) == [value] and value not in later.live:
            found.add(step.group)
    return frozenset(found)


def _needs(group: Group) -> list[str]:
    """Values whose generators a group's elimination reads."""
    return [m for t in group.terms for m in t.members] if group.free else [group.value]


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
                self.need(_needs(group))
                self.steps.append(Step(group=group.name))
            self.steps.append(Step(joins=name))
        elif not isinstance(node, Input):
            self.need(node.parents)
            # An affine map can transport a generator only once its weight is known.
            for owner in self.owners.get(name, []):
                if owner in self.active:
                    raise _Cycle(owner)
                self.ensure(owner)
            self.steps.append(Step(transport=name))
        del self.active[name]
        self.done.add(name)


def _with_liveness(steps: list[Step], graph: Graph, groups: dict[str, Group], output: Group) -> tuple[Step, ...]:
    """Add to each step the values that are read later."""
    reads = [_reads(s, graph, groups) for s in steps]
    live: set[str] = set(_needs(output))
    out: list[Step] = []
    for step, read in zip(reversed(steps), reversed(reads), strict=True):
        out.append(replace(step, live=tuple(sorted(live))))
        live.discard(step.name)
        live |= set(read)
    return tuple(reversed(out))


def _reads(step: Step, graph: Graph, groups: dict[str, Group]) -> list[str]:
    if step.transport is not None:
        return list(graph[step.transport].parents)
    if step.group is not None:
        return _needs(groups[step.group])
    return [g.name for g in groups.values() if g.node == step.joins]


def make_plan(graph: Graph, module: nn.Module, joint: set[str], dense: frozenset[str] = frozenset()) -> Plan:
    """The plan of a graph.

    Args:
        graph: A traced graph.
        module: The module it was traced from, for its constants.
        joint: Names of activations that mix entries (GroupSort and the like): their rows are never split.
        dense: Names of groups that are not done on a grid.
    """
    demoted: set[str] = set()
    while True:
        try:
            return _Planner(graph, module, joint, demoted, dense).plan()
        except RecursionError as error:
            raise GraphError(
                "the graph has too long a chain of operations without an activation between them"
            ) from error
        except _Cycle as cycle:
            if cycle.activation in demoted:
                raise GraphError(f"the maps that feed '{cycle.activation}' depend on each other in a cycle") from cycle
            # Two free maps that each need the other first: keep one of them as it is.
            demoted.add(cycle.activation)
