r"""Convolutions on a grid: transfer functions of weights, explicit maps in place of weights, frozen layers, wiring.

Every convolution of PyTorch, strided, dilated, grouped or transposed, is linear in its taps. On a grid that it commutes
with its transfer function is therefore

.. math:: T(k)_{(o, p), (i, p')} = \sum_t W_{o i t}\, E_t(k)_{p p'} ,

with ``o``, ``i`` channels, ``p``, ``p'`` pixels of a cell and ``E_t`` the response of tap ``t`` alone. ``E`` is found
once by running the layer's own operation on unit impulses; the transfer function is then one small matrix product.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ldlt.errors import ShapeError
from ldlt.graph import Convolution, Graph, Node, Wire, lookup
from ldlt.graph.convolution import Cells, Spec, commutes, meet, natural
from ldlt.images import grids
from ldlt.images.grids import Fold, from_cells, impulses, phases, to_cells, transfer
from ldlt.weights import ActingWeight


class Taps:
    """The transfer function of a convolution on one grid, as a function of its weight.

    Args:
        spec: What the layer computes.
        kernel: Size of the kernel.
        inputs: Shape (c_in, *spatial).
        outputs: Shape (c_out, *spatial).
        cells: The grid.
    """

    def __init__(
        self, spec: Spec, kernel: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...], cells: Cells
    ) -> None:
        self.spec, self.cells = spec, cells
        grid = (1,) * spec.dims if cells is None else cells
        self.inner, self.outer = math.prod(phases(inputs, cells)), math.prod(phases(outputs, cells))
        count = math.prod(kernel)
        start = impulses(self.inner, grid)
        each = torch.eye(count, dtype=torch.float64).reshape(count, 1, *kernel)  # one output channel per tap
        each = each.transpose(0, 1) if spec.transposed else each
        with torch.no_grad():
            y = spec.run(from_cells(start, (1, *inputs[1:])), each, groups=1)  # (p', t, *spatial)
            response = transfer(to_cells(y, grid), cells)  # (f, p', t p)
        response = response.reshape(-1, self.inner, count, self.outer).permute(0, 3, 1, 2)
        self.response = response.reshape(-1, count)  # (f p p', t)

    def __call__(self, weight: Tensor) -> Tensor:
        """``T`` (f, m_out, m_in) of the layer's weight."""
        taps = self.spec.taps(weight)
        out, inp, _ = taps.shape
        response = self.response.to(weight.device)
        columns = taps.reshape(out * inp, -1).mT
        if self.cells is None:
            found = response.to(weight.dtype) @ columns
        else:
            found = torch.complex(response.real.to(weight.dtype) @ columns, response.imag.to(weight.dtype) @ columns)
        if self.inner == self.outer == 1:
            found = found.reshape(-1, out, inp)
        else:
            found = found.reshape(-1, self.outer, self.inner, out, inp).permute(0, 3, 1, 4, 2)
            found = found.reshape(-1, out * self.outer, inp * self.inner)
        return found[0] if self.cells is None else found


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.reshape(-1, *(1,) * (y.ndim - 2))


