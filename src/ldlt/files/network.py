"""The module that an ONNX file becomes: calls of torch functions, built node by node as a graph of ``torch.fx``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from ldlt.errors import LdltError, OnnxError
from ldlt.files.message import BATCH, MOST_AXES, OnnxLimits, Store, onnx_package
from ldlt.files.replace import show

__all__ = ["Builder", "Node", "Value", "activations_of", "rows"]

_SAMPLES = 4099  # batch size of the tensors without memory on which shapes are found: no axis of a file is likely to be

_VARIADIC = 2**31 - 1  # what ONNX says for any number of inputs


@dataclass(frozen=True, eq=False)
class Value:
    """A value that depends on the input."""

    node: fx.Node
    meta: Tensor  # without memory, of its shape
    dtype: torch.dtype  # in the file
    form: tuple[Any, ...] = ()  # ("times", value, 2.0) and the like: parts of an activation that exporters split

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.meta.shape[1:])

    @property
    def ndim(self) -> int:
        """Number of axes, the batch included."""
        return self.meta.ndim


def rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The same entries of each sample in another shape."""
    return x.reshape(x.shape[0], *shape)


def activations_of(module: fx.GraphModule) -> list[str]:
    """Names that a trace gives to the activations of such a module, in their order."""
    return [str(node.target) for node in module.graph.nodes if node.op == "call_module"]


def _found(args: Any, kind: Any) -> list[Any]:
    found: list[Any] = []
    map_aggregate(args, lambda a: found.append(a) if isinstance(a, kind) else None)  # type: ignore[arg-type, func-returns-value]
    return found


def _swap(args: Any, kind: Any, function: Callable[[Any], Any]) -> Any:
    return map_aggregate(args, lambda a: function(a) if isinstance(a, kind) else a)


