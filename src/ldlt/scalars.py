r"""Free numbers that are exponentiated or squashed, kept in a range in which nothing overflows.

Any finite number is a good parameter: a free ``p`` enters every formula as :math:`m \tanh(p/m)`, which is ``p`` to
third order near zero and never leaves ``(-m, m)``.
"""

from __future__ import annotations

import math
from typing import overload

import torch
from torch import Tensor

__all__ = ["BALANCE", "LOG", "MARGIN", "bounded", "floor_share", "positive", "smallest", "unbounded"]

LOG, BALANCE, MARGIN = 20.0, 5.0, 10.0
"""``m`` of logarithms, of the logarithms of balances, and of margins before the sigmoid."""


def bounded(free: Tensor, limit: float = LOG) -> Tensor:
    """``m tanh(p/m)``."""
    return limit * (free / limit).tanh()


def positive(free: Tensor, limit: float = LOG) -> Tensor:
    """``exp(m tanh(p/m))``: a positive number from any finite one."""
    return bounded(free, limit).exp()


@overload
def unbounded(value: Tensor, limit: float = LOG) -> Tensor: ...
@overload
def unbounded(value: float, limit: float = LOG) -> float: ...
def unbounded(value: float | Tensor, limit: float = LOG) -> float | Tensor:
    """The free number of a bounded one: ``bounded(unbounded(v)) = v``; beyond the range, the nearest there is."""
    edge = limit * (1 - 1e-6)
    if not isinstance(value, Tensor):
        return limit * math.atanh(min(max(value, -edge), edge) / limit)
    return limit * (value.clamp(-edge, edge) / limit).atanh()


def smallest(unit: float) -> float:
    """Square root of the smallest number of the stored precision; the same for a sweep in a higher one."""
    return float(torch.finfo(torch.float32 if unit > torch.finfo(torch.float64).eps else torch.float64).tiny ** 0.5)


def floor_share(unit: float) -> float:
    """``δ = ε^{1/3}``: the share of its magnitude that every feature of a factored stack gets as noise of its own."""
    return unit ** (1 / 3)
