"""Files that are either whole or not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["atomic"]


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A place beside a file to write to, which takes the file's place in one step when the block ends well.

    Raises:
        OSError: The system refuses; an older file of this name is then as it was, and nothing is left behind.
    """
    place = Path(path)
    beside = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        yield beside
        os.replace(beside, place)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
