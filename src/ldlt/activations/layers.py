r"""Activations that torch.nn has not: as modules, so that they are found by their class.

The joint ones are 1-Lipschitz over groups of entries: by the rearrangement inequality sorting never moves two vectors
apart, :math:`\|\mathrm{sort}\,x - \mathrm{sort}\,y\| \le \|x - y\|`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ldlt import check
from ldlt.errors import OptionError, ShapeError

__all__ = ["Abs", "Atan", "Clamp", "Cos", "GroupSort", "Masked", "MaxMin", "Sin", "WindowSort"]


class Abs(nn.Module):
    """Absolute value, elementwise."""

    def forward(self, input: Tensor) -> Tensor:
        return input.abs()


class Sin(nn.Module):
    """Sine, elementwise."""

    def forward(self, input: Tensor) -> Tensor:
        return input.sin()


class Cos(nn.Module):
    """Cosine, elementwise."""

    def forward(self, input: Tensor) -> Tensor:
        return input.cos()


class Atan(nn.Module):
    """Arc tangent, elementwise."""

    def forward(self, input: Tensor) -> Tensor:
        return input.atan()


class Clamp(nn.Module):
    """``torch.clamp`` with fixed limits, of which one may be missing.

    Args:
        min: Lower limit, or None.
        max: Upper limit, or None. If it is below ``min`` the output is constant, as in ``torch.clamp``.

    >>> Clamp(min=0.5)(torch.tensor([-2.0, 1.0]))
    tensor([0.5000, 1.0000])
    """

    def __init__(self, min: float | None = None, max: float | None = None) -> None:
        super().__init__()
        if min is None and max is None:
            raise OptionError("Clamp needs at least one of 'min' and 'max'")
        self.min = min
        self.max = max

    def forward(self, input: Tensor) -> Tensor:
        return input.clamp(self.min, self.max)

    def extra_repr(self) -> str:
        return f"min={self.min}, max={self.max}"


def _groups(input: Tensor, size: int, name: str) -> Tensor:
    """Split dimension 1 into ``(d // size, size)``."""
    if input.dim() < 2 or input.shape[1] % size:
        raise ShapeError(
            f"{name} sorts groups of {size} along dimension 1 of a (batch, d, ...) tensor, so d must be "
            f"divisible by {size}; got shape {tuple(input.shape)}"
        )
    return input.unflatten(1, (input.shape[1] // size, size))


class GroupSort(nn.Module):
    r"""Sort each group of consecutive entries of dimension 1, ascending.

    1-Lipschitz jointly over a group: by the rearrangement inequality sorting never moves two vectors apart,
    :math:`\|\mathrm{sort}\,x - \mathrm{sort}\,y\| \le \|x - y\|`. Its Jacobian is a permutation, so it keeps
    the norms of gradients.

    Args:
        group_size: Entries per group, a divisor of the size of dimension 1.

    >>> GroupSort(3)(torch.tensor([[3.0, 1.0, 2.0, 9.0, 8.0, 7.0]]))
    tensor([[1., 2., 3., 7., 8., 9.]])
    """

    def __init__(self, group_size: int) -> None:
        super().__init__()
        self.group_size = check.whole("group_size", group_size)

    def forward(self, input: Tensor) -> Tensor:
        return _groups(input, self.group_size, "GroupSort").sort(dim=2).values.flatten(1, 2)

    def extra_repr(self) -> str:
        return f"group_size={self.group_size}"


class WindowSort(nn.Module):
    r"""Sort the entries of each window of an image, channel by channel, in descending order.

    1-Lipschitz jointly over a window, like :class:`GroupSort`. Its first entries are max-pooling over disjoint windows.

    Args:
        window: Size of the windows along each spatial dimension, divisors of the image's sizes.

    >>> WindowSort((2,))(torch.tensor([[[3.0, 5.0, 2.0, 1.0]]]))
    tensor([[[5., 3., 2., 1.]]])
    """

    def __init__(self, window: tuple[int, ...]) -> None:
        super().__init__()
        if not window or any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in window):
            raise OptionError(f"window must be a tuple of positive integers, got {window!r}")
        self.window = tuple(window)

    def forward(self, input: Tensor) -> Tensor:
        sizes = input.shape[2:]
        if len(sizes) != len(self.window) or any(n % w for n, w in zip(sizes, self.window, strict=True)):
            raise ShapeError(f"WindowSort sorts windows of {self.window}, which do not divide {tuple(sizes)}")
        d = len(sizes)
        split = [k for n, w in zip(sizes, self.window, strict=True) for k in (n // w, w)]
        order = [0, 1, *range(2, 2 + 2 * d, 2), *range(3, 3 + 2 * d, 2)]
        windows = input.reshape(*input.shape[:2], *split).permute(order)
        ordered = windows.flatten(2 + d).sort(-1, descending=True).values.reshape(windows.shape)
        back = [0, 1, *(i for j in range(d) for i in (2 + j, 2 + d + j))]
        return ordered.permute(back).reshape(input.shape)

    def extra_repr(self) -> str:
        return f"window={self.window}"


def _sorted_pairs(pairs: Tensor) -> Tensor:
    """(batch, d/2, 2, ...) with the pairs in descending order."""
    a, b = pairs.unbind(2)
    return torch.stack((torch.maximum(a, b), torch.minimum(a, b)), 2)


class _SortedPairs(torch.autograd.Function):
    """:func:`_sorted_pairs`, with the gradient permuted back by arithmetic.

    For the gradients ``g, h`` of maximum and minimum, ``e = (g − h) [a > b]`` gives those of ``a`` and ``b`` as
    ``h + e`` and ``g − e``. Autograd's own, by masks and with ties shared, took six times as long.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(pairs: Tensor) -> Tensor:
        return _sorted_pairs(pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        a, b = ctx.saved_tensors[0].unbind(2)
        g, h = grads[0].unbind(2)
        e = torch.ops.aten.threshold_backward(g - h, a - b, 0)
        return torch.stack((h + e, g - e), 2)


class MaxMin(nn.Module):
    """Replace each pair of consecutive entries of dimension 1 by its (maximum, minimum).

    1-Lipschitz jointly over a pair, like :class:`GroupSort` with groups of two (in descending order).

    >>> MaxMin()(torch.tensor([[1.0, 2.0, 4.0, 3.0]]))
    tensor([[2., 1., 4., 3.]])
    """

    def forward(self, input: Tensor) -> Tensor:
        pairs = _groups(input, 2, "MaxMin")
        return (_SortedPairs.apply(pairs) if pairs.requires_grad else _sorted_pairs(pairs)).flatten(1, 2)  # type: ignore[no-untyped-call]


class Masked(nn.Module):
    """An activation of which some entries may be set to zero: its sector is the smallest that contains slope 0, too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The activation."""
        found: Tensor = self.inner.forward(x)
        return found
