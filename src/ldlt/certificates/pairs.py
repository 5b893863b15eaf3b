r"""Traces of products of rank-two matrices, as elementwise products.

With ``A_k = d_kd_k' − v_kv_k'``, ``d_k = e_k − c_kv_k``, where ``v_k`` is the pre-activation of a neuron times the
radius of its slopes and ``c_k`` their centre divided by it, and with ``F = [d_1, …, d_n, v_1, …, v_n]'`` (2n, N),

.. math:: \operatorname{tr}(A_kXA_lZ) = \sum_{a,b \in \{d, v\}} \pm (F X F')_{ak,bl} (F Z F')_{ak,bl} .

``F X F'`` is symmetric, so three of its four blocks are enough.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Corners", "pair_products"]


class Corners(NamedTuple):
    """Blocks of ``F X F'`` for a symmetric X, (n, n) each.

    Attributes:
        beside: Of d with d.
        cross: Of v with d.
        below: Of v with v.
    """

    beside: Tensor
    cross: Tensor
    below: Tensor

    @classmethod
    def empty(cls, n: int) -> Corners:
        """Room for them."""
        return cls(*torch.empty(3, n, n, dtype=torch.float64).unbind())

    @classmethod
    def of(cls, whole: Tensor) -> Corners:
        """Those of ``F X F'`` (2n, 2n)."""
        n = len(whole) // 2
        return cls(whole[:n, :n], whole[n:, :n], whole[n:, n:])

    def slant(self, center: Tensor) -> Corners:
        """Put ``d = e − cv`` in the place of ``e``."""
        self.beside.addcmul_(self.cross.mT, center, value=-1.0)  # e(e − cv)'
        self.cross.addcmul_(self.below, center, value=-1.0)
        self.beside.addcmul_(center[:, None], self.cross, value=-1.0)
        return self

    def traces(self) -> Tensor:
        """``tr(A_kX)``, (n,)."""
        return self.beside.diagonal() - self.below.diagonal()

    def update(self, rows: Tensor, middle: Tensor, scale: float, out: Corners) -> Corners:
        """The corners of ``scale X + R middle R'`` from ``F R`` (2n, q), into ``out``."""
        upper, lower = rows.split(len(self.beside))
        left = rows @ middle
        torch.addmm(self.beside, left[: len(upper)], upper.mT, beta=scale, out=out.beside)
        torch.addmm(self.cross, left[len(upper) :], upper.mT, beta=scale, out=out.cross)
        torch.addmm(self.below, left[len(upper) :], lower.mT, beta=scale, out=out.below)
        return out


def pair_products(x: Corners, z: Corners) -> Tensor:
    """``tr(A_kXA_lZ)`` (n, n)."""
    cross = x.cross * z.cross
    return (x.beside * z.beside).addcmul_(x.below, z.below).sub_(cross).sub_(cross.mT)