class CirculantWeight(ActingWeight):
    """The explicit map of a convolution layer, which the layer's own forward function applies.

    The normalised kernel is as large as the image: ``F.conv2d`` and the like apply it in the Fourier domain when they
    get this tensor as the weight; the layer's stride, padding and groups are part of the map already.

    Args:
        spectrum: Transfer function (f, m_out, m_in), or a matrix (m_out, m_in) on a grid of one cell.
        cells: The grid.
        spec: Arguments of the layer.
        inputs: Shape (c_in, *spatial).
        outputs: Shape (c_out, *spatial).
        like: The layer's own weight, whose shape this tensor pretends to have.
    """

    calls = frozenset({F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d})

    def __new__(cls, spectrum: Tensor, cells: Cells, spec: Spec, *rest: Any) -> CirculantWeight:  # noqa: D102
        return super().__new__(cls, rest[-1].shape, rest[-1])  # type: ignore[return-value]

    def __init__(
        self, spectrum: Tensor, cells: Cells, spec: Spec, inputs: tuple[int, ...], outputs: tuple[int, ...], _: Tensor
    ) -> None:
        super().__init__()
        self.spectrum, self.cells, self.spec, self.inputs, self.outputs = spectrum, cells, spec, inputs, outputs

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CirculantWeight({self.inputs} -> {self.outputs}, cells={self.cells})"

    def apply_to(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output (batch, *outputs) for x (batch, c_in, *spatial), padded or not."""
        if tuple(x.shape[1:]) != self.inputs:
            x = self.spec.crop(x, self.inputs[1:])
        return _biased(grids.apply(self.spectrum, x, self.cells, self.outputs), bias)

    def on(self, cells: Cells) -> Tensor:
        """The transfer function on a coarser grid."""
        if cells == self.cells:
            return self.spectrum
        assert self.cells is not None
        parts = [grids.phases(s, self.cells) for s in (self.outputs, self.inputs)]
        return Fold(self.cells, cells).both(self.spectrum, *parts)

    def kernel(self) -> Tensor:
        """``K`` (m_out, m_in, *cells): ``y[i] = Σ_j K[i − j] x[j]`` on cells."""
        if self.cells is None:
            return self.spectrum.reshape(*self.spectrum.shape, *(1,) * self.spec.dims)
        return grids.kernel(self.spectrum, self.cells)

    def matrix(self) -> Tensor:
        """The unrolled map, (features of the output, features of the input)."""
        return self.on(None)

    def detached(self) -> Tensor:  # noqa: D102
        return CirculantWeight(self.spectrum.detach(), self.cells, self.spec, self.inputs, self.outputs, self)

    def multiplied_out(self) -> Tensor:  # noqa: D102
        # There is no tensor of this shape behind it: anything but a convolution is a mistake, not a slow path.
        raise TypeError(
            "the explicit map of a convolution is as large as the image, so there are no numbers in the shape of the "
            "layer's weight: use its matrix(), kernel() or spectrum"
        )


@dataclass(frozen=True)
class FrozenSpec:
    """A frozen convolution (:class:`CircularConv`): its weight is the kernel ``K`` (m_out, m_in, *cells)."""

    inputs: tuple[int, ...]  # shape (c_in, *spatial)
    outputs: tuple[int, ...]

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """What the layer computes for x (batch, c_in, *spatial)."""
        grid = tuple(weight.shape[2:])
        cells = grid if math.prod(grid) > 1 else None
        return _biased(grids.apply(transfer(weight, cells).contiguous(), x, cells, self.outputs), bias)

    def unrolled(self, weight: Tensor, inputs: tuple[int, ...], exact: bool = False) -> Tensor:
        """The matrix (features of the output, features of the input); every entry is one of the weight's."""
        grid = tuple(weight.shape[2:])
        if math.prod(grid) == 1:
            return weight.reshape(weight.shape[:2])
        return Fold(grid, None).unrolled(weight, phases(self.outputs, grid), phases(self.inputs, grid))

    def cells(self, kernel: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Cells:
        """The grid."""
        return kernel if math.prod(kernel) > 1 else None


def unrolls(outputs: int, inputs: int, cells: tuple[int, ...]) -> bool:
    """Whether a kernel (outputs, inputs, *cells) is applied as the unrolled matrix, which is faster while it is small.

    Example:
        >>> unrolls(4, 4, (4, 4)), unrolls(64, 64, (16, 16))
        (True, False)
    """
    return outputs * inputs * math.prod(cells) ** 2 <= 1 << 19  # entries


class CircularConv(nn.Module):
    r"""``y[i] = Σ_j K[i − j] x[j] + b`` on a periodic grid of cells, for images of one size: a frozen convolution.

    On images whose cells are pixels this is a circular convolution with a kernel as large as the image. Strides,
    transposed convolutions and kernels that differ between the pixels of a cell are covered by cells of several pixels
    (see ``ldlt.images.grids``). What it computes with is made from the kernel in every pass.

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

    @property
    def spec(self) -> FrozenSpec:
        """What the layer computes."""
        return FrozenSpec(self.inputs, self.outputs)

    ldlt_frozen = spec

    def matrix(self) -> Tensor:
        """The unrolled map, (features of the output, features of the input); every entry is one of the kernel's."""
        return self.spec.unrolled(self.weight, self.inputs)

    def forward(self, x: Tensor) -> Tensor:
        """The convolved images."""
        if tuple(x.shape[1:]) != self.inputs:
            raise ShapeError(
                f"this frozen convolution is for images of shape {self.inputs}, not {tuple(x.shape[1:])}: its kernel "
                "is as large as they are"
            )
        if not self.unrolled or (torch.is_grad_enabled() and self.weight.requires_grad):
            return self.spec.run(x, self.weight, self.bias)
        return _biased(grids.apply(self.matrix(), x, None, self.outputs), self.bias)

    def extra_repr(self) -> str:
        """Shapes."""
        return f"{self.inputs} -> {self.outputs}, cells={self.cells}"


def node_cells(graph: Graph, module: nn.Module, node: Node) -> Cells:
    """The finest grid on which an operation on images commutes with shifts; None if there is none."""
    parents = [graph[p].shape for p in node.parents]
    if isinstance(node, Convolution):
        return node.spec.cells(node.kernel, parents[0], node.shape)
    cells = natural(node.shape)
    for shape in parents:
        cells = meet(cells, natural(shape))
    if not isinstance(node, Wire):
        return cells
    try:
        return cells if commutes(node.bind(_anything(graph, module)), cells, parents) else None
    except _Unknown:
        return None


class _Unknown(Exception):
    """There are tensors that nothing can stand for."""


_SMOOTH = {
    *(
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "exp",
        "log",
        "tanh",
        "sigmoid",
        "softplus",
        "pow",
        "sqrt",
        "rsqrt",
        "reciprocal",
    ),
    *(
        "mm",
        "bmm",
        "sum",
        "mean",
        "clone",
        "alias",
        "detach",
        "_to_copy",
        "view",
        "_unsafe_view",
        "reshape",
        "unsqueeze",
    ),
    *("squeeze", "expand", "repeat", "permute", "transpose", "t", "slice", "select", "flip", "cat", "stack"),
    *("zeros_like", "ones_like", "new_zeros", "full"),
}
"""Of random numbers they make what is special about them only if it always is: analytic functions, and shapes."""


def _anything(graph: Graph, module: nn.Module) -> Callable[[str], Tensor]:
    """The tensors of a graph with other numbers: whether an operation commutes must not depend on those it has.

    A comparison, say, may come out the same for all random numbers that are tried: its result is what is random then.
    """

    def other(path: str, found: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(path.encode()))
        drawn = torch.rand(found.shape, generator=generator, dtype=torch.float64)
        if found.dtype == torch.bool:
            return drawn < 0.5
        if not found.is_floating_point():  # a table of indices: any other one would be a guess
            raise _Unknown
        return 0.5 + drawn

    def read(path: str) -> Tensor:
        constant = graph.constants.get(path)
        if constant is None:
            return other(path, lookup(module, path))
        found = constant.make(read)
        smooth = constant.target.removeprefix("aten.").split(".")[0] in _SMOOTH and found.is_floating_point()
        return found if smooth or not graph.sources(path) else other(path, found)

    return read
