r"""Generators of live tensors, and the square factor of a stack of them.

A live tensor is :math:`t = F_t \xi` for white noise :math:`\xi`, so :math:`\operatorname{cov}(s, t) = F_s F_t^*`. The
noise comes in blocks, one per elimination step, and most tensors see few of them: a :class:`Generator` maps a block to
:math:`F_{t,b}^*`, (q_b, d) for the ``d`` flattened features, or on a grid (f, q_b, d), one complex matrix per frequency
for the ``d`` features of a *cell*. Every formula below holds frequency by frequency.

**No rank is ever decided.** Whenever a stack ``X = F_K^*`` (q, d) is factored, every feature gets a little independent
noise of its own,

.. math:: \begin{bmatrix} X \\ δ\,\mathrm{diag}(s) \end{bmatrix} = \begin{bmatrix} Q_1 \\ Q_2 \end{bmatrix} R,
          \qquad δ = ε^{1/3} ,

with ``s`` the magnitude of a feature *before cancellation*. That noise is an extra input of the network, so this is
exact and costs ``δ²`` of tightness. :math:`P = Q_1^*Q_1 = I - Q_2^*Q_2` is the *soft projection* on the range, applied
as :math:`(W Q_1^*) Q_1`: free matrices pass through it, so that a direction without signal gets no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ldlt.engine.contraction import Contracted, Square
from ldlt.engine.lazy import FactoredWeight
from ldlt.engine.linalg import floor_share, smallest
from ldlt.images.grids import Fold, Layout

LARGEST = 1e6
"""Largest entry of a free matrix that is used as it is; larger ones are scaled down, so that no product overflows."""


Block = Tensor | Square


def coarse(block: Block, fold: Fold, noise: tuple[int, ...], layout: Layout) -> Block:
    """A block on a coarser grid, for noise with these phases; a square one does everything on the fine grid."""
    parts = layout.parts
    if not isinstance(block, Square):
        return fold.both(block, noise, parts)
    scale, soften = fold.vector(torch.as_tensor(block.scale), parts), block.soften
    if block.identity and noise == parts:
        return Square.diagonal(layout.folded(fold), scale)
    return Square(
        scale,
        lambda: fold.both(block.root(), noise, parts),
        lambda x: fold.columns(block.over(fold.unfold(x, noise)), parts),
        lambda x: fold.columns(block.under(fold.unfold(x.mH, parts).mH).mH, noise).mH,
        None if soften is None else lambda x: fold.columns(soften(fold.unfold(x, noise)), noise),
        block.singular,
    )


def dense(block: Block) -> Tensor:
    """A block as a matrix."""
    return block.dense() if isinstance(block, Square) else block


@dataclass(frozen=True)
class Generator:
    r"""``F_t^*`` of one tensor, block by block.

    Attributes:
        blocks: Noise block -> ``F^*`` of that block, a matrix or a :class:`Square` one.
        size: Magnitude ``s`` of every feature before cancellation (d,), constant to autograd: linear operations ``J``
            carry it along as if nothing cancelled, :math:`s_i \leftarrow (\sum_j J_{ij}^2 s_j^2)^{1/2}`.
        layout: How the features lie on a grid.
    """

    blocks: dict[int, Block]
    size: Tensor
    layout: Layout

    @property
    def features(self) -> int:
        return self.layout.features

    def flat(self, block: int) -> Tensor:
        """A block as a matrix."""
        return dense(self.blocks[block])

    def matrix(self) -> Tensor:
        """``F_t`` (d, q)."""
        return torch.cat([self.flat(b) for b in self.blocks], -2).mH

    def rows(self, index: Tensor | None) -> Generator:
        """The generator of the features at ``index`` (all of them for None)."""
        if index is None:
            return self
        layout = self.layout.of_count(len(index))
        return Generator({b: self.flat(b)[..., index] for b in self.blocks}, self.size[index], layout)

    def magnitude(self) -> Tensor:
        """``s``, at least the column norms of the generator (largest over frequencies), (d,)."""
        norms = [column_norms(self.flat(b).detach().abs()) for b in self.blocks]
        return torch.maximum(self.size, torch.linalg.vector_norm(torch.stack(norms), dim=0)) if norms else self.size

    def coarse(self, fold: Fold, noise: dict[int, tuple[int, ...]]) -> Generator:
        """The same tensor on a coarser grid; ``noise`` are the phases of the noise blocks on the fine one."""
        blocks = {b: coarse(v, fold, noise[b], self.layout) for b, v in self.blocks.items()}
        return Generator(blocks, fold.vector(self.size, self.layout.parts), self.layout.folded(fold))


def stacked(gens: Sequence[Generator], layout: Layout) -> Generator:
    """Several tensors as one, that lies like ``layout``."""
    blocks: dict[int, Block] = {}
    for b in dict.fromkeys(b for g in gens for b in g.blocks):
        like = next(g.flat(b) for g in gens if b in g.blocks)
        blocks[b] = _beside(
            [g.flat(b) if b in g.blocks else like.new_zeros(*like.shape[:-1], g.features) for g in gens]
        )
    return Generator(blocks, torch.cat([g.size for g in gens]), layout)


def covariance(first: Generator, second: Generator) -> Tensor | None:
    """``cov(s, t) = F_s F_t^*`` (d_s, d_t); None for independent tensors."""
    return _total([first.flat(b).mH @ second.flat(b) for b in first.blocks if b in second.blocks])


def _total(terms: Sequence[Tensor]) -> Tensor | None:
    return torch.stack(list(terms)).sum(0) if len(terms) > 1 else terms[0] if terms else None


def column_norms(matrix: Tensor) -> Tensor:
    """Euclidean norms of columns, (d,), the largest over frequencies; no square overflows."""
    top = matrix.abs().amax().clamp_min(torch.finfo(matrix.dtype).tiny)
    norm = top * torch.linalg.vector_norm(matrix / top, dim=-2)
    return norm if norm.ndim == 1 else norm.amax(0)


@dataclass
class Piece:
    """Some members of a stack and their factor.

    Attributes:
        members: Their places in the stack.
        square: ``F`` (width, width).
        basis: Noise block -> its rows of ``Q^*`` (q_b, width); None: its first rows are the coordinates themselves.
        width: Number of coordinates.
    """

    members: list[int]
    square: Square
    basis: dict[int, Tensor | None]

    width: int

    def soften(self, x: Tensor) -> Tensor:
        return x if self.square.soften is None else self.square.soften(x)

    def coordinates(self, gen: Generator) -> Tensor | None:
        """``Q F_t^*`` (width, features) of a tensor; None where it is independent."""
        seen = [(rows, gen.flat(b)) for b, rows in self.basis.items() if b in gen.blocks]
        return _total([x[..., : self.width, :] if rows is None else rows.mH @ x for rows, x in seen])


@dataclass
class Frame:
    """A factor ``F`` of stacked members, ``F_K = F Q``, ``QQ^* = I``: block lower triangular, in pieces."""

    members: list[Generator]
    pieces: list[Piece]

    def spans(self, matrix: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces with their columns of a matrix (n, width)."""
        return zip(self.pieces, matrix.split([p.width for p in self.pieces], -1), strict=True)

    def project(self, weights: Sequence[Tensor]) -> Tensor:
        """Free matrices, one per member (n, d_member), to one (n, width), softly projected, with a finite Gram."""
        matrix = _beside([weights[m] for p in self.pieces for m in p.members])
        largest = matrix.detach().abs().amax()
        return self.soften(matrix * (LARGEST / largest).clamp(max=1.0))

    def soften(self, matrix: Tensor) -> Tensor:
        """``matrix P``, (n, width), with the soft projection ``P`` on the range of the stack."""
        return _beside([p.soften(x) for p, x in self.spans(matrix)])

    def apart(self, contracted: Contracted, rows: Tensor) -> list[Tensor] | None:
        """``diag(rows) U F^{-1}`` for a single member, not multiplied out; None where that does not pay."""
        square = self.pieces[0].square
        if len(self.pieces) > 1 or square.identity or None not in self.pieces[0].basis.values():
            return None
        explicit = lambda: rows[:, None] * square.right_divide(contracted.matrix)  # noqa: E731
        return [FactoredWeight(contracted.shape, rows, square.divide, contracted.product, explicit)]

    def right_divide(self, matrix: Tensor) -> list[Tensor]:
        """``X`` with ``X F = matrix``, one (n, d_member) per member, by block back-substitution."""
        out: dict[int, Tensor] = {}
        for piece, x in reversed(list(self.spans(matrix))):
            for m, y in out.items():
                seen = piece.coordinates(self.members[m])
                x = x if seen is None else x - y @ seen.mH  # noqa: PLW2901
            out.update(self._apart(piece, piece.square.right_divide(x)))
        return [out[m] for m in range(len(self.members))]

    def multiply(self, maps: Sequence[Tensor]) -> Tensor:
        """``X F`` (n, width) for maps ``X``, one (n, d_member) per member: the inverse of :meth:`right_divide`."""
        columns = []
        for piece in self.pieces:
            x = _beside([maps[m] for m in piece.members]) @ piece.square.dense().mH
            for m, y in enumerate(maps):
                seen = None if m in piece.members else piece.coordinates(self.members[m])
                x = x if seen is None else x + y @ seen.mH
            columns.append(x)
        return _beside(columns)

    def split(self, matrix: Tensor) -> list[Tensor]:
        """The columns of a matrix (n, width) that stand for each member."""
        out: dict[int, Tensor] = {}
        for piece, x in self.spans(matrix):
            out.update(self._apart(piece, x))
        return [out[m] for m in range(len(self.members))]

    def _apart(self, piece: Piece, x: Tensor) -> dict[int, Tensor]:
        sizes = [self.members[m].features for m in piece.members]
        return dict(zip(piece.members, x.split(sizes, -1), strict=True))

    def coordinates(self, gen: Generator) -> Tensor | None:
        """``Q F_t^*`` (width, features), or None where the tensor is independent of the stack."""
        parts = [p.coordinates(gen) for p in self.pieces]
        like = next((x for x in parts if x is not None), None)
        if like is None or len(parts) == 1:
            return like
        shapes = [(*like.shape[:-2], p.width, gen.features) for p in self.pieces]
        return torch.cat([like.new_zeros(n) if x is None else x for x, n in zip(parts, shapes, strict=True)], -2)


