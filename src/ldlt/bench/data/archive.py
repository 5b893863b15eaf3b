"""The public archive of UCI data sets in the layout of Klambauer et al. (2017).

Per data set four files, in a folder of the set's name, at the top or below ``data/``: ``<name>_py.dat``
(features), ``labels_py.dat``, ``folds_py.dat`` and ``validation_folds_py.dat``, all comma-separated numbers
without header.
"""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ldlt.bench.data.dataset import Dataset, encode_labels
from ldlt.bench.data.errors import ArchiveError, FormatError, LayoutError, UnavailableSetError, UnknownSetError
from ldlt.bench.data.folds import FOLDS
from ldlt.bench.data.quirks import FLAGGED, quirks
from ldlt.bench.data.store import FolderStore, TarStore, open_store
from ldlt.bench.data.table import parse_table

__all__ = ["Archive", "Collection", "Finding", "Summary"]

Level = Literal["error", "unavailable", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        name: Name of the data set.
        level: ``error``: cannot be loaded; ``unavailable``: a part is missing; ``warning``: loads, but
            results need a remark; ``note``: worth knowing.
        message: What was found.
        file: File inside the archive, or ``""``.
        line: Line of the file from 1, or None.
        column: Column of the line from 1, or None.
    """

    name: str
    level: Level
    message: str
    file: str = ""
    line: int | None = None
    column: int | None = None


@dataclass(frozen=True)
class Summary:
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
    """The archive, as a zip file or an unpacked folder. Nothing is ever unpacked to disk.

    Args:
        path: ``data_py.zip``, or the folder it unpacks to.

    Raises:
        ArchiveError: If the path cannot be read as an archive.
        LayoutError: If it is another archive, such as that of 2014.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._store = open_store(self.path)
        members = self._store.members()
        self._folders = _find_sets(members)
        if not self._folders:
            raise LayoutError(f"{self.path}: {_describe(members, isinstance(self._store, FolderStore))}")
        if isinstance(self._store, TarStore):
            raise LayoutError(f"{self.path}: tar files are not read; unpack it and give the folder")
        self._members = frozenset(members)
        self._missing = {name: reason for name in self._folders if (reason := self._reason(name))}

    def __repr__(self) -> str:
        return f"Archive('{self.path}', sets={len(self.names())})"

    def __contains__(self, name: object) -> bool:
        return name in self._folders and name not in self._missing

    def __len__(self) -> int:
        return len(self._folders) - len(self._missing)

    def names(self) -> tuple[str, ...]:
        """Names of the complete data sets, sorted."""
        return tuple(name for name in self._folders if name not in self._missing)

    def unavailable(self) -> dict[str, str]:
        """Names of the incomplete data sets, with what is missing."""
        return dict(self._missing)

    def load(self, name: str) -> Dataset:
        """A data set by name, exactly as the archive has it; its notes say what its results need to be read.

        Raises:
            UnknownSetError: If there is no such set.
            UnavailableSetError: If one of its files is missing.
            FormatError: If one of its files is malformed.
            ArchiveError: If the archive is damaged there.
        """
        folder = self._locate(name)
        return self._assemble(name, [self._part(folder, file) for file in _files(name)])

    def summary(self, name: str) -> Summary:
        """Rows, columns and classes of a data set, from its labels and the first line of its features.

        Raises:
            DataError: As :meth:`load`, as far as these are read.
        """
        folder = self._locate(name)
        labels = self._labels(folder)
        first = parse_table(self._store.first_line(f"{folder}{name}_py.dat"), f"{folder}{name}_py.dat")
        return Summary(name, len(labels), first.shape[1], len(np.unique(labels)))

    def digest(self, name: str) -> str:
        """Short hash of the checksums of a set's four files, the same for the zip file and the unpacked folder.

        Raises:
            DataError: If one of them is missing or cannot be read.
        """
        folder = self._locate(name)
        sums = ",".join(f"{self._store.checksum(folder + file):08x}" for file in _files(name))
        return hashlib.sha256(sums.encode()).hexdigest()[:8]

    def check(self, name: str) -> list[Finding]:
        """Everything that is wrong or odd with a data set; never raises for a set that the archive knows.

        Raises:
            UnknownSetError: If there is no such set.
        """
        try:
            folder = self._locate(name)
        except UnavailableSetError as error:
            return [Finding(name, "unavailable", error.reason)]
        findings: list[Finding] = []
        parts: list[NDArray[Any]] = []
        for file in _files(name):
            try:
                parts.append(self._part(folder, file))
            except FormatError as error:
                findings.append(Finding(name, "error", error.reason, error.file, error.line, error.column))
            except ArchiveError as error:
                findings.append(Finding(name, "error", str(error), folder + file))
        if findings:
            return findings
        try:
            dataset = self._assemble(name, parts)
        except FormatError as error:
            return [Finding(name, "error", error.reason, error.file)]
        for quirk in quirks(dataset):
            severe: Level = "warning" if quirk.code in FLAGGED else "note"
            findings.append(Finding(name, "error" if quirk.code == "unusable-fold" else severe, str(quirk)))
        return findings

    def _locate(self, name: str) -> str:
        """Folder of a complete set inside the archive, with a slash at the end."""
        if name not in self._folders:
            near = difflib.get_close_matches(name, self._folders, n=3)
            hint = f"; do you mean {' or '.join(near)}?" if near else ""
            raise UnknownSetError(f"{self.path}: no data set '{name}'{hint}")
        if name in self._missing:
            raise UnavailableSetError(name, self._missing[name])
        return self._folders[name][0]

    def _reason(self, name: str) -> str:
        """Why a set cannot be loaded, or ``""``."""
        folders = self._folders[name]
        if len(folders) > 1:
            return f"it is there twice, as {' and '.join(folders)}"
        missing = [file for file in _files(name) if folders[0] + file not in self._members]
        if missing == [f"{name}_py.dat"]:
            return f"it has labels and folds but no features ({folders[0]}{name}_py.dat is missing)"
        return f"{', '.join(folders[0] + file for file in missing)} missing" if missing else ""

    def _assemble(self, name: str, parts: list[NDArray[Any]]) -> Dataset:
        """The data set of four parts, in the order of :func:`_files`."""
        features, labels, test, validation = parts
        rows = Counter(map(len, parts)).most_common(1)[0][0]
        for file, part in zip(_files(name), parts, strict=True):
            if len(part) != rows:
                raise FormatError(self._locate(name) + file, f"{len(part)} rows instead of {rows}, as other files have")
        encoded, classes = encode_labels(labels)
        dataset = Dataset(name, features, encoded, classes, test, validation, str(self.path))
        notes = tuple(str(quirk) for quirk in quirks(dataset) if quirk.code in FLAGGED)
        return replace(dataset, notes=notes)

    def _part(self, folder: str, file: str) -> NDArray[Any]:
        if file == "labels_py.dat":
            return self._labels(folder)
        if file in ("folds_py.dat", "validation_folds_py.dat"):
            return self._folds(folder, file)
        return parse_table(self._store.read(folder + file), folder + file)

    def _labels(self, folder: str) -> NDArray[np.int64]:
        file = folder + "labels_py.dat"
        values = parse_table(self._store.read(file), file, columns=1)[:, 0]
        wrong = np.flatnonzero((values != np.round(values)) | (np.abs(values) > 2**53))
        if wrong.size:
            raise FormatError(file, f"label {values[wrong[0]]:g} is not an integer", int(wrong[0]) + 1, 1)
        labels = values.astype(np.int64)
        if labels.min() == labels.max():
            raise FormatError(file, f"all labels are {labels[0]}: two or more classes are needed")
        return labels

    def _folds(self, folder: str, file: str) -> NDArray[np.bool_]:
        file = folder + file
        values = parse_table(self._store.read(file), file, columns=FOLDS)
        wrong = np.argwhere((values != 0) & (values != 1))
        if wrong.size:
            row, column = (int(index) for index in wrong[0])
            raise FormatError(file, f"{values[row, column]:g} is neither 0 nor 1", row + 1, column + 1)
        return values.astype(np.bool_)


def _files(name: str) -> tuple[str, str, str, str]:
    return f"{name}_py.dat", "labels_py.dat", "folds_py.dat", "validation_folds_py.dat"


def _find_sets(members: Iterable[str]) -> dict[str, list[str]]:
    """Names of all sets, sorted, with the folders that hold them (more than one is a fault)."""
    found: dict[str, set[str]] = {}
    for member in members:
        path = PurePosixPath(member)
        parents = path.parts[:-1]
        if len(parents) in (1, 2) and parents[:-1] in ((), ("data",)) and path.name in _files(parents[-1]):
            found.setdefault(parents[-1], set()).add("/".join(parents) + "/")
    return {name: sorted(found[name]) for name in sorted(found)}


def _describe(members: list[str], folder: bool) -> str:
    """Why there is no set in the archive, and what to do."""
    wanted = "data/<name>/<name>_py.dat, labels_py.dat, folds_py.dat, validation_folds_py.dat"
    names = [PurePosixPath(member).name for member in members]
    if any(name.endswith("_R.dat") or name.startswith("conxuntos") for name in names):
        return (
            "this is the layout of 2014 (<name>_R.dat, conxuntos_kfold.dat), which has no validation "
            f"folds and is not read; use data_py.zip by Klambauer et al. instead (ldlt data fetch): {wanted}"
        )
    if folder and "data_py.zip" in names:
        return "no data sets in this folder; give the path of the data_py.zip inside it"
    return f"no data sets found; expected {wanted}"
