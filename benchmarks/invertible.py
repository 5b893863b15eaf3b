"""The step function fitted with slopes between 0.1 and 10, beside the published fit; inverses and their proven errors.

Run:  python benchmarks/invertible.py

The setting is that of Wang, Dvijotham and Manchester, *Monotone, Bi-Lipschitz, and Polyak–Łojasiewicz Networks* (2024):
f(x) = ±2 on [−2, 2], half of the mean squared error. The best of all such functions is known in closed form; the loss
published for their network is 0.0685. The inverse is taken of 1,000 random points in float64.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

import ldlt
from _measure import machine

LOWER, UPPER, EDGE, PUBLISHED = 0.1, 10.0, 2.0, 0.0685


def loss(y: Tensor, x: Tensor) -> Tensor:
    return (y - 2 * x.sign()).square().mean() / 2


def optimum(x: Tensor) -> float:
    """The loss of the best function: slope 10 around zero, 0.1 elsewhere."""
    a = (2 * 2.0 - LOWER * EDGE) / (2 * UPPER - LOWER)
    y = torch.where(x.abs() <= a, UPPER * x, x.sign() * (LOWER * (x.abs() - a) + UPPER * a))
    return float(loss(y, x))


def fit(seed: int, steps: int) -> ldlt.BiLipschitz:
    torch.manual_seed(seed)
    body = ldlt.nn.feed_forward_module(1, [8] * 6, 1, ldlt.activations.MaxMin).double()
    net = ldlt.BiLipschitz(body, LOWER, UPPER, input_shape=1, head="orthogonal", contraction="cayley")
    x = torch.linspace(-EDGE, EDGE, 400, dtype=torch.float64)[:, None]
    optimiser = torch.optim.Adam(net.parameters(), 2e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-2, total_steps=steps)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(net(x), x).backward()
        optimiser.step()
        schedule.step()
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    x = torch.linspace(-EDGE, EDGE, 40_001, dtype=torch.float64)[:, None]
    print(f"best possible {optimum(x):.5f}, published {PUBLISHED}")
    for seed in range(arguments.seeds):
        begin = time.perf_counter()
        net = fit(seed, arguments.steps)
        with torch.no_grad():
            found = float(loss(net(x), x))
        print(f"seed {seed}: {found:.5f}, {time.perf_counter() - begin:.0f} s", flush=True)
    frozen = net.freeze()
    points = 4 * torch.rand(1000, 1, dtype=torch.float64) - 2
    with torch.no_grad():
        y = frozen(points)
    inverse = frozen.invert(y)
    true = (inverse.x - points).flatten(1).norm(dim=1)
    print(f"proven slopes [{frozen.lower:.6f}, {frozen.upper:.6f}]; inverse of 1,000 points in {inverse.steps} steps:")
    print(f"largest error {float(true.max()):.1e}, largest proven bound {float(inverse.error.max()):.1e},")
    print(f"bound above the error at {int((inverse.error >= true).sum())} points")


if __name__ == "__main__":
    main()
