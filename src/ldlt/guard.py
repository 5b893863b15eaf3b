"""What no tracer sees: code beside a module's ``forward`` or in its place, and what depends on the batch size."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module

from ldlt.errors import GraphError, UnsupportedOpError
from ldlt.graph import BATCH

__all__ = ["refuse_batch_arithmetic", "refuse_hooks", "runs_as"]

_HOOKS = {"_forward_hooks": "forward hook", "_forward_pre_hooks": "forward pre-hook"}
_GLOBAL = {"_global_forward_hooks": "forward hook", "_global_forward_pre_hooks": "forward pre-hook"}
_RUN = ("forward", "_conv_forward", "__call__", "_call_impl", "_wrapped_call_impl", "_slow_forward")
"""What runs when a layer is called."""


def refuse_hooks(module: nn.Module) -> None:
    """Refuse forward hooks and pre-hooks, of any part of a module and global ones, and functions put on an instance.

    They can change every value on the way, also at some inputs only: trying the module out would not tell. Hooks that
    only look are refused, too, since nothing tells them apart. Hooks on gradients are no part of the function.

    Raises:
        GraphError: There is one; the message names it.
    """
    for table, kind in _GLOBAL.items():
        if getattr(torch_module, table):
            raise GraphError(f"there is a global {kind} of torch.nn.Module, which may change any value: remove it")
    for name, part in module.named_modules():
        own = part.__dict__
        shown = f"'{name}'" if name else f"the {type(part).__name__} itself"
        for table, kind in _HOOKS.items():
            if own.get(table):
                raise GraphError(
                    f"{shown} has a {kind}, which may change values and is no part of what is certified: remove it "
                    "(handle.remove()), or write what it does into forward"
                )
        for method in _RUN:
            if method in own:
                raise GraphError(f"{shown} has a function of its own in place of '{method}': write a subclass instead")


def runs_as(module: nn.Module, kinds: Iterable[type[nn.Module]]) -> bool:
    """Whether a layer is one of these classes and computes what the class does: nothing that runs is overridden.

    Example:
        >>> class Loud(nn.Conv2d):
        ...     def forward(self, x):
        ...         return 20 * super().forward(x)
        >>> runs_as(nn.Conv2d(1, 1, 1), [nn.Conv2d]), runs_as(Loud(1, 1, 1), [nn.Conv2d])
        (True, False)
    """
    cls = next((c for c in type(module).__mro__ if c in tuple(kinds)), None)
    if cls is None:
        return False
    return all(
        getattr(type(module), name, None) is getattr(cls, name, None) and name not in module.__dict__ for name in _RUN
    )


# -- the batch size ----------------------------------------------------------------------------------------------------

_IN_SHAPES: set[Any] = {"view", "reshape", torch.reshape, "expand", torch.broadcast_to, "broadcast_to"}
_UNSURE = object()  # a number that may depend on the batch size, and is not the batch size itself


def refuse_batch_arithmetic(program: fx.GraphModule, values: Mapping[fx.Node, Any]) -> None:
    """Refuse the batch size everywhere but in the shape that a tensor is given, and anything computed from it.

    Trying some batch sizes would not tell: ``1 + 100 * (x.shape[0] // 10)`` is 1 for all small ones.

    Args:
        program: A traced program.
        values: What its nodes were in one run.

    Raises:
        UnsupportedOpError: Something depends on the size of the batch.
    """
    known: dict[fx.Node, Any] = {}  # numbers and sizes, with BATCH and _UNSURE in them
    live: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            live.add(node)
        elif node.op in ("get_attr", "output"):
            continue
        elif _has_tensor(values[node]):
            _require_no_batch(node, known)
            if any(a in live for a in node.all_input_nodes):
                live.add(node)
        else:
            known[node] = _symbol(node, known, live, values)


def _require_no_batch(node: fx.Node, known: Mapping[fx.Node, Any]) -> None:
    for arg in node.all_input_nodes:
        found = known.get(arg, 0)
        if not _holds(found, (BATCH, _UNSURE)):
            continue
        first = node.args[1] if len(node.args) > 1 else node.kwargs.get("shape", node.kwargs.get("size"))
        first = first[0] if isinstance(first, (tuple, list)) and first else first
        fits = node.target in _IN_SHAPES and first is arg and not _holds(found, (_UNSURE,))
        if not fits or (isinstance(found, tuple) and _holds(found[1:], (BATCH,))):
            raise UnsupportedOpError(
                node.name,
                f"'{arg.name}' depends on the batch size, which may only be the first number of a shape (view, "
                "reshape, expand): what a sample is mapped to must not depend on the others in its batch",
            )


def _has_tensor(value: Any) -> bool:
    return any(map(_has_tensor, value)) if isinstance(value, (tuple, list)) else isinstance(value, Tensor)


def _holds(value: Any, marks: tuple[Any, ...]) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_holds(v, marks) for v in value)
    return any(value is m for m in marks)


def _symbol(node: fx.Node, known: Mapping[fx.Node, Any], live: set[fx.Node], values: Mapping[fx.Node, Any]) -> Any:
    """A number or a size with BATCH in the place of the batch size, or _UNSURE."""
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and source in live:
        value = values[source]
        asked = node.args[1] if node.target is getattr else node.target
        if not isinstance(value, Tensor):
            return _UNSURE
        if asked in ("ndim", "dim", "dtype", "device"):
            return values[node]
        if (asked == "shape" and node.target is getattr) or (asked == "size" and node.op == "call_method"):
            shape = (BATCH, *value.shape[1:])
            place = node.args[1:] if asked == "size" else ()
            place = (*place, *node.kwargs.values())
            if not place or place == (None,):
                return shape
            return shape[place[0]] if len(place) == 1 and type(place[0]) is int else _UNSURE
        return _UNSURE
    if not any(a in live or _holds(known.get(a, 0), (BATCH, _UNSURE)) for a in node.all_input_nodes):
        return values[node]
    if node.target is operator.getitem and isinstance(known.get(cast(fx.Node, source)), tuple):
        index = node.args[1]
        plain = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
        if all(v is None or type(v) is int for v in plain):
            return known[cast(fx.Node, source)][index]
    if node.target is operator.add and len(node.args) == 2:
        left, right = (known.get(a) if isinstance(a, fx.Node) else a for a in node.args)
        if isinstance(left, tuple) and isinstance(right, tuple):
            both = (*left, *right)
            return _UNSURE if any(isinstance(v, fx.Node) for v in both) else both
    return _UNSURE
