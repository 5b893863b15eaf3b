r"""Activations: their slopes, everywhere and on intervals, the functions themselves, and how they are called.

An elementwise activation :math:`\sigma` has slopes in :math:`[m, L]` when
:math:`m \le (\sigma(x) - \sigma(y)) / (x - y) \le L` for all :math:`x \ne y`. For a continuous piecewise
smooth function these are the infimum and the supremum of its derivative, and that is what
:func:`slope_bounds` returns: exact values as a function of the module's arguments, not samples.
:func:`sector` turns them into the center :math:`c = (L + m)/2` and the radius :math:`r = (L - m)/2` that the
rest of the package works with.

All that is known of a class is one :class:`Law` in one table, :data:`TABLE`. Whatever has none is refused with a
:exc:`~ldlt.errors.SlopeError` that says why; nothing is guessed. Add your own elementwise activation with
:func:`register`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldlt.activations.law import Bounds, Functions, Joint, Law, Range, piecewise, smooth
from ldlt.activations.layers import Abs, Atan, Clamp, Cos, GroupSort, Masked, MaxMin, Sin, WindowSort
from ldlt.activations.table import TABLE
from ldlt.errors import GraphError, OptionError, ShapeError, SlopeError

__all__ = [
    "ELEMENTWISE", "MIN_RELATIVE_RADIUS", "TABLE", "Abs", "Atan", "Clamp", "Cos", "Functions", "GroupSort", "Joint",
    "Law", "MaxMin", "Sector", "Sin", "WindowSort", "enclose", "is_activation", "learned_sector", "maker", "mixed",
    "piecewise", "register", "sector", "slope_bounds", "slope_range", "smooth", "spread",
]  # fmt: skip

V = TypeVar("V")

MIN_RELATIVE_RADIUS = 0.02
"""Least radius of a sector relative to its largest slope; keeps ``center / radius`` of linear ones finite."""

BUILT_IN = tuple(TABLE)
ELEMENTWISE: tuple[type[nn.Module], ...] = tuple(c for c, law in TABLE.items() if law.slopes is not None)
"""The elementwise activations known from the start (some of them are refused for some of their arguments)."""


# -- slopes ------------------------------------------------------------------------------------------------------------


def _find(module: nn.Module) -> tuple[type[nn.Module], Law] | tuple[None, None]:
    """The class whose forward ``module`` runs, with its law: an overridden forward does not inherit one."""
    if not isinstance(module, nn.Module):
        raise OptionError(f"expected an instance of torch.nn.Module, got {module!r}")
    forward = getattr(module.forward, "__func__", None)
    for cls in type(module).__mro__:
        if cls in TABLE and not TABLE[cls].refused and getattr(cls, "forward", None) is forward:
            return cls, TABLE[cls]
    return None, None


def _unknown(module: nn.Module) -> SlopeError:
    """Say why ``module`` has no slope bounds."""
    name = type(module).__name__
    base = next((cls for cls in type(module).__mro__ if cls in TABLE), None)
    if base is not None and TABLE[base].refused:
        return SlopeError(f"{name} is not an elementwise activation: it {TABLE[base].refused}")
    why = f"overrides the forward of {base.__name__}" if base else "is not an activation with known slope bounds"
    return SlopeError(
        f"{name} {why}; if it acts elementwise, state its slopes with ldlt.activations.register({name}, lambda module: "
        "(m, L)), else use one of ldlt.activations.ELEMENTWISE, GroupSort or MaxMin"
    )


def is_activation(module: nn.Module) -> bool:
    """Return whether the class of a module has a rule: elementwise (built in or registered) or joint.

    The rule may still refuse its arguments: ``Hardshrink`` is an activation that :func:`sector` refuses.
    Modules that are refused as a class, such as ``Softmin``, are none.

    >>> is_activation(nn.ReLU()), is_activation(MaxMin()), is_activation(nn.Softmin(dim=1))
    (True, True, False)
    """
    return _find(module)[0] is not None


def slope_bounds(module: nn.Module) -> tuple[float, float]:
    """Return the exact infimum and supremum ``(m, L)`` of the slopes of an elementwise activation.

    Irrational constants are correctly rounded to float64. For :class:`torch.nn.PReLU` they are those of the
    current weights, over all channels. A subclass is taken for its base class only if it does not override
    ``forward``.

    Args:
        module: An activation: one of :data:`ELEMENTWISE`, or of a class given to :func:`register`.

    Raises:
        SlopeError: If the slopes are unbounded or unknown, or the nonlinearity is not elementwise.

    >>> slope_bounds(nn.LeakyReLU(0.1)), slope_bounds(nn.Sigmoid())
    ((0.1, 1.0), (0.0, 0.25))
    """
    cls, law = _find(module)
    if cls is None or law is None:
        raise _unknown(module)
    if law.slopes is None:
        raise SlopeError(
            f"{type(module).__name__} is a joint nonlinearity: it is 1-Lipschitz over a group of entries "
            "but has no slope bounds entry by entry; sector() describes it (center, radius, group)"
        )
    bounds = law.slopes(module)
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError) as error:
        raise SlopeError(f"{cls.__name__}: slope bounds must be a pair of numbers (m, L), got {bounds!r}") from error
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise SlopeError(f"{cls.__name__}: slope bounds must be finite with m <= L, got ({low}, {high})")
    return low, high


def slope_range(module: nn.Module, low: Tensor, high: Tensor, bounds: Range) -> Range:
    """Bounds on the slopes of an elementwise activation over intervals.

    The chord slopes on ``[l, h]`` lie in the closed hull of the derivative there. Derivatives of smooth activations get
    an outward margin for their rounding; piecewise linear ones are exact.

    Args:
        module: The activation.
        low: Lower ends, (features,), float64.
        high: Upper ends, likewise.
        bounds: Global bounds ``(m, L)``, likewise: the answer where no more is known, and a limit for all.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> slope_range(nn.ReLU(), -2 * one, -one, (0 * one, one))
    (tensor([0.], dtype=torch.float64), tensor([0.], dtype=torch.float64))
    """
    law, (m, upper) = _find(module)[1], bounds
    if law is None or law.slopes_on is None:
        return m, upper
    found_low, found_high = law.slopes_on(module, low, high)
    finite = low.isfinite() & high.isfinite() & (low <= high)
    found_low = torch.where(finite & (found_low > m), found_low, m)  # also where it is not a number
    found_high = torch.where(finite & (found_high < upper), found_high, upper)
    return torch.minimum(found_low, found_high), torch.maximum(found_low, found_high)


def enclose(module: nn.Module, x: V, functions: Functions[V]) -> V:
    """The value of an elementwise activation at ``x`` in the arithmetic of given functions: a ball for balls.

    Raises:
        GraphError: The function is not known, or it is random.
    """
    law = _find(module)[1]
    if law is None or law.enclose is None:
        raise GraphError(
            f"the rounding of {type(module).__name__} is not known; give it to ldlt.activations.register as enclose=, "
            "or use an activation of ldlt.activations.ELEMENTWISE, GroupSort or MaxMin"
        )
    found: V = law.enclose(module, x, functions)
    return found


def register(
    cls: type[nn.Module],
    bounds: Bounds | None = None,
    *,
    slopes_on: Callable[[Any, Tensor, Tensor], Range] | None = None,
    enclose: Callable[[Any, Any, Functions[Any]], Any] | None = None,
    calls: str = "",
    cases: Sequence[Mapping[str, Any]] | None = None,
) -> Any:
    """State the law of your own elementwise activation.

    It is trusted: the certificate holds if it does. Only the form of the slopes (finite, ``m <= L``) is checked,
    on each use; :class:`ldlt.testing.ActivationCase` tries everything out. Registering a class again replaces its law;
    the built-in ones are fixed.

    Args:
        cls: Subclass of :class:`torch.nn.Module` that acts elementwise.
        bounds: Function of an instance that returns ``(m, L)``. Without it, ``register(cls)`` is a decorator.
        slopes_on: Function of an instance and the ends of intervals, (features,) each in float64, that returns bounds
            of the slopes there, for local certificates; those everywhere by default.
        enclose: The activation itself as a function of an instance, a value and :class:`Functions`, for
            :func:`ldlt.forward_error`; without it rounding is not known.
        calls: Names of functions of PyTorch that compute it, separated by spaces.
        cases: Keyword arguments of instances to test; the class without arguments by default, if it can be made so.

    Returns:
        ``bounds``, or the decorator.

    Raises:
        OptionError: If ``cls`` is not a module class or is built in, or another argument is not of its kind.

    >>> class Snake(nn.Module):
    ...     def forward(self, x):
    ...         return x + x.sin() ** 2
    >>> @register(Snake, enclose=lambda module, x, f: x + f.sin(x) * f.sin(x))
    ... def snake(module):  # 1 + sin(2x)
    ...     return 0.0, 2.0
    >>> slope_bounds(Snake())
    (0.0, 2.0)
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise OptionError(f"register needs a subclass of torch.nn.Module, got {cls!r}")
    if cls in BUILT_IN:
        raise OptionError(f"{cls.__name__} is built in and its rule is fixed; subclass it with your own forward")
    for name, function in (("bounds", bounds), ("slopes_on", slopes_on), ("enclose", enclose)):
        if function is not None and not callable(function):
            raise OptionError(f"{name} of {cls.__name__} must be a function, got {function!r}")
    if not isinstance(calls, str):
        raise OptionError(f"calls of {cls.__name__} must be names separated by spaces, got {calls!r}")
    for name in calls.split():
        owner = next((c for c, law in TABLE.items() if c is not cls and name in law.names), None)
        if owner is not None or not any(hasattr(space, name) for space in (torch, F, torch.special, Tensor)):
            why = f"is {owner.__name__}" if owner else "is no function or method of PyTorch"
            raise OptionError(f"calls of {cls.__name__}: '{name}' {why}")
    if cases is None:
        required = [p for p in inspect.signature(cls).parameters.values() if p.default is p.empty and p.kind < 2]
        cases = () if required else ({},)
    if isinstance(cases, str) or not all(isinstance(c, Mapping) for c in cases):
        raise OptionError(f"cases of {cls.__name__} must be a list of dictionaries of arguments, got {cases!r}")

    def add(function: Bounds) -> Bounds:
        TABLE[cls] = Law(function, slopes_on, enclose, calls, cases=tuple(cases))
        return function

    return add if bounds is None else add(bounds)


