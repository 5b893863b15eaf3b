"""A classification data set with its four splits, and its standardisation by training rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ldlt_bench.data.errors import DatasetError
from ldlt_bench.data.folds import FOLDS, VALIDATION_SHARE, Stream, stratified_sample

__all__ = ["Dataset", "Split", "Standardised", "column_statistics", "encode_labels"]

CONSTANT = 1e-12
"""A column whose training values differ by no more than this share of the largest is constant."""


@dataclass(frozen=True, eq=False)
class Split:
    """Row numbers of one fold, sorted and disjoint; together they are all rows (but see ``fallback``).

    Attributes:
        train: Rows to fit on.
        validation: Rows to choose on.
        test: Rows to report on.
        absent: Classes without any training row.
        fallback: How the validation rows came about: ``""`` as the data set has them; ``"stratified"`` a
            stratified fifth of the training rows because the fold has none; ``"train"`` the training rows
            themselves, because no class has two of them (then ``train`` and ``validation`` are equal).
    """

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]
    absent: tuple[int, ...] = ()
    fallback: str = ""


@dataclass(frozen=True, eq=False)
class Standardised:
    r"""Features :math:`(x - \mu) / s` with mean and standard deviation of the training rows of one fold.

    A column that is constant in training has ``scale`` 0 and becomes 0 in *every* row: nothing was learnt
    about it, and a network that does not read it keeps its constant.

    Attributes:
        features: (N, d) all rows, standardised.
        labels: (N,) class of each row.
        mean: (d,) mean of the training rows.
        scale: (d,) standard deviation of the training rows (denominator n - 1), 0 where constant.
        split: Row numbers of the fold.
    """

    features: NDArray[np.float64]
    labels: NDArray[np.int64]
    mean: NDArray[np.float64]
    scale: NDArray[np.float64]
    split: Split

    def part(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Features and labels of some rows."""
        return self.features[rows], self.labels[rows]

    @property
    def train(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Features and labels of the training rows."""
        return self.part(self.split.train)

    @property
    def validation(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Features and labels of the validation rows."""
        return self.part(self.split.validation)

    @property
    def test(self) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Features and labels of the test rows."""
        return self.part(self.split.test)

    def raw_radius(self, radius: float) -> float:
        r"""Radius, in the units of the data set, that a radius in standardised units is worth.

        The standardised ball of radius :math:`r` is the ellipsoid :math:`\sum_j (\delta_j / s_j)^2 \le r^2`
        of the data set's own units. The largest Euclidean ball inside has radius :math:`r \min_j s_j` over
        the columns that are read (exact, not a bound).
        """
        read = self.scale[self.scale > 0]
        return radius * float(read.min()) if read.size else math.inf


@dataclass(frozen=True, eq=False)
class Dataset:
    """Features, labels and four splits; the arrays are checked, copied and read-only.

    Attributes:
        name: Name, as in the archive.
        features: (N, d) float64, finite, exactly as the source has them.
        labels: (N,) int64 in ``0 .. k - 1``.
        classes: The k original labels, in the order of ``labels``.
        test_folds: (N, 4) bool, True = tested in this fold. Four separate splits; in general not a partition.
        validation_folds: (N, 4) bool, True = validates in this fold, unless it is a test row: test wins.
        source: Where the data came from.
        notes: What a reader of results must know about this set.

    """

    name: str
    features: NDArray[np.float64]
    labels: NDArray[np.int64]
    classes: tuple[int | str, ...]
    test_folds: NDArray[np.bool_]
    validation_folds: NDArray[np.bool_]
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        features, labels = self._array("features", np.float64), self._array("labels", np.int64)
        folds = [self._array(name, np.bool_) for name in ("test_folds", "validation_folds")]
        self._need(features.ndim == 2 and features.size > 0, f"features of shape {features.shape} are no table")
        self._need(labels.shape == features.shape[:1], f"{labels.shape} labels for features of shape {features.shape}")
        for fold in folds:
            self._need(fold.shape == (len(labels), FOLDS), f"folds of shape {fold.shape}, not {(len(labels), FOLDS)}")
        self._need(bool(np.isfinite(features).all()), "a feature is not finite")
        object.__setattr__(self, "classes", tuple(self.classes))
        object.__setattr__(self, "notes", tuple(self.notes))
        self._need(len(set(self.classes)) == len(self.classes) > 1, "two or more different classes are needed")
        self._need(labels.min() >= 0 and labels.max() < len(self.classes), "a label is not the number of a class")

    def _need(self, good: bool, otherwise: str) -> None:
        if not good:
            raise DatasetError(f"data set '{self.name}': {otherwise}")

    def _array(self, field: str, dtype: type[np.generic]) -> NDArray[Any]:
        """Replace a field by a checked, read-only copy."""
        given = np.asarray(getattr(self, field))
        try:
            with np.errstate(invalid="ignore"):
                array = given.astype(dtype)
            exact = dtype is np.float64 or np.array_equal(array.astype(given.dtype), given)
        except (TypeError, ValueError, OverflowError):
            exact = False
        self._need(exact, f"{field} holds values that are not {np.dtype(dtype).name}")
        array.setflags(write=False)
        object.__setattr__(self, field, array)
        return array

    def __reduce__(self) -> tuple[type[Dataset], tuple[Any, ...]]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __repr__(self) -> str:
        return f"Dataset('{self.name}', rows={self.rows}, columns={self.columns}, classes={len(self.classes)})"

    @property
    def rows(self) -> int:
        """Number of rows N."""
        return int(self.features.shape[0])

    @property
    def columns(self) -> int:
        """Number of features d."""
        return int(self.features.shape[1])

    def split(self, fold: int) -> Split:
        """Training, validation and test rows of one fold.

        Test wins over validation, training rows are the rest. A fold without validation rows gets a stratified fifth
        of its training rows (a function of name, fold and labels alone); see :class:`Split`.
        """
        self._need(0 <= fold < FOLDS, f"fold {fold} is not one of 0 .. {FOLDS - 1}")
        test = self.test_folds[:, fold]
        validation = self.validation_folds[:, fold] & ~test
        train_rows, validation_rows = np.flatnonzero(~test & ~validation), np.flatnonzero(validation)
        test_rows = np.flatnonzero(test)
        self._need(train_rows.size > 0 and test_rows.size > 0, f"fold {fold} has no training or no test rows")
        fallback = ""
        if not validation_rows.size:
            stream = Stream("validation fallback", self.name, fold)
            validation_rows = stratified_sample(self.labels, train_rows, VALIDATION_SHARE, stream)
            fallback = "stratified" if validation_rows.size else "train"
            if validation_rows.size:
                train_rows = np.setdiff1d(train_rows, validation_rows, assume_unique=True)
            else:
                validation_rows = train_rows
        seen = np.bincount(self.labels[train_rows], minlength=len(self.classes))
        absent = tuple(int(label) for label in np.flatnonzero(seen == 0))
        return Split(train_rows, validation_rows, test_rows, absent, fallback)

    def standardise(self, fold: int) -> Standardised:
        """Centre and scale all rows by the training rows of one fold.

        The archive's values are already standardised, for most sets over all rows, test included. Doing it
        again by training rows leaves nothing of the test rows in the statistics, whatever the archive did.
        """
        split = self.split(fold)
        mean, scale = column_statistics(self.features[split.train])
        constant = scale == 0
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = (self.features - mean) / np.where(constant, 1.0, scale)
        features = np.where(constant, 0.0, scaled)
        self._need(bool(np.isfinite(features).all()), f"a column overflows when standardised (fold {fold})")
        return Standardised(features, self.labels, mean, scale, split)


def column_statistics(rows: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation (denominator n - 1) of each column; the deviation of a constant one is exactly 0."""
    size = np.abs(rows).max(axis=0)
    relative = rows / np.where(size > 0, size, 1.0)  # neither overflow nor underflow
    mean = relative.mean(axis=0)
    scale = np.sqrt(((relative - mean) ** 2).sum(axis=0) / max(len(rows) - 1, 1))
    constant = np.ptp(relative, axis=0) <= CONSTANT
    with np.errstate(over="ignore"):
        return mean * size, np.where(constant, 0.0, scale * size)


def encode_labels(raw: Sequence[int] | NDArray[Any]) -> tuple[NDArray[np.int64], tuple[int | str, ...]]:
    """Labels ``0 .. k - 1`` in sorted order of the original ones, and the original ones.

    Example:
        >>> labels, classes = encode_labels([7, 3, 7])
        >>> labels.tolist(), classes
        ([1, 0, 1], (3, 7))
    """
    classes, labels = np.unique(np.asarray(raw), return_inverse=True)
    return labels.reshape(-1).astype(np.int64), tuple(classes.tolist())
