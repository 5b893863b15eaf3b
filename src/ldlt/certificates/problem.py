r"""The matrix inequality of a given network as block-sparse data, ready for optimisation over the multipliers.

With ``z = (x, w_1, …, w_n)``, each pre-activation ``v_i = Σ_b V_ib z_b`` and the output ``y = Σ_b Y_b z_b`` are kept as
dictionaries *block → matrix*, without the blocks that are zero. The inequality of :mod:`ldlt.lmi` reads

.. math::

    ℓ^2\|x\|^2 + \sum_i 2\bigl(\|w_i - c_iv_i\|^2_{\Lambda_i} - r_i^2\|v_i\|^2_{\Lambda_i}\bigr) - \|y\|^2 \ge 0 .

Scaling ``ℓ²`` and ``Λ`` together, multipliers *for an input of unit weight* (``ℓ = 1`` in the first term) prove the
bound ``ℓ² = λ_max(B G B')`` of :mod:`ldlt.covariance`.

Neurons that are exactly linear (radius 0, in a region where a local bound is wanted) and neurons whose pre-activation
does not depend on the input are no variables: ``w = c v`` is put in instead. For neurons that are nearly linear
(``r`` far below ``|c|``) the variable is ``w − c v``, which is the same inequality in better coordinates: for them the
maps of this problem contain ``c`` and its centre is 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.certificates.local import Rows, doubles, global_slopes, nonzero, push
from ldlt.covariance import Covariance
from ldlt.errors import OptionError, ShapeError
from ldlt.graph import Activation, Affine, Graph, Input, Wire, fold

__all__ = ["Layer", "Problem"]

_NEARLY_LINEAR = 0.03


@dataclass(frozen=True, eq=False)
class Layer:
    """One activation.

    Attributes:
        name: Its node in the graph.
        features: Number of neurons, substituted ones included.
        kept: Indices of the neurons that are variables, (n,).
        inputs: ``V`` by block, (n, size of the block), for the kept neurons.
        center: c, (n,); 0 for neurons whose variable is ``w − c v``.
        radius: r, (n,).
        shared: Which multiplier belongs to which kept neuron, (n,) (one per neuron, or one per group).
        count: Number of multipliers.
    """

    name: str
    features: int
    kept: Tensor
    inputs: dict[str, Tensor]
    center: Tensor
    radius: Tensor
    shared: Tensor
    count: int

    @property
    def size(self) -> int:
        """Number of kept neurons n."""
        return len(self.kept)

    def grouped(self, each: Tensor, reduce: str) -> Tensor:
        """Join what neurons have by multiplier, (n,) -> (count,): ``"sum"``, ``"mean"`` or ``"amax"``."""
        if self.count == self.size:
            return each
        zeros = torch.zeros(self.count, dtype=each.dtype)
        return zeros.scatter_reduce(0, self.shared, each, reduce, include_self=False)

    def apply(self, z: Mapping[str, Tensor]) -> Tensor:
        """``v = Σ_b V_b z_b``, (n, q)."""
        terms = [v @ z[b] for b, v in self.inputs.items()]
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)


@dataclass(frozen=True, eq=False)
class Problem:
    """Minimise ℓ over multipliers, for one network.

    Attributes:
        input: Name of the input block.
        inputs: Number of inputs.
        layers: Activations with at least one kept neuron, in topological order.
        output: ``Y`` by block, (outputs, size of the block).
        outputs: Number of outputs.
        features: Number of neurons of every activation of the graph, substituted ones included.
    """

    input: str
    inputs: int
    layers: tuple[Layer, ...]
    output: dict[str, Tensor]
    outputs: int
    features: dict[str, int]

    @classmethod
    def build(
        cls, graph: Graph, module: nn.Module, slopes: Mapping[str, tuple[Tensor, Tensor]] | None = None
    ) -> Problem:
        """The problem of a traced module with the weights it has now, in float64.

        Args:
            graph: What :func:`ldlt.graph.trace.trace` returned for the module.
            module: The module.
            slopes: Per-neuron slope bounds of some activations, in place of the global ones, (features,) each.
        """
        with torch.no_grad():
            parts = _Parts(graph, module, {} if slopes is None else slopes)
            out = fold(graph, parts)[graph.output]
        output = {b: r.reshape(len(r), -1).T.contiguous() for b, r in out.items()}
        layers = tuple(layer for layer in parts.layers if layer.size)
        features = {a.name: a.features for a in graph.activations}
        return cls(graph.input.name, graph.input.features, layers, output, graph[graph.output].features, features)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of the blocks, input first, then the activations in topological order."""
        return {self.input: self.inputs, **{layer.name: layer.size for layer in self.layers}}

    @property
    def neurons(self) -> int:
        """Number of kept neurons."""
        return sum(layer.size for layer in self.layers)

    @property
    def multipliers(self) -> int:
        """Number of multipliers."""
        return sum(layer.count for layer in self.layers)

    @cached_property
    def shared(self) -> Tensor:
        """Which multiplier belongs to which neuron, over all layers."""
        starts = torch.tensor([0, *(layer.count for layer in self.layers)]).cumsum(0).tolist()
        return torch.cat([layer.shared + start for layer, start in zip(self.layers, starts, strict=False)])

    def spread(self, flat: Tensor) -> Tensor:
        """The multiplier of each neuron."""
        return flat if self.multipliers == self.neurons else flat[self.shared]

    def grouped(self, each: Tensor) -> Tensor:
        """Sums over the neurons of each multiplier, along the first dimension."""
        if self.multipliers == self.neurons:
            return each
        return torch.zeros(self.multipliers, *each.shape[1:], dtype=each.dtype).index_add_(0, self.shared, each)

    def full(self, flat: Tensor) -> dict[str, Tensor]:
        """Multipliers by activation of the graph, (features,); infinite for neurons that were substituted."""
        found = {name: torch.full((n,), torch.inf, dtype=torch.float64) for name, n in self.features.items()}
        for layer, part in zip(self.layers, flat.split([layer.count for layer in self.layers]), strict=True):
            found[layer.name][layer.kept] = part[layer.shared]
        return found

    def flat(self, multipliers: Mapping[str, Tensor]) -> Tensor:
        """Inverse of :meth:`full`: one entry per multiplier (the first of each group counts)."""
        parts = []
        for layer in self.layers:
            given = multipliers.get(layer.name)
            if given is None or given.numel() != layer.features:
                raise ShapeError(f"multipliers of '{layer.name}' must have {layer.features} entries")
            part = torch.empty(layer.count, dtype=torch.float64)
            part[layer.shared.flip(0)] = given.detach().double().cpu().reshape(-1)[layer.kept].flip(0)
            parts.append(part)
        return torch.cat([*parts, torch.empty(0, dtype=torch.float64)])

    def dense(self, rows: int, blocks: Mapping[str, Tensor]) -> Tensor:
        """A map given by blocks, as one matrix (rows, N) over the blocks of :attr:`sizes`."""
        parts = [blocks.get(b, torch.zeros(rows, n, dtype=torch.float64)) for b, n in self.sizes.items()]
        return torch.cat(parts, 1)

    def covariance(
        self, multipliers: Tensor | Callable[[Layer, Tensor], Tensor], *, everything: bool = False
    ) -> tuple[Covariance, Tensor]:
        """Eliminate the network from the input on.

        Args:
            multipliers: Λ for an input of unit weight, or a function that chooses those of a layer, (count,), when its
                turn comes: from the layer and the covariance ``T`` of what it reads.
            everything: Keep all blocks, not only those that are read again.

        Returns:
            The covariance of the blocks that the output reads (or of all), and the sum of ``log det(I − D^{-1}T)``,
            which is not finite if the multipliers are not feasible.
        """
        last = {b: i for i, layer in enumerate(self.layers) for b in layer.inputs}
        last.update(dict.fromkeys(self.output, len(self.layers)))
        given = None if callable(multipliers) else multipliers.split([layer.count for layer in self.layers])
        live = Covariance.start(self.input, torch.eye(self.inputs, dtype=torch.float64))
        total = torch.zeros((), dtype=torch.float64)
        for i, layer in enumerate(self.layers):
            read = live.read(layer.inputs)
            chosen = given[i] if given is not None else multipliers(layer, read.spread)  # type: ignore[operator]
            diagonal = 1 / (2 * layer.radius**2 * chosen[layer.shared])
            keep = {b for b in (*live.sizes, layer.name) if everything or last.get(b, -1) > i}
            live, slack = live.activate(read, diagonal, layer.name, layer.center, layer.radius, keep)
            total = total + slack
        return live, total

    def squared(self, multipliers: Tensor) -> float:
        """``ℓ²`` that multipliers for an input of unit weight prove; infinite if they are not feasible."""
        live, slack = self.covariance(multipliers)
        if not bool(slack.isfinite()):
            return math.inf
        form = self.form(live)
        return max(0.0, float(torch.linalg.eigvalsh(form)[..., -1].max())) if bool(form.isfinite().all()) else math.inf

    def form(self, live: Covariance) -> Tensor:
        """``B G B'`` of the output."""
        return live.read(self.output).spread

    def norm(self, matrix: Tensor, reader: str | None, block: str, steep: Tensor | None = None) -> float:
        """Norm of the map from a block to what an activation, or the output, reads, times slopes; or infinity."""
        matrix = matrix if steep is None else steep[:, None] * matrix
        return float(torch.linalg.matrix_norm(matrix, 2)) if bool(matrix.isfinite().all()) else math.inf

    per_frequency = False


