"""Programs as JSON and tensors, and back, read with distrust.

A file can name layers, functions and methods of the lists here and in :mod:`ldlt.export.program`, and nothing else: no
class is imported, nothing is unpickled. Numbers that must be exact are hexadecimal. Before a program is run for the
first time it is run on tensors without memory, so that a file cannot ask for more than :data:`LARGEST_VALUE`.
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
from ldlt.export.program import ATTRIBUTES, FUNCTIONS, METHODS, Held, Program, Step, Value, values_in
from ldlt.images.convolutions import CircularConv

__all__ = ["LARGEST_VALUE", "LAYERS", "decode", "encode"]

LARGEST_VALUE = 2**26
"""Entries of one intermediate value, for two samples."""

_MOST_STEPS = 10_000
_MOST_NUMBERS = 4096  # in one argument
_LONGEST_TEXT = 64
_NAME = re.compile(r"(layer|constant)_(0|[1-9][0-9]{0,5})")
_ARITHMETIC = {f"operator.{n}" for n in ("add", "floordiv", "matmul", "mul", "neg", "sub", "truediv")}

LAYERS: dict[str, type[nn.Module]] = {
    cls.__name__: cls
    for cls in (
        nn.Linear,
        nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
        CircularConv,
        nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
        nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
        nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d,
        nn.PixelShuffle, nn.PixelUnshuffle, nn.Upsample, nn.UpsamplingNearest2d, nn.Flatten, nn.Unflatten,
        *activations.ELEMENTWISE, activations.GroupSort, activations.MaxMin, activations.WindowSort,
    )
}  # fmt: skip
"""Layers that a file may name."""


# -- writing -----------------------------------------------------------------------------------------------------------


def encode(program: Program) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A program as data for JSON, and its tensors by name.

    Raises:
        GraphError: A layer is not on the list, such as an activation that was registered.
    """
    layers = {name: _encode_layer(name, layer) for name, layer in program.named_children()}
    constants = {
        **{n: {"free": p.requires_grad, "parameter": True} for n, p in program.named_parameters(recurse=False)},
        **{n: {"free": False, "parameter": False} for n, _ in program.named_buffers(recurse=False)},
    }
    steps = [
        {
            "kind": step.kind,
            "target": step.target,
            "args": [_encode(a) for a in step.args],
            "kwargs": {k: _encode(v) for k, v in step.kwargs.items()},
        }
        for step in program.steps
    ]
    tensors = {n: t.detach().cpu().contiguous() for n, t in program.state_dict().items()}
    return {"layers": layers, "constants": constants, "steps": steps, "result": program.result}, tensors


def _encode_layer(name: str, layer: nn.Module) -> dict[str, Any]:
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
    return {"class": kind, "options": options, "free": any(p.requires_grad for p in layer.parameters())}


def _options(cls: type[nn.Module]) -> list[str]:
    """Arguments of a class that are no tensors, and not where and how they are stored."""
    left_out = {"self", "device", "dtype", "inplace", "kernel" if cls is CircularConv else ""}
    return [name for name in inspect.signature(cls.__init__).parameters if name not in left_out]


def _encode(arg: Any) -> Any:
    if arg is None or isinstance(arg, (bool, str)) or type(arg) is int:
        return arg
    if isinstance(arg, float):
        return {"float": arg.hex()}
    if isinstance(arg, Value):
        return {"value": arg.index}
    if isinstance(arg, Held):
        return {"tensor": arg.name}
    if isinstance(arg, list):
        return {"list": [_encode(a) for a in arg]}
    if isinstance(arg, tuple):
        return {"tuple": [_encode(a) for a in arg]}
    if isinstance(arg, slice):
        return {"slice": [_encode(a) for a in (arg.start, arg.stop, arg.step)]}
    if arg is Ellipsis:
        return {"ellipsis": True}
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
        raise SavedModelError(f"the saved network is not one ({type(error).__name__}: {str(error)[:200]})") from error
    return program


def _decode(data: Any, tensors: Mapping[str, Tensor]) -> Program:
    members(data, {"layers", "constants", "steps", "result"}, "the network")
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
    constants: dict[str, Tensor] = {}
    for name, kind in typed(data["constants"], dict, "constants").items():
        _check_name(name, "constant")
        members(kind, {"free", "parameter"}, f"'{name}'")
        tensor = _take(left, name)
        is_parameter = typed(kind["parameter"], bool, name)
        constants[name] = nn.Parameter(tensor, typed(kind["free"], bool, name)) if is_parameter else tensor
    if left:
        raise SavedModelError(f"the tensor '{next(iter(left))[:_LONGEST_TEXT]}' belongs to no layer")
    found = typed(data["steps"], list, "steps")
    if not 1 <= len(found) <= _MOST_STEPS:
        raise SavedModelError(f"{len(found)} steps are none, or more than {_MOST_STEPS}")
    steps = [_decode_step(i, step, layers, constants) for i, step in enumerate(found)]
    result = typed(data["result"], int, "result")
    if not 1 <= result <= len(steps):
        raise SavedModelError("the result is no value of the program")
    program = Program(steps, result, layers, constants)
    return program.eval()


