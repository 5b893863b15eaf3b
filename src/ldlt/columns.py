r"""Columns of a table as inputs of a network: what is a number, what a category, what stands for a missing value.

A number is one input, in its own unit. A missing number is replaced by the median of the column; where values were
missing in training, one more input is 1 for a missing value and 0 otherwise. A category is one input per text, which
is :math:`1/\sqrt2` for the text that is there and 0 for all others: two different categories are at a distance of
exactly 1. Texts that are rare, or were never seen, have no input of their own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from ldlt.check import near
from ldlt.errors import OptionError, ShapeError

__all__ = [
    "MOST_CATEGORIES",
    "MOST_CODES",
    "Column",
    "columns_of",
    "encode",
    "is_frame",
    "is_number",
    "refuse",
    "weighted_median",
]

MOST_CATEGORIES = 32
"""The most frequent texts of a column that have an input of their own; if there are more, the others share one."""

MOST_CODES = 10
"""Up to so many different numbers among texts are taken for names of categories, such as A, B, 1, 2."""

STEP = math.sqrt(0.5)
"""The input of a category that is there."""

_TOLD = 8  # reasons in a message
_DATE = re.compile(r"\s*(\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ]\d{1,2}:\d{2}.*)?|\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?)\s*")
_Text = Annotated[str, msgspec.Meta(max_length=1000)]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: In the table.
        fill: A number's value where it is missing; None: it must not be.
        missing: Whether one more input tells that the number is missing.
        categories: The texts that have an input of their own; None for a number. A missing text is ``""``.
        other: Whether all other texts share an input; if they do not, all inputs are 0 for them.
        strict: Whether other texts are refused.
        instead: The text that stands for a missing one.
    """

    name: _Text
    fill: float | None = None
    missing: bool = False
    categories: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=100_000)] | None = None
    other: bool = False
    strict: bool = False
    instead: _Text = ""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs."""
        if self.categories is None:
            return (self.name, f"{self.name} is missing")[: 1 + self.missing]
        return tuple(f"{self.name} = {c}" for c in (*self.categories, *["…"] * self.other))

    def read(self, values: Any) -> npt.NDArray[np.float64]:
        """Values (n,) as inputs (n, k).

        Raises:
            OptionError: A value is no number, or missing where that was not foreseen.
        """
        if self.categories is not None:
            texts = _texts(values)
            texts = np.where(texts == "", self.instead, texts)
            found = texts[:, None] == np.array(self.categories, dtype=str)
            unknown = ~found.any(axis=1)
            if self.strict and unknown.any():
                row = int(unknown.argmax())
                raise OptionError(
                    f"column '{self.name}' has {str(texts[row])[:40]!r} in row {row + 1}, which is no category of it"
                    f"{near(texts[row], self.categories)}"
                )
            if self.other:
                found = np.concatenate([found, unknown[:, None]], axis=1)
            return found * STEP
        numbers = _numbers(self.name, values)
        absent = np.isnan(numbers)
        if absent.any():
            if self.fill is None:
                raise OptionError(f"column '{self.name}' has a missing value in row {int(absent.argmax()) + 1}")
            numbers = np.where(absent, self.fill, numbers)
        return np.stack([numbers, absent], axis=1) if self.missing else numbers[:, None]


def is_frame(table: Any) -> bool:
    """Whether columns go by name."""
    return hasattr(table, "columns") and hasattr(table, "iloc")


def _series(table: Any) -> list[tuple[str, Any]]:
    """Columns by name; those of an array are numbered."""
    if is_frame(table):
        return [(str(name), table.iloc[:, i]) for i, name in enumerate(table.columns)]
    return [(f"x{i}", table[:, i]) for i in range(table.shape[1])]


def columns_of(table: Any, weight: npt.NDArray[np.float64] | None = None) -> tuple[Column, ...]:
    """What the columns of a table are.

    Args:
        table: A data frame, or an array of numbers (n, d).
        weight: Of the rows (n,), for medians; those of weight zero do not count.

    Raises:
        OptionError: Some columns cannot be used; the message has all of them, with what to do.
    """
    kept = np.ones(len(table), dtype=bool) if weight is None else weight > 0
    weight = kept.astype(np.float64) if weight is None else weight
    found, reasons = [], []
    for name, values in _series(table):
        try:
            found.append(_column(name, values[kept], weight[kept]))
        except OptionError as error:
            reasons.append(str(error))
    refuse(reasons)
    return tuple(found)


def _column(name: str, values: Any, weight: npt.NDArray[np.float64]) -> Column:
    kind = getattr(values.dtype, "kind", "O")
    if kind in "Mm":
        raise OptionError(_dates(name))
    if kind in "iuf":
        numbers = _numbers(name, values)
        absent = np.isnan(numbers)
        median = weighted_median(numbers[~absent], weight[~absent]) if not absent.all() else 0.0
        return Column(name, fill=median, missing=bool(absent.any()))
    if kind == "c":
        raise OptionError(f"column '{name}' has complex numbers: give their parts as two columns")
    texts, counts = np.unique(_texts(values), return_counts=True)
    present = [t for t in texts.tolist() if t]
    if present and all(is_number(t) for t in present):
        return _column(name, _numbers(name, values), weight)
    if present and all(_DATE.fullmatch(t) for t in present):
        raise OptionError(_dates(name))
    odd = [t for t in present if not is_number(t)]
    comma = [t for t in odd if is_number(t.replace(",", ".", 1))]
    if len(comma) == len(odd) > 0 or (len(present) - len(odd) > MOST_CODES and 2 * len(odd) < len(present)):
        advice = "write decimals with a point" if comma else "leave what is missing empty, or drop the column"
        row = int((_texts(values) == odd[0]).argmax()) + 1
        raise OptionError(f"column '{name}' has numbers and text ({odd[0][:40]!r} in row {row}): {advice}")
    if len(present) > max(2 * MOST_CATEGORIES, len(values) // 2):
        raise OptionError(
            f"column '{name}' has {len(present)} different texts in {len(values)} rows, as names or identifiers have: "
            "drop it"
        )
    order = np.lexsort((texts, -counts))[: MOST_CATEGORIES if len(texts) > MOST_CATEGORIES else None]
    return Column(name, categories=tuple(sorted(texts[order].tolist())), other=len(texts) > MOST_CATEGORIES)


def _dates(name: str) -> str:
    return (
        f"column '{name}' has dates or times: a distance between them needs a unit, so give a number, such as the days "
        "since an event or the hour of the day, or drop the column"
    )


def encode(table: Any, columns: Sequence[Column]) -> npt.NDArray[np.float64]:
    """The inputs (n, d) of a network from a data frame, or from an array with these columns in this order.

    Raises:
        OptionError: A column is missing, or has values that it cannot have; the message has all of them.
        ShapeError: An array has another number of columns.
    """
    if is_frame(table):
        there = {str(c): i for i, c in enumerate(table.columns)}
        refuse([f"there is no column '{c.name}'{near(c.name, there)}" for c in columns if c.name not in there])
        given = [table.iloc[:, there[c.name]] for c in columns]
    else:
        if table.ndim != 2 or table.shape[1] != len(columns):
            raise ShapeError(f"the table must have shape (n, {len(columns)}), not {table.shape}")
        plain = table.dtype == np.float64 and all(c.categories is None and not c.missing for c in columns)
        if plain and not any(np.isnan(table[:, i]).any() for i in range(table.shape[1])):
            return table
        given = [table[:, i] for i in range(table.shape[1])]
    widths = [len(c.inputs) for c in columns]
    found, reasons, place = np.empty((len(table), sum(widths))), [], 0
    for column, values, width in zip(columns, given, widths, strict=True):
        try:
            found[:, place : place + width] = column.read(values)
        except OptionError as error:
            reasons.append(str(error))
        place += width
    refuse(reasons)
    return found


def refuse(reasons: Sequence[str]) -> None:
    """Raise what is wrong, all in one message; nothing if nothing is.

    Raises:
        OptionError: There are reasons.
    """
    if reasons:
        more = f"; and {len(reasons) - _TOLD} more" if len(reasons) > _TOLD else ""
        raise OptionError("; ".join(reasons[:_TOLD]) + more)


def weighted_median(values: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]) -> float:
    """The least value that half of the weight does not exceed; one of the values, so that no rounding depends on order.

    >>> weighted_median(np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 5.0]))
    2.0
    """
    if (weight == weight[0]).all():
        place = (len(values) - 1) // 2
        return float(np.partition(values, place)[place])
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def _numbers(name: str, values: Any) -> npt.NDArray[np.float64]:
    """Values as floats (n,), NaN where they are missing."""
    if getattr(values.dtype, "kind", "O") in "iufb":
        return np.asarray(values, dtype=np.float64)
    texts = _texts(values)
    kinds, place = np.unique(texts, return_inverse=True)
    for kind in kinds.tolist():
        if kind and not is_number(kind):
            row = int((texts == kind).argmax()) + 1
            raise OptionError(f"column '{name}' must have numbers, row {row} has {kind[:40]!r}")
    return np.array([float(k) if k else math.nan for k in kinds.tolist()])[place]


def _texts(values: Any) -> npt.NDArray[np.str_]:
    """Values as texts (n,), ``""`` where they are missing; numbers and truth values as they are usually written."""
    kinds: dict[Any, str] = {}
    found = []
    for value in np.asarray(values, dtype=object).tolist():
        key = type(value), value  # 1 and True are equal
        if key not in kinds:
            kinds[key] = text_of(value)
        found.append(kinds[key])
    return np.array(found, dtype=str)


def text_of(value: Any) -> str:
    """A value as the name of a category; ``""`` if it is missing."""
    if str(value) in ("None", "nan", "NaT", "<NA>"):
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).strip()
    return text.capitalize() if text.lower() in ("true", "false") else text[:1000]


def is_number(text: str) -> bool:
    """Whether a table means a number by it."""
    try:
        float(text)
    except ValueError:
        return False
    return text.isascii() and "_" not in text  # Python reads more than tables have
