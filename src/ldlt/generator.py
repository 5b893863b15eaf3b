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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ldlt.contraction import Contracted, FoldedRoot, IdentityRoot, Root, UpperRoot
from ldlt.factored import FactoredWeight
from ldlt.grid import Fold, Layout
from ldlt.triangular import positive_qr, scale_both

__all__ = [
    "Frame",
    "FrameChoice",
    "Generator",
    "Square",
    "UnevenRankError",
    "choose_frame",
    "combine",
    "factor",
    "linear",
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

    def coarse(self, fold: Fold, noise: tuple[int, ...], parts: tuple[int, ...]) -> Square:
        """The same block on a coarser grid, for noise and features with these phases."""
        if isinstance(self.root, IdentityRoot) and noise == parts:
            root: Root = self.root.coarse(fold)
        else:
            root = FoldedRoot(self.root, fold, noise, parts)
        return Square(root, fold.vector(self.scale, parts))


@dataclass
class Generator:
    """``F_t^*`` of one tensor, block by block.

    Attributes:
        shape: Feature shape of the tensor (no batch dimension).
        blocks: Noise block -> ``F^*`` of that block, (q_b, *shape), or a :class:`Square` one (features flattened). On a
            grid (f, q_b, m).
        sizes: Noise block -> q_b; shared by all generators of a sweep.
        layout: How the features lie on a grid; None for the dense representation.
    """

    shape: tuple[int, ...]
    blocks: dict[int, Tensor | Square]
    sizes: dict[int, int]
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
            return Generator(shape, self.blocks, self.sizes, self.layout)
        blocks = {b: v if isinstance(v, Square) else v.reshape(self.sizes[b], *shape) for b, v in self.blocks.items()}
        return Generator(shape, blocks, self.sizes)

    def copy(self) -> Generator:
        """A generator that can get new blocks without changing this one."""
        return Generator(self.shape, dict(self.blocks), self.sizes, self.layout)

    def rows(self, index: Tensor | None) -> Generator:
        """The generator of the flattened (or local) features at ``index`` (all of them for None)."""
        if index is None:
            return self.reshaped((self.features,))
        return self.renewed((len(index),), {b: self.flat(b)[..., index] for b in self.blocks}, len(index))

    def renewed(self, shape: tuple[int, ...], blocks: dict[int, Tensor | Square], features: int) -> Generator:
        """Other features in no particular order on the same grid."""
        layout = self.layout
        if layout is not None:
            layout = Layout(layout.cells, (1,) * len(layout.cells), features)
        return Generator(shape, blocks, self.sizes, layout)

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
        return Generator(self.shape, blocks, sizes, self.layout.folded(fold))


def linear(fn: Callable[..., Tensor], parents: Sequence[Generator], shape: tuple[int, ...]) -> Generator:
    """Generator of ``fn(*parents)`` for a linear ``fn`` on batches."""
    sizes = parents[0].sizes
    blocks: dict[int, Tensor | Square] = {}
    for b in dict.fromkeys(b for p in parents for b in p.blocks):
        like = next(p.flat(b) for p in parents if b in p.blocks)
        args = [p.batch(b) if b in p.blocks else like.new_zeros(sizes[b], *p.shape) for p in parents]
        blocks[b] = fn(*args)
    return Generator(shape, blocks, sizes)


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
    return Generator(shape, blocks, parents[0].sizes, layout)


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
    for gen, matrix in zip(parents, rows, strict=True):
        assert gen.layout is not None
        if matrix is None:
            continue
        wide = fold.unfold(matrix.detach().reshape(count, -1), gen.layout.parts)  # (f, count, m)
        for b in gen.blocks:
            new = fold.columns(wide @ gen.flat(b).mH, noise[b]).mH.reshape(sizes[b], *shape)
            blocks[b] = blocks[b] + new if b in blocks else new  # type: ignore[operator]
    return Generator(shape, blocks, sizes)


def combine(terms: Sequence[tuple[Generator, float]], shape: tuple[int, ...]) -> Generator:
    """Generator of a weighted sum of tensors of one shape; blocks that only one of them has are not copied."""
    blocks: dict[int, Tensor | Square] = {}
    for gen, weight in terms:
        for b in gen.blocks:
            value = gen.batch(b) if weight == 1 else weight * gen.batch(b)
            blocks[b] = blocks[b] + value if b in blocks else value  # type: ignore[operator]
    return Generator(shape, blocks, terms[0][0].sizes, terms[0][0].layout)


@dataclass(frozen=True)
class FrameChoice:
    """What is decided once, from the structure of the graph, about the factor of one stack.

    Attributes:
        rank: Rank of the part of the stack that needs a QR factorisation.
        columns: Independent columns of that part (all of them if it has full rank).
        extra: Independent columns of the other live tensors, as (tensor, column); they join the QR so that the noise
            can be compressed.
        compress: Whether the live tensors are rewritten in the new, smaller noise basis.
    """

    rank: int
    columns: tuple[int, ...]
    extra: tuple[tuple[int, int], ...] = ()
    compress: bool = False


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
    """The members that need a QR factorisation of their stacked blocks."""

    members: list[int]
    blocks: list[int]
    basis: Tensor | None  # (q, r): noise of the blocks -> frame; None for the identity
    compressor: Tensor | None  # orthonormal (q, r + e): a smaller basis for all live tensors; None if there is none
    rank: int
    upper: Tensor | None  # R (r, r), F = R^* (or, with range, F = range R^*); None for the identity
    range: Tensor | None  # orthonormal columns (d, r) where the stack has no full rank


@dataclass
class Frame:
    """A factor ``F`` of stacked members, ``F_K = F Q``, ``QQ^* = I``: block lower triangular, in pieces."""

    members: Sequence[Generator]
    pieces: list[_Peel | _Rest] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Number of columns of F."""
        return sum(p.rank if isinstance(p, _Rest) else self.members[p.member].features for p in self.pieces)

    def _spans(self) -> Iterator[tuple[_Peel | _Rest, slice]]:
        start = 0
        for p in self.pieces:
            size = p.rank if isinstance(p, _Rest) else self.members[p.member].features
            yield p, slice(start, start + size)
            start += size

    def project(self, weights: Sequence[Tensor]) -> Tensor:
        """Free matrices, one per member (n, d_member), to one matrix (n, width) in the frame's coordinates."""
        columns = []
        for p in self.pieces:
            if isinstance(p, _Peel):
                columns.append(weights[p.member])
            else:
                stacked = torch.cat([weights[m] for m in p.members], -1)
                columns.append(stacked if p.range is None else stacked @ p.range)
        return torch.cat(columns, -1) if len(columns) > 1 else columns[0]

    def lift(self, matrix: Tensor) -> list[Tensor]:
        """Free matrices with ``project(lift(U)) = U``."""
        out: list[Tensor] = [matrix] * len(self.members)
        for p, span in self._spans():
            piece = matrix[..., span]
            if isinstance(p, _Peel):
                out[p.member] = piece
            else:
                piece = piece if p.range is None else piece @ p.range.mH
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
                assert p.upper is not None
                stacked = torch.linalg.solve_triangular(p.upper.mH, rhs, upper=False, left=False)
                if p.range is not None:
                    stacked = stacked @ p.range.mH
                sizes = [self.members[m].features for m in p.members]
                out.update(zip(p.members, stacked.split(sizes, -1), strict=True))
            else:
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
                assert p.upper is not None
                stacked = torch.cat([weights[m] for m in p.members], -1)
                stacked = stacked if p.range is None else stacked @ p.range
                columns.append(stacked @ p.upper.mH)
                continue
            terms = [w @ g.flat(p.block).mH for w, g in zip(weights, self.members, strict=True) if p.block in g.blocks]
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
            else:
                parts.append(gen.flat(p.blocks[0]) if len(p.blocks) == 1 else _stacked([gen], p.blocks))
        like = next((part for part in parts if isinstance(part, Tensor)), None)
        if like is None or len(parts) == 1:
            return like
        lead, features = like.shape[:-2], like.shape[-1]
        return torch.cat([like.new_zeros(*lead, p, features) if isinstance(p, int) else p for p in parts], -2)

    def noise(self, matrix: Tensor) -> dict[int, Tensor]:
        """``Q^* matrix^*`` by noise block: the generator (q_b, n) of ``matrix · ξ_frame``."""
        out: dict[int, Tensor] = {}
        for p, span in self._spans():
            part = matrix[..., span]
            if isinstance(p, _Peel):
                out[p.block] = part.mH
                continue
            if p.basis is not None:
                part = part @ p.basis.mH
            sizes = self.members[0].sizes
            for b, x in zip(p.blocks, part.split([sizes[b] for b in p.blocks], -1), strict=True):
                out[b] = x.mH
        return out

    def noise_rows(self, gen: Generator) -> Tensor:
        """``F`` (features, Σ q_b) of a tensor on the noise of the frame."""
        blocks = [b for p in self.pieces for b in p.blocks]
        return _stacked([gen], blocks).mH

    def compression(self) -> tuple[list[int], Tensor] | None:
        """Noise blocks that may be replaced by one, and the basis to do it with."""
        for p in self.pieces:
            if isinstance(p, _Rest) and p.compressor is not None:
                return p.blocks, p.compressor
        return None


def noise_frame(gen: Generator) -> Frame:
    """The frame of the noise itself (F = I) on the blocks of one tensor."""
    blocks = sorted(gen.blocks)
    rank = sum(gen.sizes[b] for b in blocks)
    return Frame([gen], [_Rest([0], blocks, None, None, rank, None, None)])


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
    members: Sequence[Generator], choice: FrameChoice | None, others: Sequence[Generator] = (), floor: float = 0.0
) -> Frame:
    """The square factor of stacked members.

    Args:
        members: The stacked tensors, features flattened.
        choice: Decision of :func:`choose_frame` for this place of the graph; None if no QR is needed.
        others: The other live tensors, in the order of the sweep.
        floor: Share of its size by which the noise of every feature in a QR factorisation is raised.
    """
    peeled, rest, blocks = _partition(members)
    frame = Frame(members)
    for i, b in peeled:
        square = members[i].blocks[b]
        assert isinstance(square, Square)
        frame.pieces.append(_Peel(i, b, square))
    if not rest:
        return frame
    assert choice is not None
    stack = _stacked([members[i] for i in rest], blocks)
    full = choice.rank == stack.shape[-1]
    frame.pieces.append(_rest(stack, choice, full, rest, blocks, others, floor))
    return frame


