"""Programs as JSON and tensors, and back, read with distrust.

A file can name layers of the list here and operations of :data:`ldlt.graph.operations.TABLE` that are linear, and
nothing else: no class is imported, nothing is unpickled. It says what is computed and nothing about it: shapes, roles
and what is a free map are found by tracing the program that was read, as for any other module. Numbers that must be
exact are hexadecimal. Before a program is run for the first time it is run on tensors without memory, so that a file
cannot ask for more than :data:`LARGEST_VALUE`.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ldlt import activations
from ldlt.errors import GraphError, LdltError, SavedModelError
from ldlt.export.program import POOLS, Program
from ldlt.graph.nodes import BATCH, Activation, Attr, Input, Node, Ref, Wire, attributes, resolve
from ldlt.graph.operations import TABLE
from ldlt.images.convolutions import CircularConv

__all__ = ["LARGEST_VALUE", "LAYERS", "decode", "encode"]

LARGEST_VALUE = 2**26
"""Entries of one intermediate value, for two samples."""

_MOST_STEPS = 10_000
_MOST_NUMBERS = 4096  # in one argument
_LONGEST_TEXT = 64
_NAME = re.compile(r"(layer|tensor)_(0|[1-9][0-9]{0,5})")

_JOINT = (activations.GroupSort, activations.MaxMin, activations.WindowSort)
_CLASSES: tuple[type[nn.Module], ...] = (CircularConv, *POOLS.values(), *activations.ELEMENTWISE, *_JOINT)

LAYERS = {cls.__name__: cls for cls in _CLASSES}
"""Layers that a file may name."""


# -- writing -----------------------------------------------------------------------------------------------------------


def encode(program: Program) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A program as data for JSON, and its tensors by name.

    Raises:
        GraphError: A layer is not on the list, such as an activation that was registered.
    """
    places = {node.name: index for index, node in enumerate(program.graph.nodes)}
    data = {
        "layers": {name: _encode_layer(layer) for name, layer in program.named_children()},
        "tensors": {
            **{n: "free" if p.requires_grad else "fixed" for n, p in program.named_parameters(recurse=False)},
            **{n: "buffer" for n, _ in program.named_buffers(recurse=False)},
        },
        "steps": [_encode_step(n, [places[p] for p in n.parents]) for n in program.graph.nodes[1:]],
        "result": places[program.graph.output],
    }
    return data, {n: t.detach().cpu().contiguous() for n, t in program.state_dict().items()}


def _encode_step(node: Node, parents: list[int]) -> dict[str, Any]:
    if isinstance(node, Activation):
        return {"target": node.path, "args": [{"value": parents[0]}], "kwargs": {}, "select": None}
    assert isinstance(node, Wire)
    return {
        "target": node.target,
        "args": [_encode(a, parents) for a in node.args],
        "kwargs": {k: _encode(v, parents) for k, v in node.kwargs},
        "select": node.select,
    }


def _encode_layer(layer: nn.Module) -> dict[str, Any]:
    kind = type(layer).__name__
    if LAYERS.get(kind) is not type(layer):
        raise GraphError(
            f"a layer of class {kind} cannot be written as data, since a reader would need that class; use one of "
            "torch.nn or ldlt.activations, or export_onnx"
        )
    options = {}
    for option in _options(type(layer)):
        if option == "bias":
            options[option] = getattr(layer, "bias", None) is not None
        elif hasattr(layer, option):
            options[option] = _encode(getattr(layer, option))
    return {"class": kind, "options": options}


def _options(cls: type[nn.Module]) -> list[str]:
    """Arguments of a class that are no tensors, and not where and how they are stored."""
    left_out = {"self", "device", "dtype", "inplace", "kernel" if cls is CircularConv else ""}
    return [name for name in inspect.signature(cls.__init__).parameters if name not in left_out]


def _encode(arg: Any, parents: Sequence[int] = ()) -> Any:
    if arg is None or isinstance(arg, (bool, str)) or type(arg) is int:
        return arg
    if isinstance(arg, float):
        return {"float": arg.hex()}
    if isinstance(arg, Ref):
        return {"value": parents[arg.index]}
    if isinstance(arg, Attr):
        return {"spread" if arg.spread else "tensor": arg.path}
    if arg is BATCH:
        return {"batch": True}
    if isinstance(arg, (list, tuple)):
        return {"tuple" if isinstance(arg, tuple) else "list": [_encode(a, parents) for a in arg]}
    raise GraphError(f"an argument of type {type(arg).__name__} cannot be written to a file")


# -- reading -----------------------------------------------------------------------------------------------------------


