"""Stratified folds: every class is spread evenly, everything is a function of labels and key."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ldlt.bench.data.stream import Stream

__all__ = ["FOLDS", "VALIDATION_SHARE", "make_folds", "stratified_parts", "stratified_sample"]

FOLDS = 4
"""Number of test folds of every data set."""

VALIDATION_SHARE = 0.2
"""Share of the rows outside the test fold that validate, as in the archive."""


def stratified_parts(labels: NDArray[np.int64], parts: int, stream: Stream) -> NDArray[np.int64]:
    """Deal the rows of every class, shuffled, to the parts in turn.

    The dealing goes on from class to class, so part sizes differ by at most one, and so do class counts.

    Args:
        labels: (N,) class of each row.
        parts: Number of parts.
        stream: Source of the shuffling.

    Returns:
        (N,) part of each row, ``0 .. parts - 1``.
    """
    part = np.empty(labels.size, dtype=np.int64)
    dealt = 0
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        part[rows[stream.permutation(rows.size)]] = (dealt + np.arange(rows.size)) % parts
        dealt += rows.size
    return part


def stratified_sample(
    labels: NDArray[np.int64], rows: NDArray[np.int64], share: float, stream: Stream
) -> NDArray[np.int64]:
    """Take a share of the given rows, class by class, and leave at least one row of every class.

    If the share rounds to nothing in every class, one row of the largest class is taken, provided that it
    has two.

    Args:
        labels: (N,) class of each row.
        rows: Candidate row numbers.
        share: Share to take of each class, rounded half up.
        stream: Source of the choice.

    Returns:
        Sorted row numbers, possibly none (only if no class has two candidates).
    """
    groups = [rows[labels[rows] == label] for label in np.unique(labels[rows])]
    counts = [min(math.floor(share * group.size + 0.5), group.size - 1) for group in groups]
    if groups and not any(counts):
        largest = max(range(len(groups)), key=lambda g: groups[g].size)
        counts[largest] = min(1, groups[largest].size - 1)
    taken = [g[stream.permutation(g.size)[:count]] for g, count in zip(groups, counts, strict=True)]
    return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *taken]))


def make_folds(labels: NDArray[np.int64], key: str) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Test and validation folds for a data set that comes without.

    The test folds are a stratified partition into four (every row is tested once: the archive's own folds
    are four separate splits of the same size); the validation fold is a stratified fifth of the rest, as
    large as the archive's.

    Args:
        labels: (N,) class of each row.
        key: Name of the data set.

    Returns:
        Two boolean arrays (N, 4): test and validation membership.
    """
    part = stratified_parts(labels, FOLDS, Stream("test folds", key))
    test = part[:, None] == np.arange(FOLDS)
    validation = np.zeros_like(test)
    for fold in range(FOLDS):
        rest = np.flatnonzero(~test[:, fold])
        chosen = stratified_sample(labels, rest, VALIDATION_SHARE, Stream("validation folds", key, fold))
        validation[chosen, fold] = True
    return test, validation
