r"""The distance of two samples, measured by a network that cannot be steeper than one.

Run:  python examples/wasserstein.py --out pictures

The Wasserstein-1 distance is the least average distance by which the points of one sample must be moved to make the
other. By Kantorovich and Rubinstein it is also the largest difference of averages that a 1-Lipschitz function can see:

    W₁(P, Q) = max { E_P f − E_Q f : f is 1-Lipschitz }.

So *every* 1-Lipschitz network gives a lower bound, whatever its parameters: no penalty on gradients, no clipping of
weights, and a value that can be trusted before training has converged. The exact distance of two samples of equal size
is an optimal assignment, which SciPy solves.

An optimal critic has slope one along every segment of the assignment. ReLU networks cannot keep the norm of the
gradient through their layers unless they are linear; sorting activations can (Anil et al., 2019), and come closer.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import ldlt


@dataclass(frozen=True)
class Result:
    """One critic.

    Attributes:
        estimate: Difference of its averages over the two samples: a lower bound of the distance.
        exact: The distance of the samples.
        history: Estimates during training.
    """

    estimate: float
    exact: float
    history: list[float]

    @property
    def ratio(self) -> float:
        """Estimate over exact value, at most one."""
        return self.estimate / self.exact


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A ring of radius 2, and two blobs; both (count, 2)."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(count, 2, generator=generator, dtype=torch.float64)

    angle = 2 * math.pi * torch.rand(count, generator=generator, dtype=torch.float64)
    ring = 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.1 * noise()
    centers = torch.tensor([[-0.7, 0.0], [0.7, 0.0]], dtype=torch.float64)[torch.arange(count) % 2]
    return ring, centers + 0.2 * noise()


def distance(first: Tensor, second: Tensor) -> tuple[float, Tensor]:
    """Exact W₁ of two samples of equal size, and the partner of every point of the first."""
    cost = torch.cdist(first, second)
    rows, columns = linear_sum_assignment(cost.numpy())
    return float(cost[rows, columns].mean()), torch.as_tensor(columns)


def train(critic: nn.Module, first: Tensor, second: Tensor, steps: int) -> list[float]:
    """Adam, full batch, the step size falling to zero; returns the estimate before each step and after the last."""
    optimiser = torch.optim.Adam(critic.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    both, history = torch.cat([first, second]), []
    for step in range(steps + 1):
        optimiser.zero_grad()
        values = critic(both)[:, 0]
        estimate = values[: len(first)].mean() - values[len(first) :].mean()
        history.append(float(estimate.detach()))
        if step < steps:
            (-estimate).backward()
            optimiser.step()
            schedule.step()
    return history


def draw(path: Path, results: dict[str, Result], critic: nn.Module, points: tuple[Tensor, Tensor, Tensor]) -> None:
    """Left: the samples, their assignment and the level sets of the critic. Right: estimates during training."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    first, second, partner = points
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    left, right = figure.subplots(1, 2)
    axis = torch.linspace(-2.7, 2.7, 121, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(-1, 2)
    with torch.no_grad():
        values = critic(grid)[:, 0].reshape(121, 121)
    left.contour(axis, axis, values, levels=18, cmap="viridis", linewidths=0.8)
    for a, b in zip(first.tolist(), second[partner].tolist(), strict=True):
        left.plot(*zip(a, b, strict=True), color="0.5", lw=0.3)
    left.plot(*first.T, ".", ms=4, color="C3", label="ring")
    left.plot(*second.T, ".", ms=4, color="C0", label="blobs")
    left.set(aspect="equal", title="assignment, and level sets of the critic")
    left.legend(fontsize=8)
    for name, result in results.items():
        right.plot(result.history, label=name)
        right.axhline(result.exact, color="k", ls="--", lw=1)
    right.text(0, result.exact, "exact", va="bottom", fontsize=8)
    right.set(
        xlabel="step", ylabel="distance", title="estimate of the distance, from below", ylim=(0, 1.1 * result.exact)
    )
    right.legend(fontsize=8, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(seed: int = 0, steps: int = 300, count: int = 200, out: Path | None = None) -> dict[str, Result]:
    """Train one critic per activation; returns the results by name."""
    first, second = samples(count, seed)
    exact, partner = distance(first, second)
    print(f"exact distance {exact:.4f}\n{'critic':12s} {'estimate':>9s} {'of exact':>9s}")
    activations = {"ReLU": nn.ReLU, "GroupSort 8": lambda: ldlt.activations.GroupSort(8)}
    results = {}
    for name, activation in activations.items():
        torch.manual_seed(seed)
        critic = ldlt.nn.FeedForward(
            2, [64, 64, 64], 1, bound=1.0, activation=activation, head="orthogonal", dtype=torch.float64
        )
        history = train(critic, first, second, steps)
        results[name] = Result(history[-1], exact, history)
        print(f"{name:12s} {history[-1]:9.4f} {results[name].ratio:9.4f}", flush=True)
    if out is not None:
        draw(out / "wasserstein.png", results, critic, (first, second, partner))
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--count", type=int, default=200, help="points of each sample")
    parser.add_argument("--out", type=Path, help="folder for the picture (needs matplotlib)")
    main(**vars(parser.parse_args()))
