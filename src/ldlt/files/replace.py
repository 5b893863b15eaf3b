"""Files that are either whole or as they were before."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ldlt.errors import OptionError

__all__ = ["TEMPORARY", "atomic", "readable", "show", "why", "writable", "write_whole"]

TEMPORARY = ".tmp"
"""Ending of a file that is being written; one that is left over belongs to a process that was killed."""

_LONGEST_NAME = 80


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A place beside a file to write to, which takes the file's place in one step when the block ends.

    Once the block has ended, the file survives a loss of power.

    Raises:
        OSError: If the system refuses; an older file of this name is then as it was, and nothing is left behind.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp()) / "numbers.txt"
        >>> with atomic(place) as beside:
        ...     _ = beside.write_text("1 2 3")
        >>> place.read_text()
        '1 2 3'
    """
    place = Path(path)
    beside = place.with_name(f".{place.name}.{os.getpid()}{TEMPORARY}")
    try:
        yield beside
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, place)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    with contextlib.suppress(OSError):  # make the rename durable, where the file system can
        folder = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file by :func:`atomic`."""
    with atomic(path) as beside:
        beside.write_bytes(content)


def readable(path: str | os.PathLike[str], what: str = "model") -> Path:
    """A file that is there.

    Raises:
        OptionError: There is none.
    """
    place = Path(path)
    try:
        if not place.is_file():
            reason = "is not a file" if place.exists() else "does not exist"
            raise OptionError(f"{what} {show(str(path))} {reason}")
    except (OSError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{what} {show(str(path))} cannot be read: {why(error)}") from error
    return place


def writable(path: str | os.PathLike[str], *suffixes: str) -> Path:
    """A place to write to, refused before the work and not after it.

    Raises:
        OptionError: It has another ending, or cannot be written to.
    """
    place, named = Path(path), f"cannot write {show(str(path))}"
    if place.suffix.lower() not in suffixes:
        raise OptionError(f"{named}: its name must end in {' or '.join(suffixes)}")
    try:
        if place.is_dir() or not place.parent.is_dir():
            raise OptionError(f"{named}: it is a folder, or its folder does not exist")
        if not os.access(place.parent, os.W_OK):
            raise OptionError(f"{named}: its folder cannot be written to")
    except (OSError, ValueError) as error:
        if isinstance(error, OptionError):
            raise
        raise OptionError(f"{named}: {why(error)}") from error
    return place


def why(error: Exception) -> str:
    """The reason without the name of the file, which can be long."""
    return getattr(error, "strerror", None) or str(error)


def show(name: str) -> str:
    """A name from elsewhere, safe to print: one short line without control characters, in quotes."""
    cut = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 3] + "..."
    return "'" + "".join(c if c.isprintable() else "?" for c in cut) + "'"
