r"""Several inputs and outputs, and other metrics of the input, as one map of vectors.

The rule, the inequality, certificates and files know networks of one input and one output in Euclidean norms. A module
of several tensors is one of these on all of its inputs side by side, and a metric is a change of units in front of it:
with ``x = d ∘ z``

.. math:: \|Δy\|^2 \le ℓ^2 \sum_i (Δx_i/d_i)^2 \quad\Longleftrightarrow\quad \|Δy\| \le ℓ\,\|Δz\| .
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.check import positive, sample_shape
from ldlt.errors import BoundError, GraphError, OptionError, ShapeError, UnsupportedOpError
from ldlt.evaluation import evaluating, reference
from ldlt.graph import Graph, Wire

__all__ = ["Joined", "Metric", "Promise", "promised"]

Shape = tuple[int, ...]
Shapes = Sequence[Shape] | Mapping[str, Shape]


class Metric:
    r"""A bound in a weighted norm of the input, :math:`\|Δy\|^2 \le ℓ^2 \sum_i (Δx_i/d_i)^2`.

    In particular :math:`|∂y_j/∂x_i| \le ℓ/d_i`: features of a large unit ``d_i`` may change by much before the output
    does. Radii, attacks and certificates are then in units of ``d``.

    Args:
        *scale: ``d``, positive numbers, of the shape of one sample or spreading to it; for several inputs one such
            argument for each.
        bound: ℓ, or one number per output, as in :class:`ldlt.Lipschitz`.

    Example:
        >>> import ldlt
        >>> net = ldlt.nn.FeedForward(2, [16], 1, bound=ldlt.Metric([1.0, 10.0]))
        >>> net(torch.zeros(3, 2)).shape
        torch.Size([3, 1])
    """

    def __init__(self, *scale: Any, bound: Any = 1.0) -> None:
        self.bound = bound
        try:
            self.scales = [torch.as_tensor(s, dtype=torch.float64) for s in scale]
        except (TypeError, ValueError, RuntimeError):
            raise OptionError("a metric needs numbers, one per input feature") from None
        if not scale or not all(bool(((s > 0) & s.isfinite()).all()) for s in self.scales):
            raise OptionError("a metric needs positive and finite numbers, one per input feature")

    def flat(self, shapes: Sequence[Shape]) -> Tensor:
        """``d`` of all features of all inputs side by side."""
        scales = self.scales * len(shapes) if len(self.scales) == 1 else self.scales
        try:
            return torch.cat([s.expand(n).flatten() for s, n in zip(scales, shapes, strict=True)])
        except (RuntimeError, ValueError):
            given = [tuple(s.shape) for s in self.scales]
            raise ShapeError(f"a metric of shapes {given} does not fit inputs of shapes {list(shapes)}") from None


class Joined(nn.Module):
    """A module of several inputs or outputs as a map of one tensor of features to another.

    Args:
        module: The module; its outputs are a tensor, or a tuple, list or dictionary of tensors (batch, ...).
        shapes: Shapes of its inputs, in order or by name.
        metric: Of the inputs.
        conditions: Inputs, by number or name, that the map is not a function of but a family over: buffers, which take
            the place of constants.

    Attributes:
        parts: Name of each output (its number, where outputs have none) -> its features among all.
    """

    scale: Tensor

    def __init__(
        self, module: nn.Module, shapes: Shapes, metric: Metric | None = None, conditions: Sequence[int | str] = ()
    ) -> None:
        super().__init__()
        self.module = module
        self.names = list(shapes) if isinstance(shapes, Mapping) else None
        self.every = [sample_shape(s) for s in (shapes.values() if isinstance(shapes, Mapping) else shapes)]
        known = list(range(len(self.every))) if self.names is None else self.names
        if not set(conditions) < set(known):
            raise OptionError(f"conditions must be some of the inputs {known}, and not all of them, not {conditions!r}")
        self.conditions = [known.index(c) for c in conditions]  # type: ignore[arg-type]
        self.shapes = [s for i, s in enumerate(self.every) if i not in self.conditions]
        like = reference(module)
        for i in self.conditions:
            self.register_buffer(f"condition_{i}", like.new_zeros(1, *self.every[i]), persistent=False)
        if metric is not None:
            self.register_buffer("scale", metric.flat(self.shapes).to(like))
        self.scaled = metric is not None
        try:
            with evaluating(module), torch.no_grad():
                found = self._run([torch.zeros(2, *s, dtype=like.dtype, device=like.device) for s in self.every])
        except Exception as error:
            raise GraphError(f"the module cannot be run on inputs of shapes {self.every}: {error}") from error
        self.kind = type(found)
        tensors = self._tensors(found)
        if not tensors or not all(isinstance(t, Tensor) and t.ndim > 1 for t in tensors.values()):
            raise GraphError(
                "the outputs of a module are a tensor, or a tuple, list or dictionary of tensors (batch, ...)"
            )
        self.outputs = {name: tuple(t.shape[1:]) for name, t in tensors.items()}
        ends = torch.tensor([prod(s) for s in self.outputs.values()]).cumsum(0).tolist()
        self.parts = {n: slice(e - prod(s), e) for (n, s), e in zip(self.outputs.items(), ends, strict=True)}

    @property
    def features(self) -> int:
        """Features of all inputs."""
        return sum(prod(s) for s in self.shapes)

    def _run(self, inputs: Sequence[Tensor]) -> Any:
        return self.module(*inputs) if self.names is None else self.module(**dict(zip(self.names, inputs, strict=True)))

    def _tensors(self, found: Any) -> dict[str, Tensor]:
        if isinstance(found, Tensor):
            return {"0": found}
        if isinstance(found, Mapping):
            return {str(n): t for n, t in found.items()}
        return {str(i): t for i, t in enumerate(found)} if isinstance(found, (tuple, list)) else {}

    def join(self, *inputs: Tensor, **named: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The inputs side by side, in units of the metric (..., features), and conditions (batch, ...) by buffer."""
        if named:
            if inputs or self.names is None or set(named) != set(self.names):
                raise ShapeError(f"the inputs are {self.names or len(self.every)}, not {list(named)}")
            inputs = tuple(named[n] for n in self.names)
        if len(inputs) != len(self.every):
            raise ShapeError(f"the network has {len(self.every)} inputs, not {len(inputs)}")
        for x, shape in zip(inputs, self.every, strict=True):
            if not isinstance(x, Tensor) or tuple(x.shape[x.ndim - len(shape) :]) != shape or x.ndim < len(shape):
                raise ShapeError(f"inputs must be of shapes {[('batch', *s) for s in self.every]}")
        found = [x.flatten(x.ndim - len(s)) for x, s in zip(inputs, self.every, strict=True)]
        z = torch.cat([x for i, x in enumerate(found) if i not in self.conditions], -1)
        given = {f"condition_{i}": inputs[i].reshape(-1, *self.every[i]) for i in self.conditions}
        return z / self.scale if self.scaled else z, given

    def check(self, graph: Graph) -> None:
        """Refuse conditions that do more than shift values: the weights would be functions of them.

        Where they only shift, differences of two samples under the same condition do not see them.
        """
        given = {f"condition_{i}" for i in self.conditions}
        for node in graph.nodes:
            seen = isinstance(node, Wire) and any(given & {*graph.sources(path)} for path in node.constants)
            if isinstance(node, Wire) and node.role != "sum" and seen:
                raise UnsupportedOpError(
                    node.name, "a condition may be added to what depends on the input, not multiply or choose it"
                )

    def restore(self, y: Tensor) -> Any:
        """Features (..., k) as the module's own outputs."""
        found = {n: y[..., self.parts[n]].unflatten(-1, s) for n, s in self.outputs.items()}
        if issubclass(self.kind, Tensor):
            return found["0"]
        make = getattr(self.kind, "_make", self.kind)  # of a named tuple
        return found if issubclass(self.kind, Mapping) else make(found.values())

    def forward(self, z: Tensor) -> Tensor:
        """All outputs side by side (batch, k), for all inputs side by side."""
        x = z * self.scale if self.scaled else z
        parts = x.split([prod(s) for s in self.shapes], 1) if len(self.shapes) > 1 else [x]
        shaped = [p if len(s) == 1 else p.unflatten(1, s) for p, s in zip(parts, self.shapes, strict=True)]
        for i in sorted(self.conditions):
            shaped.insert(i, self.get_buffer(f"condition_{i}"))
        tensors = [t.flatten(1) for t in self._tensors(self._run(shaped)).values()]
        return torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0]


