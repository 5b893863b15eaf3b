"""Ready networks: each is :class:`ldlt.Lipschitz` around a plain module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ldlt.engine.network import Lipschitz
from ldlt.errors import OptionError, ShapeError

__all__ = [
    "ConvResNet",
    "FeedForward",
    "Residual",
    "Standardise",
    "UNet",
    "conv_resnet_module",
    "feed_forward_module",
    "residual_module",
    "unet_module",
]


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

    ldlt_standardise = True  # see ldlt.graph.direct

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

    ldlt_composed = True  # of layers and sums alone: see ldlt.graph.direct

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


def _circular(inputs: int, outputs: int, dims: int, **options: Any) -> nn.Module:
    """A convolution with kernel 3 and circular padding."""
    layer: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    found: nn.Module = layer(inputs, outputs, 3, padding=1, padding_mode="circular", **options)
    return found


def _image_shape(shape: Sequence[int], halvings: int) -> tuple[int, ...]:
    found = tuple(int(n) for n in shape)
    if not 2 <= len(found) <= 4 or any(n < 1 for n in found):
        raise ShapeError(f"an image has a shape (channels, height, width), not {tuple(shape)}")
    step = 2**halvings
    if any(n % step for n in found[1:]):
        raise ShapeError(
            f"the image is halved {halvings} times, so that its sizes must be multiples of {step}, not {found[1:]}: "
            "pad the data or use fewer levels"
        )
    return found


class _UNet(nn.Module):
    """``w_i = σ(C_i w_{i−1})``, ``w_{d+j} = σ(C_1 w_{d−j} + C_2 w_{d+j−1})``, ``y = B w_{2d−1}``; see :class:`UNet`."""

    ldlt_composed = True  # of layers and sums alone: see ldlt.graph.direct

    def __init__(
        self,
        inputs: int | Sequence[int],
        hidden: Sequence[int],
        outputs: int,
        activation: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        dense = isinstance(inputs, int)
        sizes = _sizes(inputs if isinstance(inputs, int) else int(inputs[0]), hidden, outputs)
        if len(sizes) < 4:
            raise ShapeError("a U-Net needs at least two levels: the last one is the latent code")
        depth = len(sizes) - 2
        dims = 0 if isinstance(inputs, int) else len(_image_shape(inputs, depth - 1)) - 1
        up: Any = None if dense else {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}[dims]

        def flat(i: int, o: int, **options: Any) -> nn.Module:
            return nn.Linear(i, o) if dense else _circular(i, o, dims, **options)

        widths = sizes[1:-1]
        self.down = nn.ModuleList([flat(sizes[0], widths[0])])
        for i, o in pairwise(widths):
            self.down.append(nn.Linear(i, o) if dense else _circular(i, o, dims, stride=2))
        self.encode_activations = nn.ModuleList([_make(activation) for _ in widths])
        self.skips, self.up = nn.ModuleList(), nn.ModuleList()
        for o, i in pairwise(widths):
            self.skips.append(flat(o, o))
            self.up.append(nn.Linear(i, o, bias=False) if dense else up(i, o, 2, stride=2, bias=False))
        self.decode_activations = nn.ModuleList([_make(activation) for _ in widths[1:]])
        self.head = flat(widths[0], sizes[-1])

    def encode(self, x: Tensor) -> Tensor:
        """The latent code ``w_d``."""
        return self._codes(x)[-1]

    def _codes(self, x: Tensor) -> list[Tensor]:
        found = []
        for layer, activation in zip(self.down, self.encode_activations, strict=True):
            x = activation(layer(x))
            found.append(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """(batch, *inputs) to (batch, *outputs)."""
        *codes, w = self._codes(x)
        for j in reversed(range(len(codes))):
            w = self.decode_activations[j](self.skips[j](codes[j]) + self.up[j](w))
        return self.head(w)


class _Encoder(nn.Module):
    """The first half of a U-Net as a module of its own."""

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, x: Tensor) -> Tensor:
        """(batch, *inputs) to the latent code."""
        found: Tensor = self.unet.encode(x)  # type: ignore[operator]
        return found


def unet_module(
    inputs: int | Sequence[int],
    hidden: Sequence[int],
    outputs: int,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Module:
    """Plain U-Net, the module inside :class:`UNet`."""
    return _UNet(inputs, hidden, outputs, activation)


class UNet(Lipschitz):
    r"""A U-Net that is ℓ-Lipschitz end to end, with a certified constant of its latent code.

    With ``d = len(hidden)`` levels

    .. math::

        w_i = σ(C_i w_{i-1} + b_i), \; i = 1 … d, \qquad
        w_{d+j} = σ(C_{d+j,1} w_{d-j} + C_{d+j,2} w_{d+j-1} + b_{d+j}), \; j = 1 … d-1, \qquad y = B w_{2d-1} + b ,

    ``w_0 = x``; ``w_d`` is the latent code. The two maps that meet in a level of the decoder are normalised together:
    they are one map that reads the concatenation of the skip and of what comes from below.

    Args:
        inputs: Number of features, or the shape (channels, height, width) of images, whose sizes must be multiples of
            ``2^{d-1}``. For images the maps are convolutions with circular padding, down with stride 2, up transposed.
        hidden: Widths (or channels) of the levels, from the first to the latent one.
        outputs: Number of outputs (or output channels).
        bound: ℓ.
        activation: Makes one activation module.
        dtype: Floating-point type.
        device: Where the parameters live.
        **options: Passed to :class:`ldlt.Lipschitz`.

    Example:
        >>> net = UNet((1, 8, 8), [4, 8], 1)
        >>> net(torch.randn(2, 1, 8, 8)).shape, net.encode(torch.randn(2, 1, 8, 8)).shape
        (torch.Size([2, 1, 8, 8]), torch.Size([2, 8, 4, 4]))
    """

    def __init__(
        self,
        inputs: int | Sequence[int],
        hidden: Sequence[int],
        outputs: int,
        bound: float = 1.0,
        *,
        activation: Callable[[], nn.Module] = nn.ReLU,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        module = unet_module(inputs, hidden, outputs, activation).to(dtype=dtype, device=device)
        super().__init__(module, bound, input_shape=inputs, **options)

    def encode(self, x: Tensor) -> Tensor:
        """The latent code of x (batch, *inputs), :attr:`latent_bound`-Lipschitz; differentiable."""
        return self._evaluate(x, _Encoder(self.module), "unet.")[0]

    @property
    def latent_bound(self) -> float:
        """The certified Lipschitz constant of the latent code."""
        return self.bound_of(f"encode_activations_{len(self.module.down) - 1}")  # type: ignore[arg-type]


class _ConvResNet(nn.Module):
    """Stages of residual blocks ``h ← h + B σ(C h)`` on images, halved between them, and a dense head."""

    ldlt_composed = True  # of layers and sums alone: see ldlt.graph.direct

    def __init__(
        self,
        shape: Sequence[int],
        channels: Sequence[int],
        outputs: int,
        blocks: int,
        activation: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        image = _image_shape(shape, len(channels) - 1)
        sizes, dims = _sizes(image[0], channels, outputs), len(image) - 1
        if len(sizes) < 3 or blocks < 1:
            raise ShapeError("a residual network needs at least one stage and one block in each")
        patch: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        self.enter, self.inner, self.outer = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.activations = nn.ModuleList()
        for stage, (i, o) in enumerate(pairwise(sizes[:-1])):
            self.enter.append(patch(i, o, 2, stride=2) if stage else _circular(i, o, dims))
            self.inner.append(nn.ModuleList([_circular(o, o, dims) for _ in range(blocks)]))
            self.outer.append(nn.ModuleList([_circular(o, o, dims) for _ in range(blocks)]))
            self.activations.append(nn.ModuleList([_make(activation) for _ in range(blocks)]))
        self.flatten = nn.Flatten()
        last = sizes[-2] * torch.Size([n // 2 ** (len(channels) - 1) for n in image[1:]]).numel()
        self.head = nn.Linear(last, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, *shape) to (batch, outputs)."""
        for enter, inner, outer, activations in zip(self.enter, self.inner, self.outer, self.activations, strict=True):
            x = enter(x)
            for first, second, activation in zip(inner, outer, activations, strict=True):  # type: ignore[call-overload]
                x = x + second(activation(first(x)))
        return self.head(self.flatten(x))  # type: ignore[no-any-return]