def maker(name: str) -> Callable[..., nn.Module] | None:
    """What makes the module of an ATen operation of this name from the arguments behind its input."""
    for cls, law in TABLE.items():
        if name in law.names:
            return cls if isinstance(law.calls, str) else law.calls[name]
    return None


# -- sectors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sector:
    r"""The constraint :math:`\|\Delta w - c\,\Delta v\| \le r\,\|\Delta v\|` on :math:`w = \sigma(v)`.

    Attributes:
        center: c, a float or a tensor with one element or one per channel.
        radius: r > 0, likewise.
        group: None if the constraint holds entry by entry, else the number g of entries over which it holds jointly (0:
            all along a dimension); :func:`mixed` says which ones they are. Sorting has c = 0 and r = 1. Softmax is the
            gradient of a convex function whose curvature is at most 1/2, so that c = r = 1/4.
    """

    center: Tensor | float
    radius: Tensor | float
    group: int | None = None

    @property
    def rho(self) -> Tensor | float:
        """Return ``center / radius`` (1 for ReLU)."""
        return self.center / self.radius

    def widened(self) -> Sector:
        """Return the smallest sector around this one that contains ``w = 0``."""
        center, radius = torch.as_tensor(self.center), torch.as_tensor(self.radius)
        both = (center.abs() + radius) / 2
        apart = center.abs() > radius
        center, radius = torch.where(apart, both * center.sign(), center), torch.where(apart, both, radius)
        if isinstance(self.center, Tensor) or isinstance(self.radius, Tensor):
            return Sector(center, radius, self.group)
        return Sector(float(center), float(radius), self.group)


