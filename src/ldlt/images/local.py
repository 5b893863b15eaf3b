r"""Covariances of images on a torus, frequency by frequency; multipliers that dominate them.

With one multiplier per channel all covariances of a network on a torus are block diagonal in the Fourier basis:
``G(ω)`` (f, n, n) for the ``n`` local features of the live images. Linear nodes act on it by their transfer functions,
a stride is the mean over the frequencies that become one, a vector that is made of an image a sum over all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ldlt.covariance import Covariance, Read
from ldlt.images.grids import Cells, Fold, Layout, _weights, to_cells, transfer
from ldlt.images.torus import Map

__all__ = ["Field", "dominate"]


def dominate(matrix: Tensor, size: Tensor, balance: Tensor, power: int, unit: float, least: float) -> Tensor:
    r"""``d`` (n,) with ``T ≺ diag(d)`` at all frequencies, up to rounding included.

    For ``A = S^{-1}TS^{-1}`` with any diagonal S, row sums of ``|A^m|`` bound ``A^m`` by a diagonal matrix
    (Gershgorin), and its m-th root bounds ``A``, since the root is operator monotone. S are the standard deviations
    over ``balance``. What cancelled in ``T`` counts with its rounding, measured by the magnitudes ``size``.

    Args:
        matrix: ``T`` (f, n, n) or (n, n), Hermitian.
        size: Magnitudes of the features before cancellation (n,).
        balance: ``q`` (n,), positive.
        power: ``m``, a power of two.
        unit: Rounding unit.
        least: Smallest ``d``: the same in every precision, and so large that its inverse has a finite gradient.
    """
    own = matrix.diagonal(dim1=-2, dim2=-1).real
    own = (own if own.ndim == 1 else own.amax(0)).clamp(min=0)
    scale = (own + unit ** (2 / 3) * size.square() + least).sqrt() / balance
    inverse = 1 / scale  # the square of which may overflow in the gradient of a quotient
    found = _scaled(matrix, inverse[:, None] * inverse)
    error = 64 * unit * (size.detach() / scale.detach()).square().sum()
    log, done = matrix.real.new_zeros(()), 1
    while done < power:
        top = found.detach().abs().sum(-1).amax().clamp(min=1e-3)  # what is next to nothing stays so
        found = found / top
        found, done, log = found @ found, 2 * done, 2 * (log + top.log())
    rows = (found.abs().sum(-1) if found.ndim == 2 else found.abs().sum(-1).amax(0)) if power == 1 else _row_sums(found)
    if power > 1:
        rows = (rows + 2 * power * len(scale) ** 1.5 * unit * rows.detach().amax()).clamp(min=1e-15)
    return scale.square() * (rows.pow(1 / power) * (log / power).exp() + error) + least


def _scaled(x: Tensor, factor: Tensor, count: int = 2) -> Tensor:
    """``factor · x`` for a real factor that spreads to it; one of a single term is 1."""
    if count == 1:
        return x
    if not x.is_complex():
        return factor * x
    return torch.view_as_complex(torch.view_as_real(x.resolve_conj()) * (factor[..., None] if factor.ndim else factor))


def _total(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _row_sums(matrix: Tensor) -> Tensor:
    sums = (matrix.real.square() + matrix.imag.square() + 1e-30).sqrt() if matrix.is_complex() else matrix.abs()
    sums = sums.sum(-1)
    return sums if sums.ndim == 1 else sums.amax(0)


@lru_cache
def _aliases(fine: tuple[int, ...], coarse: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """For each frequency of the coarse half spectrum its aliases in the fine one (aliases, f); which to conjugate."""
    half = (*coarse[:-1], coarse[-1] // 2 + 1)
    at = torch.stack(torch.meshgrid(*(torch.arange(n) for n in half), indexing="ij"), -1).reshape(1, -1, len(fine))
    ratio = [f // c for f, c in zip(fine, coarse, strict=True)]
    jump = torch.stack(
        torch.meshgrid(*(torch.arange(r) * c for r, c in zip(ratio, coarse, strict=True)), indexing="ij"), -1
    )
    where = (at + jump.reshape(-1, 1, len(fine))) % torch.tensor(fine)
    upper = where[..., -1] > fine[-1] // 2
    where = torch.where(upper[..., None], (-where) % torch.tensor(fine), where)
    index = torch.zeros(where.shape[:2], dtype=torch.long)
    for i, n in enumerate((*fine[:-1], fine[-1] // 2 + 1)):
        index = index * n + where[..., i]
    return index, upper


@dataclass(frozen=True)
class Field:
    """The joint covariance of live values on a grid of cells.

    Attributes:
        cov: ``G`` in these units, (f, N, N) or (N, N).
        layouts: How each of them lies on the grid.
        sizes: Magnitudes of the features before cancellation, in these units.
        units: What each of them is measured in, so that no square overflows.
        cells: The grid.
    """

    cov: Covariance
    layouts: dict[str, Layout]
    sizes: dict[str, Tensor]
    units: dict[str, Tensor]
    cells: Cells

    @classmethod
    def start(cls, name: str, shape: tuple[int, ...], cells: tuple[int, ...], bound: Tensor) -> Field:
        """The input of that torus shape: ``I/ℓ²``."""
        layout = Layout.of(shape, cells)
        one = torch.ones(layout.features, dtype=bound.dtype, device=bound.device)
        return cls(Covariance.start(name, layout.diagonal(one)), {name: layout}, {name: one}, {name: 1 / bound}, cells)

    def __getitem__(self, name: str) -> Tensor:
        place = self.cov.places[name]
        return self.cov.matrix[..., place, place]

    def keep(self, names: Collection[str]) -> Field:
        """Without the values that nobody reads any more."""
        return replace(self, cov=self.cov.keep([n for n in self.cov.sizes if n in names]))

    def unit(self, names: Collection[str]) -> Tensor:
        """A unit in which none of these values is large."""
        return torch.stack([self.units[n] for n in names]).amax()

    def read(self, maps: Mapping[str, Map]) -> tuple[Read, Tensor, Tensor]:
        """Covariances of the sum of maps of live values, its magnitudes, and its unit."""
        places, matrix, unit = self.cov.places, self.cov.matrix, self.unit(maps)
        share = {p: self.units[p] / unit for p in maps}
        cross = _total([_scaled(m.on(matrix[..., places[p], :]), share[p], len(maps)) for p, m in maps.items()])
        spread = _total([_scaled(m.on(cross[..., places[p]].mH), share[p], len(maps)) for p, m in maps.items()])
        size = torch.stack([share[p].detach() * m.sizes(self.sizes[p]) for p, m in maps.items()])
        return Read(cross, spread), torch.linalg.vector_norm(size, dim=0), unit

    def add(self, name: str, found: tuple[Read, Tensor, Tensor], layout: Layout, keep: Collection[str]) -> Field:
        """Add a linear function of live values, in a unit of its own."""
        read, size, unit = found
        scale = _power_of_two(size.detach())
        read = Read(_scaled(read.cross, 1 / scale), _scaled(read.spread, 1 / scale.square()))
        return self.joined(self.cov.transport(name, read, keep), name, layout, size / scale, unit * scale)

    def joined(self, cov: Covariance, name: str, layout: Layout, size: Tensor, unit: Tensor) -> Field:
        """With another covariance, in which there is one value more."""
        layouts, sizes = {**self.layouts, name: layout}, {**self.sizes, name: size}
        return Field(cov, layouts, sizes, {**self.units, name: unit}, self.cells)

    def thin(self, cells: tuple[int, ...], layouts: Mapping[str, Layout]) -> Field:
        """Keep of every live value the first pixel of each cell of a coarser grid: the mean over aliases."""
        assert self.cells is not None
        index, upper = _aliases(self.cells, cells)
        found = self.cov.matrix[index.to(self.cov.matrix.device)]
        found = torch.where(upper.to(found.device)[..., None, None], found.conj(), found).mean(0)
        return Field(replace(self.cov, matrix=found), {**self.layouts, **layouts}, self.sizes, self.units, cells)

    def coarsen(self, cells: tuple[int, ...]) -> Field:
        """The same values on a coarser grid."""
        if cells == self.cells:
            return self
        assert self.cells is not None
        fold, places = Fold(self.cells, cells), self.cov.places
        rows = []
        for a, pa in places.items():
            parts = (self.layouts[a].parts, *(self.layouts[b].parts for b in places))
            row = [
                fold.both(self.cov.matrix[..., pa, pb], parts[0], q)
                for pb, q in zip(places.values(), parts[1:], strict=True)
            ]
            rows.append(torch.cat(row, -1))
        layouts = {n: self.layouts[n].folded(fold) for n in places}
        sizes = {n: fold.vector(self.sizes[n], self.layouts[n].parts) for n in places}
        cov = Covariance({n: layouts[n].features for n in places}, torch.cat(rows, -2))
        return Field(cov, layouts, sizes, self.units, cells)

    def leave(self, rows: Mapping[str, Mapping[str, Tensor]]) -> Field:
        """Vectors that are made of the images, in place of all of them.

        Args:
            rows: Vector -> image -> matrix (n, *torus shape).
        """
        assert self.cells is not None
        cells, places = self.cells, self.cov.places
        weights = _weights(cells).to(self.cov.matrix.real)[:, None, None]
        spectra, sizes, cross, units = {}, {}, {}, {}
        for name, parts in rows.items():
            unit = self.unit(parts)
            share = {p: self.units[p] / unit for p in parts}
            energy = [
                share[p].detach().square()
                * (to_cells(m.detach(), cells).flatten(2).square().sum(-1) @ self.sizes[p] ** 2)
                for p, m in parts.items()
            ]
            size = torch.stack(energy).sum(0).sqrt()
            scale = _power_of_two(size)
            sizes[name], units[name] = size / scale, unit * scale
            spectra[name] = {
                p: transfer(to_cells(m * (share[p] / scale), cells), cells).conj() for p, m in parts.items()
            }
            cross[name] = torch.stack([x @ self.cov.matrix[..., places[p], :] for p, x in spectra[name].items()]).sum(0)

        def block(first: str, second: str) -> Tensor:
            found = [cross[first][..., places[p]] @ x.mH for p, x in spectra[second].items()]
            return (weights * torch.stack(found).sum(0).real).sum(0)

        matrix = torch.cat([torch.cat([block(a, b) for b in rows], -1) for a in rows], -2)
        counts = {n: len(s) for n, s in sizes.items()}
        layouts = {n: Layout(None, (), c) for n, c in counts.items()}
        return Field(Covariance(counts, (matrix + matrix.mT) / 2), layouts, sizes, units, None)


def _power_of_two(size: Tensor) -> Tensor:
    """What is near the largest entry, and 1 if all are zero."""
    top = size.amax()
    return torch.where(top > 0, top.log2().round().clamp(-60, 60).exp2(), 1.0).nan_to_num(1.0)
