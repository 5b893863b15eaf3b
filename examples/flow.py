r"""A normalising flow from invertible networks: the density of two-dimensional data, exact samples, exact likelihoods.

Run:  python examples/flow.py --out pictures

A map F of the data to a standard normal variable has the log-likelihood

    log p(x) = log N(F(x); 0, I) + log |det J_F(x)| .

F is a composition of four `ldlt.BiLipschitz` networks, each of slopes between 0.1 and 1.9 by construction, so every
step of the optimiser keeps it invertible: no restart, no check, no architecture that exists for the sake of the
determinant. Samples are inverses of normal ones.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import ldlt


@dataclass(frozen=True)
class Result:
    """What was learnt.

    Attributes:
        normal: Mean log-likelihood of test points under the best single Gaussian.
        flow: The same under the flow.
        error: Largest distance between test points and the inverses of their images.
    """

    normal: float
    flow: float
    error: float


def moons(count: int, generator: torch.Generator) -> Tensor:
    """Two moons, (count, 2), standardised."""
    angle = math.pi * torch.rand(count, generator=generator, dtype=torch.float64)
    side = torch.arange(count) % 2
    points = torch.stack([angle.cos() + side, angle.sin() * (1 - 2 * side) + 0.5 * side], 1)
    points = points + 0.06 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    return (points - torch.tensor([0.5, 0.25], dtype=torch.float64)) / torch.tensor([0.87, 0.5], dtype=torch.float64)


class Flow(nn.Module):
    """A composition of invertible networks."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()

        def body() -> nn.Module:
            return ldlt.nn.feed_forward_module(2, [32, 32], 2, nn.Tanh).double()

        parts = [ldlt.BiLipschitz(body(), 0.1, 1.9, input_shape=2, contraction="cayley") for _ in range(depth)]
        self.parts = nn.ModuleList(parts)

    def log_prob(self, x: Tensor) -> Tensor:
        """Log-likelihoods (batch,)."""
        total = x.new_zeros(len(x))
        for part in self.parts:
            x, log_det = part.log_det(x)
            total = total + log_det
        return total - x.square().sum(1) / 2 - math.log(2 * math.pi)

    @torch.no_grad()
    def inverse(self, z: Tensor) -> Tensor:
        """Data of normal variables (batch, 2)."""
        for part in reversed(self.parts):
            z = part.inverse(z)
        return z


def draw(path: Path, flow: Flow, data: Tensor) -> None:
    """Data, samples, and the density."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    z = torch.randn(len(data), 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for place, (points, title) in zip(axes, ((data, "data"), (flow.inverse(z), "samples")), strict=False):
        place.scatter(*points.T.numpy(), s=4, color="C0")
        place.set(title=title, xlim=(-2.5, 2.5), ylim=(-2.5, 2.5))
    line = torch.linspace(-2.5, 2.5, 80, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    density = flow.log_prob(grid).detach().exp().reshape(80, 80)
    axes[2].imshow(density.T.numpy(), origin="lower", extent=(-2.5, 2.5, -2.5, 2.5), cmap="Blues")
    axes[2].set(title="density")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(seed: int = 0, steps: int = 600, out: Path | None = None) -> Result:
    """Train the flow; returns likelihoods of test points and the error of the inverse."""
    generator = torch.Generator().manual_seed(seed)
    test = moons(1000, generator)
    torch.manual_seed(seed)
    flow = Flow()
    optimiser = torch.optim.Adam(flow.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 1e-2, total_steps=steps)
    for _ in range(steps):
        optimiser.zero_grad()
        (-flow.log_prob(moons(256, generator)).mean()).backward()
        optimiser.step()
        schedule.step()
    normal = torch.distributions.MultivariateNormal(test.mean(0), test.T.cov())
    found = flow.log_prob(test).detach()
    with torch.no_grad():
        z = test
        for part in flow.parts:
            z = part(z)
    error = (flow.inverse(z) - test).norm(dim=1).max()
    result = Result(float(normal.log_prob(test).mean()), float(found.mean()), float(error))
    print(f"mean log-likelihood of test points: Gaussian {result.normal:.3f}, flow {result.flow:.3f}")
    print(f"largest error of the inverse: {result.error:.1e}")
    if out is not None:
        draw(out / "flow.png", flow, test)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, help="folder for the picture (needs matplotlib)")
    main(**vars(parser.parse_args()))
