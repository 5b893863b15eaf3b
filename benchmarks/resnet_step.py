"""One training step of a ResNet-20 and a VGG with zero padding on 32 × 32, plain and with local convolutions.

Run:  python benchmarks/resnet_step.py        (process times of one thread, medians of interleaved rounds)
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

import ldlt
from _measure import machine


class Block(nn.Module):
    """A residual block as everybody writes it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.skip(x))


class ResNet20(nn.Module):
    """Nine of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.Sequential(*(Block(a, b, b // a) for a, b in pairwise(widths)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: D102
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 32, 0, 64, 64, 0, 128, 128, 0):
        layers += [nn.MaxPool2d(2)] if not width else [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        channels = width or channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; batch {args.batch}")
    for name, make in {"ResNet-20": ResNet20, "VGG": vgg}.items():
        torch.manual_seed(0)
        models = {"plain": make(), "local": ldlt.Lipschitz(make(), input_shape=(3, 32, 32))}
        x, times = torch.randn(args.batch, 3, 32, 32), {n: [] for n in models}
        for r in range(args.rounds + 1):
            for kind, model in models.items():
                begin = time.process_time()
                model(x).square().sum().backward()
                if r:
                    times[kind].append(time.process_time() - begin)
        plain, local = (statistics.median(t) for t in times.values())
        print(f"{name}: plain {1e3 * plain:.0f} ms, local {1e3 * local:.0f} ms, {local / plain:.2f}x")


if __name__ == "__main__":
    main()
