r"""Generators of live tensors, and the square factor of a stack of them.

The rule (``ldlt.elimination``) reads the quadratic form as a Gaussian. A live tensor ``t`` with features of shape
``S`` is :math:`t = F_t \xi` for white noise :math:`\xi`, so :math:`\operatorname{cov}(s, t) = F_s F_t^*`; covariances
themselves are never formed. The noise comes in blocks, one per elimination step, and most tensors see few of them: a
:class:`Generator` maps a block to :math:`F_{t,b}^*`, a tensor of shape ``(q_b, *S)``, that is *a batch of q_b
inputs*. A linear operation of the user's network acts on a generator by being run on that batch.

The covariance of images commutes with shifts of a grid of cells (``ldlt.grid``), and so do their generators: a block is
then one complex matrix per frequency, ``F_{t,b}(k)^*`` of shape (f, q_b, m) with ``q_b`` noise channels and ``m``
features per *cell*, and every formula holds frequency by frequency. Nothing below depends on which of the two it is,
except where a tensor is made (:func:`linear`, :func:`through`) or written on a coarser grid (:meth:`Generator.coarse`).

**No rank is ever decided.** Linear operations can lose rank, at some parameters and not at others, so whenever a stack
``X = F_K^*`` (q, d) is factored, every feature gets a little independent noise of its own,

.. math:: \begin{bmatrix} X \\ δ\,\mathrm{diag}(s) \end{bmatrix} = \begin{bmatrix} Q_1 \\ Q_2 \end{bmatrix} R,
          \qquad δ = ε^{1/3} ,

with ``s`` the magnitude of a feature *before cancellation*. The noise is an extra input of the network, and a network
that is Lipschitz in all of its inputs is so in the true ones: this is exact and costs ``δ²`` of tightness.
:math:`P = I - Q_2^*Q_2 = Q_1^*Q_1` is the *soft projection* on the range: free matrices pass through it, so that a
direction without signal gets no weight instead of weight ``1/δ``. It is applied as :math:`(W Q_1^*) Q_1`: where ``P``
is small, the difference would be rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ldlt.contraction import Contracted, FlooredRoot, FoldedRoot, IdentityRoot, Root
from ldlt.factored import FactoredWeight
from ldlt.grid import Fold, Layout
from ldlt.scalars import floor_share, smallest
from ldlt.triangular import positive_qr, scale_both

LARGEST = 1e6
"""Largest entry of a free matrix that is used as it is; larger ones are scaled down, so that no product overflows."""

__all__ = [
    "LARGEST",
    "Frame",
    "Generator",
    "Square",
    "any_sizes",
    "combine",
    "factor",
    "linear",
    "matrix_sizes",
    "moved_sizes",
    "noise_frame",
    "reduced",
    "squared",
    "sum_blocks",
    "through",
]


@dataclass
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

    def soften(self, x: Tensor) -> Tensor:
        """``x P`` with the soft projection of the block, x (m, n)."""
        return self.root.soften(x)

    def coarse(self, fold: Fold, noise: tuple[int, ...], parts: tuple[int, ...]) -> Square:
        """The same block on a coarser grid, for noise and features with these phases."""
        if isinstance(self.root, IdentityRoot) and noise == parts:
            root: Root = self.root.coarse(fold)
        else:
            root = FoldedRoot(self.root, fold, noise, parts)
        return Square(root, fold.vector(self.scale, parts))


@dataclass
class Generator:
    r"""``F_t^*`` of one tensor, block by block.

    Attributes:
        shape: Feature shape of the tensor (no batch dimension).
        blocks: Noise block -> ``F^*`` of that block, (q_b, *shape), or a :class:`Square` one (features flattened). On a
            grid (f, q_b, m).
        sizes: Noise block -> q_b; shared by all generators of a sweep.
        size: Magnitude ``s`` of every feature before cancellation (features,), constant to autograd: linear operations
            ``J`` carry it along as if nothing cancelled, :math:`s_i \leftarrow (\sum_j J_{ij}^2 s_j^2)^{1/2}`.
        layout: How the features lie on a grid; None for the dense representation.
    """

    shape: tuple[int, ...]
    blocks: dict[int, Tensor | Square]
    sizes: dict[int, int]
    size: Tensor
    layout: Layout | None = None

    @property
    def features(self) -> int:
        """Number of features, of a cell if there is a grid."""
        return int(torch.Size(self.shape).numel()) if self.layout is None else self.layout.features

    def flat(self, block: int) -> Tensor:
        """The block as a matrix (q_b, features), or as (f, q_b, features)."""
        value = self.blocks[block]
        if isinstance(value, Square):
            return value.dense()
        return value.reshape(self.sizes[block], -1) if self.layout is None else value

    def batch(self, block: int) -> Tensor:
        """The block as a batch (q_b, *shape); on a grid it stays (f, q_b, features)."""
        value = self.flat(block)
        return value.reshape(self.sizes[block], *self.shape) if self.layout is None else value

    def put(self, block: int, value: Tensor) -> None:
        """Set a block from its flat form."""
        self.blocks[block] = value.reshape(self.sizes[block], *self.shape) if self.layout is None else value

    def reshaped(self, shape: tuple[int, ...]) -> Generator:
        """The same features in another shape; square blocks stay square."""
        if self.layout is not None:
            return Generator(shape, self.blocks, self.sizes, self.size, self.layout)
        blocks = {b: v if isinstance(v, Square) else v.reshape(self.sizes[b], *shape) for b, v in self.blocks.items()}
        return Generator(shape, blocks, self.sizes, self.size)

    def copy(self) -> Generator:
        """A generator that can get new blocks without changing this one."""
        return Generator(self.shape, dict(self.blocks), self.sizes, self.size, self.layout)

    def rows(self, index: Tensor | None) -> Generator:
        """The generator of the flattened (or local) features at ``index`` (all of them for None)."""
        if index is None:
            return self.reshaped((self.features,))
        layout = self.layout
        if layout is not None:  # in no particular order on the same grid
            layout = Layout(layout.cells, (1,) * len(layout.cells), len(index))
        blocks: dict[int, Tensor | Square] = {b: self.flat(b)[..., index] for b in self.blocks}
        return Generator((len(index),), blocks, self.sizes, self.size[index], layout)

    def magnitude(self) -> Tensor:
        """``s``, at least the column norms of the generator (largest over frequencies), (features,)."""
        norms = [_column_norms(self.flat(b).detach().abs()) for b in self.blocks]
        return torch.maximum(self.size, torch.linalg.vector_norm(torch.stack(norms), dim=0)) if norms else self.size

    def coarse(self, fold: Fold, noise: dict[int, tuple[int, ...]], sizes: dict[int, int]) -> Generator:
        """The same tensor on a coarser grid.

        Args:
            fold: From the grid of this generator to the coarser one.
            noise: Phases of the noise blocks on the fine grid.
            sizes: Sizes of the noise blocks on the coarse grid.
        """
        assert self.layout is not None
        parts = self.layout.parts
        blocks: dict[int, Tensor | Square] = {}
        for b, value in self.blocks.items():
            if isinstance(value, Square):
                blocks[b] = value.coarse(fold, noise[b], parts)
            else:
                blocks[b] = fold.both(value, noise[b], parts)
                if fold.coarse is None:
                    blocks[b] = blocks[b].reshape(-1, *self.shape)  # type: ignore[union-attr]
        return Generator(self.shape, blocks, sizes, fold.vector(self.size, parts), self.layout.folded(fold))


def linear(fn: Callable[..., Tensor], parents: Sequence[Generator], shape: tuple[int, ...], size: Tensor) -> Generator:
    """Generator of ``fn(*parents)`` for a linear ``fn`` on batches, with its magnitudes ``size``."""
    sizes = parents[0].sizes
    blocks: dict[int, Tensor | Square] = {}
    for b in dict.fromkeys(b for p in parents for b in p.blocks):
        like = next(p.flat(b) for p in parents if b in p.blocks)
        args = [p.batch(b) if b in p.blocks else like.new_zeros(sizes[b], *p.shape) for p in parents]
        blocks[b] = fn(*args)
    return Generator(shape, blocks, sizes, size)


def moved_sizes(fn: Callable[..., Tensor], parents: Sequence[Generator]) -> Tensor:
    """Magnitudes behind an ``fn`` on batches that moves, drops or repeats features."""
    with torch.no_grad():
        return fn(*(p.size.reshape(1, *p.shape) for p in parents)).reshape(-1)


def any_sizes(fn: Callable[..., Tensor], parents: Sequence[Generator]) -> Tensor:
    """Magnitudes behind any linear ``fn`` on batches, by its matrices."""
    total: Tensor | None = None
    with torch.no_grad():
        for place, own in enumerate(parents):
            unit = torch.diag(own.size).reshape(-1, *own.shape)
            args = [unit if i == place else unit.new_zeros(len(unit), *p.shape) for i, p in enumerate(parents)]
            found = _column_norms(fn(*args).reshape(len(unit), -1))
            total = found if total is None else torch.hypot(total, found)
    assert total is not None
    return total


def through(parents: Sequence[Generator], maps: Sequence[Tensor], shape: tuple[int, ...], layout: Layout) -> Generator:
    """Generator of ``Σ_p T_p t_p`` on a grid.

    Args:
        parents: The tensors ``t_p``.
        maps: One per parent: indices of local features (m_out,), a real matrix (m_out, m_p) that is the same at all
            frequencies, or a transfer function (f, m_out, m_p). Negative indices stand for zeros.
        shape: Shape of the result.
        layout: Its layout.
    """
    blocks: dict[int, Tensor | Square] = {}
    for gen, moved in zip(parents, maps, strict=True):
        whole = moved.ndim == 1 and len(moved) == gen.features and bool((moved == torch.arange(len(moved))).all())
        for b, value in gen.blocks.items():
            if whole:
                new = value
            elif moved.ndim == 1:
                found = gen.flat(b)[..., moved.clamp_min(0)]
                new = found if bool((moved >= 0).all()) else found * (moved >= 0).to(found.dtype)
            else:
                new = gen.flat(b) @ moved.mH.to(gen.flat(b).dtype)
            if b in blocks:
                old = blocks[b]
                new = (old.dense() if isinstance(old, Square) else old) + (
                    new.dense() if isinstance(new, Square) else new
                )
            blocks[b] = new
    sizes = [_sized(moved.detach(), gen.size) for gen, moved in zip(parents, maps, strict=True)]
    size = torch.linalg.vector_norm(torch.stack(sizes), dim=0)
    return Generator(shape, blocks, parents[0].sizes, size, layout)


def _sized(moved: Tensor, size: Tensor) -> Tensor:
    """Magnitudes behind a map of :func:`through`; of a transfer function the largest over frequencies."""
    if moved.ndim == 1:
        return size[moved.clamp_min(0)] * (moved >= 0).to(size.dtype)
    return matrix_sizes(moved.abs() if moved.ndim == 2 else moved.abs().amax(0), size)


def matrix_sizes(matrix: Tensor, size: Tensor) -> Tensor:
    """``(Σ_j J_ij² s_j²)^{1/2}``, (m_out,), of a matrix (m_out, m_in)."""
    return _column_norms((matrix.detach().to(size.dtype) * size).mT)


def _column_norms(matrix: Tensor) -> Tensor:
    """Euclidean norms of columns, (d,), the largest over frequencies; no square overflows."""
    top = matrix.abs().amax().clamp_min(torch.finfo(matrix.dtype).tiny)
    norm = top * torch.linalg.vector_norm(matrix / top, dim=-2)
    return norm if norm.ndim == 1 else norm.amax(0)


def reduced(
    fn: Callable[..., Tensor],
    parents: Sequence[Generator],
    shapes: Sequence[tuple[int, ...]],
    shape: tuple[int, ...],
    noise: dict[int, tuple[int, ...]],
) -> Generator:
    """Dense generator of a vector ``fn(*parents)`` for a linear ``fn`` on batches of images that lie on a grid.

    The rows of the function are found as gradients, one per feature of the result, and multiplied by the generators in
    the Fourier domain: the images themselves are never written densely.

    Args:
        fn: The function.
        parents: Generators of its arguments.
        shapes: Shapes (c, *spatial) of its arguments.
        shape: Shape of the result.
        noise: Phases of the noise blocks.
    """
    layout = parents[0].layout
    assert layout is not None
    fold = Fold(layout.cells, None)
    count = int(torch.Size(shape).numel())
    like = parents[0].flat(next(iter(parents[0].blocks))).real
    with torch.enable_grad():
        images = [torch.zeros(count, *s, dtype=like.dtype, device=like.device, requires_grad=True) for s in shapes]
        y = fn(*images).reshape(count, count)
        rows = torch.autograd.grad(y.diagonal().sum(), images, allow_unused=True)
    sizes = {b: q * fold.factor for b, q in parents[0].sizes.items()}
    blocks: dict[int, Tensor | Square] = {}
    size = like.new_zeros(count)
    for gen, matrix in zip(parents, rows, strict=True):
        assert gen.layout is not None
        if matrix is None:
            continue
        own = matrix_sizes(matrix.reshape(count, -1), fold.vector(gen.size, gen.layout.parts))
        size = torch.hypot(size, own)
        wide = fold.unfold(matrix.detach().reshape(count, -1), gen.layout.parts)  # (f, count, m)
        for b in gen.blocks:
            new = fold.columns(wide @ gen.flat(b).mH, noise[b]).mH.reshape(sizes[b], *shape)
            blocks[b] = blocks[b] + new if b in blocks else new  # type: ignore[operator]
    return Generator(shape, blocks, sizes, size)


def combine(terms: Sequence[tuple[Generator, float]], shape: tuple[int, ...]) -> Generator:
    """Generator of a weighted sum of tensors of one shape; blocks that only one of them has are not copied."""
    blocks: dict[int, Tensor | Square] = {}
    for gen, weight in terms:
        for b in gen.blocks:
            value = gen.batch(b) if weight == 1 else weight * gen.batch(b)
            blocks[b] = blocks[b] + value if b in blocks else value  # type: ignore[operator]
    size = torch.linalg.vector_norm(torch.stack([weight * gen.size for gen, weight in terms]), dim=0)
    return Generator(shape, blocks, terms[0][0].sizes, size, terms[0][0].layout)


@dataclass
class _Peel:
    """A member whose remaining generator is one square block: no factorisation needed."""

    member: int
    block: int
    square: Square

    @property
    def blocks(self) -> list[int]:
        """The noise blocks: one."""
        return [self.block]


@dataclass
class _Rest:
    """The members that need a QR factorisation of their stacked blocks: ``F = R^*``."""

    members: list[int]
    blocks: list[int]
    basis: Tensor | None  # Q1 (q, d): noise of the blocks -> frame; None: the first d rows of a single block
    upper: Tensor  # R (d, d)
    signal: Tensor  # Q1 (q, d): how much of a direction is the stack's
    noise: Tensor  # Q2 (d, d): how much is the floor's

    @property
    def rank(self) -> int:
        """Number of columns of F."""
        return self.upper.shape[-1]


@dataclass
class _Noise:
    """The noise of some blocks itself: ``F = I``."""

    blocks: list[int]
    rank: int


@dataclass
class Frame:
    """A factor ``F`` of stacked members, ``F_K = F Q``, ``QQ^* = I``: block lower triangular, in pieces."""

    members: list[Generator]
    pieces: list[_Peel | _Rest | _Noise] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Number of columns of F."""
        return sum(span.stop - span.start for _, span in self._spans())

    def _spans(self) -> Iterator[tuple[_Peel | _Rest | _Noise, slice]]:
        start = 0
        for p in self.pieces:
            size = self.members[p.member].features if isinstance(p, _Peel) else p.rank
            yield p, slice(start, start + size)
            start += size

    def project(self, weights: Sequence[Tensor]) -> Tensor:
        """Free matrices, one per member (n, d_member), to one matrix (n, width) in the frame's coordinates.

        It is softly projected on the range, and kept small enough for its Gram matrix to be finite.
        """
        columns = []
        for p in self.pieces:
            if isinstance(p, _Peel):
                columns.append(weights[p.member])
            elif isinstance(p, _Rest):
                columns.append(torch.cat([weights[m] for m in p.members], -1))
        matrix = torch.cat(columns, -1) if len(columns) > 1 else columns[0]
        largest = torch.linalg.vector_norm(matrix.detach(), torch.inf)
        return self.soften(matrix * (LARGEST / largest).clamp(max=1.0))

    def soften(self, matrix: Tensor) -> Tensor:
        """``matrix P``, (n, width), with the soft projection ``P`` on the range of the stack."""
        parts = [_softened(p, matrix[..., span]) for p, span in self._spans()]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def harden(self, matrix: Tensor) -> Tensor:
        """``matrix P^{-1}``, as far as ``P`` can be inverted: ``soften(harden(X)) = X`` for X in the range."""
        parts = []
        for p, span in self._spans():
            eye = torch.eye(span.stop - span.start, dtype=matrix.dtype, device=matrix.device)
            soft = _softened(p, eye)
            share = torch.finfo(matrix.dtype).eps
            inverse = torch.linalg.solve(soft @ soft + share * eye, soft)
            parts.append(matrix[..., span] @ inverse)
        return torch.cat(parts, -1)

    def lift(self, matrix: Tensor) -> list[Tensor]:
        """Free matrices with ``project(lift(U)) = U`` for U in the range."""
        matrix = self.harden(matrix)
        out: list[Tensor] = [matrix] * len(self.members)
        for p, span in self._spans():
            piece = matrix[..., span]
            if isinstance(p, _Peel):
                out[p.member] = piece
            elif isinstance(p, _Rest):
                for m, part in zip(
                    p.members, piece.split([self.members[m].features for m in p.members], -1), strict=True
                ):
                    out[m] = part
        return out

    def apart(self, contracted: Contracted, rows: Tensor) -> list[Tensor] | None:
        """``diag(rows) U F^{-1}`` for a single member, not multiplied out; None where that does not pay."""
        piece = self.pieces[0]
        if len(self.pieces) > 1 or not isinstance(piece, _Peel) or isinstance(piece.square.root, IdentityRoot):
            return None
        square = piece.square
        dense = lambda: square.right_divide(contracted.matrix, rows)  # noqa: E731
        return [FactoredWeight(contracted.shape, square.divide, contracted.product, dense, rows)]

    def right_divide(self, matrix: Tensor, rows: Tensor | None = None) -> list[Tensor]:
        """``diag(rows) X`` with ``X F = matrix``, one (n, d_member) per member, by block back-substitution."""
        if len(self.pieces) == 1 and isinstance(self.pieces[0], _Peel):
            return [self.pieces[0].square.right_divide(matrix, rows)]
        if rows is not None:
            matrix = rows[:, None] * matrix
        out: dict[int, Tensor] = {}
        for p, span in reversed(list(self._spans())):
            rhs = matrix[..., span]
            if isinstance(p, _Rest):
                stacked = torch.linalg.solve_triangular(p.upper.mH, rhs, upper=False, left=False)
                sizes = [self.members[m].features for m in p.members]
                out.update(zip(p.members, stacked.split(sizes, -1), strict=True))
            elif isinstance(p, _Peel):
                for m, x in out.items():
                    if p.block in self.members[m].blocks:
                        rhs = rhs - x @ self.members[m].flat(p.block).mH
                out[p.member] = p.square.right_divide(rhs, None)
        return [out[m] for m in range(len(self.members))]

    def multiply(self, weights: Sequence[Tensor]) -> Tensor:
        """``C F`` (n, width) for explicit maps C, one (n, d_member) per member: the inverse of :meth:`right_divide`."""
        columns = []
        for p in self.pieces:
            if isinstance(p, _Rest):
                columns.append(torch.cat([weights[m] for m in p.members], -1) @ p.upper.mH)
            elif isinstance(p, _Peel):
                terms = [
                    w @ g.flat(p.block).mH for w, g in zip(weights, self.members, strict=True) if p.block in g.blocks
                ]
                columns.append(torch.stack(terms).sum(0))
        return torch.cat(columns, -1)

    def coordinates(self, gen: Generator) -> Tensor | None:
        """``Q F_t^*`` (width, features), or None where the tensor is independent of the stack."""
        parts: list[Tensor | int] = []  # an int: so many rows of zeros
        for p, span in self._spans():
            if not any(b in gen.blocks for b in p.blocks):
                parts.append(span.stop - span.start)
            elif isinstance(p, _Rest) and p.basis is not None:
                parts.append(sum_blocks(gen, p.blocks, p.basis))
            elif isinstance(p, _Rest):
                parts.append(gen.flat(p.blocks[0])[..., : p.rank, :])
            else:
                parts.append(gen.flat(p.blocks[0]) if len(p.blocks) == 1 else _stacked([gen], p.blocks))
        like = next((part for part in parts if isinstance(part, Tensor)), None)
        if like is None or len(parts) == 1:
            return like
        lead, features = like.shape[:-2], like.shape[-1]
        return torch.cat([like.new_zeros(*lead, p, features) if isinstance(p, int) else p for p in parts], -2)

    def noise(self, matrix: Tensor) -> tuple[dict[int, Tensor], list[Tensor]]:
        """The generator of ``matrix · ξ_frame``, (n,) features: by noise block (q_b, n), and on the floor's noise."""
        out: dict[int, Tensor] = {}
        floor: list[Tensor] = []
        sizes = self.members[0].sizes
        for p, span in self._spans():
            part = matrix[..., span]
            if isinstance(p, _Peel):
                out[p.block] = part.mH
            elif isinstance(p, _Rest) and p.basis is None:
                (b,) = p.blocks
                out[b] = torch.nn.functional.pad(part.mH, (0, 0, 0, sizes[b] - p.rank))
            else:
                if isinstance(p, _Rest):
                    floor.append(p.noise @ part.mH)
                    part = part @ p.basis.mH  # type: ignore[union-attr]
                for b, x in zip(p.blocks, part.split([sizes[b] for b in p.blocks], -1), strict=True):
                    out[b] = x.mH
        return out, floor

    def noise_rows(self, gen: Generator) -> Tensor:
        """``F`` (features, Σ q_b) of a tensor on the noise of the frame."""
        blocks = [b for p in self.pieces for b in p.blocks]
        return _stacked([gen], blocks).mH


