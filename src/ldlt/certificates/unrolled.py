"""Convolutions of a given network as dense layers, for inputs small enough.

The matrix of a convolution has the entries of its kernel and zeros, so the dense network computes the same function in
real arithmetic, weight for weight; what is proven for it is proven for the convolutional one. Average pooling becomes a
mean over an axis. Layers for which that would not be exact (entries that are repeated by the padding, windows of
averages that overlap) are left alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ldlt.errors import GraphError, ShapeError
from ldlt.evaluation import evaluating, reference
from ldlt.graph.convolution import Spec

__all__ = ["LARGEST", "TooLargeError", "has_convolutions", "unrolled"]

LARGEST = 40_000_000
"""Entries of all matrices together, above which a network is not unrolled."""


class TooLargeError(GraphError):
    """A network whose convolutions are too large as matrices."""


class Unrolled(nn.Module):
    """A linear layer on flattened samples.

    Args:
        weight: (outputs, inputs).
        bias: (outputs,), or None.
        shape: Shape of one output.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, shape: Sequence[int]) -> None:
        super().__init__()
        self.map = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        self.map.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.map.bias = nn.Parameter(bias, requires_grad=False)
        self.shape = tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, *inputs) to (batch, *shape)."""
        return self.map(x.flatten(1)).unflatten(1, self.shape)


class Pooled(nn.Module):
    """Means over disjoint windows of the last axes.

    Args:
        windows: Sizes of the windows.
        shape: Shape of one input.
    """

    def __init__(self, windows: Sequence[int], shape: Sequence[int]) -> None:
        super().__init__()
        self.windows, self.shape = tuple(windows), tuple(shape)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, c, *sizes) to (batch, c, *sizes / windows)."""
        split = [n for size, k in zip(self.shape[1:], self.windows, strict=True) for n in (size // k, k)]
        axes = tuple(range(3, 3 + 2 * len(self.windows), 2))
        return x.reshape(-1, self.shape[0], *split).mean(axes)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
_SLIDING = (*_CONVOLUTIONS, *_AVERAGES)


def has_convolutions(model: nn.Module) -> bool:
    """Whether a network has layers that :func:`unrolled` replaces."""
    return any(isinstance(m, _SLIDING) for m in model.modules())


def unrolled(model: nn.Module, input_shape: Sequence[int]) -> nn.Module:
    """A copy of a network with dense layers in place of convolutions, and means in place of average pooling.

    Args:
        model: The network; one without such layers is returned as it is.
        input_shape: Shape of one input.

    Raises:
        TooLargeError: The matrices have more than :data:`LARGEST` entries.
        GraphError: A layer is used with inputs of several shapes.
        ShapeError: The input's shape does not fit.
    """
    if not has_convolutions(model):
        return model
    plain = copy.deepcopy(model)
    shapes = _input_shapes(plain, input_shape)
    total = sum(math.prod(i) * math.prod(o) for m, (i, o) in shapes.items() if isinstance(m, _CONVOLUTIONS))
    if total > LARGEST:
        raise TooLargeError(f"as matrices its convolutions have {total:.2g} entries, more than {LARGEST:.2g}")
    places = {m: (parent, name) for parent in plain.modules() for name, m in parent.named_children()}
    for layer, (before, after) in shapes.items():
        dense = _dense(layer, before, after).train(layer.training)
        if layer is plain:
            return dense
        parent, name = places[layer]
        setattr(parent, name, dense)
    return plain


def _input_shapes(
    model: nn.Module, input_shape: Sequence[int]
) -> dict[nn.Module, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of one input and one output of every layer that slides, from a run on zeros."""
    found: dict[nn.Module, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def hook(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        shapes = tuple(given[0].shape[1:]), tuple(output.shape[1:])
        if found.setdefault(layer, shapes) != shapes:
            raise GraphError(f"a {type(layer).__name__} is used for inputs of several shapes; use one layer for each")

    handles = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, _SLIDING)]
    try:
        with torch.no_grad(), evaluating(model):
            model(torch.zeros(1, *input_shape).to(reference(model)))
    except RuntimeError as error:
        shown = ", ".join(map(str, input_shape))
        raise ShapeError(f"the model does not accept an input of shape (batch, {shown}): {error}") from error
    finally:
        for handle in handles:
            handle.remove()
    return found


def _dense(layer: nn.Module, before: tuple[int, ...], after: tuple[int, ...]) -> nn.Module:
    """What takes the place of a layer; the layer itself if nothing exact does."""
    if isinstance(layer, _AVERAGES):
        windows = [size // out if size % out == 0 else 0 for size, out in zip(before[1:], after[1:], strict=True)]
        return Pooled(windows, before) if _is_disjoint(layer, windows) else layer
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    reach = [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    fits = all(r <= n for r, n in zip(reach, before[1:], strict=True))  # no entry of the input is met twice
    if not (layer.padding_mode == "zeros" or (layer.padding_mode == "circular" and fits)):
        return layer
    matrix = Spec.of(layer).unrolled(layer.weight.detach(), before, exact=True)
    bias = None if layer.bias is None else layer.bias.detach().repeat_interleave(math.prod(after[1:]))
    return Unrolled(matrix, bias, after)


def _is_disjoint(layer: nn.Module, windows: Sequence[int]) -> bool:
    """Whether an average is over windows of these sizes, side by side and without padding."""
    if not all(windows):
        return False
    if isinstance(layer, nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d):
        return True

    def each(value: int | tuple[int, ...]) -> list[int]:
        return [value] * len(windows) if isinstance(value, int) else list(value)

    assert isinstance(layer, nn.AvgPool1d | nn.AvgPool2d)
    plain = not any(each(layer.padding)) and getattr(layer, "divisor_override", None) is None
    return plain and each(layer.kernel_size) == list(windows) == each(layer.stride)