def sector(module: nn.Module, size: int | None = None) -> Sector:
    """Return the sector of an activation.

    The radius is at least :data:`MIN_RELATIVE_RADIUS` times the largest absolute slope; a wider sector is
    still valid. For :class:`torch.nn.PReLU`, center and radius are differentiable functions of the current
    weight, in its dtype.

    Args:
        module: An elementwise activation (see :func:`slope_bounds`), or a joint one.
        size: Size of dimension 1 (features or channels) of its input, to check that the module fits it.

    Raises:
        SlopeError: If the module has no sector.
        ShapeError: If the module does not fit ``size``.

    >>> sector(nn.ReLU()), sector(MaxMin())
    (Sector(center=0.5, radius=0.5, group=None), Sector(center=0.0, radius=1.0, group=2))
    """
    if isinstance(module, Masked):
        return Sector(0.5, 0.5) if type(module.inner) is nn.Identity else sector(module.inner, size).widened()
    cls, law = _find(module)
    if cls is not None and law is not None and law.joint is not None:
        group = law.joint.size(module)
        if size is not None and law.joint.channels and size % group:
            raise ShapeError(f"{cls.__name__} sorts groups of {group}, which do not divide {size} entries")
        return Sector(law.joint.center, law.joint.radius, group)
    if cls is nn.PReLU:
        assert isinstance(module.weight, Tensor)
        count = module.weight.numel()
        if size is not None and count not in (1, size):
            raise ShapeError(f"{type(module).__name__} has {count} slopes, its input has {size} channels")
        return learned_sector(module.weight)
    low, high = slope_bounds(module)
    scale = max(abs(low), abs(high)) or 1.0  # a constant has slopes 0 only; any radius will do
    return Sector((high + low) / 2.0, max((high - low) / 2.0, MIN_RELATIVE_RADIUS * scale))


