"""Pictures of what is certified; all return the axes, by default those of a new figure (extra ``figures``)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.base import clone
from sklearn.model_selection import train_test_split

from ldlt.errors import MissingExtraError

if TYPE_CHECKING:
    from ldlt.estimators.classifier import LipschitzClassifier

__all__ = ["plot_certified_accuracy", "plot_radii", "plot_settings"]


def _axes(ax: Any, units: str, ylabel: str) -> Any:
    """The given axes, or those of a new figure, with their labels."""
    if ax is None:
        try:
            ax = import_module("matplotlib.pyplot").subplots()[1]
        except ImportError as error:
            raise MissingExtraError("matplotlib", "figures") from error
    unit = {"data": "units of the data", "standard": "standardised units"}[units]
    ax.set(xlabel=f"Euclidean radius ({unit})", ylabel=ylabel)
    return ax


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
        ax: Axes to draw on.
    """
    if radii is None:
        radii = np.linspace(0.0, float(estimator.certified_radius(X, units).max(initial=0.0)), 200).tolist()
    shares = estimator.certified_accuracy(X, y, radii, units)
    ax = _axes(ax, units, "certified accuracy")
    ax.plot(radii, shares)
    ax.set(ylim=(0.0, 1.02))
    return ax


def plot_settings(
    estimator: LipschitzClassifier,
    X: Any,
    y: Any,
    settings: Sequence[float] = (0.0, 0.25, 0.5, 1.0),
    *,
    test_size: float = 0.3,
    ax: Any = None,
) -> Any:
    """Accuracy against radius for several values of ``radius``, on one's own data.

    A copy of the estimator is trained for each on the same rows, and measured on the others, in standardised units.

    Args:
        estimator: A classifier, fitted or not; it is not changed.
        X: Features (n, d).
        y: True classes (n,).
        settings: Values of ``radius``.
        test_size: Share of the rows to measure on.
        ax: Axes to draw on.
    """
    state = estimator.random_state
    x, x_test, truth, y_test = train_test_split(X, y, test_size=test_size, stratify=y, random_state=state)
    radii = np.linspace(0.0, 1.5 * max(0.5, *settings), 200).tolist()
    for setting in settings:
        fitted = clone(estimator).set_params(radius=setting).fit(x, truth)
        ax = plot_certified_accuracy(fitted, x_test, y_test, radii, units="standard", ax=ax)
        ax.lines[-1].set_label(f"radius={setting:g}")
    ax.legend()
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
        ax: Axes to draw on.
    """
    found = estimator.certified_radius(X, units)
    ax = _axes(ax, units, "rows")
    edges = np.linspace(0.0, max(float(found.max(initial=0.0)), np.finfo(np.float64).tiny), bins + 1)
    if y is None:
        ax.hist(found, bins=edges)
    else:
        right = estimator.predict(X) == np.asarray(y).reshape(-1)
        ax.hist([found[right], found[~right]], bins=edges, stacked=True, label=["correct", "wrong"])
        ax.legend()
    return ax
