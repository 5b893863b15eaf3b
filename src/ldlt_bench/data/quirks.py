"""The known oddities of the archive's sets, detected from the numbers and not from names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ldlt_bench.data.dataset import Dataset, column_statistics
from ldlt_bench.data.errors import DatasetError
from ldlt_bench.data.folds import FOLDS

__all__ = ["QUIRKS", "Quirk", "quirks"]

QUIRKS: dict[str, str] = {
    "fixed-test": "all four test folds are the same rows: only training and validation differ",
    "repeated-test": "some, not all, of the four test folds are the same rows",
    "overlapping-tests": "the test folds are separate splits: rows are tested several times or never",
    "validation-in-test": "rows are marked test and validation: they are test rows",
    "no-validation": "a fold has no validation rows: a stratified fifth of its training rows is used",
    "unusable-fold": "a fold has no training or no test rows",
    "few-training-rows": "fewer than ten training rows",
    "class-not-in-training": "a class has no training row",
    "class-not-in-validation": "a class has no validation row",
    "class-not-in-test": "a class has no test row",
    "constant-in-training": "columns are constant in training: standardising sets them to 0 everywhere",
    "not-standardised": "the columns do not have mean 0 and variance 1 over all rows",
    "raw-test-rows": "most test rows lie far outside the range of the other rows: another scale",
    "off-centre-training": "the rows outside the test fold are not centred as the test rows are",
    "scaled-separately": "test rows and other rows were centred apart: equal numbers mean different things",
}
"""What each code means."""

FLAGGED = ("class-not-in-training", "few-training-rows", "raw-test-rows", "off-centre-training", "scaled-separately")
"""Codes that a reader of results must know: they go into the notes of a data set."""

FAR = 10.0  # test rows this many times further out than any other row are on another scale
SHIFT = 0.5  # of the overall deviation: random splits of 20 or more rows stay below
CENTRED = 1e-4  # of the overall deviation: parts of a random split are never centred so well


class Quirk(NamedTuple):
    """One oddity of one data set: a key of :data:`QUIRKS`, what was measured, the folds 0 .. 3 it concerns."""

    code: str
    detail: str
    folds: tuple[int, ...]

    def __str__(self) -> str:
        where = "" if len(self.folds) == FOLDS else f" (fold {', '.join(map(str, self.folds))})"
        return f"{QUIRKS[self.code]}{where}: {self.detail}"


def quirks(dataset: Dataset) -> tuple[Quirk, ...]:
    """The oddities of a data set, in the order of :data:`QUIRKS`."""
    with np.errstate(all="ignore"):  # absurd values give no answer, not a warning
        found = [*_folds(dataset), *_parts(dataset), *_scales(dataset)]
    order = list(QUIRKS)
    return tuple(sorted(found, key=lambda quirk: order.index(quirk.code)))


def _folds(data: Dataset) -> Iterator[Quirk]:
    """Oddities of the fold matrices alone."""
    every = tuple(range(FOLDS))
    distinct = len({data.test_folds[:, fold].tobytes() for fold in every})
    if distinct == 1:
        yield Quirk("fixed-test", f"{int(data.test_folds[:, 0].sum())} test rows", every)
    else:
        if distinct < FOLDS:
            yield Quirk("repeated-test", f"{distinct} different test folds", every)
        times = data.test_folds.sum(axis=1)
        if (times != 1).any():
            detail = f"{int((times == 0).sum())} rows never tested, {int((times > 1).sum())} more than once"
            yield Quirk("overlapping-tests", detail, every)
    both = (data.test_folds & data.validation_folds).sum(axis=0)
    if both.any():
        yield Quirk("validation-in-test", f"{_by_fold(both)} rows", _where(both))


def _parts(data: Dataset) -> Iterator[Quirk]:
    """Oddities of training, validation and test rows."""
    bare, broken, sizes, constant = ([0] * FOLDS for _ in range(4))
    missing = {part: [0] * FOLDS for part in ("training", "validation", "test")}
    for fold in range(FOLDS):
        try:
            split = data.split(fold)
        except DatasetError:
            broken[fold] = 1
            continue
        bare[fold] = int(bool(split.fallback))
        sizes[fold] = split.train.size
        constant[fold] = int((column_statistics(data.features[split.train])[1] == 0).sum())
        for part, rows in (("training", split.train), ("validation", split.validation), ("test", split.test)):
            seen = np.bincount(data.labels[rows], minlength=len(data.classes))
            missing[part][fold] = int((seen == 0).sum())
    few = tuple(fold for fold in range(FOLDS) if 0 < sizes[fold] < 10)
    if few:
        yield Quirk("few-training-rows", f"{_by_fold(sizes)} rows", few)
    if any(constant):
        yield Quirk("constant-in-training", f"{_by_fold(constant)} of {data.columns} columns", _where(constant))
    for code, flags in (("no-validation", bare), ("unusable-fold", broken)):
        if any(flags):
            yield Quirk(code, f"{sum(flags)} of {FOLDS} folds", _where(flags))
    for part, counts in missing.items():
        if any(counts):
            yield Quirk(f"class-not-in-{part}", f"{_by_fold(counts)} of {len(data.classes)} classes", _where(counts))


def _scales(data: Dataset) -> Iterator[Quirk]:
    """Oddities of the values: how the rows of the test folds were scaled beside the others."""
    size = np.abs(data.features).max(axis=0)
    values = data.features / np.where(size > 0, size, 1.0)
    mean, deviation = values.mean(axis=0), values.std(axis=0, ddof=1 if data.rows > 1 else 0)
    varied = deviation > 0
    off = np.abs(mean[varied] * size[varied])
    spread = np.abs(deviation[varied] * size[varied] - 1.0)
    if off.size and max(off.max(), spread.max()) > 1e-2:
        detail = f"means up to {off.max():.3g}, deviations up to {(deviation * size).max():.3g}"
        yield Quirk("not-standardised", detail, tuple(range(FOLDS)))

    values = (values[:, varied] - mean[varied]) / deviation[varied]
    raw: dict[int, str] = {}
    shifted: dict[int, str] = {}
    apart: dict[int, str] = {}
    known: dict[bytes, int] = {}
    for fold in range(FOLDS):
        test = data.test_folds[:, fold]
        twin = known.setdefault(test.tobytes(), fold)
        if twin != fold:
            for result in (raw, shifted, apart):
                if twin in result:
                    result[fold] = result[twin]
            continue
        if not varied.any() or min(test.sum(), (~test).sum()) < 20:
            continue
        inside, outside = values[test], values[~test]
        far, reach = _distances(inside, outside)
        centre_in, centre_out = np.abs(inside.mean(axis=0)).max(), np.abs(outside.mean(axis=0)).max()
        if np.mean(far > FAR * reach) > 0.5:
            raw[fold] = f"{int((far > FAR * reach).sum())} of {far.size} test rows are {FAR:g} times further out"
        elif centre_out > SHIFT:
            shifted[fold] = f"mean up to {centre_out:.2f} deviations off"
        elif max(centre_in, centre_out) < CENTRED:
            apart[fold] = f"means of both parts below {CENTRED:g} deviations"
    for code, result in (("raw-test-rows", raw), ("off-centre-training", shifted), ("scaled-separately", apart)):
        if result:
            yield Quirk(code, next(iter(result.values())), tuple(sorted(result)))


def _distances(inside: NDArray[np.float64], outside: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Largest coordinate of each inside row, and of all outside rows, standardised by the outside rows."""
    centre, unit = outside.mean(axis=0), outside.std(axis=0, ddof=1)
    read = unit > 0
    if not read.any():
        return np.zeros(len(inside)), 1.0
    reach = float((np.abs(outside - centre)[:, read] / unit[read]).max())
    return (np.abs(inside - centre)[:, read] / unit[read]).max(axis=1), reach


def _where(counts: NDArray[np.int64] | list[int]) -> tuple[int, ...]:
    return tuple(fold for fold, count in enumerate(counts) if count)


def _by_fold(counts: NDArray[np.int64] | list[int]) -> str:
    return "by fold " + ", ".join(str(int(count)) for count in counts)
