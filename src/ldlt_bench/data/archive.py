"""The public archive of UCI data sets in the layout of Klambauer et al. (2017), as a zip file or a folder.

Per data set four files, in a folder of the set's name, at the top or below ``data/``: ``<name>_py.dat`` (features),
``labels_py.dat``, ``folds_py.dat`` and ``validation_folds_py.dat``, all comma-separated numbers without header. A zip
file is read in memory and never unpacked; what a file may take is bounded before it is read.
"""

from __future__ import annotations

import difflib
import hashlib
import io
import lzma
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ldlt_bench.data.dataset import Dataset, encode_labels
from ldlt_bench.data.errors import (
    ArchiveError,
    DataError,
    FormatError,
    LayoutError,
    UnavailableSetError,
    UnknownSetError,
    UnsafeArchiveError,
)
from ldlt_bench.data.folds import FOLDS
from ldlt_bench.data.quirks import FLAGGED, quirks

__all__ = ["ENVIRONMENT", "Archive", "Collection", "Finding", "Summary", "locate", "parse_table", "unknown"]

ENVIRONMENT = "LDLT_UCI"
"""Environment variable with the path of the archive."""

LARGEST, CELLS, FILES = 1 << 27, 1 << 24, 10_000
"""Bytes and numbers of a table, and files of an archive, at most (the largest set has 6.5 million numbers)."""

BROKEN = (OSError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError)
"""Everything that a damaged zip file can raise."""

Level = Literal["error", "unavailable", "warning", "note"]
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Finding(NamedTuple):
    """One result of a check of a data set, with file, line and column where there are any.

    ``error``: cannot be loaded; ``unavailable``: a part is missing; ``warning``: loads, but results need a remark;
    ``note``: worth knowing.
    """

    name: str
    level: Level
    message: str


class Summary(NamedTuple):
    """Size of a data set, read without its features."""

    name: str
    rows: int
    columns: int
    classes: int


class Collection(Protocol):
    """What the archive and the embedded sets have in common."""

    def names(self) -> tuple[str, ...]:
        """Names of the data sets that can be loaded."""

    def unavailable(self) -> dict[str, str]:
        """Names and reasons of those that cannot."""

    def load(self, name: str) -> Dataset:
        """A data set by name."""

    def summary(self, name: str) -> Summary:
        """Its size."""

    def digest(self, name: str) -> str:
        """Short hash of its content: results of different data are never mixed."""

    def check(self, name: str) -> list[Finding]:
        """Everything that is wrong or odd with it."""


