"""Download of the public archive, verified before it gets its name; unpacking within bounds."""

from __future__ import annotations

import os
import stat
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ldlt.errors import MissingExtraError
from ldlt_bench.data.archive import BROKEN, FILES, Archive, default_path
from ldlt_bench.data.errors import ArchiveError, FetchError, UnsafeArchiveError

__all__ = ["LARGEST_DOWNLOAD", "RATIO", "SETS", "UNPACKED", "URLS", "audit", "fetch_sets", "unpack", "verify"]

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


def audit(path: str | Path) -> int:
    """Refuse a zip file that is unsafe to unpack, by its directory alone.

    Refused are names that leave the folder or occur twice, links, devices, encrypted files, and all above the limits.

    Returns:
        Number of bytes it unpacks to.

    Raises:
        UnsafeArchiveError: Naming the first offending file.
        ArchiveError: If it is not a readable zip file.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as file:
            infos = file.infolist()
    except BROKEN as error:
        raise ArchiveError(f"{path}: not a readable zip file ({error})") from None
    total = sum(info.file_size for info in infos)
    if len(infos) > FILES or total > min(UNPACKED, RATIO * path.stat().st_size):
        limits = f"{FILES:,} files, {UNPACKED:,} bytes or {RATIO} times its size"
        raise UnsafeArchiveError(f"{path}: {len(infos):,} files of {total:,} bytes are more than {limits}")
    seen: set[str] = set()
    for info in infos:
        name = info.orig_filename
        parts = name.removesuffix("/").split("/")
        kind = stat.S_IFMT(info.external_attr >> 16)
        if not name.isprintable() or set(name) & set("\\:") or set(parts) & {"", ".", ".."} or name.casefold() in seen:
            raise UnsafeArchiveError(f"{path}: the name {name[:200]!a} leaves the folder or occurs twice")
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR) or info.flag_bits & 1:
            raise UnsafeArchiveError(f"{path}: {name[:200]!a} is a link, a device or encrypted")
        seen.add(name.casefold())
    return total


def unpack(path: str | Path, destination: str | Path) -> Path:
    """Unpack an audited zip file into a new folder: all of it or nothing.

    Raises:
        UnsafeArchiveError: As :func:`audit`.
        ArchiveError: If the zip file is damaged, or the folder cannot be written or is not empty.
    """
    path, destination = Path(path), Path(destination)
    audit(path)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ArchiveError(f"{destination}: exists and is not an empty folder")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=destination.parent, prefix=f".{destination.name}.") as work:
            with zipfile.ZipFile(path) as file:
                file.extractall(Path(work) / "all")  # of each file at most the audited size
            if destination.exists():
                destination.rmdir()
            (Path(work) / "all").rename(destination)
    except BROKEN as error:
        raise ArchiveError(f"{destination}: cannot unpack {path} ({error})") from None
    return destination


def verify(path: str | Path, sets: int = SETS) -> Archive:
    """Check a downloaded archive: sizes, every checksum inside the zip file, layout, number of data sets.

    Raises:
        ArchiveError: If something is wrong.
    """
    archive = Archive(path)
    audit(path)
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
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
    folder: str | Path | None = None,
    urls: Sequence[str] = URLS,
    sha256: str | None = None,
    sets: int = SETS,
    progress: bool = False,
) -> Archive:
    """Download the archive if it is not there, and unpack it if asked to (it can be read without).

    The addresses are tried in turn. Only a verified archive gets the final name, in one step.

    Args:
        destination: File to make, or a folder for ``data_py.zip``; None for the user's cache folder.
        folder: Folder to unpack to, or None.
        urls: Addresses, the preferred one first.
        sha256: Checksum of the file, if known.
        sets: As :func:`verify`.
        progress: Whether to show a bar on standard error.

    Returns:
        The archive: the folder if unpacked, else the file.

    Raises:
        FetchError: If no address gives the archive; the message has the reason for each.
        ArchiveError: If it cannot be unpacked.
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
    return Archive(target if folder is None else unpack(target, folder))


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
