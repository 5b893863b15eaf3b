"""A node together with the values it reads, and the questions that operators ask about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.errors import OnnxError
from ldlt.onnx.file import BATCH, OnnxNode
from ldlt.onnx.limits import show
from ldlt.onnx.program import Builder, Data

__all__ = ["PRODUCT", "Node", "Value", "broadcast"]

Value = Data | Tensor
"""What a name of the file stands for: a value that depends on the input, or a constant."""

PRODUCT = (
    "a product or quotient of two functions of the input (gating, attention) has no global Lipschitz bound; use sums, "
    "concatenations and activations"
)
"""Why products are refused."""

_FOREVER = 2**31 - 1  # files write it, or more, for the end of an axis of unknown size


def broadcast(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...] | None:
    """The common shape of two, or None if there is none."""
    size = max(len(left), len(right))
    pairs = zip((1,) * (size - len(left)) + tuple(left), (1,) * (size - len(right)) + tuple(right), strict=True)
    found = []
    for a, b in pairs:
        if a != b and 1 not in (a, b):
            return None
        found.append(b if a == 1 else a)
    return tuple(found)


class Node:
    """What an operator sees of its node.

    Attributes:
        raw: The node of the file.
        inputs: The values it reads; None for an omitted one.
        build: Where its steps go.
    """

    def __init__(self, raw: OnnxNode, inputs: list[Value | None], build: Builder) -> None:
        self.raw, self.inputs, self.build = raw, inputs, build
        self.label = raw.label
        self._unread = set(raw.attributes)

    def refuse(self, reason: str) -> OnnxError:
        """The error that names the node."""
        return OnnxError(f"{self.label}: {reason}")

    def check(self, least: int, most: int, results: int) -> None:
        """Refuse a wrong number of inputs or outputs, and mixed types."""
        while self.inputs and self.inputs[-1] is None:
            self.inputs.pop()
        if not least <= len(self.inputs) <= most or any(v is None for v in self.inputs[:least]):
            raise self.refuse(f"{len(self.inputs)} inputs; expected are {least} to {most}")
        if not self.raw.outputs or any(self.raw.outputs[results:]):
            raise self.refuse(f"{len(self.raw.outputs)} outputs; expected are 1 to {results}: export for inference")
        types = {v.dtype for v in self.inputs if v is not None and v.dtype.is_floating_point}
        if len(types) > 1 and self.raw.operator != "Dropout":
            raise self.refuse("mixes 32- and 64-bit numbers, which ONNX does not allow without a Cast")

    def refuse_unread(self) -> None:
        """Refuse attributes that nobody asked for: their meaning is unknown."""
        if self._unread:
            raise self.refuse(f"the attribute {show(min(self._unread))} is not known")

    # -- attributes ----------------------------------------------------------------------------------------------------

    def attribute(self, name: str, kind: type) -> Any:
        """An attribute of a given type, or None."""
        self._unread.discard(name)
        value = self.raw.attributes.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.refuse(f"the attribute '{name}' has a wrong type")
        return value

    def ignore(self, *names: str) -> None:
        """Accept attributes that do not matter in inference."""
        self._unread.difference_update(names)

    def number(self, name: str, default: float) -> float:
        """A finite number."""
        value = self.attribute(name, float)
        if value is not None and not math.isfinite(value):
            raise self.refuse(f"the attribute '{name}' is {value}")
        return default if value is None else float(value)

    def integer(self, name: str, default: int) -> int:
        """A whole number."""
        value = self.attribute(name, int)
        return default if value is None else int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A whole number that must be 0 or 1: readers disagree about others."""
        value = self.integer(name, int(default))
        if value not in (0, 1):
            raise self.refuse(f"the attribute '{name}' must be 0 or 1, not {value}")
        return bool(value)

    def text(self, name: str, default: str) -> str:
        """A text."""
        value = self.attribute(name, str)
        return default if value is None else str(value)

    def integers(self, name: str, place: int | None = None) -> list[int] | None:
        """Whole numbers, given as an attribute or (in newer operator sets) as the constant input at ``place``."""
        value = self.attribute(name, list)
        if value is not None and not all(isinstance(v, int) for v in value):
            raise self.refuse(f"the attribute '{name}' has a wrong type")
        if place is None or place >= len(self.inputs) or self.inputs[place] is None:
            return value
        if value is not None:
            raise self.refuse(f"'{name}' is given as an attribute and as an input")
        found = self.indices(place).reshape(-1)
        if bool((found == BATCH).any()):
            raise self.refuse(f"'{name}' depends on the batch size; every sample must be treated alike")
        return [int(v) for v in found]

    # -- inputs --------------------------------------------------------------------------------------------------------

    def data(self, place: int) -> Data:
        """An input that depends on the network's input."""
        value = self.inputs[place]
        if not isinstance(value, Data):
            raise self.refuse(f"its input {place + 1} must depend on the input of the network")
        return value

    def constant(self, place: int) -> Tensor | None:
        """A constant input, or None if it is omitted."""
        value = self.inputs[place] if place < len(self.inputs) else None
        if isinstance(value, Data):
            raise self.refuse(f"its input {place + 1} must be a constant; it is computed from the input of the network")
        return value

    def weight(self, place: int) -> Tensor:
        """A constant input of floating point numbers."""
        value = self.constant(place)
        if value is None or not value.is_floating_point():
            raise self.refuse(f"its input {place + 1} must be a constant of floating point numbers")
        return value

    def indices(self, place: int) -> Tensor:
        """A constant input of whole numbers, of any shape."""
        value = self.constant(place)
        if value is None or value.dtype != torch.int64:
            raise self.refuse(f"its input {place + 1} must be a constant of whole numbers")
        return value

    # -- axes ----------------------------------------------------------------------------------------------------------

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from the front."""
        if not -rank <= axis < rank:
            raise self.refuse(f"there is no axis {axis} among {rank}")
        return axis % rank

    def axes(self, axes: Sequence[int], rank: int) -> list[int]:
        """Different axes counted from the front, in ascending order."""
        found = sorted(self.axis(a, rank) for a in axes)
        if len(set(found)) < len(found):
            raise self.refuse(f"axis {next(a for a in found if found.count(a) > 1)} is given twice")
        return found

    def feature_axis(self, axis: int, data: Data) -> int:
        """An axis other than the batch, counted with the batch."""
        found = self.axis(axis, len(data.shape) + 1)
        if found == 0:
            raise self.refuse("works along the batch axis; every sample must be treated by itself")
        return found

    def ranges(self, sizes: Sequence[int | None]) -> dict[int, range]:
        """Which entries ``Slice`` takes of which axis; an axis of size None must be taken whole."""
        starts, ends = self.integers("starts", 1), self.integers("ends", 2)
        axes, steps = self.integers("axes", 3), self.integers("steps", 4)
        if starts is None or ends is None:
            raise self.refuse("starts and ends are missing")
        axes = list(range(len(starts))) if axes is None else axes
        steps = [1] * len(starts) if steps is None else steps
        if not len(starts) == len(ends) == len(axes) == len(steps) <= len(sizes):
            raise self.refuse("starts, ends, axes and steps must have the same length, at most one entry per axis")
        self.axes(axes, len(sizes))
        found = {}
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            place = self.axis(axis, len(sizes))
            size = sizes[place]
            if step == 0:
                raise self.refuse("a step of 0")
            if size is None:
                if (start, step) != (0, 1) or end < _FOREVER:
                    raise self.refuse("takes some samples of the batch; every sample must be treated alike")
                continue
            found[place] = range(*slice(start, end, step).indices(size))
        return found

    # -- steps ---------------------------------------------------------------------------------------------------------

    def apply(self, like: Data, shape: Sequence[int], target: Callable[..., Tensor], *args: Any) -> Data:
        """Add a step of this node."""
        return self.build.apply(self.label, like, shape, target, *args)

    def activation(self, source: Data, module: nn.Module) -> Data:
        """Add an activation of this node."""
        return self.build.layer(self.label, source, source.shape, module)
