"""Fixed linear operations on images, as maps between the local features of a grid."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ldlt.convolution import commutes
from ldlt.graph import Convolution, Graph, Node, Tensors, Wire, lookup
from ldlt.grid import Cells, from_cells, impulses, local, meet, natural, to_cells, transfer

__all__ = ["local_maps", "node_cells"]


def node_cells(graph: Graph, module: nn.Module, node: Node) -> Cells:
    """The finest grid on which an operation on images commutes with shifts; None if there is none."""
    parents = [graph[p].shape for p in node.parents]
    if isinstance(node, Convolution):
        return node.spec.cells(node.kernel, parents[0], node.shape)
    cells = natural(node.shape)
    for shape in parents:
        cells = meet(cells, natural(shape))
    if isinstance(node, Wire) and not commutes(node.bind(graph.tensors(_anything(module))), cells, parents):
        return None
    return cells


def _anything(module: nn.Module) -> Callable[[str], Tensor]:
    """The tensors of a module with other numbers: whether an operation commutes must not depend on what they are now."""

    def read(path: str) -> Tensor:
        found: Tensor = lookup(module, path)
        if not found.is_floating_point():  # a table of indices: any other one would be a guess
            return found
        generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
        return 0.5 + torch.rand(found.shape, generator=generator, dtype=torch.float64)

    return read


def local_maps(
    node: Wire, tensors: Tensors, shapes: Sequence[tuple[int, ...]], cells: tuple[int, ...]
) -> list[Tensor]:
    """The maps of an operation that commutes with the grid, one per parent: what ``ldlt.generator.through`` takes.

    They are found by running the operation on unit impulses in one cell.

    Args:
        node: The operation.
        tensors: Gives its constants.
        shapes: Shapes of the parents.
        cells: The grid.
    """
    found = []
    for place, shape in enumerate(shapes):
        count = local(shape, cells)
        start = impulses(count, cells)
        xs = [torch.zeros(count, *s, dtype=torch.float64) for s in shapes]
        xs[place] = from_cells(start, shape)
        with torch.no_grad():
            y = to_cells(node.bind(tensors)(*xs), cells).transpose(0, 1)  # (m_out, m_in, *cells)
        found.append(transfer(y, cells) if node.constants else _simplest(y, cells))
    return found


def _simplest(kernels: Tensor, cells: tuple[int, ...]) -> Tensor:
    """Indices, a matrix or a transfer function, whichever is enough for kernels (m_out, m_in, *cells)."""
    flat = kernels.reshape(*kernels.shape[:2], math.prod(cells))
    if bool((flat[..., 1:] != 0).any()):
        return transfer(kernels, cells)
    matrix = flat[..., 0]
    plain = bool(((matrix == 0) | (matrix == 1)).all()) and bool((matrix.sum(1) <= 1).all())
    if not plain:
        return matrix
    index = matrix.argmax(1)
    return torch.where(matrix.sum(1) == 0, -1, index)
