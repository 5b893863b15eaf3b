"""The one form in which networks are saved and exported: layers, constants, and a list of steps.

A module of any class is traced, and its operations are written down one by one. What is left is data: no class of the
user is needed to run it again, and none is looked for.
"""

from __future__ import annotations

import builtins
import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ldlt import activations
from ldlt.errors import GraphError, LdltError
from ldlt.evaluation import reference
symbolic_trace = None  # being moved to the new graph

__all__ = ["FUNCTIONS", "METHODS", "Held", "Program", "Step", "Value", "program_of"]

_TORCH = (
    "add cat chunk clone concat concatenate div divide flatten flip hstack matmul mean mm movedim mul multiply narrow "
    "neg negative permute repeat_interleave reshape roll select split squeeze stack sub subtract sum swapaxes "
    "tensor_split tile transpose true_divide unbind unflatten unsqueeze"
)
_OPERATORS = "add floordiv getitem matmul mul neg sub truediv"

FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{f"torch.{name}": getattr(torch, name) for name in _TORCH.split()},
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    "functional.linear": F.linear,
    "getattr": builtins.getattr,
}
"""Functions that a step may call, by the name they have in a file."""

_METHODS = (
    "add chunk clone contiguous div expand flatten flip matmul mean mm movedim mul narrow neg permute repeat "
    "repeat_interleave reshape roll select size split squeeze sub sum swapaxes tensor_split tile transpose unbind "
    "unflatten unsqueeze view"
)

METHODS = frozenset(_METHODS.split())
"""Methods of tensors that a step may call."""

ATTRIBUTES = frozenset({"shape", "mT"})
"""Attributes of tensors that a step may read."""

_NAMES = {function: name for name, function in FUNCTIONS.items()}
_OUT_OF_PLACE: dict[Any, Callable[..., Any]] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
# Off in evaluation, so that there is nothing to write down.
_OFF: set[Any] = {F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d}
_OFF_LAYERS = (
    nn.Identity,
    nn.Dropout,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
)


@dataclass(frozen=True)
class Value:
    """Place of an intermediate value in the arguments of a step; 0 is the input."""

    index: int


@dataclass(frozen=True)
class Held:
    """Place of a constant of the program in the arguments of a step."""

    name: str


