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

from ldlt.engine.contraction import Contracted, Root
from ldlt.engine.lazy import FactoredWeight
from ldlt.engine.linalg import floor_share, smallest
from ldlt.images.grids import Fold, Layout

__all__ = [
    "LARGEST",
    "Block",
    "Frame",
    "Generator",
    "Square",
    "column_norms",
    "covariance",
    "dense",
    "factor",
    "squared",
    "stacked",
]

LARGEST = 1e6
"""Largest entry of a free matrix that is used as it is; larger ones are scaled down, so that no product overflows."""


# -- generators --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Square:
    """A square invertible block: ``F = diag(scale) K^*`` for a root K (n, n) and a vector ``scale`` (n,)."""

    root: Root
    scale: Tensor

    def dense(self) -> Tensor:
        """``F^* = K diag(scale)`` (n, n)."""
        return self.root.dense() * (self.scale / self.root.factor)

    def right_divide(self, x: Tensor) -> Tensor:
        """``x F^{-1}``, x (m, n)."""
        return self.root.right_divide(x) * (self.root.factor / self.scale)

    def divide(self, x: Tensor) -> Tensor:
        """``F^{-1} x``, x (n, m)."""
        return self.root.divide(x * (self.root.factor / self.scale)[:, None])

    def coarse(self, fold: Fold, noise: tuple[int, ...], parts: tuple[int, ...], layout: Layout) -> Square:
        """The same on a coarser grid: everything is done on the fine one, for noise and features with these phases."""
        root, scale = self.root, fold.vector(self.scale, parts)
        if root.identity and noise == parts:
            return Square(Root.unit(layout, scale), scale)
        soften = root.soften
        moved = Root(
            lambda: fold.both(root.dense(), noise, parts),
            lambda x: fold.columns(root.right_divide(fold.unfold(x, noise)), parts),
            lambda x: fold.columns(root.divide(fold.unfold(x.mH, parts).mH).mH, noise).mH,
            root.factor,
            None if soften is None else lambda x: fold.columns(soften(fold.unfold(x, noise)), noise),
            root.singular,
        )
        return Square(moved, scale)


Block = Tensor | Square


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
        """Number of features, of a cell if there is a grid."""
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
        parts, layout = self.layout.parts, self.layout.folded(fold)
        blocks: dict[int, Block] = {
            b: v.coarse(fold, noise[b], parts, layout) if isinstance(v, Square) else fold.both(v, noise[b], parts)
            for b, v in self.blocks.items()
        }
        return Generator(blocks, fold.vector(self.size, parts), layout)


def stacked(gens: Sequence[Generator], layout: Layout) -> Generator:
    """Several tensors as one, that lies like ``layout``."""
    blocks: dict[int, Block] = {}
    for b in dict.fromkeys(b for g in gens for b in g.blocks):
        like = next(g.flat(b) for g in gens if b in g.blocks)
        none = [like.new_zeros(*like.shape[:-1], g.features) if b not in g.blocks else g.flat(b) for g in gens]
        blocks[b] = _beside(none)
    return Generator(blocks, torch.cat([g.size for g in gens]), layout)


def covariance(first: Generator, second: Generator) -> Tensor | None:
    """``cov(s, t) = F_s F_t^*`` (d_s, d_t); None for independent tensors."""
    found = [first.flat(b).mH @ second.flat(b) for b in first.blocks if b in second.blocks]
    return torch.stack(found).sum(0) if len(found) > 1 else found[0] if found else None


def column_norms(matrix: Tensor) -> Tensor:
    """Euclidean norms of columns, (d,), the largest over frequencies; no square overflows."""
    top = matrix.abs().amax().clamp_min(torch.finfo(matrix.dtype).tiny)
    norm = top * torch.linalg.vector_norm(matrix / top, dim=-2)
    return norm if norm.ndim == 1 else norm.amax(0)


# -- the factor of a stack ---------------------------------------------------------------------------------------------


@dataclass
class Piece:
    """Some members of a stack and their factor.

    Attributes:
        members: Their places in the stack.
        square: ``F``.
        basis: Noise block -> its rows of ``Q^*`` (q_b, width); None: its first rows are the coordinates themselves.
    """

    members: list[int]
    square: Square
    basis: dict[int, Tensor | None]

    @property
    def width(self) -> int:
        """Number of coordinates."""
        return len(self.square.scale)

    def soften(self, x: Tensor) -> Tensor:
        """``x P`` with the soft projection on the range."""
        return x if self.square.root.soften is None else self.square.root.soften(x)

    def coordinates(self, gen: Generator) -> Tensor | None:
        """``Q F_t^*`` (width, features) of a tensor; None where it is independent."""
        found = []
        for b, rows in self.basis.items():
            if b in gen.blocks:  # without writing out zeros
                value = gen.flat(b)
                found.append(value[..., : self.width, :] if rows is None else rows.mH @ value)
        return torch.stack(found).sum(0) if len(found) > 1 else found[0] if found else None