def conv_resnet_module(
    shape: Sequence[int],
    channels: Sequence[int],
    outputs: int,
    blocks: int = 2,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Module:
    """Plain convolutional residual network, the module inside :class:`ConvResNet`."""
    return _ConvResNet(shape, channels, outputs, blocks, activation)


class ConvResNet(Lipschitz):
    """Residual blocks ``h ← h + B σ(C h)`` of convolutions with circular padding, ℓ-Lipschitz end to end.

    Args:
        shape: Shape (channels, height, width) of the images; sizes must be multiples of ``2^{len(channels) - 1}``.
        channels: Channels of the stages; the image is halved between them.
        outputs: Number of outputs of the dense head.
        bound: ℓ.
        blocks: Residual blocks in each stage.
        activation: Makes one activation module.
        dtype: Floating-point type.
        device: Where the parameters live.
        **options: Passed to :class:`ldlt.Lipschitz`.

    Example:
        >>> ConvResNet((1, 8, 8), [4, 8], 10, blocks=1)(torch.randn(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        shape: Sequence[int],
        channels: Sequence[int],
        outputs: int,
        bound: float = 1.0,
        *,
        blocks: int = 2,
        activation: Callable[[], nn.Module] = nn.ReLU,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        module = conv_resnet_module(shape, channels, outputs, blocks, activation).to(dtype=dtype, device=device)
        super().__init__(module, bound, input_shape=shape, **options)