def _softened(piece: _Peel | _Rest | _Noise, x: Tensor) -> Tensor:
    """``x P`` for the columns of one piece."""
    if isinstance(piece, _Peel):
        return piece.square.soften(x)
    return (x @ piece.signal.mH) @ piece.signal if isinstance(piece, _Rest) else x


def noise_frame(gen: Generator) -> Frame:
    """The frame of the noise itself (F = I) on the blocks of one tensor."""
    blocks = sorted(gen.blocks)
    return Frame([gen], [_Noise(blocks, sum(gen.sizes[b] for b in blocks))])


def _partition(members: Sequence[Generator]) -> tuple[list[tuple[int, int]], list[int], list[int]]:
    """Which members can be peeled (in order, with their block), which cannot, and the noise blocks of the latter."""
    remaining = {i: set(g.blocks) for i, g in enumerate(members)}
    peeled: list[tuple[int, int]] = []
    progress = True
    while progress:
        progress = False
        for i in reversed(list(remaining)):
            if len(remaining[i]) != 1:
                continue
            (b,) = remaining[i]
            # Peeling must leave every other member something of its own, or it would have no direction left.
            if not isinstance(members[i].blocks[b], Square) or any(remaining[j] == {b} for j in remaining if j != i):
                continue
            peeled.append((i, b))
            del remaining[i]
            for left in remaining.values():
                left.discard(b)
            progress = True
            break
    rest = sorted(remaining)
    blocks = sorted({b for i in rest for b in remaining[i]})
    return peeled, rest, blocks


