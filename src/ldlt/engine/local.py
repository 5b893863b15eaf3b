r"""The rule on a torus: convolutions keep their kernels, multipliers are bounded, the head is normalised.

Everything but the maps behind a flattened image is *given* (``ldlt.engine.rule``): with ``T`` the covariance of what an
activation reads, frequency by frequency, :math:`Λ = θ/(2r^2 d)` for a ``d`` that dominates ``T``
(``ldlt.images.local.dominate``). A matrix ``W`` behind the images is normalised in their metric,

.. math:: C = \tfrac{1}{\sqrt2} r^{-1}Λ^{-1/2} N W ,\qquad N = U R^{-1},\quad RR' = W G W' + δ^2 s^2 ,

with ``U`` the contraction of ``R``: a network with one more input per row of ``W``, as everywhere (theory 3a).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ldlt.covariance import Read
from ldlt.engine.linalg import BALANCE, MARGIN, bounded, floor_share, positive, smallest
from ldlt.engine.plan import FreeTerm, Group, Plan, Step, thins
from ldlt.engine.sweep import _LARGEST_MARGIN, Explicit, Sweep
from ldlt.errors import GraphError
from ldlt.graph import Activation, Affine, Convolution, Graph
from ldlt.graph.convolution import meet
from ldlt.images.grids import Layout, _weights
from ldlt.images.local import Field, dominate
from ldlt.images.torus import Map, Ring, Sheet, Torus

__all__ = ["LocalSweep", "check_heads"]

Values = Callable[[str], Tensor]
Linear = Callable[[Values], Tensor]


class LocalSweep(Sweep):
    """One run of the rule over a graph on its torus."""

    field: Field

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        torus = self.blueprint.torus
        assert torus is not None
        self.torus: Torus = torus
        self.unit = self.blueprint.contraction.unit
        self.steps = list(self.plan.steps)
        self.normals: dict[str, Tensor] = {}
        self.left: dict[str, Tensor] = {}
        self.early: dict[str, None] = {}  # made of images when they were left, ahead of its step
        self.left_sizes: dict[str, Tensor] = {}

    def run(self) -> Explicit:
        """The explicit form."""
        name, torus = self.graph.input.name, self.torus
        sheet = torus.sheets[name]
        self.field = Field.start(name, sheet.shape, sheet.sides, self.given.bound)
        place = 0
        while place < len(self.steps):
            step = self.steps[place]
            if self._on_images(step):
                place += self._image_step(place)
            else:
                if self.field.cells is not None:
                    self._leave(place)
                place += self._vector_step(step)
            self._watch(step)
        if self.field.cells is not None and self.plan.output.value not in self._images():
            self._leave(place)
        if not self.plan.output.free:
            return self._given_output_of(self.plan.output.value)
        return self._image_head() if self.field.cells is not None else self._vector_heads()

    def _images(self) -> list[str]:
        return [*self.torus.sheets, *self.torus.flat]

    def _watch(self, step: Step) -> None:
        if self.watch is not None and self.watch in (step.transport, step.joins) and self.watch in self.field.cov.sizes:
            half = self._half(self.field[self.watch], self.field.sizes[self.watch])
            self.watched = self.field.units[self.watch] * half

    def _half(self, matrix: Tensor, size: Tensor) -> Tensor:
        """``F`` with ``FF^* = G`` and a floor, an input of its own for each feature."""
        floor = (floor_share(self.unit) * size).square() + smallest(self.unit)
        lower, info = torch.linalg.cholesky_ex(matrix + torch.diag_embed(floor).to(matrix.dtype))
        return torch.where((info == 0)[..., None, None], lower, torch.nan)

    # -- images ------------------------------------------------------------------------------------------------------

    def _on_images(self, step: Step) -> bool:
        value = self.plan.groups[step.group].value if step.group is not None else step.name
        return value in self.torus.sheets or value in self.torus.flat

    def _live(self, step: Step) -> list[str]:
        """What is read after a step, and what was made of the images when they were left."""
        return [*(self.torus.image(v) for v in step.live), *self.early]

    def _image_step(self, place: int) -> int:
        """Do a step, or several at once; how many."""
        step = self.steps[place]
        if step.group is not None:
            self._bounded(self.plan.groups[step.group], step)
            return 1
        if step.joins is not None or step.name in self.torus.flat:
            self.field = self.field.keep(self._live(step))
            return 1
        batch = self._batch(place)
        if batch:
            for other in batch:
                self._move(other, [*self.field.cov.sizes, other.name], thin=False)
            self.field = self.field.keep(self._live(batch[-1]))
            sheets = {s.name: self.torus.sheets[s.name] for s in batch}
            cells = sheets[step.name].sides
            self.field = self.field.thin(cells, {n: Layout.of(s.shape, cells) for n, s in sheets.items()})
            return len(batch)
        sheet = self.torus.sheets[step.name]
        grid = meet(self.field.cells, sheet.sides)
        for p in self._parents(step.name):
            grid = meet(grid, self.torus.sheets[p].sides)
        assert grid is not None
        self.field = self.field.coarsen(grid)
        self._move(step, self._live(step))
        return 1

    def _parents(self, name: str) -> list[str]:
        return [self.torus.image(p) for p in self.torus.operators[name].node.parents]

    def _batch(self, place: int) -> list[Step]:
        """Strides that lead all live values to one coarser grid; empty if others stay behind."""
        first = self.steps[place]
        if not thins(self.torus, first):
            return []
        cells, sides = self.field.cells, self.torus.sheets[first.name].sides
        found: list[Step] = []
        for step in self.steps[place:]:
            inner = self._parents(step.name) if thins(self.torus, step) else []
            fits = inner and all(p in self.field.cov.sizes and self.torus.sheets[p].sides == cells for p in inner)
            if not fits or self.torus.sheets[step.name].sides != sides:
                break
            found.append(step)
        for count in range(len(found), 0, -1):
            if set(self._live(found[count - 1])) <= {s.name for s in found[:count]}:
                return found[:count]
        return []

    def _move(self, step: Step, keep: Sequence[str], thin: bool = True) -> None:
        operator, torus, cells = self.torus.operators[step.name], self.torus, self.field.cells
        out, parents = torus.sheets[step.name], self._parents(step.name)
        maps = operator.maps(self._tensors, [torus.sheets[p] for p in parents], out, cells, self.given.bound, thin)
        both: dict[str, Map] = {}
        for p, m in zip(parents, maps, strict=True):
            both[p] = m if p not in both else _sum(both[p], m)
        layout = Layout.of((math.prod(out.lead), *torus.sheets[parents[0]].sides) if not thin else out.shape, cells)
        self.field = self.field.add(step.name, self.field.read(both), layout, keep)

    def _tensors(self, path: str) -> Tensor:
        found = self.given.weights.get(path)
        return self.tensors(path) if found is None else found

    def _bounded(self, group: Group, step: Step) -> None:
        """Keep a map that feeds an activation, and bound its multipliers."""
        value = self.torus.image(group.value)
        sheet: Sheet | None = self.torus.sheets.get(value)
        place = self.plan.places[group.name]
        if sheet is not None:
            grid = meet(self.field.cells, sheet.sides)
            assert grid is not None
            self.field = self.field.coarsen(grid)
        node = self.graph[group.node]
        assert isinstance(node, Activation)
        count = self.field.layouts[value].features
        rows = None if place.rows is None else place.rows
        if sheet is None:
            owner = place.every
            features = math.prod(node.shape)
        else:
            assert place.every is not None
            channels = math.prod(sheet.lead)
            owner = place.every.reshape(channels, -1)[:, 0].repeat_interleave(count // channels)
            features = count
        extra = self.given.extra[group.name]
        sector = self.blueprint.sector(node, self.module)
        like = self.given.bound

        def wide(number: Tensor | float) -> Tensor:
            flat = torch.as_tensor(number, dtype=like.dtype, device=like.device).reshape(-1, 1)
            flat = flat.expand(-1, features // len(flat)).reshape(-1)
            return flat if rows is None else flat[rows.to(flat.device)]

        center, radius = wide(sector.center), wide(sector.radius)
        balance = positive(extra["log_balance"], BALANCE)
        owner = None if owner is None else owner.to(like.device)
        if owner is not None and len(balance) != len(owner):
            balance = balance[owner]
        margin = _LARGEST_MARGIN * torch.sigmoid(bounded(extra["margin"], MARGIN))
        read, size = self._read(value, rows)
        least = smallest(self.unit) ** 0.75
        bound = dominate(read.spread, size, balance, self.blueprint.power, self.unit, least)
        multiplier = margin / (2 * radius.square() * bound)
        if owner is not None:
            total = int(owner.max()) + 1
            least = multiplier.new_full((total,), torch.inf).scatter_reduce(0, owner, multiplier, "amin")
            multiplier = least[owner]
        unit = self.field.units[value]
        self._activate(group, read, multiplier, center, radius, step)
        if sheet is not None:
            assert place.every is not None
            multiplier = least[place.every.to(like.device)]
        self.multipliers[group.name] = multiplier / unit / unit

    def _read(self, value: str, rows: Tensor | None) -> tuple[Read, Tensor]:
        """Covariances of a live value itself, or of some of its features."""
        at, matrix, size = self.field.cov.places[value], self.field.cov.matrix, self.field.sizes[value]
        cross = matrix[..., at, :]
        if rows is None:
            return Read(cross, cross[..., at]), size
        rows = rows.to(matrix.device)
        cross = cross[..., rows, :]
        return Read(cross, cross[..., at][..., rows]), size[rows]

    def _activate(
        self, group: Group, read: Read, multiplier: Tensor, center: Tensor, radius: Tensor, step: Step
    ) -> None:
        name, field = group.name, self.field
        diagonal = 1 / (2 * radius.square() * multiplier)
        keep = [*self._live(step), name]
        value = self.torus.image(group.value)
        cov, _ = field.cov.activate(read, diagonal, name, center.to(diagonal), radius.to(diagonal), keep)
        own = cov.matrix[..., cov.places[name], cov.places[name]].detach().diagonal(dim1=-2, dim2=-1).real
        own = own if own.ndim == 1 else own.amax(0)
        layout = field.layouts[value] if field.cells is not None else Layout(None, (), len(own))
        self.field = field.joined(cov, name, layout, own.sqrt(), field.units[value])

    # -- from images to vectors --------------------------------------------------------------------------------------

    def _terms_behind(self, place: int) -> list[FreeTerm]:
        groups = [self.plan.groups[s.group] for s in self.steps[place:] if s.group is not None]
        return [t for g in [*groups, *self.plan.heads] for t in g.terms]

    def _leave(self, place: int) -> None:
        """Make all vectors that read images, and forget the images."""
        rows: dict[str, dict[str, Tensor]] = {}
        normalised = set()
        for term in self._terms_behind(place):
            normalised.add(term.affine)
            if any(m in self.torus.flat for m in term.members):
                weight = self.given.weights[_affine(self.graph, term.affine).weight]
                sizes = [self.graph[m].features for m in term.members]
                rows[_raw(term.affine)] = self._embedded(term.members, weight.split(sizes, -1))
        for step in self.steps[place:]:
            name = step.transport
            if name is None or name in normalised or not any(self._is_image(p) for p in self.graph[name].parents):
                continue
            node = self.graph[name]
            if isinstance(node, Affine):
                rows[name] = self._embedded(node.parents, [self.given.weights[node.weight]])
            else:
                rows[name] = self._found(node)
        for name in self.field.cov.sizes:
            own, unit = self.field[name].diagonal(dim1=-2, dim2=-1).real.mean(-1), self.field.units[name]
            self.left[name] = (own @ _weights(self.field.cells).to(own) + smallest(self.unit)).sqrt() * unit
            self.left_sizes[name] = self.field.sizes[name].amax() * unit
        self.field = self.field.leave(rows)
        self.early = dict.fromkeys(rows)

    def _is_image(self, value: str) -> bool:
        return value in self.torus.sheets or value in self.torus.flat

    def _embedded(self, values: Sequence[str], matrices: Sequence[Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for value, matrix in zip(values, matrices, strict=True):
            image = self.torus.image(value)
            sheet = self.torus.sheets[image]
            each = sheet.embed(matrix.reshape(len(matrix), *sheet.lead, *sheet.window)).reshape(-1, *sheet.shape)
            found[image] = each if image not in found else found[image] + each
        return found

    def _found(self, node: Any) -> dict[str, Tensor]:
        """The rows of a fixed operation, as gradients."""
        like = self.given.bound
        images = [like.new_zeros(1, *self.graph[p].shape) for p in node.parents]
        y, back = cast(Any, torch.func.vjp)(node.linear(self.tensors), *images)
        unit = torch.eye(node.features, dtype=like.dtype, device=like.device).reshape(-1, *y.shape)
        rows = torch.func.vmap(back)(unit)
        return self._embedded(node.parents, [r.reshape(len(r), -1) for r in rows])

    # -- vectors -----------------------------------------------------------------------------------------------------

    def _vector_step(self, step: Step) -> int:
        if step.transport is not None:
            self.early.pop(step.transport, None)
            self._carry(step)
        elif step.group is not None:
            group = self.plan.groups[step.group]
            if group.free:
                self._normalised(group, step)
            else:
                self._bounded(group, step)
        else:
            groups = self.plan.parts(step.joins or "")
            if len(groups) > 1:
                order = self._order(groups)
                every = [g.name for g in groups]
                self._columns(step.joins or "", every, lambda f: torch.cat([f(n) for n in every], -1)[..., order])
        self.field = self.field.keep(self._live(step))
        return 1

    def _carry(self, step: Step) -> None:
        node: Any = self.graph[step.name]
        if step.name in self.field.cov.sizes:
            return  # made when the images were left
        if isinstance(node, Affine):
            weight = self.weights.get(node.weight, self.given.weights[node.weight])
            if _raw(node.name) in self.field.cov.sizes:
                raw, normal = _raw(node.name), self.normals[node.name]
                return self._columns(node.name, [raw], lambda f: f(raw) @ normal.mT)
            return self._columns(
                node.name, node.parents, lambda f: node.apply(self._shaped(f, node.parents[0]), weight)
            )
        run = node.linear(self.tensors)
        return self._columns(node.name, node.parents, lambda f: run(*(self._shaped(f, p) for p in node.parents)))

    def _shaped(self, values: Values, name: str) -> Tensor:
        return values(name).reshape(-1, *self.graph[name].shape)

    def _columns(self, name: str, read: Sequence[str], function: Linear) -> None:
        """Add a linear function of some live vectors, known by what it makes of batches of them."""
        found = self._through(read, function)
        self.field = self.field.add(name, found, Layout(None, (), len(found[1])), [*self.field.cov.sizes, name])

    def _through(self, read: Sequence[str], function: Linear) -> tuple[Read, Tensor, Tensor]:
        """Its covariances, magnitudes and unit."""
        field, cov, places = self.field, self.field.cov, self.field.cov.places
        unit = field.unit(read)
        share = {n: field.units[n] / unit for n in read}
        cross = function(lambda n: share[n] * cov.matrix[places[n], :].mT).reshape(cov.matrix.shape[-1], -1).mT
        spread = function(lambda n: share[n] * cross[:, places[n]]).reshape(len(cross), -1)
        size = _magnitude(function, {n: (share[n] * field.sizes[n]).detach() for n in read})
        return Read(cross, (spread + spread.mT) / 2), size, unit

    def _sources(self, group: Group) -> list[str]:
        """Live vectors that a group reads."""
        found = [m for m in group.members if not self._is_image(m)]
        return [*found, *(r for t in group.terms if (r := _raw(t.affine)) in self.field.cov.sizes)]

    def _raw_sum(self, group: Group) -> Linear:
        """``Σ_t scale W_t z_t`` for the free matrices as they are."""

        def function(values: Values) -> Tensor:
            total: Any = 0.0
            for term, rows, node in self._terms(group):
                sizes = [self.graph[m].features for m in term.members]
                columns = self.given.weights[node.weight].split(sizes, -1)
                read = [(m, w) for m, w in zip(term.members, columns, strict=True) if not self._is_image(m)]
                y: Any = values(_raw(term.affine)) if len(read) < len(columns) else 0.0
                for m, weight in read:
                    y = y + values(m) @ weight.mT
                total = total + term.scale * (y if rows is None else y[..., rows])
            return total  # type: ignore[no-any-return]

        return function

    def _contract(self, group: Group, head: bool) -> tuple[Read, Tensor, Any, Tensor]:
        """Of the rows ``N Σ W z`` of a group: their covariances, ``U``, what contracted it, and ``N``."""
        read, size, unit = self._through(self._sources(group), self._raw_sum(group))
        scale = self._scale(group, unit)  # whatever the scale of what is read, the free matrix is measured in it
        matrix, contracted, normal = self._normaliser(group, self._half(read.spread, size), scale, head)
        return Read(normal @ read.cross, matrix @ matrix.mT), matrix, contracted, normal / unit

    def _normaliser(self, group: Group, root: Tensor, scale: Tensor, head: bool) -> tuple[Tensor, Any, Tensor]:
        """``U``, what contracted it (None for a head), and ``N`` with ``N R = U``, for a lower-triangular ``R``."""
        extra, root = dict(self.given.extra[group.name]), root / scale
        contracted = None if head else self.blueprint.contraction(root, extra)
        matrix = self.blueprint.head(root, extra) if contracted is None else contracted.matrix
        return matrix, contracted, torch.linalg.solve_triangular(root, matrix, upper=False, left=False) / scale

    def _scale(self, group: Group, unit: Tensor) -> Tensor:
        """Root mean square of what a group reads, in a unit: free matrices are measured in it."""
        found, count = [], []
        for member in group.members:
            image = self.torus.image(member)
            if image not in self.left:
                own = (self.field[member].diagonal().mean() + smallest(self.unit)).sqrt() * self.field.units[member]
            else:
                own = self.left[image]
            found.append(own / unit)
            count.append(self.graph[member].features)
        shares = torch.tensor(count).to(unit) / sum(count)
        return torch.linalg.vector_norm(torch.stack(found) * shares.sqrt()) + smallest(self.unit)

    def _normalised(self, group: Group, step: Step) -> None:
        place, new = self.plan.places[group.name], self._neurons(group, step.live)
        multiplier = self._multiplier(group, new)
        read, matrix, contracted, normal = self._contract(group, head=False)
        like = multiplier
        radius = torch.as_tensor(new.radius).to(like).expand_as(multiplier)
        center = torch.as_tensor(new.center).to(like).expand_as(multiplier)
        scale = 1 / (math.sqrt(2) * radius * multiplier.sqrt())
        self._assign_metric(group, scale[:, None] * normal)
        # With D = (2r²Λ)^{-1}: T = D^{1/2} U U' D^{1/2}, and (D − T)^{-1} = D^{-1/2} K'K D^{-1/2}.
        root = contracted.root.dense()  # K
        field = self.field
        live = field.cov.keep(self._live(step))
        index = field.cov._index(self._live(step))
        spread = root @ matrix @ matrix.mT  # K U U'
        beside = root @ read.cross[:, index]  # K × (cross / scale)
        gain = live.matrix + beside.mT @ beside if live.sizes else live.matrix
        own = (center * scale)[:, None] * (matrix @ matrix.mT + spread.mT @ spread) * (center * scale)
        own = own + torch.diag(1 / (2 * multiplier))
        if live.sizes:
            across = (center * scale)[:, None] * (read.cross[:, index] + spread.mT @ beside)
            own = torch.cat([torch.cat([gain, across.mT], -1), torch.cat([across, own], -1)], -2)
        sizes = own.diagonal()[-len(multiplier) :].detach().sqrt()
        cov = replace(field.cov, sizes={**live.sizes, group.name: len(multiplier)}, matrix=own)
        layout = Layout(None, (), len(multiplier))
        self.field = field.joined(cov, group.name, layout, sizes, torch.ones_like(field.unit(field.units)))
        if place.every is not None and new.shared is not None:
            values = multiplier.new_zeros(new.count).index_copy(0, new.shared, multiplier)
            multiplier = values[place.every.to(multiplier.device)]
        self.multipliers[group.name] = multiplier

    def _assign_metric(self, group: Group, normal: Tensor) -> None:
        """``N W`` in the place of the group's rows."""
        for _, rows, node in self._terms(group):
            weight = self.weights.get(node.weight, self.given.weights[node.weight])
            if rows is None:
                mixing = normal
                new = normal @ self.given.weights[node.weight]
            else:
                mixing = self.normals.get(node.name, torch.eye(len(weight)).to(weight))
                new = weight.index_copy(0, rows, normal @ self.given.weights[node.weight][rows])
                part = torch.zeros_like(mixing[rows]).index_copy(1, rows, normal)
                mixing = mixing.index_copy(0, rows, part)
            self.weights[node.weight] = new
            self.normals[node.name] = mixing

    # -- output ------------------------------------------------------------------------------------------------------

    def _explicit(self, half: Tensor, layout: Layout, magnitude: Tensor, sheet: Sheet | None = None) -> Explicit:
        window = None
        if sheet is not None:
            every = torch.arange(math.prod(sheet.shape)).reshape(sheet.shape)
            window = sheet.crop(every).reshape(-1)
        return Explicit(
            self.weights, self.multipliers, self.given.bound, layout, lambda: (half, magnitude), self.watched, window
        )

    def _given_output_of(self, value: str) -> Explicit:
        image = self.torus.image(value)
        half, unit = self._half(self.field[image], self.field.sizes[image]), self.field.units[image]
        size = (unit * self.field.sizes[image]).detach()
        return self._explicit(unit * half, self.field.layouts[image], size, self.torus.sheets.get(image))

    def _image_head(self) -> Explicit:
        """The output is a convolution of an image: its channels are normalised."""
        (group,) = self.plan.heads
        sheet = self.torus.sheets[self.torus.image(group.value)]
        parents = {n.name: self._ensured(self._parents(n.name)[0], sheet) for _, _, n in self._terms(group)}
        cells = self.field.cells
        maps: dict[str, Map] = {}
        for term, _, node in self._terms(group):
            parent = parents[node.name]
            inner = self.torus.sheets[parent]
            (one,) = self.torus.operators[node.name].maps(self._tensors, [inner], sheet, cells, self.given.bound)
            one = one if term.scale == 1 else _times(one, term.scale)
            maps[parent] = one if parent not in maps else _sum(maps[parent], one)
        read, size, unit = self.field.read(maps)
        layout = Layout.of(sheet.shape, cells)
        channels = math.prod(sheet.lead)
        parts = layout.features // channels
        least = smallest(self.unit) ** 0.75
        bound = dominate(read.spread, size, torch.ones_like(size), self.blueprint.power, self.unit, least)
        bound = bound.reshape(channels, parts).amax(1)
        scale = (bound.mean() + smallest(self.unit)).sqrt().detach()
        _, _, normal = self._normaliser(group, torch.diag(bound.sqrt()), scale, head=True)
        for _, _, node in self._terms(group):
            weight = self.given.weights[node.weight]
            flat = weight.transpose(0, 1) if cast(Ring, self.torus.operators[node.name].ring).transposed else weight
            new = torch.einsum("ab,b...->a...", normal / unit, flat)
            self.weights[node.weight] = new.transpose(0, 1) if flat is not weight else new
        wide = torch.kron(normal.contiguous(), torch.eye(parts).to(normal))
        half = wide.to(read.spread.dtype) @ self._half(read.spread, size)
        return self._explicit(half, layout, (wide.abs() @ size).detach(), sheet)

    def _ensured(self, value: str, behind: Sheet) -> str:
        """Make an image that only the head reads, on a grid that suits what is behind it."""
        image = self.torus.image(value)
        grid = meet(meet(self.field.cells, self.torus.sheets[image].sides), behind.sides)
        assert grid is not None
        self.field = self.field.coarsen(grid)
        if image not in self.field.cov.sizes:
            for p in self._parents(image):
                self._ensured(p, self.torus.sheets[image])
            self._move(Step(transport=image), [*self.field.cov.sizes, image])
        return image

    def _vector_heads(self) -> Explicit:
        groups, head, before = self.plan.heads, self.blueprint.head, self.field
        normals = {}
        for k, group in enumerate(groups):
            followed = self.blueprint.normaliser(group) is not head
            read, matrix, contracted, normal = self._contract(group, head=not followed)
            self._assign_metric(group, normal)
            normals[group.name] = normal
            if contracted is not None and k + 1 < len(groups):
                spread = contracted.root.dense() @ read.cross
                cov = replace(self.field.cov, matrix=self.field.cov.matrix + spread.mT @ spread)
                self.field = replace(self.field, cov=cov)
        if len(groups) > 1:
            self.field, parts = before, {g.name: self._raw_sum(g) for g in groups}
            order = torch.cat([torch.tensor(g.rows) for g in groups]).argsort()

            def function(values: Values) -> Tensor:
                return torch.cat([parts[n](values) @ normals[n].mT for n in parts], -1)[..., order]

            read, size, unit = self._through([n for g in groups for n in self._sources(g)], function)
            matrix = unit * self._half(read.spread, size)
        magnitude = torch.cat([self._weight_sizes(g) for g in groups])
        if len(groups) > 1:
            magnitude = magnitude[order]
        return self._explicit(matrix, Layout(None, (), len(matrix)), magnitude)

    def _weight_sizes(self, group: Group) -> Tensor:
        """``Σ_j |B_ij| s_j``."""
        total: Any = 0.0
        for term, rows, node in self._terms(group):
            weight = self.weights[node.weight].detach()
            columns = weight.split([self.graph[m].features for m in term.members], -1)
            y: Any = 0.0
            for m, w in zip(term.members, columns, strict=True):
                image = self.torus.image(m)
                size = self.left_sizes.get(image)
                size = self.field.units[m] * self.field.sizes[m] if size is None else size
                y = y + (w.abs() * size).sum(-1)
            total = total + abs(term.scale) * (y if rows is None else y[rows])
        return total  # type: ignore[no-any-return]


