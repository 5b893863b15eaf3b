"""Convolution and average pooling as matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Axis", "average", "same_axis", "unroll"]


@dataclass(frozen=True)
class Axis:
    """How a window moves along one axis.

    Attributes:
        size: Entries of the input.
        out: Positions of the window.
        kernel: Entries of the window.
        stride: Distance of positions.
        before: Zeros in front of the input.
        dilation: Distance of the window's entries.
    """

    size: int
    out: int
    kernel: int
    stride: int
    before: int
    dilation: int

    def taps(self) -> Tensor:
        """Which entry of the window meets input i at position p, (out, size); ``kernel`` where none does."""
        offset = torch.arange(self.size) + self.before - self.stride * torch.arange(self.out)[:, None]
        index = offset.div(self.dilation, rounding_mode="floor")
        valid = (offset >= 0) & (offset % self.dilation == 0) & (index < self.kernel)
        return torch.where(valid, index, self.kernel)


def same_axis(size: int, kernel: int, stride: int, dilation: int, upper: bool) -> tuple[int, int, int]:
    """``(out, zeros before, zeros in all)`` for the padding that makes ``out = ceil(size / stride)``.

    The last is negative where windows leave a rest of the input unread.
    """
    out = -(-size // stride)
    total = (out - 1) * stride + (kernel - 1) * dilation + 1 - size
    return out, (max(total, 0) + (0 if upper else 1)) // 2, total


def unroll(weight: Tensor, groups: int, axes: Sequence[Axis]) -> Tensor:
    """The dense matrix of a convolution, (channels out · positions, channels in · inputs), entry by entry exact.

    Args:
        weight: (channels out, channels in / groups, *kernel).
        groups: Number of groups.
        axes: One or two.
    """
    rows, columns, *kernel = weight.shape
    padded = weight.new_zeros(rows, columns, *(k + 1 for k in kernel))  # no tap: the entry behind the last, a zero
    padded[(slice(None), slice(None), *(slice(k) for k in kernel))] = weight
    taps = [axis.taps() for axis in axes]
    if len(axes) == 1:
        dense = padded[:, :, taps[0]].permute(0, 2, 1, 3)
    else:
        dense = padded[:, :, taps[0][:, None, :, None], taps[1][None, :, None, :]].permute(0, 2, 3, 1, 4, 5)
    out, size = math.prod(a.out for a in axes), math.prod(a.size for a in axes)
    per_group = rows // groups
    matrix = weight.new_zeros(groups, per_group * out, groups, columns * size)
    for g in range(groups):
        matrix[g, :, g] = dense[g * per_group : (g + 1) * per_group].reshape(per_group * out, columns * size)
    return matrix.reshape(rows * out, groups * columns * size)


def average(axes: Sequence[Axis], count_padding: bool) -> Tensor:
    """The matrix of average pooling of one channel in float64, (positions, inputs).

    Rows of windows that see no input are not finite, unless zeros of the padding count as entries.
    """
    found = torch.ones(1, 1, dtype=torch.float64)
    for axis in axes:
        hit = (axis.taps() < axis.kernel).double()
        found = torch.kron(found, hit / (axis.kernel if count_padding else hit.sum(1, keepdim=True)))
    return found
