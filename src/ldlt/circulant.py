"""An explicit convolution: an operator that commutes with the shifts of a grid, in place of a layer's weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ldlt import grid
from ldlt.convolution import Spec
from ldlt.grid import Cells, Fold

__all__ = ["CirculantWeight", "RememberUnpadded"]

_CALLS = {
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
}


class RememberUnpadded(TorchFunctionMode):
    """Within this context an image that ``F.pad`` has continued circularly remembers the image it was made from.

    A layer pads its input before it calls the convolution. An explicit map has no use for the border: cropping it gives
    the right numbers, but its gradient takes the long way back through the padding, which was measured at a third of
    a training step. With this, :class:`CirculantWeight` reads the image itself.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        options = kwargs or {}
        found = func(*args, **options)
        if func is F.pad and "circular" in (options.get("mode"), *args[2:3]) and found.requires_grad:
            image = options["input"] if "input" in options else args[0]
            found._unpadded = (image, image._version, found._version)
        return found


def _unpadded(x: Tensor) -> Tensor | None:
    """The image that ``x`` was padded from, if that is known and neither has been changed since."""
    image, *versions = getattr(x, "_unpadded", (None,))
    return image if image is not None and versions == [image._version, x._version] else None


class CirculantWeight(Tensor):
    """The explicit map of a convolution layer, which the layer's own forward function applies.

    The normalised kernel is as large as the image, so it cannot stand in the layer as a weight of the same shape.
    Whoever calls ``F.conv2d`` and the like with this tensor as the weight gets the explicit map, applied in the Fourier
    domain; the layer's stride, padding and groups are part of the map already.

    Args:
        spectrum: Transfer function (f, m_out, m_in), or a matrix (m_out, m_in) on a grid of one cell.
        cells: The grid.
        spec: Arguments of the layer.
        inputs: Shape (c_in, *spatial).
        outputs: Shape (c_out, *spatial).
        like: The layer's own weight, whose shape this tensor pretends to have.
    """

    spectrum: Tensor
    cells: Cells
    spec: Spec
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __new__(  # noqa: D102
        cls,
        spectrum: Tensor,
        cells: Cells,
        spec: Spec,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        like: Tensor,
    ) -> CirculantWeight:
        self: CirculantWeight = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, dtype=like.dtype, device=spectrum.device, requires_grad=False
        )
        self.spectrum, self.cells, self.spec, self.inputs, self.outputs = spectrum, cells, spec, inputs, outputs
        return self

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CirculantWeight({self.inputs} -> {self.outputs}, cells={self.cells})"

    def apply_to(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The layer's output (batch, *outputs) for x (batch, c_in, *spatial), padded or not."""
        if tuple(x.shape[1:]) != self.inputs:
            image = _unpadded(x)
            x = self.spec.crop(x, self.inputs[1:]) if image is None else image
        y = grid.apply(self.spectrum, x, self.cells, self.outputs)
        return y if bias is None else y + bias.reshape(-1, *(1,) * self.spec.dims)

    def on(self, cells: Cells) -> Tensor:
        """The transfer function on a coarser grid."""
        if cells == self.cells:
            return self.spectrum
        assert self.cells is not None
        parts = [grid.phases(s, self.cells) for s in (self.outputs, self.inputs)]
        return Fold(self.cells, cells).both(self.spectrum, *parts)

    def kernel(self) -> Tensor:
        """``K`` (m_out, m_in, *cells): ``y[i] = Σ_j K[i − j] x[j]`` on cells."""
        if self.cells is None:
            return self.spectrum.reshape(*self.spectrum.shape, *(1,) * self.spec.dims)
        return grid.kernel(self.spectrum, self.cells)

    def matrix(self) -> Tensor:
        """The unrolled map, (features of the output, features of the input)."""
        return self.on(None)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        options = dict(kwargs or {})
        if func in _CALLS:
            given = dict(zip(("input", "weight", "bias"), args, strict=False)) | options
            weight = given["weight"]
            if isinstance(weight, CirculantWeight):
                return weight.apply_to(given["input"], given.get("bias"))
        if func is Tensor.detach:
            (old,) = args
            return CirculantWeight(old.spectrum.detach(), old.cells, old.spec, old.inputs, old.outputs, old)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **options)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # There is no tensor of this shape behind it: anything but a convolution is a mistake, not a slow path.
        raise TypeError(
            f"{func} needs the numbers of a convolution's weight, but its explicit map is as large as the image: "
            "use its matrix(), kernel() or spectrum"
        )
