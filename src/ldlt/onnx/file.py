"""From bytes to the nodes that an output needs, in order, and the constants they read; nothing is computed here."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ldlt.errors import MissingExtraError, OnnxError
from ldlt.onnx.limits import OnnxLimits, show
from ldlt.onnx.wire import check_wire

__all__ = ["BATCH", "OnnxNode", "OnnxSource", "decode", "load", "properties"]

BATCH = -(2**62) - 20231
"""Stands for the batch size in shapes that the file computes; no shape or index of a file has this value."""

_OLDEST, _NEWEST = 7, 28  # operator sets whose definitions the operators of this package were compared with
_MOST_AXES = 8
# Protobuf number of an element type -> the type here, its layout in raw bytes, the field for values one by one.
_LAYOUT: dict[int, tuple[torch.dtype, str, str]] = {
    1: (torch.float32, "<f4", "float_data"),
    6: (torch.int64, "<i4", "int32_data"),
    7: (torch.int64, "<i8", "int64_data"),
    9: (torch.bool, "u1", "int32_data"),
    11: (torch.float64, "<f8", "double_data"),
}
_FLOATS = {1: torch.float32, 11: torch.float64}


@dataclass(frozen=True)
class OnnxNode:
    """A node of the file.

    Attributes:
        index: Its place in the file.
        operator: What it does, such as ``Gemm``.
        label: How messages call it.
        inputs: Names it reads; empty for an omitted one.
        outputs: Names it defines; empty for an omitted one.
        attributes: Numbers, texts and tensors by name.
    """

    index: int
    operator: str
    label: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class OnnxSource:
    """The part of a file that one output needs.

    Attributes:
        nodes: Needed nodes, each after those it reads.
        constants: Initialisers by name, checked but not decoded.
        input: Name of the input.
        output: Name of the output.
        dtype: Element type of the input.
        batch: Declared batch size, or None if it is free.
        shape: Declared shape of one sample; None for a free dimension.
    """

    nodes: tuple[OnnxNode, ...]
    constants: dict[str, Any]
    input: str
    output: str
    dtype: torch.dtype
    batch: int | None
    shape: tuple[int | None, ...]


def load(
    source: str | os.PathLike[str] | bytes,
    limits: OnnxLimits,
    input_name: str | None = None,
    output_name: str | None = None,
) -> OnnxSource:
    """Parse a file and find what an output needs.

    Args:
        source: A path, or the bytes of a file.
        limits: Checked before each allocation.
        input_name: Which input; None if there is only one.
        output_name: Which output, or any other value of the file; None for the only output.

    Raises:
        OnnxError: If there is no such network.
        MissingExtraError: If the package ``onnx`` is missing.
    """
    model = _parse(source, limits)
    _check_model(model)
    graph = model.graph
    if len(graph.node) > limits.nodes:
        raise OnnxError(f"{len(graph.node)} nodes are more than {limits.nodes}; raise the limit 'nodes'")

    constants: dict[str, Any] = {}
    for tensor in graph.initializer:
        if not tensor.name or tensor.name in constants:
            raise OnnxError(f"two initialisers are called {show(tensor.name)}, or one has no name")
        _check_tensor(tensor, f"initialiser {show(tensor.name)}", limits.elements)
        constants[tensor.name] = tensor
    inputs: dict[str, Any] = {}
    for info in graph.input:
        if not info.name or info.name in inputs:
            raise OnnxError(f"two inputs are called {show(info.name)}, or one has no name")
        inputs[info.name] = info
    live = [name for name in inputs if name not in constants]  # old files list initialisers as inputs, too
    chosen = _choose("input", live, input_name)
    nodes = [_node(index, raw) for index, raw in enumerate(graph.node)]
    output = output_name or _choose("output", [info.name for info in graph.output], None)
    ordered = _order(nodes, {*inputs, *constants}, output)
    for node in ordered:
        other = next((n for n in node.inputs if n in live and n != chosen), None)
        if other is not None:
            raise OnnxError(
                f"{node.label}: reads the input {show(other)}, too; a network of one input is expected: make the "
                "others initialisers"
            )
    dtype, batch, shape = _input(inputs[chosen])
    return OnnxSource(tuple(ordered), constants, chosen, output, dtype, batch, shape)


def properties(source: str | os.PathLike[str] | bytes, limits: OnnxLimits) -> dict[str, str]:
    """Texts that a file carries beside its network, by name.

    Raises:
        OnnxError: If the file cannot be parsed, or has two texts of one name.
        MissingExtraError: If the package ``onnx`` is missing.
    """
    found: dict[str, str] = {}
    for entry in _parse(source, limits).metadata_props:
        if entry.key in found:
            raise OnnxError(f"two properties are called {show(entry.key)}")
        found[entry.key] = entry.value
    return found


def _parse(source: str | os.PathLike[str] | bytes, limits: OnnxLimits) -> Any:
    """The message of a file, walked over before it is parsed."""
    try:
        import onnx  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("onnx", "onnx") from error
    data = _bytes(source, limits.file_bytes)
    check_wire(data, onnx.ModelProto.DESCRIPTOR, limits.fields)
    try:
        return onnx.ModelProto.FromString(data)
    except Exception as error:  # whatever class the installed protobuf raises
        raise OnnxError(f"not an ONNX file, or a damaged one: {error}") from error


def _bytes(source: str | os.PathLike[str] | bytes, most: int) -> bytes:
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source) if len(source) <= most else b""
        size = len(source)
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise OnnxError(f"{show(str(path))} is not a file")
            size = found.st_size
            data = b""
            if size <= most:
                with path.open("rb") as stream:
                    data = stream.read(most + 1)  # the file may have grown since
                size = len(data)
        except (OSError, ValueError) as error:
            if isinstance(error, OnnxError):
                raise
            raise OnnxError(f"{show(str(path))} cannot be read: {error}") from error
    else:
        raise OnnxError(f"a path or bytes are expected, not {type(source).__name__}")
    if size > most:
        raise OnnxError(f"the file has {size} bytes, more than {most}; raise the limit 'file_bytes' if you trust it")
    return data


def _check_model(model: Any) -> None:
    if not model.HasField("graph"):
        raise OnnxError("not an ONNX file, or an empty one: it has no graph")
    if model.functions:
        raise OnnxError(
            f"the file defines its own function {show(model.functions[0].name)}; inline functions before saving "
            "(onnx.inliner.inline_local_functions)"
        )
    if model.training_info:
        raise OnnxError("the file contains a training graph; export the model for inference")
    if model.graph.sparse_initializer:
        raise OnnxError("the file has sparse initialisers; store them densely")
    if model.graph.quantization_annotation:
        raise OnnxError("the file is quantised; export the model in floating point")
    versions = {(entry.domain or "ai.onnx"): int(entry.version) for entry in model.opset_import}
    version = versions.get("ai.onnx")
    if version is None or not _OLDEST <= version <= _NEWEST:
        raise OnnxError(
            f"operator set {version} is not known, only {_OLDEST} to {_NEWEST}; convert the file "
            "(onnx.version_converter)"
        )


def _choose(what: str, names: list[str], wanted: str | None) -> str:
    if wanted is not None:
        if wanted not in names:
            raise OnnxError(f"there is no {what} {show(wanted)}; there are: {_list(names)}")
        return wanted
    if len(names) != 1:
        raise OnnxError(
            f"exactly one {what} is expected, there are {len(names)}: {_list(names)}; choose with {what}_name"
        )
    return names[0]


def _list(names: list[str]) -> str:
    shown = ", ".join(show(n) for n in names[:8])
    return (shown + ", ..." if len(names) > 8 else shown) or "none"


# -- tensors -----------------------------------------------------------------------------------------------------------


def _check_tensor(tensor: Any, what: str, most: int) -> None:
    """Refuse a tensor that is not plain numbers inside the file, as many as its shape says."""
    if tensor.data_location != 0 or tensor.external_data:
        raise OnnxError(
            f"{what}: its values are in another file, and those are never opened; save the model as one file "
            "(onnx.save_model with save_as_external_data=False)"
        )
    if tensor.HasField("segment"):
        raise OnnxError(f"{what}: stored in segments, which no current version of ONNX uses")
    if tensor.data_type not in _LAYOUT:
        raise OnnxError(
            f"{what}: elements of type {_type_name(tensor.data_type)}; only 32- and 64-bit numbers are understood: "
            "convert the model to float32 or float64"
        )
    dims = [int(d) for d in tensor.dims]
    # beside a size of 0, any other size would pass as no data; a list of no numbers is the only use of one
    if any(d < 0 for d in dims) or len(dims) > _MOST_AXES or (0 in dims and len(dims) > 1):
        raise OnnxError(f"{what}: impossible shape {dims[: _MOST_AXES + 1]}")
    count = math.prod(dims)
    if count > most:
        raise OnnxError(f"{what}: shape {dims} has more than {most} entries; raise the limit 'elements'")
    _, layout, values = _LAYOUT[tensor.data_type]
    stored = {
        name: len(getattr(tensor, name))
        for name in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
    }
    raw, listed = stored.pop("raw_data"), stored.pop(values)
    if any(stored.values()) or (raw and listed):
        raise OnnxError(f"{what}: has values of several types")
    if raw != count * np.dtype(layout).itemsize if raw else listed != count:  # empty raw data: none was given
        raise OnnxError(
            f"{what}: shape {dims} does not fit {raw} bytes" if raw else f"{what}: {listed} values for {dims}"
        )


def _type_name(number: int) -> str:
    import onnx  # noqa: PLC0415

    try:
        return str(onnx.TensorProto.DataType.Name(number))
    except ValueError:
        return str(number)


def decode(tensor: Any) -> Tensor:
    """The numbers of a checked tensor: float32, float64, int64 or bool."""
    dtype, layout, values = _LAYOUT[tensor.data_type]
    if tensor.raw_data:
        array = np.frombuffer(tensor.raw_data, dtype=layout)
    else:
        array = np.array(getattr(tensor, values), dtype=layout if dtype != torch.bool else "<i4")
    array = array.reshape(tuple(tensor.dims))
    if dtype == torch.bool:
        return torch.from_numpy(np.asarray(array != 0))
    found = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")).copy()).to(dtype)
    if dtype == torch.int64 and bool((found == BATCH).any()):
        raise OnnxError(f"the number {BATCH} is neither a size nor an index")
    return found


# -- nodes -------------------------------------------------------------------------------------------------------------


def _node(index: int, raw: Any) -> OnnxNode:
    operator = str(raw.op_type)
    label = f"{show(operator)[1:-1] or 'nameless operator'} node {show(raw.name) if raw.name else f'number {index}'}"
    if raw.domain not in ("", "ai.onnx"):
        raise OnnxError(
            f"{label}: operators of the domain {show(raw.domain)} are not known; export with standard operators only"
        )
    if raw.overload:
        raise OnnxError(f"{label}: calls a function of the file; inline functions before saving")
    attributes: dict[str, Any] = {}
    for attribute in raw.attribute:
        if not attribute.name or attribute.name in attributes:
            raise OnnxError(f"{label}: attribute {show(attribute.name)} is given twice, or has no name")
        attributes[attribute.name] = _attribute(attribute, label)
    return OnnxNode(index, operator, label, tuple(raw.input), tuple(raw.output), attributes)


def _attribute(raw: Any, label: str) -> Any:
    kinds = type(raw)
    what = f"{label}: attribute {show(raw.name)}"
    if raw.ref_attr_name:
        raise OnnxError(f"{what} refers to a function of the file; inline functions before saving")
    if raw.type in (kinds.GRAPH, kinds.GRAPHS):
        raise OnnxError(f"{what} is a graph: branches and loops are not understood; export without control flow")
    if raw.type == kinds.FLOAT:
        return float(raw.f)
    if raw.type == kinds.INT:
        return int(raw.i)
    if raw.type == kinds.STRING:
        return raw.s.decode(errors="replace")
    if raw.type == kinds.FLOATS:
        return [float(v) for v in raw.floats]
    if raw.type == kinds.INTS:
        return [int(v) for v in raw.ints]
    if raw.type == kinds.TENSOR:
        _check_tensor(raw.t, what, 2**62)  # as large as the file at most
        return raw.t
    raise OnnxError(f"{what} is neither a number, nor a text, nor a dense tensor")


def _order(nodes: list[OnnxNode], known: set[str], output: str) -> list[OnnxNode]:
    """The nodes that the output needs, each after those it reads."""
    producer: dict[str, OnnxNode] = {}
    for node in nodes:
        for name in filter(None, node.outputs):
            if name in producer or name in known:
                raise OnnxError(f"{node.label}: the name {show(name)} is defined twice")
            producer[name] = node
    if output not in producer and output not in known:
        raise OnnxError(f"nothing in the file defines the output {show(output)}")
    ordered: list[OnnxNode] = []
    state: dict[int, bool] = {}  # False: its inputs are being visited; True: done
    stack = [producer[output]] if output in producer else []
    while stack:
        node = stack[-1]
        if node.index in state:
            stack.pop()
            if not state[node.index]:
                state[node.index] = True
                ordered.append(node)
            continue
        state[node.index] = False
        for name in filter(None, node.inputs):
            if name in known:
                continue
            source = producer.get(name)
            if source is None:
                raise OnnxError(f"{node.label}: reads {show(name)}, which nothing in the file defines")
            done = state.get(source.index)
            if done is None:
                stack.append(source)
            elif not done:
                raise OnnxError(f"{node.label}: is part of a cycle")
    return ordered


def _input(info: Any) -> tuple[torch.dtype, int | None, tuple[int | None, ...]]:
    """Type, batch size and sample shape of the input."""
    what = f"input {show(info.name)}"
    if info.type.WhichOneof("value") != "tensor_type":
        raise OnnxError(f"{what} must be a tensor")
    tensor = info.type.tensor_type
    if tensor.elem_type not in _FLOATS:
        raise OnnxError(f"{what} has elements of type {_type_name(tensor.elem_type)}; FLOAT or DOUBLE is expected")
    if not tensor.HasField("shape"):
        raise OnnxError(f"{what} has no declared shape; declare one when exporting")
    sizes: list[int | None] = []
    for dim in tensor.shape.dim:
        size = int(dim.dim_value) if dim.WhichOneof("value") == "dim_value" else None
        if size is not None and size < 1:
            raise OnnxError(f"{what} has a dimension of size {size}; -1 is not a free dimension in ONNX, a name is")
        sizes.append(size)
    if not 2 <= len(sizes) <= _MOST_AXES:
        raise OnnxError(f"{what} has {len(sizes)} axes; the first must be the batch, with at least one more behind it")
    return _FLOATS[tensor.elem_type], sizes[0], tuple(sizes[1:])
