"""Activations that no operator of ONNX stands for, as functions of a file that any runtime can compute.

Such a function says in its description which activation it is (:class:`Saved`), and has the computation as its body. A
reader makes the activation of that description, writes the body itself, and compares: a body that computes something
else is refused. Activations of users are those given to :func:`ldlt.activations.register`; their forward functions are
written down operation by operation.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, fx, nn

from ldlt import activations
from ldlt.activations import GroupSort, MaxMin, WindowSort
from ldlt.errors import GraphError, SavedModelError
from ldlt.files.message import DOMAIN, onnx_package
from ldlt.files.replace import show

__all__ = ["BODIES", "NATIVE", "OPSET", "Nodes", "function_of", "kind_of", "recognised"]

OPSET = 20
"""Operator set of the files: the first with Gelu."""

NATIVE: dict[str, tuple[type[nn.Module], dict[str, str]]] = {
    "Abs": (activations.Abs, {}),
    "Atan": (activations.Atan, {}),
    "Celu": (nn.CELU, {"alpha": "alpha"}),
    "Cos": (activations.Cos, {}),
    "Elu": (nn.ELU, {"alpha": "alpha"}),
    "Gelu": (nn.GELU, {"approximate": "approximate"}),
    "HardSwish": (nn.Hardswish, {}),
    "LeakyRelu": (nn.LeakyReLU, {"alpha": "negative_slope"}),
    "Mish": (nn.Mish, {}),
    "Relu": (nn.ReLU, {}),
    "Selu": (nn.SELU, {}),
    "Sigmoid": (nn.Sigmoid, {}),
    "Sin": (activations.Sin, {}),
    "Softmax": (nn.Softmax, {"axis": "dim"}),
    "Softsign": (nn.Softsign, {}),
    "Tanh": (nn.Tanh, {}),
}
"""Activations that are operators of ONNX -> their class, and its argument for each attribute."""

_BEHIND_INPUT = {"self", "args", "kwargs", "inplace", "device", "dtype"}
_Option = bool | int | float | str | list[int] | None


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a function."""

    activation: str  # module and name of its class
    options: dict[str, _Option]  # arguments of the class
    shape: list[int]  # of its input
    double: bool


