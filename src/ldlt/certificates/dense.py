"""The matrices of a problem of moderate size, densely and in scaled coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ldlt.certificates.pairs import Corners, pair_products, shifted
from ldlt.certificates.problem import Problem

__all__ = ["Dense"]


@dataclass(frozen=True, eq=False)
class Dense:
    """The scaled problem, densely: N coordinates, n neurons, m multipliers, k outputs.

    ``Q_0(η) = E + Σ_j η_j((e_j − c_jv_j)(e_j − c_jv_j)' − r_j²v_jv_j')``.
    """

    inputs: int
    total: int
    before: tuple[tuple[slice, tuple[tuple[slice, Tensor], ...]], ...]  # V: rows of a layer, then columns and blocks
    output: Tensor  # Y, (k, N)
    center: Tensor
    radius: Tensor
    shared: Tensor
    count: int
    scale: Tensor  # w = ŵ / scale, (n,)
    unit: float  # ŷ = y / unit

    @classmethod
    def build(cls, problem: Problem, multipliers: Tensor, unit: float) -> Dense:
        """Scale by multipliers Λ: ``η = 1`` stands for them, and ``unit`` for an output of norm one."""
        sizes, starts = problem.sizes, problem.offsets
        offset, shared, parts = 0, [], problem.split(multipliers)
        for layer in problem.layers:
            shared.append(layer.shared + offset)
            offset += layer.count
        scale = torch.cat([(2 * parts[layer.name][layer.shared]).sqrt() for layer in problem.layers])
        columns = torch.cat([torch.ones(problem.inputs, dtype=torch.float64), scale])
        before, row = [], 0
        for layer in problem.layers:
            here, blocks = slice(row, row + layer.size), []
            for b, block in layer.inputs.items():
                there = slice(starts[b], starts[b] + sizes[b])
                blocks.append((there, scale[here, None] * block / columns[there]))
            before.append((here, tuple(blocks)))
            row += layer.size
        y = problem.dense(problem.outputs, problem.output)
        return cls(
            problem.inputs,
            y.shape[1],
            tuple(before),
            y / columns / unit,
            torch.cat([layer.center for layer in problem.layers]),
            torch.cat([layer.radius for layer in problem.layers]),
            torch.cat(shared),
            offset,
            scale,
            unit,
        )

    def group(self, each: Tensor) -> Tensor:
        """Sum over the neurons of each multiplier, (n,) -> (m,)."""
        return torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.shared, each)

    @property
    def product(self) -> Tensor:
        """``c² − r²``, (n,)."""
        return (self.center - self.radius) * (self.center + self.radius)

    def apply(self, right: Tensor) -> Tensor:
        """``V right``, (n, q)."""
        found = torch.zeros(len(self.center), right.shape[1], dtype=torch.float64)
        for here, blocks in self.before:
            for there, block in blocks:
                found[here] += block @ right[there]
        return found

    def combine(self, weights: Tensor) -> Tensor:
        """``Σ_k weights_k A_k`` (N, N), weights (m,)."""
        g, n0 = weights[self.shared], self.inputs
        cross, bent = g * self.center, g * self.product
        found = torch.zeros(self.total, self.total, dtype=torch.float64)
        for here, blocks in self.before:
            rows = slice(here.start + n0, here.stop + n0)
            for there, block in blocks:
                part = cross[here, None] * block
                found[rows, there] -= part
                found[there, rows] -= part.T
                if bool(bent[here].any()):
                    for other, second in blocks:
                        found[there, other] += block.T @ (bent[here, None] * second)
        found.diagonal()[n0:] += g
        return found

    def form(self, eta: Tensor) -> Tensor:
        """``Q_0(η)``, (N, N)."""
        found = self.combine(eta)
        found.diagonal()[: self.inputs] += 1.0
        return found

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """``<A_k, left right'>`` for factors (N, q), (m,)."""
        a, b = left[self.inputs :], right[self.inputs :]
        va, vb = self.apply(left), self.apply(right)
        c = self.center[:, None]
        return self.group(((a - c * va) * (b - c * vb)).sum(1) - self.radius**2 * (va * vb).sum(1))

    def corners(self, matrix: Tensor) -> Corners:
        """Products ``F_k'MF_l`` of a symmetric M, see :data:`~ldlt.certificates.pairs.Corners`."""
        n0 = self.inputs
        mixed = self.apply(matrix)  # V M
        return shifted(self.center, matrix[n0:, n0:], mixed[:, n0:].T, self.apply(mixed.T.contiguous()))

    def traces(self, matrix: Tensor) -> Tensor:
        """``<A_k, M>`` for a symmetric M, (m,)."""
        mixed = self.apply(matrix)
        after = torch.zeros_like(self.center)
        for here, blocks in self.before:
            for there, block in blocks:
                after[here] += (mixed[here, there] * block).sum(1)
        own = matrix.diagonal()[self.inputs :]
        return self.group(own - 2 * self.center * mixed[:, self.inputs :].diagonal() + self.product * after)

    def system(self, x: Corners, z: Corners) -> Tensor:
        """``H`` (m, m) from the corners of ``X`` and ``Z^{-1}``."""
        found, c = pair_products(self.radius, x, z), self.center
        if self.count < len(c):
            found = torch.zeros(self.count, len(c), dtype=torch.float64).index_add_(0, self.shared, found)
            found = torch.zeros(self.count, self.count, dtype=torch.float64).index_add_(1, self.shared, found)
        return found