def check_heads(plan: Plan, torus: Torus) -> None:
    """Refuse what cannot be normalised on a torus.

    Raises:
        GraphError: With the reason.
    """
    for group in plan.all_groups:
        for term in group.terms:
            if torus.image(group.value) not in torus.sheets:
                if isinstance(torus.graph[term.affine], Convolution):
                    raise GraphError(f"'{term.affine}' is a convolution of what is no image any more")
                if any(m in torus.sheets for m in term.members):
                    raise GraphError(f"'{term.affine}' reads an image that is not flattened")
            elif len(plan.heads) > 1 or term.rows is not None or not _mixes(torus, term.affine):
                raise GraphError(f"the image '{group.value}' is put together from several convolutions")
    if not plan.output.free and plan.output.value in torus.flat:
        raise GraphError("the output is a flattened image")


def _mixes(torus: Torus, affine: str) -> bool:
    """Whether the output channels of a map may be mixed."""
    found = torus.operators.get(affine)
    return found is not None and found.ring is not None and found.ring.groups == 1


def _raw(affine: str) -> str:
    return f"(raw) {affine}"


def _affine(graph: Graph, name: str) -> Affine:
    node = graph[name]
    assert isinstance(node, Affine)
    return node


def _sum(first: Map, second: Map) -> Map:
    return Map(lambda x: first.on(x) + second.on(x), lambda s: torch.hypot(first.sizes(s), second.sizes(s)))


def _times(one: Map, scale: float) -> Map:
    return Map(lambda x: scale * one.on(x), lambda s: abs(scale) * one.sizes(s))


@torch.no_grad()
def _magnitude(function: Linear, sizes: Mapping[str, Tensor]) -> Tensor:
    """``(Σ_j |J_ij|² s_j²)^{1/2}`` of a linear function of live vectors."""
    total: Any = 0.0
    for name, size in sizes.items():
        batch = {n: (size.diag() if n == name else size.new_zeros(len(size), len(s))) for n, s in sizes.items()}
        total = total + function(batch.__getitem__).reshape(len(size), -1).square().sum(0)
    return total.sqrt()  # type: ignore[no-any-return]
