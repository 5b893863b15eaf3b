"""A counterexample to the printed construction on paper, and a search for one in any block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from ldlt.attack import lipschitz_lower_bound
from ldlt_bench.paper.as_printed import AsPrintedResidual, as_printed_block
from ldlt_bench.paper.block import Activation, ResidualBlock

__all__ = ["ScalarCounterexample", "SteepestPair", "scalar_counterexample", "violation"]


@dataclass(frozen=True)
class ScalarCounterexample:
    r"""The smallest network that breaks the printed construction: one input, one ReLU, one output.

    With :math:`\ell = 1`, skip :math:`a = 1/2` and contraction :math:`u = 1/\sqrt 2`, the printed formulas
    give :math:`c = b = \sqrt{3/4}`, and for positive inputs the network is :math:`x \mapsto (a + bc)\,x =
    \tfrac54 x`.

    Attributes:
        a: The skip weight.
        u_squared: Square of the hidden contraction.
        c_squared: Square of the hidden weight.
        b_squared: Square of the output weight.
        slope: Exact slope for positive inputs.
        determinant: Exact determinant of the matrix inequality; negative, so it does not hold.
        smallest_eigenvalue: Its smallest eigenvalue, :math:`1 - \sqrt 7/2`.
        block: The block that :func:`~ldlt_bench.paper.as_printed_block` builds from these numbers (float64).
        measured_slope: Slope of that block as a ReLU network, measured between the inputs 1 and 2.
    """

    a: Fraction
    u_squared: Fraction
    c_squared: Fraction
    b_squared: Fraction
    slope: Fraction
    determinant: Fraction
    smallest_eigenvalue: float
    block: ResidualBlock
    measured_slope: float


def scalar_counterexample() -> ScalarCounterexample:
    """Work the scalar counterexample out in exact arithmetic, and measure it on the network itself.

    Example:
        >>> example = scalar_counterexample()
        >>> example.slope, round(example.measured_slope, 12)
        (Fraction(5, 4), 1.25)
    """
    a, u2 = Fraction(1, 2), Fraction(1, 2)
    d1 = 1 - a**2
    c2 = 2 * u2 * d1
    p2 = 2 - c2 / d1
    s = 1 + a**2 / d1
    b2 = p2 / s
    product = c2  # b c, a rational number since b = c here
    determinant = d1 * (2 - b2) - (c2 + 2 * a * product + a**2 * b2)  # (c + a b)² expanded
    trace = d1 + 2 - b2
    lowest = float(trace) / 2 - math.sqrt(float(trace * trace / 4 - determinant))

    # w / sqrt(1 + w²) is 1/2 for w = 1/√3 and 1/√2 for w = 1; the output contraction is its limit 1.
    skip, hidden = (torch.tensor([[w]], dtype=torch.float64) for w in (1 / math.sqrt(3), 1.0))
    block = as_printed_block(skip, [hidden], hidden, alpha=[1.0, 1.0, 0.0])
    outputs = block.forward(torch.tensor([[1.0], [2.0]], dtype=torch.float64))
    return ScalarCounterexample(
        a, u2, c2, b2, a + product, determinant, lowest, block, float(outputs[1, 0] - outputs[0, 0])
    )


@dataclass(frozen=True)
class SteepestPair:
    """The pair of inputs, each ``(d_0,)``, with the largest slope that a search has found, and the claimed bound."""

    slope: float
    bound: float
    x: Tensor
    y: Tensor

    @property
    def ratio(self) -> float:
        """Slope in units of the bound."""
        return self.slope / self.bound

    @property
    def exceeds(self) -> bool:
        """Whether the pair refutes the bound, beyond rounding."""
        return self.ratio > 1 + 1e-9


class _Evaluated(nn.Module):
    """A block as a module in float64, with weights that are given."""

    def __init__(self, block: ResidualBlock, activations: Any, biases: Sequence[Tensor | None] | None) -> None:
        super().__init__()
        self.block, self.activations = block.double(), activations
        self.biases = biases and [None if b is None else b.detach().double() for b in biases]
        self.register_buffer("dtype", torch.zeros((), dtype=torch.float64))  # tells the search its precision

    def forward(self, x: Tensor) -> Tensor:
        return self.block.forward(x, self.activations, self.biases)


@torch.no_grad()
def violation(
    target: ResidualBlock | AsPrintedResidual,
    *,
    activations: Activation | Sequence[Activation] = torch.relu,
    biases: Sequence[Tensor | None] | None = None,
    starts: int = 64,
    steps: int = 200,
    radius: float = 3.0,
    seed: int = 0,
) -> SteepestPair:
    """Search for the steepest pair of inputs of a block, in float64 (:func:`ldlt.attack.lipschitz_lower_bound`).

    What is reported is a measured pair of outputs, hence a lower bound of the Lipschitz constant; that a search finds
    nothing above the bound proves nothing.

    Args:
        target: An explicit block, or a printed module (whose own ReLU and biases are then used).
        activations: Activations of an explicit block.
        biases: Biases of an explicit block.
        starts: Number of random pairs.
        steps: Steps of the ascent.
        radius: Standard deviation of the random inputs.
        seed: Seed of the random pairs.

    Returns:
        The best pair found.
    """
    if isinstance(target, AsPrintedResidual):
        block, activations, biases = target.explicit(), torch.relu, list(target.biases)
    else:
        block = target
    module = _Evaluated(block, activations, biases)
    found = lipschitz_lower_bound(module, block.sizes[0], starts=starts, steps=steps, scale=radius, seed=seed)
    return SteepestPair(found.pair, block.bound, found.x[0], found.y[0])
