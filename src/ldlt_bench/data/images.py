r"""Labelled images from files: Fashion-MNIST and MNIST (IDX files), CIFAR-10 (binary version); see ``docs/images.md``.

Nothing is downloaded and nothing is unpacked to disk; no more is read of a file than a set of images can have. An IDX
file is two zero bytes, one byte for the kind of number (8: unsigned byte), one for the number d of dimensions, d sizes
as big-endian 32-bit integers, and the numbers in row-major order. A batch of CIFAR-10 is records of one label and
3 × 32 × 32 bytes, colour by colour.

References: Y. LeCun, C. Cortes and C. Burges, *The MNIST database of handwritten digits*. H. Xiao, K. Rasul and
R. Vollgraf, *Fashion-MNIST*, arXiv 1708.07747. A. Krizhevsky, *Learning multiple layers of features from tiny images*,
technical report, 2009.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldlt_bench.data.errors import ArchiveError, DatasetError, FormatError, LayoutError, UnavailableSetError

__all__ = ["ImageSet", "Splits", "cifar10", "fashion_mnist", "mnist", "read_batch", "read_idx", "read_pair"]

LARGEST = 1 << 28
"""Largest content of a file, in bytes. The training images of MNIST have 47 million, all of CIFAR-10 184 million."""

FASHION = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
DEBIAN = "/usr/share/datasets/fashion-mnist"
"""Where the Debian package ``dataset-fashion-mnist`` puts its files."""

_UBYTE, _SIDE, _RECORD = 8, 28, 1 + 3 * 32 * 32
_BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
_FOLDER, _PICKLES = "cifar-10-batches-bin", "cifar-10-batches-py"
_ADVICE = (
    "Get cifar-10-binary.tar.gz (the binary version, not the one for Python or Matlab) from "
    "https://www.cs.toronto.edu/~kriz/cifar.html and pass its path, or set LDLT_CIFAR10 to it"
)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images with labels; the arrays are checked and read-only.

    Attributes:
        images: (n, c, h, w) uint8, grey levels (c = 1) or colours (c = 3).
        labels: (n,) int64 in ``0 .. k − 1``.
        classes: Names of the k classes.

    Example:
        >>> two = ImageSet(np.full((2, 1, 4, 4), 51, np.uint8), np.array([0, 1]), ("shirt", "bag"))
        >>> x, y = two.tensors()
        >>> x.shape, round(float(x.max()), 3), y.tolist()
        (torch.Size([2, 1, 4, 4]), 0.2, [0, 1])
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        images, labels = np.asarray(self.images), np.asarray(self.labels)
        if images.dtype != np.uint8 or images.ndim != 4 or 0 in images.shape[1:]:
            raise DatasetError(f"images must be uint8 of shape (n, c, h, w), not {images.dtype} {images.shape}")
        if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
            raise DatasetError(f"{len(images)} integer labels are needed, not {labels.dtype} {labels.shape}")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(self.classes):
            raise DatasetError(f"labels from {labels.min()} to {labels.max()} for {len(self.classes)} classes")
        for name, array in (("images", images.view()), ("labels", labels.astype(np.int64))):
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        object.__setattr__(self, "classes", tuple(self.classes))

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (c, h, w) of one image."""
        _, c, h, w = self.images.shape
        return c, h, w

    def floats(self) -> NDArray[np.float32]:
        r"""Pixels :math:`p / 255` in [0, 1], (n, c, h, w): distances are in units of 255 grey levels."""
        return self.images.astype(np.float32) / np.float32(255)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """:meth:`floats` and the labels, as tensors."""
        return torch.from_numpy(self.floats()), torch.from_numpy(self.labels.copy())

    def take(self, rows: Sequence[int] | NDArray[np.int64] | slice) -> ImageSet:
        """Some of the images, in the order of ``rows``."""
        index = rows if isinstance(rows, slice) else np.asarray(rows, dtype=np.int64)
        return ImageSet(self.images[index], self.labels[index], self.classes)


class Splits(NamedTuple):
    """Training and test images, as published."""

    train: ImageSet
    test: ImageSet


