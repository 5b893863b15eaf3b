"""How close do trained networks come to their bound? Attacks after training that pushes outputs apart, float32.

Run:  python benchmarks/tightness.py

Each cell is the steepest slope that an attack (pair ascent and Jacobians) finds, divided by the bound: above 1 would
refute the certificate, far below 1 would mean that the bound is loose or the network dead.
"""

from __future__ import annotations

import torch
from torch import nn

import ldlt

INPUTS, OUTPUTS, BOUND = 6, 3, 2.0
NETWORKS = {
    "feed-forward ReLU": lambda **o: ldlt.nn.FeedForward(INPUTS, [32] * 4, OUTPUTS, BOUND, **o),
    "residual ReLU": lambda **o: ldlt.nn.Residual(INPUTS, [32] * 4, OUTPUTS, BOUND, **o),
    "feed-forward GELU": lambda **o: ldlt.nn.FeedForward(INPUTS, [32] * 3, OUTPUTS, BOUND, activation=nn.GELU, **o),
    "residual MaxMin": lambda **o: ldlt.nn.Residual(
        INPUTS, [32] * 3, OUTPUTS, BOUND, activation=ldlt.activations.MaxMin, **o
    ),
}


def push_apart(net: nn.Module, steps: int = 150, rate: float = 0.02) -> None:
    optimiser = torch.optim.Adam(net.parameters(), rate)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(128, INPUTS, generator=generator)
        y = x + 0.3 * torch.randn(128, INPUTS, generator=generator)
        optimiser.zero_grad()
        (-((net(x) - net(y)).norm(dim=1) / (x - y).norm(dim=1)).mean()).backward()
        optimiser.step()


def main() -> None:
    torch.set_num_threads(1)
    contractions = ["cholesky", "symmetric", "cayley"]
    print("| network | " + " | ".join(contractions) + " |\n|---|---:|---:|---:|")
    for name, make in NETWORKS.items():
        cells = []
        for contraction in contractions:
            torch.manual_seed(0)
            net = make(contraction=contraction)
            push_apart(net)
            cells.append(f"{ldlt.attack.lipschitz_lower_bound(net, INPUTS, starts=48).value / BOUND:.4f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