def _rest(
    stack: Tensor,
    choice: FrameChoice,
    full: bool,
    rest: list[int],
    blocks: list[int],
    others: Sequence[Generator],
    floor: float,
) -> _Rest:
    """Factor of the part of a stack that needs a QR factorisation."""
    # What follows divides by the factor. A map inside the graph may have come close to losing rank, and a direction
    # below the rounding errors would be divided by noise. So every feature gets independent noise, a share ``floor`` of
    # its size: a larger covariance is always safe (the form is monotone in it), and for a well-conditioned stack the
    # change is below rounding.
    rank = choice.rank
    if full and not choice.compress:
        rotation, raised = _raised(stack, floor)
        return _Rest(rest, blocks, rotation, None, rank, raised, None)
    basis: Tensor | None = None
    if full or rank < stack.shape[-2] or choice.extra:
        columns = stack if full else stack[..., list(choice.columns)]
        if choice.extra:
            pool = [_stacked([others[t]], blocks)[..., [c]] for t, c in choice.extra]
            columns = torch.cat([columns, *pool], -1)
        basis, upper = positive_qr(columns)
        upper = upper[..., :rank, :rank]
    range_ = None
    if not full:
        inner = stack if basis is None else basis[..., :rank].mH @ stack
        range_, triangle = positive_qr(inner.mH)  # F = range · triangle
        upper = triangle.mH
    turn, raised = _raised(upper, floor)
    wide = turn if basis is None else basis[..., :rank] @ turn
    return _Rest(rest, blocks, wide, basis, rank, raised, range_)


