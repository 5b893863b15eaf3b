"""Download of the public archive, verified before it gets its name; it is never unpacked to disk."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ldlt.errors import MissingExtraError
from ldlt_bench.data.archive import BROKEN, Archive, default_path
from ldlt_bench.data.errors import ArchiveError, FetchError, UnsafeArchiveError

__all__ = ["SETS", "URLS", "fetch_sets", "verify"]

URLS = (
    "http://www.bioinf.jku.at/people/klambauer/data_py.zip",
    "http://persoal.citius.usc.es/manuel.fernandez.delgado/papers/jmlr/data.tar.gz",
)
"""The two public addresses; the second has the layout of 2014 and is refused."""

SETS = 120
"""Complete data sets that the archive must have at least."""

LARGEST_DOWNLOAD, UNPACKED, RATIO = 1 << 28, 1 << 30, 100
"""Bytes of the zip file, bytes when unpacked, and the largest ratio of both. The public archive: 39 MB, 268 MB, 7."""

ATTEMPTS, WAIT = 3, 30.0


def verify(path: str | Path, sets: int = SETS) -> Archive:
    """Check a downloaded archive: sizes, every checksum inside the zip file, layout, number of data sets."""
    archive = Archive(path)
    try:
        with zipfile.ZipFile(path) as file:
            total = sum(info.file_size for info in file.infolist())
            if total > min(UNPACKED, RATIO * Path(path).stat().st_size):
                raise UnsafeArchiveError(f"{path}: unpacks to {total:,} bytes, {RATIO} times its size or more")
            damaged = file.testzip()
    except UnsafeArchiveError:
        raise
    except BROKEN as error:
        raise ArchiveError(f"{path}: damaged ({error})") from None
    if damaged is not None:
        raise ArchiveError(f"{path}: '{damaged}' is damaged")
    if len(archive) < sets:
        raise ArchiveError(f"{path}: {len(archive)} complete data sets instead of at least {sets}")
    return archive


def fetch_sets(
    destination: str | Path | None = None,
    *,
    urls: Sequence[str] = URLS,
    sha256: str | None = None,
    sets: int = SETS,
    progress: bool = False,
) -> Archive:
    """Download the archive if it is not there; only a verified one gets the final name, in one step.

    Args:
        destination: File to make, or a folder for ``data_py.zip``; None for the user's cache folder.
        urls: Addresses, tried in turn.
        sha256: Checksum of the file, if known.
        sets: As :func:`verify`.
        progress: Whether to show a bar on standard error.

    Raises:
        FetchError: If no address gives the archive; the message has the reason for each.
    """
    try:
        import pooch  # noqa: PLC0415
        from filelock import FileLock, Timeout  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(error.name or "pooch", "bench") from error
    pooch.get_logger().setLevel("WARNING")
    target = default_path() if destination is None else Path(destination).expanduser()
    target = target / "data_py.zip" if target.is_dir() else target
    reasons = []
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock"), timeout=0):
            if not _sound(target, sets, sha256):
                part = target.with_name(f".{target.name}.part")
                for url in urls:
                    part.unlink(missing_ok=True)
                    try:
                        one = pooch.create(
                            part.parent, "", registry={part.name: sha256 and sha256.lower()}, urls={part.name: url}
                        )
                        one.retry_if_failed = ATTEMPTS - 1
                        one.fetch(part.name, downloader=_Bounded(progress))
                        verify(part, sets)
                        os.replace(part, target)
                        break
                    except (ArchiveError, OSError, ValueError) as error:
                        reasons.append(f"{url}: {error}")
                    finally:
                        part.unlink(missing_ok=True)
                else:
                    raise FetchError(
                        "\n  ".join([f"{target.name} could not be fetched:", *(reasons or ["no address"])])
                    )
    except Timeout:
        raise FetchError(f"{target}: another download to this file is running; wait for it") from None
    except FetchError:
        raise
    except OSError as error:
        raise FetchError(f"{target}: cannot be written ({error.strerror or error})") from error
    return Archive(target)


def _sound(path: Path, sets: int, sha256: str | None) -> bool:
    import pooch  # noqa: PLC0415

    try:
        verify(path, sets)
    except ArchiveError:
        return False
    return sha256 is None or pooch.file_hash(str(path)) == sha256.lower()


class _Bounded:
    """A downloader for pooch that stops at a size, whatever the server says, and shows a bar of rich."""

    def __init__(self, progress: bool) -> None:
        self.progress = progress

    def __call__(self, url: str, output_file: str, pooch: Any, check_only: bool = False) -> None:
        import requests  # noqa: PLC0415
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import DownloadColumn, Progress  # noqa: PLC0415

        console = Console(stderr=True, quiet=not self.progress)
        with (
            requests.get(url, stream=True, timeout=WAIT) as answer,
            open(output_file, "wb") as file,
            Progress(*Progress.get_default_columns(), DownloadColumn(), console=console, transient=True) as bar,
        ):
            answer.raise_for_status()
            length = answer.headers.get("Content-Length", "")
            task = bar.add_task(url, total=int(length) if length.isdecimal() else None)
            for piece in answer.iter_content(1 << 16):
                file.write(piece)
                bar.advance(task, len(piece))
                if file.tell() > LARGEST_DOWNLOAD:
                    raise ValueError(f"more than {LARGEST_DOWNLOAD:,} bytes")
            if length.isdecimal() and file.tell() < int(length):
                raise ValueError(f"broke off after {file.tell():,} of {length} bytes")
