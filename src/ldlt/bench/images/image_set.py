"""Labelled images as bytes, and as numbers in which radii are measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldlt.bench.data.errors import DatasetError

__all__ = ["ImageSet", "Splits"]


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
            raise DatasetError(
                f"labels must be {len(images)} integers, one for each image, not {labels.dtype} {labels.shape}"
            )
        if len(labels) and not (int(labels.min()) >= 0 and int(labels.max()) < len(self.classes)):
            raise DatasetError(
                f"labels must lie in 0 … {len(self.classes) - 1}, but they go from {labels.min()} to {labels.max()}"
            )
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
        r"""Pixels :math:`p / 255` in [0, 1], (n, c, h, w).

        Euclidean distances and certified radii are then in units of 255 grey levels: the usual 36/255 is a radius of
        36 levels, spread over all pixels. Inputs that are also centred keep these units; inputs that are divided by a
        standard deviation do not.
        """
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
