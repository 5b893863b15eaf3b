r"""Signals on a periodic grid of cells, and operators that commute with its shifts.

An image ``(c, h, w)`` is read as a signal on a grid of ``(g_1, g_2)`` *cells*, where ``g_1`` divides ``h`` and ``g_2``
divides ``w``: each cell holds ``m = c · h/g_1 · w/g_2`` *local* features, ordered as (channel, row in the cell, column
in the cell). On the grid ``(h, w)`` a cell is a pixel; on the grid ``(1, 1)`` the whole image is one cell and its local
features are the flattened image. A linear operator that commutes with shifts by whole cells,

.. math:: y[i] = \sum_j K[i - j]\, x[j], \qquad \hat y(k) = T(k)\, \hat x(k), \qquad T(k) = \sum_d K[d]
          e^{-2\pi\mathrm{i}\langle k, d/g\rangle} ,

is one complex matrix ``T(k)`` per frequency, its *transfer function* (f, m_out, m_in); ``K`` is real, so half of the
frequencies (those of ``rfftn``) tell everything. Products, adjoints and inverses of operators are those of the
matrices, and by Parseval's theorem the norm of the operator is the largest norm of its matrices.

A signal on a fine grid is one on any coarser grid, with more local features. :class:`Fold` takes transfer functions
from one to the other. A grid of one cell has a single, real frequency: its operators are written as plain matrices
without the leading dimension. That is the representation of vectors, called *dense* (cells ``None``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ldlt.graph.convolution import Cells


def phases(shape: tuple[int, ...], cells: Cells) -> tuple[int, ...]:
    """Pixels of a cell along each dimension, for a tensor (c, *spatial)."""
    return shape[1:] if cells is None else tuple(n // g for n, g in zip(shape[1:], cells, strict=True))


def local(shape: tuple[int, ...], cells: Cells) -> int:
    """Number of local features of a tensor (c, *spatial); a tensor () of one number per sample has one."""
    return math.prod(shape) if cells is None else math.prod((*shape[:1], *phases(shape, cells)))


def to_cells(x: Tensor, cells: tuple[int, ...]) -> Tensor:
    """(b, c, *spatial) to (b, m, *cells)."""
    d, parts = len(cells), phases(tuple(x.shape[1:]), cells)
    if all(p == 1 for p in parts):
        return x
    split = [n for pair in zip(cells, parts, strict=True) for n in pair]
    order = [0, 1, *range(3, 3 + 2 * d, 2), *range(2, 2 + 2 * d, 2)]
    return x.reshape(*x.shape[:2], *split).permute(order).reshape(x.shape[0], -1, *cells)


def from_cells(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """(b, m, *cells) to (b, *shape): the inverse of :func:`to_cells`."""
    cells = tuple(x.shape[2:])
    d, parts = len(cells), phases(shape, cells)
    if all(p == 1 for p in parts):
        return x.reshape(-1, *shape)
    order = [0, 1, *(i for j in range(d) for i in (2 + d + j, 2 + j))]
    return x.reshape(x.shape[0], shape[0], *parts, *cells).permute(order).reshape(-1, *shape)


def impulses(count: int, cells: tuple[int, ...]) -> Tensor:
    """Signals (count, count, *cells) that are one at one local feature of the first cell and zero elsewhere."""
    found = torch.zeros(count, count, math.prod(cells), dtype=torch.float64)
    found[..., 0] = torch.eye(count, dtype=torch.float64)
    return found.reshape(count, count, *cells)


def cell_rows(shape: tuple[int, ...], cells: Cells) -> tuple[Tensor, Tensor]:
    """Cell and local index of every feature of a tensor, (features,) each."""
    count = math.prod(shape)
    if cells is None:
        return torch.zeros(count, dtype=torch.long), torch.arange(count)
    labels = to_cells(torch.arange(count).reshape(1, *shape), cells).reshape(local(shape, cells), -1)
    order = labels.reshape(-1).argsort()  # of the features among (local feature, cell)
    return order % labels.shape[1], order // labels.shape[1]


def transfer(kernels: Tensor, cells: Cells) -> Tensor:
    """``T`` (f, a, b) of kernels ``K`` (a, b, *cells); (a, b) for a single cell."""
    if cells is None:
        return kernels.reshape(kernels.shape[:2])
    found = torch.fft.rfftn(kernels, dim=tuple(range(2, kernels.ndim)))
    return found.flatten(2).permute(2, 0, 1)


def kernel(spectrum: Tensor, cells: tuple[int, ...]) -> Tensor:
    """``K`` (a, b, *cells) of a transfer function (f, a, b)."""
    half = (*cells[:-1], cells[-1] // 2 + 1)
    # A transform of strided numbers takes twice as long as transposing them first.
    stacked = spectrum.flatten(1).T.contiguous().reshape(*spectrum.shape[1:], *half)
    return torch.fft.irfftn(stacked, s=cells, dim=tuple(range(2, 2 + len(cells))))


def apply(spectrum: Tensor, x: Tensor, cells: Cells, shape: tuple[int, ...]) -> Tensor:
    """The operator ``T`` (f, m_out, m_in) on a batch of tensors (b, *in_shape); the result is (b, *shape)."""
    if cells is None:
        return (x.flatten(1) @ spectrum.mT).reshape(-1, *shape)
    y, _ = _Apply.apply(to_cells(x, cells), spectrum)  # type: ignore[misc]
    return from_cells(y, shape)


class _Apply(torch.autograd.Function):
    """``x (b, m, *cells), T (f, n, m) -> y (b, n, *cells), x̂ (f, b, m)``.

    The adjoint of the map is the map of ``T^*``; autograd's own derivative of ``rfftn`` would take a full complex
    transform. With ``w`` the number of times a frequency occurs in the full spectrum, ``T̄ = w/N · ŷ̄^T conj(x̂)``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, spectrum: Tensor) -> tuple[Tensor, Tensor]:
        cells = tuple(x.shape[2:])
        frequencies = transfer(x, cells).contiguous()
        return kernel(frequencies @ spectrum.mT, cells), frequencies

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, spectrum, frequencies = ctx.saved_tensors
        grad = grads[0]
        if grad is None:
            return None, None
        cells = tuple(x.shape[2:])
        back = transfer(grad, cells)
        if torch.is_grad_enabled():  # second derivatives: through operations that autograd knows
            frequencies = transfer(x, cells)
        else:
            back = back.contiguous()
        grad_x = grad_spectrum = None
        if ctx.needs_input_grad[0]:
            grad_x = kernel(back @ spectrum.conj(), cells)
        if ctx.needs_input_grad[1]:
            weights = _weights(cells).to(grad.device, grad.dtype)[:, None, None]
            grad_spectrum = weights * (back.mT @ frequencies.conj())
        return grad_x, grad_spectrum