@dataclass
class Frame:
    """A factor ``F`` of stacked members, ``F_K = F Q``, ``QQ^* = I``: block lower triangular, in pieces."""

    members: list[Generator]
    pieces: list[Piece]

    def spans(self, matrix: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces with their columns of a matrix (n, width)."""
        return zip(self.pieces, matrix.split([p.width for p in self.pieces], -1), strict=True)

    def project(self, weights: Sequence[Tensor]) -> Tensor:
        """Free matrices, one per member (n, d_member), to one matrix (n, width) in the frame's coordinates.

        It is softly projected on the range, and kept small enough for its Gram matrix to be finite.
        """
        matrix = _beside([weights[m] for p in self.pieces for m in p.members])
        largest = matrix.detach().abs().amax()
        return self.soften(matrix * (LARGEST / largest).clamp(max=1.0))

    def soften(self, matrix: Tensor) -> Tensor:
        """``matrix P``, (n, width), with the soft projection ``P`` on the range of the stack."""
        return _beside([p.soften(x) for p, x in self.spans(matrix)])

    def apart(self, contracted: Contracted, rows: Tensor) -> list[Tensor] | None:
        """``diag(rows) U F^{-1}`` for a single member, not multiplied out; None where that does not pay."""
        square = self.pieces[0].square
        if len(self.pieces) > 1 or square.root.identity or None not in self.pieces[0].basis.values():
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
        return Piece([i], square, {b: None}) if isinstance(square, Square) and alone else None

    while found := next((p for i in reversed(list(remaining)) if (p := fit(i)) is not None), None):
        pieces.append(found)
        del remaining[found.members[0]]
        for left in remaining.values():
            left.difference_update(found.basis)
    return pieces, sorted(remaining), sorted(set().union(*remaining.values()))


def factor(
    members: Sequence[Generator], others: Sequence[Generator], new_block: Callable[[], int], unit: float
) -> tuple[Frame, dict[int, Generator]]:
    """The square factor of stacked members.

    Members whose remaining generator is a square block need no factorisation. The rest gets one floored QR. Where its
    noise has more dimensions than all live tensors that see it have features, the same QR writes them all on as many
    dimensions, floor included: noise must not grow with the depth.

    Args:
        members: The stacked tensors.
        others: The other live tensors that are read later.
        new_block: Makes a noise block.
        unit: Rounding unit of the stored parameters.

    Returns:
        The factor, and tensors that are written on new noise, by their places in ``[*members, *others]``.
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
    square = _floored(upper[..., :inner, :inner], signal[..., :inner])
    if not compress:
        rows = signal.split(sizes, -2)
        frame.pieces.append(Piece(rest, square, dict(zip(blocks, rows, strict=True))))
        return frame, {}
    new = new_block()
    frame.pieces.append(Piece(rest, square, {new: None}))
    changed = {}
    for i, part in zip(columns, upper.split([everyone[i].features for i in columns], -1), strict=True):
        kept = {b: v for b, v in everyone[i].blocks.items() if b not in blocks}
        changed[i] = replace(everyone[i], blocks={**kept, new: part})
        if i < count:
            frame.members[i] = changed[i]
    return frame, changed


def squared(gen: Generator, block: int, unit: float) -> Generator:
    """A tensor that shares its noise with no other live one, in a new noise block of its own: a square generator."""
    signal, upper = _floored_qr([gen], sorted(gen.blocks), unit)
    return replace(gen, blocks={block: _floored(upper, signal)})


def _floored(upper: Tensor, signal: Tensor) -> Square:
    """``F = R^*``, with the soft projection ``Q_1^* Q_1`` of ``signal`` (q, n)."""

    def divide(x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(upper.mH, x, upper=False)

    def right_divide(x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(upper.mH, x, upper=False, left=False)

    root = Root(lambda: upper, right_divide, divide, soften=lambda x: (x @ signal.mH) @ signal)
    return Square(root, torch.ones(upper.shape[-1], dtype=upper.real.dtype, device=upper.device))


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
