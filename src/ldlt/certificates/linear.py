"""Pre-activations and output of a stored network as linear functions of its coordinates, with error bounds.

The coordinates ``z`` are the input and the activations. A value of the graph is kept as a dictionary *block of z →
matrix* (features, size of the block), without the blocks it does not depend on. Weights are exact: a float32 or float64
parameter is a number, and the certificate is about that number.

Linear operations in between have entries that are found by running them on unit vectors in float64. The table of
operations says how many roundings that takes: none for sums, rearrangements and products with one constant, since every
sum then has one term that is not zero and every product a factor 0 or 1. A quotient or a mean is rounded, which a
radius accounts for, and so is a constant that is computed (:mod:`ldlt.certificates.enclosed`). Any other operation is
refused: its rounding is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ldlt.certificates.ball import TINY, UNIT, Array, Ball
from ldlt.certificates.enclosed import Enclosed, inverse
from ldlt.certificates.sectors import Slopes
from ldlt.errors import GraphError, ShapeError
from ldlt.graph import Activation, Affine, Graph, Input, Ref, Wire, fold, index_map
from ldlt.graph.operations import TABLE

__all__ = ["Blocks", "Maps", "Network"]

Blocks = dict[str, Ball]
"""A linear function of the coordinates: block → (features, size of the block)."""


class Maps:
    """The linear maps of a stored network, with error bounds.

    Args:
        graph: A traced graph.
        module: The module it was traced from; its tensors are read, never changed.

    Attributes:
        enclosed: The tensors of the graph.
    """

    def __init__(self, graph: Graph, module: nn.Module) -> None:
        self.graph, self.module, self.enclosed = graph, module, Enclosed(graph, module)

    def free(self, node: Affine) -> Ball:
        """The matrix of a free map."""
        weight = torch.from_numpy(self.enclosed.exact(node.weight).mid)
        return Ball.exact(node.matrix(weight, self.graph, exact=True).numpy())

    def combine(self, node: Wire, parents: Sequence[Blocks]) -> Blocks:
        """A linear operation on linear functions of coordinates, without the constant that a sum may add."""
        if node.role == "order":
            return parents[0]
        if node.role == "rearrange":
            return self._rearrange(node, parents)
        if node.role == "sum":
            matrices = [self.scale(node, s) for s in node.scales]
            if any(self.graph[p].shape != node.shape for p in node.parents):
                raise GraphError(f"node '{node.name}': a sum of different shapes")
        else:
            matrices = self.matrices(node)
        found: Blocks = {}
        for matrix, parent in zip(matrices, parents, strict=True):
            for b, block in parent.items():
                term = matrix @ block if matrix.mid.ndim == 2 else matrix[..., None] * block
                found[b] = found[b] + term if b in found else term
        return found

    def source(self, node: Wire) -> np.ndarray:
        """Which feature of its parents, counted through, each feature of a rearrangement is."""
        found: np.ndarray = index_map(self.graph.index, node, self.graph.tensors(self.module)).cpu().numpy()
        total = sum(self.graph[p].features for p in node.parents)
        if len(found) != node.features or (len(found) and (found.min() < 0 or found.max() >= total)):
            raise ShapeError(f"node '{node.name}' does not rearrange its inputs")
        return found

    def _rearrange(self, node: Wire, parents: Sequence[Blocks]) -> Blocks:
        source = self.source(node)
        counts = [self.graph[p].features for p in node.parents]
        found: Blocks = {}
        for b in dict.fromkeys(b for p in parents for b in p):
            size = next(p[b].shape[1] for p in parents if b in p)
            rows = [p.get(b, Ball(np.zeros((n, size)))) for p, n in zip(parents, counts, strict=True)]
            found[b] = Ball.concatenate(rows)[source]
        return found

    def scale(self, node: Wire, scale: float) -> Ball:
        """The weight of a parent in a sum: as given, and as the precision of the network reads it."""
        if not TABLE[node.operation].roundings:
            return self.enclosed.number(scale)
        numbers = [a for a in (*node.args, *(v for _, v in node.kwargs)) if isinstance(a, int | float)]
        if len(numbers) != 1 or not numbers[0]:
            raise GraphError(f"node '{node.name}': one number was expected")
        number = self.enclosed.number(numbers[0])
        if TABLE[node.operation].rule is TABLE["div"].rule:
            return inverse(number)
        width = number.radius + np.abs(number.mid - numbers[0])  # of a weight w, and hence of 1 − w
        return Ball(np.asarray(scale), np.nextafter(width * (1 + 4 * UNIT), np.inf) + 4 * UNIT)

    def matrices(self, node: Wire) -> list[Ball]:
        """The matrix of a linear operation for each of its parents, (features, features of the parent).

        That of a product with a constant of its own shape is diagonal: (features,).
        """
        entry = TABLE.get(node.operation)
        tensors = {p: self.enclosed(p) for p in node.constants}
        real = [b for b in map(tensors.__getitem__, node.constants) if isinstance(b, Ball) and b.magnitude.any()]
        whole = [t for t in tensors.values() if isinstance(t, Tensor) and t.dtype != torch.bool]
        if entry is None or entry.roundings is None or len(real) + len(whole) > 1 or _sums(node):
            raise GraphError(f"node '{node.name}': the rounding of its operation is not known")
        uncertain = any(b.rad is not None for b in real)
        times, over = (entry.rule is TABLE[n].rule for n in ("mul", "div"))
        if (times or over) and real and self.graph[node.parents[0]].shape == node.shape:
            factor = real[0] if times else inverse(real[0])
            spread = factor * Ball.exact(np.ones((1, *node.shape)))
            return [Ball(spread.mid.reshape(-1), None if spread.rad is None else spread.rad.reshape(-1))]
        if uncertain and entry.roundings:
            raise GraphError(f"node '{node.name}': the rounding of its operation is not known")

        def run(place: int, part: Any) -> Array:
            """The operation on unit vectors of one parent, with a part of each ball in the place of constants."""

            def get(path: str) -> Tensor:
                found = tensors[path]
                return torch.from_numpy(np.array(part(found))) if isinstance(found, Ball) else found

            size = self.graph[node.parents[place]].features
            units = [torch.zeros(size, *self.graph[p].shape, dtype=torch.float64) for p in node.parents]
            units[place] = torch.eye(size, dtype=torch.float64).reshape(units[place].shape)
            with torch.no_grad():
                image = node.bind(get)(*units)
            if (
                image.dtype != torch.float64
                or image.numel() != size * node.features
                or not bool(image.isfinite().all())
            ):
                raise GraphError(f"node '{node.name}': its result has another type or shape, or is not finite")
            return np.ascontiguousarray(image.detach().cpu().reshape(size, node.features).numpy().T)

        found = []
        for place in range(len(node.parents)):
            matrix, rad = run(place, lambda b: b.mid), None
            if entry.roundings:
                rad = 4 * entry.roundings * UNIT * np.abs(matrix) + TINY * (matrix != 0)
            elif uncertain:  # entries are those of one constant, 0 or 1
                rad = np.abs(run(place, lambda b: b.radius) - run(place, lambda b: np.zeros(b.shape)))
            found.append(Ball(matrix, rad))
        return found


class Network(Maps):
    """The stored network as the matrix inequality sees it.

    Args:
        graph: A traced graph.
        module: The module it was traced from; its tensors are read, never changed.
        substituted: Neurons ``w = sv`` that are no coordinates, by activation, (features,) booleans. ``s`` is any
            slope of the neuron: the enclosure covers all of them, so this is sound, and useful where there is only
            one or where ``v`` is constant.
        slopes: Slopes ``(m, L)`` by activation in place of the global ones, (features,) each. They are trusted.

    Attributes:
        sizes: Sizes of the blocks of ``z``: the input, then the activations in topological order.
        kept: Indices of the neurons that are coordinates, by activation.
        inputs: ``V`` of the kept neurons, by activation.
        slopes: Slopes of all neurons, by activation.
        levels: Number of activations on the longest path to each block; 0 for the input.
        output: ``Y``.
        outputs: Number of outputs.

    Raises:
        GraphError: An operation whose rounding is not known, or weights that are not finite real numbers.
    """

    def __init__(
        self,
        graph: Graph,
        module: nn.Module,
        substituted: Mapping[str, np.ndarray] | None = None,
        slopes: Mapping[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        super().__init__(graph, module)
        self._substituted, self._given = substituted, {} if slopes is None else slopes
        self.sizes: dict[str, int] = {}
        self.kept: dict[str, np.ndarray] = {}
        self.inputs: dict[str, Blocks] = {}
        self.slopes: dict[str, Slopes] = {}
        self.output: Blocks = fold(graph, self)[graph.output]
        self.outputs = graph[graph.output].features
        depth: dict[str, int] = {}
        for node in graph.nodes:
            depth[node.name] = max((depth[p] for p in node.parents), default=0) + isinstance(node, Activation)
        self.levels = {name: depth[name] for name in (graph.input.name, *(a.name for a in graph.activations))}

    def input(self, node: Input) -> Blocks:
        """The coordinates of the input."""
        self.sizes[node.name] = node.features
        return {node.name: Ball.eye(node.features)}

    def wire(self, node: Wire, parents: Sequence[Blocks]) -> Blocks:
        """A linear operation."""
        return self.combine(node, parents)

    def affine(self, node: Affine, parent: Blocks) -> Blocks:
        """A free map."""
        weight = self.free(node)
        return {b: weight @ block for b, block in parent.items()}

    def activation(self, node: Activation, parent: Blocks) -> Blocks:
        """New coordinates, and what is put in for neurons that are none."""
        slopes = self.slopes[node.name] = Slopes.of(node, self.module, self._given.get(node.name))
        drop = np.zeros(node.features, dtype=bool) if self._substituted is None else self._substituted[node.name]
        kept = self.kept[node.name] = np.flatnonzero(~drop)
        value: Blocks = {}
        if len(kept):
            self.sizes[node.name] = len(kept)
            self.inputs[node.name] = {b: block[kept] for b, block in parent.items()}
            value[node.name] = Ball(np.eye(node.features)[:, kept])
        if drop.any():
            alive = np.any([block.magnitude.any(1) for block in parent.values()], 0)
            wide = slopes.high - slopes.low > 1e-3 * np.abs(slopes.high)
            if (drop & alive & wide).any():
                place = int(np.flatnonzero(drop & alive & wide)[0])
                raise GraphError(f"neuron {place} of '{node.name}' has more than one slope and cannot be left out")
            factor = slopes.hull * Ball.exact(drop.astype(np.float64))
            for b, block in parent.items():
                value[b] = factor[:, None] * block
        return value


def _sums(node: Wire) -> bool:
    """Whether an ``einsum`` adds up entries of a constant."""
    if node.operation != "einsum":
        return False
    equation, operands = node.args[0], node.args[1]
    left, _, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    return "->" not in equation or any(
        letter not in right and all(letter not in other for j, other in enumerate(terms) if j != i)
        for i, term in enumerate(terms)
        if not isinstance(operands[i], Ref)
        for letter in term
    )
