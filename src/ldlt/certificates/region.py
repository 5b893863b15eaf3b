"""Regions of inputs that a local certificate is about."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ldlt.errors import OptionError, ShapeError

__all__ = ["KINDS", "Region"]

KINDS = ("ball", "box")


@dataclass(frozen=True, eq=False)
class Region:
    r"""All inputs with :math:`\|x - \text{center}\| \le \text{radius}`.

    Attributes:
        kind: ``"ball"``: the Euclidean norm, and a radius with one element. ``"box"``: entry by entry, with one
            half-width per input.
        center: Center, of the shape of an input.
        radius: Radius or half-widths.
    """

    kind: str
    center: Tensor
    radius: Tensor

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"the region must be one of {', '.join(KINDS)}, not {self.kind!r}")
        shape = torch.Size([]) if self.kind == "ball" else self.center.shape
        if self.radius.shape != shape:
            raise ShapeError(f"the radius of a {self.kind} must have shape {tuple(shape)}")
        if not bool(self.center.isfinite().all() and self.radius.isfinite().all() and (self.radius >= 0).all()):
            raise OptionError("center and radius of a region must be finite, and the radius not negative")
