"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["TEMPORARY", "write_whole"]

TEMPORARY = ".tmp"
"""Ending of a file that is being written; one that is left over belongs to a process that was killed."""


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, then put it there in one step; once this returns it survives a loss of power.

    Raises:
        OSError: If the system refuses; an older file of this name is then as it was, and nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; file systems that cannot do this for folders are left alone."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
