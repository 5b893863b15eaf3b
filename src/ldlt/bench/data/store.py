"""Where the files of an archive lie: inside a zip file, read without unpacking, or in a folder."""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from lzma import LZMAError
from pathlib import Path

from ldlt.bench.data.errors import ArchiveError

__all__ = ["FolderStore", "Store", "TarStore", "ZipStore", "open_store", "zip_errors"]

LARGEST = 1 << 30
"""Largest file that is read into memory, in bytes."""


class Store(ABC):
    """Read access to named files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def members(self) -> list[str]:
        """Names of all files, with forward slashes."""

    @abstractmethod
    def read(self, member: str) -> bytes:
        """The whole content of a file."""

    @abstractmethod
    def first_line(self, member: str) -> bytes:
        """The first line of a file."""

    def checksum(self, member: str) -> int:
        """CRC-32 of a file, the same in a zip file and in the folder it unpacks to."""
        return zlib.crc32(self.read(member))

    def _check_size(self, member: str, size: int) -> None:
        if size > LARGEST:
            raise ArchiveError(f"{self.path}: '{member}' has {size:,} bytes, more than {LARGEST:,}: not read")


class ZipStore(Store):
    """Files of a zip file. The file is opened for each call, so that nothing is shared between processes."""

    def members(self) -> list[str]:
        """Names of all files."""
        with zip_errors(self.path), zipfile.ZipFile(self.path) as file:
            return [info.filename for info in file.infolist() if not info.is_dir()]

    def read(self, member: str) -> bytes:
        """The whole content of a file."""
        with zip_errors(self.path, member), zipfile.ZipFile(self.path) as file:
            self._check_size(member, file.getinfo(member).file_size)
            return file.read(member)

    def first_line(self, member: str) -> bytes:
        """The first line of a file."""
        with zip_errors(self.path, member), zipfile.ZipFile(self.path) as file, file.open(member) as stream:
            return stream.readline(1 << 26)

    def checksum(self, member: str) -> int:
        """CRC-32 of a file, as the zip file's directory has it."""
        with zip_errors(self.path, member), zipfile.ZipFile(self.path) as file:
            return file.getinfo(member).CRC


class FolderStore(Store):
    """Files of a folder, two levels deep below it or below its ``data``."""

    def members(self) -> list[str]:
        """Names of all files."""
        with _folder_errors(self.path):
            tops = [self.path, self.path / "data"] if (self.path / "data").is_dir() else [self.path]
            found = [file for top in tops for pattern in ("*", "*/*") for file in top.glob(pattern) if file.is_file()]
            return sorted({file.relative_to(self.path).as_posix() for file in found})

    def read(self, member: str) -> bytes:
        """The whole content of a file."""
        with _folder_errors(self.path / member):
            self._check_size(member, (self.path / member).stat().st_size)
            return (self.path / member).read_bytes()

    def first_line(self, member: str) -> bytes:
        """The first line of a file."""
        with _folder_errors(self.path / member), (self.path / member).open("rb") as stream:
            return stream.readline(1 << 26)


class TarStore(Store):
    """A tar file, whose first names are read only to say what it is."""

    def members(self) -> list[str]:
        """Names of all files."""
        try:
            with tarfile.open(self.path) as file:
                return [member.name.removeprefix("./") for member in islice(file, 200) if member.isfile()]
        except (tarfile.TarError, OSError, EOFError, zlib.error, LZMAError) as error:
            raise ArchiveError(f"{self.path}: damaged tar file ({error})") from None

    def read(self, member: str) -> bytes:
        """Nothing: raises."""
        raise ArchiveError(f"{self.path}: '{member}' is not read, tar files are not supported")

    first_line = read


def open_store(path: Path) -> Store:
    """The store for a path.

    Raises:
        ArchiveError: If there is nothing, or something that is neither a folder nor an archive.
    """
    if path.is_dir():
        return FolderStore(path)
    if not path.exists():
        raise ArchiveError(f"{path}: no such file or folder")
    with _folder_errors(path), path.open("rb") as file:
        start = file.read(512)
    if start[:2] == b"PK":
        return ZipStore(path)
    try:
        if start and tarfile.is_tarfile(path):
            return TarStore(path)
    except (OSError, EOFError, zlib.error, LZMAError) as error:
        raise ArchiveError(f"{path}: damaged tar file ({error})") from None
    raise ArchiveError(f"{path}: {describe_start(start)}")


def describe_start(start: bytes) -> str:
    """What a file that should be a zip file is instead, by its first bytes."""
    if not start:
        return "the file is empty"
    if start[:2] == b"\x1f\x8b":
        return "a gzip file, not a zip file"
    if start.lstrip()[:1] == b"<":
        return "a web page, not a zip file"
    return "not a zip file"


@contextmanager
def zip_errors(path: Path, member: str | None = None) -> Iterator[None]:
    """Turn everything that a damaged zip file can raise into an :class:`ArchiveError`."""
    what = str(path) if member is None else f"{path}: '{member}'"
    try:
        yield
    except ArchiveError:
        raise
    except zipfile.BadZipFile as error:
        hint = "truncated or damaged zip file" if member is None else "damaged"
        raise ArchiveError(f"{what}: {hint} ({error}); fetch it again") from None
    except KeyError:
        raise ArchiveError(f"{what}: no such file in the archive") from None
    except (zlib.error, LZMAError, EOFError) as error:
        raise ArchiveError(f"{what}: damaged ({error or 'it ends too early'}); fetch the archive again") from None
    except OSError as error:
        raise ArchiveError(f"{what}: {error.strerror or error}") from None
    except (RuntimeError, NotImplementedError, ValueError) as error:  # encrypted, unknown method
        raise ArchiveError(f"{what}: cannot be read ({error})") from None


@contextmanager
def _folder_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read ({error.strerror or error})") from None