class _Parts:
    """The algebra of linear functions of the blocks; collects the layers."""

    def __init__(self, graph: Graph, module: nn.Module, slopes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        self.graph, self.module, self.slopes = graph, module, slopes
        self.tensors = doubles(graph, module)
        self.layers: list[Layer] = []

    def input(self, node: Input) -> Rows:
        """Its own block."""
        return {node.name: torch.eye(node.features, dtype=torch.float64).reshape(-1, *node.shape)}

    def wire(self, node: Wire, parents: Sequence[Rows]) -> Rows:
        """A linear operation."""
        return push(node, self.tensors, parents, self.graph)

    def affine(self, node: Affine, parent: Rows) -> Rows:
        """A free map."""
        matrix = node.matrix(self.tensors(node.weight), self.graph)
        rows = {b: r.reshape(len(r), -1) @ matrix.T for b, r in parent.items()}
        return nonzero({b: r.reshape(len(r), *node.shape) for b, r in rows.items()})

    def activation(self, node: Activation, parent: Rows) -> Rows:
        """A layer, and its value in terms of the blocks."""
        rows = {b: r.reshape(len(r), -1) for b, r in parent.items()}
        layer, out = _activate(node, self.module, rows, self.slopes.get(node.name))
        self.layers.append(layer)
        return {b: r.reshape(-1, *node.shape) for b, r in out.items()}


def _activate(
    node: Activation, module: nn.Module, rows: Rows, slopes: tuple[Tensor, Tensor] | None
) -> tuple[Layer, Rows]:
    n = node.features
    member = activations.mixed(node.resolve(module), node.shape)
    alive = torch.zeros(n, dtype=torch.bool)
    for r in rows.values():
        alive |= (r != 0).any(0)
    if member is not None:
        sector = activations.sector(node.resolve(module))
        center, radius = (float(t) * torch.ones(n, dtype=torch.float64) for t in (sector.center, sector.radius))
        joint = torch.zeros(int(member.max()) + 1, dtype=torch.bool)
        joint[member[alive]] = True  # a group is constant only if all its entries are
        keep = joint[member]
    else:
        low, high = global_slopes(node, module) if slopes is None else slopes
        low, high = (t.detach().double().cpu().reshape(-1) for t in (low, high))
        if len(low) != n or len(high) != n:
            raise ShapeError(f"slopes of '{node.name}' must have {n} entries")
        if not bool((low <= high).all() & low.isfinite().all() & high.isfinite().all()):
            raise OptionError(f"slopes of '{node.name}' must be finite with m <= L")
        center, radius = (high + low) / 2, (high - low) / 2
        keep = alive & (radius > 0)
    shift = torch.where(~keep | (radius < _NEARLY_LINEAR * center.abs()), center, 0.0)
    kept, whole = keep.nonzero().reshape(-1), bool(keep.all())
    shared, count = torch.arange(len(kept)), len(kept)
    if member is not None:
        names, shared = member[kept].unique(return_inverse=True)
        count = len(names)
    inputs = rows if whole else nonzero({b: r[:, kept] for b, r in rows.items()})
    inputs = {b: r.T.contiguous() for b, r in inputs.items()}
    layer = Layer(node.name, n, kept, inputs, (center - shift)[kept], radius[kept], shared, count)
    out = nonzero({b: r * shift for b, r in rows.items()}) if bool(shift.any()) else {}
    if len(kept):
        own = torch.eye(n, dtype=torch.float64)
        out[node.name] = own if whole else own[kept]
    return layer, out
