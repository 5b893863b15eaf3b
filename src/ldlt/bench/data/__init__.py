"""Data of the benchmark: the public UCI archive, and embedded sets that need no download.

Example:
    >>> from ldlt.bench.data import Embedded
    >>> data = Embedded().load("tic-tac-toe")
    >>> fold = data.standardise(0)
    >>> [part[0].shape for part in (fold.train, fold.validation, fold.test)]
    [(574, 9), (144, 9), (240, 9)]
"""

from ldlt.bench.data.archive import Archive, Collection, Finding, Summary
from ldlt.bench.data.commands import (
    CheckReport,
    SetRow,
    check_sets,
    default_path,
    fetch_sets,
    format_table,
    list_sets,
    locate,
)
from ldlt.bench.data.dataset import Dataset, Split, Standardised
from ldlt.bench.data.embedded import RECIPES, Embedded, Recipe
from ldlt.bench.data.errors import (
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
from ldlt.bench.data.fetch import URLS, Policy, Progress, fetch, verify
from ldlt.bench.data.folds import FOLDS, make_folds
from ldlt.bench.data.quirks import QUIRKS, Quirk, quirks
from ldlt.bench.data.unpack import Limits, audit, unpack

__all__ = [
    "FOLDS",
    "QUIRKS",
    "RECIPES",
    "URLS",
    "Archive",
    "ArchiveError",
    "CheckReport",
    "Collection",
    "DataError",
    "Dataset",
    "DatasetError",
    "Embedded",
    "FetchError",
    "Finding",
    "FormatError",
    "LayoutError",
    "Limits",
    "Policy",
    "Progress",
    "Quirk",
    "Recipe",
    "SetRow",
    "Split",
    "Standardised",
    "Summary",
    "UnavailableSetError",
    "UnknownSetError",
    "UnsafeArchiveError",
    "audit",
    "check_sets",
    "default_path",
    "fetch",
    "fetch_sets",
    "format_table",
    "list_sets",
    "locate",
    "make_folds",
    "quirks",
    "unpack",
    "verify",
]
