"""A walk over the bytes of a protobuf message before it is parsed.

A message of two bytes becomes an object of a hundred, so the size of a file does not bound the memory that parsing it
takes. This walk allocates nothing: it counts entries, checks nesting, lengths and text, and stops at the first excess.
"""

from __future__ import annotations

from typing import Any

from ldlt.errors import OnnxError

__all__ = ["check_wire"]

_DEEPEST = 32  # a shape inside a type inside a node's graph is at depth 8
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTH = {_FIXED64: 8, _FIXED32: 4}

_MESSAGE, _TEXT, _PACKED, _PLAIN = "message", "text", "packed", "plain"


class _Schema:
    """Kinds of the fields of a message type, by number; made when needed, since types contain each other."""

    def __init__(self, descriptor: Any) -> None:
        self.name = str(descriptor.name)
        self.kinds: dict[int, tuple[str, Any]] = {}
        for field in descriptor.fields:
            if field.type == field.TYPE_MESSAGE:
                kind: tuple[str, Any] = (_MESSAGE, field.message_type)
            elif field.type == field.TYPE_STRING:
                kind = (_TEXT, None)
            elif field.type in (field.TYPE_BYTES, field.TYPE_FLOAT, field.TYPE_DOUBLE):
                kind = (_PLAIN, None)  # takes about as much memory as bytes in the file
            else:
                kind = (_PACKED, None)  # whole numbers: one byte of the file may become eight
            self.kinds[field.number] = kind


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


def check_wire(data: bytes, descriptor: Any, most: int) -> None:
    """Refuse bytes that are not a message of a type, or one with too many entries.

    Args:
        data: The bytes.
        descriptor: Protobuf descriptor of the type.
        most: Largest number of entries, counted through all levels; packed whole numbers count one per byte.

    Raises:
        OnnxError: Saying what is wrong.
    """
    schemas: dict[str, _Schema] = {}

    def schema(of: Any) -> _Schema:
        found = schemas.get(of.full_name)
        if found is None:
            found = schemas[of.full_name] = _Schema(of)
        return found

    stack = [(len(data), schema(descriptor))]
    pos = count = 0
    while stack:
        end, current = stack[-1]
        if pos == end:
            stack.pop()
            continue
        count += 1
        tag, pos = _varint(data, pos, end)
        number, wire = tag >> 3, tag & 7
        if number not in current.kinds:
            raise OnnxError(
                f"not an ONNX file, a damaged one, or one for a newer version of the 'onnx' package: "
                f"{current.name} has no field {number}"
            )
        kind, inner = current.kinds[number]
        if wire == _VARINT:
            _, pos = _varint(data, pos, end)
        elif wire in _WIDTH:
            pos += _WIDTH[wire]
        elif wire == _BYTES:
            length, pos = _varint(data, pos, end)
            if length > end - pos:
                raise OnnxError(f"the file is cut off or damaged: a part of {current.name} is longer than the file")
            if kind == _MESSAGE:
                stack.append((pos + length, schema(inner)))
                if len(stack) > _DEEPEST:
                    raise OnnxError(f"the file is nested more than {_DEEPEST} levels deep")
                length = 0
            elif kind == _TEXT:
                try:
                    data[pos : pos + length].decode()
                except UnicodeDecodeError:
                    raise OnnxError(f"the file is damaged: a text in {current.name} is not UTF-8") from None
            elif kind == _PACKED:
                count += length
            pos += length
        else:
            raise OnnxError(f"not an ONNX file, or a damaged one: field {number} of {current.name} is malformed")
        if pos > end:
            raise OnnxError(f"the file is cut off or damaged: a part of {current.name} is longer than the file")
        if count > most:
            raise OnnxError(f"the file has more than {most} entries; raise the limit 'fields' if you trust it")
