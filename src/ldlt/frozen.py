r"""The frozen form of a convolution: a plain layer with a fixed kernel as large as the image.

Such a kernel can be applied in the Fourier domain or as the unrolled matrix. Per image, with ``m`` local features on
``N`` cells, the former costs two transforms of ``mN`` numbers and a product of ``m × m`` matrices per frequency, the
latter :math:`m^2 N^2` multiply-adds, which run at the full speed of the processor: small maps are several times as fast
unrolled. :func:`unrolls` decides by an estimate from shapes alone, so that the same network always computes the same
way. The third way, ``conv2d`` with a kernel as large as the image, does as many multiply-adds as the matrix but more
slowly, and is not used. ``benchmarks/frozen_conv.py`` measures all three.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ldlt import grid
from ldlt.circulant import CirculantWeight
from ldlt.convolution import FrozenSpec
from ldlt.errors import ShapeError

__all__ = ["CircularConv", "unrolls"]

# Nanoseconds on one core with AVX-512, float32; only their ratios matter.
_MULTIPLY = 0.022  # a multiply-add of a matrix product
_LOAD = 0.36  # an entry of a matrix, once per batch
_NUMBER = 6.0  # a number that goes through a transform
_SHORT = 45.0  # further time per number, over the length of the transform: short ones are slow
_CALL = 130_000.0  # the calls of the Fourier path, once per batch
_BATCH = 32  # images per batch for which the choice is made
_LARGEST = 1 << 22  # entries of a matrix


def unrolls(outputs: int, inputs: int, cells: tuple[int, ...]) -> bool:
    r"""Whether a kernel is applied as the unrolled matrix rather than in the Fourier domain, by estimated time.

    With ``N`` cells of which ``f`` frequencies are kept, sides ``g`` (their geometric mean), and batches of ``b``:

    .. math::

        t_\text{matrix} = m_\text{out} m_\text{in} N^2 \Bigl(c_\text{mul} + \frac{c_\text{load}}{b}\Bigr), \qquad
        t_\text{Fourier} = (m_\text{out} + m_\text{in}) N \Bigl(c_\text{num} + \frac{c_\text{short}}{g}\Bigr)
            + 4 f m_\text{out} m_\text{in} c_\text{mul} + \frac{c_\text{call}}{b} .

    Args:
        outputs: Local features of a cell of the output.
        inputs: Local features of a cell of the input.
        cells: Number of cells along each dimension.

    Example:
        >>> unrolls(8, 8, (8, 8)), unrolls(64, 64, (16, 16))
        (True, False)
    """
    count, pairs = math.prod(cells), outputs * inputs
    entries = pairs * count**2
    matrix = entries * (_MULTIPLY + _LOAD / _BATCH)
    side = count ** (1 / len(cells))
    frequencies = math.prod(cells[:-1]) * (cells[-1] // 2 + 1)
    fourier = (outputs + inputs) * count * (_NUMBER + _SHORT / side) + 4 * frequencies * pairs * _MULTIPLY
    return entries <= _LARGEST and matrix < fourier + _CALL / _BATCH


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

    Attributes:
        unrolled: Whether inference uses the unrolled matrix (see :func:`unrolls`) or the Fourier domain.

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
        self.unrolled = unrolls(kernel.shape[0], kernel.shape[1], tuple(kernel.shape[2:]))
        self._known: tuple[Tensor, Tensor] | None = None

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

    def _operator(self) -> tuple[Tensor, grid.Cells]:
        """The map as :func:`ldlt.grid.apply` wants it: a transfer function and its grid, or a matrix and None.

        It is kept as long as no gradient is asked for and the kernel has the numbers that it was made from. They are
        compared: no version counter sees every way to change a tensor (``weight.data.mul_(2)``, say).
        """
        if math.prod(self.cells) == 1:
            return self.weight.reshape(self.weight.shape[:2]), None
        if torch.is_grad_enabled() and self.weight.requires_grad:  # made anew each time: the transform is the cheaper
            return grid.transfer(self.weight, self.cells).contiguous(), self.cells
        kernel = self.weight.detach()
        known = self._known
        alike = known is not None and known[0].dtype == kernel.dtype and known[0].device == kernel.device
        if known is None or not alike or not torch.equal(known[0], kernel):
            made = self.spec.unrolled(kernel, self.inputs) if self.unrolled else grid.transfer(kernel, self.cells)
            known = self._known = (kernel.clone(), made.contiguous())
        return known[1], None if self.unrolled else self.cells

    def forward(self, x: Tensor) -> Tensor:
        """The convolved images."""
        if tuple(x.shape[1:]) != self.inputs:
            raise ShapeError(
                f"this frozen convolution is for images of shape {self.inputs}, not {tuple(x.shape[1:])}: its kernel "
                "is as large as they are"
            )
        operator, cells = self._operator()
        y = grid.apply(operator, x, cells, self.outputs)
        return y if self.bias is None else y + self.bias.reshape(-1, *(1,) * (len(self.outputs) - 1))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": None}

    def extra_repr(self) -> str:
        """Shapes."""
        return f"{self.inputs} -> {self.outputs}, cells={self.cells}"
