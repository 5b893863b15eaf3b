"""Certificates as small JSON files, written whole or not at all and read with distrust.

A file is one object with four members: ``format``, ``schema``, ``statement`` and ``checksum``. The checksum is SHA-256
over the statement in canonical form (sorted keys, no spaces, ASCII); it finds accidents, not forgers. Numbers that must
be exact are strings (hexadecimal floats), arrays are little-endian float64 in base 64 beside their shape. There are no
JSON floats at all.

The reader checks the size of the file before reading it, and the declared size of an array against the length of its
text before decoding it. Unknown or repeated members, other types (``true`` for a number), values that are not numbers,
deep nesting and anything else that :func:`write` would not have written end in :class:`CertificateError`. Nothing that
is read is ever executed.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ldlt.errors import CertificateError
from ldlt.files import write_whole

__all__ = ["LARGEST_FILE", "SCHEMA", "Reader", "array", "dump", "parse", "read", "write"]

SCHEMA = 1
FORMAT = "ldlt certificate"
LARGEST_FILE = 64 * 2**20
"""Largest size of a file in bytes."""

_LARGEST_ARRAY = 2**22  # elements
_LONGEST_TEXT = 2**12


def array(values: Tensor) -> dict[str, Any]:
    """A real tensor as data: shape and float64 bytes in base 64."""
    flat = np.ascontiguousarray(values.detach().cpu().double().numpy(), dtype="<f8")
    return {"shape": list(values.shape), "float64": base64.b64encode(flat.tobytes()).decode("ascii")}


def write(path: str | os.PathLike[str], statement: Mapping[str, Any]) -> None:
    """Write a file, whole or not at all."""
    write_whole(Path(path), dump(statement))


def dump(statement: Mapping[str, Any]) -> bytes:
    """The bytes that :func:`write` writes."""
    text = json.dumps(
        {"format": FORMAT, "schema": SCHEMA, "statement": statement, "checksum": _checksum(statement)},
        indent=1,
        allow_nan=False,
    )
    data = (text + "\n").encode("ascii")
    if len(data) > LARGEST_FILE:
        raise CertificateError(f"the certificate has {len(data)} bytes, above {LARGEST_FILE}")
    return data


def read(path: str | os.PathLike[str]) -> Reader:
    """The statement of a file, of which format, version and checksum are right."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > LARGEST_FILE:  # a pipe would block
            raise CertificateError(f"the certificate cannot be read: no file of at most {LARGEST_FILE} bytes")
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, CertificateError):
            raise
        raise CertificateError(f"the certificate cannot be read: {error}") from error
    return parse(data)


def parse(data: bytes) -> Reader:
    """As :func:`read`, from bytes."""
    if len(data) > LARGEST_FILE:
        raise CertificateError(f"not a certificate: more than {LARGEST_FILE} bytes")
    try:
        found = json.loads(
            data.decode("ascii"), object_pairs_hook=_once, parse_float=_no_float, parse_constant=_no_float
        )
    except CertificateError:
        raise
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"not a certificate, or a truncated one: {type(error).__name__}") from error
    whole = Reader(found, "the file")
    whole.members({"format", "schema", "statement", "checksum"})
    if whole.text("format") != FORMAT:
        raise CertificateError("not a certificate: another format")
    if whole.integer("schema") != SCHEMA:
        raise CertificateError(f"the file has schema version {whole.integer('schema')}, this program reads {SCHEMA}")
    statement = whole.part("statement")
    if whole.text("checksum") != _checksum(statement.data):
        raise CertificateError("the checksum does not fit: the file was changed after it was written")
    return statement


def _checksum(statement: Mapping[str, Any]) -> str:
    try:
        text = json.dumps(statement, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CertificateError(f"the certificate has no canonical form: {error}") from error
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CertificateError("not a certificate: a member is repeated")
    return found


def _no_float(text: str) -> float:
    raise CertificateError(f"not a certificate: the number {text[:20]} is not an integer")


class Reader:
    """An object of a file whose members are taken out by type.

    Args:
        data: What the parser found.
        where: Its name in messages.
    """

    def __init__(self, data: Any, where: str) -> None:
        if type(data) is not dict:
            raise CertificateError(f"not a certificate: {where} is not an object")
        self.data: dict[str, Any] = data
        self.where = where

    def members(self, names: set[str]) -> None:
        """Require exactly these members."""
        if set(self.data) != names:
            odd = sorted(set(self.data) ^ names)[0][:40]
            raise CertificateError(f"not a certificate: '{odd}' in {self.where} is unknown or missing")

    def _typed(self, name: str, kind: type) -> Any:
        value = self.data.get(name)
        if type(value) is not kind:  # a bool is not an integer here
            raise CertificateError(f"not a certificate: '{name}' is not of type {kind.__name__}")
        return value

    def text(self, name: str, longest: int = _LONGEST_TEXT) -> str:
        """A string."""
        value: str = self._typed(name, str)
        if len(value) > longest or not value.isprintable():
            raise CertificateError(f"not a certificate: '{name}' is too long or not printable")
        return value

    def integer(self, name: str) -> int:
        """An integer."""
        value: int = self._typed(name, int)
        return value

    def flag(self, name: str) -> bool:
        """A truth value."""
        value: bool = self._typed(name, bool)
        return value

    def number(self, name: str, finite: bool = True) -> float:
        """A float in hexadecimal."""
        text = self.text(name, 64)
        try:
            value = float.fromhex(text)
        except (ValueError, OverflowError):
            raise CertificateError(f"'{name}' is not a hexadecimal number") from None
        if value.hex() != text or (finite and not math.isfinite(value)):
            raise CertificateError(f"'{name}' is {text}, not a finite number in canonical form")
        return value

    def part(self, name: str) -> Reader:
        """An object."""
        return Reader(self.data.get(name), f"'{name}'")

    def absent(self, name: str) -> bool:
        """Whether a member is null."""
        return self.data.get(name) is None

    def sizes(self, name: str) -> tuple[int, ...]:
        """A list of positive sizes with a bounded product."""
        values = self._typed(name, list)
        if len(values) > 16 or any(type(v) is not int or not 0 < v <= _LARGEST_ARRAY for v in values):
            raise CertificateError(f"'{name}' is not a shape")
        if math.prod(values) > _LARGEST_ARRAY:
            raise CertificateError(f"'{name}' is too large")
        return tuple(values)

    def array(self, name: str) -> Tensor:
        """A float64 tensor. The text is decoded only if its length fits the shape."""
        part = self.part(name)
        part.members({"shape", "float64"})
        shape = part.sizes("shape")
        text = part._typed("float64", str)
        count = math.prod(shape)
        if len(text) != 4 * ((8 * count + 2) // 3):
            raise CertificateError(f"'{name}' has a shape that does not fit its data")
        try:
            data = base64.b64decode(text.encode("ascii"), validate=True)
        except (binascii.Error, ValueError):
            raise CertificateError(f"'{name}' is not base 64") from None
        if len(data) != 8 * count or base64.b64encode(data).decode("ascii") != text:
            raise CertificateError(f"'{name}' has a shape that does not fit its data")
        values = np.frombuffer(data, dtype="<f8").astype(np.float64)
        if np.isnan(values).any():
            raise CertificateError(f"'{name}' has entries that are not numbers")
        return torch.from_numpy(values).reshape(shape)
