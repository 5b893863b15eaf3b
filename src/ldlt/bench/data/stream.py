"""Random numbers that stay the same for ever: a keyed stream over the raw output of PCG64.

``numpy.random.Generator`` may change its distributions between releases; the raw 64-bit output of a bit
generator may not. Everything random in this subpackage is therefore derived from the raw output with the
few formulas below.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["Stream"]


class Stream:
    """Deterministic random numbers for a key.

    Args:
        key: Anything with a stable text form; equal keys give equal streams.

    Example:
        >>> Stream("iris", 0).permutation(5).tolist() == Stream("iris", 0).permutation(5).tolist()
        True
    """

    def __init__(self, *key: str | int) -> None:
        digest = hashlib.sha256("/".join(str(part) for part in key).encode()).digest()
        self._bits = np.random.PCG64(int.from_bytes(digest[:16], "little"))

    def uniform(self, *shape: int) -> NDArray[np.float64]:
        """Uniform numbers in [0, 1), 53 bits each."""
        raw = np.asarray(self._bits.random_raw(math.prod(shape)), dtype=np.uint64)
        return ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape)

    def normal(self, *shape: int) -> NDArray[np.float64]:
        """Standard normal numbers (Box and Muller, the cosine branch only)."""
        radius = np.sqrt(-2.0 * np.log1p(-self.uniform(*shape)))
        return radius * np.cos(2.0 * np.pi * self.uniform(*shape))

    def integers(self, high: int, *shape: int) -> NDArray[np.int64]:
        """Integers in ``0 .. high - 1``."""
        return np.floor(self.uniform(*shape) * high).astype(np.int64)

    def permutation(self, size: int) -> NDArray[np.int64]:
        """The numbers ``0 .. size - 1`` in random order."""
        return np.argsort(self.uniform(size), kind="stable").astype(np.int64)
