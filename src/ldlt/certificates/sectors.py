r"""Slopes of the activations of a stored network, rounded outwards.

The inequality uses the sector of an activation only through ``m + L`` and ``mL``:

.. math:: \|w - cv\|^2 - r^2\|v\|^2 = (w - mv)(w - Lv) = w^2 - (m + L)vw + mLv^2 ,

and it is valid for every ``[m, L]`` that contains the slopes. A smaller radius around the same center makes the form
larger, so the exact slopes are never worse than the widened sectors that networks are built with.

What is certified is the network in real arithmetic with its stored weights. The slopes of
:func:`ldlt.activations.slope_bounds` are exact or correctly rounded to float64, hence moved by one float outwards
unless they are short dyadic numbers such as 0, 1, 1/4, -1/2, 3/2 (no rounded constant of that table is one). A number
given to a module, such as the slope of a leaky ReLU, is rounded to the precision of the network when it is used; both
readings are covered.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ldlt import activations
from ldlt.certificates.ball import Ball
from ldlt.certificates.enclosed import precisions, readings
from ldlt.errors import ShapeError, SlopeError
from ldlt.graph import Activation

__all__ = ["Slopes", "outward"]


class Slopes:
    """Slope bounds of one activation node.

    Args:
        low: m, (features,).
        high: L, (features,).
        mixed: None, or for every entry the number of the group that is mixed; then the inequality is that of the whole
            group, with m = c − r and L = c + r.
    """

    def __init__(
        self, low: NDArray[np.float64], high: NDArray[np.float64], mixed: NDArray[np.int64] | None = None
    ) -> None:
        self.low, self.high, self.mixed = low, high, mixed

    @classmethod
    def of(cls, node: Activation, module: nn.Module, given: tuple[Tensor, Tensor] | None = None) -> Slopes:
        """Slopes of a node, valid for all inputs unless others are given.

        Args:
            node: The activation.
            module: The network.
            given: Slopes ``(m, L)``, (features,) each, that the caller has proven in some other way.
        """
        activation = node.resolve(module)
        sector = activations.sector(activation, node.shape[0] if node.shape else 1)  # refuses what does not fit
        mixed = activations.mixed(activation, node.shape)
        one = np.ones(node.features)
        if mixed is not None:
            center, radius = float(sector.center), float(sector.radius)  # halves and quarters
            return cls((center - radius) * one, (center + radius) * one, mixed.numpy())
        kinds = precisions(module)
        if given is not None:
            low, high = (t.detach().double().cpu().numpy().reshape(-1) for t in given)
            if len(low) != node.features or len(high) != node.features:
                raise ShapeError(f"slopes of '{node.name}' must have {node.features} entries")
            if not (np.isfinite(low).all() and np.isfinite(high).all() and (low <= high).all()):
                raise SlopeError(f"slopes of '{node.name}' must be finite with m <= L")
            return cls(low, high)
        if isinstance(activation, nn.PReLU) and type(activation).forward is nn.PReLU.forward:
            activations.slope_bounds(activation)  # refuses what is not finite
            weight = activation.weight.detach().double().cpu().numpy().reshape(-1)
            if node.features % len(weight) or (len(weight) > 1 and node.shape[:1] != (len(weight),)):
                raise ShapeError(f"'{node.name}' has {len(weight)} slopes for features of shape {node.shape}")
            spread = np.repeat(weight, node.features // len(weight))
            return cls(np.minimum(spread, 1.0), np.maximum(spread, 1.0))
        m, ell = activations.slope_bounds(activation)
        return cls(min(outward(m, kinds, -1)) * one, max(outward(ell, kinds, 1)) * one)

    @property
    def total(self) -> Ball:
        """``m + L``, (features,)."""
        return Ball.exact(self.low) + Ball.exact(self.high)

    @property
    def product(self) -> Ball:
        """``mL``, (features,)."""
        return Ball.exact(self.low) * Ball.exact(self.high)

    @property
    def hull(self) -> Ball:
        """``[m, L]``, (features,)."""
        return Ball.between(self.low, self.high)


def outward(value: float, kinds: Iterable[torch.dtype], direction: int) -> list[float]:
    """Readings of a number that may have been rounded, moved by one float in a direction unless it is dyadic."""
    if value * 2.0**10 == round(value * 2.0**10) and abs(value) <= 2.0**10:
        return [value]
    return [float(np.nextafter(v, direction * np.inf)) for v in readings(value, kinds)]
