"""Ready networks: each is :class:`ldlt.Lipschitz` around a plain module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ldlt.errors import OptionError, ShapeError
from ldlt.network import Lipschitz

__all__ = ["FeedForward", "Residual", "feed_forward_module", "residual_module"]


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
