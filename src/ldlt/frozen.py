"""The frozen form of a convolution: a plain layer with a fixed kernel as large as the image."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ldlt import grid
from ldlt.circulant import CirculantWeight
from ldlt.convolution import FrozenSpec
from ldlt.errors import ShapeError

__all__ = ["CircularConv"]


class CircularConv(nn.Module):
    r"""``y[i] = Σ_j K[i − j] x[j] + b`` on a periodic grid of cells, for images of one size.

    On images whose cells are pixels this is a circular convolution with a kernel as large as the image. Strides,
    transposed convolutions and kernels that differ between the pixels of a cell are covered by cells of several pixels
    (see ``ldlt.grid``).

    Args:
        kernel: ``K`` (m_out, m_in, \*cells), real: local features of a cell to local features.
        inputs: Shape (c_in, \*spatial) of the images that are read.
        outputs: Shape (c_out, \*spatial) of the images that are made.
        bias: (c_out,) or None.

    Shape:
        Input (batch, \*inputs), output (batch, \*outputs).
    """

    def __init__(
        self, kernel: Tensor, inputs: tuple[int, ...], outputs: tuple[int, ...], bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.weight = nn.Parameter(kernel.detach().clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self._known: tuple[Any, Tensor] | None = None

    @classmethod
    def of(cls, weight: CirculantWeight, bias: Tensor | None, like: Tensor) -> CircularConv:
        """The frozen form of an explicit map, in the precision of ``like``."""
        found = cls(weight.kernel().to(like), weight.inputs, weight.outputs, bias)
        found.weight.requires_grad_(like.requires_grad)
        if found.bias is not None and bias is not None:
            found.bias.requires_grad_(bias.requires_grad)
        return found

    @property
    def cells(self) -> tuple[int, ...]:
        """Number of cells along each dimension."""
        return tuple(self.weight.shape[2:])

    def matrix(self) -> Tensor:
        """The unrolled map, (features of the output, features of the input); every entry is one of the kernel's."""
        return self.spec.unrolled(self.weight, self.inputs)

    @property
    def spec(self) -> FrozenSpec:
        """What the layer computes."""
        return FrozenSpec(self.inputs, self.outputs)

    def _spectrum(self) -> Tensor:
        """The transfer function, kept as long as the kernel stays the same and no gradient is asked for."""
        if math.prod(self.cells) == 1:
            return self.weight.reshape(self.weight.shape[:2])
        if torch.is_grad_enabled() and self.weight.requires_grad:
            return grid.transfer(self.weight, self.cells).contiguous()
        weight = self.weight
        key = (weight.data_ptr(), weight._version, weight.dtype, weight.device)
        if self._known is None or self._known[0] != key:
            self._known = (key, grid.transfer(weight.detach(), self.cells).contiguous())
        return self._known[1]

    def forward(self, x: Tensor) -> Tensor:
        """The convolved images."""
        if tuple(x.shape[1:]) != self.inputs:
            raise ShapeError(
                f"this frozen convolution is for images of shape {self.inputs}, not {tuple(x.shape[1:])}: its kernel "
                "is as large as they are"
            )
        cells = self.cells if math.prod(self.cells) > 1 else None
        y = grid.apply(self._spectrum(), x, cells, self.outputs)
        return y if self.bias is None else y + self.bias.reshape(-1, *(1,) * (len(self.outputs) - 1))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}

    def extra_repr(self) -> str:
        """Shapes."""
        return f"{self.inputs} -> {self.outputs}, cells={self.cells}"
