"""Pre-activations and output of a stored network as linear functions of its coordinates, with error bounds.

The coordinates ``z`` are the input and the activations. A value of the graph is kept as a dictionary *block of z →
matrix* (features, size of the block), without the blocks it does not depend on. Weights are exact: a float32 or float64
parameter is a number, and the certificate is about that number.

Linear operations in between have entries that are found by running them on unit vectors in float64. That is exact for
sums, rearrangements and products with stored constants: every sum then has one term that is not zero, and every product
a factor 0 or 1. A quotient or a mean is rounded once or twice per entry, which a radius accounts for. Any other
operation is refused: its rounding is not known.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt.certificates.ball import TINY, UNIT, Ball
from ldlt.certificates.sectors import Slopes, precisions, readings
from ldlt.errors import GraphError, ShapeError
from ldlt.graph import Activation, Affine, Graph, Input, Wire, index_map, lookup

__all__ = ["Blocks", "Network"]

Blocks = dict[str, Ball]
"""A linear function of the coordinates: block → (features, size of the block)."""

_EXACT: set[Any] = {
    operator.add, operator.sub, operator.mul, operator.neg, operator.matmul, torch.add, torch.sub, torch.subtract,
    torch.mul, torch.multiply, torch.neg, torch.negative, torch.matmul, torch.mm, torch.sum, F.linear,
    "add", "sub", "mul", "neg", "matmul", "mm", "sum",
}  # fmt: skip
_ROUNDED: set[Any] = {
    operator.truediv, torch.div, torch.divide, torch.true_divide, torch.mean, "div", "mean",
    F.avg_pool1d, F.avg_pool2d, F.avg_pool3d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d,
}  # fmt: skip
_QUOTIENT = {operator.truediv, torch.div, torch.divide, torch.true_divide, "div"}


class Network:
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
        self.graph, self.module = graph, module
        self.sizes: dict[str, int] = {}
        self.kept: dict[str, np.ndarray] = {}
        self.inputs: dict[str, Blocks] = {}
        self.slopes: dict[str, Slopes] = {}
        self.levels: dict[str, int] = {}
        depth: dict[str, int] = {}
        values: dict[str, Blocks] = {}
        for node in graph.nodes:
            parents = [values[p] for p in node.parents]
            depth[node.name] = max((depth[p] for p in node.parents), default=0) + isinstance(node, Activation)
            if isinstance(node, Input):
                self.sizes[node.name], self.levels[node.name] = node.features, 0
                values[node.name] = {node.name: Ball.eye(node.features)}
            elif isinstance(node, Affine):
                weight = Ball.exact(node.matrix(torch.from_numpy(self.tensor(node.weight)), graph, exact=True).numpy())
                values[node.name] = {b: weight @ block for b, block in parents[0].items()}
            elif isinstance(node, Activation):
                given = None if slopes is None else slopes.get(node.name)
                drop = np.zeros(node.features, dtype=bool) if substituted is None else substituted[node.name]
                values[node.name] = self._activate(node, parents[0], Slopes.of(node, module, given), drop)
                self.levels[node.name] = depth[node.name]
            else:
                assert isinstance(node, Wire)
                values[node.name] = self.wire(node, parents)
        self.output: Blocks = values[graph.output]
        self.outputs = graph[graph.output].features

    def tensor(self, path: str) -> np.ndarray:
        """A tensor of the module in float64; refused if an entry is not finite."""
        found = lookup(self.module, path)
        assert isinstance(found, Tensor)
        if not found.is_floating_point() or found.dtype.itemsize > 8:
            raise GraphError(f"'{path}' is not of a real floating-point type")
        values = found.detach().cpu().double().numpy()
        if not np.isfinite(values).all():
            raise GraphError(f"'{path}' has entries that are not finite")
        return values

    def _activate(self, node: Activation, inputs: Blocks, slopes: Slopes, drop: np.ndarray) -> Blocks:
        self.slopes[node.name] = slopes
        kept = np.flatnonzero(~drop)
        self.kept[node.name] = kept
        value: Blocks = {}
        if len(kept):
            self.sizes[node.name] = len(kept)
            self.inputs[node.name] = {b: block[kept] for b, block in inputs.items()}
            value[node.name] = Ball(np.eye(node.features)[:, kept])
        if drop.any():
            alive = np.any([block.magnitude.any(1) for block in inputs.values()], 0)
            wide = slopes.high - slopes.low > 1e-3 * np.abs(slopes.high)
            if (drop & alive & wide).any():
                place = int(np.flatnonzero(drop & alive & wide)[0])
                raise GraphError(f"neuron {place} of '{node.name}' has more than one slope and cannot be left out")
            factor = slopes.hull * Ball.exact(drop.astype(np.float64))
            for b, block in inputs.items():
                value[b] = factor[:, None] * block
        return value

    def wire(self, node: Wire, parents: list[Blocks]) -> Blocks:
        """A fixed linear operation, block by block, with error bounds."""
        if node.role == "order":
            return parents[0]
        if node.role == "rearrange":
            return self._rearrange(node, parents)
        if node.role == "sum":
            matrices = [self._scale(node, s) for s in node.scales]
            if any(self.graph[p].shape != node.shape for p in node.parents):
                raise GraphError(f"node '{node.name}': a sum of different shapes")
            return _total([{b: m * v for b, v in p.items()} for m, p in zip(matrices, parents, strict=True)])
        matrices = self._matrices(node)
        return _total([{b: m @ v for b, v in p.items()} for m, p in zip(matrices, parents, strict=True)])

    def _rearrange(self, node: Wire, parents: list[Blocks]) -> Blocks:
        source = index_map(self.graph.index, node, self.graph.tensors(self.module)).cpu().numpy()
        counts = [self.graph[p].features for p in node.parents]
        if len(source) != node.features or source.min() < 0 or source.max() >= sum(counts):
            raise ShapeError(f"node '{node.name}' does not rearrange its inputs")
        found: Blocks = {}
        for b in dict.fromkeys(b for p in parents for b in p):
            size = self.sizes[b]
            rows = [p.get(b, Ball(np.zeros((n, size)))) for p, n in zip(parents, counts, strict=True)]
            found[b] = Ball.concatenate(rows)[source]
        return found

    def _scale(self, node: Wire, scale: float) -> Ball:
        """The weight of a parent in a sum: as given, and as the precision of the network reads it."""
        kinds = precisions(self.module)
        if node.target not in _QUOTIENT:
            values = readings(scale, kinds)
            return Ball.between(min(values), max(values))
        numbers = [a for a in (*node.args, *(v for _, v in node.kwargs)) if isinstance(a, int | float)]
        if len(numbers) != 1 or not numbers[0]:
            raise GraphError(f"node '{node.name}': a quotient by one number was expected")
        quotients = [1 / v for v in readings(float(numbers[0]), kinds)]
        if all(abs(np.frexp(q)[0]) == 0.5 for q in quotients) and len(set(quotients)) == 1:
            return Ball.exact(quotients[0])
        return Ball.between(np.nextafter(min(quotients), -np.inf), np.nextafter(max(quotients), np.inf))

    def _matrices(self, node: Wire) -> list[Ball]:
        """The matrix of a linear operation for each of its parents, (features, features of the parent)."""
        if node.target not in _EXACT and node.target not in _ROUNDED:
            raise GraphError(f"node '{node.name}': the rounding of its operation is not known")
        for arg in (*node.args, *(v for _, v in node.kwargs)):
            path = getattr(arg, "path", None)
            if path is not None:
                self.tensor(path)  # refuses what is not finite
        run = node.bind(self.graph.tensors(self.module))
        found = []
        for place, name in enumerate(node.parents):
            size = self.graph[name].features
            units = [torch.zeros(size, *self.graph[p].shape, dtype=torch.float64) for p in node.parents]
            units[place] = torch.eye(size, dtype=torch.float64).reshape(size, *self.graph[name].shape)
            with torch.no_grad():
                image = run(*units)
            if image.dtype != torch.float64 or image.numel() != size * node.features:
                raise GraphError(f"node '{node.name}': its result has another type or shape")
            matrix = image.detach().cpu().reshape(size, node.features).numpy().T
            rad = 4 * UNIT * np.abs(matrix) + TINY * (matrix != 0) if node.target in _ROUNDED else None
            ball = Ball(np.ascontiguousarray(matrix), rad)
            alpha = dict(node.kwargs).get("alpha", 1)
            if alpha != 1:  # a number of the program, rounded to the precision of the network in use
                values = readings(float(alpha), precisions(self.module))
                width = np.nextafter(max(abs(v - float(alpha)) for v in values), np.inf)
                ball = ball + Ball(np.zeros(matrix.shape), width * (matrix != 0))
            found.append(ball)
        return found


def _total(terms: list[Blocks]) -> Blocks:
    found: Blocks = {}
    for term in terms:
        for b, block in term.items():
            found[b] = found[b] + block if b in found else block
    return found
