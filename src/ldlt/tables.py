"""A table of numbers and categories from a CSV file, or all the reasons why it is none.

What a column is, is decided by all of it (:mod:`ldlt.columns`). A file is read part by part, with a limit on what it
unpacks to, so that a small file cannot fill the memory.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ldlt.check import near
from ldlt.columns import Column, columns_of, is_number, refuse
from ldlt.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Table", "read_features", "read_table", "split"]

MOST_CLASSES = 20
"""Up to this many different whole numbers a target is taken for classes."""

LARGEST_TEXT, LONGEST_LINE, MOST_NUMBERS = 2**29, 2**24, 2**25
"""Limits: bytes of a file once it is unpacked, bytes of one line, numbers of a table (256 MiB as float64)."""

_AT_ONCE = 2**17  # numbers of a part
_TOLD = 8  # names in a message
_OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass(frozen=True)
class Table:
    """A table to learn from.

    Attributes:
        features: (n, d) by name, of float64 or texts; NaN where a value is missing.
        target: Classes or float64 (n,).
        name: Of the target.
        task: ``"classification"`` or ``"regression"``.
    """

    features: pd.DataFrame
    target: npt.NDArray[Any]
    name: str
    task: str


class _Unpacked(io.RawIOBase):
    """The bytes of a file, which may be compressed, as long as they stay within the limits."""

    def __init__(self, path: Path) -> None:
        opener: Any = _OPENERS.get(path.suffix.lower(), open)
        self.source: Any = opener(path, "rb")
        self.total = self.line = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data: bytes = self.source.read(min(len(buffer), 2**16))
        buffer[: len(data)] = data
        self.total += len(data)
        self.line = len(data) - 1 - data.rfind(b"\n") if b"\n" in data else self.line + len(data)
        if self.total > LARGEST_TEXT or self.line > LONGEST_LINE:
            raise OptionError("it is too large a text for a table, or has too long a line: split it")
        return len(data)

    def close(self) -> None:
        self.source.close()
        super().close()


def read_table(
    path: str | Path,
    *,
    target: str | None = None,
    task: str | None = None,
    drop: Sequence[str] = (),
    separator: str = ",",
) -> Table:
    """Features and target of a CSV file, which may be compressed (.gz, .bz2, .xz).

    Args:
        path: The file.
        target: Name of the column to predict; None for the last one.
        task: ``"classification"`` or ``"regression"``; None to find it: texts, truth values and few different whole
            numbers that occur twice on average are classes.
        drop: Columns to leave out.
        separator: Between columns.

    Raises:
        OptionError: The file is no table with such a target; the message has all reasons.
        MissingExtraError: ``pandas`` is not installed.
    """

    def choose(header: list[str]) -> list[str]:
        _check_names([*drop, *([target] if target else [])], header)
        kept = [n for n in header if n not in drop]
        if target in drop or len(kept) < 2:
            raise OptionError("a target and at least one other column must be left")
        goal = target or kept[-1]
        return [*(n for n in kept if n != goal), goal]

    table = _read(Path(path), separator, choose, True, None)
    name = str(table.columns[-1])
    values = _typed(table.pop(name).to_numpy(dtype=str))
    few = values.dtype.kind in "iu" and len(np.unique(values)) <= min(MOST_CLASSES, max(2, len(values) // 2))
    found = task or ("classification" if few or values.dtype.kind not in "fiu" else "regression")
    if found == "regression":
        if values.dtype.kind not in "fiub" or not np.isfinite(values).all():
            raise OptionError(f"the target '{name}' has text or infinite values: use --task classification")
        values = values.astype(np.float64)
    if (values == values[0]).all() and (len(values) > 1 or found == "classification"):
        raise OptionError(f"the target '{name}' is {values[0]} in all rows: choose another one with --target")
    return Table(table, values, name, found)


def read_features(path: str | Path, columns: Sequence[Column] | None = None, separator: str = ",") -> pd.DataFrame:
    """Columns to predict from, by name; all, as numbers, if they are not known."""
    texts = {c.name for c in columns or () if c.categories is not None}

    def choose(header: list[str]) -> list[str]:
        names = [c.name for c in columns or ()]
        _check_names(names, header)
        return names or header

    return _read(Path(path), separator, choose, False, texts)


def _read(
    path: Path, separator: str, choose: Callable[[list[str]], list[str]], target: bool, texts: set[str] | None
) -> pd.DataFrame:
    """The chosen columns in float64 or as texts; the last one, if it is a target, as texts.

    Args:
        path: The file.
        separator: Between columns.
        choose: From the header to the names of columns.
        target: Whether the last of them is the target.
        texts: Columns of texts; None to find them, by reading those that are no numbers a second time.
    """
    try:
        import pandas as pd  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("pandas", "train") from error
    try:
        with io.BufferedReader(_Unpacked(path)) as file:
            first = [file.readline().decode("utf-8-sig")]
        header = [n.strip() for n in next(csv.reader(first, delimiter=separator, skipinitialspace=True), [])]
        if not header:
            raise pd.errors.EmptyDataError
        _check_header(header, separator)
        names = choose(header)
        known = {*(texts or ()), *names[-1:][: int(target)]}
        columns, wrong = _parts(path, separator, header, names, known, texts is None)
        late = [n for n in names if n not in columns and n not in wrong]
        if late:
            columns |= _parts(path, separator, header, late, {*late}, False)[0]
        if target and names[-1] in columns:
            missing = pd.isna(columns[names[-1]])
            if missing.any():
                wrong[names[-1]] = f"the target '{names[-1]}' has no value in row {int(missing.argmax()) + 1}"
        reasons = [*wrong.values()]
        frame = pd.DataFrame({n: columns.pop(n) for n in names if n in columns})
        if texts is None:
            try:
                columns_of(frame[[n for n in frame.columns if n != names[-1] or not target]])
            except OptionError as error:
                reasons.append(f"{error} (--drop NAME)")
        refuse(reasons)
        return frame
    except pd.errors.EmptyDataError as error:
        raise OptionError(f"data '{path}' is empty: a header and at least one row are needed") from error
    except OptionError as error:
        raise OptionError(f"data '{path}' cannot be used: {error}") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"data '{path}' is not text in UTF-8: save it with that encoding") from error
    except Exception as error:  # whatever class the parser or a decompressor raises
        raise OptionError(f"data '{path}' cannot be read as CSV: {' '.join(str(error).split())}") from error


def _parts(
    path: Path, separator: str, header: list[str], names: list[str], texts: set[str], find: bool
) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Columns by name, and what is wrong with some; with ``find``, those that have texts are in neither."""
    import pandas as pd  # noqa: PLC0415

    columns: dict[str, list[Any]] = {n: [] for n in names}
    wrong: dict[str, str] = {}
    rows, size = 0, max(1, _AT_ONCE // len(header))
    options: dict[str, Any] = {"sep": separator, "skipinitialspace": True, "index_col": False, "na_values": ["?"]}
    options |= {"names": header, "header": None, "chunksize": size, "dtype": dict.fromkeys(texts, str)}
    with io.BufferedReader(_Unpacked(path)) as file, warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # of rows that are cut because they are too long
        file.readline()
        for part in pd.read_csv(file, **options):
            if part.empty:
                raise pd.errors.EmptyDataError
            for name in [n for n in names if n in columns]:
                values = part[name]
                if name in texts:
                    columns[name].append(values.to_numpy(dtype=object))
                    continue
                reason = _reason(values, rows, find)
                if reason:
                    wrong[name] = f"column '{name}' has {reason}"
                if reason or (find and values.dtype.kind not in "fiu"):
                    del columns[name]
                else:
                    columns[name].append(values.to_numpy(dtype=np.float64))
            rows += len(part)
            if rows * len(header) > MOST_NUMBERS:
                raise OptionError(f"it has more than {MOST_NUMBERS} numbers: split it")
    if not rows:
        raise pd.errors.EmptyDataError
    return {n: np.concatenate(parts) for n, parts in columns.items()}, wrong


def _check_names(wanted: Sequence[str], header: list[str]) -> None:
    shown = ", ".join(header[:_TOLD]) + ", …" * (len(header) > _TOLD)
    refuse([f"it has no column '{n}'{near(n, header) or f', only {shown}'}" for n in wanted if n not in header])


def _check_header(names: list[str], separator: str) -> None:
    other = next((s for s in (",", ";", "\t", "|") if s != separator and s in names[0]), None)
    if len(names) == 1 and other is not None:
        raise OptionError(f"it has one column: if it is separated by {other!r}, say --separator {other!r}")
    if all(is_number(name) for name in names):
        raise OptionError("it has no header, only numbers in its first line: write the columns' names there")
    empty = [f"column {i} has no name (a pandas index? save with index=False)" for i, n in enumerate(names, 1) if not n]
    twice = [n for n in dict.fromkeys(names) if n and names.count(n) > 1]
    refuse([*empty, *(f"it has the column '{n}' {names.count(n)} times: rename or remove it" for n in twice)])


def _reason(column: pd.Series, before: int, find: bool) -> str:
    """What is wrong with a part of a column of numbers behind so many rows; nothing if it is fine, or to be texts."""
    if column.dtype.kind in "fiu":
        bad = np.isinf(column.to_numpy(dtype=np.float64))
        row = int(bad.argmax())
        return f"the value {column.iloc[row]} in row {before + row + 1}: remove that row" if bad.any() else ""
    if find:
        return ""
    there = column.notna()
    odd = [i for i, v in enumerate(column) if there.iloc[i] and (isinstance(v, bool) or not is_number(str(v)))]
    return f"text ({str(column.iloc[odd[0]])[:40]!r} in row {before + odd[0] + 1}), not numbers" if odd else ""


def _typed(texts: npt.NDArray[np.str_]) -> npt.NDArray[Any]:
    """Texts as truth values, whole numbers (1.0 is the class 1) or floats, if all of them are."""
    kinds, place = np.unique(texts, return_inverse=True)
    if {k.lower() for k in kinds.tolist()} <= {"true", "false"}:
        return (np.char.lower(kinds) == "true")[place]
    if not all(is_number(k) for k in kinds.tolist()):
        return texts
    values = kinds.astype(np.float64)
    exact = np.isfinite(values).all() and (values == np.round(values)).all() and (np.abs(values) < 2**53).all()
    return (values.astype(np.int64) if exact else values)[place]


def split(table: Table, share: float, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows to train on and rows to test with, each in their order; of every class the same share.

    Raises:
        OptionError: There are too few rows.
    """
    n = len(table.target)
    order = np.random.default_rng(seed).permutation(n)
    kept = np.zeros(n, dtype=bool)
    if table.task == "classification":
        order = order[np.argsort(table.target[order], kind="stable")]
        kept[np.unique(table.target[order], return_index=True)[1]] = True  # one row of every class to train on
    # Every (1/share)-th row of that order, which takes the share of each class, give or take one row.
    held = (np.diff(np.floor(np.arange(1, n + 1) * share), prepend=0.0) > 0) & ~kept
    if n - held.sum() < 2 or (share > 0 and not held.any()):
        raise OptionError(f"{n} rows are too few to train on and to hold out a share of {share:g} (--test-share)")
    return np.sort(order[~held]), np.sort(order[held])
