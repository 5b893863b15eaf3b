"""Layers of orthonormal rows from the Cayley transform (:mod:`ldlt.engine.linalg`), for dense real matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ldlt.engine.linalg import CayleyMap, cayley
from ldlt_bench.families.layer import raise_zeros

__all__ = ["cayley", "cayley_rows", "wide_map", "with_norm"]


def wide_map(weight: Tensor) -> CayleyMap:
    """``[A B]`` of a wide free matrix ``[X Y']``, ``(..., q, n)`` with q ≤ n."""
    q = weight.shape[-2]
    return CayleyMap(weight[..., :q], weight[..., q:].mT)


def cayley_rows(weight: Tensor) -> Tensor:
    """Map a free matrix to one of the same shape with orthonormal rows (columns, if there are fewer).

    The dense form of Trockman & Kolter (2021): ``[A B]`` for a free ``[X Y']`` when the matrix is wide, the
    transpose when it is tall.

    Args:
        weight: Free matrix, ``(..., m, n)``.
    """
    m, n = weight.shape[-2:]
    if m > n:
        return cayley_rows(weight.mT).mT
    found = wide_map(weight)
    return torch.cat((found.a(), found.b()), dim=-1)


def with_norm(weight: Tensor, gain: Tensor) -> Tensor:
    """Rescale a free matrix to Frobenius norm ``|gain|`` (a zero matrix stays zero).

    Both published Cayley layers train the norm of the free matrix apart from its direction.
    """
    square = weight.square().sum(dim=(-2, -1), keepdim=True)
    return gain[..., None, None] * weight * raise_zeros(square).rsqrt()
