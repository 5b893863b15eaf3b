"""A table of numbers from a CSV file, or all the reasons why it is none.

Nothing is guessed that would change what a certified radius means: texts are not encoded, missing values are not filled
in. Both are refused with the name of the column and what to do. A file is read part by part, with a limit on what it
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
from ldlt.errors import MissingExtraError, OptionError

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Table", "read_features", "read_table", "split"]

MOST_CLASSES = 20
"""Up to this many different whole numbers a target is taken for classes."""

LARGEST_TEXT, LONGEST_LINE, MOST_NUMBERS = 2**29, 2**24, 2**25
"""Limits: bytes of a file once it is unpacked, bytes of one line, numbers of a table (256 MiB as float64)."""

_AT_ONCE = 2**17  # numbers of a part
_TOLD = 8  # reasons, or names, in a message
_OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass(frozen=True)
class Table:
    """Features (n, d) of float64 by name, the target (n,) of classes or of float64, its name, and the task.

    The task is ``"classification"`` or ``"regression"``.
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
        OptionError: The file is no table of numbers with such a target; the message has all reasons.
        MissingExtraError: ``pandas`` is not installed.
    """

    def choose(header: list[str]) -> list[str]:
        _check_names([*drop, *([target] if target else [])], header)
        kept = [n for n in header if n not in drop]
        if target in drop or len(kept) < 2:
            raise OptionError("a target and at least one other column must be left")
        goal = target or kept[-1]
        return [*(n for n in kept if n != goal), goal]

    table = _read(Path(path), separator, choose, True)
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


def read_features(path: str | Path, names: Sequence[str] | None = None, separator: str = ",") -> pd.DataFrame:
    """Columns of float64 to predict from, by name; all, if their names are not known."""

    def choose(header: list[str]) -> list[str]:
        _check_names(names or (), header)
        return list(names or header)

    return _read(Path(path), separator, choose, False)


def _read(path: Path, separator: str, choose: Callable[[list[str]], list[str]], target: bool) -> pd.DataFrame:
    """The chosen columns in float64, but the last one, if it is a target, as texts."""
    try:
        import pandas as pd  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("pandas", "train") from error
    try:
        with io.BufferedReader(_Unpacked(path)) as file, warnings.catch_warnings():
            first = [file.readline().decode("utf-8-sig")]
            header = [n.strip() for n in next(csv.reader(first, delimiter=separator, skipinitialspace=True), [])]
            if not header:
                raise pd.errors.EmptyDataError
            _check_header(header, separator)
            names, rows = choose(header), 0
            columns: dict[str, list[Any]] = {n: [] for n in names}
            wrong: dict[str, str] = {}
            kinds = {names[-1]: str} if target else {}  # whether it has texts or numbers is decided by all of it
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of rows that are cut because they are too long
            options: dict[str, Any] = {"sep": separator, "skipinitialspace": True, "index_col": False, "dtype": kinds}
            size = max(1, _AT_ONCE // len(header))
            for part in pd.read_csv(file, header=None, names=header, chunksize=size, **options):
                if part.empty:
                    raise pd.errors.EmptyDataError
                for name in [n for n in names if n not in wrong]:
                    reason = _reason(name, part[name], rows, name in kinds)
                    if reason:
                        wrong[name] = f"column '{name}' has {reason}"
                        columns[name] = []
                    else:
                        columns[name].append(part[name].to_numpy(dtype=str if name in kinds else np.float64))
                rows += len(part)
                if rows * len(names) > MOST_NUMBERS:
                    raise OptionError(f"it has more than {MOST_NUMBERS} numbers: split it")
        _refuse([*wrong.values()])
        return pd.DataFrame({n: np.concatenate(columns.pop(n)) for n in names})
    except pd.errors.EmptyDataError as error:
        raise OptionError(f"data '{path}' is empty: a header and at least one row are needed") from error
    except OptionError as error:
        raise OptionError(f"data '{path}' cannot be used: {error}") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"data '{path}' is not text in UTF-8: save it with that encoding") from error
    except Exception as error:  # whatever class the parser or a decompressor raises
        raise OptionError(f"data '{path}' cannot be read as CSV: {' '.join(str(error).split())}") from error


def _refuse(reasons: Sequence[str]) -> None:
    if reasons:
        more = f"; and {len(reasons) - _TOLD} more" if len(reasons) > _TOLD else ""
        raise OptionError("; ".join(reasons[:_TOLD]) + more)


def _check_names(wanted: Sequence[str], header: list[str]) -> None:
    shown = ", ".join(header[:_TOLD]) + ", …" * (len(header) > _TOLD)
    _refuse([f"it has no column '{n}'{near(n, header) or f', only {shown}'}" for n in wanted if n not in header])


def _check_header(names: list[str], separator: str) -> None:
    other = next((s for s in (",", ";", "\t", "|") if s != separator and s in names[0]), None)
    if len(names) == 1 and other is not None:
        raise OptionError(f"it has one column: if it is separated by {other!r}, say --separator {other!r}")
    if all(_is_number(name) for name in names):
        raise OptionError("it has no header, only numbers in its first line: write the columns' names there")
    empty = [f"column {i} has no name (a pandas index? save with index=False)" for i, n in enumerate(names, 1) if not n]
    twice = [n for n in dict.fromkeys(names) if n and names.count(n) > 1]
    _refuse([*empty, *(f"it has the column '{n}' {names.count(n)} times: rename or remove it" for n in twice)])


def _reason(name: str, column: pd.Series, before: int, target: bool) -> str:
    """What is wrong with a part of a column behind so many rows; nothing if it is fine."""
    bad = column.isna().to_numpy()
    row = int(bad.argmax())
    if bad.any():
        where = f"first in row {before + row + 1} (nothing, or a word such as NA or null)"
        return f"missing values, {where}: fill in or remove them"
    if target:
        return ""
    if column.dtype.kind not in "fiub":
        texts = (i for i, v in enumerate(column) if isinstance(v, bool) or not _is_number(str(v)))
        row = next(texts, 0)  # none: whole numbers that are too long for pandas
        text = str(column.iloc[row])[:40]
        comma = "," in text and _is_number(text.replace(",", ".", 1))
        encode = f"encode it, as with pandas.get_dummies(table, columns=['{name}']), or use --drop '{name}'"
        return f"text ({text!r} in row {before + row + 1}): {'write decimals with a point' if comma else encode}"
    bad = ~np.isfinite(column.to_numpy(dtype=np.float64))
    row = int(bad.argmax())
    return f"the value {column.iloc[row]} in row {before + row + 1}: remove that row" if bad.any() else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text  # Python reads more than tables have


def _typed(texts: npt.NDArray[np.str_]) -> npt.NDArray[Any]:
    """Texts as truth values, whole numbers (1.0 is the class 1) or floats, if all of them are."""
    kinds, place = np.unique(texts, return_inverse=True)
    if {k.lower() for k in kinds.tolist()} <= {"true", "false"}:
        return (np.char.lower(kinds) == "true")[place]
    if not all(_is_number(k) for k in kinds.tolist()):
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
