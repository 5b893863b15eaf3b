"""Pictures of what is certified."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from ldlt.errors import MissingExtraError

if TYPE_CHECKING:
    from ldlt.estimators.classifier import LipschitzClassifier

__all__ = ["plot_certified_accuracy", "plot_radii"]


def _axes(ax: Any) -> Any:
    """The given axes, or those of a new figure."""
    if ax is not None:
        return ax
    try:
        return import_module("matplotlib.pyplot").subplots()[1]
    except ImportError as error:
        raise MissingExtraError("matplotlib", "figures") from error


def _label(units: str) -> str:
    return {"data": "Euclidean radius (units of the data)", "standard": "Euclidean radius (standardised units)"}[units]


def plot_certified_accuracy(
    estimator: LipschitzClassifier,
    X: Any,
    y: Any,
    radii: Sequence[float] | None = None,
    *,
    units: str = "data",
    ax: Any = None,
) -> Any:
    """Certified accuracy as a function of the radius.

    Args:
        estimator: A fitted classifier.
        X: Features (n, d).
        y: True classes (n,).
        radii: Where to evaluate it; by default at 200 points up to the largest certified radius.
        units: ``"data"`` or ``"standard"``, as in :meth:`ldlt.LipschitzClassifier.certified_radius`.
        ax: Axes to draw on; by default those of a new figure.

    Returns:
        The axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    if radii is None:
        radii = np.linspace(0.0, float(estimator.certified_radius(X, units).max(initial=0.0)), 200).tolist()
    shares = estimator.certified_accuracy(X, y, radii, units)
    ax = _axes(ax)
    ax.plot(radii, shares)
    ax.set(xlabel=_label(units), ylabel="certified accuracy", ylim=(0.0, 1.02))
    return ax


def plot_radii(
    estimator: LipschitzClassifier, X: Any, y: Any = None, *, units: str = "data", bins: int = 30, ax: Any = None
) -> Any:
    """Histogram of the certified radii.

    Args:
        estimator: A fitted classifier.
        X: Features (n, d).
        y: True classes (n,): rows that are classified correctly and those that are not are then told apart.
        units: ``"data"`` or ``"standard"``, as in :meth:`ldlt.LipschitzClassifier.certified_radius`.
        bins: Number of bars.
        ax: Axes to draw on; by default those of a new figure.

    Returns:
        The axes.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    found = estimator.certified_radius(X, units)
    parts = [found]
    labels: list[str | None] = [None]
    if y is not None:
        right = estimator.predict(X) == np.asarray(y).reshape(-1)
        parts, labels = [found[right], found[~right]], ["correct", "wrong"]
    ax = _axes(ax)
    edges = np.linspace(0.0, max(float(found.max(initial=0.0)), np.finfo(np.float64).tiny), bins + 1)
    ax.hist(parts, bins=edges, stacked=True, label=labels)
    ax.set(xlabel=_label(units), ylabel="rows")
    if y is not None:
        ax.legend()
    return ax
