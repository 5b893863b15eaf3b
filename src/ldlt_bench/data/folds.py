"""Stratified folds, from random numbers that stay the same for ever."""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["FOLDS", "VALIDATION_SHARE", "Stream", "make_folds", "stratified_parts", "stratified_sample"]

FOLDS = 4
"""Number of test folds of every data set."""

VALIDATION_SHARE = 0.2
"""Share of the rows outside the test fold that validate, as in the archive."""


class Stream:
    """Deterministic random numbers for a key, from the raw output of PCG64.

    ``numpy.random.Generator`` may change its distributions between releases; the raw 64-bit output of a bit generator
    may not. Everything random about the data is derived from it by the few formulas below.

    Args:
        key: Anything with a stable text form; equal keys give equal streams.

    Example:
        >>> Stream("iris", 0).permutation(5).tolist() == Stream("iris", 0).permutation(5).tolist()
        True
    """

    def __init__(self, *key: str | int) -> None:
        digest = hashlib.sha256("/".join(str(part) for part in key).encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest[:16], "little"))

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """Uniform numbers in [0, 1), 53 bits each."""
        raw = np.asarray(self._bits.random_raw(math.prod(shape)), dtype=np.uint64)
        return ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape)

    def normal(self, *shape: int) -> NDArray[np.float64]:
        """Standard normal numbers (Box and Muller, the cosine branch only)."""
        radius = np.sqrt(-2.0 * np.log1p(-self.uniform(*shape)))
        return radius * np.cos(2.0 * np.pi * self.uniform(*shape))

    def integers(self, high: int, *shape: int) -> NDArray[np.int64]:
        """Integers in ``0 .. high - 1``."""
        return np.floor(self.uniform(*shape) * high).astype(np.int64)

    def permutation(self, size: int) -> NDArray[np.int64]:
        """The numbers ``0 .. size - 1`` in random order."""
        return np.argsort(self.uniform(size), kind="stable").astype(np.int64)


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
    """Take a share of the given rows, class by class (rounded half up), and leave at least one row of every class.

    If the share rounds to nothing in every class, one row of the largest class is taken, provided that it has two.

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
    """Test and validation folds for a data set that comes without: two boolean arrays (N, 4).

    The test folds are a stratified partition into four (every row is tested once); the validation fold is a stratified
    fifth of the rest, as large as the archive's.

    Args:
        labels: (N,) class of each row.
        key: Name of the data set.
    """
    part = stratified_parts(labels, FOLDS, Stream("test folds", key))
    test = part[:, None] == np.arange(FOLDS)
    validation = np.zeros_like(test)
    for fold in range(FOLDS):
        rest = np.flatnonzero(~test[:, fold])
        chosen = stratified_sample(labels, rest, VALIDATION_SHARE, Stream("validation folds", key, fold))
        validation[chosen, fold] = True
    return test, validation
