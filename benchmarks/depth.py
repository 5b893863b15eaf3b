"""Does the signal reach the end? Activation and gradient norms at initialisation, by depth.

Run:  python benchmarks/depth.py

Feed-forward networks, 16 inputs, width 64, 4 outputs with an orthogonal head, bound 1, standard normal inputs.
``signal`` is the spread of the outputs around their mean, ``gradient`` the norm of the gradient of a random unit
combination of the outputs; a linear isometry onto four directions would have 1.9 and about 1. Our default is compared
with zero biases and orthogonal, Xavier or three times larger matrices.
"""

from __future__ import annotations

import torch
from torch import nn

import ldlt


def make(how: str, depth: int, activation) -> ldlt.Lipschitz:
    torch.manual_seed(0)
    options = {"head": "orthogonal", "activation": activation}
    if how == "default":
        return ldlt.nn.FeedForward(16, [64] * depth, 4, **options)
    if how == "gain 3, zero bias":
        net = ldlt.nn.FeedForward(16, [64] * depth, 4, init="orthogonal", gain=3.0, **options)
    elif how == "orthogonal, zero bias":
        net = ldlt.nn.FeedForward(16, [64] * depth, 4, init="orthogonal", **options)
    else:
        net = ldlt.nn.FeedForward(16, [64] * depth, 4, init="keep", alpha=1.0, **options)
        for layer in net.module:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
    with torch.no_grad():
        for layer in net.module:
            if isinstance(layer, nn.Linear):
                layer.bias.zero_()
    return net


def measure(net: ldlt.Lipschitz) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 16, generator=generator, requires_grad=True)
    y = net(x)
    direction = torch.randn(512, 4, generator=generator)
    direction = direction / direction.norm(dim=1, keepdim=True)
    (slope,) = torch.autograd.grad((y * direction).sum(), x)
    spread = (y - y.mean(0)).norm(dim=1).mean()
    return float(spread.detach()), float(slope.norm(dim=1).mean())


def main() -> None:
    torch.set_num_threads(1)
    ways = ["default", "orthogonal, zero bias", "xavier, zero bias", "gain 3, zero bias"]
    print("| activation | initialisation | " + " | ".join(f"depth {d}: signal / gradient" for d in (4, 32, 128)) + " |")
    print("|---|---|---:|---:|---:|")
    for name, activation in {"ReLU": nn.ReLU, "GELU": nn.GELU, "tanh": nn.Tanh}.items():
        for how in ways:
            cells = []
            for depth in (4, 32, 128):
                spread, slope = measure(make(how, depth, activation))
                cells.append(f"{spread:.2g} / {slope:.2g}")
            print(f"| {name} | {how} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