def learned_sector(weight: Tensor) -> Sector:
    """Return the sector of slopes 1 and ``weight``, one per channel: that of :class:`torch.nn.PReLU`."""
    weight = weight.flatten()
    least = MIN_RELATIVE_RADIUS * weight.abs().clamp(min=1.0)
    return Sector((1.0 + weight) / 2.0, torch.maximum((1.0 - weight).abs() / 2.0, least))


def spread(module: nn.Module, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Center and radius of an activation for every entry of its input of that shape, (features,) each, in float64."""
    found, features = sector(module), math.prod(shape)

    def wide(value: Tensor | float) -> Tensor:
        flat = torch.as_tensor(value, dtype=torch.float64).detach().reshape(-1, 1)
        return flat.expand(-1, features // len(flat)).reshape(-1)

    return wide(found.center), wide(found.radius)


def mixed(module: nn.Module, shape: tuple[int, ...]) -> Tensor | None:
    """Which entries a joint nonlinearity mixes: a group number for every entry of its input of that shape.

    Returns:
        (features,), numbers counted from 0, in flattened order; None for an elementwise activation.

    >>> mixed(MaxMin(), (4,)), mixed(WindowSort((2,)), (1, 4)), mixed(nn.ReLU(), (4,))
    (tensor([0, 0, 1, 1]), tensor([0, 0, 1, 1]), None)
    """
    if isinstance(module, Masked):
        return mixed(module.inner, shape)
    law = _find(module)[1]
    if law is None or law.joint is None:
        return None
    owner = law.joint.owner(module, torch.arange(math.prod(shape)).reshape(shape))
    return torch.unique(owner, return_inverse=True)[1].reshape(-1)