@dataclass(frozen=True)
class Promise:
    """What is bounded by what.

    Attributes:
        joined: The module as one map of vectors, if it is not one already.
        bound: ℓ, the largest bound of an output.
        scales: Bound of each feature of the output (k,) in units of ℓ; None if the bound is one number.
        apart: Whether each output of the module is a map with a bound of its own.
    """

    joined: Joined | None
    bound: float
    scales: Tensor | None
    apart: bool


def promised(module: nn.Module, bound: Any, input_shape: Any, conditions: Sequence[int | str] = ()) -> Promise:
    """Read these arguments of :class:`ldlt.Lipschitz`."""
    metric = bound if isinstance(bound, Metric) else None
    value = bound if metric is None else metric.bound
    several = isinstance(input_shape, Mapping) or (
        isinstance(input_shape, Sequence) and any(not isinstance(n, Integral) for n in input_shape)
    )
    single = isinstance(value, str) or not (isinstance(value, Mapping | Sequence) or getattr(value, "ndim", False))
    joined = None
    if conditions and not several:
        raise OptionError("conditions are some of several inputs: pass input_shape as a list of shapes or by name")
    if several or metric is not None or not single or _has_several_outputs(module, sample_shape(input_shape)):
        joined = Joined(module, input_shape if several else [sample_shape(input_shape)], metric, conditions)
    if single or joined is None:
        return Promise(joined, positive("bound", value, BoundError), None, False)
    sizes = {n: prod(s) for n, s in joined.outputs.items()}
    apart = len(sizes) > 1
    names = list(sizes) if apart else [str(i) for i in range(sum(sizes.values()))]
    given = dict(value) if isinstance(value, Mapping) else dict(zip(names, value, strict=False))
    if {str(n) for n in given} != set(names) or len(given) != len(value):
        raise BoundError(f"one bound is needed for each of the outputs {', '.join(names)}")
    numbers = [positive(f"bound of output {n}", given[n], BoundError) for n in names]
    most = max(numbers)
    counts = torch.tensor([sizes[n] for n in names] if apart else [1] * len(names))
    scales = torch.tensor([v / most for v in numbers], dtype=torch.float64).repeat_interleave(counts)
    return Promise(joined, most, scales, apart)


def _has_several_outputs(module: nn.Module, shape: Shape) -> bool:
    like = reference(module)
    try:
        with evaluating(module), torch.no_grad(), torch.random.fork_rng(devices=[]):
            return not isinstance(module(like.new_zeros(2, *shape)), Tensor)
    except Exception:  # the front door says what is wrong
        return False
