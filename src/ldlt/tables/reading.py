"""A table of numbers from a CSV file, or the reason why it is none.

Nothing is guessed that would change what a certified radius means: texts are not encoded, missing values are not filled
in. Both are refused with the name of the column and what to do.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ldlt.errors import MissingExtraError, OptionError
from ldlt.files.replace import readable

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["TASKS", "Table", "read_csv", "read_features", "read_table"]

TASKS = ("classification", "regression")

MOST_CLASSES = 20
"""Up to this many different whole numbers a target is taken for classes."""

_SHOWN = 12  # names in a message


@dataclass(frozen=True)
class Table:
    """Features and a target.

    Attributes:
        features: Columns of float64, by name.
        target: Classes, or numbers in float64, (n,).
        name: Name of the target.
        task: One of :data:`TASKS`.
        inferred: Whether the task was found from the target.
    """

    features: pd.DataFrame
    target: npt.NDArray[Any]
    name: str
    task: str
    inferred: bool

    def __len__(self) -> int:
        return len(self.target)


def read_csv(path: str, separator: str = ",") -> pd.DataFrame:
    """A CSV file with a header, as it is.

    Raises:
        OptionError: There is no such file, or it is no table with a header of different names.
        MissingExtraError: ``pandas`` is not installed.
    """
    try:
        import pandas as pd  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("pandas", "train") from error
    place = readable(path, "data")
    try:
        options: dict[str, Any] = {"sep": separator, "skipinitialspace": True, "encoding": "utf-8-sig"}
        header = pd.read_csv(place, header=None, nrows=1, dtype=str, keep_default_na=False, **options)
        names = [str(name).strip() for name in header.iloc[0]]
        _check_header(path, names, separator)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # of rows that are cut because they are too long
            # pandas itself would rename columns that occur twice.
            table = pd.read_csv(place, header=0, names=names, index_col=False, low_memory=False, **options)
    except pd.errors.EmptyDataError:
        table = None
    except OptionError:
        raise
    except UnicodeDecodeError as error:
        raise OptionError(f"data '{path}' is not text in UTF-8: save it with that encoding") from error
    except Exception as error:  # whatever class the parser or a decompressor raises
        raise OptionError(f"data '{path}' cannot be read as CSV: {' '.join(str(error).split())}") from error
    if table is None or not len(table):
        raise OptionError(f"data '{path}' is empty: a header and at least one row are needed")
    return table


def _check_header(path: str, names: list[str], separator: str) -> None:
    other = next((s for s in (";", "\t", "|") if s != separator and s in names[0]), None)
    if len(names) == 1 and other is not None:
        raise OptionError(f"data '{path}' has one column: if it is separated by {other!r}, say --separator {other!r}")
    if all(_is_number(name) for name in names):
        raise OptionError(
            f"data '{path}' has no header: its first line has numbers only; write the columns' names there"
        )
    for place, name in enumerate(names, 1):
        if not name:
            raise OptionError(
                f"column {place} of '{path}' has no name (an index that pandas wrote? save with index=False)"
            )
        if names.count(name) > 1:
            raise OptionError(f"data '{path}' has the column '{name}' {names.count(name)} times: rename or remove it")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text  # Python reads more than tables have


def read_table(
    path: str,
    *,
    target: str | None = None,
    task: str | None = None,
    drop: list[str] | None = None,
    separator: str = ",",
) -> Table:
    """Features and target of a CSV file.

    Args:
        path: The file.
        target: Name of the column to predict; None for the last one.
        task: One of :data:`TASKS`; None to find it from the target.
        drop: Columns to leave out.
        separator: Between columns.

    Raises:
        OptionError: The file is no table of numbers with such a target.
    """
    table = read_csv(path, separator)
    for name in drop or []:
        _check_column(table, name, path)
    table = table.drop(columns=list(dict.fromkeys(drop or [])))
    if not len(table.columns):
        raise OptionError(f"no column of '{path}' is left")
    name = str(table.columns[-1]) if target is None else target
    if target is not None and target in (drop or []):
        raise OptionError(f"the target '{target}' cannot be left out")
    _check_column(table, name, path)
    column = table.pop(name)
    if not len(table.columns):
        raise OptionError(f"data '{path}' has no columns besides the target '{name}'")
    _check_present(column, name)
    values, text = _target(column)
    found = task or _task(values, text)
    if found == "regression":
        if text:
            raise OptionError(f"the target '{name}' has text, which is no number to regress: use --task classification")
        values = values.astype(np.float64)
        _check_finite(values, name)
        if len(values) > 1 and (values == values[0]).all():
            raise OptionError(
                f"the target '{name}' has only one value, {values[0]:g}: there is nothing to learn; choose another one "
                "with --target"
            )
    else:
        kinds = np.unique(values)
        if len(kinds) < 2:
            raise OptionError(
                f"the target '{name}' has only one class, {kinds[0]!s}: there is nothing to tell apart; choose another "
                "with --target"
            )
    return Table(numbers(table), values, name, found, task is None)


def read_features(path: str, names: tuple[str, ...] | None, separator: str = ",") -> pd.DataFrame:
    """Columns of float64 to predict from; all, if their names are not known."""
    table = read_csv(path, separator)
    if names is not None:
        for name in names:
            _check_column(table, name, path)
        table = table[list(names)]
    return numbers(table)


def numbers(table: pd.DataFrame) -> pd.DataFrame:
    """The columns in float64.

    Raises:
        OptionError: A column has text, missing or infinite values.
    """
    for name in table.columns:
        column = table[name]
        _check_present(column, name)
        if column.dtype.kind not in "fiub":
            texts = ((i, v) for i, v in enumerate(column, 1) if not _is_number(str(v)) or isinstance(v, bool))
            row, value = next(texts, (1, column.iloc[0]))  # or whole numbers that are too long for pandas
            if "," in str(value) and _is_number(str(value).replace(",", ".", 1)):
                raise OptionError(
                    f"column '{name}' has text ({str(value)[:40]!r} in row {row}): write decimals with a point"
                )
            raise OptionError(
                f"column '{name}' has text ({str(value)[:40]!r} in row {row}): encode it as numbers first, for example "
                f"with pandas.get_dummies(table, columns=['{name}']), or leave it out with --drop '{name}'"
            )
        _check_finite(column.to_numpy(dtype=np.float64), name)
    return table.astype(np.float64)


def _target(column: pd.Series) -> tuple[npt.NDArray[Any], bool]:
    """Values, and whether they are texts."""
    if column.dtype.kind in "fiub":
        values: npt.NDArray[Any] = column.to_numpy()
        if values.dtype.kind == "f" and (values == np.round(values)).all() and (np.abs(values) < 2**53).all():
            values = values.astype(np.int64)  # 1.0 is the class 1
        return values, False
    return column.astype(str).to_numpy(dtype=str), True


def _task(values: npt.NDArray[Any], text: bool) -> str:
    """Texts, truth values, and few different whole numbers that occur twice on average are classes."""
    if text or values.dtype.kind == "b":
        return "classification"
    count = len(np.unique(values))
    few = values.dtype.kind in "iu" and count <= min(MOST_CLASSES, max(2, len(values) // 2))
    return "classification" if few else "regression"


def _check_column(table: pd.DataFrame, name: str, path: str) -> None:
    if name not in table.columns:
        names = [str(n) for n in table.columns]
        more = ", …" if len(names) > _SHOWN else ""
        raise OptionError(f"'{path}' has no column '{name}'; it has: {', '.join(names[:_SHOWN])}{more}")


def _check_present(column: pd.Series, name: str) -> None:
    missing = column.isna().to_numpy()
    if missing.any():
        count = int(missing.sum())
        raise OptionError(
            f"column '{name}' has {count} missing value{'s' * (count > 1)}, first in row {int(missing.argmax()) + 1} "
            "(nothing, or a word such as NA, None or null): fill in or remove those rows"
        )


def _check_finite(values: npt.NDArray[np.float64], name: str) -> None:
    infinite = ~np.isfinite(values)
    if infinite.any():
        row = int(infinite.argmax())
        raise OptionError(f"column '{name}' has the value {values[row]} in row {row + 1}: remove that row")


def split(table: Table, share: float, seed: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows to train on and rows to test with, each in their order; of every class the same share.

    Raises:
        OptionError: There are too few rows.
    """
    random = np.random.default_rng(seed)
    n = len(table)
    order = random.permutation(n)
    kept = np.zeros(n, dtype=bool)
    if table.task == "classification":
        order = order[np.argsort(table.target[order], kind="stable")]
        kept[np.unique(table.target[order], return_index=True)[1]] = True  # one row of every class to train on
    # Every (1/share)-th row of that order, which takes the share of each class, give or take one row.
    held = (np.diff(np.floor(np.arange(1, n + 1) * share), prepend=0.0) > 0) & ~kept
    if share > 0 and (not held.any() or n - held.sum() < 2):
        raise OptionError(
            f"{n} rows are too few to hold out a share of {share:g}: use --test-share 0, which reports no accuracy"
        )
    if math.ceil(n - held.sum()) < 2:
        raise OptionError(f"{n} rows are too few to train on")
    return np.sort(order[~held]), np.sort(order[held])