def operator_norm(spectrum: Tensor) -> Tensor:
    """Norm of the operator: the largest over frequencies; infinite, not an exception, where a number is not finite."""
    finite = spectrum.isfinite().all()
    return torch.where(finite, torch.linalg.matrix_norm(torch.where(finite, spectrum, 0.0), 2).amax(), torch.inf)


def row_norms(spectrum: Tensor, cells: Cells, least: float = 0.0) -> Tensor:
    """Euclidean norms of the rows of the operator, (m_out,): one for all cells; their squares are at least ``least``.

    With a positive ``least`` they are differentiable everywhere.
    """
    energy = spectrum.abs().square().sum(-1)
    if cells is not None:
        energy = (energy * _weights(cells).to(spectrum.device, spectrum.real.dtype)[:, None]).sum(0)
    return (energy + least).sqrt()


@lru_cache
def _weights(cells: tuple[int, ...]) -> Tensor:
    """How often each frequency of the half spectrum occurs in the full one, over the number of cells, (f,)."""
    last = cells[-1]
    twice = torch.full((last // 2 + 1,), 2.0, dtype=torch.float64)
    twice[0] = 1
    if last % 2 == 0:
        twice[-1] = 1
    return (twice / math.prod(cells)).repeat(math.prod(cells[:-1]))


@lru_cache
def _fold_index(fine: int, coarse: int) -> Tensor:
    """``(D s + p − p') mod g`` for (p, p', D): where the fine kernel holds the coarse one's entries."""
    s = fine // coarse
    p = torch.arange(s)
    return (torch.arange(coarse)[None, None, :] * s + p[:, None, None] - p[None, :, None]) % fine


@lru_cache
def _unfold_index(fine: int, coarse: int) -> tuple[Tensor, Tensor]:
    """``p'`` and ``D`` with ``d = D s − p'`` for every fine distance d."""
    s = fine // coarse
    d = torch.arange(fine)
    p = (-d) % s
    return p, (d + p) // s % coarse


@dataclass(frozen=True)
class Fold:
    """From a fine grid to a coarser one, of whose cells each consists of ``P = Π s_i``, ``s_i = fine_i / coarse_i``."""

    fine: tuple[int, ...]
    coarse: Cells

    @property
    def _target(self) -> tuple[int, ...]:
        return (1,) * len(self.fine) if self.coarse is None else self.coarse

    @property
    def ratio(self) -> tuple[int, ...]:
        """``s``."""
        return tuple(f // c for f, c in zip(self.fine, self._target, strict=True))

    @property
    def factor(self) -> int:
        """``P``."""
        return math.prod(self.ratio)

    def vector(self, values: Tensor, parts: tuple[int, ...]) -> Tensor:
        """Local vectors (m,) that are the same in all cells, (mP,); ``parts`` are the phases of the fine cells."""
        spread = values.reshape(-1, *parts, *(1,) * len(parts)).expand(-1, *parts, *self.ratio)
        return _interleave(spread, 0, parts, self.ratio)

    def both(self, spectrum: Tensor, rows: tuple[int, ...], columns: tuple[int, ...]) -> Tensor:
        """An operator between fine signals, (f, a, b) to (F, aP, bP); ``rows`` and ``columns`` are their phases."""
        return transfer(self._both(kernel(spectrum, self.fine), rows, columns), self.coarse)

    def unrolled(self, kernels: Tensor, rows: tuple[int, ...], columns: tuple[int, ...]) -> Tensor:
        """The matrix (aP, bP) of an operator with these kernels (a, b, *fine), for a coarse grid of one cell."""
        return self._both(kernels, rows, columns).reshape(len(kernels) * self.factor, -1)

    def _both(self, kernels: Tensor, rows: tuple[int, ...], columns: tuple[int, ...]) -> Tensor:
        a, b = kernels.shape[:2]
        found = self._gather(kernels, slice(None)).reshape(a, self.factor, b * self.factor, *self._target)
        split = found.reshape(-1, *rows, *self.ratio, b * self.factor, *self._target)
        split = _interleave(split, 0, rows, self.ratio)
        split = split.reshape(a * self.factor, -1, *columns, *self.ratio, *self._target)
        return _interleave(split, 1, columns, self.ratio)

    def columns(self, spectrum: Tensor, parts: tuple[int, ...]) -> Tensor:
        """A fine convolution (f, a, b) of which one value per *coarse* cell is kept, the first phase, to (F, a, bP)."""
        found = self._gather(kernel(spectrum, self.fine), slice(0, 1))
        a = spectrum.shape[-2]
        split = found.reshape(a, -1, *parts, *self.ratio, *self._target)
        return transfer(_interleave(split, 1, parts, self.ratio), self.coarse)

    def unfold(self, spectrum: Tensor, parts: tuple[int, ...]) -> Tensor:
        """The inverse of :meth:`columns`: (F, a, bP) to (f, a, b)."""
        a = spectrum.shape[-2]
        target = self._target
        small = spectrum.reshape(a, -1, *target) if self.coarse is None else kernel(spectrum, self.coarse)
        d = len(self.fine)
        mixed = [n for pair in zip(self.ratio, parts, strict=True) for n in pair]
        order = [0, 1, *range(3, 3 + 2 * d, 2), *range(2, 2 + 2 * d, 2), *range(2 + 2 * d, 2 + 3 * d)]
        small = small.reshape(a, -1, *mixed, *target).permute(order).reshape(a, -1, *self.ratio, *target)
        index: list[Tensor] = [torch.empty(0)] * (2 * d)
        for i, (f, c) in enumerate(zip(self.fine, target, strict=True)):
            p, place = _unfold_index(f, c)
            view = [1] * d
            view[i] = f
            index[i], index[d + i] = p.reshape(view).to(small.device), place.reshape(view).to(small.device)
        whole: list[Any] = [slice(None), slice(None)]
        return transfer(small[tuple(whole + index)], self.fine)

    def _gather(self, big: Tensor, rows: slice) -> Tensor:
        """Coarse kernels (a, *p, b, *p', *D) from fine ones."""
        d = len(self.fine)
        index = []
        for i, (f, c) in enumerate(zip(self.fine, self._target, strict=True)):
            table = _fold_index(f, c)[rows]
            view = [1] * (3 * d)
            view[3 * i : 3 * i + 3] = table.shape
            index.append(table.reshape(view).to(big.device))
        whole: list[Any] = [slice(None), slice(None)]
        found = big[tuple(whole + index)]  # (a, b, p_1, p'_1, D_1, p_2, …)
        order = [0, *range(2, 2 + 3 * d, 3), 1, *range(3, 2 + 3 * d, 3), *range(4, 2 + 3 * d, 3)]
        return found.permute(order)


@dataclass(frozen=True)
class Layout:
    """How the features of a tensor lie on a grid."""

    cells: Cells  # None for the dense representation
    parts: tuple[int, ...]  # pixels of a cell along each dimension (phases of the local features); empty if dense
    features: int  # number of local features

    @classmethod
    def of(cls, shape: tuple[int, ...], cells: Cells) -> Layout:
        """The layout of a tensor (c, *spatial), or of any tensor on a grid of one cell."""
        return cls(cells, () if cells is None else phases(shape, cells), local(shape, cells))

    def of_count(self, count: int) -> Layout:
        """So many features in no particular order on the same grid."""
        return Layout(self.cells, (1,) * len(self.parts), count)

    def diagonal(self, values: Tensor) -> Tensor:
        """A diagonal matrix, the same at all frequencies."""
        found = torch.diag_embed(values)
        if self.cells is None:
            return found
        frequencies = math.prod(self.cells[:-1]) * (self.cells[-1] // 2 + 1)
        return found.to(found.dtype.to_complex()).expand(frequencies, -1, -1)

    def folded(self, fold: Fold) -> Layout:
        """The layout on the coarser grid."""
        if fold.coarse is None:
            return Layout(None, (), self.features * fold.factor)
        parts = tuple(p * s for p, s in zip(self.parts, fold.ratio, strict=True))
        return Layout(fold.coarse, parts, self.features * fold.factor)


def _interleave(x: Tensor, dim: int, parts: tuple[int, ...], ratio: tuple[int, ...]) -> Tensor:
    """Dimensions ``(…, c, *parts, *ratio, …)`` from ``dim`` on to one, ordered (c, ratio_1, parts_1, ratio_2, …)."""
    d = len(parts)
    start = dim + 1
    inner = [i for j in range(d) for i in (start + d + j, start + j)]
    moved = x.permute([*range(start), *inner, *range(start + 2 * d, x.ndim)])
    return moved.reshape(*x.shape[:dim], -1, *x.shape[start + 2 * d :])
