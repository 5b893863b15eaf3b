"""The matrices of a problem of moderate size, densely and in scaled coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ldlt.certificates.pairs import Corners, pair_products
from ldlt.certificates.problem import Problem

__all__ = ["Dense"]


@dataclass(frozen=True, eq=False)
class Dense:
    """The scaled problem, densely: N coordinates, n neurons, m multipliers, k outputs.

    ``Q_0(η) = E + Σ_j η_jA_j``, ``A_j = d_jd_j' − v_jv_j'``, ``d_j = e_j − c_jv_j``, where ``v_j`` is the
    pre-activation times the radius of the slopes, and ``c_j`` their centre divided by it.

    No neuron reads the last layer. If its coordinates are ``w − cv`` instead of ``w`` (``opened``), ``Q_0`` falls apart
    into ``diag(η)`` for them and a matrix of the other N coordinates, which is the one that is meant here: then there
    are no rows ``d`` of the last layer, and its ``c`` is 0.
    """

    inputs: int
    total: int  # N
    tail: int  # coordinates that were left out
    before: tuple[tuple[slice, tuple[tuple[slice, Tensor], ...]], ...]  # V: rows of a layer, then columns and blocks
    output: Tensor  # Y, (k, N)
    end: Tensor  # Y of the coordinates that were left out, (k, tail)
    center: Tensor  # (n,)
    slant: Tensor  # c of the coordinates that were left out, (tail,)
    shared: Tensor
    count: int
    scale: Tensor  # w = ŵ / scale, (n,)
    unit: float  # ŷ = y / unit

    @classmethod
    def build(cls, problem: Problem, multipliers: Tensor, unit: float, *, opened: bool = False) -> Dense:
        """Scale by multipliers Λ: ``η = 1`` stands for them, and ``unit`` for an output of norm one.

        Args:
            problem: The problem.
            multipliers: Λ.
            unit: Norm of the output.
            opened: Leave the last layer out.
        """
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
            steep = scale[here] * layer.radius
            for b, block in layer.inputs.items():
                there = slice(starts[b], starts[b] + sizes[b])
                blocks.append((there, steep[:, None] * block / columns[there]))
            before.append((here, tuple(blocks)))
            row += layer.size
        y = problem.dense(problem.outputs, problem.output) / columns / unit
        center = torch.cat([layer.center / layer.radius for layer in problem.layers])
        tail = problem.layers[-1].size if opened else 0
        y, end = y.split([y.shape[1] - tail, tail], 1)
        slant, center = center[row - tail :], torch.cat([center[: row - tail], torch.zeros(tail, dtype=torch.float64)])
        if tail:
            y, pull = y.clone(), end * slant
            for there, block in before[-1][1]:  # Y_n w = Y_n (cv + (w − cv))
                y[:, there].addmm_(pull, block)
        return cls(
            problem.inputs,
            y.shape[1],
            tail,
            tuple(before),
            y,
            end,
            center,
            slant,
            torch.cat(shared),
            offset,
            scale,
            unit,
        )

    def group(self, each: Tensor) -> Tensor:
        """Sum over the neurons of each multiplier, (n,) -> (m,)."""
        if self.count == each.shape[0]:
            return each
        return torch.zeros(self.count, dtype=torch.float64).index_add_(0, self.shared, each)

    def spread(self, weights: Tensor) -> Tensor:
        """The multiplier of each neuron, (m,) -> (n,)."""
        return weights if self.count == self.shared.shape[0] else weights[self.shared]

    @cached_property
    def product(self) -> Tensor:
        """``c² − 1``, (n,): the product of the slopes divided by r²."""
        return (self.center - 1) * (self.center + 1)

    @cached_property
    def bent(self) -> tuple[bool, ...]:
        """For each layer, whether any ``c² − 1`` is not zero."""
        return tuple(bool(self.product[here].any()) for here, _ in self.before)

    def apply(self, right: Tensor, found: Tensor) -> None:
        """``V right``, into (n, q)."""
        for here, blocks in self.before:
            rows = found[here]
            for i, (there, block) in enumerate(blocks):
                if i:
                    rows.addmm_(block, right[there])
                else:
                    torch.mm(block, right[there], out=rows)

    def lower(self, weights: Tensor) -> Tensor:
        """``Σ_k weights_k A_k`` (N, N), weights (m,): its lower triangle, with anything above it."""
        g, n0, beside = self.spread(weights), self.inputs, self.total - self.inputs
        cross = (g * self.center)[:, None]
        found = torch.zeros(self.total, self.total, dtype=torch.float64)
        for (here, blocks), bent in zip(self.before, self.bent, strict=True):
            rows = found[here.start + n0 : here.stop + n0]
            weight = (g[here] * self.product[here])[:, None] if bent else None
            for there, block in blocks:
                if here.start < beside:
                    rows[:, there].addcmul_(cross[here], block, value=-1.0)
                if weight is None:
                    continue
                for other, second in blocks:
                    if other.start <= there.start:
                        found[there, other].addmm_(block.mT, weight * second)
        found.diagonal()[n0:] += g[:beside]
        return found

    def combine(self, weights: Tensor) -> Tensor:
        """``Σ_k weights_k A_k`` (N, N), weights (m,)."""
        found = self.lower(weights).tril_()
        diagonal = found.diagonal().clone()
        found = found + found.mT
        found.diagonal().sub_(diagonal)
        return found

    def rows(self, right: Tensor) -> Tensor:
        """``F right`` (2n, q), ``F = [d_1, …, d_n, v_1, …, v_n]'``; ``d`` of what was left out is zero."""
        n, m = self.center.shape[0], self.total - self.inputs
        found = torch.empty(2 * n, right.shape[1], dtype=torch.float64)
        self.apply(right, found[n:])
        below = self.center[:m, None], found[n : n + m]
        torch.addcmul(right[self.inputs :], *below, value=-1.0, out=found[:m])
        found[m:n] = 0.0
        return found

    def sums(self, products: Tensor) -> Tensor:
        """``Σ_q (products_dq − products_vq)`` by multiplier, (2n, q) -> (m,)."""
        beside, below = products.sum(1).split(len(self.center))
        return self.group(beside - below)

    def inner(self, left: Tensor, right: Tensor) -> Tensor:
        """``<A_k, left right'>`` for factors (N, q), (m,)."""
        return self.sums(self.rows(left) * self.rows(right))

    @cached_property
    def space(self) -> tuple[Corners, Corners]:
        """Room for the corners of two matrices: to ask for it again and again takes longer than to fill it."""
        return Corners.empty(len(self.center)), Corners.empty(len(self.center))

    def corners(self, matrix: Tensor, found: Corners) -> Corners:
        """The corners of a symmetric M (N, N), into ``found``; zero for ``d`` of what was left out."""
        n, m, half = self.center.shape[0], self.total - self.inputs, self.rows(matrix)
        self.apply(half[n:].mT, found.below)
        self.apply(half[:m].mT, found.cross[:, :m])
        # dMd' = eMd' − c vMd'
        aside = self.center[:m, None], found.cross[:m, :m]
        torch.addcmul(half[:m, self.inputs :].mT, *aside, value=-1.0, out=found.beside[:m, :m])
        if m < n:
            found.cross[:, m:] = 0.0
            found.beside[m:] = 0.0
            found.beside[:m, m:] = 0.0
        return found

    def traces(self, corners: Corners) -> Tensor:
        """``<A_k, M>`` from the corners of M, (m,)."""
        return self.group(corners.traces())

    def system(self, x: Corners, z: Corners) -> Tensor:
        """``H`` (m, m) from the corners of ``X`` and of ``Z^{-1}``."""
        found = pair_products(x, z)
        if self.count < len(self.center):
            found = torch.zeros(self.count, len(found), dtype=torch.float64).index_add_(0, self.shared, found)
            found = torch.zeros(self.count, self.count, dtype=torch.float64).index_add_(1, self.shared, found)
        return found
