r"""IDX files, the format of MNIST and Fashion-MNIST.

A file is two zero bytes, one byte for the kind of number (8: unsigned byte), one for the number d of dimensions, d
sizes :math:`s_1 \dots s_d` as big-endian 32-bit integers, and :math:`\prod_i s_i` numbers in row-major order.

References: Y. LeCun, C. Cortes and C. Burges, *The MNIST database of handwritten digits*. H. Xiao, K. Rasul and
R. Vollgraf, *Fashion-MNIST: a novel image dataset for benchmarking machine learning algorithms*, arXiv 1708.07747.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ldlt.bench.data.errors import FormatError, UnavailableSetError
from ldlt.bench.images.content import LARGEST, STEP, Bounded, capacity, chosen_path, opened
from ldlt.bench.images.image_set import ImageSet, Splits

__all__ = ["FASHION", "fashion_mnist", "mnist", "read_idx", "read_pair"]

FASHION = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
"""Classes of Fashion-MNIST, by label."""

DEBIAN = "/usr/share/datasets/fashion-mnist"
"""Where the Debian package ``dataset-fashion-mnist`` puts its files."""

_UBYTE = 8
_KINDS = {9: "signed bytes", 11: "16-bit integers", 12: "32-bit integers", 13: "float32", 14: "float64"}
_SIDE = 28


def read_idx(path: str | os.PathLike[str], dims: int) -> NDArray[np.uint8]:
    """Unsigned bytes of an IDX file, compressed by gzip or not (told by the content, not by the name).

    Args:
        path: The file.
        dims: Number of dimensions it must have: 3 for images, 1 for labels.

    Returns:
        Array of the sizes that the file states.

    Raises:
        FormatError: It is no IDX file of bytes, has another number of dimensions, or its size is not the stated one.
        ArchiveError: It cannot be read, or is a damaged gzip file.
    """
    path = Path(path)
    room = capacity(path)
    with opened(path) as content:
        sizes = _header(_exactly(content, 4, path), content, path, dims)
        wanted = math.prod(sizes)
        if wanted > room:  # said before memory is taken
            raise FormatError(
                str(path),
                f"the header promises {' × '.join(map(str, sizes))} bytes, more than "
                + ("the file can hold: truncated or damaged, get it again" if room < LARGEST else f"{LARGEST:,}"),
            )
        data = _exactly(content, wanted, path)
        if content.read(1):
            raise FormatError(str(path), f"bytes follow after the {wanted:,} that the header states; get it again")
    return np.frombuffer(data, np.uint8).reshape(sizes)


def _header(start: bytearray, content: Bounded, path: Path, dims: int) -> tuple[int, ...]:
    """Sizes of the dimensions, after the first four bytes."""
    zero, kind, found = struct.unpack(">HBB", start)
    if zero or (kind != _UBYTE and kind not in _KINDS):
        raise FormatError(str(path), f"not an IDX file: it starts with {start.hex(' ')} instead of 00 00 08 0{dims}")
    if kind != _UBYTE:
        raise FormatError(str(path), f"an IDX file of {_KINDS[kind]}; images and labels are unsigned bytes")
    if found != dims:
        what = {1: "labels", 3: "images"}
        hint = f" ({what[found]} instead of {what[dims]}?)" if found in what and dims in what else ""
        raise FormatError(str(path), f"an IDX file of {found} dimensions instead of {dims}{hint}")
    return struct.unpack(f">{dims}I", _exactly(content, 4 * dims, path))


def _exactly(content: Bounded, count: int, path: Path) -> bytearray:
    found = bytearray()
    while len(found) < count:
        part = content.read(min(STEP, count - len(found)))
        if not part:
            raise FormatError(
                str(path), f"truncated: {count - len(found):,} of {count:,} bytes are missing; get it again"
            )
        found += part
    return found


def read_pair(
    images: str | os.PathLike[str], labels: str | os.PathLike[str], classes: tuple[str, ...] | None = None
) -> ImageSet:
    """Images (n, 1, h, w) and labels (n,) from two IDX files.

    Args:
        images: File of three dimensions.
        labels: File of one dimension.
        classes: Names of the classes; by default as many numbers as there are labels.

    Raises:
        FormatError: Either file is wrong, they disagree in their number, or a label has no class.
        ArchiveError: Either cannot be read.
    """
    pixels, targets = read_idx(images, 3), read_idx(labels, 1)
    if len(pixels) != len(targets):
        raise FormatError(
            str(labels), f"{len(targets):,} labels for the {len(pixels):,} images of {images}: not from the same set"
        )
    if not pixels.size:
        raise FormatError(str(images), f"no pixels: the header states {' × '.join(map(str, pixels.shape))}")
    if classes is None:
        classes = tuple(str(c) for c in range(int(targets.max()) + 1))
    if int(targets.max()) >= len(classes):
        row = int(np.argmax(targets >= len(classes)))
        raise FormatError(
            str(labels), f"label {targets[row]} of image {row} (from 0) is not in 0 … {len(classes) - 1}; get it again"
        )
    return ImageSet(pixels[:, None], targets.astype(np.int64), classes)


def fashion_mnist(path: str | os.PathLike[str] | None = None) -> Splits:
    """Fashion-MNIST: 60,000 training and 10,000 test images of 28 × 28 pixels, ten kinds of clothes.

    Args:
        path: Folder with the four files, compressed or not. By default ``$LDLT_FASHION_MNIST``, else where the Debian
            package ``dataset-fashion-mnist`` puts them.

    Raises:
        UnavailableSetError: There is no such folder, or a file is missing.
        FormatError: A file has a wrong content.
        ArchiveError: A file cannot be read.
    """
    advice = (
        "Get it with  apt-get install dataset-fashion-mnist  (Debian, Ubuntu), or put the four files of "
        "https://github.com/zalandoresearch/fashion-mnist into a folder and set LDLT_FASHION_MNIST to it"
    )
    folder = chosen_path(path, "LDLT_FASHION_MNIST", DEBIAN, "Fashion-MNIST", advice)
    return _splits(folder, "Fashion-MNIST", FASHION, advice)


def mnist(path: str | os.PathLike[str] | None = None) -> Splits:
    """MNIST: 60,000 training and 10,000 test images of 28 × 28 pixels, handwritten digits.

    Args:
        path: Folder with the four files, compressed or not; by default ``$LDLT_MNIST``.

    Raises:
        UnavailableSetError: There is no such folder, or a file is missing.
        FormatError: A file has a wrong content.
        ArchiveError: A file cannot be read.
    """
    advice = "Put its four files, such as train-images-idx3-ubyte.gz, into a folder"
    folder = chosen_path(path, "LDLT_MNIST", None, "MNIST", advice)
    return _splits(folder, "MNIST", tuple("0123456789"), advice)


def _splits(folder: Path, name: str, classes: tuple[str, ...], advice: str) -> Splits:
    files = {
        (part, kind, dims): _find(folder, f"{part}-{kind}", dims)
        for part in ("train", "t10k")
        for kind, dims in (("images", 3), ("labels", 1))
    }
    missing = [f"{part}-{kind}-idx{dims}-ubyte.gz" for (part, kind, dims), file in files.items() if file is None]
    if missing:
        raise UnavailableSetError(name, f"{folder} has no {', no '.join(missing)}. {advice}")
    found = Splits(*(read_pair(files[p, "images", 3], files[p, "labels", 1], classes) for p in ("train", "t10k")))  # type: ignore[arg-type]
    for part, images in zip(("train", "t10k"), found, strict=True):
        if images.shape != (1, _SIDE, _SIDE):
            raise FormatError(
                str(files[part, "images", 3]),
                f"images of {images.shape[1]} × {images.shape[2]} pixels; those of {name} have {_SIDE} × {_SIDE}",
            )
    return found


def _find(folder: Path, start: str, dims: int) -> Path | None:
    """The first file that has one of the names in use, in the folder or where torchvision puts it below."""
    names = [f"{start}{mark}idx{dims}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    for place in (folder, folder / "raw", folder / "FashionMNIST" / "raw", folder / "MNIST" / "raw"):
        for name in names:
            if (place / name).is_file():
                return place / name
    return None
