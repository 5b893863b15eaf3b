"""Networks in operations that every runtime knows; equal in real arithmetic."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt.activations import GroupSort, MaxMin
from ldlt.export.program import Program, Writer
from ldlt.graph.convolution import Spec
from ldlt.graph.nodes import Activation, Convolution, Graph, Node, Wire
from ldlt.images import grids
from ldlt.images.convolutions import FrozenSpec

__all__ = ["LARGEST_MATRIX", "portable"]

LARGEST_MATRIX = 2**22
"""Entries up to which a convolution is written as a matrix, where that is asked for."""

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def portable(model: nn.Module, graph: Graph, *, matrices: bool = False) -> Program:
    """A network as a program without Fourier transforms, padding around a ring, and pairs of maxima and minima.

    Args:
        model: The network.
        graph: What :func:`~ldlt.graph.trace.trace` returned for it.
        matrices: Write convolutions and averages whose matrix has at most :data:`LARGEST_MATRIX` entries as matrices.
    """
    return _Portable(model, graph, matrices).write()


class _Portable(Writer):
    def __init__(self, model: nn.Module, graph: Graph, matrices: bool) -> None:
        super().__init__(model, graph)
        self.matrices = matrices

    def wire(self, node: Wire) -> str:
        if self._small(node) and (node.operation.startswith("conv") or "avg_pool" in node.operation):
            parent = self.graph[node.parents[0]]
            units = torch.eye(parent.features, dtype=torch.float64).reshape(-1, *parent.shape)
            return self.layer(_Matrix(node.linear(self.read)(units).flatten(1).T, None, node.shape), node)
        return super().wire(node)

    def convolution(self, node: Convolution) -> str:
        weight, bias = self.read(node.weight), None if node.bias is None else self.read(node.bias)
        if self._small(node):
            return self.layer(_Matrix(node.matrix(weight, self.graph), bias, node.shape), node)
        if isinstance(node.spec, FrozenSpec):
            return self.layer(_Direct(node.spec, weight, bias), node)
        assert isinstance(node.spec, Spec)
        if node.spec.mode != "circular":
            return super().convolution(node)
        # F.pad is a node that few readers know in this mode.
        around = self.layer(_Around(node.spec.border), node)
        return self.convolved(node, dataclasses.replace(node.spec, mode="zeros", border=()), around)

    def activation(self, node: Activation) -> str:
        layer = node.resolve(self.model)
        return self.layer(_Sort(layer), node) if isinstance(layer, (GroupSort, MaxMin)) else super().activation(node)

    def _small(self, node: Node) -> bool:
        return self.matrices and len(node.parents) == 1 and (
            node.features * self.graph[node.parents[0]].features <= LARGEST_MATRIX
        )  # fmt: skip


class _Around(nn.Module):
    """Images continued around a ring, by concatenation.

    Args:
        border: Cells in front and behind for each axis, last axis first.
    """

    def __init__(self, border: Sequence[int]) -> None:
        super().__init__()
        self.border = tuple(zip(border[::2], border[1::2], strict=True))[::-1]

    def forward(self, x: Tensor) -> Tensor:
        """The continued images."""
        for axis, (before, after) in enumerate(self.border, 2):
            front = [x.narrow(axis, x.shape[axis] - before, before)] if before else []
            behind = [x.narrow(axis, 0, after)] if after else []
            x = torch.cat([*front, x, *behind], axis) if front or behind else x
        return x


class _Direct(nn.Module):
    r"""A :class:`~ldlt.images.convolutions.CircularConv` as a convolution of the image that is continued in front.

    With g cells along an axis, ``y[i] = Σ_d K[d] x[i − d mod g] = Σ_t K[g − 1 − t] x̃[i + t]`` for the image x̃ of 2g − 1
    cells that is x with its last g − 1 cells in front.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, spec: FrozenSpec, kernel: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.outputs, self.cells = spec.outputs, tuple(kernel.shape[2:])
        self.register_buffer("weight", kernel.detach().flip(tuple(range(2, kernel.ndim))).contiguous())
        self.register_buffer("bias", None if bias is None else bias.detach().reshape(-1, *(1,) * len(self.cells)))
        self.around = _Around([n for size in self.cells[::-1] for n in (size - 1, 0)])

    def forward(self, x: Tensor) -> Tensor:
        """The convolved images."""
        x = self.around(grids.to_cells(x, self.cells))
        y = grids.from_cells(_CONV[len(self.cells)](x, self.weight), self.outputs)
        return y if self.bias is None else y + self.bias


class _Matrix(nn.Module):
    """A map of images as a matrix on flattened ones."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, matrix: Tensor, bias: Tensor | None, outputs: tuple[int, ...]) -> None:
        super().__init__()
        self.outputs = outputs
        spread = None if bias is None else bias.detach().repeat_interleave(math.prod(outputs[1:]))
        self.register_buffer("weight", matrix.detach().contiguous())
        self.register_buffer("bias", spread)

    def forward(self, x: Tensor) -> Tensor:
        """The images that it makes."""
        return F.linear(x.flatten(1), self.weight, self.bias).reshape(-1, *self.outputs)


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