def _content(path: Path) -> bytes:
    """Bytes of a file, unpacked if it is a gzip file (told by the content); memory grows with what is there."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            content = (gzip.GzipFile(fileobj=file) if packed else file).read(LARGEST + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArchiveError(f"{path}: truncated or damaged gzip file ({error}); get it again") from None
    except OSError as error:
        raise ArchiveError(f"{path}: cannot be read ({error.strerror or error})") from None
    if len(content) > LARGEST:
        raise ArchiveError(f"{path}: more than {LARGEST:,} bytes, which is no set of images")
    return content


def read_idx(path: str | os.PathLike[str], dims: int) -> NDArray[np.uint8]:
    """Unsigned bytes of an IDX file, compressed by gzip or not.

    Args:
        path: The file.
        dims: Number of dimensions it must have: 3 for images, 1 for labels.

    Returns:
        Array of the sizes that the file states.
    """
    path = Path(path)
    content, start = _content(path), 4 + 4 * dims
    if content[:4] != bytes([0, 0, _UBYTE, dims]) or len(content) < start:
        raise FormatError(
            str(path),
            f"starts with {content[:4].hex(' ') or 'nothing'}, not with 00 00 08 0{dims}: no IDX file of "
            f"unsigned bytes with {dims} dimensions, or truncated",
        )
    sizes = struct.unpack(f">{dims}I", content[4:start])
    if len(content) - start != math.prod(sizes):
        stated = " × ".join(map(str, sizes))
        raise FormatError(
            str(path), f"{len(content) - start:,} bytes follow a header that states {stated}; get it again"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(sizes)


def read_pair(
    images: str | os.PathLike[str], labels: str | os.PathLike[str], classes: tuple[str, ...] | None = None
) -> ImageSet:
    """Images (n, 1, h, w) and labels (n,) from two IDX files.

    Args:
        images: File of three dimensions.
        labels: File of one dimension.
        classes: Names of the classes; by default as many numbers as there are labels.
    """
    pixels, targets = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(targets):
        raise FormatError(str(labels), f"{len(targets):,} labels for the {len(pixels):,} images of {images}")
    if not pixels.size:
        raise FormatError(str(images), f"no pixels: the header states {' × '.join(map(str, pixels.shape))}")
    names = tuple(str(c) for c in range(int(targets.max()) + 1)) if classes is None else classes
    if int(targets.max()) >= len(names):
        raise FormatError(str(labels), f"label {targets.max()} is not in 0 … {len(names) - 1}; get it again")
    return ImageSet(pixels[:, None], targets.astype(np.int64), names)


def fashion_mnist(path: str | os.PathLike[str] | None = None) -> Splits:
    """Fashion-MNIST: 60,000 training and 10,000 test images of 28 × 28 pixels, ten kinds of clothes.

    Args:
        path: Folder with the four files, compressed or not. By default ``$LDLT_FASHION_MNIST``, else where the Debian
            package ``dataset-fashion-mnist`` puts them.
    """
    advice = (
        "Get it with  apt-get install dataset-fashion-mnist  (Debian, Ubuntu), or put the four files of "
        "https://github.com/zalandoresearch/fashion-mnist into a folder and set LDLT_FASHION_MNIST to it"
    )
    return _splits(_place(path, "LDLT_FASHION_MNIST", DEBIAN, advice), "Fashion-MNIST", FASHION, advice)


def mnist(path: str | os.PathLike[str] | None = None) -> Splits:
    """MNIST: 60,000 training and 10,000 test images of 28 × 28 pixels, handwritten digits.

    Args:
        path: Folder with the four files, compressed or not; by default ``$LDLT_MNIST``.
    """
    advice = "Put its four files, such as train-images-idx3-ubyte.gz, into a folder and set LDLT_MNIST to it"
    return _splits(_place(path, "LDLT_MNIST", None, advice), "MNIST", tuple("0123456789"), advice)


def cifar10(path: str | os.PathLike[str] | None = None) -> Splits:
    """CIFAR-10: 50,000 training and 10,000 test images of 32 × 32 pixels and three colours.

    Args:
        path: The file ``cifar-10-binary.tar.gz``, which is read in memory and not unpacked, or the folder
            ``cifar-10-batches-bin``, or the folder around it. By default ``$LDLT_CIFAR10``.
    """
    place = _place(path, "LDLT_CIFAR10", None, _ADVICE)
    contents = _of_archive(place)
    if place.is_dir():
        inside = place / _FOLDER if (place / _FOLDER).is_dir() else place
        if (inside / "data_batch_1").exists() or (inside / _PICKLES).exists():
            raise LayoutError(f"{place}: the version for Python, which is not read. {_ADVICE}")
        contents = {name: _content(inside / name) for name in _BATCHES if (inside / name).is_file()}
    missing = [name for name in _BATCHES if name not in contents]
    if missing:
        raise UnavailableSetError(f"CIFAR-10: {place} has no {', no '.join(missing)}. {_ADVICE}")
    batches = [read_batch(contents.pop(name), f"{place}: {name}") for name in _BATCHES]
    train = [np.concatenate(part) for part in zip(*batches[:-1], strict=True)]
    return Splits(ImageSet(train[0], train[1], CIFAR10), ImageSet(*batches[-1], CIFAR10))


def _of_archive(path: Path) -> dict[str, bytes]:
    """The batches of a tar file in memory; links, devices and other names are passed over."""
    found: dict[str, bytes] = {}
    if path.is_dir():
        return found
    try:
        with tarfile.open(fileobj=io.BytesIO(_content(path)), mode="r:") as archive:
            for member in archive:
                *folders, name = member.name.split("/")
                if _PICKLES in folders:
                    raise LayoutError(f"{path}: the version for Python, which is not read. {_ADVICE}")
                stream = archive.extractfile(member) if member.isreg() and name in _BATCHES else None
                if stream is not None:
                    if name in found:
                        raise ArchiveError(f"{path}: '{name}' occurs twice. {_ADVICE}")
                    found[name] = stream.read()
    except tarfile.TarError as error:
        raise ArchiveError(f"{path}: not a tar file, or a damaged one ({error}). {_ADVICE}") from None
    return found


def read_batch(content: bytes, file: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images (n, 3, 32, 32) and labels (n,) of one file.

    Args:
        content: The whole file.
        file: Its name, for messages.
    """
    if not content or len(content) % _RECORD:
        raise FormatError(file, f"{len(content):,} bytes are not a whole number of records of {_RECORD:,}: truncated")
    table = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    if int(table[:, 0].max()) >= len(CIFAR10):
        raise FormatError(file, f"label {table[:, 0].max()} is not in 0 … 9: not the binary version of CIFAR-10")
    return table[:, 1:].reshape(-1, 3, 32, 32), table[:, 0].astype(np.int64)


