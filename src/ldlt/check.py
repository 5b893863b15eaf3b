"""One check for each kind of argument: it returns the value in its proper type, or says in a sentence what is wrong."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Collection, Iterable
from typing import Any

from ldlt.errors import LdltError, OptionError, ShapeError

__all__ = ["choice", "finite", "near", "positive", "sample_shape", "whole"]


def finite(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    error: type[LdltError] = OptionError,
) -> float:
    """A finite number with ``least ≤ value``, ``above < value < below``.

    Args:
        name: Of the argument, for the message.
        value: A real number, also of NumPy or PyTorch; not a truth value and not a text.
        least: Smallest value.
        above: Excluded lower end.
        below: Excluded upper end.
        error: What to raise.

    Example:
        >>> finite("share", 0.25, above=0, below=1)
        0.25
    """
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        number = math.nan
    if not (math.isfinite(number) and number >= least and above < number < below):
        ends = [(" at least {:g}", least), (" above {:g}", above), (" below {:g}", below)]
        limits = " and".join(text.format(end) for text, end in ends if math.isfinite(end))
        raise error(f"{name} must be a finite number{limits}, not {value!r}")
    return number


def positive(name: str, value: Any, error: type[LdltError] = OptionError) -> float:
    """A finite number above zero."""
    return finite(name, value, above=0.0, error=error)


def whole(name: str, value: Any, *, least: int = 1, error: type[LdltError] = OptionError) -> int:
    """A whole number that is at least ``least``; not a truth value, and not a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise error(f"{name} must be a whole number that is at least {least}, not {value!r}")
    return int(value)


def choice(name: str, value: Any, choices: Collection[Any]) -> Any:
    """One of some values, and of its type."""
    if not any(isinstance(value, type(c)) and value == c for c in choices):
        raise OptionError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}{near(value, choices)}")
    return value


def near(value: Any, choices: Iterable[Any]) -> str:
    """A question after the nearest of some names, to end a message with; nothing if none is near.

    >>> near("sepal widht", ["sepal length", "sepal width"])
    " (did you mean 'sepal width'?)"
    """
    found = difflib.get_close_matches(str(value), [str(c) for c in choices], 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def sample_shape(input_shape: Any) -> tuple[int, ...]:
    """Shape of one sample as a tuple, from a whole number or a sequence of them."""
    values = [input_shape] if isinstance(input_shape, numbers.Integral) else input_shape
    try:
        shape = tuple(int(v) for v in values)
        exact = all(int(v) == v for v in values)
    except (TypeError, ValueError):
        raise ShapeError(f"input_shape must be an int or a tuple of ints, not {input_shape!r}") from None
    if not shape or not exact or any(v < 1 for v in shape):
        raise ShapeError(f"input_shape must consist of positive ints without the batch dimension, not {input_shape!r}")
    return shape
