"""Bytes of files from elsewhere: compressed or not by what they contain, and never more than asked for."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ldlt.bench.data.errors import ArchiveError, UnavailableSetError

__all__ = ["LARGEST", "STEP", "Bounded", "capacity", "chosen_path", "opened", "read_errors"]

LARGEST = 1 << 29
"""Largest content of a file, in bytes. The training images of MNIST have 47 million, all of CIFAR-10 184 million."""

STEP = 1 << 20
"""Bytes that are read at once: memory grows with what is there, not with what a header promises."""

_GZIP = b"\x1f\x8b"
_DEFLATE = 1032  # no deflate stream unpacks to more than this many times its size


class Bounded(io.RawIOBase):
    """A stream that refuses to give more than a number of bytes: compressed files may unpack to anything."""

    def __init__(self, stream: IO[bytes], path: Path, limit: int = LARGEST) -> None:
        super().__init__()
        self._stream, self._path, self._limit, self._given = stream, path, limit, 0

    def readable(self) -> bool:
        """True."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """At most ``size`` bytes."""
        found = self._stream.read(STEP if size < 0 else min(size, STEP))
        self._given += len(found)
        if self._given > self._limit:
            raise ArchiveError(f"{self._path}: unpacks to more than {self._limit:,} bytes, which is no set of images")
        return found


@contextmanager
def opened(path: Path) -> Iterator[Bounded]:
    """The content of a file, unpacked if it is a gzip file."""
    with read_errors(path), path.open("rb") as file:
        packed = file.read(2) == _GZIP
        file.seek(0)
        if not packed:
            yield Bounded(file, path)
            return
        with gzip.GzipFile(fileobj=file) as content:
            yield Bounded(content, path)  # type: ignore[arg-type]


def capacity(path: Path) -> int:
    """Number of bytes that the content of a file can have at most."""
    with read_errors(path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return min(LARGEST, size * _DEFLATE if file.read(2) == _GZIP else size)


@contextmanager
def read_errors(path: Path) -> Iterator[None]:
    """Turn everything that a damaged file can raise into an :class:`ArchiveError`."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArchiveError(f"{path}: truncated or damaged gzip file ({error}); get it again") from None
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read ({error.strerror or error})") from None


def chosen_path(given: str | os.PathLike[str] | None, variable: str, usual: str | None, name: str, advice: str) -> Path:
    """Where a data set lies: argument, else environment variable, else the usual place.

    Raises:
        UnavailableSetError: There is nothing, with the advice how to get it.
    """
    if given is not None:
        path, origin = Path(given), "the path that was given"
    elif os.environ.get(variable):
        path, origin = Path(os.environ[variable]), f"from ${variable}"
    elif usual is not None:
        path, origin = Path(usual), "the usual place"
    else:
        raise UnavailableSetError(name, f"pass its path or set {variable}. {advice}")
    path = path.expanduser()
    if not path.exists():
        raise UnavailableSetError(name, f"{path} ({origin}) does not exist. {advice}")
    return path
