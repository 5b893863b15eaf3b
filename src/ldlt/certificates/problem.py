r"""The matrix inequality of a given network as block-sparse data, ready for optimisation over the multipliers.

With ``z = (x, w_1, …, w_n)``, each pre-activation ``v_i = Σ_b V_ib z_b`` and the output ``y = Σ_b Y_b z_b`` are kept as
dictionaries *block → matrix*, without the blocks that are zero. With ``Λ > 0`` and ``s = 1/ℓ²`` the inequality of
:mod:`ldlt.lmi`, divided by ℓ², reads

.. math::

    Q_0(\Lambda) - s\,Y'Y \succeq 0,\qquad
    z'Q_0z = \|x\|^2 + \sum_i 2\bigl(\|w_i - c_iv_i\|^2_{\Lambda_i} - r_i^2\|v_i\|^2_{\Lambda_i}\bigr) .

Neurons that are exactly linear (radius 0, in a region where a local bound is wanted) and neurons whose pre-activation
does not depend on the input are no variables: ``w = c v`` is put in instead. For neurons that are nearly linear
(``r`` far below ``|c|``) the variable is ``w − c v``, which is the same inequality in better coordinates: for them the
maps of this problem contain ``c`` and its centre is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.certificates.enclosed import doubles
from ldlt.errors import OptionError, ShapeError
from ldlt.graph import Activation, Affine, Graph, Input, Tensors, Wire, fold

__all__ = ["Layer", "Problem", "Slopes", "global_slopes"]

Slopes = Mapping[str, tuple[Tensor, Tensor]]
"""Per-neuron slope bounds ``(m, L)`` by activation, each (features,)."""

_NEARLY_LINEAR = 0.03

Rows = dict[str, Tensor]  # block -> (size of the block, *shape): images of its unit vectors


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

    @property
    def product(self) -> Tensor:
        """``c² − r²``, (n,): the product of the slopes."""
        return (self.center - self.radius) * (self.center + self.radius)


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

    @property
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

    @property
    def is_chain(self) -> bool:
        """Whether every layer reads only the one before it, and the output only the last."""
        names = list(self.sizes)
        reads = [*(layer.inputs for layer in self.layers), self.output]
        return all(set(read) <= {name} for name, read in zip(names, reads, strict=True))

    @classmethod
    def build(cls, graph: Graph, module: nn.Module, slopes: Slopes | None = None) -> Problem:
        """The problem of a traced module with the weights it has now, in float64.

        Args:
            graph: What :func:`ldlt.graph.trace.trace` returned for the module.
            module: The module.
            slopes: Per-neuron slope bounds of some activations, in place of the global ones.
        """
        with torch.no_grad():
            parts = _Parts(graph, module, {} if slopes is None else slopes)
            out = fold(graph, parts)[graph.output]
        output = {b: r.reshape(len(r), -1).T.contiguous() for b, r in out.items()}
        layers = tuple(layer for layer in parts.layers if layer.size)
        features = {a.name: a.features for a in graph.activations}
        return cls(graph.input.name, graph.input.features, layers, output, graph[graph.output].features, features)

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Cut a vector with one entry per multiplier into layers, (count,) each."""
        parts = flat.split([layer.count for layer in self.layers])
        return {layer.name: part for layer, part in zip(self.layers, parts, strict=True)}

    def full(self, flat: Tensor) -> dict[str, Tensor]:
        """Multipliers by activation of the graph, (features,); infinite for neurons that were substituted."""
        parts = self.split(flat)
        found = {name: torch.full((n,), torch.inf, dtype=torch.float64) for name, n in self.features.items()}
        for layer in self.layers:
            found[layer.name][layer.kept] = parts[layer.name][layer.shared]
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

    @property
    def offsets(self) -> dict[str, int]:
        """Place of the first coordinate of each block of :attr:`sizes`."""
        return dict(zip(self.sizes, torch.tensor([0, *self.sizes.values()]).cumsum(0).tolist(), strict=False))

    def dense(self, rows: int, blocks: Mapping[str, Tensor]) -> Tensor:
        """A map given by blocks, as one matrix (rows, N) over the blocks of :attr:`sizes`."""
        sizes, offsets = self.sizes, self.offsets
        matrix = torch.zeros(rows, sum(sizes.values()), dtype=torch.float64)
        for b, block in blocks.items():
            matrix[:, offsets[b] : offsets[b] + sizes[b]] = block
        return matrix


