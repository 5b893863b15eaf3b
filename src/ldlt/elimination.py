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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ldlt.contraction import AdjointRoot, Contracted, IdentityRoot, given
from ldlt.generator import Frame, FrameChoice, Generator, Square, choose_frame, noise_frame
from ldlt.generator import factor as factor_stack
from ldlt.triangular import Triangular, gram_cholesky

__all__ = ["Elimination", "Slopes"]


@dataclass
class Slopes:
    """Centre and radius of the slopes of the neurons of one group.

    Attributes:
        center: ``c``, a number or one per neuron (n,).
        radius: ``r > 0``, likewise.
        group: Number of consecutive neurons that a joint nonlinearity mixes, or None.
    """

    center: float | Tensor
    radius: float | Tensor
    group: int | None = None

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
        choices: Structural decisions by move name; missing ones are made (and recorded) from the values at hand.
        unit: Rounding unit of the stored parameters, which all safeguards are measured in.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        bound: Tensor,
        choices: dict[str, FrameChoice | None],
        unit: float,
    ) -> None:
        self.unit = unit
        self.sizes: dict[int, int] = {}
        self.live: dict[str, Generator] = {}
        self.choices = choices
        n = int(torch.Size(shape).numel())
        block = self._new_block(n)
        scale = (1 / bound).expand(n)  # cov(x) = I/ℓ²
        self.live[name] = Generator(shape, {block: Square(IdentityRoot(n, bound), scale)}, self.sizes)

    def _new_block(self, size: int) -> int:
        block = len(self.sizes)
        self.sizes[block] = size
        return block

    def keep(self, names: Sequence[str]) -> None:
        """Forget the generators of all other values."""
        self.live = {n: self.live[n] for n in names if n in self.live}

    # -- factoring ---------------------------------------------------------------------------------------------------

    def factor(self, move: str, members: Sequence[str], survivors: Sequence[str]) -> Frame:
        """The square factor of stacked members for the move of that name.

        Args:
            move: Name under which the structural decision is kept.
            members: Values in the stack.
            survivors: Values that are read after the move.
        """
        stack = [self.live[m].rows(None) for m in members]
        others = [self.live[s] for s in survivors if s in self.live]
        if self.choices.get(move) is None:  # None may also mean that an activation had other slopes then
            with torch.no_grad():
                self.choices[move] = choose_frame(stack, others)
        return factor_stack(stack, self.choices[move], others, 2 * math.sqrt(self.unit))

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

        Returns:
            The explicit maps ``C``, (n, d_member) for each member of the frame.
        """
        scale = 1 / (math.sqrt(2) * slopes.radius * multiplier.sqrt())
        maps = frame.right_divide(contracted.matrix, scale, contracted if lazy else None)
        self._append(name, frame, contracted, slopes, multiplier, survivors)
        return maps

    def given(
        self,
        name: str,
        value: Generator,
        slopes: Slopes,
        balance: Tensor,
        margin: Tensor,
        survivors: Sequence[str],
    ) -> Tensor:
        r"""Eliminate an activation whose input ``v`` is a given linear function of live tensors.

        With :math:`T = 2 r F_v F_v^* r` every :math:`\Lambda_{ii} = θ / \sum_j |T_{ij}| q_j / q_i`, ``θ < 1``, ``q >
        0`` is valid: by Gershgorin's theorem ``ΛT`` then has all eigenvalues in ``[0, θ]``. Making a ``Λ`` smaller
        keeps it valid, so a joint nonlinearity takes the smallest of its group.

        Args:
            name: Name of the new value.
            value: Generator of ``v``, features flattened (n,).
            slopes: Of the n neurons.
            balance: ``q`` (n,).
            margin: ``θ``, a scalar in (0, 1).
            survivors: Values that are read after this move.

        Returns:
            The multiplier ``Λ`` (n,).
        """
        frame = noise_frame(value)
        radius = slopes.radius if isinstance(slopes.radius, Tensor) else balance.new_tensor(slopes.radius)
        rows = frame.noise_rows(value) * (radius.reshape(-1, 1) if radius.ndim else radius)  # r F_v, (n, q)
        gram = 2 * (rows @ rows.mH)
        # A small number in the divisor only makes Λ smaller, which is safe; it serves rows that are (nearly) zero.
        sums = (gram.abs() * balance).sum(-1) / balance
        sums = sums + 1e-6 * sums.max().detach() + math.sqrt(torch.finfo(balance.dtype).tiny)
        multiplier = margin / sums
        if slopes.group is not None:
            multiplier = multiplier.reshape(-1, slopes.group).amin(-1).repeat_interleave(slopes.group)
        contracted = given(math.sqrt(2) * multiplier.sqrt()[:, None] * rows)
        self._append(name, frame, contracted, slopes, multiplier, survivors)
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
    ) -> None:
        """Inflate what stays live and add the new value."""
        n = multiplier.shape[-1]
        noise = self._new_block(n)
        inflated = False
        kept: dict[str, Generator] = {}
        for s in survivors:
            if s not in self.live:
                continue
            gen = self.live[s].copy()
            kept[s] = gen
            spread = frame.spread(contracted.spread(), gen) if frame.touches(gen) else None
            if spread is not None:
                gen.blocks[noise] = spread.reshape(n, *gen.shape)
                inflated = True
        self.live = kept
        self.live[name] = self._new_value(frame, contracted, slopes, multiplier, noise, alone=not inflated)
        choice = self.choices.get(name)
        if choice is not None and choice.compress:
            self._compress(frame)

    def _new_value(
        self,
        frame: Frame,
        contracted: Contracted,
        slopes: Slopes,
        multiplier: Tensor,
        noise: int,
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
            blocks[self._new_block(n)] = Square(IdentityRoot(n, multiplier), unit)
        elif alone:
            blocks[noise] = Square(AdjointRoot(self._root(contracted, rho, multiplier)), unit)
        elif number is not None and abs(number) < 1:
            blocks[noise] = contracted.root.dense() * (number * unit / contracted.root.factor)
            blocks[self._new_block(n)] = torch.diag_embed(math.sqrt(1 - number**2) * unit)
        else:
            blocks.update({b: x * (rho * unit) for b, x in frame.noise(contracted.matrix).items()})
            blocks[noise] = (contracted.spread() @ contracted.matrix.mH) * (rho * unit)
            blocks[self._new_block(n)] = torch.diag_embed(unit)
        return Generator((n,), blocks, self.sizes)

    def _root(self, contracted: Contracted, rho: float | Tensor, multiplier: Tensor) -> Triangular:
        """``N`` lower triangular with ``NN^* = ρK^*Kρ + 1 − ρ²``: a sum of positive terms in both cases."""
        if not isinstance(rho, Tensor) and abs(rho) < 1:
            root = (rho / contracted.root.factor) * contracted.root.dense().mH
            return gram_cholesky(root, multiplier.new_tensor(1 - rho**2), self.unit).factor
        # K^*K − I = U U^* + U (KU)^* (KU) U^*
        u = contracted.matrix
        both = torch.cat([u, u @ contracted.spread().mH], -1)
        both = rho[:, None] * both if isinstance(rho, Tensor) else rho * both
        return gram_cholesky(both, multiplier.new_ones(()), self.unit).factor

    def _compress(self, frame: Frame) -> None:
        """Write the live generators in the smaller noise basis that the frame's QR has found."""
        found = frame.compression()
        if found is None:
            return
        blocks, basis = found
        new = self._new_block(basis.shape[-1])
        for name, gen in self.live.items():
            if not any(b in gen.blocks for b in blocks):
                continue
            value = sum_blocks(gen, blocks, basis)
            rest = {b: v for b, v in gen.blocks.items() if b not in blocks}
            rest[new] = value.reshape(-1, *gen.shape)
            self.live[name] = Generator(gen.shape, rest, self.sizes)


def sum_blocks(gen: Generator, blocks: Sequence[int], basis: Tensor) -> Tensor:
    """``basis^* F^*`` over some noise blocks, without writing out the zero ones."""
    total: Tensor | None = None
    start = 0
    for b in blocks:
        size = gen.sizes[b]
        if b in gen.blocks:
            term = basis[..., start : start + size, :].mH @ gen.flat(b)
            total = term if total is None else total + term
        start += size
    assert total is not None
    return total
