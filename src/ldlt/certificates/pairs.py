"""Traces of products of rank-two matrices, as elementwise products."""

from __future__ import annotations

from torch import Tensor

__all__ = ["Corners", "pair_products", "shifted"]

Corners = tuple[Tensor, Tensor, Tensor]
"""``d_k'Xd_l``, ``d_k'Xv_l``, ``v_k'Xv_l`` of a symmetric X, (n, n) each, with ``d_k = e_k − c_kv_k``."""


def shifted(center: Tensor, ee: Tensor, ev: Tensor, vv: Tensor) -> Corners:
    """Corners from those with ``e_k`` in the place of ``d_k``."""
    c = center[:, None]
    dv = ev - c * vv
    return ee - c * ev.T - dv * center, dv, vv


def pair_products(radius: Tensor, x: Corners, z: Corners) -> Tensor:
    """``tr(A_kXA_lZ)`` (n, n) for ``A_k = d_kd_k' − r_k²v_kv_k'``.

    Args:
        radius: r, (n,).
        x: Corners of X.
        z: Corners of Z.
    """
    square = radius**2
    mixed = x[1] * z[1] * square
    found = x[2] * z[2] * square * square[:, None]
    found -= mixed
    found -= mixed.T
    return found.addcmul_(x[0], z[0])
