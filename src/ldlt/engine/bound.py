"""The declared bound of a network: a constant, or a trained number between a floor and a ceiling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ldlt.check import positive
from ldlt.engine import linalg
from ldlt.errors import BoundError, OptionError


class Bound(nn.Module):
    """ℓ: ``start``, or a trained number that starts there, between ``floor`` and ``ceiling`` if these are given."""

    fixed: Tensor

    def __init__(
        self, start: float, trained: bool, floor: float | None, ceiling: float | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        low = 0.0 if floor is None else positive("bound_floor", floor, BoundError)
        high = math.inf if ceiling is None else positive("bound_ceiling", ceiling, BoundError)
        if not trained and (floor is not None or ceiling is not None):
            raise OptionError("bound_floor and bound_ceiling need train_bound=True")
        if not low < high or not low <= start <= high:
            raise BoundError(f"bound={start:g} must lie between bound_floor={low:g} and bound_ceiling={high:g}")
        self.low, self.high, self.trained, self.start = low, high, trained, start
        if math.isfinite(high):
            self.low = low or high * 1e-6  # the share of a logarithmic scale needs a lower end
        if trained:
            self.free = nn.Parameter(torch.tensor(self._inverse(start), dtype=dtype))
        else:
            self.register_buffer("fixed", _round_down(start, dtype))

    def assign(self, value: float) -> None:
        """Set ℓ, if it is not trained."""
        self.start = value
        self.fixed.copy_(_round_down(value, self.fixed.dtype))

    def _inverse(self, value: float) -> float:
        # Logarithmic distance from the limits, kept off them so that the gradient does not vanish.
        if math.isfinite(self.high):
            share = min(max(math.log(value / self.low) / math.log(self.high / self.low), 0.02), 0.98)
            return float(linalg.unbounded(math.log(share / (1 - share))))
        return float(linalg.unbounded(math.log(max(value - self.low, 0.02 * value))))

    def forward(self) -> Tensor:
        """ℓ as a scalar tensor."""
        if not self.trained:
            return self.fixed
        if math.isfinite(self.high):
            share = torch.sigmoid(linalg.bounded(self.free))
            return self.low * torch.exp(share * math.log(self.high / self.low))
        return self.low + linalg.positive(self.free)

    def value(self) -> float:
        """ℓ as a number."""
        used = float(self())
        # The number in use may be the declared one rounded down; another one comes from a loaded state.
        rounded = not self.trained and 0 <= self.start - used <= 2**-20 * self.start
        return self.start if rounded else used


def _round_down(value: float, dtype: torch.dtype) -> Tensor:
    """The largest number of that dtype that is not above ``value``."""
    rounded = torch.tensor(value, dtype=dtype)
    return rounded if float(rounded) <= value else torch.nextafter(rounded, torch.zeros_like(rounded))
