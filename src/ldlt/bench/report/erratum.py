"""What is wrong with the residual block as printed, measured when the page is built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from ldlt.paper import (
    ScalarCounterexample,
    SteepestPair,
    as_printed_block,
    corrected_block,
    scalar_counterexample,
    violation,
)

__all__ = ["Measured", "measure"]

_DRAWS = 10


@dataclass(frozen=True)
class Measured:
    """Numbers of the section on the erratum.

    Attributes:
        scalar: The counterexample on paper.
        found: The steepest pair that a search finds in it.
        corrected: The steepest pair in the corrected block with the same free parameters.
        corrected_eigenvalue: Smallest eigenvalue of that block's matrix inequality.
        points: Points of the printed function on [−1, 1].
        draws: Number of Gaussian blocks 4-8-4 that were drawn.
        failing: How many of them break the matrix inequality as printed.
        failing_corrected: The same for the corrected construction.
    """

    scalar: ScalarCounterexample
    found: SteepestPair
    corrected: SteepestPair
    corrected_eigenvalue: float
    points: list[tuple[float, float]]
    draws: int
    failing: int
    failing_corrected: int


@cache
def measure() -> Measured:
    """Work out all numbers, which takes about a second; they are the same on every call."""
    scalar = scalar_counterexample()
    skip, hidden = (torch.tensor([[w]], dtype=torch.float64) for w in (1 / math.sqrt(3), 1.0))
    right = corrected_block(skip, [hidden], hidden, tight=True)
    x = torch.linspace(-1.0, 1.0, 21, dtype=torch.float64)
    y = scalar.block.forward(x[:, None])[:, 0]
    generator = torch.Generator().manual_seed(0)
    failing = failing_corrected = 0
    for _ in range(_DRAWS):
        a, c, b = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((4, 4), (8, 4), (4, 8)))
        failing += as_printed_block(a, [c], b).smallest_eigenvalue() < 0
        failing_corrected += corrected_block(a, [c], b).smallest_eigenvalue() < 0
    return Measured(
        scalar=scalar,
        found=violation(scalar.block, starts=16, steps=40),
        corrected=violation(right, starts=16, steps=40),
        corrected_eigenvalue=float(right.smallest_eigenvalue()),
        points=list(zip(x.tolist(), y.tolist(), strict=True)),
        draws=_DRAWS,
        failing=int(failing),
        failing_corrected=int(failing_corrected),
    )
