"""Comma-separated numbers: parsed by NumPy in one go, looked at line by line only to say what is wrong."""

from __future__ import annotations

import io
import re
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from ldlt.bench.data.errors import FormatError

__all__ = ["parse_table"]

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def parse_table(data: bytes, file: str, columns: int | None = None) -> NDArray[np.float64]:
    """Numbers of a text file, one row per line.

    Args:
        data: Content of the file.
        file: Its name, for messages.
        columns: Number of columns it must have, or None for any (the same in every line).

    Returns:
        (lines, columns) finite numbers.

    Raises:
        FormatError: With line and column of the first thing that is wrong.
    """
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = data.count(b",", data.rfind(b"\n", 0, error.start) + 1, error.start) + 1
        raise FormatError(file, f"byte 0x{data[error.start]:02x} is not plain text", line, column) from None
    text = text.replace("\r\n", "\n").rstrip()
    if not text:
        raise FormatError(file, "the file is empty")
    try:
        table = np.loadtxt(io.StringIO(text), delimiter=",", comments=None, ndmin=2)
    except ValueError:
        raise _explain(text, file, columns) from None
    if table.shape[0] != text.count("\n") + 1 or columns not in (None, table.shape[1]):
        raise _explain(text, file, columns)
    finite = np.isfinite(table)
    if not finite.all():
        row, column = (int(index) for index in np.argwhere(~finite)[0])
        raise FormatError(file, "the value is not a finite number", row + 1, column + 1)
    return table


def _explain(text: str, file: str, columns: int | None) -> FormatError:
    """The first thing that is wrong with a table that did not parse."""
    lines = text.split("\n")
    wanted = columns or Counter(line.count(",") + 1 for line in lines[:100]).most_common(1)[0][0]
    for number, line in enumerate(lines, 1):
        if not line.strip():
            return FormatError(file, "the line is blank", number)
        cells = line.split(",")
        for column, cell in enumerate(cells[:wanted], 1):
            if not NUMBER.fullmatch(cell.strip()):
                return FormatError(file, f"{cell.strip()[:40]!r} is not a finite number", number, column)
        if len(cells) != wanted:
            reason = f"{len(cells)} column{'s' * (len(cells) > 1)} instead of {wanted}"
            return FormatError(file, reason, number, min(len(cells), wanted) + (len(cells) > wanted))
    return FormatError(file, "not a table of comma-separated numbers")