class Archive:
    """The archive, as a zip file or an unpacked folder.

    Args:
        path: ``data_py.zip``, or the folder it unpacks to.

    Raises:
        ArchiveError: If the path cannot be read as an archive.
        LayoutError: If it is another archive, such as that of 2014.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._sizes = self._members()
        places: dict[str, set[str]] = {}
        for member in self._sizes:
            *above, folder, file = ["", *member.split("/")][-3:]
            if member in (f"{folder}/{file}", f"data/{folder}/{file}") and file in _files(folder):
                places.setdefault(folder, set()).add(f"{'/'.join(above)}/{folder}/".lstrip("/"))
        if not places:
            raise LayoutError(f"{self.path}: {_describe(self._sizes)}")
        self._folders = {name: min(places[name]) for name in sorted(places)}
        self._missing: dict[str, str] = {}
        for name, folder in self._folders.items():
            gone = [folder + file for file in _files(name) if folder + file not in self._sizes]
            if len(places[name]) > 1:
                self._missing[name] = f"it is there twice, as {' and '.join(sorted(places[name]))}"
            elif gone:
                self._missing[name] = f"{', '.join(gone)} missing"

    def __repr__(self) -> str:
        return f"Archive('{self.path}', sets={len(self)})"

    def __len__(self) -> int:
        return len(self._folders) - len(self._missing)

    def names(self) -> tuple[str, ...]:
        """Names of the complete data sets, sorted."""
        return tuple(name for name in self._folders if name not in self._missing)

    def unavailable(self) -> dict[str, str]:
        """Names of the incomplete data sets, with what is missing."""
        return dict(self._missing)

    def load(self, name: str) -> Dataset:
        """A data set by name, exactly as the archive has it; its notes say what its results need to be read."""
        folder = self._locate(name)
        parts = [self._part(folder, file) for file in _files(name)]
        rows = Counter(map(len, parts)).most_common(1)[0][0]
        for file, part in zip(_files(name), parts, strict=True):
            if len(part) != rows:
                raise FormatError(folder + file, f"{len(part)} rows instead of {rows}, as other files have")
        labels, classes = encode_labels(parts[1][:, 0])
        dataset = Dataset(name, parts[0], labels, classes, parts[2], parts[3], str(self.path))
        return replace(dataset, notes=tuple(str(quirk) for quirk in quirks(dataset) if quirk.code in FLAGGED))

    def summary(self, name: str) -> Summary:
        """Rows, columns and classes of a data set, from its labels and the first line of its features."""
        folder = self._locate(name)
        labels = self._part(folder, "labels_py.dat")
        with self._open(f"{folder}{name}_py.dat") as stream:
            columns = stream.readline(LARGEST).count(b",") + 1
        return Summary(name, len(labels), columns, len(np.unique(labels)))

    def digest(self, name: str) -> str:
        """Short hash of the checksums of a set's four files, the same for the zip file and the unpacked folder."""
        folder = self._locate(name)
        sums = ",".join(f"{zlib.crc32(self._read(folder + file)):08x}" for file in _files(name))
        return hashlib.sha256(sums.encode()).hexdigest()[:8]

    def check(self, name: str) -> list[Finding]:
        """Everything that is wrong or odd with a data set; raises for unknown names only."""
        try:
            folder = self._locate(name)
        except UnavailableSetError as error:
            return [Finding(name, "unavailable", str(error))]
        findings: list[Finding] = []
        for file in _files(name):
            try:
                self._part(folder, file)
            except DataError as error:
                findings.append(Finding(name, "error", str(error)))
        try:
            dataset = self.load(name)
        except DataError as error:
            return findings or [Finding(name, "error", str(error))]
        levels: dict[str, Level] = {**dict.fromkeys(FLAGGED, "warning"), "unusable-fold": "error"}
        return [Finding(name, levels.get(quirk.code, "note"), str(quirk)) for quirk in quirks(dataset)]

    def _members(self) -> dict[str, int]:
        """Names of all files, with forward slashes, and their sizes when unpacked."""
        with self._errors(""):
            if self.path.is_dir():
                found = [p for top in ("", "data/") for p in self.path.glob(f"{top}*/*") if p.is_file()]
                return {p.relative_to(self.path).as_posix(): p.stat().st_size for p in found}
            with self.path.open("rb") as file:
                start = file.read(2)
            if start == b"\x1f\x8b":
                raise LayoutError(f"{self.path}: a gzip file, not a zip file; {_describe(['conxuntos_kfold.dat'])}")
            with zipfile.ZipFile(self.path) as packed:
                infos = packed.infolist()
            if len(infos) > FILES:
                raise UnsafeArchiveError(f"{self.path}: {len(infos):,} files, more than {FILES:,}")
            return {info.filename: info.file_size for info in infos if not info.is_dir()}

    @contextmanager
    def _errors(self, member: str) -> Iterator[None]:
        """Turn everything that a damaged archive can raise into an :class:`ArchiveError`."""
        try:
            yield
        except DataError:
            raise
        except BROKEN as error:
            raise ArchiveError(f"{self.path}: {member} cannot be read ({error}); get it again if damaged") from None

    @contextmanager
    def _open(self, member: str) -> Iterator[Any]:
        size = self._sizes[member]
        if size > LARGEST:
            raise UnsafeArchiveError(f"{self.path}: '{member}' has {size:,} bytes, more than {LARGEST:,}: not read")
        with self._errors(member):
            if self.path.is_dir():
                with (self.path / member).open("rb") as stream:
                    yield stream
            else:  # opened anew each time, so that nothing is shared between processes
                with zipfile.ZipFile(self.path) as packed, packed.open(member) as stream:
                    yield stream

    def _read(self, member: str) -> bytes:
        with self._open(member) as stream:
            return stream.read(LARGEST + 1)  # type: ignore[no-any-return]

    def _locate(self, name: str) -> str:
        """Folder of a complete set inside the archive, with a slash at the end."""
        if name in self._missing:
            raise UnavailableSetError(f"data set '{name}' is unavailable: {self._missing[name]}")
        if name not in self._folders:
            raise unknown(name, self._folders, str(self.path))
        return self._folders[name]

    def _part(self, folder: str, file: str) -> NDArray[Any]:
        """One of the four tables, checked: features float64, labels int64 (N, 1), folds boolean (N, 4)."""
        kind = {"labels_py.dat": 1, "folds_py.dat": FOLDS, "validation_folds_py.dat": FOLDS}.get(file)
        values = parse_table(self._read(folder + file), folder + file, kind)
        if kind is None:
            return values
        wrong = (values != np.round(values)) | (np.abs(values) > 2**53) if kind == 1 else (values != 0) & (values != 1)
        if wrong.any():
            row, column = (int(index) for index in np.argwhere(wrong)[0])
            wanted = "an integer" if kind == 1 else "0 or 1"
            raise FormatError(folder + file, f"{values[row, column]:g} is not {wanted}", row + 1, column + 1)
        if kind == 1 and values.min() == values.max():
            raise FormatError(folder + file, "all labels are the same: two or more classes are needed")
        return values.astype(np.int64 if kind == 1 else np.bool_)


