"""Read a trained network from an ONNX file, to be traced and certified.

The file is data: nothing in it is executed, no other file is opened, and sizes are checked before memory is allocated.
What is not known to be a linear map or an activation of each sample is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ldlt.errors import LdltError, OnnxError
from ldlt.onnx.constants import fold
from ldlt.onnx.file import OnnxNode, OnnxSource, decode, load
from ldlt.onnx.limits import OnnxLimits, show
from ldlt.onnx.node import Node, Value
from ldlt.onnx.operators import OPERATORS, refusal
from ldlt.onnx.program import Builder, Data, OnnxModule

__all__ = ["OnnxLimits", "OnnxNetwork", "read_onnx"]

_DOUBLE = 11  # protobuf number of float64


@dataclass(frozen=True, eq=False)
class OnnxNetwork:
    """A network from an ONNX file.

    Attributes:
        module: Maps (n, *input_shape) to (n, k); :func:`ldlt.graph.trace.trace` accepts it.
        input_shape: Shape of one sample.
        output_shape: Shape of the file's output for one sample, before it was flattened to (k,).
        input_name: Name of the input in the file.
        output_name: Name of the output in the file.
    """

    module: OnnxModule
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    input_name: str
    output_name: str


def read_onnx(
    source: str | os.PathLike[str] | bytes,
    *,
    input_name: str | None = None,
    output_name: str | None = None,
    input_shape: Sequence[int] | None = None,
    limits: OnnxLimits | None = None,
) -> OnnxNetwork:
    """Turn an ONNX file into a module with the same outputs.

    Matrices of the file become ``nn.Linear`` layers with the same values in the same type; convolutions become dense
    ones. The first axis of the input must be the batch, named or of fixed size, and every operation must act on each
    sample by itself. An output of other than two axes is flattened to (n, k). A Cast between float32 and float64
    changes nothing here: such a file is computed in float64 throughout.

    Args:
        source: A path, or the bytes of a file.
        input_name: Which input, if the file has several and the output needs only this one.
        output_name: Which output, if the file has several, or any other value of the file, such as the logits before a
            softmax; what it does not need is not read.
        input_shape: Shape of one sample, for files that leave it open.
        limits: Sizes to refuse beyond.

    Raises:
        OnnxError: The file is damaged, too large, or not a network of known operations; the message names the
            operator and the node, and says what to do.
        MissingExtraError: The package ``onnx`` is not installed.
    """
    limits = OnnxLimits() if limits is None else limits
    try:
        found = load(source, limits, input_name, output_name)
        shape = _sample_shape(found, input_shape)
        return _build(found, shape, limits)
    except LdltError:
        raise
    except Exception as error:  # a file must not be able to raise anything else
        raise OnnxError(f"unforeseen contents of the file ({type(error).__name__}: {error})") from error


def _sample_shape(source: OnnxSource, given: Sequence[int] | None) -> tuple[int, ...]:
    declared = source.shape
    if given is None:
        sizes = [d for d in declared if d is not None]
        if len(sizes) < len(declared):
            raise OnnxError(
                f"input {show(source.input)}: the file leaves {len(declared) - len(sizes)} sizes besides the batch "
                "open; pass input_shape"
            )
        return tuple(sizes)
    wanted = tuple(int(d) for d in given)
    if len(wanted) != len(declared) or any(w < 1 or d not in (None, w) for w, d in zip(wanted, declared, strict=False)):
        raise OnnxError(f"input_shape {wanted} does not fit the shape in the file, {declared} (None: open)")
    return wanted


def _build(source: OnnxSource, shape: tuple[int, ...], limits: OnnxLimits) -> OnnxNetwork:
    # A file that changes between widths is computed in the wider one: all its numbers are exact there.
    widened = any(n.operator == "Cast" and n.attributes.get("to") == _DOUBLE for n in source.nodes)
    wide = torch.float64 if widened or source.dtype == torch.float64 else torch.float32
    builder = Builder(shape, source.dtype, wide, source.batch, limits)
    values: dict[str, Value] = {source.input: builder.input}

    def value(name: str) -> Value | None:
        if not name:
            return None
        if name not in values and name in source.constants:
            tensor = source.constants[name]
            builder.spend(f"initialiser {show(name)}", _count(tensor))
            values[name] = decode(tensor)
        return values.get(name)

    for raw in source.nodes:
        inputs = [value(name) for name in raw.inputs]
        for name, found in zip(raw.inputs, inputs, strict=True):
            if name and found is None:
                raise OnnxError(f"{raw.label}: reads {show(name)}, an optional result that is not computed here")
        builder.stem = f"{raw.operator.lower()}_{raw.index}" if raw.operator in OPERATORS else "node"
        for name, result in zip(raw.outputs, _run(raw, inputs, builder), strict=False):
            if name:
                values[name] = result
    output = value(source.output)
    if not isinstance(output, Data):
        raise OnnxError(f"the output {show(source.output)} does not depend on the input {show(source.input)}")
    module = builder.finish(output)
    _try(module, shape, output, wide)
    return OnnxNetwork(module, shape, output.shape, source.input, source.output)


def _count(tensor: Any) -> int:
    return int(torch.Size(tensor.dims).numel())


def _run(raw: OnnxNode, inputs: list[Value | None], builder: Builder) -> list[Value]:
    rule = OPERATORS.get(raw.operator)
    if rule is None:
        raise OnnxError(f"{raw.label}: {refusal(raw.operator)}")
    node = Node(raw, inputs, builder)
    node.check(rule.least, rule.most, rule.results)
    results = rule.run(node) if any(isinstance(v, Data) for v in inputs) else [fold(node)]
    node.refuse_unread()
    return results


def _try(module: OnnxModule, shape: tuple[int, ...], output: Data, dtype: torch.dtype) -> None:
    """Run two samples: the shapes must be those that were derived, and the numbers finite."""
    with torch.no_grad():
        result = module(torch.zeros(2, *shape, dtype=dtype))
    if result.shape != (2, output.features):
        raise OnnxError(f"the file promises {output.features} outputs but computes {tuple(result.shape[1:])}")
    if not bool(result.isfinite().all()):
        raise OnnxError("the weights are so large that the output for a zero input is not finite")
