"""The table of moves: small steps of a forward function, each written in the forms that people use.

A move is made for the shape of the value it reads (without the batch): a vector ``(d,)``, a sequence ``(tokens, d)``,
which is as well a signal ``(channels, n)``, or an image ``(channels, h, w)``. It returns None where it does not fit.
Moves that a network refuses belong here too: a refusal is an answer, a wrong bound is not.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ldlt import activations
from ldlt.errors import OptionError

__all__ = ["MOVES", "Make", "Move", "Step", "move", "register_move"]

Shape = tuple[int, ...]
Make = Callable[..., nn.Module | None]
"""``(rng, shape)``, or ``(rng, shape, shape)`` for two parents, to a module; None if the shapes do not fit."""


@dataclass(frozen=True)
class Move:
    """An entry of the table.

    Attributes:
        kind: Moves are drawn by kind first, so that a kind with many members does not crowd out the others.
        name: Unique name, ``kind/member``.
        make: Builds the step for the shapes of its parents.
        parents: How many values it reads, one or two.
    """

    kind: str
    name: str
    make: Make
    parents: int = 1


MOVES: list[Move] = []
"""All moves, those of :func:`register_move` included."""


def register_move(kind: str, name: str, make: Make, parents: int = 1) -> Move:
    """Add a move to the table, or replace the one of the same name.

    Args:
        kind: See :class:`Move`.
        name: Name within the kind.
        make: See :class:`Move`.
        parents: Likewise.

    Raises:
        OptionError: An argument is not of its kind.
    """
    if not all(isinstance(text, str) and text for text in (kind, name)) or not callable(make) or parents not in (1, 2):
        raise OptionError(
            "a move needs a kind, a name, a function (rng, shape) that makes a module or None, and one or two parents; "
            f"got {kind!r}, {name!r}, {make!r}, {parents!r}"
        )
    entry = Move(kind, f"{kind}/{name}", make, parents)
    MOVES[:] = [m for m in MOVES if m.name != entry.name] + [entry]
    return entry


def move(kind: str, parents: int = 1) -> Callable[[Make], Make]:
    """Decorator form of :func:`register_move`; the name is that of the function."""

    def add(make: Make) -> Make:
        register_move(kind, make.__name__.strip("_"), make, parents)
        return make

    return add


class Step(nn.Module):
    """A step written as a function of itself and of the values that it reads.

    Args:
        run: ``(step, *values) -> value``.
        **parts: Modules, parameters and buffers that ``run`` finds as attributes of the step. Those that it does not
            read are left out: a parameter that nothing reads could get no gradient.
    """

    def __init__(self, run: Callable[..., Tensor], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self.run = run
        for name in [n for n in parts if n in run.__code__.co_names]:
            if isinstance(parts[name], nn.Module | nn.Parameter):
                setattr(self, name, parts[name])
            else:
                self.register_buffer(name, parts[name])  # type: ignore[arg-type]

    def forward(self, *values: Tensor) -> Tensor:
        """The value of the step."""
        return self.run(self, *values)


def _any(rng: random.Random, *runs: Callable[..., Tensor], **parts: nn.Module | Tensor) -> Step:
    return Step(rng.choice(runs), **parts)


def _axis(rng: random.Random, shape: Shape) -> tuple[int, int]:
    """One of the dimensions behind the batch, and its size."""
    d = rng.randint(1, len(shape))
    return d, shape[d - 1]


def _frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


# ---------------------------------------------------------------------------------------------------- arithmetic


@move("arithmetic")
def _scale(rng: random.Random, shape: Shape) -> nn.Module:
    a = rng.choice([-2.0, 0.5, 3.0, 1e-3, 50.0])
    return _any(rng, lambda s, x: a * x, lambda s, x: x.mul(a), lambda s, x: torch.mul(x, a), lambda s, x: x / a,
                lambda s, x: torch.div(x, a), lambda s, x: -x, lambda s, x: torch.neg(x))  # fmt: skip


@move("arithmetic")
def _twice(rng: random.Random, shape: Shape) -> nn.Module:
    return _any(rng, lambda s, x: x + x, lambda s, x: torch.add(x, x, alpha=-0.5), lambda s, x: x.sub(x, alpha=3),
                lambda s, x: sum([x, 0.5 * x, x.clone()]))  # type: ignore[arg-type, return-value] # fmt: skip


@move("arithmetic")
def _shift(rng: random.Random, shape: Shape) -> nn.Module:
    return _any(rng, lambda s, x: x + s.bias, lambda s, x: x - s.fixed, lambda s, x: 1 - x, lambda s, x: x.add(2.0),
                lambda s, x: torch.sub(s.fixed, x), bias=nn.Parameter(torch.randn(shape)),
                fixed=torch.randn(shape[-1]))  # fmt: skip


@move("arithmetic")
def _in_place(rng: random.Random, shape: Shape) -> nn.Module:
    def grow(s: Any, x: Tensor) -> Tensor:
        h = 0.5 * x
        h += x
        return h

    def shrink(s: Any, x: Tensor) -> Tensor:
        h = x.clone()
        h -= 0.2 * x
        h *= 3
        return h.add_(x)

    def through_a_view(s: Any, x: Tensor) -> Tensor:  # a tracer that does not follow views loses this factor
        h = 1.0 * x
        h[:, :1].mul_(30.0)
        return h

    return _any(rng, grow, shrink, through_a_view)


@move("arithmetic")
def _cancel(rng: random.Random, shape: Shape) -> nn.Module:
    """No signal is left, or none in some features."""
    mask = torch.ones(shape)
    mask[: max(1, shape[0] // 2)] = 0
    return _any(rng, lambda s, x: x - x.clone(), lambda s, x: x * s.mask, lambda s, x: 0.0 * x,
                lambda s, x: x.masked_fill(s.mask == 0, 0.0), lambda s, x: torch.where(s.mask > 0, x, s.mask),
                mask=mask)  # fmt: skip


@move("arithmetic")
def _diagonal(rng: random.Random, shape: Shape) -> nn.Module:
    return _any(rng, lambda s, x: x * s.entries, lambda s, x: torch.mul(s.entries, x), lambda s, x: x / s.entries,
                entries=torch.randn(shape[-1]) + 2.5)  # fmt: skip


@move("arithmetic")
def _gamma(rng: random.Random, shape: Shape) -> nn.Module:
    sizes = rng.choice([(), (1,), (shape[-1],), (shape[0],) + (1,) * (len(shape) - 1)])
    return _any(rng, lambda s, x: s.gamma * x, lambda s, x: x.mul(s.gamma), lambda s, x: x + s.gamma * x,
                gamma=nn.Parameter(torch.rand(sizes)))  # fmt: skip


# ------------------------------------------------------------------------------------------------------- mixing


@move("mixing")
def _centre(rng: random.Random, shape: Shape) -> nn.Module:
    d, _ = _axis(rng, shape)
    behind = tuple(range(1, len(shape) + 1))
    return _any(rng, lambda s, x: x - x.mean(d, keepdim=True), lambda s, x: x - x.mean(behind, keepdim=True),
                lambda s, x: torch.sub(x, torch.mean(x, dim=d, keepdim=True)),
                lambda s, x: x - x.sum(d, keepdim=True) / x.shape[d])  # fmt: skip


@move("mixing")
def _total(rng: random.Random, shape: Shape) -> nn.Module:
    d, n = _axis(rng, shape)
    keep = len(shape) == 1 or rng.random() < 0.5
    return _any(rng, lambda s, x: x.sum(d, keepdim=keep), lambda s, x: torch.sum(x, dim=d, keepdim=keep),
                lambda s, x: x.sum(d, True).expand_as(x), lambda s, x: x.mean(dim=d, keepdim=keep) * n,
                lambda s, x: x + x.sum(d, keepdim=True))  # fmt: skip


@move("mixing")
def _differences(rng: random.Random, shape: Shape) -> nn.Module | None:
    d, n = _axis(rng, shape)
    return None if n < 2 else _any(rng, lambda s, x: x.narrow(d, 1, n - 1) - x.narrow(d, 0, n - 1),
                                   lambda s, x: torch.diff(x, dim=d), lambda s, x: x - x.roll(1, d),
                                   lambda s, x: x.cumsum(d), lambda s, x: torch.cumsum(x, d))  # fmt: skip


@move("mixing")
def _matrix(rng: random.Random, shape: Shape) -> nn.Module:
    n, m = shape[-1], rng.randint(1, 5)
    a = torch.randn(n, m) if rng.random() < 0.5 else torch.randn(n, 1) @ torch.randn(1, m)  # of rank one
    return _any(rng, lambda s, x: x @ s.a, lambda s, x: torch.matmul(x, s.a), lambda s, x: x.matmul(s.a),
                lambda s, x: F.linear(x, s.a.T), lambda s, x: F.linear(x, s.b), a=a,
                b=a.T.contiguous())  # fmt: skip


@move("mixing")
def _matrix_left(rng: random.Random, shape: Shape) -> nn.Module | None:
    if len(shape) != 2:
        return None
    return _any(rng, lambda s, x: s.a @ x, lambda s, x: torch.einsum("ij,bjk->bik", s.a, x),
                lambda s, x: torch.matmul(s.a, x), a=torch.randn(rng.randint(1, 4), shape[0]).tril())  # fmt: skip


# ---------------------------------------------------------------------------------------------------- selection


@move("selection")
def _slice(rng: random.Random, shape: Shape) -> nn.Module:
    d, n = _axis(rng, shape)
    a = rng.randrange(n)
    b = rng.randint(a + 1, n)
    key = (slice(None),) * d + (slice(a, b),)
    return _any(rng, lambda s, x: x[key], lambda s, x: x.narrow(d, a, b - a), lambda s, x: torch.narrow(x, d, a, b - a),
                lambda s, x: x[:, ::2], lambda s, x: x[..., -1:])  # fmt: skip


@move("selection")
def _gather(rng: random.Random, shape: Shape) -> nn.Module:
    d, n = _axis(rng, shape)
    chosen = [rng.randrange(n) for _ in range(rng.randint(1, n + 1))]  # repeats and gaps
    first = [i % shape[0] for i in chosen]
    return _any(rng, lambda s, x: x[:, first], lambda s, x: x.index_select(d, s.index), lambda s, x: x[:, s.first],
                lambda s, x: torch.index_select(x, d, s.index), index=torch.tensor(chosen),
                first=torch.tensor(first))  # fmt: skip


@move("selection")
def _reorder(rng: random.Random, shape: Shape) -> nn.Module:
    d, n = _axis(rng, shape)
    k = rng.randint(1, n)
    return _any(rng, lambda s, x: x.flip(d), lambda s, x: torch.flip(x, [d]), lambda s, x: x.roll(k, d),
                lambda s, x: torch.roll(x, (k,), (d,)), lambda s, x: x + x.flip(-1))  # fmt: skip


@move("selection")
def _repeat(rng: random.Random, shape: Shape) -> nn.Module:
    d, _ = _axis(rng, shape)
    times = [2 if i == d else 1 for i in range(len(shape) + 1)]
    return _any(rng, lambda s, x: x.repeat(times), lambda s, x: torch.cat([x, x], d), lambda s, x: x.tile(times),
                lambda s, x: torch.tile(x, times), lambda s, x: x.repeat_interleave(2, d),
                lambda s, x: torch.cat((x, -x), dim=d))  # fmt: skip


@move("selection")
def _expand(rng: random.Random, shape: Shape) -> nn.Module | None:
    if len(shape) == 3:
        return None
    return _any(rng, lambda s, x: x.unsqueeze(1).expand(-1, 2, *shape), lambda s, x: torch.stack([x, 2 * x], 1),
                lambda s, x: x[:, None].repeat(1, 3, *(1 for _ in shape)), lambda s, x: x.unsqueeze(-1))  # fmt: skip


@move("selection")
def _pieces(rng: random.Random, shape: Shape) -> nn.Module | None:
    """Several parts of one value go different ways."""
    d, n = _axis(rng, shape)
    if n < 2:
        return None

    def chunks(s: Any, x: Tensor) -> Tensor:
        a, b = x.chunk(2, d)
        return torch.cat((b, 3 * a), d)

    def sizes(s: Any, x: Tensor) -> Tensor:
        a, b = torch.split(x, [1, n - 1], dim=d)
        return b - a

    def ends(s: Any, x: Tensor) -> Tensor:
        parts = x.unbind(d)
        return torch.stack([parts[0] + parts[-1], parts[0]], d)

    def half(s: Any, x: Tensor) -> Tensor:
        a, b = x.tensor_split(2, d)
        return torch.cat([a.relu(), b], d)

    return _any(rng, chunks, sizes, ends, half)


@move("selection")
def _select(rng: random.Random, shape: Shape) -> nn.Module | None:
    if len(shape) == 1:
        return None
    d, n = _axis(rng, shape)
    i = rng.randrange(n)
    return _any(rng, lambda s, x: x.select(d, i), lambda s, x: x[:, 0], lambda s, x: x[..., -1],
                lambda s, x: x[:, 0] - x[:, -1], lambda s, x: x.unbind(d)[i])  # fmt: skip


@move("selection")
def _border(rng: random.Random, shape: Shape) -> nn.Module:
    fill = rng.choice([0.0, 2.0])
    forms: list[Callable[..., Tensor]] = [lambda s, x: F.pad(x, (1, 1), value=fill)]
    if len(shape) == 2 and shape[-1] > 1:
        forms += [lambda s, x: F.pad(x, (1, 0), mode="circular"), lambda s, x: F.pad(x, (1, 1), mode="reflect")]
    return _any(rng, *forms)


# -------------------------------------------------------------------------------------------------------- shape


@move("selection")
def _flatten(rng: random.Random, shape: Shape) -> nn.Module | None:
    if len(shape) == 1:
        return None
    if rng.random() < 0.3:
        return nn.Flatten()
    return _any(rng, lambda s, x: x.flatten(1), lambda s, x: torch.flatten(x, 1),
                lambda s, x: x.reshape(-1, prod(shape)), lambda s, x: x.reshape(x.shape[0], -1),
                lambda s, x: x.contiguous().view(x.size(0), -1))  # fmt: skip


@move("selection")
def _unflatten(rng: random.Random, shape: Shape) -> nn.Module | None:
    n = shape[-1]
    k = next((k for k in rng.sample([2, 3, 4], 3) if n % k == 0), 0)
    if not k or len(shape) == 3:
        return None
    new = (*shape[:-1], k, n // k)
    return _any(rng, lambda s, x: x.unflatten(-1, (k, n // k)), lambda s, x: x.reshape(-1, *new),
                lambda s, x: s.layer(x), lambda s, x: x.reshape(x.shape[0], *new),
                layer=nn.Unflatten(len(shape), (k, n // k)))  # fmt: skip


@move("selection")
def _transpose(rng: random.Random, shape: Shape) -> nn.Module | None:
    if len(shape) == 1:
        return None
    order = [0, *rng.sample(range(1, len(shape) + 1), len(shape))]
    return _any(rng, lambda s, x: x.transpose(1, -1), lambda s, x: x.mT, lambda s, x: x.permute(order),
                lambda s, x: torch.permute(x, order), lambda s, x: x.swapaxes(-1, -2),
                lambda s, x: torch.movedim(x, 1, -1))  # fmt: skip


# ------------------------------------------------------------------------------------------------------- linear


class _Mirrored(nn.Module):
    """A parametrisation: the average of a matrix and of itself upside down."""

    def forward(self, weight: Tensor) -> Tensor:
        return 0.5 * (weight + weight.flip(0))


def _linear(rng: random.Random, shape: Shape, square: bool = False) -> nn.Linear:
    out = shape[-1] if square else rng.randint(1, 8 if len(shape) == 1 else 4)
    return nn.Linear(shape[-1], out, bias=rng.random() < 0.8)


@move("linear")
def _free(rng: random.Random, shape: Shape) -> nn.Module:
    layer = _linear(rng, shape)
    return rng.choice([layer, layer, Step(lambda s, x: F.linear(x, s.layer.weight, s.layer.bias), layer=layer)])


@move("linear")
def _frozen_layer(rng: random.Random, shape: Shape) -> nn.Module:
    layer = _linear(rng, shape)
    if rng.random() < 0.5:
        return _frozen(layer)
    layer.weight.requires_grad_(False)
    return layer


@move("linear")
def _tied(rng: random.Random, shape: Shape) -> nn.Module:
    return _any(rng, lambda s, x: s.layer(s.layer(x)), lambda s, x: s.layer(torch.relu(s.layer(x))),
                lambda s, x: s.layer(x) + s.layer(x.flip(-1)), lambda s, x: F.linear(s.layer(x), s.layer.weight.T),
                layer=_linear(rng, shape, square=True))  # fmt: skip


@move("linear")
def _parametrised(rng: random.Random, shape: Shape) -> nn.Module:
    layer = _linear(rng, shape)
    parametrize.register_parametrization(layer, "weight", rng.choice([_Mirrored(), nn.Tanh()]))
    return layer


@move("linear")
def _several(rng: random.Random, shape: Shape) -> nn.Module:
    layers = nn.ModuleList([_linear(rng, shape, square=True), _frozen(_linear(rng, shape, square=True))])
    return _any(rng, lambda s, x: s.all[0](x) + s.all[1](x), lambda s, x: s.all[0](x) - x,
                lambda s, x: s.all[0](s.all[1](x)), lambda s, x: torch.cat([s.all[0](x), x], -1),
                all=layers)  # fmt: skip


# -------------------------------------------------------------------------------------------------- convolutions


def _conv(
    rng: random.Random, shape: Shape, size: int = 3, transposed: bool = False, **options: Any
) -> nn.Module | None:
    """A convolution over all dimensions but the first."""
    dims = len(shape) - 1
    reach = options.get("dilation", 1) * (size - 1)
    if dims not in (1, 2) or min(shape[1:]) + 2 * options.get("padding", 0) <= reach or min(shape[1:]) < 2:
        return None
    layer = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dims}d")
    out = options.pop("out", rng.randint(1, 3))
    built: nn.Module = layer(shape[0], out, size, bias=rng.random() < 0.8, **options)
    return built


def _mode(rng: random.Random) -> dict[str, Any]:
    return {"padding": 1, "padding_mode": rng.choice(["zeros", "circular"])}


_CONVOLUTIONS: dict[str, Make] = {
    "circular": lambda rng, s: _conv(rng, s, padding=1, padding_mode="circular"),
    "zeros": lambda rng, s: _conv(rng, s, padding=1),
    "border": lambda rng, s: _conv(rng, s, padding=1, padding_mode=rng.choice(["reflect", "replicate"])),
    "strided": lambda rng, s: _conv(rng, s, stride=2, **_mode(rng)),
    "patches": lambda rng, s: _conv(rng, s, size=2, stride=2),
    "dilated": lambda rng, s: _conv(rng, s, dilation=2, **{**_mode(rng), "padding": 2}),
    "grouped": lambda rng, s: _conv(rng, s, groups=2, out=2, **_mode(rng)) if s[0] % 2 == 0 else None,
    "depthwise": lambda rng, s: _conv(rng, s, groups=s[0], out=s[0] * rng.choice([1, 2]), **_mode(rng)),
    "pointwise": lambda rng, s: _conv(rng, s, size=1),
    "valid": lambda rng, s: _conv(rng, s, size=rng.choice([2, 3])),
    "transposed": lambda rng, s: _conv(rng, s, size=2, transposed=True, stride=2, out=1),
    "transposed_overlap": lambda rng, s: _conv(rng, s, transposed=True, padding=1),
}
_ODD = ("patches", "transposed", "transposed_overlap")
for _name, _make in _CONVOLUTIONS.items():
    register_move("odd convolution" if _name in _ODD else "convolution", _name, _make)


@move("odd convolution")
def _frozen_convolution(rng: random.Random, shape: Shape) -> nn.Module | None:
    layer = rng.choice(list(_CONVOLUTIONS.values()))(rng, shape)
    return layer and _frozen(layer)


@move("odd convolution")
def _tied_convolution(rng: random.Random, shape: Shape) -> nn.Module | None:
    layer = _conv(rng, shape, out=shape[0], **_mode(rng))
    return layer and _any(rng, lambda s, x: s.layer(s.layer(x)), lambda s, x: x + s.layer(torch.relu(s.layer(x))),
                          layer=layer)  # fmt: skip


@move("odd convolution")
def _functional(rng: random.Random, shape: Shape) -> nn.Module | None:
    dims = len(shape) - 1
    if dims not in (1, 2):
        return None
    run = (F.conv1d, F.conv2d)[dims - 1]
    kernel = torch.randn(2, shape[0], *(3,) * dims)
    return _any(rng, lambda s, x: run(x, s.kernel, padding=1), lambda s, x: run(x, s.fixed, padding=1),
                kernel=nn.Parameter(kernel), fixed=kernel.clone())  # fmt: skip


# ------------------------------------------------------------------------------------------------ pools and sizes


def _layer(name: str, *args: Any, least: int = 2, **options: Any) -> Make:
    """A layer of ``torch.nn`` whose name ends in the number of spatial dimensions."""

    def make(rng: random.Random, shape: Shape) -> nn.Module | None:
        dims = len(shape) - 1
        fits = dims in (1, 2) and min(shape[1:]) >= least
        return getattr(nn, f"{name}{dims}d")(*args, **options) if fits else None

    return make


register_move("pool", "average", _layer("AvgPool", 2))
register_move("pool", "average_overlapping", _layer("AvgPool", 3, stride=1, padding=1))
register_move("pool", "maximum", _layer("MaxPool", 2))
register_move("pool", "maximum_overlapping", _layer("MaxPool", 2, stride=1))
register_move("pool", "maximum_padded", _layer("MaxPool", 3, stride=2, padding=1))
register_move("pool", "adaptive_average", _layer("AdaptiveAvgPool", 2))
register_move("pool", "adaptive_maximum", _layer("AdaptiveMaxPool", 2))


@move("pool")
def _whole(rng: random.Random, shape: Shape) -> nn.Module | None:
    if len(shape) == 1:
        return None
    behind = tuple(range(2, len(shape) + 1))
    adaptive = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)[len(shape) - 2](1)
    return _any(rng, lambda s, x: x.mean(behind), lambda s, x: torch.mean(x, behind), lambda s, x: s.pool(x).flatten(1),
                lambda s, x: x.flatten(2).mean(-1), lambda s, x: x.amax(behind), pool=adaptive)  # fmt: skip


@move("pool")
def _functional_pool(rng: random.Random, shape: Shape) -> nn.Module | None:
    dims = len(shape) - 1
    if dims not in (1, 2) or min(shape[1:]) < 2:
        return None
    average, maximum = ((F.avg_pool1d, F.max_pool1d), (F.avg_pool2d, F.max_pool2d))[dims - 1]
    return _any(rng, lambda s, x: average(x, 2), lambda s, x: maximum(x, 2), lambda s, x: average(x, 2, stride=1))


@move("pool")
def _shuffle(rng: random.Random, shape: Shape) -> nn.Module | None:
    up, down = len(shape) == 3 and shape[0] % 4 == 0, len(shape) == 3 and shape[1] % 2 == shape[2] % 2 == 0
    if not up and not down:
        return None
    if up and (not down or rng.random() < 0.5):
        return rng.choice([nn.PixelShuffle(2), Step(lambda s, x: F.pixel_shuffle(x, 2))])
    return rng.choice([nn.PixelUnshuffle(2), Step(lambda s, x: F.pixel_unshuffle(x, 2))])


@move("pool")
def _nearest(rng: random.Random, shape: Shape) -> nn.Module | None:
    if len(shape) == 1:
        return None
    return rng.choice([nn.Upsample(scale_factor=2), Step(lambda s, x: F.interpolate(x, scale_factor=2))])


@move("pool")
def _interpolated(rng: random.Random, shape: Shape) -> nn.Module | None:
    if len(shape) == 1:
        return None
    mode, align = ("linear", "bilinear")[len(shape) - 2], rng.random() < 0.5
    size = rng.choice([3, 4])
    layer = nn.Upsample(size=size, mode=mode, align_corners=align)
    return rng.choice([layer, Step(lambda s, x: F.interpolate(x, size, mode=mode, align_corners=align))])


# ---------------------------------------------------------------------------------------------------- statistics


@move("special")
def _batch_norm(rng: random.Random, shape: Shape) -> nn.Module:
    kind = nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d
    layer = kind(shape[0], affine=rng.random() < 0.7)
    assert isinstance(layer.running_mean, Tensor)
    assert isinstance(layer.running_var, Tensor)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.05, 4.0)
    return layer


@move("special")
def _dropout(rng: random.Random, shape: Shape) -> nn.Module:
    if len(shape) == 3 and rng.random() < 0.3:
        return nn.Dropout2d(0.5)
    return rng.choice([nn.Dropout(0.5), nn.Identity(), Step(lambda s, x: F.dropout(x, 0.3, s.training))])


# --------------------------------------------------------------------------------------------------- activations


def _activation(kind: type[nn.Module]) -> Make:
    return lambda rng, shape: kind(**rng.choice(activations.TABLE[kind].cases))


for _kind in activations.ELEMENTWISE:
    register_move("activation", _kind.__name__, _activation(_kind))


def drawn_moves() -> list[Move]:
    """All moves: those of the table, and one for each registered activation that can be made."""
    known = [*activations.ELEMENTWISE, *activations.BUILT_IN]
    mine = [k for k, law in activations.TABLE.items() if k not in known and law.cases]
    return [*MOVES, *(Move("activation", f"activation/{k.__name__}", _activation(k)) for k in mine)]


@move("activation")
def _channel_slopes(rng: random.Random, shape: Shape) -> nn.Module:
    return nn.PReLU(shape[0], init=rng.choice([0.25, -1.0, 2.0]))


@move("special")
def _group_sort(rng: random.Random, shape: Shape) -> nn.Module:
    return activations.GroupSort(next(k for k in (*rng.sample([2, 3, 4], 3), 1) if shape[0] % k == 0))


@move("special")
def _max_min(rng: random.Random, shape: Shape) -> nn.Module | None:
    return activations.MaxMin() if shape[0] % 2 == 0 else None


@move("special")
def _softmax(rng: random.Random, shape: Shape) -> nn.Module:
    d, _ = _axis(rng, shape)
    return _any(rng, lambda s, x: s.layer(x), lambda s, x: x.softmax(d), lambda s, x: F.softmax(x, dim=d),
                lambda s, x: torch.softmax(-x, -1), layer=nn.Softmax(d))  # fmt: skip


@move("activation")
def _called(rng: random.Random, shape: Shape) -> nn.Module:
    return _any(rng, lambda s, x: F.relu(x), lambda s, x: torch.relu(x), lambda s, x: x.relu(), lambda s, x: x.tanh(),
                lambda s, x: torch.sigmoid(x), lambda s, x: F.gelu(x, approximate="tanh"), lambda s, x: F.silu(x),
                lambda s, x: F.leaky_relu(x, -0.3), lambda s, x: F.elu(x), lambda s, x: F.mish(x),
                lambda s, x: F.softplus(x), lambda s, x: F.hardswish(x), lambda s, x: F.logsigmoid(x))  # fmt: skip


@move("activation")
def _clipped(rng: random.Random, shape: Shape) -> nn.Module:
    return _any(rng, lambda s, x: x.clamp(-1, 1), lambda s, x: x.clamp(min=0), lambda s, x: torch.clip(x, max=0.5),
                lambda s, x: abs(x), lambda s, x: torch.abs(x), lambda s, x: x.sin(), lambda s, x: torch.cos(x),
                lambda s, x: x.atan(), lambda s, x: F.hardtanh(x, -2, 0.1), lambda s, x: F.relu6(x))  # fmt: skip


@move("activation")
def _overwriting(rng: random.Random, shape: Shape) -> nn.Module:
    return _any(rng, lambda s, x: (1.0 * x).relu_(), lambda s, x: F.relu(2 * x, inplace=True), lambda s, x: s.layer(-x),
                lambda s, x: (x + 1).clamp_(min=0), layer=nn.LeakyReLU(0.1, inplace=True))  # fmt: skip


@move("unbounded")
def _product(rng: random.Random, shape: Shape) -> nn.Module:
    """Not globally Lipschitz, or not seen to be: whoever accepts these must have a reason."""
    return _any(rng, lambda s, x: x * x, lambda s, x: x * torch.sigmoid(x), lambda s, x: x / (1 + x.abs()),
                lambda s, x: F.normalize(x, dim=-1), lambda s, x: torch.exp(x), lambda s, x: x.sqrt())  # fmt: skip


# --------------------------------------------------------------------------------------------------------- blocks


@move("linear")
def _residual(rng: random.Random, shape: Shape) -> nn.Module:
    first, last = _linear(rng, shape, square=True), nn.Linear(shape[-1], shape[-1])

    def in_place(s: Any, x: Tensor) -> Tensor:
        h = s.last(F.relu(s.first(x)))
        h += x
        return h

    return _any(rng, in_place, lambda s, x: x + s.last(torch.tanh(s.first(x))), lambda s, x: F.relu(x + s.first(x)),
                lambda s, x: x - s.last(F.relu(s.first(F.relu(x)))),
                lambda s, x: s.last(s.first(x).relu()) + s.last.bias, first=first, last=last)  # fmt: skip


@move("odd convolution")
def _residual_convolution(rng: random.Random, shape: Shape) -> nn.Module | None:
    first, last = (_conv(rng, shape, out=shape[0], **_mode(rng)) for _ in range(2))
    if first is None or last is None:
        return None
    return _any(rng, lambda s, x: F.relu(x + s.last(F.relu(s.first(x)))), lambda s, x: x + s.last(s.first(x).relu()),
                lambda s, x: torch.cat([s.last(s.first(x).relu()), x], 1), first=first, last=last)  # fmt: skip


# -------------------------------------------------------------------------------------------- two values at once


def _alike(runs: list[Callable[..., Tensor]]) -> Make:
    return lambda rng, a, b: Step(rng.choice(runs)) if a == b else None


def _added(s: Any, x: Tensor, y: Tensor) -> Tensor:
    h = x.clone()
    h += y
    return h


register_move(
    "join", "sum", _alike([lambda s, x, y: x + y, lambda s, x, y: torch.add(x, y), lambda s, x, y: x.add(y)]), 2
)
register_move("join", "difference", _alike([lambda s, x, y: x - y, lambda s, x, y: torch.sub(y, x)]), 2)
register_move("join", "weighted", _alike([lambda s, x, y: 0.3 * x - 2 * y, lambda s, x, y: torch.add(x, y, alpha=-0.5),
                                          lambda s, x, y: torch.lerp(x, y, 0.25)]), 2)  # fmt: skip
register_move("join", "in_place", _alike([_added]), 2)
register_move(
    "join", "stack", _alike([lambda s, x, y: torch.stack([x, y], 1), lambda s, x, y: torch.hstack([x, y])]), 2
)
register_move("join", "extremum", _alike([lambda s, x, y: torch.maximum(x, y), lambda s, x, y: torch.min(x, y)]), 2)


@move("join", parents=2)
def _concatenation(rng: random.Random, a: Shape, b: Shape) -> nn.Module | None:
    dims = [d for d in range(1, len(a) + 1) if len(a) == len(b) and a[: d - 1] + a[d:] == b[: d - 1] + b[d:]]
    d = rng.choice(dims) if dims else 0
    return _any(rng, lambda s, x, y: torch.cat([x, y], d), lambda s, x, y: torch.concat((y, x), dim=d)) if d else None


@move("join", parents=2)
def _flat_concatenation(rng: random.Random, a: Shape, b: Shape) -> nn.Module:
    return Step(lambda s, x, y: torch.cat([x.flatten(1), y.flatten(1)], 1))


@move("join", parents=2)
def _broadcast(rng: random.Random, a: Shape, b: Shape) -> nn.Module | None:
    """The second value is spread over positions of the first."""
    ways = [w for w in ((b[0], *(1 for _ in a[1:])), (*(1 for _ in a[1:]), b[-1])) if prod(w) == prod(b)]
    ways = [w for w in ways if all(n in (1, m) for n, m in zip(w, a, strict=True))]
    if a == b or not ways:
        return None
    way = rng.choice(ways)
    return _any(rng, lambda s, x, y: x + y.reshape(-1, *way), lambda s, x, y: torch.sub(x, y.reshape(-1, *way)))