class Builder:
    """Collects the steps of a network of the type ``wide`` within limits; weights are parameters, others buffers."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, wide: torch.dtype, batch: int | None, limits: OnnxLimits,
        store: Store,
    ) -> None:  # fmt: skip
        self.wide, self.batch, self.limits, self.store = wide, batch, limits, store
        self.graph, self.parts, self.spent = fx.Graph(), dict[str, Any](), 0
        self._allow("the input", math.prod(shape))
        empty = torch.empty(_SAMPLES, *shape, dtype=wide, device="meta")
        self.input = Value(self.graph.placeholder("x"), empty, dtype)

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

    def call(self, what: str, stem: str, function: Any, *args: Any) -> Any:
        """Add a step; without values that depend on the input, run it now.

        The function is run on tensors without memory first: what does not fit is refused there, and what is too large
        before it is allocated.
        """
        live = _found(args, Value)

        def empty(arg: Tensor) -> Tensor:
            kind = self.wide if arg.is_floating_point() and live else arg.dtype
            return torch.empty_like(arg, device="meta", dtype=kind)

        try:
            with torch.no_grad():
                run = _bare(function) if isinstance(function, nn.Module) else function
                meta = run(*_swap(_swap(args, Tensor, empty), Value, lambda v: v.meta))
        except LdltError:
            raise
        except Exception as error:
            raise OnnxError(f"{what}: its inputs do not fit ({' '.join(str(error).split())[:200]})") from error
        if meta.ndim > MOST_AXES:
            raise OnnxError(f"{what}: the result has more than {MOST_AXES} axes")
        if not live:
            self.spend(what, meta.numel())
            with torch.no_grad():
                return function(*args)
        if not meta.ndim or meta.shape[0] != _SAMPLES:
            raise OnnxError(f"{what}: mixes or moves the samples of the batch; the first axis must stay the batch")
        self._allow(what, meta.numel() // _SAMPLES)
        places = _swap(_swap(args, Value, lambda v: v.node), Tensor, lambda t: self._hold(what, stem, t))
        if isinstance(function, nn.Module):
            node = self.graph.call_module(self._own(stem, function.to(self.wide)), places)
        else:
            node = self.graph.call_function(function, places)
        return Value(node, meta, live[0].dtype)

    def _own(self, stem: str, part: Any) -> str:
        name, again = stem, 1
        while name in self.parts:
            again += 1
            name = f"{stem}_part{again}"
        self.parts[name] = part
        return name

    def _hold(self, what: str, stem: str, tensor: Tensor) -> fx.Node:
        """Keep a tensor: a parameter stays one."""
        self.spend(what, tensor.numel())
        own = tensor.detach().to(self.wide) if tensor.is_floating_point() else tensor
        own = own.clone(memory_format=torch.contiguous_format)
        if own.is_floating_point() and not bool(own.isfinite().all()):
            raise OnnxError(f"{what}: a constant or weight is infinite or not a number")
        kept = nn.Parameter(own) if isinstance(tensor, nn.Parameter) else own
        return self.graph.get_attr(self._own(f"{stem}_weight", kept))

    def finish(self, output: Value) -> fx.GraphModule:
        """The network without steps that its output does not need, returning (n, k)."""
        if output.ndim != 2:
            output = self.call("the output", "output", rows, output, (math.prod(output.shape),))
        self.graph.output(output.node)
        for node in reversed(self.graph.nodes):
            if not node.users and node.op not in ("placeholder", "output"):
                self.graph.erase_node(node)
        return fx.GraphModule(self.parts, self.graph, "Network").eval()


def _bare(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """What a layer does to tensors without memory."""
    tensors = {n: torch.empty_like(t, device="meta") for n, t in layer.state_dict().items()}
    return lambda x: torch.func.functional_call(layer, tensors, (x.to(next(iter(tensors.values()), x).dtype),))


class Node:
    """What a rule sees of a node: the values it reads, and questions about them.

    How many inputs an operator has, its attributes and their defaults are what ONNX says of it in the operator set.
    """

    def __init__(
        self, node: Any, label: str, stem: str, inputs: list[Value | Tensor | None], opset: int, build: Builder,
        moves: bool = False, least: int | None = None,
    ) -> None:  # fmt: skip
        self.label, self.operator, self.inputs, self.opset, self.build = label, node.op_type, inputs, opset, build
        self.outputs, self._stem, self._moves = len(node.output), stem, moves
        attributes, first, most = {}, 1, 2
        if least is None:
            try:
                schema = onnx_package().defs.get_schema(node.op_type, opset, "")
            except Exception as error:
                raise self.refuse(f"operator set {opset} does not have it") from error
            attributes, first, most = schema.attributes, schema.min_input, schema.max_input
        needed = first if most < _VARIADIC else len(inputs)  # of any number of inputs none can be left out
        while len(inputs) > needed and inputs[-1] is None:
            inputs.pop()
        if not first <= len(inputs) <= most or any(v is None for v in inputs[:needed]):
            raise self.refuse(f"{len(inputs)} inputs; expected are {first} to {most}")
        types = {v.dtype for v in inputs if v is not None and v.dtype.is_floating_point}
        if len(types) > 1 and self.operator != "Dropout":
            raise self.refuse("mixes 32- and 64-bit numbers, which ONNX does not allow without a Cast")
        value = onnx_package().helper.get_attribute_value
        self._options = {name: value(a.default_value) for name, a in attributes.items() if a.default_value.name}
        self.given: set[str] = set()
        for raw in node.attribute:
            what = f"the attribute {show(raw.name)}"
            if raw.name not in attributes or raw.name in self.given:
                raise self.refuse(f"{what} is not known, or given twice")
            if raw.ref_attr_name or raw.type != int(attributes[raw.name].type):
                raise self.refuse(f"{what} has a wrong type")
            if raw.type == raw.TENSOR:
                build.store.check(raw.t, f"{label}: {what}")
            elif raw.type not in (raw.FLOAT, raw.INT, raw.STRING, raw.FLOATS, raw.INTS):
                raise self.refuse(f"{what} is neither a number, nor a text, nor a dense tensor")
            self.given.add(raw.name)
            self._options[raw.name] = value(raw)
        self._unread = set(self.given)

    def refuse(self, reason: str) -> OnnxError:
        """The error that names the node."""
        return OnnxError(f"{self.label}: {reason}")

    def refuse_unread(self) -> None:
        """Refuse attributes that no rule asked for: what they do is not known."""
        if self._unread:
            raise self.refuse(f"the attribute {show(min(self._unread))} is not understood")

    def call(self, function: Any, *args: Any) -> Any:
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

    # -- attributes ----------------------------------------------------------------------------------------------------

    def ignore(self, *names: str) -> None:
        """Accept attributes that do not matter in inference."""
        self._unread.difference_update(names)

    def option(self, name: str, default: Any = None) -> Any:
        """An attribute, or its default; numbers must be finite."""
        self._unread.discard(name)
        value = self._options.get(name, default)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.refuse(f"the attribute '{name}' is {value}")
        return value.decode(errors="replace") if isinstance(value, bytes) else value

    def flag(self, name: str, default: bool = False) -> bool:
        """A whole number that must be 0 or 1: readers disagree about others."""
        value = self.option(name, int(default))
        if value not in (0, 1):
            raise self.refuse(f"the attribute '{name}' must be 0 or 1, not {value}")
        return bool(value)

    def integers(self, name: str, place: int | None = None) -> list[int] | None:
        """Whole numbers, given as an attribute or (in newer operator sets) as the constant input at ``place``."""
        value = self.option(name)
        if place is None or not self.has(place):
            return None if value is None else list(value) if isinstance(value, Sequence) else [value]
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