def _decode_layer(name: str, data: Any, left: dict[str, Tensor]) -> nn.Module:
    members(data, {"class", "options", "free"}, f"'{name}'")
    kind = typed(data["class"], str, name)
    cls = LAYERS.get(kind)
    if cls is None:
        raise SavedModelError(f"'{name}': there is no layer of class {kind[:_LONGEST_TEXT]!r}")
    options = {k: _argument(v, text=True) for k, v in typed(data["options"], dict, name).items()}
    if not set(options) <= set(_options(cls)):
        raise SavedModelError(f"'{name}': {kind} has no such option")
    free = typed(data["free"], bool, name)
    if cls is CircularConv:
        has_bias = typed(options.pop("bias", False), bool, name)
        bias = _take(left, f"{name}.bias") if has_bias else None
        layer: nn.Module = CircularConv(_take(left, f"{name}.weight"), **options, bias=bias)
        return layer.requires_grad_(free)
    if "device" in inspect.signature(cls.__init__).parameters:
        options["device"] = "meta"  # nothing is allocated for sizes that the tensors do not have
    layer = cls(**options)
    for own, parameter in list(layer.named_parameters()):
        tensor = _take(left, f"{name}.{own}")
        if tensor.shape != parameter.shape:
            raise SavedModelError(
                f"the tensor '{name}.{own}' has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}"
            )
        setattr(layer, own, nn.Parameter(tensor, free))
    return layer


def _take(left: dict[str, Tensor], name: str) -> Tensor:
    if name not in left:
        raise SavedModelError(f"the tensor '{name}' is missing")
    return left.pop(name)


def _decode_step(index: int, data: Any, layers: Mapping[str, Any], constants: Mapping[str, Any]) -> Step:
    members(data, {"kind", "target", "args", "kwargs"}, f"step {index}")
    kind, target = typed(data["kind"], str, "kind"), typed(data["target"], str, "target")
    known: Any = {"layer": layers, "method": METHODS, "function": FUNCTIONS}.get(kind, ())
    if target not in known:
        raise SavedModelError(f"step {index}: there is no {kind[:_LONGEST_TEXT]} {target[:_LONGEST_TEXT]!r}")
    raw = typed(data["args"], list, "args")
    args = tuple(_argument(a, text=target == "getattr") for a in raw)
    kwargs = {k: _argument(v) for k, v in typed(data["kwargs"], dict, "kwargs").items()}
    if target == "getattr" and (len(args) != 2 or args[1] not in ATTRIBUTES or kwargs):
        raise SavedModelError(f"step {index}: reads an attribute that is not known")
    if target in _ARITHMETIC and (kwargs or not all(isinstance(a, (Value, Held, int, float)) for a in args)):
        raise SavedModelError(f"step {index}: arithmetic is with tensors and numbers")
    read = values_in(args) | values_in(kwargs)
    if not read or not all(0 <= v <= index for v in read):
        raise SavedModelError(f"step {index}: reads no value, or one that comes later")
    for held in _held(args) | _held(kwargs):
        if held not in constants:
            raise SavedModelError(f"step {index}: there is no tensor '{held[:_LONGEST_TEXT]}'")
    return Step(kind, target, args, kwargs)


def _held(arg: Any) -> set[str]:
    if isinstance(arg, Held):
        return {arg.name}
    if isinstance(arg, slice):
        return _held((arg.start, arg.stop, arg.step))
    if isinstance(arg, Mapping):
        return _held(tuple(arg.values()))
    return set().union(*map(_held, arg)) if isinstance(arg, (tuple, list)) else set()


def _argument(data: Any, *, text: bool = False, depth: int = 0) -> Any:
    if data is None or type(data) is bool:
        return data
    if type(data) is int and abs(data) < 2**62:
        return data
    if type(data) is str and text and len(data) <= _LONGEST_TEXT and data.isprintable():
        return data
    if type(data) is dict and len(data) == 1 and depth < 4:
        ((kind, inner),) = data.items()
        if kind == "float" and type(inner) is str:
            number = float.fromhex(inner)
            if not math.isnan(number):
                return number
        elif kind == "value" and type(inner) is int:
            return Value(inner)
        elif kind == "tensor" and type(inner) is str:
            return Held(inner)
        elif kind in ("list", "tuple") and type(inner) is list and len(inner) <= _MOST_NUMBERS:
            items = [_argument(a, text=text, depth=depth + 1) for a in inner]
            return items if kind == "list" else tuple(items)
        elif kind == "slice" and type(inner) is list and len(inner) == 3:
            return slice(*(_argument(a, depth=depth + 1) for a in inner))
        elif kind == "ellipsis" and inner is True:
            return Ellipsis
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