def global_slopes(node: Activation, module: nn.Module) -> tuple[Tensor, Tensor]:
    """Exact slope bounds ``(m, L)`` of an elementwise activation, (features,) each."""
    activation = node.resolve(module)
    if isinstance(activation, nn.PReLU):
        activations.slope_bounds(activation)  # refuses what is not finite
        weight = activation.weight.detach().double().cpu().reshape(-1, 1)
        spread = weight.expand(-1, node.features // len(weight)).reshape(-1)
        return spread.clamp(max=1.0), spread.clamp(min=1.0)
    low, high = activations.slope_bounds(activation)
    like = torch.ones(node.features, dtype=torch.float64)
    return low * like, high * like


def _eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def _nonzero(rows: Rows) -> Rows:
    return {b: r for b, r in rows.items() if r.numel() and any(float(end) != 0 for end in r.aminmax())}


def push(node: Wire, tensors: Tensors, parents: Sequence[Rows], graph: Graph) -> Rows:
    """Run a linear operation on the unit vectors of each block; parents without the block are zero there."""
    run = node.linear(tensors)
    found: Rows = {}
    for b in dict.fromkeys(b for p in parents for b in p):
        count = next(len(p[b]) for p in parents if b in p)
        shapes = [graph[n].shape for n in node.parents]
        found[b] = run(
            *(
                p[b] if b in p else torch.zeros(count, *s, dtype=torch.float64)
                for p, s in zip(parents, shapes, strict=True)
            )
        )
    return _nonzero(found)


class _Parts:
    """The algebra of linear functions of the blocks; collects the layers."""

    def __init__(self, graph: Graph, module: nn.Module, slopes: Slopes) -> None:
        self.graph, self.module, self.slopes = graph, module, slopes
        self.tensors = doubles(graph, module)
        self.layers: list[Layer] = []

    def input(self, node: Input) -> Rows:
        return {node.name: _eye(node.features).reshape(-1, *node.shape)}

    def wire(self, node: Wire, parents: Sequence[Rows]) -> Rows:
        return push(node, self.tensors, parents, self.graph)

    def affine(self, node: Affine, parent: Rows) -> Rows:
        matrix = node.matrix(self.tensors(node.weight), self.graph)
        rows = {b: r.reshape(len(r), -1) @ matrix.T for b, r in parent.items()}
        return _nonzero({b: r.reshape(len(r), *node.shape) for b, r in rows.items()})

    def activation(self, node: Activation, parent: Rows) -> Rows:
        rows = {b: r.reshape(len(r), -1) for b, r in parent.items()}
        layer, out = _activate(node, self.module, rows, self.slopes.get(node.name))
        self.layers.append(layer)
        return {b: r.reshape(-1, *node.shape) for b, r in out.items()}


def _activate(
    node: Activation, module: nn.Module, rows: Rows, slopes: tuple[Tensor, Tensor] | None
) -> tuple[Layer, Rows]:
    """The layer of an activation, and its value in terms of the blocks."""
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
    if member is None:
        shared, count = torch.arange(len(kept)), len(kept)
    else:
        names, shared = member[kept].unique(return_inverse=True)
        count = len(names)
    layer = Layer(
        node.name,
        n,
        kept,
        {
            b: r.T.contiguous()
            for b, r in (rows if whole else _nonzero({b: r[:, kept] for b, r in rows.items()})).items()
        },
        (center - shift)[kept],
        radius[kept],
        shared,
        count,
    )
    out = _nonzero({b: r * shift for b, r in rows.items()}) if bool(shift.any()) else {}
    if len(kept):
        out[node.name] = _eye(n) if whole else _eye(n)[kept]
    return layer, out