def _beside(columns: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(columns), -1) if len(columns) > 1 else columns[0]


def _peeled(members: Sequence[Generator]) -> tuple[list[Piece], list[int], list[int]]:
    """Members whose remaining generator is one square block, in order; the others, and their noise blocks."""
    remaining = {i: set(g.blocks) for i, g in enumerate(members)}
    pieces: list[Piece] = []

    def fit(i: int) -> Piece | None:
        if len(remaining[i]) != 1:
            return None
        (b,) = remaining[i]
        square = members[i].blocks[b]
        # Peeling must leave every other member something of its own, or it would have no direction left.
        alone = not any(remaining[j] == {b} for j in remaining if j != i)
        return Piece([i], square, {b: None}, members[i].features) if isinstance(square, Square) and alone else None

    while found := next((p for i in reversed(list(remaining)) if (p := fit(i)) is not None), None):
        pieces.append(found)
        del remaining[found.members[0]]
        for left in remaining.values():
            left.difference_update(found.basis)
    return pieces, sorted(remaining), sorted(set().union(*remaining.values()))


def factor(
    members: Sequence[Generator],
    others: Sequence[Generator],
    new_block: Callable[[], int],
    soft: dict[int, Tensor],
    unit: float,
) -> tuple[Frame, dict[int, Generator]]:
    """The factor of stacked members, and tensors written on new noise by their places in ``[*members, *others]``.

    Members whose remaining generator is a square block need no factorisation. The rest gets one floored QR. Where its
    noise has more dimensions than all live tensors that see it have features, the same QR writes them all on as many
    dimensions, floor included: noise must not grow with the depth. ``others`` are the live tensors that are read later;
    ``soft`` has the soft projection of every block that was made so, since what was floor there is no signal later.
    """
    pieces, rest, blocks = _peeled(members)
    frame = Frame(list(members), pieces)
    if not rest:
        return frame, {}
    everyone, count = [*members, *others], len(members)
    touched = [i for i in range(count, len(everyone)) if any(b in everyone[i].blocks for b in blocks)]
    sizes = [next(g.flat(b).shape[-2] for g in members if b in g.blocks) for b in blocks]
    inner = sum(members[i].features for i in rest)
    compress = sum(sizes) > inner + sum(everyone[i].features for i in touched)
    columns = [*rest, *touched] if compress else rest
    signal, upper = _floored_qr([everyone[i] for i in columns], blocks, unit)
    kept = _softened(signal, blocks, sizes, soft)
    square = _floored(upper[..., :inner, :inner], signal[..., :inner], kept[..., :inner])
    if not compress:
        rows = signal.split(sizes, -2)
        frame.pieces.append(Piece(rest, square, dict(zip(blocks, rows, strict=True)), inner))
        return frame, {}
    new = new_block()
    soft[new] = signal.mH @ kept
    frame.pieces.append(Piece(rest, square, {new: None}, inner))
    changed = {}
    for i, part in zip(columns, upper.split([everyone[i].features for i in columns], -1), strict=True):
        apart = {b: v for b, v in everyone[i].blocks.items() if b not in blocks}
        changed[i] = replace(everyone[i], blocks={**apart, new: part})
        if i < count:
            frame.members[i] = changed[i]
    return frame, changed