def decode(data: Any, tensors: Mapping[str, Tensor], input_shape: Sequence[int]) -> Program:
    """The program of a file.

    Args:
        data: What :func:`encode` returned, from JSON.
        tensors: Likewise; they are used, not copied.
        input_shape: Shape of one input.

    Raises:
        SavedModelError: Anything that :func:`encode` would not have written.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes of zero, which are refused below
            program = _decode(data, tensors)
            _try(program, tuple(input_shape))
    except SavedModelError:
        raise
    except LdltError as error:
        raise SavedModelError(f"the saved network is not one: {error}") from error
    except Exception as error:  # a file must not be able to raise anything else
        reason = " ".join(str(error).split())[:200]
        raise SavedModelError(f"the saved network is not one ({type(error).__name__}: {reason})") from error
    return program


def _decode(data: Any, tensors: Mapping[str, Tensor]) -> Program:
    members(data, {"layers", "tensors", "steps", "result"}, "the network")
    left = dict(tensors)
    for name, tensor in left.items():
        if tensor.is_floating_point():
            if not bool(tensor.isfinite().all()):
                raise SavedModelError(f"the tensor '{name}' has entries that are infinite or not numbers")
        elif tensor.dtype not in (torch.int64, torch.bool):
            raise SavedModelError(f"the tensor '{name}' is of type {tensor.dtype}")
    kinds = {t.dtype for t in left.values() if t.is_floating_point()}
    if kinds not in ({torch.float32}, {torch.float64}):
        raise SavedModelError("the tensors must all be float32 or all be float64")
    layers = {}
    for name, layer in typed(data["layers"], dict, "layers").items():
        _check_name(name, "layer")
        layers[name] = _decode_layer(name, layer, left)
    own: dict[str, Tensor] = {}
    for name, kind in typed(data["tensors"], dict, "tensors").items():
        _check_name(name, "tensor")
        if kind not in ("free", "fixed", "buffer"):
            raise SavedModelError(f"the tensor '{name}' is neither a parameter nor a buffer")
        own[name] = _take(left, name) if kind == "buffer" else nn.Parameter(_take(left, name), kind == "free")
    if left:
        raise SavedModelError(f"the tensor '{next(iter(left))[:_LONGEST_TEXT]}' belongs to no layer")
    found = typed(data["steps"], list, "steps")
    if not 1 <= len(found) <= _MOST_STEPS:
        raise SavedModelError(f"{len(found)} steps are none, or more than {_MOST_STEPS}")
    steps = [_decode_step(i, step, layers, own) for i, step in enumerate(found, 1)]
    result = typed(data["result"], int, "result")
    if not 1 <= result <= len(steps):
        raise SavedModelError("the result is no value of the program")
    return Program([Input("0", (), ()), *steps], str(result), own, layers).eval()


def _decode_layer(name: str, data: Any, left: dict[str, Tensor]) -> nn.Module:
    members(data, {"class", "options"}, f"'{name}'")
    kind = typed(data["class"], str, name)
    cls = LAYERS.get(kind)
    if cls is None:
        raise SavedModelError(f"'{name}': there is no layer of class {kind[:_LONGEST_TEXT]!r}")
    options = {k: _argument(v, []) for k, v in typed(data["options"], dict, name).items()}
    if not set(options) <= set(_options(cls)):
        raise SavedModelError(f"'{name}': {kind} has no such option")
    if cls is CircularConv:
        has_bias = typed(options.pop("bias", False), bool, name)
        bias = _take(left, f"{name}.bias") if has_bias else None
        return CircularConv(_take(left, f"{name}.weight"), **options, bias=bias)
    if "device" in inspect.signature(cls.__init__).parameters:
        options["device"] = "meta"  # nothing is allocated for sizes that the tensors do not have
    layer = cls(**options)
    for own, parameter in list(layer.named_parameters()):
        tensor = _take(left, f"{name}.{own}")
        if tensor.shape != parameter.shape:
            raise SavedModelError(
                f"the tensor '{name}.{own}' has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}"
            )
        setattr(layer, own, nn.Parameter(tensor))
    return layer


def _take(left: dict[str, Tensor], name: str) -> Tensor:
    if name not in left:
        raise SavedModelError(f"the tensor '{name}' is missing")
    return left.pop(name)


def _decode_step(index: int, data: Any, layers: Mapping[str, Any], tensors: Mapping[str, Any]) -> Node:
    members(data, {"target", "args", "kwargs", "select"}, f"step {index}")
    target, select, read = typed(data["target"], str, "target"), data["select"], list[int]()
    args = tuple(_argument(a, read) for a in typed(data["args"], list, "args"))
    kwargs = tuple((k, _argument(v, read)) for k, v in typed(data["kwargs"], dict, "kwargs").items())
    if not read or not all(0 <= v < index for v in read):
        raise SavedModelError(f"step {index}: reads no value, or one that comes later")
    for path in attributes(args, dict(kwargs)):
        if path not in tensors:
            raise SavedModelError(f"step {index}: there is no tensor '{path[:_LONGEST_TEXT]}'")
    parents = tuple(map(str, read))
    if target in layers:
        if args != (Ref(0),) or kwargs or select is not None:
            raise SavedModelError(f"step {index}: a layer is called with one value")
        return Activation(str(index), (), parents, path=target)
    if select is not None and typed(select, int, "select") < 0:
        raise SavedModelError(f"step {index}: selects what is not there")
    _check_operation(index, target)
    return Wire(str(index), (), parents, target, args, kwargs, select)


def _check_operation(index: int, target: str) -> None:
    """Refuse what is not an overload of a linear operation of the table, or writes into its arguments."""
    space, _, rest = target.partition(".")
    entry = TABLE.get(rest.partition(".")[0])
    known = space == "aten" and entry is not None and entry.linear and target.count(".") == 2
    overload = getattr(resolve(target.rpartition(".")[0]), target.rpartition(".")[2], None) if known else None
    if not isinstance(overload, torch._ops.OpOverload) or overload._schema.is_mutable:
        raise SavedModelError(f"step {index}: there is no layer or linear operation {target[:_LONGEST_TEXT]!r}")


def _argument(data: Any, read: list[int], depth: int = 0) -> Any:
    """An argument; the values that it reads are added to ``read``."""
    if data is None or type(data) is bool:
        return data
    if type(data) is int and abs(data) < 2**63:
        return data
    if type(data) is str and len(data) <= _LONGEST_TEXT and data.isprintable():
        return data
    if type(data) is dict and len(data) == 1 and depth < 4:
        ((kind, inner),) = data.items()
        if kind == "float" and type(inner) is str:
            number = float.fromhex(inner)
            if math.isfinite(number):
                return number
        elif kind == "value" and type(inner) is int:
            read.append(inner)
            return Ref(len(read) - 1)
        elif kind in ("tensor", "spread") and type(inner) is str:
            return Attr(inner, kind == "spread")
        elif kind in ("list", "tuple") and type(inner) is list and len(inner) <= _MOST_NUMBERS:
            items = [_argument(a, read, depth + 1) for a in inner]
            return items if kind == "list" else tuple(items)
        elif kind == "batch" and inner is True:
            return BATCH
    raise SavedModelError(f"an argument is not understood: {str(data)[:_LONGEST_TEXT]}")


def _check_name(name: str, kind: str) -> None:
    found = _NAME.fullmatch(name)
    if found is None or found[1] != kind:
        raise SavedModelError(f"the name {name[:_LONGEST_TEXT]!r} is not that of a {kind}")


def members(data: Any, names: set[str], where: str) -> None:
    """Require an object with exactly these members."""
    if type(data) is not dict or set(data) != names:
        raise SavedModelError(f"{where} must be an object of {', '.join(sorted(names))}")


def typed(value: Any, kind: type, name: str) -> Any:
    """A value of exactly this type."""
    if type(value) is not kind:  # a bool is not an integer here
        raise SavedModelError(f"'{name}' is not of type {kind.__name__}")
    return value


class _Meter(TorchDispatchMode):
    """Refuses results that are too large."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if any(isinstance(t, Tensor) and t.numel() > LARGEST_VALUE for t in tree_iter(found)):
            raise SavedModelError(f"an intermediate value has more than {LARGEST_VALUE} entries")
        return found


def _try(program: Program, shape: tuple[int, ...]) -> None:
    """Run two samples, first without memory."""
    tensors = {**dict(program.named_parameters()), **dict(program.named_buffers())}
    dtype = next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    if 2 * math.prod(shape) > LARGEST_VALUE:
        raise SavedModelError(f"an input has more than {LARGEST_VALUE // 2} entries")
    empty = {n: t.detach().to("meta") for n, t in tensors.items()}
    with torch.no_grad():
        with _Meter():
            functional_call(program, empty, (torch.empty(2, *shape, dtype=dtype, device="meta"),))
        found = program(torch.zeros(2, *shape, dtype=dtype))
    if not isinstance(found, Tensor) or found.ndim < 2 or len(found) != 2:
        raise SavedModelError("the saved network does not map samples to outputs")
