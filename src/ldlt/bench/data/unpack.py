"""Zip files from elsewhere: looked through before use, and unpacked so that nothing can land outside."""

from __future__ import annotations

import shutil
import stat
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ldlt.bench.data.errors import ArchiveError, UnsafeArchiveError
from ldlt.bench.data.store import zip_errors

__all__ = ["LIMITS", "Limits", "audit", "unpack"]


@dataclass(frozen=True)
class Limits:
    """How large an archive may be when unpacked.

    Attributes:
        files: Number of files and folders.
        size: Bytes of all files together.
        ratio: Bytes of all files together, over bytes of the zip file.
    """

    files: int = 10_000
    size: int = 2 << 30
    ratio: float = 100.0


LIMITS = Limits()
"""The public archive has about 490 files, 270 MB, and a ratio of 7."""


def audit(path: str | Path, limits: Limits = LIMITS) -> int:
    """Refuse a zip file that is unsafe to unpack, by its directory alone.

    Refused are absolute paths, ``..``, backslashes, drive letters, control characters, links and devices,
    encrypted files, names that collide on some file system, parts that overlap, and anything above the
    limits.

    Args:
        path: The zip file.
        limits: Largest size allowed.

    Returns:
        Number of bytes it unpacks to.

    Raises:
        UnsafeArchiveError: Naming the first offending file.
        ArchiveError: If it is not a readable zip file.
    """
    path = Path(path)
    with zip_errors(path), zipfile.ZipFile(path) as file:
        infos = file.infolist()
        packed = path.stat().st_size
    total = sum(info.file_size for info in infos)
    if len(infos) > limits.files:
        raise UnsafeArchiveError(f"{path}: {len(infos):,} files, more than {limits.files:,}")
    if total > limits.size:
        raise UnsafeArchiveError(f"{path}: unpacks to {total:,} bytes, more than {limits.size:,}")
    if total > limits.ratio * packed:
        raise UnsafeArchiveError(f"{path}: unpacks to more than {limits.ratio:g} times its size")
    if sum(info.compress_size for info in infos) > packed:
        raise UnsafeArchiveError(f"{path}: its parts overlap")
    kinds: dict[str, bool] = {}  # folded name → is a folder
    for info in infos:
        reason = _objection(info) or _collision(info, kinds)
        if reason:
            raise UnsafeArchiveError(f"{path}: '{info.orig_filename[:200]!a}' {reason}")
    return total


def unpack(path: str | Path, destination: str | Path, limits: Limits = LIMITS) -> Path:
    """Unpack an audited zip file into a new folder: all of it or nothing.

    Args:
        path: The zip file.
        destination: Folder to make; it must not exist, or be empty.
        limits: Largest size allowed.

    Returns:
        The folder.

    Raises:
        UnsafeArchiveError: As :func:`audit`.
        ArchiveError: If the zip file is damaged, or the folder cannot be written or is not empty.
    """
    path, destination = Path(path), Path(destination)
    audit(path, limits)
    if destination.is_symlink() or (destination.exists() and (not destination.is_dir() or any(destination.iterdir()))):
        raise ArchiveError(f"{destination}: exists and is not an empty folder")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    except OSError as error:
        raise ArchiveError(f"{destination}: cannot be written ({error.strerror or error})") from None
    try:
        with zip_errors(path), zipfile.ZipFile(path) as file:
            for info in file.infolist():
                target = work.joinpath(*info.orig_filename.rstrip("/").split("/"))
                if info.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with file.open(info) as source, target.open("xb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)  # never more than the audited size
            work.chmod(0o755)
            if destination.exists():
                destination.rmdir()
            work.rename(destination)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return destination


def _objection(info: zipfile.ZipInfo) -> str:
    """Why a member must not be unpacked, or ``""``."""
    name = info.orig_filename
    if not name or not name.isprintable():
        return "has a name with control characters"
    if "\\" in name or ":" in name:
        return "has a backslash or a colon in its name"
    if name.startswith("/"):
        return "is an absolute path"
    if any(part in ("", ".", "..") for part in name.removesuffix("/").split("/")):
        return "leaves its folder"
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a device"
    return "is encrypted" if info.flag_bits & 1 else ""


def _collision(info: zipfile.ZipInfo, kinds: dict[str, bool]) -> str:
    """Whether a member would overwrite another one, on a file system with or without case."""
    parts = info.orig_filename.removesuffix("/").casefold().split("/")
    name = "/".join(parts)
    for depth in range(1, len(parts)):
        if not kinds.setdefault("/".join(parts[:depth]), True):
            return "lies below a file"
    if name in kinds and not (info.is_dir() and kinds[name]):
        return "occurs twice"
    kinds[name] = info.is_dir()
    return ""
