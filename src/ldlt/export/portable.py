"""Layers that only exist here, in operations that every runtime knows; equal in real arithmetic."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt.activations import GroupSort, MaxMin
from ldlt.images import grids
from ldlt.images.convolutions import CircularConv

__all__ = ["LARGEST_MATRIX", "portable"]

LARGEST_MATRIX = 2**22
"""Entries up to which a convolution is written as a matrix, where that is asked for."""

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def portable(program: nn.Module, *, matrices: bool = False) -> nn.Module:
    """A copy without Fourier transforms, padding around a ring, and pairs of maxima and minima.

    Args:
        program: A :class:`~ldlt.export.program.Program`.
        matrices: Write convolutions whose matrix has at most :data:`LARGEST_MATRIX` entries as matrices.
    """
    found = copy.deepcopy(program)
    for name, layer in list(found.named_children()):
        if isinstance(layer, CircularConv):
            entries = math.prod(layer.inputs) * math.prod(layer.outputs)
            setattr(found, name, _Matrix(layer) if matrices and entries <= LARGEST_MATRIX else _Direct(layer))
        elif isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and layer.padding_mode == "circular":
            setattr(found, name, _Padded(layer))
        elif isinstance(layer, (GroupSort, MaxMin)):
            setattr(found, name, _Sort(layer))
    return found.eval()


def _around(x: Tensor, axis: int, before: int, after: int) -> Tensor:
    """An axis with its other end in front and behind; ``F.pad`` is a node that few readers know in this mode."""
    size = x.shape[axis]
    parts = [x.narrow(axis, size - before, before)] if before else []
    parts += [x, *([x.narrow(axis, 0, after)] if after else [])]
    return torch.cat(parts, axis) if len(parts) > 1 else x


class _Direct(nn.Module):
    r"""A :class:`~ldlt.images.convolutions.CircularConv` as a convolution of the image that is continued in front.

    With g cells along an axis, ``y[i] = Σ_d K[d] x[i − d mod g] = Σ_t K[g − 1 − t] x̃[i + t]`` for the image x̃ of 2g − 1
    cells that is x with its last g − 1 cells in front.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: CircularConv) -> None:
        super().__init__()
        self.inputs, self.outputs, self.cells = layer.inputs, layer.outputs, layer.cells
        spatial = tuple(range(2, layer.weight.ndim))
        self.register_buffer("weight", layer.weight.detach().flip(spatial).contiguous())
        bias = layer.bias
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """The convolved images."""
        x = grids.to_cells(x, self.cells)
        for axis, size in enumerate(self.cells, 2):
            x = _around(x, axis, size - 1, 0)
        y = grids.from_cells(_CONV[len(self.cells)](x, self.weight), self.outputs)
        return y if self.bias is None else y + self.bias.reshape(-1, *(1,) * (len(self.outputs) - 1))


class _Matrix(nn.Module):
    """A :class:`~ldlt.images.convolutions.CircularConv` as a matrix on flattened images."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: CircularConv) -> None:
        super().__init__()
        self.outputs = layer.outputs
        self.register_buffer("weight", layer.matrix().detach().contiguous())
        positions = math.prod(self.outputs[1:])
        bias = layer.bias
        self.register_buffer("bias", None if bias is None else bias.detach().repeat_interleave(positions))

    def forward(self, x: Tensor) -> Tensor:
        """The convolved images."""
        return F.linear(x.flatten(1), self.weight, self.bias).reshape(-1, *self.outputs)


class _Padded(nn.Module):
    """A convolution of PyTorch with circular padding, padded by concatenation."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        amounts = layer._reversed_padding_repeated_twice  # last axis first: (before, after) for each
        self.border = [(amounts[i], amounts[i + 1]) for i in range(0, len(amounts), 2)][::-1]
        self.layer = copy.deepcopy(layer)
        self.layer.padding_mode, self.layer.padding = "zeros", (0,) * len(self.border)

    def forward(self, x: Tensor) -> Tensor:
        """The convolved images."""
        for axis, (before, after) in enumerate(self.border, 2):
            x = _around(x, axis, before, after)
        found: Tensor = self.layer(x)
        return found


class _Sort(nn.Module):
    """Groups of channels, sorted: one operator for pairs and larger groups."""

    def __init__(self, layer: GroupSort | MaxMin) -> None:
        super().__init__()
        self.size = layer.group_size if isinstance(layer, GroupSort) else 2
        self.descending = isinstance(layer, MaxMin)

    def forward(self, x: Tensor) -> Tensor:
        """Sort within groups of axis 1, which is moved behind: readers sort along the last axis."""
        groups = x.unflatten(1, (x.shape[1] // self.size, self.size)).movedim(2, -1)
        return groups.sort(-1, descending=self.descending).values.movedim(-1, 2).flatten(1, 2)
