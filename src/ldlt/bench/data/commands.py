"""What ``ldlt data list|check|fetch`` does, as functions that return data, and a plain text table."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ldlt.bench.data.archive import Archive, Collection, Finding, Level
from ldlt.bench.data.embedded import RECIPES, Embedded
from ldlt.bench.data.errors import ArchiveError, DataError
from ldlt.bench.data.fetch import URLS, Progress, fetch
from ldlt.bench.data.unpack import unpack

__all__ = [
    "ENVIRONMENT",
    "CheckReport",
    "SetRow",
    "check_sets",
    "default_path",
    "fetch_sets",
    "format_table",
    "list_sets",
    "locate",
]

ENVIRONMENT = "LDLT_UCI"
"""Environment variable with the path of the archive."""


@dataclass(frozen=True)
class SetRow:
    """One line of ``ldlt data list``: sizes are None where they cannot be read, ``status`` says why."""

    name: str
    rows: int | None
    columns: int | None
    classes: int | None
    kind: str
    status: str


@dataclass(frozen=True)
class CheckReport:
    """Result of ``ldlt data check``.

    Attributes:
        checked: Number of data sets looked at.
        sound: Number of them that can be loaded and used.
        findings: Everything found, by data set.
    """

    checked: int
    sound: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether no set is damaged; a set that is merely unavailable does not count as damage."""
        return not self.of("error")

    def of(self, *levels: Level) -> tuple[Finding, ...]:
        """The findings of some levels."""
        return tuple(finding for finding in self.findings if finding.level in levels)

    def __str__(self) -> str:
        counts = ", ".join(f"{len(self.of(level))} {level}" for level in ("error", "unavailable", "warning", "note"))
        return f"{self.sound} of {self.checked} data sets can be used ({counts})"


def default_path() -> Path:
    """Where the archive is kept if nothing else is said: ``ldlt/data_py.zip`` in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "ldlt" / "data_py.zip"


def locate(path: str | Path | None = None) -> Path | None:
    """The archive to use: the given path, else that in ``LDLT_UCI``, else that in the cache folder, if any.

    Raises:
        ArchiveError: If a path that was asked for, as argument or in the environment, does not exist.
    """
    if path is not None:
        return _existing(Path(path).expanduser(), "")
    named = os.environ.get(ENVIRONMENT, "")
    if named:
        return _existing(Path(named).expanduser(), f" (from {ENVIRONMENT})")
    default = default_path()
    return default if default.exists() else None


def list_sets(archive: Collection | None = None) -> list[SetRow]:
    """Name, size and state of every data set; never raises for a set that cannot be read.

    Args:
        archive: An archive, or None for the embedded data sets.
    """
    collection: Collection = Embedded() if archive is None else archive
    missing = collection.unavailable()
    rows = []
    for name in sorted([*collection.names(), *missing]):
        kind = RECIPES[name].kind if isinstance(collection, Embedded) else "archive"
        if name in missing:
            rows.append(SetRow(name, None, None, None, kind, f"unavailable: {missing[name]}"))
            continue
        try:
            size = collection.summary(name)
            rows.append(SetRow(name, size.rows, size.columns, size.classes, kind, "ok"))
        except DataError as error:
            rows.append(SetRow(name, None, None, None, kind, f"error: {error}"))
    return rows


def check_sets(
    archive: Collection | None = None, names: Iterable[str] | None = None, progress: Callable[[str], None] | None = None
) -> CheckReport:
    """Read every data set completely and report all that is wrong or odd.

    Args:
        archive: An archive, or None for the embedded data sets.
        names: Data sets to look at, or None for all, also the unavailable ones.
        progress: Called with each name before it is read.

    Raises:
        UnknownSetError: If a given name does not exist.
    """
    collection: Collection = Embedded() if archive is None else archive
    chosen = sorted({*collection.names(), *collection.unavailable()} if names is None else set(names))
    findings: list[Finding] = []
    sound = 0
    for name in chosen:
        if progress is not None:
            progress(name)
        found = collection.check(name)
        sound += all(finding.level in ("warning", "note") for finding in found)
        findings += found
    return CheckReport(len(chosen), sound, tuple(findings))


def fetch_sets(
    destination: str | Path | None = None,
    *,
    folder: str | Path | None = None,
    urls: Sequence[str] = URLS,
    progress: Callable[[Progress], None] | None = None,
    sha256: str | None = None,
) -> Archive:
    """Download the archive if it is not there, and unpack it if asked to (it can be read without).

    Args:
        destination: File to make; None for :func:`default_path`.
        folder: Folder to unpack to, or None.
        urls: Addresses, the preferred one first.
        progress: Called after every piece.
        sha256: Checksum of the file, if known.

    Returns:
        The archive: the folder if unpacked, else the file.

    Raises:
        FetchError: If it cannot be downloaded.
        ArchiveError: If it cannot be unpacked.
    """
    path = fetch(default_path() if destination is None else destination, urls, progress, sha256=sha256)
    return Archive(path if folder is None else unpack(path, folder))


def format_table(rows: Sequence[Any], columns: Sequence[str] | None = None) -> str:
    """Rows as aligned text: numbers to the right, everything else to the left.

    Args:
        rows: Instances of one dataclass.
        columns: Fields to show, or None for all of them.

    Example:
        >>> print(format_table([SetRow("iris", 150, 4, 3, "archive", "ok")], ["name", "rows"]))
        name  rows
        ----  ----
        iris   150
    """
    if not rows:
        return "(nothing)"
    shown = list(columns) if columns is not None else [field.name for field in fields(rows[0])]
    values = [[getattr(row, column) for column in shown] for row in rows]
    texts = [[_text(value) for value in line] for line in values]
    right = [
        all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in column)
        for column in zip(*values, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(shown, *texts, strict=True)]
    lines = [shown, ["-" * width for width in widths], *texts]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _existing(path: Path, origin: str) -> Path:
    if not path.exists():
        raise ArchiveError(f"{path}{origin}: no such file or folder")
    return path


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return " ".join(text.split())  # one line, whatever a message holds
