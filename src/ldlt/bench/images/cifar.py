"""CIFAR-10 in its binary version: records of one label and 3 × 32 × 32 bytes, colour by colour.

Reference: A. Krizhevsky, *Learning multiple layers of features from tiny images*, technical report, 2009.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ldlt.bench.data.errors import ArchiveError, FormatError, LayoutError, UnavailableSetError
from ldlt.bench.images.content import LARGEST, Bounded, chosen_path, opened
from ldlt.bench.images.image_set import ImageSet, Splits

__all__ = ["CIFAR10", "cifar10", "read_batch"]

CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
"""Classes of CIFAR-10, by label."""

_SHAPE = (3, 32, 32)
_RECORD = 1 + 3 * 32 * 32
_FOLDER = "cifar-10-batches-bin"
_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_TEST = "test_batch.bin"
_MEMBERS = 1000  # the archive has ten
_ADVICE = (
    "Get cifar-10-binary.tar.gz (the binary version, not the one for Python or Matlab) from "
    "https://www.cs.toronto.edu/~kriz/cifar.html and pass its path, or set LDLT_CIFAR10 to it"
)


def read_batch(content: bytes, file: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, 3, 32, 32) and labels (n,) of one file.

    Args:
        content: The whole file.
        file: Its name, for messages.

    Raises:
        FormatError: Not a whole number of records, or a label above 9.
    """
    if not content or len(content) % _RECORD:
        raise FormatError(
            file, f"{len(content):,} bytes are not a whole number of records of {_RECORD:,}: truncated, get it again"
        )
    table = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    labels = table[:, 0]
    if int(labels.max()) >= len(CIFAR10):
        row = int(np.argmax(labels >= len(CIFAR10)))
        raise FormatError(
            file, f"label {labels[row]} of image {row} (from 0) is not in 0 … 9: not the binary version of CIFAR-10"
        )
    return table[:, 1:].reshape(-1, *_SHAPE), labels.astype(np.int64)


def cifar10(path: str | os.PathLike[str] | None = None) -> Splits:
    """CIFAR-10: 50,000 training and 10,000 test images of 32 × 32 pixels and three colours.

    Args:
        path: The file ``cifar-10-binary.tar.gz``, which is read in memory and not unpacked, or the folder
            ``cifar-10-batches-bin``, or the folder around it. By default ``$LDLT_CIFAR10``.

    Raises:
        UnavailableSetError: There is no such path, or a file is missing.
        LayoutError: It is another version of CIFAR-10.
        FormatError: A file has a wrong content.
        ArchiveError: A file cannot be read.
    """
    place = chosen_path(path, "LDLT_CIFAR10", None, "CIFAR-10", _ADVICE)
    contents = _of_folder(place) if place.is_dir() else _of_archive(place)
    missing = [name for name in (*_TRAIN, _TEST) if name not in contents]
    if missing:
        raise UnavailableSetError("CIFAR-10", f"{place} has no {', no '.join(missing)}. {_ADVICE}")
    batches = [read_batch(contents.pop(name), f"{place}: {name}") for name in (*_TRAIN, _TEST)]
    train = [np.concatenate(part) for part in zip(*batches[:-1], strict=True)]
    return Splits(ImageSet(train[0], train[1], CIFAR10), ImageSet(*batches[-1], CIFAR10))


def _of_folder(folder: Path) -> dict[str, bytes]:
    inside = folder / _FOLDER if (folder / _FOLDER).is_dir() else folder
    _refuse_pickles([p.name for p in (inside / "data_batch_1", inside / "cifar-10-batches-py") if p.exists()], folder)
    found = {}
    for name in (*_TRAIN, _TEST):
        file = inside / name
        if file.is_file():
            with opened(file) as content:
                found[name] = _whole(content)
    return found


def _of_archive(path: Path) -> dict[str, bytes]:
    """The batches of a tar file, from one pass over it; links, devices and other names are passed over."""
    found: dict[str, bytes] = {}
    with opened(path) as content:
        try:
            # As a stream: the archive cannot make the reader jump, and what it unpacks to is counted.
            with tarfile.open(fileobj=content, mode="r|") as archive:  # type: ignore[call-overload]
                for count, member in enumerate(archive):
                    if count >= _MEMBERS or member.size > LARGEST:
                        raise ArchiveError(f"{path}: too many or too large files to be CIFAR-10. {_ADVICE}")
                    *folders, name = member.name.split("/")
                    _refuse_pickles([f for f in folders if f == "cifar-10-batches-py"], path)
                    if not member.isreg() or name not in (*_TRAIN, _TEST):
                        continue
                    if name in found:
                        raise ArchiveError(f"{path}: '{name}' occurs twice. {_ADVICE}")
                    stream = archive.extractfile(member)
                    assert stream is not None  # it is a regular file
                    found[name] = stream.read()
            while content.read():  # to the end, where the checksum of a gzip file is
                pass
        except tarfile.TarError as error:
            raise ArchiveError(f"{path}: not a tar file, or a damaged one ({error}). {_ADVICE}") from None
    return found


def _refuse_pickles(found: list[str], path: Path) -> None:
    if found:
        raise LayoutError(
            f"{path}: the version for Python, whose files are pickles: reading one can run any program. {_ADVICE}"
        )


def _whole(content: Bounded) -> bytes:
    found = bytearray()
    while part := content.read():
        found += part
    return bytes(found)
