"""A counterexample to the printed construction on paper, and a search for one in any block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

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

    Returns:
        All numbers, exact ones as fractions.

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


@dataclass(frozen=True, eq=False)
class SteepestPair:
    """The pair of inputs with the largest slope that a search has found.

    Attributes:
        slope: ``|f(y) - f(x)| / |y - x|`` in the Euclidean norm, a lower bound of the Lipschitz constant.
        bound: The claimed bound.
        x: One input, shape ``(d_0,)``, float64.
        y: The other input.
    """

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
    """Search for the steepest pair of inputs of a block, in float64.

    Random pairs climb their slope by gradient ascent. At the ends of each, the Jacobian then tells the
    steepest direction, and a short step along it is measured as well. Everything reported is a measured pair
    of actual outputs, hence a true lower bound of the Lipschitz constant; that a search finds nothing above
    the bound proves nothing.

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
    with torch.no_grad():
        if isinstance(target, AsPrintedResidual):
            explicit, activations, biases = target.explicit(), torch.relu, list(target.biases)
        else:
            explicit = target
        shifts = None if biases is None else [None if b is None else b.detach().double().cpu() for b in biases]
        block = ResidualBlock(
            explicit.A.detach().double().cpu(),
            explicit.B.detach().double().cpu(),
            tuple(weight.detach().double().cpu() for weight in explicit.C),
            tuple(diagonal.detach().double().cpu() for diagonal in explicit.multipliers),
            explicit.slopes,
            explicit.bound,
        )

    def f(points: Tensor) -> Tensor:
        return block.forward(points, activations, shifts)

    generator = torch.Generator().manual_seed(seed)
    shape = (starts, block.sizes[0])
    x = radius * torch.randn(shape, dtype=torch.float64, generator=generator)
    y = x + torch.randn(shape, dtype=torch.float64, generator=generator)
    x.requires_grad_()
    y.requires_grad_()
    optimiser = torch.optim.Adam([x, y], lr=0.05)
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            _slopes(f, x, y).clamp_min(1e-30).log().sum().neg().backward()
            optimiser.step()

    ends = torch.cat([x, y, (x + y) / 2]).detach()
    jacobians = torch.func.vmap(torch.func.jacrev(f))(ends)
    directions = torch.linalg.svd(jacobians, full_matrices=False).Vh[:, 0]
    lefts = torch.cat([x.detach(), ends - 1e-4 * directions])
    rights = torch.cat([y.detach(), ends + 1e-4 * directions])
    slopes = _slopes(f, lefts, rights)
    best = int(slopes.argmax())
    return SteepestPair(float(slopes[best]), block.bound, lefts[best], rights[best])


def _slopes(f: Activation, x: Tensor, y: Tensor) -> Tensor:
    """Slope of each pair; zero for pairs too close to be measured."""
    distance = torch.linalg.vector_norm(y - x, dim=-1)
    rise = torch.linalg.vector_norm(f(y) - f(x), dim=-1)
    return torch.where(distance > 1e-6, rise / distance.clamp_min(1e-6), 0 * rise)
