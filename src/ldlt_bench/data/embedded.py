"""Data sets that need no download: published rules and generators, and the real sets inside scikit-learn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ldlt.errors import MissingExtraError
from ldlt_bench.data.archive import Finding, Summary, unknown
from ldlt_bench.data.dataset import Dataset, encode_labels
from ldlt_bench.data.folds import make_folds
from ldlt_bench.data.quirks import FLAGGED, quirks
from ldlt_bench.data.rules import Table, balance_scale, led_display, monks, ringnorm, tic_tac_toe, twonorm, waveform

__all__ = ["RECIPES", "Embedded", "Recipe"]

EXTRA = "bench"
"""The extra of this package that installs scikit-learn."""


@dataclass(frozen=True)
class Recipe:
    """How an embedded data set is made.

    Attributes:
        make: Function that returns raw features, labels and classes.
        kind: ``rule`` (every row determined), ``generator`` (same law, own sample) or ``scikit-learn``
            (real data).
        size: Rows, columns, classes.
        rule: One sentence that defines the set.
        citation: Who published it.
    """

    make: Callable[[], Table]
    kind: Literal["rule", "generator", "scikit-learn"]
    size: tuple[int, int, int]
    rule: str
    citation: str


class Embedded:
    """The embedded data sets, with the verbs of :class:`~ldlt_bench.data.archive.Archive`.

    Values are standardised over all rows (denominator n - 1), as in the archive; categories are integer
    codes before that, as in the archive. The folds are made by :func:`~ldlt_bench.data.folds.make_folds`.

    Example:
        >>> Embedded().load("balance-scale")
        Dataset('balance-scale', rows=625, columns=4, classes=3)
    """

    def names(self) -> tuple[str, ...]:
        """Names of the data sets that can be made here, sorted."""
        missing = self.unavailable()
        return tuple(name for name in sorted(RECIPES) if name not in missing)

    def unavailable(self) -> dict[str, str]:
        """The sets that ship inside scikit-learn, if it is not installed."""
        if find_spec("sklearn") is not None:
            return {}
        reason = str(MissingExtraError("sklearn", EXTRA))
        return {name: reason for name in sorted(RECIPES) if RECIPES[name].kind == "scikit-learn"}

    def load(self, name: str) -> Dataset:
        """A data set by name: the same numbers every time."""
        recipe = _recipe(name)
        features, labels, classes = recipe.make()
        test, validation = make_folds(labels, name)
        notes = (recipe.rule, recipe.citation)
        return Dataset(
            name, _standardise(features), labels, classes, test, validation, f"embedded ({recipe.kind})", notes
        )

    def summary(self, name: str) -> Summary:
        """Rows, columns and classes of a data set."""
        return Summary(name, *_recipe(name).size)

    def digest(self, name: str) -> str:
        """Short hash of features (to six decimals, as the last ones may depend on the machine), labels and folds."""
        data = self.load(name)
        rounded = np.round(data.features * 1e6).astype(np.int64)
        parts = (rounded, data.labels, data.test_folds, data.validation_folds)
        return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()[:8]

    def check(self, name: str) -> list[Finding]:
        """Everything that is odd with a data set."""
        try:
            dataset = self.load(name)
        except MissingExtraError as error:
            return [Finding(name, "unavailable", str(error))]
        return [Finding(name, "warning" if q.code in FLAGGED else "note", str(q)) for q in quirks(dataset)]


def _recipe(name: str) -> Recipe:
    if name not in RECIPES:
        raise unknown(name, RECIPES, "the embedded sets")
    return RECIPES[name]


def _standardise(features: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean 0 and deviation 1 over all rows; constant columns become 0."""
    scale = features.std(axis=0, ddof=1)
    varied = np.ptp(features, axis=0) > 0
    return np.where(varied, (features - features.mean(axis=0)) / np.where(varied, scale, 1.0), 0.0)