@dataclass(frozen=True)
class Step:
    """One operation.

    Attributes:
        kind: ``"function"`` (a key of :data:`FUNCTIONS`), ``"method"`` (of its first argument) or ``"layer"``.
        target: Which one.
        args: Its arguments, with :class:`Value` and :class:`Held` in the place of tensors.
        kwargs: Its arguments by name, likewise.
    """

    kind: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Program(nn.Module):
    r"""A network as a list of steps; a plain module.

    Args:
        steps: Step ``i`` (from 0) writes the value ``i + 1``.
        result: The value that is returned.
        layers: Submodules by name.
        constants: Tensors by name; a parameter stays one.

    Shape:
        Input (batch, \*shape), output (batch, \*outputs).
    """

    def __init__(
        self, steps: Sequence[Step], result: int, layers: Mapping[str, nn.Module], constants: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        self.steps, self.result = tuple(steps), result
        for name, layer in layers.items():
            self.add_module(name, layer)
        for name, tensor in constants.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self._last = _last_readers(self.steps, result)

    def forward(self, x: Tensor) -> Tensor:
        """The network's output."""
        values: dict[int, Any] = {0: x}

        def fill(arg: Any) -> Any:
            if isinstance(arg, Value):
                return values[arg.index]
            if isinstance(arg, Held):
                return getattr(self, arg.name)
            if isinstance(arg, (tuple, list)):
                return type(arg)(fill(a) for a in arg)
            if isinstance(arg, slice):
                return slice(fill(arg.start), fill(arg.stop), fill(arg.step))
            return arg

        for index, step in enumerate(self.steps, 1):
            args, kwargs = fill(step.args), {k: fill(v) for k, v in step.kwargs.items()}
            if step.kind == "layer":
                values[index] = getattr(self, step.target)(*args, **kwargs)
            elif step.kind == "method":
                values[index] = getattr(args[0], step.target)(*args[1:], **kwargs)
            else:
                values[index] = FUNCTIONS[step.target](*args, **kwargs)
            for unread in self._last[index - 1]:
                del values[unread]
        found: Tensor = values[self.result]
        return found


def values_in(arg: Any) -> set[int]:
    """Which values an argument reads."""
    if isinstance(arg, Value):
        return {arg.index}
    if isinstance(arg, slice):
        return values_in((arg.start, arg.stop, arg.step))
    if isinstance(arg, Mapping):
        return values_in(tuple(arg.values()))
    return set().union(*map(values_in, arg)) if isinstance(arg, (tuple, list)) else set()


def _last_readers(steps: Sequence[Step], result: int) -> tuple[tuple[int, ...], ...]:
    """For every step the values that nobody reads afterwards."""
    alive, found = {result}, []
    for index in range(len(steps), 0, -1):
        step = steps[index - 1]
        read = (values_in(step.args) | values_in(step.kwargs) | {index}) - alive
        found.append(tuple(sorted(read)))
        alive |= read
    return tuple(reversed(found))


def program_of(model: nn.Module, input_shape: Sequence[int]) -> Program:
    """A copy of a plain network as a program, in evaluation mode.

    Args:
        model: A network of plain weights, of operations that :class:`ldlt.Lipschitz` accepts.
        input_shape: Shape of one input.

    Raises:
        GraphError: It cannot be traced, or uses an operation that is not on the list.
    """
    try:
        plain, other = copy.deepcopy(model).eval(), copy.deepcopy(model).eval()
    except Exception as error:
        raise GraphError(f"{type(model).__name__} cannot be copied: {error}") from error
    traced = symbolic_trace(plain)
    traced.graph.eliminate_dead_code()
    program = _Writer(plain, traced).write().eval()
    _check(other, program, input_shape)
    return program


class _Writer:
    """Translates the nodes of a traced program one by one."""

    def __init__(self, model: nn.Module, traced: fx.GraphModule) -> None:
        self.model, self.traced = model, traced
        self.steps: list[Step] = []
        self.layers: dict[str, nn.Module] = {}
        self.constants: dict[str, Tensor] = {}
        self.paths: dict[str, str] = {}  # of layers and constants, to their names here
        self.place: dict[fx.Node, Value | Held] = {}

    def write(self) -> Program:
        result: Any = None
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                if self.place:
                    raise GraphError("the module must have exactly one input tensor: concatenate them")
                self.place[node] = Value(0)
            elif node.op == "get_attr":
                self.place[node] = self._constant(str(node.target))
            elif node.op == "output":
                result = self._argument(node.args[0])
            else:
                self._operation(node)
        if not isinstance(result, Value) or result.index == 0:
            raise GraphError("the module must return exactly one tensor that depends on its input")
        return Program(self.steps, result.index, self.layers, self.constants)

    def _constant(self, path: str) -> Held:
        if path not in self.paths:
            self.paths[path] = name = f"constant_{len(self.constants)}"
            owner, _, own = path.rpartition(".")
            tensor: Tensor = getattr(self.model.get_submodule(owner), own)
            self.constants[name] = tensor
        return Held(self.paths[path])

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            return self.place[arg]
        if isinstance(arg, (tuple, list)):
            return type(arg)(self._argument(a) for a in arg) if type(arg) is list else tuple(map(self._argument, arg))
        if isinstance(arg, slice):
            return slice(self._argument(arg.start), self._argument(arg.stop), self._argument(arg.step))
        return arg

    def _operation(self, node: fx.Node) -> None:
        args = tuple(self._argument(a) for a in node.args)
        kwargs = {k: self._argument(v) for k, v in node.kwargs.items()}
        source: Any = next(iter([*args, *kwargs.values()]), None)
        if node.op == "call_module":
            layer = self.model.get_submodule(str(node.target))
            if isinstance(layer, _OFF_LAYERS):
                self.place[node] = source
                return
            self._add(node, Step("layer", self._layer(str(node.target), layer), (source,)))
            return
        target = _OUT_OF_PLACE.get(node.target, node.target)
        if target in _OFF:
            self.place[node] = source
        elif target in _NAMES:
            self._add(node, Step("function", _NAMES[target], args, kwargs))
        elif isinstance(target, str) and target.removesuffix("_") in METHODS:
            self._add(node, Step("method", target.removesuffix("_"), args, kwargs))
        else:
            self._activation(node, target, args, kwargs, source)

    def _activation(self, node: fx.Node, target: Any, args: Any, kwargs: Any, source: Any) -> None:
        """A call of an activation becomes a layer."""
        rest = {k: v for k, v in kwargs.items() if k not in ("input", "self")}
        try:
            found = activations.from_call(target, args[1:], rest)
        except LdltError as error:
            raise GraphError(f"node '{node.name}': {error}") from error
        if found is None:
            label = target if isinstance(target, str) else getattr(target, "__name__", str(target))
            raise GraphError(
                f"node '{node.name}': '{label}' cannot be written to a file; use the operations that ldlt.Lipschitz "
                "accepts"
            )
        self._add(node, Step("layer", self._layer(f"{node.name}()", found), (source,)))

    def _layer(self, path: str, layer: nn.Module) -> str:
        if path not in self.paths:
            self.paths[path] = name = f"layer_{len(self.layers)}"
            if getattr(layer, "inplace", False):
                layer.inplace = False  # type: ignore[assignment]
            layer._forward_hooks.clear()  # they would not be in a file; that they are missing is noticed below
            layer._forward_pre_hooks.clear()
            self.layers[name] = layer
        return self.paths[path]

    def _add(self, node: fx.Node, step: Step) -> None:
        self.steps.append(step)
        self.place[node] = Value(len(self.steps))


def _check(model: nn.Module, program: Program, input_shape: Sequence[int]) -> None:
    """Run both: what a tracer cannot see (hooks, parametrizations) shows up here."""
    like = reference(model)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, *input_shape, generator=generator, dtype=torch.float64).to(like)
    with torch.no_grad():
        try:
            wanted, found = model(x.clone()), program(x.clone())
        except LdltError:
            raise
        except Exception as error:
            shown = ", ".join(map(str, input_shape))
            raise GraphError(f"the model does not accept an input of shape (batch, {shown}): {error}") from error
    if found.shape != wanted.shape or not torch.equal(found, wanted):
        raise GraphError("what the model computes is not what its traced program computes: look for a hook")
