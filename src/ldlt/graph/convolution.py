"""Convolutions as linear maps of their weight: the arguments of a layer, what it computes, what it commutes with.

A *grid of cells* ``(g_1, g_2)`` divides an image into cells of equal size; ``natural`` is that of its pixels. Signals
on it are in :mod:`ldlt.images.grids`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt.errors import GraphError

__all__ = ["Cells", "Kernel", "Spec", "commutes", "meet", "natural"]

Cells = tuple[int, ...] | None
"""Number of cells along each dimension; None for a single cell."""


def natural(shape: tuple[int, ...]) -> Cells:
    """The finest grid of a tensor of that shape: its pixels, or one cell for a vector."""
    return _grid(shape[1:])


def _grid(cells: tuple[int, ...]) -> Cells:
    return cells if math.prod(cells) > 1 else None


def meet(first: Cells, second: Cells) -> Cells:
    """The finest grid that is coarser than both."""
    if first is None or second is None or len(first) != len(second):
        return None
    return _grid(tuple(math.gcd(a, b) for a, b in zip(first, second, strict=True)))


class Kernel(Protocol):
    """What a convolution node knows of its layer: :class:`Spec`, or that of a frozen one.

    A frozen layer announces itself by an attribute ``ldlt_frozen`` that gives this; its class has its ``forward``, an
    attribute ``outputs`` (the shape it makes), and a ``weight`` and ``bias``.
    """

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...
    def unrolled(self, weight: Tensor, inputs: tuple[int, ...], exact: bool = False) -> Tensor: ...
    def cells(self, kernel: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Cells: ...


_RUN: dict[tuple[int, bool], Any] = {
    (1, False): F.conv1d, (2, False): F.conv2d, (3, False): F.conv3d,
    (1, True): F.conv_transpose1d, (2, True): F.conv_transpose2d, (3, True): F.conv_transpose3d,
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """The arguments of a convolution, apart from its tensors.

    Attributes:
        dims: Number of spatial dimensions.
        stride: Stride, per dimension.
        padding: Padding with zeros, per dimension, or ``"same"``/``"valid"``.
        dilation: Distance between taps, per dimension.
        groups: Number of groups.
        transposed: Whether it is a transposed convolution.
        output_padding: Of a transposed convolution, per dimension.
        mode: ``"zeros"``, or the mode of ``F.pad`` that is applied before.
        border: Amounts for ``F.pad``; empty for zeros.
    """

    dims: int
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    mode: str = "zeros"
    border: tuple[int, ...] = ()

    @classmethod
    def of(cls, module: nn.Module) -> Spec:
        """The arguments of a convolution layer of PyTorch."""
        layer = cast(Any, module)
        padded = layer.padding_mode != "zeros"
        return cls(
            dims=layer.weight.ndim - 2,
            stride=tuple(layer.stride),
            padding=layer.padding if isinstance(layer.padding, str) else tuple(layer.padding),
            dilation=tuple(layer.dilation),
            groups=layer.groups,
            transposed=bool(layer.transposed),
            output_padding=tuple(layer.output_padding),
            mode=layer.padding_mode,
            border=tuple(layer._reversed_padding_repeated_twice) if padded else (),
        )

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, groups: int | None = None) -> Tensor:
        """What the layer computes for x (batch, c_in, *spatial)."""
        groups = self.groups if groups is None else groups
        call = _RUN[self.dims, self.transposed]
        if self.transposed:
            return call(x, weight, bias, self.stride, self.padding, self.output_padding, groups, self.dilation)
        if self.mode == "zeros":
            return call(x, weight, bias, self.stride, self.padding, self.dilation, groups)
        return call(F.pad(x, self.border, mode=self.mode), weight, bias, self.stride, 0, self.dilation, groups)

    def crop(self, x: Tensor, spatial: tuple[int, ...]) -> Tensor:
        """Undo the padding that the layer has applied to x before it calls the convolution."""
        if not self.border:
            return x
        low = self.border[::2][::-1]  # F.pad counts dimensions from the last one
        index: list[Any] = [..., *(slice(a, a + n) for a, n in zip(low, spatial, strict=True))]
        return x[tuple(index)]

    def taps(self, weight: Tensor) -> Tensor:
        """The weight of a layer as (c_out, c_in, taps), with zeros between groups."""
        g = self.groups
        if self.transposed:  # (c_in, c_out/g, *k)
            split = weight.reshape(g, weight.shape[0] // g, weight.shape[1], -1).transpose(1, 2)
        else:  # (c_out, c_in/g, *k)
            split = weight.reshape(g, weight.shape[0] // g, weight.shape[1], -1)
        if g == 1:
            return split[0]
        same = torch.eye(g, dtype=torch.bool, device=weight.device)
        wide = torch.where(same[:, None, :, None, None], split[:, :, None], 0.0)  # (g, c_out/g, g, c_in/g, t)
        return wide.reshape(g * split.shape[1], g * split.shape[2], -1)

    def unrolled(self, weight: Tensor, inputs: tuple[int, ...], exact: bool = False) -> Tensor:
        """The matrix (features of the output, features of the input) of the layer on images of shape ``inputs``.

        Every entry is one of the weight's or zero, unless a kernel larger than the image meets some pixels twice.

        Raises:
            GraphError: It does, and ``exact`` is asked for.
        """
        tap, twice = self._met(tuple(weight.shape[2:]), inputs[1:])
        if twice and exact:
            raise GraphError("a kernel that is larger than the image meets some pixels twice; use a smaller one")
        if twice:
            whole = torch.eye(math.prod(inputs), dtype=weight.dtype).reshape(-1, *inputs)
            return self.run(whole, weight).flatten(1).T
        taps = torch.nn.functional.pad(self.taps(weight), (1, 0))  # (c_out, c_in, 1 + taps)
        return taps[:, :, tap].permute(0, 2, 1, 3).reshape(taps.shape[0] * tap.shape[0], -1)

    def _met(self, kernel: tuple[int, ...], spatial: tuple[int, ...]) -> tuple[Tensor, bool]:
        """Number of the tap that meets a pixel, (pixels out, pixels in), 0 for none; whether some pixel is met twice.

        A tap meets one pixel at most at each position: which one, it reads off an image of the pixels' numbers.
        """
        count, pixels = math.prod(kernel), math.prod(spatial)
        # In float64, whatever the weight's precision: no autocast or fast mode rounds the numbers.
        image = torch.arange(1, pixels + 1, dtype=torch.float64).reshape(1, 1, *spatial)
        each = torch.eye(count, dtype=torch.float64).reshape(count, 1, *kernel)  # one output channel per tap
        each = each.transpose(0, 1) if self.transposed else each
        met = self.run(image, each, groups=1)[0].flatten(1).T.round().long()  # (pixels out, taps), 0 for the padding
        number = torch.arange(1, count + 1).expand_as(met)
        none = torch.zeros(len(met), pixels + 1, dtype=torch.long)
        tap = none.scatter(1, met, number)[:, 1:]
        return tap, int((tap > 0).sum()) < int((met > 0).sum())

    def cells(self, kernel: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Cells:
        """The grid the convolution lives on, from the shapes (c, *spatial); None if it commutes with no shift."""
        weight = torch.rand(1, 1, *kernel, dtype=torch.float64)
        grid = meet(natural(inputs), natural(outputs))
        return grid if commutes(lambda x: self.run(x, weight, groups=1), grid, [(1, *inputs[1:])]) else None


def commutes(function: Any, cells: Cells, shapes: list[tuple[int, ...]]) -> bool:
    """Whether a linear function of batches commutes with shifts by whole cells, tried on random numbers."""
    if cells is None:
        return True

    def shift(x: Tensor, dim: int) -> Tensor:
        return x.roll(x.shape[dim + 2] // cells[dim], dim + 2)

    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(2, *s, generator=generator, dtype=torch.float64) for s in shapes]
    with torch.no_grad():
        y = function(*xs)
        for dim in range(len(cells)):
            moved = function(*(shift(x, dim) for x in xs))
            if not torch.allclose(moved, shift(y, dim), rtol=1e-10, atol=1e-10 * float(1 + y.abs().max())):
                return False
    return True
