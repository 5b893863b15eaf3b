r"""Proofs that a stored network has a Lipschitz bound, in spite of rounding.

The quadratic form of the network is assembled from its exact stored weights with error bounds
(:mod:`ldlt.certificates.enclose`), and the test of :mod:`ldlt.certificates.definite` is applied. A proof holds for the
network evaluated in real arithmetic. Nothing here knows how multipliers are found, and nothing of a search is trusted.

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

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ldlt.certificates.ball import Array, Ball, add_up, arithmetic_is_ieee
from ldlt.certificates.definite import is_semidefinite
from ldlt.certificates.enclose import Network, UnknownRounding
from ldlt.errors import LdltError
from ldlt.graph import Graph

__all__ = ["LARGEST", "Proof", "Prover", "bordered", "prove"]

LARGEST = 12_000
"""Largest size of the matrix, coordinates and outputs together; the proof holds three such matrices in float64."""


@dataclass(frozen=True, eq=False)
class Proof:
    """Outcome of a proof.

    Attributes:
        holds: Whether the bound is proven. If not, nothing is known.
        bound: ℓ, the bound that the proof is about.
        margin: Proven lower bound of the smallest eigenvalue of the matrix, scaled to a diagonal near one; -inf if
            there is no proof.
        reason: Why there is no proof; empty if it holds.
        multipliers: ``Λ`` of the proof, float64, by activation.
        gram: ``G`` of the proof, float64 (k, k), or None for the identity.
        unknown: Whether there is no proof because the rounding of an operation is not known.
    """

    holds: bool
    bound: float
    margin: float
    reason: str = ""
    multipliers: dict[str, Tensor] = field(default_factory=dict)
    gram: Tensor | None = None
    unknown: bool = False


def prove(
    graph: Graph,
    module: nn.Module,
    multipliers: Mapping[str, Tensor],
    bound: float,
    *,
    gram: Tensor | None = None,
    slopes: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> Proof:
    r"""Try to prove ``‖Δy‖ ≤ ℓ‖Δx‖``, or :math:`|a'Δy| \le ℓ\sqrt{a'Ga}\,\|Δx\|` for all ``a`` if ``G`` is given.

    Args:
        graph: What :func:`ldlt.graph.trace.trace` returned for the module.
        module: The stored network.
        multipliers: ``Λ`` by activation node, (features,), positive; equal within a group that is mixed. Infinity
            leaves out a neuron whose slope is one number or whose input is constant.
        bound: ℓ.
        gram: ``G``, (k, k) symmetric; the identity by default.
        slopes: Slopes ``(m, L)`` of some activations, (features,) each, that hold on a region of inputs and that the
            caller has proven; the proof is then about that region.

    Returns:
        A proof that holds, or one with a reason. Nothing is raised for a network or numbers that do not fit.
    """
    return Prover(graph, module, slopes).prove(multipliers, bound, gram)


class _Refused(Exception):
    """A reason why there is no proof."""


class Prover:
    """A stored network, for several attempts: its linear maps are made once.

    Args:
        graph: As in :func:`prove`.
        module: As in :func:`prove`. It must not change.
        slopes: As in :func:`prove`.

    Attributes:
        network: Its linear maps, once a proof was tried with multipliers that fit.
    """

    def __init__(
        self, graph: Graph, module: nn.Module, slopes: Mapping[str, tuple[Tensor, Tensor]] | None = None
    ) -> None:
        self.graph, self.module, self.slopes = graph, module, slopes
        self.network: Network | None = None
        self._left_out = b""

    def prove(
        self, multipliers: Mapping[str, Tensor], bound: float, gram: Tensor | None = None, safety: float = 1.0
    ) -> Proof:
        """As :func:`prove`; a ``safety`` above 1 leaves room for the rounding of other machines."""
        stated = math.nan
        try:
            with np.errstate(all="ignore"):  # overflow is looked for where it matters
                stated = _bound(bound)
                values = self._values(multipliers)
                network = self._network(values)
                border = _gram(network.outputs, gram)
                found = is_semidefinite(bordered(network, values, stated, border), safety)
        except (_Refused, LdltError, OverflowError) as error:
            return Proof(False, stated, -math.inf, str(error), unknown=isinstance(error, UnknownRounding))
        kept = {n: torch.from_numpy(v.copy()) for n, v in values.items()}
        stored = None if gram is None else torch.from_numpy(border)
        reason = "" if found.holds else f"not proven for the bound {stated:.9g}: {found.reason}"
        return Proof(found.holds, stated, found.margin, reason, kept, stored)

    def _values(self, multipliers: Mapping[str, Tensor]) -> dict[str, Array]:
        """Multipliers as float64 arrays, checked."""
        names = [a.name for a in self.graph.activations]
        for name in multipliers:
            if name not in names:
                raise _Refused(f"there is a multiplier for '{name}', which is no activation of the network")
        found = {}
        for name in names:
            given = multipliers.get(name)
            size = self.graph[name].features
            if not isinstance(given, Tensor) or not given.is_floating_point():
                raise _Refused(f"there is no multiplier for the activation '{name}'")
            if given.numel() != size:
                raise _Refused(f"the activation '{name}' has {size} neurons but {given.numel()} multipliers")
            value = given.detach().double().cpu().numpy().reshape(-1).copy()
            if not (value > 0).all():  # NaN, too
                place = int(np.flatnonzero(~(value > 0))[0])
                raise _Refused(f"multiplier {place} of '{name}' is {value[place]:g}, not a positive number")
            found[name] = value
        return found

    def _network(self, values: Mapping[str, Array]) -> Network:
        """The linear maps; they depend on the multipliers only through which of them are infinite."""
        drop = {n: np.isinf(v) for n, v in values.items()}
        key = b"".join(d.tobytes() for d in drop.values())
        if self.network is None or self._left_out != key:
            if not arithmetic_is_ieee():
                raise _Refused("the processor does not round to nearest, or flushes small numbers to zero")
            size = sum(n.features for n in (self.graph.input, *self.graph.activations, self.graph[self.graph.output]))
            if size > LARGEST:
                raise _Refused(f"the matrix has size {size}, above {LARGEST}: too large for a proof in memory")
            self.network, self._left_out = Network(self.graph, self.module, drop, self.slopes), key
        for name, slopes in self.network.slopes.items():
            if slopes.mixed is not None:
                _, first = np.unique(slopes.mixed, return_index=True)
                if not (values[name] == values[name][first][slopes.mixed]).all():
                    raise _Refused(f"'{name}' mixes entries in groups, whose multipliers must be equal")
        return self.network


def _gram(k: int, gram: Tensor | None) -> Array:
    if gram is None:
        return np.eye(k)
    if tuple(gram.shape) != (k, k):
        raise _Refused(f"G must have shape ({k}, {k}), not {tuple(gram.shape)}")
    value: Array = gram.detach().double().cpu().numpy().copy()
    if not np.isfinite(value).all() or not (value == value.T).all():
        raise _Refused("G must be symmetric with finite entries")
    return value


def _bound(bound: float) -> float:
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        raise _Refused(f"the bound must be a number, not {type(bound).__name__}")
    if not (math.isfinite(bound) and bound > 0):
        raise _Refused(f"the bound must be positive and finite, not {bound:g}")
    return float(bound)


# -- the matrix -------------------------------------------------------------------------------------------------------


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
