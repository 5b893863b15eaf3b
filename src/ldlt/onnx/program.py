"""The module that an ONNX file becomes: a list of torch operations, built one by one."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.errors import OnnxError
from ldlt.onnx.limits import OnnxLimits

__all__ = ["Builder", "Data", "Held", "OnnxModule", "Slot", "Step"]


@dataclass(frozen=True)
class Slot:
    """Place of an intermediate value in the arguments of a step; 0 is the input."""

    index: int


@dataclass(frozen=True)
class Held:
    """Place of a buffer of the module in the arguments of a step."""

    name: str


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        target: A function, or the name of a submodule.
        args: Its arguments, with :class:`Slot` and :class:`Held` in the place of tensors.
        last: Slots that are not read afterwards.
    """

    target: Callable[..., Tensor] | str
    args: tuple[Any, ...]
    last: tuple[int, ...] = ()


class OnnxModule(nn.Module):
    """A network read from an ONNX file, as a plain module.

    Weights of the file are parameters of ``nn.Linear`` layers, other constants are buffers. Submodules are named after
    the operator and the place of its node in the file.

    Args:
        steps: The program; step ``i`` (from 0) writes slot ``i + 1``.
        result: The slot that is returned.
    """

    def __init__(self, steps: Sequence[Step], result: int) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.result = result

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch, (n, *shape), to (n, k)."""
        values: dict[int, Tensor] = {0: x}

        def fill(arg: Any) -> Any:
            if isinstance(arg, Slot):
                return values[arg.index]
            if isinstance(arg, Held):
                return getattr(self, arg.name)
            return tuple(fill(a) for a in arg) if isinstance(arg, tuple) else arg

        for index, step in enumerate(self.steps, 1):
            call = getattr(self, step.target) if isinstance(step.target, str) else step.target
            values[index] = call(*(fill(a) for a in step.args))
            for slot in step.last:
                del values[slot]
        return values[self.result]


@dataclass(frozen=True)
class Data:
    """A value that depends on the input.

    Attributes:
        slot: Where the program keeps it.
        shape: Its shape without the batch, which is always the first axis.
        dtype: Its type in the file.
        gate_of: The slot whose sigmoid it is, if it is one (``x * Sigmoid(x)`` is an activation).
    """

    slot: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    gate_of: int | None = None

    @property
    def features(self) -> int:
        """Number of entries per sample."""
        return math.prod(self.shape)


def _slots(arg: Any) -> set[int]:
    if isinstance(arg, Slot):
        return {arg.index}
    return set().union(*map(_slots, arg)) if isinstance(arg, tuple) else set()


def _held(arg: Any) -> set[str]:
    if isinstance(arg, Held):
        return {arg.name}
    return set().union(*map(_held, arg)) if isinstance(arg, tuple) else set()


class Builder:
    """Collects steps, layers and buffers within the limits.

    Args:
        shape: Shape of one sample of the input.
        dtype: Its type in the file.
        wide: Type of all parameters and buffers of the module.
        batch: Declared batch size, or None.
        limits: Checked before each allocation.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, wide: torch.dtype, batch: int | None, limits: OnnxLimits
    ) -> None:
        self.wide, self.batch, self.limits = wide, batch, limits
        self.steps: list[Step] = []
        self.layers: dict[str, nn.Module] = {}
        self.buffers: dict[str, Tensor] = {}
        self.spent = 0
        self.stem = "node"
        self.input = Data(0, shape, dtype)
        self.fits("the input", shape)

    # -- limits --------------------------------------------------------------------------------------------------------

    def spend(self, what: str, count: int) -> None:
        """Account for entries that are about to be allocated."""
        if count > self.limits.elements - self.spent:
            raise OnnxError(
                f"{what}: weights, constants and intermediate values have more than {self.limits.elements} entries; "
                "raise the limit 'elements' if you trust the file"
            )
        self.spent += count

    def fits(self, what: str, shape: Sequence[int]) -> None:
        """Account for an intermediate value."""
        count = math.prod(shape)
        if count < 1:
            raise OnnxError(f"{what}: the result, of shape {tuple(shape)} per sample, has no entries")
        if count > self.limits.features:
            raise OnnxError(
                f"{what}: the result, of shape {tuple(shape)} per sample, has more than {self.limits.features} "
                "entries; raise the limit 'features' if you trust the file"
            )
        self.spend(what, count)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def apply(
        self, what: str, like: Data, shape: Sequence[int], target: Callable[..., Tensor] | str, *args: Any
    ) -> Data:
        """Add a step with a result of a known shape."""
        self.fits(what, shape)
        self.steps.append(Step(target, args))
        return Data(len(self.steps), tuple(shape), like.dtype)

    def layer(self, what: str, source: Data, shape: Sequence[int], module: nn.Module) -> Data:
        """Add a step that runs a module."""
        name, again = self.stem, 1
        while name in self.layers:
            again += 1
            name = f"{self.stem}_part{again}"
        self.layers[name] = module
        return self.apply(what, source, shape, name, Slot(source.slot))

    def hold(self, what: str, tensor: Tensor) -> Held:
        """Keep a constant as a buffer; an index keeps its type."""
        name = f"constant_{len(self.buffers)}"
        self.buffers[name] = self._own(what, tensor)
        return Held(name)

    def _own(self, what: str, tensor: Tensor) -> Tensor:
        self.spend(what, tensor.numel())
        if tensor.is_floating_point():
            tensor = tensor.to(self.wide)
            if not bool(tensor.isfinite().all()):
                raise OnnxError(f"{what}: a constant or weight is infinite or not a number")
        return tensor.clone(memory_format=torch.contiguous_format)

    def linear(self, what: str, source: Data, weight: Tensor, bias: Tensor | None = None) -> Data:
        """``x W' + b`` along the last axis."""
        rows, columns = weight.shape
        if not rows or not source.shape or source.shape[-1] != columns:
            raise OnnxError(f"{what}: a matrix of shape {(columns, rows)} does not fit {source.shape} per sample")
        layer = nn.Linear(columns, rows, bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(self._own(what, weight))
        if bias is not None:
            layer.bias = nn.Parameter(self._own(what, bias))
        return self.layer(what, source, (*source.shape[:-1], rows), layer)

    def reshape(self, what: str, source: Data, shape: Sequence[int]) -> Data:
        """The same entries in another shape."""
        if tuple(shape) == source.shape:
            return source
        return self.apply(what, source, shape, torch.reshape, Slot(source.slot), (-1, *shape))

    def permute(self, what: str, source: Data, order: Sequence[int]) -> Data:
        """Reorder the axes; ``order`` counts the axes of a sample from 0."""
        if list(order) == list(range(len(source.shape))):
            return source
        shape = [source.shape[i] for i in order]
        return self.apply(what, source, shape, torch.permute, Slot(source.slot), (0, *(i + 1 for i in order)))

    def expand(self, what: str, source: Data, shape: Sequence[int]) -> Data:
        """Repeat along axes of size 1; the number of axes stays."""
        if tuple(shape) == source.shape:
            return source
        return self.apply(what, source, shape, Tensor.expand, Slot(source.slot), (-1, *shape))

    def scale(self, what: str, source: Data, factor: float) -> Data:
        """Times a number."""
        if not math.isfinite(factor):
            raise OnnxError(f"{what}: a factor is infinite or not a number")
        if factor == 1:
            return source
        return self.apply(what, source, source.shape, operator.mul, Slot(source.slot), factor)

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, output: Data) -> OnnxModule:
        """The module, without steps that its output does not need, returning (n, k)."""
        output = self.reshape("the output", output, (output.features,))
        needed = {output.slot}
        for index in range(len(self.steps), 0, -1):
            if index in needed:
                needed |= _slots(self.steps[index - 1].args)
        kept = [i for i in range(1, len(self.steps) + 1) if i in needed]
        place = {0: 0, **{old: new for new, old in enumerate(kept, 1)}}

        def moved(arg: Any) -> Any:
            if isinstance(arg, Slot):
                return Slot(place[arg.index])
            return tuple(map(moved, arg)) if isinstance(arg, tuple) else arg

        steps = [replace(self.steps[i - 1], args=moved(self.steps[i - 1].args)) for i in kept]
        alive = {place[output.slot]}
        for i in range(len(steps) - 1, -1, -1):
            read = _slots(steps[i].args) - alive
            steps[i] = replace(steps[i], last=tuple(sorted(read)))
            alive |= read
        module = OnnxModule(steps, place[output.slot])
        for step in steps:
            if isinstance(step.target, str):
                module.add_module(step.target, self.layers[step.target])
            for name in sorted(_held(step.args)):
                module.register_buffer(name, self.buffers[name])
        return module.eval()
