r"""Several inputs and outputs, and other metrics of the input, as one map of vectors.

The rule, the inequality, certificates and files know networks of one input and one output in Euclidean norms. A module of
several tensors is one of these on all of its inputs side by side, and a metric is a change of units in front of it: with
``x = d ∘ z``

.. math:: \|Δy\|^2 \le ℓ^2 \sum_i (Δx_i/d_i)^2 \quad\Longleftrightarrow\quad \|Δy\| \le ℓ\,\|Δz\| .
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.check import sample_shape
from ldlt.errors import GraphError, OptionError, ShapeError
from ldlt.evaluation import evaluating

__all__ = ["Joined", "Metric"]

Shape = tuple[int, ...]
Shapes = Sequence[Shape] | Mapping[str, Shape]


class Metric:
    r"""A weighted Euclidean norm of the input, :math:`\|Δx\|_d^2 = \sum_i (Δx_i/d_i)^2`.

    A network of the bound ``ℓ`` in it has :math:`|∂y_j/∂x_i| \le ℓ/d_i`: features of a large unit ``d_i`` may change by
    much before the output does. Radii are then in units of ``d``.

    Args:
        scale: ``d``, positive numbers, of the shape of one sample or spreading to it; for several inputs one such
            argument for each.

    Example:
        >>> net = ldlt.nn.FeedForward(2, [16], 1, metric=ldlt.Metric([1.0, 10.0]))
    """

    def __init__(self, *scale: Any) -> None:
        self.scales = [torch.as_tensor(s, dtype=torch.float64) for s in scale]
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

    Attributes:
        parts: Name of each output (its number, where outputs have none) -> its features among all.
    """

    scale: Tensor

    def __init__(self, module: nn.Module, shapes: Shapes, metric: Metric | None = None) -> None:
        super().__init__()
        self.module = module
        self.names = list(shapes) if isinstance(shapes, Mapping) else None
        self.shapes = [sample_shape(s) for s in (shapes.values() if isinstance(shapes, Mapping) else shapes)]
        like = next((p for p in module.parameters() if p.is_floating_point()), torch.zeros(()))
        if metric is not None:
            self.register_buffer("scale", metric.flat(self.shapes).to(like))
        self.scaled = metric is not None
        with evaluating(module), torch.no_grad():
            try:
                found = self._run([torch.zeros(2, *s, dtype=like.dtype, device=like.device) for s in self.shapes])
            except Exception as error:
                raise GraphError(f"the module cannot be run on inputs of shapes {self.shapes}: {error}") from error
        self.kind = type(found)
        tensors = self._tensors(found)
        if not tensors or not all(isinstance(t, Tensor) and t.ndim > 1 for t in tensors.values()):
            raise GraphError("the outputs of a module are a tensor, or a tuple, list or dictionary of tensors (batch, ...)")
        self.outputs = {name: tuple(t.shape[1:]) for name, t in tensors.items()}
        ends = torch.tensor([prod(s) for s in self.outputs.values()]).cumsum(0).tolist()
        self.parts = {n: slice(e - prod(s), e) for (n, s), e in zip(self.outputs.items(), ends, strict=True)}

    def _run(self, inputs: Sequence[Tensor]) -> Any:
        return self.module(*inputs) if self.names is None else self.module(**dict(zip(self.names, inputs, strict=True)))

    def _tensors(self, found: Any) -> dict[str, Tensor]:
        if isinstance(found, Tensor):
            return {"0": found}
        if isinstance(found, Mapping):
            return {str(n): t for n, t in found.items()}
        return {str(i): t for i, t in enumerate(found)} if isinstance(found, (tuple, list)) else {}

    def join(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        """The inputs side by side, in units of the metric (batch, features)."""
        if named:
            if inputs or self.names is None or set(named) != set(self.names):
                raise ShapeError(f"the inputs are {self.names or len(self.shapes)}, not {list(named)}")
            inputs = tuple(named[n] for n in self.names)
        if len(inputs) != len(self.shapes):
            raise ShapeError(f"the network has {len(self.shapes)} inputs, not {len(inputs)}")
        for x, shape in zip(inputs, self.shapes, strict=True):
            if not isinstance(x, Tensor) or tuple(x.shape[x.ndim - len(shape) :]) != shape or x.ndim < len(shape):
                raise ShapeError(f"inputs must be of shapes {[('batch', *s) for s in self.shapes]}")
        z = torch.cat([x.flatten(x.ndim - len(s)) for x, s in zip(inputs, self.shapes, strict=True)], -1)
        return z / self.scale if self.scaled else z

    def restore(self, y: Tensor) -> Any:
        """Features (..., k) as the module's own outputs."""
        found = {n: y[..., self.parts[n]].unflatten(-1, s) for n, s in self.outputs.items()}
        if issubclass(self.kind, Tensor):
            return found["0"]
        return found if issubclass(self.kind, Mapping) else self.kind(found.values())

    def forward(self, z: Tensor) -> Tensor:
        """All outputs side by side (batch, k), for all inputs side by side."""
        x = z * self.scale if self.scaled else z
        parts = x.split([prod(s) for s in self.shapes], 1) if len(self.shapes) > 1 else [x]
        shaped = [p if len(s) == 1 else p.unflatten(1, s) for p, s in zip(parts, self.shapes, strict=True)]
        tensors = [t.flatten(1) for t in self._tensors(self._run(shaped)).values()]
        return torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0]
