r"""The quadratic form of a stored network, with error bounds.

.. math::

    z'P(Λ, ℓ^2)z = ℓ^2\|x\|^2 + \sum_i 2\sum_j Λ_{ij}(w_{ij} - m_{ij}v_{ij})(w_{ij} - L_{ij}v_{ij}), \qquad
    M(G) = \begin{pmatrix} P & Y' \\ Y & G \end{pmatrix}.

**What M(G) ⪰ 0 means.** For two inputs, let ``z`` be the difference of the coordinates and ``Δy = Yz``. Each product
``(w − mv)(w − Lv)`` is not positive by the definition of a slope (for a group that is mixed: their sum
``‖w − cv‖² − r²‖v‖²`` is not, with one multiplier for the group), so ``z'Pz ≤ ℓ²‖Δx‖²``. If ``M(G) ⪰ 0`` then for all
``a`` and real ``t``

.. math:: 0 \le (z, -ta)'M(G)(z, -ta) = z'Pz - 2t\,a'Yz + t^2\,a'Ga ,

hence the discriminant is not positive:

.. math:: (a'Δy)^2 \le a'Ga \cdot z'Pz \le a'Ga\; ℓ^2 \|Δx\|^2 .

So every direction ``a`` of the output has the constant ``ℓ√(a'Ga)`` at once, the pair ``a = e_c − e_j`` in particular;
and with ``G = I``, choosing ``a = Δy``, the network is ℓ-Lipschitz. No inverse and no product ``Y'Y`` is needed. By
the Schur complement ``M(I) ⪰ 0`` iff ``Q = P − Y'Y ⪰ 0``, the inequality of :mod:`ldlt.lmi`; and if ``P ≻ 0``, then
``M(G) ⪰ 0`` iff ``G ⪰ YP^{-1}Y'``, so the best ``G`` for these multipliers is ``YP^{-1}Y'``.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ldlt.certificates.ball import Array, Ball, add_up
from ldlt.certificates.linear import Network

__all__ = ["bordered"]


def bordered(network: Network, multipliers: Mapping[str, Array], bound: float, gram: Array) -> Ball:
    """``M(G)``, (N + k, N + k), lower triangle.

    Args:
        network: The network.
        multipliers: ``Λ`` by activation, (features,); positive where a neuron is a coordinate.
        bound: ℓ.
        gram: ``G`` (k, k), symmetric, exact.
    """
    starts, total = {}, 0
    for name, size in network.sizes.items():
        starts[name], total = total, total + size
    matrix = _Accumulator(total + network.outputs, {n: slice(s, s + network.sizes[n]) for n, s in starts.items()})
    ell = Ball.exact(bound)
    matrix.diagonal(network.graph.input.name, (ell * ell).mid, (ell * ell).radius)
    for name, inputs in network.inputs.items():
        kept = network.kept[name]
        weight = Ball.exact(2 * multipliers[name][kept])  # doubling is exact
        slopes = network.slopes[name]
        matrix.diagonal(name, weight.mid, weight.radius)
        cross = Ball.exact(-multipliers[name][kept]) * slopes.total[kept]
        square = weight * slopes.product[kept]
        flat = not square.magnitude.any()
        for a, left in inputs.items():
            if cross.magnitude.any():
                matrix.add(name, a, cross[:, None] * left)
            if flat:
                continue
            weighted = (square[:, None] * left).T
            for b, right in inputs.items():
                if starts[b] <= starts[a]:
                    matrix.add(a, b, weighted @ right)
    rows = slice(total, total + network.outputs)
    for b, block in network.output.items():
        matrix.put(rows, b, block)
    matrix.mid[rows, rows] = gram
    return Ball(matrix.mid, matrix.rad)


class _Accumulator:
    """A large lower triangle that blocks are added to, one at a time."""

    def __init__(self, size: int, places: Mapping[str, slice]) -> None:
        self.mid, self.rad, self.places = np.zeros((size, size)), np.zeros((size, size)), places

    def add(self, row: str, column: str, block: Ball) -> None:
        """Add a block, which is transposed into the lower triangle if need be."""
        rows, columns = self.places[row], self.places[column]
        if rows.start < columns.start:
            rows, columns, block = columns, rows, block.T
        total = Ball(self.mid[rows, columns]) + block
        self.mid[rows, columns] = total.mid
        if total.rad is not None:
            self.rad[rows, columns] = add_up(self.rad[rows, columns], total.rad)

    def put(self, rows: slice, column: str, block: Ball) -> None:
        """Set a block."""
        self.mid[rows, self.places[column]] = block.mid
        if block.rad is not None:
            self.rad[rows, self.places[column]] = block.rad

    def diagonal(self, name: str, mid: Array, rad: Array) -> None:
        """Add numbers to the diagonal of a block."""
        place = self.places[name]
        index = np.arange(place.start, place.stop)
        total = Ball(self.mid[index, index]) + Ball(np.broadcast_to(mid, index.shape))
        self.mid[index, index] = total.mid
        self.rad[index, index] = add_up(self.rad[index, index], total.radius, np.broadcast_to(rad, index.shape))
