"""An ONNX file as a message, read with distrust: sizes are checked before anything is parsed or allocated."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ldlt.errors import MissingExtraError, OnnxError, OptionError
from ldlt.files.replace import show, why

__all__ = [
    "BATCH",
    "DOMAIN",
    "LAYOUT",
    "OnnxLimits",
    "Store",
    "attributes",
    "onnx_package",
    "parse",
    "properties",
    "type_name",
]

BATCH = -(2**62) - 20231
"""Stands for the batch size in shapes that a file computes; no shape or index of a file has this value."""

DOMAIN = "ldlt"
"""Domain of the functions that stand for activations (:mod:`ldlt.files.functions`)."""

LAYOUT: dict[int, tuple[torch.dtype, str, str]] = {
    1: (torch.float32, "<f4", "float_data"),
    6: (torch.int64, "<i4", "int32_data"),
    7: (torch.int64, "<i8", "int64_data"),
    9: (torch.bool, "u1", "int32_data"),
    11: (torch.float64, "<f8", "double_data"),
}
"""Protobuf number of an element type -> the type here, its layout in raw bytes, the field for values one by one."""

_MOST_AXES = 8
_DEEPEST = 32  # a shape inside a type inside a node's graph is at depth 8
_WIDTH = {1: 8, 5: 4}  # bytes of the protobuf types of fixed length
_VALUES = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")


@dataclass(frozen=True)
class OnnxLimits:
    """Sizes that are checked before memory is allocated.

    Attributes:
        file_bytes: Size of the file.
        fields: Entries of the file's structure (a node has about twenty); bounds what parsing it allocates.
        nodes: Number of nodes.
        features: Entries of any intermediate value, per sample.
        elements: Entries of all weights, constants and intermediate values (per sample) together.
    """

    file_bytes: int = 2**30
    fields: int = 1_000_000
    nodes: int = 10_000
    features: int = 2**20
    elements: int = 2**27

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"the limit '{field.name}' must be a positive integer, not {value!r}")


def onnx_package() -> Any:
    """The classes of the format."""
    try:
        import onnx  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("onnx", "files") from error
    return onnx


def parse(source: str | os.PathLike[str] | bytes, limits: OnnxLimits) -> Any:
    """The message of a file, walked over before it is parsed.

    Raises:
        OnnxError: It is too large, or damaged.
        MissingExtraError: If the package ``onnx`` is missing.
    """
    model = onnx_package().ModelProto
    data = _bytes(source, limits.file_bytes)
    _walk(data, model.DESCRIPTOR, limits.fields)
    try:
        return model.FromString(data)
    except Exception as error:  # whatever class the installed protobuf raises
        raise OnnxError(f"not an ONNX file, or a damaged one: {error}") from error


def properties(model: Any) -> dict[str, str]:
    """Texts that a file carries beside its network, by name."""
    found: dict[str, str] = {}
    for entry in model.metadata_props:
        if entry.key in found:
            raise OnnxError(f"two properties are called {show(entry.key)}")
        found[entry.key] = entry.value
    return found


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
            size, data = found.st_size, b""
            if size <= most:
                with path.open("rb") as stream:
                    data = stream.read(most + 1)  # the file may have grown since
                size = len(data)
        except (OSError, ValueError) as error:
            if isinstance(error, OnnxError):
                raise
            raise OnnxError(f"{show(str(path))} cannot be read: {why(error)}") from error
    else:
        raise OnnxError(f"a path or bytes are expected, not {type(source).__name__}")
    if size > most:
        raise OnnxError(f"the file has {size} bytes, more than {most}; raise the limit 'file_bytes' if you trust it")
    return data


# -- bytes before they are parsed --------------------------------------------------------------------------------------


def _varint(data: bytes, pos: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while pos < end and shift < 70:
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7
    raise OnnxError("not an ONNX file, or a damaged one: a number is cut off")


def _walk(data: bytes, descriptor: Any, most: int) -> None:
    """Refuse bytes that are not a message of a type, or one with too many entries, without allocating anything.

    A message of two bytes becomes an object of a hundred, so the size of a file does not bound the memory that parsing
    it takes. Packed whole numbers count one per byte, since a byte may become eight.
    """
    schemas: dict[str, dict[int, Any]] = {}

    def schema(of: Any) -> tuple[str, dict[int, Any]]:
        if of.full_name not in schemas:
            schemas[of.full_name] = {field.number: field for field in of.fields}
        return str(of.name), schemas[of.full_name]

    stack = [(len(data), *schema(descriptor))]
    pos = count = 0
    while stack:
        end, name, known = stack[-1]
        if pos == end:
            stack.pop()
            continue
        count += 1
        tag, pos = _varint(data, pos, end)
        field, wire = known.get(tag >> 3), tag & 7
        if field is None:
            raise OnnxError(
                f"not an ONNX file, a damaged one, or one for a newer version of the 'onnx' package: {name} has no "
                f"field {tag >> 3}"
            )
        if wire == 0:
            _, pos = _varint(data, pos, end)
        elif wire in _WIDTH:
            pos += _WIDTH[wire]
        elif wire == 2:
            length, pos = _varint(data, pos, end)
            if length > end - pos:
                raise OnnxError(f"the file is cut off or damaged: a part of {name} is longer than the file")
            if field.type == field.TYPE_MESSAGE:
                stack.append((pos + length, *schema(field.message_type)))
                if len(stack) > _DEEPEST:
                    raise OnnxError(f"the file is nested more than {_DEEPEST} levels deep")
                length = 0
            elif field.type == field.TYPE_STRING:
                try:
                    data[pos : pos + length].decode()
                except UnicodeDecodeError:
                    raise OnnxError(f"the file is damaged: a text in {name} is not UTF-8") from None
            elif field.type not in (field.TYPE_BYTES, field.TYPE_FLOAT, field.TYPE_DOUBLE):
                count += length
            pos += length
        else:
            raise OnnxError(f"not an ONNX file, or a damaged one: field {tag >> 3} of {name} is malformed")
        if pos > end:
            raise OnnxError(f"the file is cut off or damaged: a part of {name} is longer than the file")
        if count > most:
            raise OnnxError(f"the file has more than {most} entries; raise the limit 'fields' if you trust it")


# -- tensors and attributes --------------------------------------------------------------------------------------------


class Store:
    """Tensors of a file, checked when they are seen and decoded when they are asked for.

    Args:
        folder: Where values outside of the file may lie; None to refuse those.
        most: Largest number of entries of one tensor.
    """

    def __init__(self, folder: Path | None, most: int) -> None:
        self.folder, self.most = folder, most

    def check(self, tensor: Any, what: str) -> int:
        """Refuse a tensor that is not plain numbers, as many as its shape says; their number.

        Raises:
            OnnxError: With the reason.
        """
        if tensor.HasField("segment"):
            raise OnnxError(f"{what}: stored in segments, which no current version of ONNX uses")
        if tensor.data_type not in LAYOUT:
            raise OnnxError(
                f"{what}: elements of type {type_name(tensor.data_type)}; only 32- and 64-bit numbers are understood: "
                "convert the model to float32 or float64"
            )
        dims = [int(d) for d in tensor.dims]
        # Beside a size of 0, any other size would pass as no data; a list of no numbers is the only use of one.
        if any(d < 0 for d in dims) or len(dims) > _MOST_AXES or (0 in dims and len(dims) > 1):
            raise OnnxError(f"{what}: impossible shape {dims[: _MOST_AXES + 1]}")
        count = math.prod(dims)
        if count > self.most:
            raise OnnxError(f"{what}: shape {dims} has more than {self.most} entries; raise the limit 'elements'")
        _, layout, values = LAYOUT[tensor.data_type]
        stored = {name: len(getattr(tensor, name)) for name in _VALUES}
        if tensor.data_location != 0 or tensor.external_data:
            if any(stored.values()):
                raise OnnxError(f"{what}: has values inside and outside of the file")
            self._outside(tensor, what)  # that it may be read; its bytes are counted when they are
            return count
        raw, listed = stored.pop("raw_data"), stored.pop(values)
        if any(stored.values()) or (raw and listed):
            raise OnnxError(f"{what}: has values of several types")
        if raw != count * np.dtype(layout).itemsize if raw else listed != count:  # empty raw data: none was given
            raise OnnxError(f"{what}: shape {dims} does not fit {raw or listed} {'bytes' if raw else 'values'}")
        return count

    def _outside(self, tensor: Any, what: str) -> tuple[Path, int]:
        """The file beside, and where in it the values begin."""
        if self.folder is None:
            raise OnnxError(
                f"{what}: its values are in another file; save the model as one file (torch.onnx.export with "
                "external_data=False, onnx.save_model with save_as_external_data=False), or pass external_data=True"
            )
        found = {entry.key: entry.value for entry in tensor.external_data}
        try:
            place = (self.folder / found["location"]).resolve()
            offset = int(found.get("offset", "0"))
            if not place.is_relative_to(self.folder.resolve()) or not place.is_file() or offset < 0:
                raise ValueError("it is not a file beside the model")
        except (KeyError, OSError, ValueError) as error:
            raise OnnxError(f"{what}: its values cannot be found ({why(error)})") from error
        return place, offset

    def decode(self, tensor: Any, what: str) -> Tensor:
        """The numbers of a checked tensor: float32, float64, int64 or bool."""
        dtype, layout, values = LAYOUT[tensor.data_type]
        count = math.prod(tensor.dims)
        raw = tensor.raw_data
        if tensor.data_location != 0 or tensor.external_data:
            place, offset = self._outside(tensor, what)
            try:
                with place.open("rb") as file:
                    file.seek(offset)
                    raw = file.read(count * np.dtype(layout).itemsize)
            except (OSError, OverflowError) as error:
                raise OnnxError(f"{what}: its values cannot be read ({why(error)})") from error
            if len(raw) != count * np.dtype(layout).itemsize:
                raise OnnxError(f"{what}: the file of its values is too short")
        if raw:
            array = np.frombuffer(raw, dtype=layout)
        else:
            array = np.array(getattr(tensor, values), dtype=layout if dtype != torch.bool else "<i4")
        array = array.reshape(tuple(tensor.dims))
        if dtype == torch.bool:
            return torch.from_numpy(np.asarray(array != 0))
        found = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")).copy()).to(dtype)
        if dtype == torch.int64 and bool((found == BATCH).any()):
            raise OnnxError(f"the number {BATCH} is neither a size nor an index")
        return found


def type_name(number: int) -> str:
    """Name of an element type."""
    try:
        return str(onnx_package().TensorProto.DataType.Name(number))
    except ValueError:
        return str(number)


def attributes(node: Any, label: str, store: Store) -> dict[str, Any]:
    """Attributes of a node by name: numbers, texts, lists of numbers, and tensors that are checked."""
    found: dict[str, Any] = {}
    for raw in node.attribute:
        kinds, what = type(raw), f"{label}: attribute {show(raw.name)}"
        if not raw.name or raw.name in found:
            raise OnnxError(f"{what} is given twice, or has no name")
        if raw.ref_attr_name:
            raise OnnxError(f"{what} refers to a function of the file; inline functions before saving")
        if raw.type in (kinds.GRAPH, kinds.GRAPHS):
            raise OnnxError(f"{what} is a graph: branches and loops are not understood; export without control flow")
        if raw.type == kinds.TENSOR:
            store.check(raw.t, what)
        elif raw.type not in (kinds.FLOAT, kinds.INT, kinds.STRING, kinds.FLOATS, kinds.INTS):
            raise OnnxError(f"{what} is neither a number, nor a text, nor a dense tensor")
        value: Any = {
            kinds.FLOAT: raw.f, kinds.INT: raw.i, kinds.STRING: raw.s, kinds.FLOATS: raw.floats, kinds.INTS: raw.ints,
        }.get(raw.type, raw.t)  # fmt: skip
        if raw.type == kinds.STRING:
            value = value.decode(errors="replace")
        found[raw.name] = list(value) if raw.type in (kinds.FLOATS, kinds.INTS) else value
    return found