def _stacked(gens: Sequence[Generator], blocks: list[int]) -> Tensor:
    """``F^*`` of stacked tensors on these blocks: (Σ q_b, Σ features)."""
    like = next(g.flat(b) for g in gens for b in blocks if b in g.blocks)
    rows = []
    for b in blocks:
        q = gens[0].sizes[b]
        zero = (*like.shape[:-2], q)
        rows.append(torch.cat([g.flat(b) if b in g.blocks else like.new_zeros(*zero, g.features) for g in gens], -1))
    return torch.cat(rows, -2)


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


def factor(
    members: Sequence[Generator],
    others: Sequence[Generator],
    new_block: Callable[[int], int],
    unit: float,
) -> tuple[Frame, dict[int, Tensor], list[int]]:
    """The square factor of stacked members.

    Members whose remaining generator is a square block need no factorisation. The rest gets one floored QR (see
    above). Where its noise has more dimensions than all live tensors that see it have features, the same QR writes them
    all on as many dimensions, floor included: noise must not grow with the depth.

    Args:
        members: The stacked tensors, features flattened.
        others: The other live tensors that are read later.
        new_block: Makes a noise block of a given size.
        unit: Rounding unit of the stored parameters.

    Returns:
        The factor; what replaces the blocks of members and others (index in ``[*members, *others]`` -> its part of the
        new block), empty where nothing is to be replaced; and the blocks that are replaced. The frame knows already.
    """
    peeled, rest, blocks = _partition(members)
    frame = Frame(list(members))
    for i, b in peeled:
        square = members[i].blocks[b]
        assert isinstance(square, Square)
        frame.pieces.append(_Peel(i, b, square))
    if not rest:
        return frame, {}, []
    count = len(members)
    touched = [count + i for i, g in enumerate(others) if any(b in g.blocks for b in blocks)]
    everyone = [*members, *others]
    inner = sum(members[i].features for i in rest)
    noise = sum(members[0].sizes[b] for b in blocks)
    compress = noise > inner + sum(everyone[i].features for i in touched)
    columns = [*rest, *touched] if compress else rest
    q1, q2, upper = floored_qr([everyone[i] for i in columns], blocks, unit)
    own = q1[..., :inner]
    piece = _Rest(rest, blocks, own, upper[..., :inner, :inner], own, q2[..., :inner, :inner])
    frame.pieces.append(piece)
    if not compress:
        return frame, {}, []
    parts = upper.split([everyone[i].features for i in columns], -1)
    piece.basis, piece.blocks = None, [new_block(upper.shape[-1])]
    return frame, dict(zip(columns, parts, strict=True)), blocks


