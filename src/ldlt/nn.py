"""Ready networks: each is :class:`ldlt.Lipschitz` around a plain module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ldlt.errors import OptionError, ShapeError
from ldlt.network import Lipschitz

__all__ = ["FeedForward", "Residual", "Standardise", "feed_forward_module", "residual_module"]


def _sizes(in_features: int, hidden: Sequence[int], out_features: int) -> list[int]:
    if isinstance(hidden, (int, str)):
        raise ShapeError(f"hidden must be a list of widths such as [64, 64], not {hidden!r}")
    sizes = [in_features, *hidden, out_features]
    if any(isinstance(s, bool) or int(s) != s or s < 1 for s in sizes):
        raise ShapeError(f"all sizes must be positive integers, not {sizes}")
    return [int(s) for s in sizes]


def _make(activation: Callable[[], nn.Module]) -> nn.Module:
    if isinstance(activation, nn.Module) or not callable(activation):
        raise OptionError(
            "activation must be a class or function that makes a module, such as torch.nn.ReLU (no brackets)"
        )
    return activation()


def _hidden(sizes: Sequence[int], activation: Callable[[], nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), _make(activation)]
    return nn.Sequential(*layers)


def feed_forward_module(
    in_features: int, hidden: Sequence[int], out_features: int, activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Sequential:
    """Plain multi-layer perceptron, the module inside :class:`FeedForward`."""
    sizes = _sizes(in_features, hidden, out_features)
    return nn.Sequential(*_hidden(sizes[:-1], activation), nn.Linear(sizes[-2], sizes[-1]))


class Standardise(nn.Module):
    """``(x − mean) / scale`` as a layer, so that bounds and radii are in the units of the data.

    Args:
        mean: One number per feature, or one for all.
        scale: Positive and finite, likewise.

    Example:
        >>> Standardise(torch.tensor([5.0, 100.0]), torch.tensor([1.0, 20.0]))(torch.tensor([[6.0, 80.0]]))
        tensor([[ 1., -1.]])
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor | float, scale: Tensor | float) -> None:
        super().__init__()
        center, spread = torch.as_tensor(mean).detach().clone(), torch.as_tensor(scale).detach().clone()
        if not center.is_floating_point() or not spread.is_floating_point():
            raise OptionError("mean and scale must be floating-point numbers")
        if not bool(center.isfinite().all() & spread.isfinite().all() & (spread > 0).all()):
            raise OptionError("mean must be finite, scale must be finite and positive")
        self.register_buffer("mean", center)
        self.register_buffer("scale", spread)

    def forward(self, x: Tensor) -> Tensor:
        """The standardised inputs, of the shape of ``x`` (batch, *shape)."""
        return (x - self.mean) / self.scale


class _Skip(nn.Module):
    """``A x + B w_n`` with ``w_j = σ(C_j w_{j−1} + b_j)``, ``w_0 = x``."""

    def __init__(self, sizes: Sequence[int], activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.body = _hidden(sizes[:-1], activation)
        self.head = nn.Linear(sizes[-2], sizes[-1])
        self.skip = nn.Linear(sizes[0], sizes[-1], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, in_features) to (batch, out_features)."""
        return self.skip(x) + self.head(self.body(x))


def residual_module(
    in_features: int, hidden: Sequence[int], out_features: int, activation: Callable[[], nn.Module] = nn.ReLU
) -> nn.Module:
    """Plain residual block, the module inside :class:`Residual`."""
    sizes = _sizes(in_features, hidden, out_features)
    if len(sizes) < 3:
        raise ShapeError("a residual network needs at least one hidden layer")
    return _Skip(sizes, activation)


class _Ready(Lipschitz):
    """A network of given sizes.

    Args:
        in_features: Number of inputs.
        hidden: Widths of the hidden layers.
        out_features: Number of outputs.
        bound: ℓ.
        activation: Makes one activation module.
        dtype: Floating-point type.
        device: Where the parameters live.
        **options: Passed to :class:`ldlt.Lipschitz`.
    """

    build: ClassVar[Callable[..., nn.Module]]

    def __init__(
        self,
        in_features: int,
        hidden: Sequence[int],
        out_features: int,
        bound: float = 1.0,
        *,
        activation: Callable[[], nn.Module] = nn.ReLU,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        module = type(self).build(in_features, hidden, out_features, activation).to(dtype=dtype, device=device)
        super().__init__(module, bound, input_shape=int(in_features), **options)


class FeedForward(_Ready):
    """LDLT-L: a multi-layer perceptron that is ℓ-Lipschitz end to end.

    ``FeedForward(in_features, hidden, out_features, bound=1.0, *, activation=nn.ReLU, dtype=None, device=None,
    **options)``: ``hidden`` is a list of widths, ``activation`` makes one activation module, the options are those of
    :class:`ldlt.Lipschitz`.

    Example:
        >>> FeedForward(8, [64] * 4, 3, bound=1.0)(torch.randn(2, 8)).shape
        torch.Size([2, 3])
    """

    build = staticmethod(feed_forward_module)


class Residual(_Ready):
    """LDLT-R: as :class:`FeedForward`, plus a free linear map from the input straight to the output.

    Example:
        >>> Residual(8, [64] * 4, 3, bound=1.0)(torch.randn(2, 8)).shape
        torch.Size([2, 3])
    """

    build = staticmethod(residual_module)
