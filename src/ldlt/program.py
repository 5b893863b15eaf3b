"""A tensor function as a list of operations that runs without Python.

The step of a small network is mostly Python: modules, ``vmap``, autograd. None of it depends on the numbers, so it is
done once. :func:`record` runs a function and writes down every operation that reaches the dispatcher; by then ``vmap``
has become batched operations and the backward pass is a row of operations like any other. The list is handed to
TorchScript's interpreter, which replays it at about a microsecond per operation.

``torch.fx.experimental.proxy_tensor.make_fx`` writes the same list, but keeps a fake tensor and a stack trace for every
node: it was measured to take about five times as long, longer than the whole training of a small network.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ldlt.errors import LdltError

__all__ = ["Program", "ProgramError", "record"]

Program = Callable[..., tuple[Tensor, ...]]
"""A recorded function: tensors in, tuple of tensors out, for the shapes it was recorded with."""


class ProgramError(LdltError, RuntimeError):
    """A function whose recorded operations do not compute what the function computes."""


@dataclass(frozen=True)
class _Slot:
    """Place of a tensor on the tape."""

    index: int


def _each(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the entries of nested arguments; ``tree_map`` of PyTorch takes several times as long."""
    if isinstance(value, (tuple, list)):
        return type(value)(_each(function, part) for part in value)
    return function(value)


class _Recorder(TorchDispatchMode):
    """Runs every operation and writes it on a tape."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.tape: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[int | None]]] = []
        self.constants: dict[int, Tensor] = {}
        self.tensors: list[Tensor] = []  # tensors are known by their id, so none may be freed
        self.slots: dict[int, int] = {}
        for tensor in inputs:
            self.new(tensor)

    def new(self, tensor: Tensor) -> int:
        """Slot of a tensor that has just been made."""
        self.slots[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return self.slots[id(tensor)]

    def slot(self, tensor: Tensor) -> int:
        """Slot of a tensor; one that no operation on the tape has made is a constant."""
        if id(tensor) not in self.slots:
            self.constants[self.new(tensor)] = tensor.detach()
        return self.slots[id(tensor)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:  # the same numbers in the same memory
            source = self.slot(args[0])
            result = func(*args)
            self.slots[id(result)] = source
            self.tensors.append(result)  # keeps the id taken; nothing reads this place
            return result

        def place(value: Any) -> Any:
            return _Slot(self.slot(value)) if isinstance(value, Tensor) else value

        read = _each(place, tuple(args)), {key: _each(place, value) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        parts = result if isinstance(result, (tuple, list)) else (result,)
        made = [self.new(part) if isinstance(part, Tensor) else None for part in parts]
        self.tape.append((func, *read, made))
        return result


def _compile(replay: Program, examples: tuple[Tensor, ...]) -> Program:
    """Turn a function that only calls operations into TorchScript's form of it.

    ``torch.jit.trace`` keeps every function it ever made (20 MB for a step of a residual network), which a study of a
    thousand units cannot afford; its two halves do not.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript announces its successor
        try:
            graph = torch._C._create_graph_by_tracing(replay, examples, lambda value: "", True, False)[0]
            compiled = torch._C._create_function_from_graph("program", graph)
        except AttributeError:  # a release of PyTorch without these internals
            compiled = torch.jit.trace(replay, examples, check_trace=False)

    def program(*inputs: Tensor) -> tuple[Tensor, ...]:
        # What the executor would optimise is not worth the time it takes: as long as all the rest of a recording.
        with torch.jit.optimized_execution(False):
            return compiled(*inputs)  # type: ignore[no-any-return]

    return program


def _beside(example: Tensor) -> Tensor:
    """An example with every number changed by up to one per cent; zeros and whole numbers stay."""
    if not example.is_floating_point():
        return example
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(example.shape, generator=generator, dtype=torch.float64).to(example)
    return example.detach() * (1 + 0.02 * (noise - 0.5))


def record(function: Callable[..., tuple[Tensor, ...]], *examples: Tensor) -> Program:
    """Record a function at example inputs.

    Args:
        function: Pure function of tensors that returns a tuple of tensors. What it does may depend on the shapes of
            its inputs, not on their values.
        *examples: Inputs; the program is valid for inputs of these shapes and types.

    Raises:
        ProgramError: If the recorded program does not reproduce the function beside the examples. Not at them: start
            values may lie on a kink (semi-orthogonal matrices in ``|W'W|``), where rounding decides on a gradient.
    """
    with _Recorder(examples) as recorder:
        outputs = [recorder.slot(t) for t in function(*examples)]
    tape, constants = recorder.tape, recorder.constants

    def replay(*inputs: Tensor) -> tuple[Tensor, ...]:
        values: dict[int, Tensor] = {**dict(enumerate(inputs)), **constants}

        def fetch(value: Any) -> Any:
            return values[value.index] if isinstance(value, _Slot) else value

        for func, args, kwargs, made in tape:
            result = func(*_each(fetch, args), **{key: _each(fetch, value) for key, value in kwargs.items()})
            parts = result if isinstance(result, (tuple, list)) else (result,)
            values.update((slot, part) for slot, part in zip(made, parts, strict=True) if slot is not None)
        return tuple(values[slot] for slot in outputs)

    beside = tuple(_beside(t) for t in examples)
    with torch.no_grad():
        program = _compile(replay, examples)
        found = program(*beside)
    for ours, theirs in zip(found, function(*beside), strict=True):
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5, equal_nan=True):
            raise ProgramError("the recorded operations do not reproduce the function; does it depend on values?")
    return program