def _raised(stack: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """``B`` and ``R`` with ``stack = B R`` and ``R^*R = stack^* stack + floor² diag(column norms)²``."""
    size = torch.linalg.vector_norm(stack, dim=-2).detach()
    noise = torch.diag_embed(floor * size).to(stack.dtype)
    rotation, upper = positive_qr(torch.cat([stack, noise], -2))
    return rotation[..., : stack.shape[-2], :], upper


def squared(gen: Generator, block: int, floor: float) -> Generator | None:
    """The tensor in a noise basis of its own, in which its generator is square; None without full rank.

    Args:
        gen: A tensor on a grid that shares its noise with no other live tensor.
        block: Name of the new noise block; its size must be known already.
        floor: As in :func:`factor`.
    """
    blocks = sorted(gen.blocks)
    stack = _stacked([gen], blocks)
    if stack.shape[-2] < stack.shape[-1]:
        return None
    _, upper = _raised(stack, floor)
    ones = torch.ones(gen.features, dtype=upper.real.dtype, device=upper.device)
    return Generator(gen.shape, {block: Square(UpperRoot(upper), ones)}, gen.sizes, gen.layout)


def _independent(matrix: Tensor, given: Tensor, limit: int) -> list[int]:
    """Columns of ``matrix`` that are independent of ``given`` and of each other, by pivoted Gram–Schmidt."""
    if not matrix.numel():
        return []
    work = matrix.clone()
    norms = torch.linalg.vector_norm(matrix, dim=0)
    scale = norms.clamp_min(
        max(1e-8 * float(norms.max()), torch.finfo(matrix.dtype).tiny)
    )  # what cancels is not independent
    if given.shape[1]:
        base, _ = torch.linalg.qr(given)
        for _ in range(2):
            work = work - base @ (base.mH @ work)
    if float(torch.linalg.vector_norm(work, dim=0).div(scale).max()) < 1e-8:
        return []
    if matrix.shape[1] <= limit:  # all of them, most of the time
        diagonal = torch.linalg.qr(work / scale, mode="r").R.diagonal().abs()
        if float(diagonal.min()) > 1e-6:
            return list(range(matrix.shape[1]))
    chosen: list[int] = []
    while len(chosen) < limit:
        norms = torch.linalg.vector_norm(work, dim=0) / scale
        best = int(norms.argmax())
        if float(norms[best]) < 1e-8:
            break
        chosen.append(best)
        direction = work[:, best] / torch.linalg.vector_norm(work[:, best])
        for _ in range(2):
            work = work - torch.outer(direction, direction.conj() @ work)
    return sorted(chosen)


def choose_frame(members: Sequence[Generator], others: Sequence[Generator]) -> FrameChoice | None:
    """Decide rank, columns and compression from generators at a random point, in float64.

    The rank of a stack is a property of the graph: it holds for all parameters but a set of measure zero.

    Raises:
        UnevenRankError: The rank is not the same at all frequencies of the grid.
    """
    _, rest, blocks = _partition(members)
    if not rest:
        return None
    whole = _stacked([members[i] for i in rest], blocks)
    stack = _typical(whole)
    q, d = stack.shape
    columns = _independent(stack, stack[:, :0], min(q, d))
    _require_even(whole, columns)
    extra: list[tuple[int, int]] = []
    basis = whole[..., columns]
    touched = [(t, g) for t, g in enumerate(others) if any(b in g.blocks for b in blocks)]
    for t, g in touched:
        matrix = _stacked([g], blocks)
        new = _independent(_typical(matrix), _typical(basis), q - basis.shape[-1])
        extra += [(t, c) for c in new]
        basis = torch.cat([basis, matrix[..., new]], -1)
        if matrix.ndim > 2:
            _require_even(torch.cat([basis, matrix], -1), list(range(basis.shape[-1])))
    compress = basis.shape[-1] < q
    return FrameChoice(len(columns), tuple(columns), tuple(extra) if compress else (), compress)


class UnevenRankError(Exception):
    """A stack of tensors has another rank at some frequencies than at others."""


def _typical(stack: Tensor) -> Tensor:
    """The matrix of one frequency that is neither constant nor alternating, if there is one."""
    return stack if stack.ndim == 2 else stack[min(1, len(stack) - 1)]


def _require_even(stack: Tensor, columns: list[int]) -> None:
    """Refuse a stack (f, q, d) whose chosen columns are not a basis of its range at every frequency."""
    if stack.ndim == 2:
        return
    size = torch.linalg.vector_norm(stack, dim=-2, keepdim=True)
    scaled = stack / size.clamp_min(1e-8 * float(size.max()))
    if not columns:
        left, smallest = scaled, 1.0
    else:
        base, upper = torch.linalg.qr(scaled[..., columns])
        smallest = float(upper.diagonal(dim1=-2, dim2=-1).abs().min())
        left = scaled - base @ (base.mH @ scaled)
    if smallest < 1e-6 or float(left.abs().max()) > 1e-6:
        raise UnevenRankError
