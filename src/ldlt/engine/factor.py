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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ldlt.engine.contraction import Contracted, Root, floored_root, folded_root, identity_root
from ldlt.engine.lazy import FactoredWeight
from ldlt.engine.linalg import floor_share, positive_qr, scale_both, smallest
from ldlt.images.grids import Fold, Layout

__all__ = ["LARGEST", "Block", "Frame", "Generator", "Square", "column_norms", "factor", "noise_frame", "squared"]

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

    def right_divide(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """``diag(rows) x F^{-1}``, x (m, n), rows (m,)."""
        columns = self.root.factor / self.scale
        divided = self.root.right_divide(x)
        return divided * columns if rows is None else scale_both(divided, rows, columns)

    def divide(self, x: Tensor) -> Tensor:
        """``F^{-1} x``, x (n, m)."""
        return self.root.divide(x * (self.root.factor / self.scale)[:, None])


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

    def noise(self, block: int) -> int:
        """``q_b``."""
        value = self.blocks[block]
        return len(value.scale) if isinstance(value, Square) else value.shape[-2]

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
        blocks: dict[int, Block] = {}
        for b, value in self.blocks.items():
            if not isinstance(value, Square):
                blocks[b] = fold.both(value, noise[b], parts)
                continue
            simple = value.root.identity and noise[b] == parts
            root = identity_root(layout, value.scale) if simple else folded_root(value.root, fold, noise[b], parts)
            blocks[b] = Square(root, fold.vector(value.scale, parts))
        return Generator(blocks, fold.vector(self.size, parts), layout)


def column_norms(matrix: Tensor) -> Tensor:
    """Euclidean norms of columns, (d,), the largest over frequencies; no square overflows."""
    top = matrix.abs().amax().clamp_min(torch.finfo(matrix.dtype).tiny)
    norm = top * torch.linalg.vector_norm(matrix / top, dim=-2)
    return norm if norm.ndim == 1 else norm.amax(0)


def stacked(gens: Sequence[Generator], blocks: Sequence[int]) -> Tensor:
    """``F^*`` of stacked tensors on these blocks: (Σ q_b, Σ d)."""
    rows = []
    for b in blocks:
        like = next(g.flat(b) for g in gens if b in g.blocks)
        parts = [g.flat(b) if b in g.blocks else like.new_zeros(*like.shape[:-1], g.features) for g in gens]
        rows.append(torch.cat(parts, -1) if len(parts) > 1 else like)
    return torch.cat(rows, -2) if len(rows) > 1 else rows[0]


# -- pieces of a factor ------------------------------------------------------------------------------------------------


@dataclass
class _Peel:
    """A member whose remaining generator is one square block: no factorisation needed."""

    member: int
    block: int
    square: Square

    @property
    def members(self) -> list[int]:
        return [self.member]

    @property
    def blocks(self) -> list[int]:
        return [self.block]

    @property
    def width(self) -> int:
        return len(self.square.scale)

    def soften(self, x: Tensor) -> Tensor:
        return x if self.square.root.soften is None else self.square.root.soften(x)

    def coordinates(self, gen: Generator) -> Tensor:
        return gen.flat(self.block)

    def noise(self, part: Tensor) -> tuple[dict[int, Tensor], list[Tensor]]:
        return {self.block: part.mH}, []


@dataclass
class _Rest:
    """The members that need a QR factorisation of their stacked blocks: ``F = R^*``."""

    members: list[int]
    blocks: list[int]
    sizes: list[int]  # q_b
    basis: Tensor | None  # Q1 (q, d): noise of the blocks -> frame; None: the first d rows of a single block
    upper: Tensor  # R (d, d)
    signal: Tensor  # Q1 (q, d): how much of a direction is the stack's
    floor: Tensor  # Q2 (d, d): how much is the floor's

    @property
    def width(self) -> int:
        return self.upper.shape[-1]

    def soften(self, x: Tensor) -> Tensor:
        return (x @ self.signal.mH) @ self.signal

    def coordinates(self, gen: Generator) -> Tensor:
        if self.basis is None:
            return gen.flat(self.blocks[0])[..., : self.width, :]
        parts = zip(self.blocks, self.basis.split(self.sizes, -2), strict=True)
        found = [basis.mH @ gen.flat(b) for b, basis in parts if b in gen.blocks]  # without writing out zeros
        return found[0] if len(found) == 1 else torch.stack(found).sum(0)

    def noise(self, part: Tensor) -> tuple[dict[int, Tensor], list[Tensor]]:
        if self.basis is None:
            (b,), (size,) = self.blocks, self.sizes
            return {b: torch.nn.functional.pad(part.mH, (0, 0, 0, size - self.width))}, []
        spread = (part @ self.basis.mH).split(self.sizes, -1)
        return {b: x.mH for b, x in zip(self.blocks, spread, strict=True)}, [self.floor @ part.mH]


@dataclass
class _Noise:
    """The noise of some blocks itself: ``F = I``."""

    blocks: list[int]
    sizes: list[int]
    members: list[int] = field(default_factory=list)

    @property
    def width(self) -> int:
        return sum(self.sizes)

    def soften(self, x: Tensor) -> Tensor:
        return x

    def coordinates(self, gen: Generator) -> Tensor:
        like = next(gen.flat(b) for b in self.blocks if b in gen.blocks)
        lead = like.shape[:-2]
        pairs = zip(self.blocks, self.sizes, strict=True)
        parts = [gen.flat(b) if b in gen.blocks else like.new_zeros(*lead, q, gen.features) for b, q in pairs]
        return torch.cat(parts, -2) if len(parts) > 1 else parts[0]

    def noise(self, part: Tensor) -> tuple[dict[int, Tensor], list[Tensor]]:
        return {b: x.mH for b, x in zip(self.blocks, part.split(self.sizes, -1), strict=True)}, []


@dataclass
class Frame:
    """A factor ``F`` of stacked members, ``F_K = F Q``, ``QQ^* = I``: block lower triangular, in pieces."""

    members: list[Generator]
    pieces: list[_Peel | _Rest | _Noise] = field(default_factory=list)

    def spans(self, matrix: Tensor) -> Iterator[tuple[_Peel | _Rest | _Noise, Tensor]]:
        """The pieces with their columns of a matrix (n, width)."""
        return zip(self.pieces, matrix.split([p.width for p in self.pieces], -1), strict=True)

    def project(self, weights: Sequence[Tensor]) -> Tensor:
        """Free matrices, one per member (n, d_member), to one matrix (n, width) in the frame's coordinates.

        It is softly projected on the range, and kept small enough for its Gram matrix to be finite.
        """
        columns = [weights[m] for p in self.pieces for m in p.members]
        matrix = torch.cat(columns, -1) if len(columns) > 1 else columns[0]
        largest = torch.linalg.vector_norm(matrix.detach(), torch.inf)
        return self.soften(matrix * (LARGEST / largest).clamp(max=1.0))

    def soften(self, matrix: Tensor) -> Tensor:
        """``matrix P``, (n, width), with the soft projection ``P`` on the range of the stack."""
        parts = [p.soften(x) for p, x in self.spans(matrix)]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def apart(self, contracted: Contracted, rows: Tensor) -> list[Tensor] | None:
        """``diag(rows) U F^{-1}`` for a single member, not multiplied out; None where that does not pay."""
        piece = self.pieces[0]
        if len(self.pieces) > 1 or not isinstance(piece, _Peel) or piece.square.root.identity:
            return None
        square = piece.square
        explicit = lambda: square.right_divide(contracted.matrix, rows)  # noqa: E731
        return [FactoredWeight(contracted.shape, square.divide, contracted.product, explicit, rows)]

    def right_divide(self, matrix: Tensor, rows: Tensor | None = None) -> list[Tensor]:
        """``diag(rows) X`` with ``X F = matrix``, one (n, d_member) per member, by block back-substitution."""
        first = self.pieces[0]
        if len(self.pieces) == 1 and isinstance(first, _Peel):
            return [first.square.right_divide(matrix, rows)]
        out: dict[int, Tensor] = {}
        for p, x in reversed(list(self.spans(matrix if rows is None else rows[:, None] * matrix))):
            if isinstance(p, _Rest):
                found = torch.linalg.solve_triangular(p.upper.mH, x, upper=False, left=False)
                sizes = [self.members[m].features for m in p.members]
                out.update(zip(p.members, found.split(sizes, -1), strict=True))
            elif isinstance(p, _Peel):
                seen = [
                    y @ self.members[m].flat(p.block).mH for m, y in out.items() if p.block in self.members[m].blocks
                ]
                out[p.member] = p.square.right_divide(x - sum(seen) if seen else x, None)
        return [out[m] for m in range(len(self.members))]

    def coordinates(self, gen: Generator) -> Tensor | None:
        """``Q F_t^*`` (width, features), or None where the tensor is independent of the stack."""
        parts = [p.coordinates(gen) if any(b in gen.blocks for b in p.blocks) else p.width for p in self.pieces]
        like = next((x for x in parts if isinstance(x, Tensor)), None)
        if like is None or len(parts) == 1:
            return like
        lead = like.shape[:-2]
        zeros = lambda count: like.new_zeros(*lead, count, gen.features)  # noqa: E731
        return torch.cat([x if isinstance(x, Tensor) else zeros(x) for x in parts], -2)

    def noise(self, matrix: Tensor) -> tuple[dict[int, Tensor], list[Tensor]]:
        """The generator of ``matrix · ξ_frame``, (n,) features: by noise block (q_b, n), and on the floor's noise."""
        out: dict[int, Tensor] = {}
        floor: list[Tensor] = []
        for p, x in self.spans(matrix):
            known, own = p.noise(x)
            out.update(known)
            floor += own
        return out, floor


def noise_frame(gen: Generator) -> Frame:
    """The frame of the noise itself (F = I) on the blocks of one tensor."""
    blocks = sorted(gen.blocks)
    return Frame([gen], [_Noise(blocks, [gen.noise(b) for b in blocks])])


# -- factoring ---------------------------------------------------------------------------------------------------------


def _partition(members: Sequence[Generator]) -> tuple[list[_Peel], list[int], list[int]]:
    """Which members can be peeled (in order), which cannot, and the noise blocks of the latter."""
    remaining = {i: set(g.blocks) for i, g in enumerate(members)}
    peeled: list[_Peel] = []

    def fit(i: int) -> _Peel | None:
        if len(remaining[i]) != 1:
            return None
        (b,) = remaining[i]
        square = members[i].blocks[b]
        # Peeling must leave every other member something of its own, or it would have no direction left.
        alone = not any(remaining[j] == {b} for j in remaining if j != i)
        return _Peel(i, b, square) if isinstance(square, Square) and alone else None

    while found := next((p for i in reversed(list(remaining)) if (p := fit(i)) is not None), None):
        peeled.append(found)
        del remaining[found.member]
        for left in remaining.values():
            left.discard(found.block)
    return peeled, sorted(remaining), sorted(set().union(*remaining.values()))


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
    peeled, rest, blocks = _partition(members)
    frame = Frame(list(members), [*peeled])
    if not rest:
        return frame, {}
    everyone, count = [*members, *others], len(members)
    sizes = [next(g.noise(b) for g in members if b in g.blocks) for b in blocks]
    touched = [count + i for i, g in enumerate(others) if any(b in g.blocks for b in blocks)]
    inner = sum(members[i].features for i in rest)
    compress = sum(sizes) > inner + sum(everyone[i].features for i in touched)
    columns = [*rest, *touched] if compress else rest
    q1, q2, upper = _floored_qr([everyone[i] for i in columns], blocks, unit)
    own = q1[..., :inner]
    piece = _Rest(rest, blocks, sizes, own, upper[..., :inner, :inner], own, q2[..., :inner, :inner])
    frame.pieces.append(piece)
    if not compress:
        return frame, {}
    new = new_block()
    piece.basis, piece.blocks, piece.sizes = None, [new], [upper.shape[-1]]
    changed = {}
    for i, part in zip(columns, upper.split([everyone[i].features for i in columns], -1), strict=True):
        kept = {b: v for b, v in everyone[i].blocks.items() if b not in blocks}
        changed[i] = Generator({**kept, new: part}, everyone[i].size, everyone[i].layout)
        if i < count:
            frame.members[i] = changed[i]
    return frame, changed


def _floored_qr(gens: Sequence[Generator], blocks: Sequence[int], unit: float) -> tuple[Tensor, Tensor, Tensor]:
    """``Q_1`` (q, d), ``Q_2`` (d, d) and ``R`` (d, d) of stacked tensors on these blocks, with the floor."""
    stack = stacked(gens, blocks)
    share = floor_share(unit)
    size = torch.cat([g.magnitude() for g in gens])
    size = torch.maximum(size, share * size.max()) + smallest(unit)
    floor = torch.diag_embed(share * size).to(stack.dtype)
    floor = floor if stack.ndim == 2 else floor.expand(len(stack), -1, -1)
    rotation, upper = positive_qr(torch.cat([stack, floor], -2))
    return rotation[..., : stack.shape[-2], :], rotation[..., stack.shape[-2] :, :], upper


def squared(gen: Generator, block: int, unit: float) -> Generator:
    """A tensor that shares its noise with no other live one, in a new noise block of its own: a square generator."""
    signal, _, upper = _floored_qr([gen], sorted(gen.blocks), unit)
    ones = torch.ones(gen.features, dtype=upper.real.dtype, device=upper.device)
    return Generator({block: Square(floored_root(upper, signal), ones)}, gen.size, gen.layout)
