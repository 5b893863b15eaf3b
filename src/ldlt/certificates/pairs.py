r"""Traces of products of rank-two matrices, as elementwise products.

With ``A_k = d_kd_k' − v_kv_k'``, ``d_k = e_k − c_kv_k``, where ``v_k`` is the pre-activation of a neuron times the
radius of its slopes and ``c_k`` their centre divided by it, and with ``F = [d_1, …, d_n, v_1, …, v_n]'`` (2n, N),

.. math:: \operatorname{tr}(A_kXA_lZ) = \sum_{a,b \in \{d, v\}} \pm (F X F')_{ak,bl} (F Z F')_{ak,bl} .
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pair_products", "slanted"]


def slanted(center: Tensor, both: Tensor) -> Tensor:
    """``F X F'`` (2n, 2n) from the products with ``e`` in the place of ``d``, which are overwritten."""
    n = len(center)
    both[:n].addcmul_(center[:, None], both[n:], value=-1.0)
    both[:, :n].addcmul_(both[:, n:], center, value=-1.0)
    return both


def pair_products(x: Tensor, z: Tensor, out: Tensor | None = None) -> Tensor:
    """``tr(A_kXA_lZ)`` (n, n) from ``F X F'`` and ``F Z F'``; ``out`` may be one of them, to save memory."""
    n = len(x) // 2
    both = torch.mul(x, z, out=out)
    found = both[:n, :n] + both[n:, n:]
    found -= both[:n, n:]
    found -= both[n:, :n]
    return found
