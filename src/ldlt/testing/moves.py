"""The table of moves: small steps of a forward function, each in several forms.

A move is made for the shape of the value it reads (without the batch): a vector ``(d,)``, a sequence ``(tokens, d)``,
which is as well a signal ``(channels, n)``, or an image ``(channels, h, w)``. It returns None where it does not fit.
Moves that a network refuses belong here too: a refusal is an answer, a wrong bound is not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ldlt import activations
from ldlt.errors import OptionError

Shape = tuple[int, ...]
Form = Callable[..., Tensor]
"""``(step, *values) -> value``."""
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


def drawn_moves() -> list[Move]:
    """All moves: those of the table, and one for each registered activation that can be made."""
    mine = [k for k, law in activations.TABLE.items() if k not in activations.BUILT_IN and law.cases]
    return [*MOVES, *(Move("activation", f"activation/{k.__name__}", _activation(k)) for k in mine)]


class Step(nn.Module):
    """A step written as a function of itself and of the values that it reads.

    Args:
        run: ``(step, *values) -> value``.
        **parts: Modules, parameters, buffers and numbers that ``run`` finds as attributes of the step. What it does not
            read is better left out: a parameter that nothing reads gets no gradient.
    """

    def __init__(self, run: Form, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part.clone())  # its own memory, so that a state can be loaded
            else:
                setattr(self, name, part)

    def forward(self, *values: Tensor) -> Tensor:
        """The value of the step."""
        return self.run(self, *values)


# -- what forms read ---------------------------------------------------------------------------------------------------


class _Mirrored(nn.Module):
    """A parametrisation: the average of a matrix and of itself upside down."""

    def forward(self, weight: Tensor) -> Tensor:
        return 0.5 * (weight + weight.flip(0))


def _linear(rng: random.Random, shape: Shape, square: bool = False) -> nn.Linear:
    out = shape[-1] if square else rng.randint(1, 8 if len(shape) == 1 else 4)
    return nn.Linear(shape[-1], out, bias=rng.random() < 0.8)


def _parametrised(rng: random.Random, shape: Shape) -> nn.Module:
    return parametrize.register_parametrization(_linear(rng, shape), "weight", rng.choice([_Mirrored(), nn.Tanh()]))


def _half_frozen(rng: random.Random, shape: Shape) -> nn.Module:
    layer = _linear(rng, shape)
    frozen: nn.Module | Tensor = layer if rng.random() < 0.5 else layer.weight
    frozen.requires_grad_(False)
    return layer


def _axis(rng: random.Random, shape: Shape, least: int = 1) -> int | None:
    """One of the dimensions behind the batch."""
    d = rng.randint(1, len(shape))
    return d if shape[d - 1] >= least else None


def _part(rng: random.Random, shape: Shape) -> tuple[int, int, int]:
    d = rng.randint(1, len(shape))
    first = rng.randrange(shape[d - 1])
    return d, first, rng.randint(1, shape[d - 1] - first)


def _key(rng: random.Random, shape: Shape) -> tuple[slice, ...]:
    d, first, count = _part(rng, shape)
    return (slice(None),) * d + (slice(first, first + count),)


def _indices(rng: random.Random, n: int) -> Tensor:
    """Places with repeats and gaps."""
    return torch.tensor([rng.randrange(n) for _ in range(rng.randint(1, n + 1))])


def _matrix(rng: random.Random, shape: Shape) -> Tensor:
    n, m = shape[-1], rng.randint(1, 5)
    return torch.randn(n, m) if rng.random() < 0.5 else torch.randn(n, 1) @ torch.randn(1, m)  # of rank one


def _mask(rng: random.Random, shape: Shape) -> Tensor:
    return (torch.arange(shape[0]) >= max(1, shape[0] // 2)).float().reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)


def _factors(rng: random.Random, shape: Shape) -> Shape | None:
    k = next((k for k in rng.sample([2, 3, 4], 3) if shape[-1] % k == 0), None)
    return None if k is None else (k, shape[-1] // k)


_READ: dict[str, Callable[[random.Random, Shape], Any]] = {
    "factor": lambda rng, s: rng.choice([-2.0, 0.5, 3.0, 1e-3, 50.0]),
    "offset": lambda rng, s: nn.Parameter(torch.randn(s)),
    "fixed": lambda rng, s: torch.randn(s[-1]),
    "mask": _mask,
    "entries": lambda rng, s: torch.randn(s[-1]) + 2.5,
    "gamma": lambda rng, s: nn.Parameter(torch.rand(rng.choice([(), (1,), (s[-1],), (s[0],) + (1,) * (len(s) - 1)]))),
    "axis": _axis,
    "wide": lambda rng, s: _axis(rng, s, 2),
    "behind": lambda rng, s: tuple(range(1, len(s) + 1)),
    "space": lambda rng, s: tuple(range(2, len(s) + 1)) or None,
    "part": _part,
    "key": _key,
    "places": lambda rng, s: _indices(rng, s[-1]),
    "first": lambda rng, s: _indices(rng, s[0]),
    "listed": lambda rng, s: _indices(rng, s[0]).tolist(),
    "matrix": _matrix,
    "left": lambda rng, s: torch.randn(rng.randint(1, 4), s[0]).tril() if len(s) == 2 else None,
    "times": lambda rng, s: [1, *(rng.choice([1, 2]) for _ in s)],
    "fill": lambda rng, s: rng.choice([0.0, 2.0]),
    "order": lambda rng, s: [0, *rng.sample(range(1, len(s) + 1), len(s))],
    "factors": _factors,
    "layer": _linear,
    "square": lambda rng, s: _linear(rng, s, square=True),
    "other": lambda rng, s: _linear(rng, s, square=True),
    "given": lambda rng, s: _linear(rng, s, square=True).requires_grad_(False),
    "kernel": lambda rng, s: nn.Parameter(torch.randn(2, s[0], *(3,) * (len(s) - 1))),
    "taps": lambda rng, s: torch.randn(2, s[0], *(3,) * (len(s) - 1)),
    "leaky": lambda rng, s: nn.LeakyReLU(0.1, inplace=True),
    "conv": lambda rng, s: _conv(rng, s, out=s[0], **_mode(rng)),
    "conv2": lambda rng, s: _conv(rng, s, out=s[0], **_mode(rng)),
}
"""What a form finds as an attribute of its step, from the shape it is made for; None where that has none."""


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _forms(
    kind: str, name: str, *forms: Form, fits: Callable[..., bool] = lambda *shapes: True, parents: int = 1
) -> None:
    """A move that is one of these forms, with all that it reads."""

    def make(rng: random.Random, *shapes: Shape) -> nn.Module | None:
        if not fits(*shapes):
            return None
        form = rng.choice(forms)
        read = dict.fromkeys(n for n in _names(form.__code__) if n in _READ)
        parts = {n: _READ[n](rng, shapes[0]) for n in read}
        return None if any(p is None for p in parts.values()) else Step(form, **parts)

    register_move(kind, name, make, parents)


def _vectors(shape: Shape) -> bool:
    return len(shape) < 3


def _spaces(shape: Shape) -> bool:
    return len(shape) > 1


# -- arithmetic, mixing, selection -------------------------------------------------------------------------------------
# However a call is written, as operator, function or method: what is drawn here are different operations.


def _in_place(s: Any, x: Tensor) -> Tensor:
    h = x.clone()
    h -= 0.2 * x
    h *= 3
    return h.add_(x)


def _through_a_view(s: Any, x: Tensor) -> Tensor:  # a tracer that does not follow views loses this factor
    h = 1.0 * x
    h[:, :1].mul_(30.0)
    return h


_forms("arithmetic", "scale", lambda s, x: s.factor * x, lambda s, x: x / s.factor, lambda s, x: -x)
_forms("arithmetic", "twice", lambda s, x: torch.add(x, x, alpha=-0.5), lambda s, x: x.sub(x, alpha=3),
       lambda s, x: x + 0.5 * x + x.clone())  # fmt: skip
_forms("arithmetic", "shift", lambda s, x: x + s.offset, lambda s, x: x - s.fixed, lambda s, x: 1 - x,
       lambda s, x: s.fixed - x)  # fmt: skip
_forms("arithmetic", "in_place", _in_place, _through_a_view)
_forms("arithmetic", "cancel", lambda s, x: x - x.clone(), lambda s, x: x * s.mask, lambda s, x: 0.0 * x,
       lambda s, x: x.masked_fill(s.mask == 0, 0.0), lambda s, x: torch.where(s.mask > 0, x, s.mask))  # fmt: skip
_forms("arithmetic", "diagonal", lambda s, x: x * s.entries, lambda s, x: x / s.entries)
_forms("arithmetic", "gamma", lambda s, x: s.gamma * x, lambda s, x: x + s.gamma * x)

_forms("mixing", "centre", lambda s, x: x - x.mean(s.axis, keepdim=True),
       lambda s, x: x - x.mean(s.behind, keepdim=True),
       lambda s, x: x - x.sum(s.axis, keepdim=True) / x.shape[s.axis])  # fmt: skip
_forms("mixing", "total", lambda s, x: x.sum(s.axis, keepdim=True), lambda s, x: x.sum(s.axis, True).expand_as(x),
       lambda s, x: x.mean(s.axis, keepdim=x.ndim == 2), lambda s, x: x + x.sum(s.axis, keepdim=True))  # fmt: skip
_forms("mixing", "differences", lambda s, x: torch.diff(x, dim=s.wide), lambda s, x: x - x.roll(1, s.axis),
       lambda s, x: x.cumsum(s.axis))  # fmt: skip
_forms("mixing", "matrix", lambda s, x: x @ s.matrix, lambda s, x: F.linear(x, s.matrix.T))
_forms("mixing", "matrix_left", lambda s, x: s.left @ x, lambda s, x: torch.einsum("ij,bjk->bik", s.left, x))

_forms("selection", "slice", lambda s, x: x[s.key], lambda s, x: x.narrow(*s.part), lambda s, x: x[:, ::2],
       lambda s, x: x[..., -1:])  # fmt: skip
_forms("selection", "gather", lambda s, x: x[:, s.listed], lambda s, x: x.index_select(-1, s.places),
       lambda s, x: x[:, s.first])  # fmt: skip
_forms("selection", "reorder", lambda s, x: x.flip(s.axis), lambda s, x: x.roll(2, s.axis), lambda s, x: x + x.flip(-1))
_forms("selection", "repeat", lambda s, x: x.repeat(s.times), lambda s, x: torch.tile(x, s.times),
       lambda s, x: torch.cat([x, -x], s.axis), lambda s, x: x.repeat_interleave(2, s.axis))  # fmt: skip
_forms("selection", "expand", lambda s, x: x.unsqueeze(1).expand(-1, 2, *x.shape[1:]), lambda s, x: x.unsqueeze(-1),
       lambda s, x: torch.stack([x, 2 * x], 1), lambda s, x: x[:, None].repeat(1, 3, *(1 for _ in x.shape[1:])),
       fits=_vectors)  # fmt: skip
_forms("selection", "pieces", lambda s, x: torch.cat([3 * p for p in reversed(x.chunk(2, s.wide))], s.wide),
       lambda s, x: x.split([1, x.shape[s.wide] - 1], s.wide)[1] - x.split([1, x.shape[s.wide] - 1], s.wide)[0],
       lambda s, x: torch.stack([x.unbind(s.wide)[0] + x.unbind(s.wide)[-1], x.unbind(s.wide)[0]], s.wide),
       lambda s, x: torch.cat([x.tensor_split(2, s.wide)[0].relu(), x.tensor_split(2, s.wide)[1]], s.wide))  # fmt: skip
_forms("selection", "select", lambda s, x: x.select(s.axis, 0), lambda s, x: x[..., -1],
       lambda s, x: x[:, 0] - x[:, -1], lambda s, x: x.unbind(s.axis)[-1], fits=_spaces)  # fmt: skip
_forms("selection", "border", lambda s, x: F.pad(x, (1, 1), value=s.fill))
_forms("selection", "continued", lambda s, x: F.pad(x, (1, 0), mode="circular"),
       lambda s, x: F.pad(x, (1, 1), mode="reflect"), fits=lambda s: len(s) == 2 and s[-1] > 1)  # fmt: skip
_forms("selection", "flatten", lambda s, x: x.flatten(1), lambda s, x: x.reshape(-1, prod(x.shape[1:])),
       lambda s, x: x.contiguous().view(x.size(0), -1), fits=_spaces)  # fmt: skip
_forms("selection", "unflatten", lambda s, x: x.unflatten(-1, s.factors),
       lambda s, x: x.reshape(-1, *x.shape[1:-1], *s.factors), fits=_vectors)  # fmt: skip
_forms("selection", "transpose", lambda s, x: x.transpose(1, -1), lambda s, x: x.mT, lambda s, x: x.permute(s.order),
       lambda s, x: torch.movedim(x, 1, -1), fits=_spaces)  # fmt: skip

# -- linear layers and convolutions ------------------------------------------------------------------------------------

register_move("linear", "free", _linear)
register_move("linear", "frozen_layer", _half_frozen)
register_move("linear", "parametrised", _parametrised)
_forms("linear", "functional", lambda s, x: F.linear(x, s.layer.weight, s.layer.bias))
_forms("linear", "tied", lambda s, x: s.square(s.square(x)), lambda s, x: s.square(torch.relu(s.square(x))),
       lambda s, x: s.square(x) + s.square(x.flip(-1)),
       lambda s, x: F.linear(s.square(x), s.square.weight.T))  # fmt: skip
_forms("linear", "several", lambda s, x: s.square(x) + s.given(x), lambda s, x: s.square(x) - x,
       lambda s, x: s.square(s.given(x)), lambda s, x: torch.cat([s.square(x), x], -1))  # fmt: skip
_forms("linear", "residual", lambda s, x: x + s.other(torch.tanh(s.square(x))), lambda s, x: F.relu(x + s.square(x)),
       lambda s, x: x - s.other(F.relu(s.square(F.relu(x)))),
       lambda s, x: s.other(s.square(x).relu()).add_(x))  # fmt: skip


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


def _frozen_convolution(rng: random.Random, shape: Shape) -> nn.Module | None:
    layer = rng.choice(list(_CONVOLUTIONS.values()))(rng, shape)
    return layer and layer.requires_grad_(False)


for _name, _make in _CONVOLUTIONS.items():
    odd = _name in ("patches", "transposed", "transposed_overlap")
    register_move("odd convolution" if odd else "convolution", _name, _make)
register_move("odd convolution", "frozen_convolution", _frozen_convolution)
_forms("odd convolution", "tied_convolution", lambda s, x: s.conv(s.conv(x)),
       lambda s, x: x + s.conv(torch.relu(s.conv(x))))  # fmt: skip
_forms("odd convolution", "functional", lambda s, x: F.conv1d(x, s.kernel, padding=1),
       lambda s, x: F.conv1d(x, s.taps, padding=1), fits=lambda s: len(s) == 2)  # fmt: skip
_forms("odd convolution", "functional_image", lambda s, x: F.conv2d(x, s.kernel, padding=1),
       lambda s, x: F.conv2d(x, s.taps, padding=1), fits=lambda s: len(s) == 3)  # fmt: skip
_forms("odd convolution", "residual_convolution", lambda s, x: F.relu(x + s.conv2(F.relu(s.conv(x)))),
       lambda s, x: x + s.conv2(s.conv(x).relu()),
       lambda s, x: torch.cat([s.conv2(s.conv(x).relu()), x], 1))  # fmt: skip

# -- pools and sizes ---------------------------------------------------------------------------------------------------


def _layer(name: str, *args: Any, least: int = 2, **options: Any) -> Make:
    """A layer of ``torch.nn`` whose name ends in the number of spatial dimensions."""

    def make(rng: random.Random, shape: Shape) -> nn.Module | None:
        dims = len(shape) - 1
        fits = dims in (1, 2) and min(shape[1:]) >= least
        return getattr(nn, f"{name}{dims}d")(*args, **options) if fits else None

    return make


def _interpolated(rng: random.Random, shape: Shape) -> nn.Module | None:
    if len(shape) == 1:
        return None
    return nn.Upsample(
        size=rng.choice([3, 4]), mode=("linear", "bilinear")[len(shape) - 2], align_corners=rng.random() < 0.5
    )


register_move("pool", "average", _layer("AvgPool", 2))
register_move("pool", "average_overlapping", _layer("AvgPool", 3, stride=1, padding=1))
register_move("pool", "maximum", _layer("MaxPool", 2))
register_move("pool", "maximum_overlapping", _layer("MaxPool", 2, stride=1))
register_move("pool", "maximum_padded", _layer("MaxPool", 3, stride=2, padding=1))
register_move("pool", "adaptive_average", _layer("AdaptiveAvgPool", 2))
register_move("pool", "adaptive_maximum", _layer("AdaptiveMaxPool", 2))
_forms("pool", "whole", lambda s, x: x.mean(s.space), lambda s, x: x.flatten(2).mean(-1), lambda s, x: x.amax(s.space),
       lambda s, x: F.adaptive_avg_pool1d(x.flatten(2), 1).flatten(1), fits=_spaces)  # fmt: skip
_forms("pool", "shuffle", lambda s, x: F.pixel_shuffle(x, 2), fits=lambda s: len(s) == 3 and s[0] % 4 == 0)
_forms("pool", "unshuffle", lambda s, x: F.pixel_unshuffle(x, 2),
       fits=lambda s: len(s) == 3 and s[1] % 2 == s[2] % 2 == 0)  # fmt: skip
_forms("pool", "nearest", lambda s, x: F.interpolate(x, scale_factor=2), fits=_spaces)
register_move("pool", "interpolated", _interpolated)

# -- activations, and what is like them --------------------------------------------------------------------------------


def _activation(kind: type[nn.Module]) -> Make:
    return lambda rng, shape: kind(**rng.choice(activations.TABLE[kind].cases))


def _batch_norm(rng: random.Random, shape: Shape) -> nn.Module:
    layer: Any = (nn.BatchNorm2d if len(shape) == 3 else nn.BatchNorm1d)(shape[0], affine=rng.random() < 0.7)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.05, 4.0)
    return layer  # type: ignore[no-any-return]


def _group_sort(rng: random.Random, shape: Shape) -> nn.Module:
    return activations.GroupSort(next(k for k in (*rng.sample([2, 3, 4], 3), 1) if shape[0] % k == 0))


for _kind in activations.ELEMENTWISE:
    register_move("activation", _kind.__name__, _activation(_kind))
register_move("activation", "channel_slopes", lambda rng, s: nn.PReLU(s[0], init=rng.choice([0.25, -1.0, 2.0])))
_forms("activation", "called", lambda s, x: F.relu(x), lambda s, x: x.tanh(), lambda s, x: F.elu(x),
       lambda s, x: abs(x), lambda s, x: F.gelu(x, approximate="tanh"), lambda s, x: F.leaky_relu(x, -0.3),
       lambda s, x: F.softplus(x), lambda s, x: F.logsigmoid(x), lambda s, x: F.softsign(x),
       lambda s, x: F.hardtanh(x, -2, 0.1))  # fmt: skip
_forms("activation", "clipped", lambda s, x: x.clamp(-1, 1), lambda s, x: x.clamp(min=0),
       lambda s, x: torch.clip(x, max=0.5))  # fmt: skip
_forms("activation", "overwriting", lambda s, x: (1.0 * x).relu_(), lambda s, x: F.relu(2 * x, inplace=True),
       lambda s, x: s.leaky(-x), lambda s, x: (x + 1).clamp_(min=0))  # fmt: skip
register_move("special", "batch_norm", _batch_norm)
register_move("special", "dropout", lambda rng, s: rng.choice([nn.Dropout(0.5), nn.Identity()]))
_forms("special", "functional_dropout", lambda s, x: F.dropout(x, 0.3, s.training))
register_move("special", "group_sort", _group_sort)
register_move("special", "max_min", lambda rng, s: activations.MaxMin() if s[0] % 2 == 0 else None)
_forms("special", "softmax", lambda s, x: x.softmax(s.axis), lambda s, x: F.softmax(-x, -1))
_forms("special", "sorted", lambda s, x: x.sort(s.axis)[0], lambda s, x: x.sort(s.axis, True).values)
# Not globally Lipschitz, or not seen to be: whoever accepts these must have a reason.
_forms("unbounded", "product", lambda s, x: x * x, lambda s, x: x * torch.sigmoid(x), lambda s, x: x / (1 + x.abs()),
       lambda s, x: F.normalize(x, dim=-1), lambda s, x: torch.exp(x), lambda s, x: x.sqrt())  # fmt: skip

# -- two values at once ------------------------------------------------------------------------------------------------


def _concatenation(rng: random.Random, a: Shape, b: Shape) -> nn.Module | None:
    dims = [d for d in range(1, len(a) + 1) if len(a) == len(b) and a[: d - 1] + a[d:] == b[: d - 1] + b[d:]]
    d = rng.choice(dims) if dims else 0
    return Step(rng.choice([lambda s, x, y: torch.cat([x, y], d), lambda s, x, y: torch.cat((y, x), d)])) if d else None


def _broadcast(rng: random.Random, a: Shape, b: Shape) -> nn.Module | None:
    """The second value is spread over positions of the first."""
    ways = [w for w in ((b[0], *(1 for _ in a[1:])), (*(1 for _ in a[1:]), b[-1])) if prod(w) == prod(b)]
    ways = [w for w in ways if all(n in (1, m) for n, m in zip(w, a, strict=True))]
    if a == b or not ways:
        return None
    way = rng.choice(ways)
    return Step(rng.choice([lambda s, x, y: x + y.reshape(-1, *way), lambda s, x, y: x - y.reshape(-1, *way)]))


def _alike(name: str, *forms: Form) -> None:
    _forms("join", name, *forms, fits=lambda a, b: a == b, parents=2)


_alike("sum", lambda s, x, y: x + y, lambda s, x, y: x.clone().add_(y))
_alike("difference", lambda s, x, y: x - y, lambda s, x, y: y - x)
_alike("weighted", lambda s, x, y: 0.3 * x - 2 * y, lambda s, x, y: torch.add(x, y, alpha=-0.5),
       lambda s, x, y: torch.lerp(x, y, 0.25))  # fmt: skip
_alike("stack", lambda s, x, y: torch.stack([x, y], 1), lambda s, x, y: torch.hstack([x, y]))
_alike("extremum", lambda s, x, y: torch.maximum(x, y), lambda s, x, y: torch.min(x, y))
_forms("join", "flat_concatenation", lambda s, x, y: torch.cat([x.flatten(1), y.flatten(1)], 1), parents=2)
register_move("join", "concatenation", _concatenation, 2)
register_move("join", "broadcast", _broadcast, 2)
