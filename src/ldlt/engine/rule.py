r"""The rule: block ``LDL'`` of the Lipschitz matrix inequality, one node at a time, on generators.

With slopes in ``[c − r, c + r]`` (per neuron), multipliers :math:`\Lambda \succ 0` and ``ρ = c/r``, a network is
ℓ-Lipschitz if

.. math:: \ell^2\|x\|^2 + \sum_i 2\bigl(\|w_i - c_i v_i\|^2_{\Lambda_i} - r_i^2\|v_i\|^2_{\Lambda_i}\bigr) - \|y\|^2
\succeq 0 .

Read without ``y`` it is the precision matrix of a Gaussian, of which the live tensors carry generators. Three moves:

* **transport** (:func:`transport`): a linear operation acts on generators, :math:`F_{Jt} = J F_t`;
* **eliminate**: a free map into an activation (:meth:`Live.free`) is
  :math:`C = \tfrac{1}{\sqrt2} r^{-1}\Lambda^{-1/2} U F^{-1}` with ``F`` the factor of the stacked parents and
  ``‖U‖ < 1``; a given one (:meth:`Live.given`) stays, and the multiplier is bounded so that ``‖U‖ < 1`` for
  :math:`U = \sqrt2\, r \Lambda^{1/2} F_v`. Every live tensor is then inflated by fresh noise,
  :math:`F_t \leftarrow [F_t\;\; (KUQF_t^*)^*]`, and :math:`w = cCw_K + e`,
  :math:`\operatorname{cov}(e) = (2\Lambda)^{-1}`, joins;
* **output**: :math:`B = U F^{-1}` with ``‖U‖ ≤ 1``. A head that others follow inflates what they read.

With one multiplier per channel all of this commutes with the shifts of a grid of cells and runs frequency by frequency;
"neurons" and "features" are then those of a cell. The grid only gets coarser, in the end a single cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch
from torch import Tensor

from ldlt.engine.contraction import Contracted, Square, gap, given
from ldlt.engine.factor import Block, Frame, Generator, column_norms, covariance, dense, factor, squared
from ldlt.engine.linalg import floor_share, gram_cholesky
from ldlt.images.grids import Cells, Fold, Layout, from_cells, kernel, to_cells, transfer


@dataclass(frozen=True)
class Run:
    """An operation that is run: its noise is a batch of inputs, on a grid one of responses to impulses of noise."""

    function: Callable[..., Tensor]  # from batches of the parents to one batch
    shapes: Sequence[tuple[int, ...]]  # of the parents
    cells: Cells
    moves: bool  # whether features are only moved, dropped or repeated

    def on(self, values: Sequence[Block | None]) -> Block:
        """The block of the result from those of the parents, None for zero."""
        known = [None if v is None else dense(v) for v in values]
        like = next(v for v in known if v is not None)
        batches = []
        for value, shape in zip(known, self.shapes, strict=True):
            if value is None:
                batches.append(like.real.new_zeros(like.shape[-2], *shape))
            elif self.cells is None:
                batches.append(value.reshape(-1, *shape))
            else:  # F^T, since F^* is the transfer function from the tensor to the noise
                batches.append(from_cells(kernel(value.conj(), self.cells), shape))
        y = self.function(*batches)
        return _rows(y) if self.cells is None else transfer(to_cells(y, self.cells), self.cells).conj()

    @torch.no_grad()
    def sizes(self, sizes: Sequence[Tensor]) -> Tensor:
        """Magnitudes of the result: by the matrices of the operation, unless it only moves features."""
        grid = self.cells or ()
        if self.moves:
            each = [s.reshape(1, -1, *(1,) * len(grid)).expand(1, -1, *grid) for s in sizes]
            y = self.function(*(self._image(x, n) for x, n in zip(each, self.shapes, strict=True)))
            return y.reshape(-1) if self.cells is None else to_cells(y, grid).reshape(-1, math.prod(grid))[:, 0]
        found = []
        for place, size in enumerate(sizes):
            unit = size.diag().reshape(len(size), -1, *(1,) * len(grid))
            unit = torch.nn.functional.pad(unit, [n for g in reversed(grid) for n in (0, g - 1)])
            images = [unit.new_zeros(len(size), *n) for n in self.shapes]
            images[place] = self._image(unit, self.shapes[place])
            y = self.function(*images)
            y = _rows(y) if self.cells is None else to_cells(y, grid).flatten(2).transpose(1, 2).flatten(0, 1)
            found.append(column_norms(y))
        return torch.linalg.vector_norm(torch.stack(found), dim=0)

    def _image(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        return x.reshape(-1, *shape) if self.cells is None else from_cells(x, shape)


def _rows(y: Tensor) -> Tensor:
    """(batch, features), also of a batch of single numbers."""
    return y.reshape(len(y), 1) if y.ndim == 1 else y.flatten(1)


@dataclass(frozen=True)
class Maps:
    """``Σ_p T_p t_p``, ``T_p`` a number, a matrix (m_out, m_p) or a transfer function (f, m_out, m_p)."""

    maps: Sequence[float | Tensor]

    def on(self, values: Sequence[Block | None]) -> Block:
        """As in :class:`Run`."""
        terms: list[Block] = []
        for moved, value in zip(self.maps, values, strict=True):
            if value is not None and isinstance(moved, Tensor):
                terms.append(dense(value) @ moved.mH)
            elif value is not None:
                terms.append(value if moved == 1 else moved * dense(value))
        return terms[0] if len(terms) == 1 else reduce(torch.add, map(dense, terms))

    def sizes(self, sizes: Sequence[Tensor]) -> Tensor:
        """As in :class:`Run`."""
        found = []
        for moved, size in zip(self.maps, sizes, strict=True):
            if isinstance(moved, Tensor):
                matrix = moved.detach() if moved.ndim == 2 else moved.detach().abs().amax(0)
                found.append(column_norms((matrix * size).mT))
            else:
                found.append(abs(moved) * size)
        return found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found), dim=0)


def transport(move: Run | Maps, parents: Sequence[Generator], layout: Layout) -> Generator:
    """``F_{Jt} = J F_t``, block by block."""
    names = dict.fromkeys(b for p in parents for b in p.blocks)
    blocks = {b: move.on([p.blocks.get(b) for p in parents]) for b in names}
    return Generator(blocks, move.sizes([p.size for p in parents]), layout)


@dataclass(frozen=True)
class Neurons:
    """An activation that is to be eliminated, or the part of it that one group is."""

    name: str  # of the new value
    layout: Layout  # how the n neurons lie on the grid
    survivors: Sequence[str]  # values that are read afterwards
    center: float | Tensor  # c of the slopes, a number or one per neuron (n,)
    radius: float | Tensor  # r > 0, likewise
    shared: Tensor | None = None  # for every neuron (n,) the number of its multiplier (None: each has its own)
    count: int = 0  # multipliers where they are shared

    @property
    def rho(self) -> float | Tensor:
        """``ρ = c/r``."""
        return self.center / self.radius


class Live:
    """The live generators of a sweep.

    Args:
        name: Name of the input value.
        layout: How its features lie on the first grid.
        bound: ℓ, a positive scalar tensor; its dtype and device are those of the sweep.
        unit: Rounding unit of the stored parameters, which all safeguards are measured in.
    """

    def __init__(self, name: str, layout: Layout, bound: Tensor, unit: float) -> None:
        self.unit, self.cells = unit, layout.cells
        self.noise: dict[int, tuple[int, ...]] = {}  # phases of the noise blocks, where there is a grid
        self.soft: dict[int, Tensor] = {}  # soft projections of the blocks that noise was compressed to
        self.least = bound.detach() ** -2  # variance of an input feature: what "small" is measured against
        scale = (1 / bound).expand(layout.features)  # cov(x) = I/ℓ²
        block = self.new_block(layout)
        self.live = {name: Generator({block: Square.diagonal(layout, scale)}, scale.detach(), layout)}

    def __getitem__(self, name: str) -> Generator:
        return self.live[name]

    def __setitem__(self, name: str, gen: Generator) -> None:
        self.live[name] = gen

    def new_block(self, layout: Layout | None = None) -> int:
        """A name for a block of noise, as many channels as there are features."""
        block = len(self.noise)
        self.noise[block] = (1,) * len(self.cells or ()) if layout is None else layout.parts
        return block

    def keep(self, names: Sequence[str]) -> None:
        """Forget the generators of all other values."""
        self.live = {n: self.live[n] for n in names if n in self.live}
        seen = {b for g in self.live.values() for b in g.blocks}
        self.soft = {b: p for b, p in self.soft.items() if b in seen}

    def coarsen(self, cells: Cells, alone: bool = True) -> None:
        """Write all live tensors on a coarser grid.

        Args:
            cells: The coarser grid.
            alone: Whether no tensor but the live ones is used later. A single one may then get noise of its own, in
                which later factorisations are for nothing.
        """
        if cells == self.cells:
            return
        assert self.cells is not None
        if alone and len(self.live) == 1:
            ((name, gen),) = self.live.items()
            if len(gen.blocks) > 1 or not all(isinstance(v, Square) for v in gen.blocks.values()):
                self.live[name] = squared(gen, self.new_block(gen.layout), self.soft, self.unit)
        fold = Fold(self.cells, cells)
        self.live = {n: g.coarse(fold, self.noise) for n, g in self.live.items()}
        self.soft = {b: fold.both(p, self.noise[b], self.noise[b]) for b, p in self.soft.items()}
        self.noise = {b: tuple(p * s for p, s in zip(n, fold.ratio, strict=True)) for b, n in self.noise.items()}
        self.cells = cells

    def leave_grid(
        self, name: str, function: Callable[..., Tensor], parents: Mapping[str, tuple[int, ...]], kept: Sequence[str]
    ) -> None:
        """Make a vector from images, given with their shapes, before those that are kept become dense.

        The rows of the function are found as gradients, one per feature of the result, and multiplied by the generators
        in the Fourier domain: the images themselves are never written densely.
        """
        assert self.cells is not None
        gens, fold = [self.live[p] for p in parents], Fold(self.cells, None)
        with torch.enable_grad():
            count = function(*(self.least.new_zeros(1, *s) for s in parents.values())).numel()
            images = [self.least.new_zeros(count, *s).requires_grad_() for s in parents.values()]
            y = function(*images).reshape(count, count)
            rows = torch.autograd.grad(y.diagonal().sum(), images, materialize_grads=True)
        blocks: dict[int, Block] = {}
        size = self.least.new_zeros(count)
        for gen, found in zip(gens, rows, strict=True):
            matrix, parts = found.reshape(count, -1), gen.layout.parts
            size = torch.hypot(size, column_norms((matrix * fold.vector(gen.size, parts)).mT))
            wide = fold.unfold(matrix, parts)  # (f, count, m)
            for b in gen.blocks:
                new = fold.columns(wide @ gen.flat(b).mH, self.noise[b]).mH
                blocks[b] = dense(blocks[b]) + new if b in blocks else new
        self.keep(kept)
        self.coarsen(None, alone=False)  # the new vector shares its noise with what stays
        self.live[name] = Generator(blocks, size, Layout(None, (), count))

    def factor(self, members: Sequence[str], survivors: Sequence[str]) -> Frame:
        """The square factor of stacked members; ``survivors`` are read after the move."""
        names = [*members, *(s for s in survivors if s in self.live and s not in members)]
        gens = [self.live[n] for n in names]
        frame, changed = factor(gens[: len(members)], gens[len(members) :], self.new_block, self.soft, self.unit)
        self.live.update((names[place], gen) for place, gen in changed.items())
        return frame

    def free(
        self, new: Neurons, frame: Frame, contracted: Contracted, multiplier: Tensor, lazy: bool = False
    ) -> list[Tensor]:
        r"""Eliminate an activation whose input is a free map.

        Args:
            new: Its neurons.
            frame: Factor ``F`` of the stacked parents.
            contracted: ``(U, K)``, U (n, width of the frame).
            multiplier: ``Λ`` (n,).
            lazy: Whether a map may be returned in factored form.

        Returns:
            The explicit maps ``C``, (n, d_member) for each member of the frame.
        """
        width = (2 * multiplier).rsqrt()
        scale = width / new.radius
        apart = frame.apart(contracted, scale) if lazy else None
        maps = [scale[:, None] * m for m in frame.right_divide(contracted.matrix)] if apart is None else apart
        value = partial(transport, Maps(maps), frame.members, new.layout)
        self._append(new, contracted, width, partial(_spread, frame, contracted), value)
        return maps

    def given(self, new: Neurons, value: Generator, balance: Tensor, margin: Tensor) -> Tensor:
        r"""Eliminate an activation whose input ``v`` is a given linear function of live tensors.

        With :math:`T = 2 r F_v F_v^* r` every :math:`\Lambda_{ii} = θ / \sum_j |T_{ij}| q_j / q_i`, ``θ < 1``, ``q >
        0`` is valid: by Gershgorin's theorem ``ΛT`` then has all eigenvalues in ``[0, θ]``. Making a ``Λ`` smaller
        keeps it valid, so neurons with a common multiplier take the smallest of theirs, over all frequencies.

        Args:
            new: The neurons.
            value: Generator of ``v`` (n,).
            balance: ``q`` (n,).
            margin: ``θ``, a scalar in (0, 1).

        Returns:
            The multiplier ``Λ`` (n,).
        """
        radius = torch.as_tensor(new.radius, dtype=balance.dtype, device=balance.device)
        rows = value.matrix() * radius.reshape(-1, 1)  # r F_v
        size = rows.detach().abs().amax().clamp(min=1.0)  # the squares of large ones would overflow
        small = rows / size
        gram = 2 * (small @ small.mH)
        # A small number in the divisor only makes Λ smaller, which is safe; it serves rows that are (nearly) zero.
        sums = (gram.abs() * balance).sum(-1) / balance
        sums = sums if sums.ndim == 1 else sums.amax(0)
        sums = sums + floor_share(self.unit) ** 2 * (
            sums.max().detach() + 2 * self.least * (radius.detach() / size) ** 2
        )
        width = size * sums.sqrt() / (2 * margin).sqrt()  # gradients of Λ itself would overflow long before these
        if new.shared is not None:
            width = width.new_zeros(new.count).scatter_reduce(0, new.shared, width, "amax")[new.shared]
        matrix = rows / width[:, None]
        lower = gap(matrix)

        def inflate(gen: Generator) -> Tensor | None:  # K U F_t^* = L^{-1} √2 Λ^{1/2} r cov(v, t)
            seen = covariance(value, gen)
            scaled = None if seen is None else (radius / width)[:, None] * seen
            return None if scaled is None else torch.linalg.solve_triangular(lower, scaled, upper=False)

        self._append(new, given(matrix, lower), width, inflate, lambda: value)
        return 0.5 / width.square()

    def observe(self, frame: Frame, contracted: Contracted, survivors: Sequence[str]) -> None:
        """Inflate what later heads read by an output ``y = U F^{-1} w_K``: ``G ← (G^{-1} − B'B)^{-1}``."""
        self._inflate(self.new_block(), partial(_spread, frame, contracted), survivors)

    def _inflate(self, noise: int, inflate: Callable[[Generator], Tensor | None], survivors: Sequence[str]) -> bool:
        """Add noise to all that stays live; whether there is anything that gets some."""
        self.keep(survivors)
        found = {name: new for name, gen in self.live.items() if (new := inflate(gen)) is not None}
        for name, new in found.items():
            self.live[name] = replace(self.live[name], blocks={**self.live[name].blocks, noise: new})
        return bool(found)

    def _append(
        self,
        new: Neurons,
        contracted: Contracted,
        width: Tensor,
        inflate: Callable[[Generator], Tensor | None],
        value: Callable[[], Generator],
    ) -> None:
        r"""Inflate what stays live and add ``w = c v + e`` with ``cov(e) = (2Λ)^{-1}``, the square of ``width``.

        Its covariance is :math:`\tfrac12 \Lambda^{-1/2}(ρK^*Kρ + 1 − ρ^2)\Lambda^{-1/2}`, and its share of the
        inflation noise is :math:`\tfrac{1}{\sqrt2}\Lambda^{-1/2} ρ K^*`; both at once are a square block where
        ``|ρ| = 1``, or where nothing else sees the noise.
        """
        layout, rho = new.layout, new.rho
        noise = self.new_block(layout)
        alone = not self._inflate(noise, inflate, new.survivors)
        number = math.inf if isinstance(rho, Tensor) else float(rho)
        blocks: dict[int, Block]
        if abs(number) == 1:
            blocks = {noise: contracted.root.times(number * width)}
        elif number == 0:
            blocks = {self.new_block(layout): Square.diagonal(layout, width)}
        elif alone:
            blocks = {noise: self._root(contracted, rho).times(width)}
        elif abs(number) < 1:
            own = layout.diagonal(math.sqrt(1 - number**2) * width)
            blocks = {noise: contracted.root.times(number * width).dense(), self.new_block(layout): own}
        else:
            before = value()
            after = inflate(before)
            assert after is not None
            blocks = {b: before.flat(b) * new.center for b in before.blocks}
            blocks |= {noise: after * new.center, self.new_block(layout): layout.diagonal(width)}
        self.live[new.name] = Generator(blocks, width.detach(), layout)

    def _root(self, contracted: Contracted, rho: float | Tensor) -> Square:
        """``N^*`` with ``NN^* = ρK^*Kρ + 1 − ρ²``: a sum of positive terms in both cases."""
        if not isinstance(rho, Tensor) and abs(rho) < 1:
            both, rest = rho * contracted.root.dense().mH, 1 - rho**2
        else:  # K^*K − I = U U^* + U (KU)^* (KU) U^*
            u, rest = contracted.matrix, 1.0
            both = torch.cat([u, contracted.spread(u.mH).mH], -1)
            both = rho[:, None] * both if isinstance(rho, Tensor) else rho * both
        lower = gram_cholesky(both, both.real.new_tensor(rest), self.unit).factor
        return Square(1.0, lambda: lower.dense().mH, lambda x: lower.solve_adjoint(x.mH).mH, lower.solve)


def _spread(frame: Frame, contracted: Contracted, gen: Generator) -> Tensor | None:
    """``K U Q F_t^*``."""
    seen = frame.coordinates(gen)
    return None if seen is None else contracted.spread(seen)