def floored_qr(gens: Sequence[Generator], blocks: list[int], unit: float) -> tuple[Tensor, Tensor, Tensor]:
    """``Q_1`` (q, d), ``Q_2`` (d, d) and ``R`` (d, d) of stacked tensors on these blocks, with the floor."""
    stack = _stacked(gens, blocks)
    share = floor_share(unit)
    size = torch.cat([g.magnitude() for g in gens])
    size = torch.maximum(size, share * size.max()) + smallest(unit)
    floor = torch.diag_embed(share * size).to(stack.dtype)
    floor = floor if stack.ndim == 2 else floor.expand(len(stack), -1, -1)
    rotation, upper = positive_qr(torch.cat([stack, floor], -2))
    return rotation[..., : stack.shape[-2], :], rotation[..., stack.shape[-2] :, :], upper


def squared(gen: Generator, block: int, unit: float) -> Generator:
    """A tensor that shares its noise with no other live tensor, in a noise basis of its own: a square generator.

    Args:
        gen: The tensor.
        block: Name of the new noise block; its size must be known already.
        unit: As in :func:`factor`.
    """
    signal, _, upper = floored_qr([gen], sorted(gen.blocks), unit)
    ones = torch.ones(gen.features, dtype=upper.real.dtype, device=upper.device)
    blocks: dict[int, Tensor | Square] = {block: Square(FlooredRoot(upper, signal), ones)}
    return Generator(gen.shape, blocks, gen.sizes, gen.size, gen.layout)