class Nodes:
    """Nodes of a function or a graph, in order, with numbers of a type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.list: list[Any] = []
        self._count = 0

    def name(self) -> str:
        """A new name of a value."""
        self._count += 1
        return f"v{self._count}"

    def put(self, operator: str, *inputs: str, results: int = 1, **attributes: Any) -> str:
        """Add a node; the name of its first result."""
        names = [self.name() for _ in range(results)]
        self.list.append(onnx_package().helper.make_node(operator, inputs, names, **attributes))
        return names[0]

    def tensor(self, value: Any) -> Any:
        """A tensor of the format, of whole numbers or of those of this list."""
        array = np.asarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)
        kind = np.int64 if array.dtype.kind in "iu" else np.float64 if self.dtype == torch.float64 else np.float32
        return onnx_package().numpy_helper.from_array(np.array(array, kind, order="C"))

    def constant(self, value: Any) -> str:
        """Add a constant; its name."""
        return self.put("Constant", value=self.tensor(value))

    def shaped(self, x: str, shape: Sequence[int]) -> str:
        """The same entries of each sample in another shape."""
        return self.put("Reshape", x, self.constant([0, *shape]))


# -- bodies ------------------------------------------------------------------------------------------------------------


def _soft(x: Any) -> Any:
    return torch.relu(x) + torch.log(1 + torch.exp(-torch.abs(x)))


def _negative(x: Any, scale: float, inner: float = 1.0) -> Any:
    """``scale (exp(x / inner) − 1)`` below zero."""
    return scale * (torch.exp(torch.clamp(x, max=0.0) / inner) - 1)


def _steps(x: Any) -> Any:
    return torch.clamp(x / 6 + 0.5, 0.0, 1.0)


_SCALE, _ALPHA = 1.0507009873554804934, 1.6732632423543772848

BODIES: dict[type[nn.Module], Callable[[Any], Callable[..., Any]]] = {
    nn.CELU: lambda m: lambda x: torch.relu(x) + _negative(x, m.alpha, m.alpha),
    nn.ELU: lambda m: lambda x: torch.relu(x) + _negative(x, m.alpha),
    nn.Hardshrink: lambda m: lambda x: x * 1.0,
    nn.Hardsigmoid: lambda m: _steps,
    nn.Hardswish: lambda m: lambda x: x * _steps(x),
    nn.LeakyReLU: lambda m: lambda x: torch.relu(x) - m.negative_slope * torch.relu(-x),
    nn.LogSigmoid: lambda m: lambda x: -_soft(-x),
    nn.Mish: lambda m: lambda x: x * torch.tanh(_soft(x)),
    nn.PReLU: lambda m: lambda x, slope: torch.relu(x) - slope * torch.relu(-x),
    nn.RReLU: lambda m: lambda x: torch.relu(x) - (m.lower + m.upper) / 2 * torch.relu(-x),
    nn.SELU: lambda m: lambda x: _SCALE * (torch.relu(x) + _negative(x, _ALPHA)),
    nn.Softplus: lambda m: lambda x: _soft(m.beta * x) / m.beta,
    nn.Softshrink: lambda m: lambda x: torch.relu(x - m.lambd) - torch.relu(-x - m.lambd),
    nn.Softsign: lambda m: lambda x: x / (1 + torch.abs(x)),
    nn.Tanhshrink: lambda m: lambda x: x - torch.tanh(x),
}
"""Activations in operations that runtimes have in both precisions."""

_OPERATORS = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "truediv": "Div", "div": "Div", "neg": "Neg", "pow": "Pow", "abs": "Abs",
    "sin": "Sin", "cos": "Cos", "tan": "Tan", "atan": "Atan", "arctan": "Atan", "exp": "Exp", "log": "Log",
    "sqrt": "Sqrt", "erf": "Erf", "tanh": "Tanh", "sigmoid": "Sigmoid", "relu": "Relu", "maximum": "Max",
    "minimum": "Min", "sinh": "Sinh", "cosh": "Cosh", "softplus": "Softplus", "square": "Mul",
}  # fmt: skip
"""Operations in the forward function of an activation, by name."""


def _translated(nodes: Nodes, function: Any, inputs: Sequence[str], name: str) -> str:
    """Write a forward function operation by operation."""
    try:
        graph = _Tracer().trace(function)
    except Exception as error:
        raise GraphError(
            f"{name} cannot be written to a file: its forward function is not a formula ({error})"
        ) from error
    values: dict[fx.Node, str] = {}
    left = iter(inputs)

    def value(arg: Any) -> str:
        return values[arg] if isinstance(arg, fx.Node) else "" if arg is None else nodes.constant(float(arg))

    for node in graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        options = {k: v for k, v in node.kwargs.items() if k != "inplace"}
        if node.op == "placeholder":
            values[node] = next(left)
        elif node.op == "output":
            if not isinstance(node.args[0], fx.Node):
                break
            return values[node.args[0]]
        elif node.op in ("call_function", "call_method") and target in ("clamp", "clip"):
            low, high = [*node.args[1:], None, None][:2]
            limits = value(options.get("min", low)), value(options.get("max", high))
            values[node] = nodes.put("Clip", value(node.args[0]), *limits)
        elif node.op in ("call_function", "call_method") and target in _OPERATORS and not options:
            args = node.args * 2 if target == "square" else node.args
            values[node] = nodes.put(_OPERATORS[target], *map(value, args))
        else:
            raise GraphError(
                f"{name} cannot be written to a file: '{target}' in its forward function is not one of "
                f"{', '.join(_OPERATORS)}, clamp"
            )
    raise GraphError(f"{name} cannot be written to a file: it returns no tensor")


class _Tracer(fx.Tracer):
    """Goes into all layers."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def _sorted(nodes: Nodes, module: nn.Module, x: str, shape: Sequence[int]) -> str:
    """Sorted groups or windows."""
    if isinstance(module, WindowSort):
        spatial, d, width = shape[1:], len(shape) - 1, module.window
        split = [k for n, w in zip(spatial, width, strict=True) for k in (n // w, w)]
        order = [0, 1, *range(2, 2 + 2 * d, 2), *range(3, 3 + 2 * d, 2)]
        counts = [shape[0], *split[::2]]
        moved = nodes.put("Transpose", nodes.shaped(x, [shape[0], *split]), perm=order)
        flat = nodes.shaped(moved, [*counts, math.prod(width)])
        ordered = nodes.put("TopK", flat, nodes.constant([math.prod(width)]), results=2, axis=-1, largest=1)
        back = [0, 1, *(i for j in range(d) for i in (2 + j, 2 + d + j))]
        return nodes.shaped(nodes.put("Transpose", nodes.shaped(ordered, [*counts, *width]), perm=back), shape)
    size = module.group_size if isinstance(module, GroupSort) else 2
    assert isinstance(size, int)
    groups = nodes.shaped(x, [shape[0] // size, size, *shape[1:]])
    if isinstance(module, MaxMin):
        axis = nodes.constant([2])
        pair = [nodes.put(name, groups, axis, keepdims=1) for name in ("ReduceMax", "ReduceMin")]
        return nodes.shaped(nodes.put("Concat", *pair, axis=2), shape)
    return nodes.shaped(nodes.put("TopK", groups, nodes.constant([size]), results=2, axis=2, largest=0), shape)


def kind_of(module: nn.Module) -> type[nn.Module]:
    """The class whose forward function an activation runs, among those that it derives from."""
    return next(k for k in reversed(type(module).__mro__) if getattr(k, "forward", None) is type(module).forward)


def _saved(module: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> Saved:
    kind, options = type(module), {}
    for name in inspect.signature(kind.__init__).parameters:
        if name in _BEHIND_INPUT or not hasattr(module, name):
            continue
        value = getattr(module, name)
        value = list(value) if isinstance(value, tuple) else value
        if not isinstance(value, (bool, int, float, str, list, type(None))):
            raise GraphError(
                f"{kind.__name__} cannot be written to a file: its option '{name}' is not a number or text"
            )
        options[name] = value
    return Saved(f"{kind.__module__}.{kind.__qualname__}", options, list(shape), dtype == torch.float64)


def function_of(name: str, module: nn.Module, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """The function of an activation of inputs of a shape and a type.

    Raises:
        GraphError: Its forward function is not a formula of known operations.
    """
    helper, nodes, kind = onnx_package().helper, Nodes(dtype), kind_of(module)
    saved, inputs = _saved(module, shape, dtype), ["x", "slope"] if isinstance(module, nn.PReLU) else ["x"]
    if isinstance(module, (GroupSort, MaxMin, WindowSort)):
        result = _sorted(nodes, module, "x", shape)
    elif kind in BODIES:
        result = _translated(nodes, BODIES[kind](module), inputs, kind.__name__)
    elif kind in activations.ELEMENTWISE or any(True for _ in module.state_dict()):
        raise GraphError(f"{kind.__name__} cannot be written to a file; use an activation without tensors of its own")
    else:
        result = _translated(nodes, module, inputs, kind.__name__)
    found = helper.make_function(DOMAIN, name, inputs, [result], nodes.list, [helper.make_opsetid("", OPSET)])
    found.doc_string = msgspec.json.encode(saved, order="deterministic").decode()
    return found


# -- reading -----------------------------------------------------------------------------------------------------------


def recognised(function: Any, shape: Sequence[int], dtype: torch.dtype) -> nn.Module:
    """The activation that a function of a file is, for inputs of a shape and a type.

    Raises:
        SavedModelError: It is not what :func:`function_of` writes for the activation that it describes.
    """
    named = f"the function {show(function.name)}"
    try:
        saved = msgspec.json.decode(function.doc_string.encode(), type=Saved)
    except (msgspec.MsgspecError, ValueError) as error:
        raise SavedModelError(f"{named} does not say which activation it is ({error})") from error
    if saved.shape != list(shape) or saved.double != (dtype == torch.float64):
        raise SavedModelError(f"{named} is for inputs of shape {saved.shape[:9]}, not {list(shape)}")
    kind = _class(saved.activation)
    if kind is None:
        raise SavedModelError(
            f"{named} is the activation {show(saved.activation)}, which is not known here: import its class and "
            "register it by ldlt.activations.register before the file is read"
        )
    try:
        options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.options.items()}
        with torch.device("meta"):  # slopes are read from the file later; options must not allocate anything
            module = kind(**options).eval()
        written = function_of(function.name, module, shape, dtype)
    except Exception as error:
        raise SavedModelError(f"{named} does not fit the activation {show(kind.__name__)} ({error})") from error
    if written.SerializeToString(deterministic=True) != function.SerializeToString(deterministic=True):
        raise SavedModelError(
            f"{named} says that it is {kind.__name__} but computes something else, or was written by another version: "
            "save the network again"
        )
    return module


def _class(name: str) -> type[nn.Module] | None:
    """The activation of a name, among those that have a rule; no constructor is run to find it."""
    waiting, seen = [nn.Module], set()
    while waiting:
        kind = waiting.pop()
        if kind not in seen:
            seen.add(kind)
            waiting += kind.__subclasses__()
            named = f"{kind.__module__}.{kind.__qualname__}" == name
            if named and kind is not nn.Module and activations.is_activation(kind.__new__(kind)):
                return kind
    return None
