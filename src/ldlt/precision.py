"""Full precision where autocast is on: factorisations need it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

__all__ = ["full_precision"]


def full_precision(like: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context without autocast on the device of a tensor."""
    kind = like.device.type
    on = kind != "meta" and torch.is_autocast_enabled(kind)  # the meta device knows no autocast
    return torch.autocast(kind, enabled=False) if on else contextlib.nullcontext()