def parse_table(data: bytes, file: str, columns: int | None = None) -> NDArray[np.float64]:
    """Finite numbers (lines, columns) of a text file, whose name is for messages; with ``columns`` columns if given."""
    if len(data) > LARGEST or data.count(b",") + data.count(b"\n") > CELLS:
        raise FormatError(file, f"more than {LARGEST:,} bytes or {CELLS:,} numbers: not read")
    data = data.rstrip()
    if not data:
        raise FormatError(file, "the file is empty")
    try:
        table = np.loadtxt(io.BytesIO(data), delimiter=",", comments=None, ndmin=2)
    except ValueError:
        raise _explain(data, file, columns) from None
    if len(table) != data.count(b"\n") + 1 or columns not in (None, table.shape[1]) or not np.isfinite(table).all():
        raise _explain(data, file, columns)
    return table


def _explain(data: bytes, file: str, columns: int | None) -> FormatError:
    """The first thing that is wrong with a table that did not parse."""
    lines = data.decode("latin-1").split("\n")
    wanted = columns or Counter(line.count(",") + 1 for line in lines[:100]).most_common(1)[0][0]
    for number, line in enumerate(lines, 1):
        cells = [cell.strip() for cell in line.split(",")]
        for column, cell in enumerate(cells[:wanted], 1):
            if not _NUMBER.fullmatch(cell) or not np.isfinite(float(cell)):
                return FormatError(file, f"{cell[:40]!r} is not a finite number", number, column)
        if len(cells) != wanted:
            return FormatError(file, f"{len(cells)} columns instead of {wanted}", number, min(len(cells), wanted + 1))
    return FormatError(file, "not a table of comma-separated numbers")


def locate(path: str | Path | None = None) -> Path | None:
    """The archive to use: the given path, else that in ``LDLT_UCI``, else that in the cache folder, if any."""
    asked = path if path is not None else os.environ.get(ENVIRONMENT) or None
    found = Path(asked).expanduser() if asked is not None else default_path()
    if found.exists():
        return found
    if asked is None:
        return None
    raise ArchiveError(f"{found}{'' if path is not None else f' (from {ENVIRONMENT})'}: no such file or folder")


def default_path() -> Path:
    """Where the archive is kept if nothing else is said: ``ldlt/data_py.zip`` in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "ldlt" / "data_py.zip"


def unknown(name: str, names: Any, where: str) -> UnknownSetError:
    """The error for a name that a collection does not have, with names that are alike."""
    near = difflib.get_close_matches(name, list(names), n=3)
    hint = f"; do you mean {' or '.join(near)}?" if near else ""
    return UnknownSetError(f"{where}: no data set '{name}'{hint} (ldlt data list shows them)")


def _files(name: str) -> tuple[str, str, str, str]:
    return f"{name}_py.dat", "labels_py.dat", "folds_py.dat", "validation_folds_py.dat"


def _describe(members: Any) -> str:
    """Why there is no set in an archive, and what to do."""
    if any(name.endswith(("_R.dat", "conxuntos_kfold.dat")) for name in members):
        return (
            "the layout of 2014 (<name>_R.dat, conxuntos_kfold.dat) has no validation folds and is not read; "
            "get data_py.zip by Klambauer et al. instead:  ldlt data fetch"
        )
    return "no data sets found; expected data/<name>/ with " + ", ".join(_files("<name>"))
