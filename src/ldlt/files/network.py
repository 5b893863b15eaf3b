"""The module that an ONNX file becomes: torch functions, one after another, built node by node."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.errors import LdltError, OnnxError
from ldlt.files.message import BATCH, OnnxLimits, Store
from ldlt.files.replace import show

__all__ = ["Builder", "Network", "Node", "Slot", "Step", "Value", "rows"]

_SAMPLES = 4099  # batch size of the tensors without memory on which shapes are found: no axis of a file is likely to be
_MOST_AXES = 8


@dataclass(frozen=True)
class Slot:
    """Place of an intermediate value in the arguments of a step; 0 is the input."""

    index: int


@dataclass(frozen=True)
class _Held:
    """Place of a tensor of the module in the arguments of a step."""

    name: str


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        target: A function, or the name of a layer of the module.
        args: Its arguments, with places of values and tensors.
        last: Slots that are not read afterwards.
    """

    target: Callable[..., Tensor] | str
    args: tuple[Any, ...]
    last: tuple[int, ...] = ()


class Network(nn.Module):
    r"""A network as a list of torch functions: a plain module, which is traced like any other.

    Weights of the file are parameters, other constants are buffers, activations are layers. All are named after the
    operator and the place of its node in the file.

    Args:
        steps: The program; step ``i`` (from 0) writes slot ``i + 1``.
        result: The slot that is returned.

    Shape:
        Input (batch, \*shape), output (batch, k).
    """

    def __init__(self, steps: Sequence[Step], result: int) -> None:
        super().__init__()
        self.steps, self.result = tuple(steps), result

    @property
    def activations(self) -> list[str]:
        """Names that :func:`~ldlt.graph.trace.trace` gives to its activations, in their order."""
        return [step.target for step in self.steps if isinstance(step.target, str)]

    def forward(self, x: Tensor) -> Tensor:
        """The network's output."""
        values: dict[int, Tensor] = {0: x}

        def fill(arg: Any) -> Any:
            return values[arg.index] if isinstance(arg, Slot) else getattr(self, arg.name)

        for index, step in enumerate(self.steps, 1):
            call: Any = getattr(self, step.target) if isinstance(step.target, str) else step.target
            values[index] = call(*_swap(step.args, (Slot, _Held), fill))
            for slot in step.last:
                del values[slot]
        return values[self.result]


def rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same entries of each sample in another shape."""
    return x.reshape(x.shape[0], *shape)


@dataclass(frozen=True, eq=False)
class Value:
    """A value that depends on the input.

    Attributes:
        slot: Where the program keeps it.
        meta: A tensor without memory, of its shape.
        dtype: Its type in the file.
        form: What it is known to be, such as ``("sigmoid", slot)``: parts of an activation that exporters split.
    """

    slot: int
    meta: Tensor
    dtype: torch.dtype
    form: tuple[Any, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.meta.shape[1:])

    @property
    def ndim(self) -> int:
        """Number of axes, the batch included."""
        return self.meta.ndim


def _swap(arg: Any, kinds: Any, function: Callable[[Any], Any]) -> Any:
    """Arguments with those of some types replaced, also within tuples."""
    if isinstance(arg, kinds):
        return function(arg)
    return tuple(_swap(a, kinds, function) for a in arg) if isinstance(arg, (tuple, list)) else arg


def _found(arg: Any, kind: Any) -> list[Any]:
    found: list[Any] = []
    _swap(arg, kind, found.append)
    return found


class Builder:
    """Collects the steps of a network within limits.

    Args:
        shape: Shape of one sample of the input.
        dtype: Its type in the file.
        wide: Type of all tensors of the network.
        batch: Declared batch size, or None.
        limits: Checked before each allocation.
        store: Decodes tensors.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, wide: torch.dtype, batch: int | None, limits: OnnxLimits,
        store: Store,
    ) -> None:  # fmt: skip
        self.wide, self.batch, self.limits, self.store = wide, batch, limits, store
        self.steps: list[Step] = []
        self.layers: dict[str, nn.Module] = {}
        self.tensors: dict[str, Tensor] = {}
        self.spent = 0
        self._allow("the input", math.prod(shape))
        self.input = Value(0, torch.empty(_SAMPLES, *shape, dtype=wide, device="meta"), dtype)

    def spend(self, what: str, count: int) -> None:
        """Account for entries that are about to be allocated."""
        if count > self.limits.elements - self.spent:
            raise OnnxError(
                f"{what}: weights, constants and intermediate values have more than {self.limits.elements} entries; "
                "raise the limit 'elements' if you trust the file"
            )
        self.spent += count

    def _allow(self, what: str, count: int) -> None:
        if not 1 <= count <= self.limits.features:
            raise OnnxError(
                f"{what}: the result has {count} entries per sample, none or more than {self.limits.features}; raise "
                "the limit 'features' if you trust the file"
            )
        self.spend(what, count)

    def call(self, what: str, stem: str, function: Any, *args: Any) -> Value | Tensor:
        """Add a step; without values that depend on the input, run it now.

        The function is run on tensors without memory first: what does not fit is refused there, and what is too large
        before it is allocated.
        """
        live = _found(args, Value)

        def empty(arg: Any) -> Tensor:
            kind = self.wide if arg.is_floating_point() and live else arg.dtype
            return torch.empty_like(arg, device="meta", dtype=kind)

        try:
            with torch.no_grad():
                metas = _swap(_swap(args, Value, lambda v: v.meta), Tensor, lambda t: t if t.is_meta else empty(t))
                meta = (function if not isinstance(function, nn.Module) else _bare(function))(*metas)
        except LdltError:
            raise
        except Exception as error:
            raise OnnxError(f"{what}: its inputs do not fit ({' '.join(str(error).split())[:200]})") from error
        if meta.ndim > _MOST_AXES:
            raise OnnxError(f"{what}: the result has more than {_MOST_AXES} axes")
        if not live:
            self.spend(what, meta.numel())
            with torch.no_grad():
                found: Tensor = function(*args)
            return found
        if not meta.ndim or meta.shape[0] != _SAMPLES:
            raise OnnxError(f"{what}: mixes or moves the samples of the batch; the first axis must stay the batch")
        self._allow(what, meta.numel() // _SAMPLES)
        if isinstance(function, nn.Module):
            function = self._own(self.layers, stem, function.to(self.wide))
        places = _swap(args, Value, lambda v: Slot(v.slot))
        self.steps.append(Step(function, _swap(places, Tensor, lambda t: self._hold(what, stem, t))))
        return Value(len(self.steps), meta, live[0].dtype)

    @staticmethod
    def _own(table: dict[str, Any], stem: str, value: Any) -> str:
        name, again = stem, 1
        while name in table:
            again += 1
            name = f"{stem}_part{again}"
        table[name] = value
        return name

    def _hold(self, what: str, stem: str, tensor: Tensor) -> _Held:
        """Keep a tensor: a parameter stays one."""
        self.spend(what, tensor.numel())
        own = tensor.detach().to(self.wide) if tensor.is_floating_point() else tensor
        own = own.clone(memory_format=torch.contiguous_format)
        if own.is_floating_point() and not bool(own.isfinite().all()):
            raise OnnxError(f"{what}: a constant or weight is infinite or not a number")
        kept = nn.Parameter(own) if isinstance(tensor, nn.Parameter) else own
        return _Held(self._own(self.tensors, f"{stem}_weight", kept))

    def finish(self, output: Value) -> Network:
        """The network without steps that its output does not need, returning (n, k)."""
        if output.ndim != 2:
            flat = self.call("the output", "output", rows, output, (math.prod(output.shape),))
            assert isinstance(flat, Value)
            output = flat
        needed = {output.slot}
        for index in range(len(self.steps), 0, -1):
            if index in needed:
                needed |= {s.index for s in _found(self.steps[index - 1].args, Slot)}
        kept = [i for i in range(1, len(self.steps) + 1) if i in needed]
        place = {0: 0, **{old: new for new, old in enumerate(kept, 1)}}
        old = [self.steps[i - 1] for i in kept]
        steps = [replace(s, args=_swap(s.args, Slot, lambda a: Slot(place[a.index]))) for s in old]
        alive = {place[output.slot]}
        for i in range(len(steps) - 1, -1, -1):
            read = {s.index for s in _found(steps[i].args, Slot)} - alive
            alive |= read
            steps[i] = replace(steps[i], last=tuple(sorted(read)))
        network = Network(steps, place[output.slot])
        for step in steps:
            if isinstance(step.target, str):
                network.add_module(step.target, self.layers[step.target])
            for held in _found(step.args, _Held):
                tensor = self.tensors[held.name]
                if isinstance(tensor, nn.Parameter):
                    network.register_parameter(held.name, tensor)
                else:
                    network.register_buffer(held.name, tensor)
        return network.eval()


def _bare(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """What a layer does to tensors without memory."""
    tensors = {n: torch.empty_like(t, device="meta") for n, t in layer.state_dict().items()}
    return lambda x: torch.func.functional_call(layer, tensors, (x.to(next(iter(tensors.values()), x).dtype),))


class Node:
    """What a rule sees of a node: the values it reads, and questions about them.

    Attributes:
        label: How messages call it.
        operator: What it does, such as ``Gemm``.
        inputs: Values and constants; None for an omitted one.
        attributes: By name.
        outputs: Number of its outputs.
        opset: Operator set of the file.
        build: Where its steps go.
    """

    def __init__(
        self, label: str, stem: str, operator: str, inputs: list[Value | Tensor | None], attributes: dict[str, Any],
        outputs: int, opset: int, build: Builder, moves: bool,
    ) -> None:  # fmt: skip
        self.label, self.operator, self.inputs, self.attributes = label, operator, inputs, attributes
        self.outputs, self.opset, self.build, self._stem, self._moves = outputs, opset, build, stem, moves
        self._unread = set(attributes)

    def refuse(self, reason: str) -> OnnxError:
        """The error that names the node."""
        return OnnxError(f"{self.label}: {reason}")

    def call(self, function: Any, *args: Any) -> Value | Tensor:
        """Add a step of this node."""
        whole = [t for t in _found(args, Tensor) if t.dtype == torch.int64]
        if not self._moves and any(bool((t == BATCH).any()) for t in whole):
            raise self.refuse("computes with the batch size; every sample must be treated alike")
        if whole and not self._moves and _found(args, Value):
            raise self.refuse("computes with whole numbers and others, which ONNX does not allow without a Cast")
        return self.build.call(self.label, self._stem, function, *args)

    def shape(self, value: Any) -> tuple[int, ...]:
        """Shape of a value, the batch as a mark, or of a constant."""
        return (BATCH, *value.shape) if isinstance(value, Value) else tuple(value.shape)

    def check(self, least: int, most: int, results: int) -> None:
        """Refuse a wrong number of inputs or outputs, and mixed types."""
        while self.inputs and self.inputs[-1] is None:
            self.inputs.pop()
        if not least <= len(self.inputs) <= most or any(v is None for v in self.inputs[:least]):
            raise self.refuse(f"{len(self.inputs)} inputs; expected are {least} to {most}")
        if not 1 <= self.outputs <= results:
            raise self.refuse(f"{self.outputs} outputs; expected are 1 to {results}: export for inference")
        types = {v.dtype for v in self.inputs if v is not None and v.dtype.is_floating_point}
        if len(types) > 1 and self.operator != "Dropout":
            raise self.refuse("mixes 32- and 64-bit numbers, which ONNX does not allow without a Cast")

    def refuse_unread(self) -> None:
        """Refuse attributes that nobody asked for: their meaning is unknown."""
        if self._unread:
            raise self.refuse(f"the attribute {show(min(self._unread))} is not known")

    # -- attributes ----------------------------------------------------------------------------------------------------

    def attribute(self, name: str, kind: type) -> Any:
        """An attribute of a given type, or None."""
        self._unread.discard(name)
        value = self.attributes.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.refuse(f"the attribute '{name}' has a wrong type")
        if isinstance(value, float) and math.isnan(value):
            raise self.refuse(f"the attribute '{name}' is not a number")
        return value

    def ignore(self, *names: str) -> None:
        """Accept attributes that do not matter in inference."""
        self._unread.difference_update(names)

    def option(self, name: str, default: Any) -> Any:
        """An attribute of the type of its default; numbers must be finite."""
        value = self.attribute(name, type(default))
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refuse(f"the attribute '{name}' is {value}")
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        """A whole number that must be 0 or 1: readers disagree about others."""
        value = self.option(name, int(default))
        if value not in (0, 1):
            raise self.refuse(f"the attribute '{name}' must be 0 or 1, not {value}")
        return bool(value)

    def integers(self, name: str, place: int | None = None) -> list[int] | None:
        """Whole numbers, given as an attribute or (in newer operator sets) as the constant input at ``place``."""
        value = self.attribute(name, list)
        if value is not None and not all(isinstance(v, int) for v in value):
            raise self.refuse(f"the attribute '{name}' has a wrong type")
        if place is None or place >= len(self.inputs) or self.inputs[place] is None:
            return value
        if value is not None:
            raise self.refuse(f"'{name}' is given as an attribute and as an input")
        found = [int(v) for v in self.constant(place, torch.int64).reshape(-1)]
        if BATCH in found:
            raise self.refuse(f"'{name}' depends on the batch size; every sample must be treated alike")
        return found

    # -- inputs --------------------------------------------------------------------------------------------------------

    def has(self, place: int) -> bool:
        """Whether an input is given."""
        return place < len(self.inputs) and self.inputs[place] is not None

    def live(self, place: int = 0) -> Value:
        """An input that depends on the network's input."""
        value = self.inputs[place]
        if not isinstance(value, Value):
            raise self.refuse(f"its input {place + 1} must depend on the input of the network; fold constants first")
        return value

    def constant(self, place: int, dtype: torch.dtype | None = None) -> Tensor:
        """A constant input: of whole numbers if these are asked for, else of floating point numbers."""
        value = self.inputs[place] if self.has(place) else None
        if not isinstance(value, Tensor):
            raise self.refuse(f"its input {place + 1} must be a constant")
        if value.dtype != dtype if dtype is not None else not value.is_floating_point():
            raise self.refuse(f"its input {place + 1} has elements of a wrong type, {value.dtype}")
        return value

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from the front."""
        if not -rank <= axis < rank:
            raise self.refuse(f"there is no axis {axis} among {rank}")
        return axis % rank

    def axes(self, axes: Sequence[int], rank: int) -> list[int]:
        """Different axes counted from the front, in ascending order."""
        found = sorted(self.axis(a, rank) for a in axes)
        if len(set(found)) < len(found):
            raise self.refuse("an axis is given twice")
        return found
