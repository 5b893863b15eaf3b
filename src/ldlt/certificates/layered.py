r"""A bound from the norms of single layers, for networks that the matrix inequality does not reach.

Every value ``t`` of the traced program gets a constant ``ℓ_t`` with ``‖Δt‖ ≤ ℓ_t‖Δx‖``: a layer multiplies it by its
norm, an activation by its steepest slope, sums add constants, concatenations add their squares. Sound for any network
of the operations below, and loose: that is why it is the last resort of :func:`ldlt.certify`, which says so.

**Convolutions.** A convolution with zero padding is a part of the circular convolution on a ring of ``n + d(k − 1)``
points per axis (extend the input by zeros, drop outputs), so with the transfer function ``K(ω) = Σ_j W_j e^{-iωdj}``

.. math:: \|\text{conv}\| \;\le\; \max_ω \|K(ω)\|_2

over the frequencies of that ring; for circular padding the ring has ``n`` points. Strides drop outputs; a transposed
convolution is the adjoint of one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ldlt import activations
from ldlt.errors import LdltError, UnsupportedOpError
from ldlt.evaluation import evaluating, reference
DIVIDE = IN_PLACE = MULTIPLY = NEGATE = REPEAT = SELECT = STACK = set()
SUM = {}
symbolic_trace = None  # being moved to the new graph

__all__ = ["LayerNorms", "layer_norms"]

_BATCH = 3

# No entry is there more than once, none is larger than it was: the norm does not grow.
_SAME = SELECT | NEGATE
_ADD_IN_PLACE: set[Any] = {operator.iadd, operator.isub}
_ADD = set(SUM) - IN_PLACE
_SUM = _ADD | _ADD_IN_PLACE
_TIMES = MULTIPLY - IN_PLACE
_OVER = DIVIDE - IN_PLACE
_MEAN: set[Any] = {torch.mean, "mean"}
_TOTAL: set[Any] = {torch.sum, "sum"}


class LayerNorms(NamedTuple):
    """A bound from single layers.

    Attributes:
        bound: The Lipschitz constant.
        outputs: Number of outputs.
    """

    bound: float
    outputs: int


def layer_norms(model: nn.Module, input_shape: Sequence[int]) -> LayerNorms:
    """A Lipschitz constant of a network in evaluation mode, from the norms of its layers, in floating point.

    Args:
        model: The network.
        input_shape: Shape of one input.

    Raises:
        UnsupportedOpError: An operation without a rule.
    """
    with evaluating(model):
        run = _Run(symbolic_trace(nn.Sequential(model)))  # a single layer is one, not what its forward is made of
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(_BATCH, *input_shape, generator=generator).to(reference(model))
        with torch.no_grad():
            found = run.run(x.clone())
            apart = torch.cat([model(row[None].clone()) for row in x])
        close = found.shape == apart.shape and torch.allclose(
            found, apart, rtol=1e-3, atol=1e-3 * float(apart.abs().max())
        )
        if not close:  # hooks, or samples that influence each other
            raise UnsupportedOpError(run.result.name, "the traced program is not what the module computes per sample")
    return LayerNorms(run.constants[run.result], found[0].numel())


class _Run(fx.Interpreter):
    """Runs a program on one input for its shapes, and carries constants along."""

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__(program, garbage_collect_values=False)
        self.constants: dict[fx.Node, float] = {}
        self.result: fx.Node = next(iter(program.graph.nodes))

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        try:
            found = self._constant(n, value)
        except (LdltError, AttributeError, TypeError, ValueError, KeyError) as error:
            if isinstance(error, UnsupportedOpError):
                raise
            raise UnsupportedOpError(n.name, f"no rule for single layers fits it: {error}") from error
        if found is not None:
            self.constants[n] = found
            if isinstance(value, Tensor) and (value.ndim < 1 or len(value) != _BATCH):
                raise UnsupportedOpError(n.name, "the first dimension must stay the batch")
        return value

    def _overwrites(self, node: fx.Node, source: Any) -> None:
        """Refuse to overwrite a value that anything else may read: constants belong to what it was."""
        fresh = isinstance(source, fx.Node) and (
            source.op == "call_module" or (source.op == "call_function" and source.target in _ADD)
        )
        if not fresh or len(source.users) > 1 or self._passes_on(source):
            raise UnsupportedOpError(node.name, "a value is overwritten in place that may be read elsewhere")

    def _passes_on(self, node: fx.Node) -> bool:
        """Whether the value of a module may share memory with its input."""
        if node.op != "call_module":
            return False
        layer = self.module.get_submodule(str(node.target))
        return not isinstance(layer, _FRESH) and not (
            activations.is_activation(layer) and not getattr(layer, "inplace", False)
        )

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self.env[node].shape[1:])

    def _constant(self, node: fx.Node, value: Any) -> float | None:
        live = [a for a in node.all_input_nodes if a in self.constants]
        if node.op == "placeholder":
            return 1.0
        if node.op == "output":
            if not (isinstance(node.args[0], fx.Node) and node.args[0] in self.constants):
                raise UnsupportedOpError(node.name, "the module must return one tensor that depends on its input")
            self.result = node.args[0]
            return None
        if not live:
            return None
        given = [self.constants[a] for a in live]
        if node.op == "call_module":
            if len(live) != 1:
                raise UnsupportedOpError(node.name, "a layer with several inputs has no rule")
            layer = self.module.get_submodule(str(node.target))
            return given[0] * self._layer(node, layer, self._shape(live[0]), tuple(value.shape[1:]))
        return self._call(node, live, given, value)

    def _layer(self, node: fx.Node, layer: nn.Module, before: tuple[int, ...], after: tuple[int, ...]) -> float:
        if activations.is_activation(layer):
            if getattr(layer, "inplace", False):
                self._overwrites(node, node.args[0])
            return _slope(layer)
        for kind, rule in _LAYERS.items():
            if isinstance(layer, kind):
                return rule(layer, before, after)
        raise UnsupportedOpError(node.name, f"{type(layer).__name__} has no rule for single layers")

    def _call(self, node: fx.Node, live: list[fx.Node], given: list[float], value: Any) -> float:
        target = node.target
        others = [a for a in node.args if not (isinstance(a, fx.Node) and a in self.constants)]
        if target in STACK:
            return math.sqrt(sum(self.constants[a] ** 2 for a in _occurrences(node) if a in self.constants))
        if target in _ADD_IN_PLACE:
            self._overwrites(node, node.args[0])
        if target in _SUM and len(node.args) == 2 and not node.kwargs and self._same_shapes(live, value):
            return sum(self.constants[a] for a in node.args if isinstance(a, fx.Node) and a in self.constants)
        if len(live) != 1:
            raise UnsupportedOpError(node.name, f"'{_label(target)}' of several functions of the input has no rule")
        ratio = _ratio(self.env[live[0]], value)
        if target in _SAME:
            if target is operator.getitem and not _is_slice(node.args[1]):
                raise UnsupportedOpError(node.name, "indices may repeat entries; use slices")
            if isinstance(value, Tensor) and value.dtype != self.env[live[0]].dtype:
                raise UnsupportedOpError(node.name, "its bits are read as numbers of another kind")
            return given[0]
        if target in REPEAT:
            if any(isinstance(self.env[a], Tensor) for a in node.all_input_nodes if a not in self.constants):
                raise UnsupportedOpError(node.name, "entries may be repeated unequally often; repeat by a number")
            return given[0] * math.sqrt(ratio)
        if target in _MEAN | _TOTAL:
            return given[0] * (math.sqrt(ratio) if target in _MEAN else 1 / math.sqrt(ratio))
        if target in _TIMES | _OVER and not node.kwargs and len(others) == 1 and isinstance(others[0], int | float):
            size = abs(float(others[0]))
            if target in _TIMES:
                return given[0] * size
            if isinstance(node.args[0], fx.Node) and size > 0:
                return given[0] / size
        rest = tuple(self.env[a] if isinstance(a, fx.Node) else a for a in node.args[1:])
        found = activations.from_call(target, rest, dict(node.kwargs))
        if found is None or activations.is_inplace(target, rest, dict(node.kwargs)):
            raise UnsupportedOpError(node.name, f"'{_label(target)}' has no rule for single layers")
        return given[0] * _slope(found)

    def _same_shapes(self, live: list[fx.Node], value: Tensor) -> bool:
        return all(self.env[a].shape == value.shape for a in live)


def _occurrences(node: fx.Node) -> list[fx.Node]:
    """The values that a node reads, as often as it reads them."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _label(target: Any) -> str:
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _is_slice(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(p is None or p is Ellipsis or isinstance(p, int | slice) for p in parts)


def _ratio(before: Any, after: Any) -> float:
    """Entries after over entries before; 1 for tuples."""
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return 1.0
    return after.numel() / before.numel()


def _slope(layer: nn.Module) -> float:
    """Steepest slope of an activation."""
    found = activations.sector(layer)
    if found.group is not None:
        return 1.0
    return max(abs(s) for s in activations.slope_bounds(layer))


# -- layers ------------------------------------------------------------------------------------------------------------

Rule = Callable[[Any, tuple[int, ...], tuple[int, ...]], float]


def _linear(layer: nn.Linear, before: tuple[int, ...], after: tuple[int, ...]) -> float:
    return float(torch.linalg.matrix_norm(layer.weight.detach().double(), 2))


def _conv(layer: Any, before: tuple[int, ...], after: tuple[int, ...]) -> float:
    reach = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    repeats = 1
    if layer.transposed:
        sizes = [n + r for n, r in zip(after[1:], reach, strict=True)]
        weight = layer.weight.detach().double()  # (in, out / groups, *kernel): the adjoint's
    else:
        weight = layer.weight.detach().double()
        if layer.padding_mode == "zeros":
            sizes = [n + r for n, r in zip(before[1:], reach, strict=True)]
        elif layer.padding_mode == "circular":
            # Position ps of the ring is met again after n / gcd(s, n) outputs.
            sizes = list(before[1:])
            repeats = math.prod(
                -(-m * math.gcd(s, n) // n) for m, s, n in zip(after[1:], layer.stride, sizes, strict=True)
            )
        else:
            raise ValueError(f"padding_mode='{layer.padding_mode}' repeats entries")
    largest = max(_transfer_norm(part, sizes, layer.dilation) for part in weight.chunk(layer.groups))
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


def _each(value: int | tuple[int, ...], count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else list(value)


def _overlap(layer: Any, axes: int) -> int:
    """Windows that an entry is part of, at most."""
    kernel, stride = _each(layer.kernel_size, axes), _each(layer.stride, axes)
    dilation = _each(getattr(layer, "dilation", 1), axes)
    return math.prod(-(-k // s) if d == 1 else k for k, s, d in zip(kernel, stride, dilation, strict=True))


def _average(layer: Any, before: tuple[int, ...], after: tuple[int, ...]) -> float:
    axes = len(before) - 1
    if getattr(layer, "divisor_override", None) is not None:
        raise ValueError("divisor_override is not understood")
    # A mean of K entries has a square of at most the K-th part of the sum of squares; at a border K may be one.
    whole = not layer.ceil_mode and (layer.count_include_pad or not any(_each(layer.padding, axes)))
    entries = math.prod(_each(layer.kernel_size, axes)) if whole else 1
    return math.sqrt(_overlap(layer, axes) / entries)


def _adaptive(layer: Any, before: tuple[int, ...], after: tuple[int, ...]) -> float:
    pairs = list(zip(before[1:], after[1:], strict=True))
    overlap = math.prod(1 if n % m == 0 else 2 for n, m in pairs if m <= n)
    if any(m > n for n, m in pairs):
        raise ValueError("more outputs than inputs along an axis")
    return math.sqrt(overlap / math.prod(n // m for n, m in pairs))


def _largest(layer: Any, before: tuple[int, ...], after: tuple[int, ...]) -> float:
    return math.sqrt(_overlap(layer, len(before) - 1))


def _normalise(layer: Any, before: tuple[int, ...], after: tuple[int, ...]) -> float:
    if layer.running_var is None:
        raise ValueError("it divides by statistics of the batch")
    size = 1 / (layer.running_var.detach().double() + layer.eps).sqrt()
    return float((size if layer.weight is None else layer.weight.detach().double() * size).abs().max())


def _repeated(layer: nn.Upsample, before: tuple[int, ...], after: tuple[int, ...]) -> float:
    if layer.mode != "nearest" or any(m % n for n, m in zip(before[1:], after[1:], strict=True)):
        raise ValueError("nearest neighbours by a whole factor are understood")
    return math.sqrt(math.prod(after) / math.prod(before))


def _isometry(layer: nn.Module, before: tuple[int, ...], after: tuple[int, ...]) -> float:
    return 1.0


_LAYERS: dict[type[nn.Module] | tuple[type[nn.Module], ...], Rule] = {
    nn.Linear: _linear,
    (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d): _conv,
    (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d): _average,
    (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d): _adaptive,
    (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d): _largest,
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d): _normalise,
    (nn.Upsample, nn.UpsamplingNearest2d): _repeated,
    (
        nn.Identity,
        nn.Flatten,
        nn.Unflatten,
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.PixelShuffle,
        nn.PixelUnshuffle,
        nn.ZeroPad1d,
        nn.ZeroPad2d,
    ): _isometry,
}
_FRESH = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._MaxPoolNd,
)
"""Layers whose output is a tensor of its own."""
