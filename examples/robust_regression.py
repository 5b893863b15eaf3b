"""Regression with outliers: a network that cannot be steep cannot chase them.

Run:  python examples/robust_regression.py --out pictures

A smooth function is measured at 60 places with a little noise; a tenth of the measurements is wrong by a lot. Three
networks of the same size are trained in the same way on the absolute error: a plain one, a plain one with weight decay,
and one whose slope is bounded by 0.75, a little above that of the function. To follow an outlier of height h, a
function of slope at most L has to be wrong over an interval of length 2h/L around it, on all the points that lie there.
The bound does not know which points are wrong; it makes fitting them too expensive.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import ldlt

BOUND = 0.75
RANGE = 12.0
DECAY = 0.3


@dataclass(frozen=True)
class Result:
    """One network.

    Attributes:
        error: Root of the mean squared distance to the true function.
        slope: Steepest slope on a fine grid.
        bound: Certified constant of the network.
        values: The network on the grid.
    """

    error: float
    slope: float
    bound: float
    values: Tensor


def truth(x: Tensor) -> Tensor:
    """Slopes in [−3/8, 5/8]."""
    return torch.sin(x / 2) + x / 8


def data(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places, measurements (both (count, 1)) and which of them are wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(-RANGE, RANGE, count)[:, None]
    y = truth(x) + 0.1 * torch.randn(count, 1, generator=generator)
    wrong = torch.zeros(count, dtype=torch.bool)
    wrong[torch.randperm(count, generator=generator)[: count // 10]] = True
    sign = torch.where(torch.rand(count, 1, generator=generator) < 0.5, -1.0, 1.0)
    return x, torch.where(wrong[:, None], y + 3 * sign, y), wrong


def train(net: nn.Module, x: Tensor, y: Tensor, steps: int, decay: float) -> None:
    """AdamW on the mean absolute error, the step size falling to zero."""
    optimiser = torch.optim.AdamW(net.parameters(), 0.01, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.l1_loss(net(x), y).backward()
        optimiser.step()
        schedule.step()


def draw(path: Path, results: dict[str, Result], points: tuple[Tensor, Tensor, Tensor], grid: Tensor) -> None:
    """The measurements, the true function and what the networks made of them."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    x, y, wrong = points
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(x[~wrong], y[~wrong], ".", color="0.4", label="measurements")
    axes.plot(x[wrong], y[wrong], "x", color="k", label="wrong measurements")
    axes.plot(grid, truth(grid), color="k", lw=1, ls=":", label="true function")
    for color, (name, result) in zip(("C3", "C1", "C0"), results.items(), strict=True):
        axes.plot(grid, result.values, color=color, lw=1.5, label=f"{name}: error {result.error:.2f}")
    axes.set(xlabel="x", ylabel="y")
    axes.legend(fontsize=8, ncols=2, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def fit(name: str, points: tuple[Tensor, Tensor, Tensor], grid: Tensor, steps: int, seed: int) -> Result:
    """Train one of the three networks and compare it with the true function."""
    torch.manual_seed(seed)
    hidden = [32, 32, 32]
    net: nn.Module
    if name == "bounded":
        net = ldlt.nn.FeedForward(1, hidden, 1, bound=BOUND, activation=ldlt.activations.MaxMin)
    else:
        net = ldlt.nn.feed_forward_module(1, hidden, 1)
    train(net, *points[:2], steps, DECAY if "decay" in name else 0.0)
    bound = net.bound if isinstance(net, ldlt.Lipschitz) else ldlt.certify(net, 1).bound
    with torch.no_grad():
        values = net(grid)
    error = float((values - truth(grid)).square().mean().sqrt())
    return Result(error, float((values.diff(dim=0).abs() / grid.diff(dim=0)).max()), bound, values)


def main(seeds: int = 2, steps: int = 500, out: Path | None = None) -> dict[str, list[Result]]:
    """Train the three networks on some samples; returns their results by name. The picture shows the last sample."""
    grid = torch.linspace(-RANGE, RANGE, 601)[:, None]
    print(f"{'network':20s} {'error':>7s} {'steepest':>9s} {'certified':>10s}   (means over {seeds} samples)")
    results = {}
    for name in ("plain", "plain, weight decay", "bounded"):
        found = [fit(name, data(60, seed), grid, steps, seed) for seed in range(seeds)]
        error, slope, bound = (sum(getattr(r, a) for r in found) / seeds for a in ("error", "slope", "bound"))
        results[name] = found
        print(f"{name:20s} {error:7.3f} {slope:9.2f} {bound:10.2f}", flush=True)
    if out is not None:
        last = {name: found[-1] for name, found in results.items()}
        draw(out / "robust_regression.png", last, data(60, seeds - 1), grid)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, help="number of samples")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, help="folder for the picture (needs matplotlib)")
    main(**vars(parser.parse_args()))
