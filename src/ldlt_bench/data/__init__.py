"""Data of the study: the public UCI archive, embedded sets that need no download, and images from files.

Example:
    >>> from ldlt_bench.data import Embedded
    >>> data = Embedded().load("tic-tac-toe")
    >>> fold = data.standardise(0)
    >>> [part[0].shape for part in (fold.train, fold.validation, fold.test)]
    [(574, 9), (144, 9), (240, 9)]
"""

from ldlt_bench.data.archive import Archive, Collection, Finding, Summary, locate
from ldlt_bench.data.dataset import Dataset, Split, Standardised
from ldlt_bench.data.embedded import RECIPES, Embedded, Recipe
from ldlt_bench.data.errors import (
    ArchiveError,
    DataError,
    DatasetError,
    FetchError,
    FormatError,
    LayoutError,
    UnavailableSetError,
    UnknownSetError,
    UnsafeArchiveError,
)
from ldlt_bench.data.fetch import fetch_sets, verify
from ldlt_bench.data.folds import FOLDS, make_folds
from ldlt_bench.data.quirks import QUIRKS, Quirk, quirks

__all__ = [
    "FOLDS",
    "QUIRKS",
    "RECIPES",
    "Archive",
    "ArchiveError",
    "Collection",
    "DataError",
    "Dataset",
    "DatasetError",
    "Embedded",
    "FetchError",
    "Finding",
    "FormatError",
    "LayoutError",
    "Quirk",
    "Recipe",
    "Split",
    "Standardised",
    "Summary",
    "UnavailableSetError",
    "UnknownSetError",
    "UnsafeArchiveError",
    "fetch_sets",
    "locate",
    "make_folds",
    "quirks",
    "verify",
]
