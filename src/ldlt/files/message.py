"""An ONNX file as a message, read with distrust: sizes are checked before anything is parsed or allocated."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ldlt.check import whole
from ldlt.errors import LdltError, MissingExtraError, OnnxError
from ldlt.files.replace import show, why

__all__ = ["BATCH", "DOMAIN", "LAYOUT", "MOST_AXES", "OnnxLimits", "Store", "distrust", "onnx_package", "parse"]

BATCH = -(2**62) - 20231
"""Stands for the batch size in shapes that a file computes; no shape or index of a file has this value."""

DOMAIN = "ldlt"
"""Domain of the functions that stand for activations (:mod:`ldlt.files.functions`)."""

LAYOUT: dict[int, tuple[torch.dtype, int, str]] = {
    1: (torch.float32, 4, "float_data"),
    6: (torch.int64, 4, "int32_data"),
    7: (torch.int64, 8, "int64_data"),
    9: (torch.bool, 1, "int32_data"),
    11: (torch.float64, 8, "double_data"),
}
"""Protobuf number of an element type -> the type here, bytes of an entry, the field for values one by one."""

MOST_AXES = 8
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
            whole(f"the limit '{field.name}'", getattr(self, field.name))


@contextlib.contextmanager
def distrust() -> Iterator[None]:
    """Whatever a file makes the code in the block raise is an error of ours."""
    try:
        yield
    except LdltError:
        raise
    except Exception as error:
        raise OnnxError(f"unforeseen contents of the file ({type(error).__name__}: {error})") from error


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
    with distrust():
        return model.FromString(data)


def _bytes(source: str | os.PathLike[str] | bytes, most: int) -> bytes:
    if isinstance(source, (bytes, bytearray, memoryview)):
        size, data = len(source), source
    elif isinstance(source, (str, os.PathLike)):
        path, data = Path(source), b""
        try:
            found = path.stat()
            size = found.st_size
            if not stat.S_ISREG(found.st_mode):
                raise OnnxError(f"{show(str(path))} is not a file")
            if size <= most:
                with path.open("rb") as stream:
                    data = stream.read(most + 1)  # the file may have grown since
                size = len(data)
        except OnnxError:
            raise
        except (OSError, ValueError) as error:
            raise OnnxError(f"{show(str(path))} cannot be read: {why(error)}") from error
    else:
        raise OnnxError(f"a path or bytes are expected, not {type(source).__name__}")
    if size > most:
        raise OnnxError(f"the file has {size} bytes, more than {most}; raise the limit 'file_bytes' if you trust it")
    return bytes(data)


# -- bytes before they are parsed --------------------------------------------------------------------------------------


def _damaged(what: str) -> OnnxError:
    return OnnxError(f"not an ONNX file, a damaged one, or one for a newer version of the package 'onnx': {what}")


def _varint(data: bytes, pos: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while pos < end and shift < 70:
        byte = data[pos]
        pos += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, pos
        shift += 7
    raise _damaged("a number is cut off")


def _walk(data: bytes, descriptor: Any, most: int) -> None:
    """Refuse bytes that are not a message of a type, or one with too many entries, without allocating anything.

    A message of two bytes becomes an object of a hundred, so the size of a file does not bound the memory that parsing
    it takes. Packed whole numbers count one per byte, since a byte may become eight.
    """
    stack = [(len(data), descriptor)]
    pos = count = 0
    while stack:
        end, kind = stack[-1]
        if pos == end:
            stack.pop()
            continue
        count += 1
        tag, pos = _varint(data, pos, end)
        field, wire = kind.fields_by_number.get(tag >> 3), tag & 7
        if field is None:
            raise _damaged(f"{kind.name} has no field {tag >> 3}")
        if wire == 0:
            _, pos = _varint(data, pos, end)
        elif wire == 2:
            length, pos = _varint(data, pos, end)
            if length > end - pos:
                raise _damaged(f"a part of {kind.name} is cut off")
            if field.type == field.TYPE_MESSAGE:
                stack.append((pos + length, field.message_type))
                if len(stack) > _DEEPEST:
                    raise OnnxError(f"the file is nested more than {_DEEPEST} levels deep")
                length = 0
            elif field.type == field.TYPE_STRING:
                try:
                    data[pos : pos + length].decode()
                except UnicodeDecodeError:
                    raise _damaged(f"a text in {kind.name} is not UTF-8") from None
            elif field.type not in (field.TYPE_BYTES, field.TYPE_FLOAT, field.TYPE_DOUBLE):
                count += length
            pos += length
        else:
            pos += _WIDTH.get(wire, end + 1)
        if pos > end:
            raise _damaged(f"field {tag >> 3} of {kind.name} is cut off or malformed")
        if count > most:
            raise OnnxError(f"the file has more than {most} entries; raise the limit 'fields' if you trust it")


# -- tensors -----------------------------------------------------------------------------------------------------------


class Store:
    """Tensors of a file, checked when they are seen and decoded when they are asked for.

    Args:
        folder: Where values outside of the file may lie; None to refuse those.
        most: Largest number of entries of one tensor.
    """

    def __init__(self, folder: Path | None, most: int) -> None:
        self.folder, self.most = folder, most

    def check(self, tensor: Any, what: str) -> None:
        """Refuse a tensor that is not plain numbers, as many as its shape says."""
        if tensor.HasField("segment"):
            raise OnnxError(f"{what}: stored in segments, which no current version of ONNX uses")
        if tensor.data_type not in LAYOUT:
            raise OnnxError(
                f"{what}: elements of type {type_name(tensor.data_type)}; only 32- and 64-bit numbers are understood: "
                "convert the model to float32 or float64"
            )
        dims = [int(d) for d in tensor.dims]
        # Beside a size of 0, any other size would pass as no data; a list of no numbers is the only use of one.
        if any(d < 0 for d in dims) or len(dims) > MOST_AXES or (0 in dims and len(dims) > 1):
            raise OnnxError(f"{what}: impossible shape {dims[: MOST_AXES + 1]}")
        count = math.prod(dims)
        if count > self.most:
            raise OnnxError(f"{what}: shape {dims} has more than {self.most} entries; raise the limit 'elements'")
        _, width, listed = LAYOUT[tensor.data_type]
        stored = {name: len(getattr(tensor, name)) for name in _VALUES}
        if tensor.data_location != 0 or tensor.external_data:
            if any(stored.values()):
                raise OnnxError(f"{what}: has values inside and outside of the file")
            if self.folder is None:
                raise OnnxError(
                    f"{what}: its values are in another file; save the model as one file (torch.onnx.export with "
                    "external_data=False, onnx.save_model with save_as_external_data=False), or pass external_data=True"
                )
        elif sum(n > 0 for n in stored.values()) > 1:
            raise OnnxError(f"{what}: has values of several types")
        elif stored["raw_data"] != count * width and (stored["raw_data"] or stored[listed] != count):
            found = f"{stored['raw_data']} bytes" if stored["raw_data"] else f"{stored[listed]} values"
            raise OnnxError(f"{what}: shape {dims} does not fit {found}")

    def decode(self, tensor: Any, what: str) -> Tensor:
        """The numbers of a checked tensor: float32, float64, int64 or bool."""
        if tensor.data_location != 0 or tensor.external_data:
            raw = self._outside(tensor, what)
            tensor = type(tensor)(dims=tensor.dims, data_type=tensor.data_type, raw_data=raw)
        array = np.array(onnx_package().numpy_helper.to_array(tensor))
        found = torch.from_numpy(array).to(LAYOUT[tensor.data_type][0])
        if found.dtype == torch.int64 and bool((found == BATCH).any()):
            raise OnnxError(f"the number {BATCH} is neither a size nor an index")
        return found

    def _outside(self, tensor: Any, what: str) -> bytes:
        """Bytes of a file in the folder."""
        assert self.folder is not None
        where, size = {e.key: e.value for e in tensor.external_data}, math.prod(tensor.dims)
        size *= LAYOUT[tensor.data_type][1]
        try:
            place = (self.folder / where["location"]).resolve()
            if not place.is_relative_to(self.folder.resolve()) or not place.is_file():
                raise ValueError("it is not a file beside the model")
            with place.open("rb") as file:
                file.seek(int(where.get("offset", "0")))
                raw = file.read(size)
        except (KeyError, OSError, OverflowError, ValueError) as error:
            raise OnnxError(f"{what}: its values cannot be found ({why(error)})") from error
        if len(raw) != size:
            raise OnnxError(f"{what}: the file of its values is too short")
        return raw


def type_name(number: int) -> str:
    """Name of an element type."""
    try:
        return str(onnx_package().TensorProto.DataType.Name(number))
    except ValueError:
        return str(number)
