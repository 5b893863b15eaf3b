r"""A bound from the norms of single layers, for networks that the matrix inequality does not reach.

Every value ``t`` of the graph gets a constant ``ℓ_t`` with ``‖Δt‖ ≤ ℓ_t‖Δx‖``: a linear map multiplies it by its norm,
an activation by its steepest slope, sums add constants, and a rearrangement adds their squares, as often as it repeats
a feature. Sound for any network, and loose: that is why it is the last resort of :func:`ldlt.certify`, which says so.

Norms are those of matrices where these are small. For averages and other maps whose matrix has no negative entries,

.. math:: \|A\|_2^2 \le \|A\|_1\,\|A\|_\infty ,

which takes one run forth and one back; ``A`` is replaced by ``|A|`` where a constant has signs.

**Convolutions.** A convolution with zero padding is a part of the circular convolution on a ring of ``n + d(k − 1)``
points per axis (extend the input by zeros, drop outputs), so with the transfer function ``K(ω) = Σ_j W_j e^{-iωdj}``

.. math:: \|\text{conv}\| \;\le\; \max_ω \|K(ω)\|_2

over the frequencies of that ring; for circular padding the ring has ``n`` points. Strides drop outputs; a transposed
convolution is the adjoint of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ldlt import activations
from ldlt.certificates.local import doubles
from ldlt.errors import UnsupportedOpError
from ldlt.graph import Activation, Affine, Convolution, Graph, Input, Tensors, Wire, fold, index_map, resolve
from ldlt.graph.convolution import Spec
from ldlt.images.convolutions import FrozenSpec
from ldlt.images.grids import transfer

__all__ = ["layer_norms"]

_ENTRIES = 2**20  # up to this size a norm is that of the matrix
_POSITIVE = {
    "mul", "div", "sum", "mean", "cumsum", "tril", "triu", "diag_embed", "im2col", "pad", "constant_pad_nd", "where",
    "masked_fill", "cat", "stack", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_trilinear3d", "linear", "addmm", "matmul", "mm", "bmm",
}  # fmt: skip
"""Operations without negative entries where their constants have none."""


def layer_norms(graph: Graph, module: nn.Module) -> float:
    """A Lipschitz constant of a network, from the norms of its layers, in floating point.

    Args:
        graph: What :func:`ldlt.graph.trace.trace` returned for the module.
        module: The module.

    Raises:
        UnsupportedOpError: A large linear operation without a rule.
    """
    with torch.no_grad():
        return fold(graph, _Norms(graph, module))[graph.output]


class _Norms:
    """The algebra of Lipschitz constants."""

    def __init__(self, graph: Graph, module: nn.Module) -> None:
        self.graph, self.module, self.tensors = graph, module, doubles(graph, module)
        self.moved: dict[str, float] = {}  # constants of what was rearranged

    def input(self, node: Input) -> float:
        return 1.0

    def wire(self, node: Wire, parents: Sequence[float]) -> float:
        if node.role == "order":
            return parents[0]
        if node.role == "sum":
            return sum(abs(s) * p for s, p in zip(node.scales, parents, strict=True))
        if node.role == "rearrange":
            if len(parents) == 1:
                self.moved[node.name] = parents[0]
            source = index_map(self.graph.index, node, self.tensors)
            sizes = [self.graph[p].features for p in node.parents]
            counts = torch.bincount(source, minlength=sum(sizes)).split(sizes)
            return math.sqrt(sum(int(c.max()) * p**2 for c, p in zip(counts, parents, strict=True)))
        apart = sum(self._norm(node, i) * p for i, p in enumerate(parents))
        before = self.moved.get(node.parents[0]) if len(parents) == 1 else None
        return apart if before is None else min(apart, before * self._around(node))

    def affine(self, node: Affine, parent: float) -> float:
        weight, size = self.tensors(node.weight), node.features * self.graph[node.parents[0]].features
        if not isinstance(node, Convolution) or size <= _ENTRIES:
            return parent * _spectral(node.matrix(weight, self.graph))
        if isinstance(node.spec, FrozenSpec):
            return parent * float(torch.linalg.matrix_norm(transfer(weight, tuple(weight.shape[2:])), 2).max())
        assert isinstance(node.spec, Spec)
        return parent * _convolution(node.spec, weight, self.graph[node.parents[0]].shape, node.shape)

    def activation(self, node: Activation, parent: float) -> float:
        activation = node.resolve(self.module)
        if activations.mixed(activation, node.shape) is not None:
            sector = activations.sector(activation)
            return parent * (abs(float(sector.center)) + float(sector.radius))
        return parent * max(map(abs, activations.slope_bounds(activation)))

    def _norm(self, node: Wire, place: int) -> float:
        """Norm of a linear operation as a function of one of its parents."""
        shape = self.graph[node.parents[place]].shape
        size = math.prod(shape)
        rest = [torch.zeros(1, *self.graph[p].shape, dtype=torch.float64) for p in node.parents]

        def run(x: Tensor, tensors: Tensors = self.tensors) -> Tensor:
            given = [x if i == place else z.expand(len(x), *z.shape[1:]) for i, z in enumerate(rest)]
            return node.bind(tensors)(*given)

        if size * node.features <= _ENTRIES:
            return _spectral(run(torch.eye(size, dtype=torch.float64).reshape(size, *shape)).reshape(size, -1))
        if node.operation.startswith("conv"):
            return _convolution(*self._spec(node), shape, node.shape)
        if node.operation == "linear":  # on each token
            return _spectral(self.tensors(node.constants[0]))
        if node.operation not in _POSITIVE:
            raise UnsupportedOpError(node.name, f"'{node.operation}' is too large for its matrix")

        def size_of(path: str) -> Tensor:
            found = self.tensors(path)
            return found.abs() if found.is_floating_point() else found

        with torch.enable_grad():
            ones = torch.ones(1, *shape, dtype=torch.float64, requires_grad=True)
            rows = run(ones, size_of)
            (columns,) = torch.autograd.grad(rows.sum(), ones)
        return math.sqrt(float(rows.max()) * float(columns.max()))

    def _spec(self, node: Wire, border: tuple[int, ...] = ()) -> tuple[Spec, Tensor]:
        """What a given convolution computes, up to its padding with zeros, and its weight."""
        operation: Any = resolve(node.target)
        own = {a.name: a.default_value for a in operation._schema.arguments if a.has_default_value()}
        own |= dict(zip((a.name for a in operation._schema.arguments), node.args, strict=False))
        weight = self.tensors(own["weight"].path)
        stride, dilation = (_wide(own[name], weight.ndim - 2) for name in ("stride", "dilation"))
        padding = own["padding"] if isinstance(own["padding"], str) else _wide(own["padding"], weight.ndim - 2)
        kind = "transpose" in node.operation
        mode = "circular" if border else "zeros"
        return Spec(weight.ndim - 2, stride, padding, dilation, own["groups"], kind, mode=mode, border=border), weight

    def _around(self, node: Wire) -> float:
        """Norm of a linear operation together with the rearrangement that it reads."""
        moved = self.graph[node.parents[0]]
        assert isinstance(moved, Wire)
        shape = self.graph[moved.parents[0]].shape
        size = math.prod(shape)
        if size * max(node.features, moved.features) <= _ENTRIES:
            unit = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
            return _spectral(node.bind(self.tensors)(moved.bind(self.tensors)(unit)).reshape(size, -1))
        if moved.operation == "pad" and "circular" in moved.args and node.operation.startswith("conv"):
            spec, weight = self._spec(node, tuple(moved.args[1]))
            if not spec.transposed and spec.padding in ("valid", (0,) * spec.dims):
                return _convolution(spec, weight, shape, node.shape)
        return math.inf


def _spectral(matrix: Tensor) -> float:
    found = float(torch.linalg.matrix_norm(matrix, 2)) if matrix.numel() else 0.0
    if not math.isfinite(found):
        raise UnsupportedOpError("a linear map", "its matrix is not finite")
    return found


def _wide(value: int | Sequence[int], count: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


def _convolution(spec: Spec, weight: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> float:
    reach = [d * (k - 1) for d, k in zip(spec.dilation, weight.shape[2:], strict=True)]
    image, repeats = (after if spec.transposed else before)[1:], 1  # (in, out / groups, *kernel): the adjoint's
    sizes = [n + r for n, r in zip(image, reach, strict=True)]
    if spec.mode == "circular":
        # Position ps of the ring is met again after n / gcd(s, n) outputs.
        sizes = list(image)
        repeats = math.prod(-(-m * math.gcd(s, n) // n) for m, s, n in zip(after[1:], spec.stride, sizes, strict=True))
    largest = max(_transfer_norm(part, sizes, spec.dilation) for part in weight.chunk(spec.groups))
    return math.sqrt(repeats) * largest


def _transfer_norm(weight: Tensor, sizes: Sequence[int], dilation: Sequence[int]) -> float:
    """``max_ω ‖K(ω)‖`` for a kernel (out, in, *kernel) over the frequencies of a ring of these sizes."""
    found = weight.to(torch.complex128)
    for axis, (n, d) in enumerate(zip(sizes, dilation, strict=True)):
        last = axis == len(sizes) - 1  # a real kernel: half of the frequencies along one axis
        frequencies = torch.arange(n // 2 + 1 if last else n, dtype=torch.float64) * (2 * math.pi / n)
        taps = d * torch.arange(weight.shape[2 + axis], dtype=torch.float64)
        wave = torch.polar(torch.ones(len(taps), len(frequencies), dtype=torch.float64), -taps[:, None] * frequencies)
        found = torch.tensordot(found, wave, dims=([2], [0]))  # the new axis goes to the end
    blocks = found.flatten(2).movedim(2, 0)  # (frequencies, out, in)
    largest = 0.0
    for part in blocks.split(256):
        gram = part @ part.mH if part.shape[1] <= part.shape[2] else part.mH @ part
        largest = max(largest, float(torch.linalg.eigvalsh(gram)[:, -1].max()))
    return math.sqrt(largest)
