"""Exceptions of the data side: all are :class:`~ldlt.errors.LdltError`, all say which file they mean."""

from __future__ import annotations

from ldlt.errors import LdltError


class DataError(LdltError, ValueError):
    """Base class: data that cannot be used as it is."""


class ArchiveError(DataError):
    """A file or folder that cannot be read: missing, truncated, damaged, not an archive at all."""


class LayoutError(ArchiveError):
    """An archive in another layout than the one this package reads."""


class UnsafeArchiveError(ArchiveError):
    """An archive that is refused before unpacking: too many or too large files."""


class UnknownSetError(DataError):
    """A data set name that the collection does not have."""


class UnavailableSetError(DataError):
    """A data set of which a part is missing."""


class FormatError(DataError):
    """A file with a wrong content; ``line`` and ``column`` count from 1, None if the whole file or line is meant."""

    def __init__(self, file: str, reason: str, line: int | None = None, column: int | None = None) -> None:
        place = file + (f", line {line}" if line else "") + (f", column {column}" if column else "")
        super().__init__(f"{place}: {reason}")
        self.file, self.reason, self.line, self.column = file, reason, line, column

    def __reduce__(self) -> tuple[type[FormatError], tuple[str, str, int | None, int | None]]:
        return type(self), (self.file, self.reason, self.line, self.column)


class DatasetError(DataError):
    """Arrays that do not make a data set: shapes that disagree, values not finite, no training rows."""


class FetchError(LdltError, OSError):
    """A download that failed at every address."""