def squared(gen: Generator, block: int, soft: dict[int, Tensor], unit: float) -> Generator:
    """A tensor that shares its noise with no other live one, in a new noise block of its own: a square generator."""
    blocks = sorted(gen.blocks)
    signal, upper = _floored_qr([gen], blocks, unit)
    kept = _softened(signal, blocks, [gen.flat(b).shape[-2] for b in blocks], soft)
    soft[block] = signal.mH @ kept
    return replace(gen, blocks={block: _floored(upper, signal, kept)})


def _softened(signal: Tensor, blocks: Sequence[int], sizes: Sequence[int], soft: dict[int, Tensor]) -> Tensor:
    """``P_b Q_1`` block by block: the part of the signal that is no floor of an earlier factorisation."""
    parts = zip(blocks, signal.split(list(sizes), -2), strict=True)
    return torch.cat([soft[b] @ rows if b in soft else rows for b, rows in parts], -2)


def _floored(upper: Tensor, signal: Tensor, kept: Tensor) -> Square:
    """``F = R^*``, with the soft projection ``Q_1^* P Q_1`` of ``signal`` (q, n)."""
    return Square(
        torch.ones(upper.shape[-1], dtype=upper.real.dtype, device=upper.device),
        lambda: upper,
        lambda x: torch.linalg.solve_triangular(upper.mH, x, upper=False, left=False),
        lambda x: torch.linalg.solve_triangular(upper.mH, x, upper=False),
        lambda x: (x @ signal.mH) @ kept,
    )


def _floored_qr(gens: Sequence[Generator], blocks: Sequence[int], unit: float) -> tuple[Tensor, Tensor]:
    """``Q_1`` (q, d) and ``R`` (d, d) of stacked tensors on these blocks, with the floor.

    The diagonal of R is positive, so that both are continuous functions of the stack.
    """
    whole = stacked(gens, gens[0].layout)
    rows = [whole.flat(b) for b in blocks]
    share, size = floor_share(unit), whole.magnitude()
    size = torch.maximum(size, share * size.max()) + smallest(unit)
    floor = torch.diag_embed(share * size).to(rows[0].dtype)
    rows.append(floor if rows[0].ndim == 2 else floor.expand(len(rows[0]), -1, -1))
    q, r = torch.linalg.qr(torch.cat(rows, -2))
    sign = torch.where(r.diagonal(dim1=-2, dim2=-1).real < 0, -1.0, 1.0).to(r.dtype).detach()
    return (q * sign[..., None, :])[..., : -r.shape[-1], :], r * sign[..., :, None]
