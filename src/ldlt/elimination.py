r"""The rule: block ``LDL'`` of the Lipschitz matrix inequality, one node at a time, on generators.

With slopes in ``[c − r, c + r]`` (per neuron), multipliers :math:`\Lambda \succ 0` and ``ρ = c/r``, a network is
ℓ-Lipschitz if

.. math:: \ell^2\|x\|^2 + \sum_i 2\bigl(\|w_i - c_i v_i\|^2_{\Lambda_i} - r_i^2\|v_i\|^2_{\Lambda_i}\bigr) - \|y\|^2
\succeq 0 .

Read the form without ``y`` as the precision matrix of a Gaussian. Eliminating the nodes in topological order asks
only for the joint covariance of the tensors that are still live, and each tensor carries it as a generator
(``ldlt.generator``). There are three moves, and every network of this library is made of them:

* **free map into an activation** (:meth:`Elimination.hidden`): :math:`C = \tfrac{1}{\sqrt2} r^{-1}\Lambda^{-1/2} U
  F^{-1}` with ``F`` the factor of the stacked parents and ``‖U‖ < 1``;
* **given map into an activation** (:meth:`Elimination.given`): the map stays, the multiplier is bounded so that ``‖U‖
  < 1`` for :math:`U = \sqrt2\, r \Lambda^{1/2} F_v`;
* **output** (:meth:`Elimination.output`): :math:`B = U F^{-1}` with ``‖U‖ ≤ 1``.

After each of the first two, every live tensor is inflated by fresh noise, :math:`F_t \leftarrow [F_t\;\;
(KUQF_t^*)^*]`, and the new tensor :math:`w = cCw_K + e`, :math:`\operatorname{cov}(e) = (2\Lambda)^{-1}` joins.
For free maps nothing is subtracted or inverted; a given map needs a
factor of ``I − UU^*``, which its multiplier keeps well conditioned.

With one multiplier per channel everything here commutes with the shifts of a grid of cells, and the same moves run
frequency by frequency: matrices have a leading dimension ``f``, "neurons" and "features" are those of a cell. The grid
of a sweep only gets coarser (:meth:`Elimination.coarsen`), in the end a single cell: the dense representation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ldlt.contraction import AdjointRoot, Contracted, IdentityRoot, given
from ldlt.generator import Frame, Generator, Square, noise_frame, squared
from ldlt.generator import factor as factor_stack
from ldlt.grid import Cells, Fold, Layout
from ldlt.scalars import floor_share
from ldlt.triangular import Triangular, gram_cholesky

__all__ = ["Elimination", "Slopes"]


@dataclass
class Slopes:
    """Centre and radius of the slopes of the neurons of one group.

    Attributes:
        center: ``c``, a number or one per neuron (n,).
        radius: ``r > 0``, likewise.
        shared: For every neuron (n,) the number of its multiplier, where several must have the same one (because a
            joint nonlinearity mixes them, or because they are the pixels of one channel); None if each has its own.
        count: Number of multipliers where they are shared.
    """

    center: float | Tensor
    radius: float | Tensor
    shared: Tensor | None = None
    count: int = 0

    @property
    def rho(self) -> float | Tensor:
        """``ρ = c/r``."""
        return self.center / self.radius


class Elimination:
    """The live generators of a sweep, and the moves that change them.

    Args:
        shape: Feature shape of the input.
        bound: ℓ, a positive scalar tensor; its dtype and device are those of the sweep.
        name: Name of the input value.
        unit: Rounding unit of the stored parameters, which all safeguards are measured in.
        cells: The grid at the start; None for the dense representation.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        bound: Tensor,
        unit: float,
        cells: Cells = None,
    ) -> None:
        self.unit, self.cells = unit, cells
        self.sizes: dict[int, int] = {}
        self.noise: dict[int, tuple[int, ...]] = {}  # phases of the noise blocks, where there is a grid
        self.live: dict[str, Generator] = {}
        self.least = bound.detach() ** -2  # variance of an input feature: what "small" is measured against
        layout = Layout.of(shape, cells)
        n = int(torch.Size(shape).numel()) if layout is None else layout.features
        block = self._new_block(n, layout)
        scale = (1 / bound).expand(n)  # cov(x) = I/ℓ²
        root = IdentityRoot(n, bound, None if layout is None else layout.frequencies)
        self.live[name] = Generator(shape, {block: Square(root, scale)}, self.sizes, scale.detach(), layout)

    def _new_block(self, size: int, layout: Layout | None = None) -> int:
        block = len(self.sizes)
        self.sizes[block] = size
        if self.cells is not None:
            self.noise[block] = (1,) * len(self.cells) if layout is None else layout.parts
        return block

    def coarsen(self, cells: Cells, alone: bool = True) -> None:
        """Write all live tensors on a coarser grid.

        Args:
            cells: The coarser grid.
            alone: Whether no tensor but the live ones is used later. A single one may then get noise of its own.
        """
        if cells == self.cells:
            return
        assert self.cells is not None
        if alone and len(self.live) == 1:
            self._square()
        fold = Fold(self.cells, cells)
        sizes = {b: q * fold.factor for b, q in self.sizes.items()}
        self.live = {n: g.coarse(fold, self.noise, sizes) for n, g in self.live.items()}
        self.noise = {
            b: tuple(p * s for p, s in zip(parts, fold.ratio, strict=True)) for b, parts in self.noise.items()
        }
        self.sizes, self.cells = sizes, cells

    def _square(self) -> None:
        """Give the only live tensor a noise basis of its own, in which later factorisations are for nothing."""
        ((name, gen),) = self.live.items()
        if len(gen.blocks) > 1 or not all(isinstance(v, Square) for v in gen.blocks.values()):
            self.live[name] = squared(gen, self._new_block(gen.features, gen.layout), self.unit)

    def keep(self, names: Sequence[str]) -> None:
        """Forget the generators of all other values."""
        self.live = {n: self.live[n] for n in names if n in self.live}

    # -- factoring ---------------------------------------------------------------------------------------------------

    def factor(self, members: Sequence[str], survivors: Sequence[str]) -> Frame:
        """The square factor of stacked members.

        Args:
            members: Values in the stack.
            survivors: Values that are read after the move.
        """
        others = [s for s in survivors if s in self.live and s not in members]
        stack = [self.live[m].rows(None) for m in members]
        frame, parts, old = factor_stack(stack, [self.live[s] for s in others], self._new_block, self.unit)
        for place, part in parts.items():  # one smaller noise block instead of the old ones
            (new,) = frame.pieces[-1].blocks
            name = [*members, *others][place]
            gen = self.live[name]
            kept = {b: v for b, v in gen.blocks.items() if b not in old}
            self.live[name] = Generator(gen.shape, kept, self.sizes, gen.size, gen.layout)
            self.live[name].put(new, part)
            if place < len(members):
                frame.members[place] = self.live[name].rows(None)
        return frame

    # -- moves -------------------------------------------------------------------------------------------------------

    def hidden(
        self,
        name: str,
        frame: Frame,
        contracted: Contracted,
        slopes: Slopes,
        multiplier: Tensor,
        survivors: Sequence[str],
        lazy: bool = False,
        layout: Layout | None = None,
    ) -> list[Tensor]:
        r"""Eliminate an activation whose input is a free map.

        Args:
            name: Name of the new value.
            frame: Factor ``F`` of the stacked parents.
            contracted: ``(U, K)``, U (n, frame.width).
            slopes: Of the n neurons.
            multiplier: ``Λ`` (n,).
            survivors: Values that are read after this move.
            lazy: Whether a map may be returned in factored form.
            layout: How the n neurons lie on the grid.

        Returns:
            The explicit maps ``C``, (n, d_member) for each member of the frame.
        """
        scale = 1 / (math.sqrt(2) * slopes.radius * multiplier.sqrt())
        maps = frame.apart(contracted, scale) if lazy else None
        maps = frame.right_divide(contracted.matrix, scale) if maps is None else maps
        self._append(name, frame, contracted, slopes, multiplier, survivors, layout)
        return maps

    def given(
        self,
        name: str,
        value: Generator,
        slopes: Slopes,
        balance: Tensor,
        margin: Tensor,
        survivors: Sequence[str],
        layout: Layout | None = None,
    ) -> Tensor:
        r"""Eliminate an activation whose input ``v`` is a given linear function of live tensors.

        With :math:`T = 2 r F_v F_v^* r` every :math:`\Lambda_{ii} = θ / \sum_j |T_{ij}| q_j / q_i`, ``θ < 1``, ``q >
        0`` is valid: by Gershgorin's theorem ``ΛT`` then has all eigenvalues in ``[0, θ]``. Making a ``Λ`` smaller
        keeps it valid, so neurons with a common multiplier take the smallest of theirs, over all frequencies.

        Args:
            name: Name of the new value.
            value: Generator of ``v``, features flattened (n,).
            slopes: Of the n neurons.
            balance: ``q`` (n,).
            margin: ``θ``, a scalar in (0, 1).
            survivors: Values that are read after this move.
            layout: How the n neurons lie on the grid.

        Returns:
            The multiplier ``Λ`` (n,).
        """
        frame = noise_frame(value)
        radius = slopes.radius if isinstance(slopes.radius, Tensor) else balance.new_tensor(slopes.radius)
        rows = frame.noise_rows(value) * (radius.reshape(-1, 1) if radius.ndim else radius)  # r F_v, (n, q)
        gram = 2 * (rows @ rows.mH)
        # A small number in the divisor only makes Λ smaller, which is safe; it serves rows that are (nearly) zero.
        sums = (gram.abs() * balance).sum(-1) / balance
        sums = sums if sums.ndim == 1 else sums.amax(0)
        sums = sums + floor_share(self.unit) ** 2 * (sums.max().detach() + 2 * self.least * radius.detach() ** 2)
        multiplier = margin / sums
        if slopes.shared is not None:
            least = multiplier.new_full((slopes.count,), torch.inf)
            least = least.scatter_reduce(0, slopes.shared, multiplier, "amin")
            multiplier = least[slopes.shared]
        contracted = given(math.sqrt(2) * multiplier.sqrt()[:, None] * rows)
        self._append(name, frame, contracted, slopes, multiplier, survivors, layout)
        return multiplier

    def output(self, frame: Frame, matrix: Tensor) -> list[Tensor]:
        """Explicit output maps ``B = U F^{-1}`` for ``U`` (k, frame.width), one (k, d_member) per member."""
        return frame.right_divide(matrix)

    # -- the shared part ---------------------------------------------------------------------------------------------

    def _append(
        self,
        name: str,
        frame: Frame,
        contracted: Contracted,
        slopes: Slopes,
        multiplier: Tensor,
        survivors: Sequence[str],
        layout: Layout | None,
    ) -> None:
        """Inflate what stays live and add the new value."""
        n = multiplier.shape[-1]
        noise = self._new_block(n, layout)
        inflated = False
        kept: dict[str, Generator] = {}
        for s in survivors:
            if s not in self.live:
                continue
            gen = self.live[s].copy()
            kept[s] = gen
            seen = frame.coordinates(gen)
            if seen is not None:
                gen.put(noise, contracted.spread(seen))  # K U Q F_t^*
                inflated = True
        self.live = kept
        self.live[name] = self._new_value(frame, contracted, slopes, multiplier, noise, layout, alone=not inflated)

    def _new_value(
        self,
        frame: Frame,
        contracted: Contracted,
        slopes: Slopes,
        multiplier: Tensor,
        noise: int,
        layout: Layout | None,
        alone: bool,
    ) -> Generator:
        r"""Generator of ``w = c C w_K + e``.

        Its covariance is :math:`\tfrac12 \Lambda^{-1/2}(ρK^*Kρ + 1 − ρ^2)\Lambda^{-1/2}`, and its share of the
        inflation noise is :math:`\tfrac{1}{\sqrt2}\Lambda^{-1/2} ρ K^*`.
        """
        n = multiplier.shape[-1]
        unit = 1 / (math.sqrt(2) * multiplier.sqrt())
        rho = slopes.rho
        number = None if isinstance(rho, Tensor) else float(rho)
        blocks: dict[int, Tensor | Square] = {}
        if number is not None and abs(number) == 1:
            blocks[noise] = Square(contracted.root, number * unit)
        elif number == 0:
            root = IdentityRoot(n, multiplier, None if layout is None else layout.frequencies)
            blocks[self._new_block(n, layout)] = Square(root, unit)
        elif alone:
            blocks[noise] = Square(AdjointRoot(self._root(contracted, rho, multiplier)), unit)
        elif number is not None and abs(number) < 1:
            blocks[noise] = contracted.root.dense() * (number * unit / contracted.root.factor)
            blocks[self._new_block(n, layout)] = _diagonal(math.sqrt(1 - number**2) * unit, layout)
        else:
            known, floor = frame.noise(contracted.matrix)
            blocks.update({b: x * (rho * unit) for b, x in known.items()})
            for x in floor:
                blocks[self._new_block(x.shape[-2])] = x * (rho * unit)
            blocks[noise] = contracted.spread(contracted.matrix.mH) * (rho * unit)
            blocks[self._new_block(n, layout)] = _diagonal(unit, layout)
        return Generator((n,), blocks, self.sizes, unit.detach(), layout)

    def _root(self, contracted: Contracted, rho: float | Tensor, multiplier: Tensor) -> Triangular:
        """``N`` lower triangular with ``NN^* = ρK^*Kρ + 1 − ρ²``: a sum of positive terms in both cases."""
        if not isinstance(rho, Tensor) and abs(rho) < 1:
            root = (rho / contracted.root.factor) * contracted.root.dense().mH
            return gram_cholesky(root, multiplier.new_tensor(1 - rho**2), self.unit).factor
        # K^*K − I = U U^* + U (KU)^* (KU) U^*
        u = contracted.matrix
        both = torch.cat([u, contracted.spread(u.mH).mH], -1)
        both = rho[:, None] * both if isinstance(rho, Tensor) else rho * both
        return gram_cholesky(both, multiplier.new_ones(()), self.unit).factor


def _diagonal(values: Tensor, layout: Layout | None) -> Tensor:
    """A diagonal matrix, the same at all frequencies."""
    found = torch.diag_embed(values)
    return found if layout is None else found.to(found.dtype.to_complex()).expand(layout.frequencies, -1, -1)