def _from_sklearn(loader: str) -> Table:
    """A data set that ships inside scikit-learn, with classes in sorted order of their names."""
    if find_spec("sklearn") is None:
        raise MissingExtraError("sklearn", EXTRA)
    bunch = getattr(import_module("sklearn.datasets"), loader)()
    labels, classes = encode_labels(np.asarray(bunch.target_names)[bunch.target])
    return np.asarray(bunch.data, dtype=np.float64), labels, classes


_BREIMAN = "Breiman, Bias, variance and arcing classifiers, 1996"
_CART = "Breiman, Friedman, Olshen and Stone, Classification and Regression Trees, 1984"
_MONKS = "Thrun et al., The MONK's problems, CMU-CS-91-197, 1991"
_BALANCE = "all states of a balance; the class is the side with the larger product of weight and distance"
_NOISE = "without the published label noise"
_BOARDS = "all boards at the end of a game in which x moves first; positive if x has three in a row"
_WAVES = "random convex combinations of two of three waves plus unit noise"
_IRIS = "Fisher's measurements of irises; two rows differ from the UCI copy, which has typing errors there"
_DIGITS = "8 × 8 images of handwritten digits; the test rows of the archive's 'optical', with all 64 pixels"
_CELLS = "shapes of cell nuclei, benign or malignant; the rows of the archive's set"
_STREET = "Street, Wolberg and Mangasarian, Nuclear feature extraction for breast tumor diagnosis, 1993"


def _generator(make: Callable[[], Table], size: tuple[int, int, int], rule: str, citation: str) -> Recipe:
    return Recipe(make, "generator", size, f"{rule}; own sample", citation)


def _real(loader: str, size: tuple[int, int, int], rule: str, citation: str) -> Recipe:
    return Recipe(partial(_from_sklearn, loader), "scikit-learn", size, rule, citation)


def _monks(problem: int, rule: str) -> Recipe:
    return Recipe(partial(monks, problem), "rule", (432, 6, 2), f"all robots; {rule}", _MONKS)


RECIPES: dict[str, Recipe] = {
    "balance-scale": Recipe(
        balance_scale, "rule", (625, 4, 3), _BALANCE, "Siegler, Three aspects of cognitive development, 1976"
    ),
    "monks-1": _monks(1, "a1 = a2 or a5 = 1"),
    "monks-2": _monks(2, "exactly two attributes have their first value"),
    "monks-3": _monks(3, f"(a5 = 3 and a4 = 1) or (a5 ≠ 4 and a2 ≠ 3); {_NOISE}"),
    "tic-tac-toe": Recipe(tic_tac_toe, "rule", (958, 9, 2), _BOARDS, "Aha, Incremental constructive induction, 1991"),
    "twonorm": _generator(twonorm, (7400, 20, 2), "N(a1, I) against N(-a1, I), a = 2/√20", _BREIMAN),
    "ringnorm": _generator(ringnorm, (7400, 20, 2), "N(0, 4I) against N(a1, I), a = 2/√20", _BREIMAN),
    "waveform": _generator(waveform, (5000, 21, 3), _WAVES, _CART),
    "waveform-noise": _generator(
        partial(waveform, 19), (5000, 40, 3), "waveform with 19 more columns of unit noise", _CART
    ),
    "led-display": _generator(
        led_display, (1000, 7, 10), "seven-segment digits, each segment wrong with probability 0.1", _CART
    ),
    "iris": _real(
        "load_iris", (150, 4, 3), _IRIS, "Fisher, The use of multiple measurements in taxonomic problems, 1936"
    ),
    "wine": _real(
        "load_wine",
        (178, 13, 3),
        "chemical analysis of wines from three growers; the rows of the archive's set",
        "Forina et al., PARVUS, 1988",
    ),
    "breast-cancer-wisc-diag": _real("load_breast_cancer", (569, 30, 2), _CELLS, _STREET),
    "digits": _real("load_digits", (1797, 64, 10), _DIGITS, "Alpaydin and Kaynak, Cascading classifiers, 1998"),
}
"""All embedded data sets by name; all but ``digits`` have the name of their set in the archive."""