def _place(given: str | os.PathLike[str] | None, variable: str, usual: str | None, advice: str) -> Path:
    """Where a data set lies: argument, else environment variable, else the usual place."""
    path = given or os.environ.get(variable) or usual
    if path is None or not Path(path).expanduser().exists():
        raise UnavailableSetError(f"{path or f'${variable}'} does not exist. {advice}")
    return Path(path).expanduser()


def _splits(folder: Path, name: str, classes: tuple[str, ...], advice: str) -> Splits:
    found: list[ImageSet] = []
    for part in ("train", "t10k"):
        files = [_find(folder, part, kind, dims) for kind, dims in (("images", 3), ("labels", 1))]
        if files[0] is None or files[1] is None:
            raise UnavailableSetError(f"{name}: {folder} lacks {part} images or labels, as idx-ubyte files. {advice}")
        images = read_pair(files[0], files[1], classes)
        if images.shape != (1, _SIDE, _SIDE):
            raise FormatError(
                str(files[0]), f"images of shape {images.shape[1:]}; those of {name} have {_SIDE} × {_SIDE}"
            )
        found.append(images)
    return Splits(*found)


def _find(folder: Path, part: str, kind: str, dims: int) -> Path | None:
    """The first file that has one of the names in use, in the folder or where torchvision puts it below."""
    for place in (folder, folder / "raw", folder / "FashionMNIST" / "raw", folder / "MNIST" / "raw"):
        for name in (f"{part}-{kind}{mark}idx{dims}-ubyte{end}" for mark in "-." for end in ("", ".gz")):
            if (place / name).is_file():
                return place / name
    return None
