"""Certificates of convolutional networks by size: bound, product of norms, attack, seconds, memory.

Run:  python benchmarks/certify_cnn.py                          (all networks, each in a process of its own, one thread)
      python benchmarks/certify_cnn.py --networks mnist --limit 30

Networks are at their initial weights (seed 0), in evaluation mode. Seconds are of the processor, from the module to the
proven certificate, first export included; memory is the peak of the process. The product of norms is proven, too.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor, nn

import ldlt


class Block(nn.Module):
    """The residual block of ResNet-20."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if stride != 1:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Activations behind the sum."""
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + self.short(x))


def mnist() -> tuple[nn.Module, tuple[int, ...]]:
    """Two convolutions, 4,804 neurons."""
    convs = [nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*convs, nn.Linear(32 * 49, 100), nn.ReLU(), nn.Linear(100, 10)), (1, 28, 28)


def cifar() -> tuple[nn.Module, tuple[int, ...]]:
    """Four convolutions of 32, 32, 64 and 64 channels and two dense layers of 512, 62,464 neurons."""
    sizes = [(3, 32, 3, 1), (32, 32, 4, 2), (32, 64, 3, 1), (64, 64, 4, 2)]
    convs = [m for a, b, k, s in sizes for m in (nn.Conv2d(a, b, k, s, 1), nn.ReLU())]
    dense = [nn.Linear(64 * 64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*convs, nn.Flatten(), *dense), (3, 32, 32)


def resnet20() -> tuple[nn.Module, tuple[int, ...]]:
    """ResNet-20 of CIFAR, 188,416 neurons."""
    sizes = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    first = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*first, *(Block(*s) for s in sizes), *last), (3, 32, 32)


NETWORKS = {"mnist": mnist, "cifar": cifar, "resnet20": resnet20}


def measure(name: str, limit: float, tolerance: float) -> dict[str, float | str | bool]:
    """One row, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, shape = NETWORKS[name]()
    net.eval()
    begin = time.process_time()
    found = ldlt.certify(net, shape, tolerance=tolerance, time_limit=limit)
    seconds, memory = time.process_time() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    begin = time.process_time()
    ldlt.verify(found, net)
    verified = time.process_time() - begin
    plain = ldlt.certify(net, shape, method="product")
    attack = ldlt.attack.lipschitz_lower_bound(net, shape, starts=4, steps=30).value
    numbers = {"bound": found.bound, "product": plain.bound, "attack": attack, "seconds": seconds, "verify": verified}
    return {"network": name, "rigorous": found.rigorous, **numbers, "GiB": memory}


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds of the clock for each search and its proof")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        print(json.dumps(measure(given.row, given.limit, given.tolerance)))
        return
    print("| network | bound | product of norms | attack | proven | seconds | to verify | memory, GiB |")
    print("|---|---:|---:|---:|---|---:|---:|---:|")
    for name in given.networks:
        words = [
            sys.executable,
            __file__,
            "--row",
            name,
            "--limit",
            str(given.limit),
            "--tolerance",
            str(given.tolerance),
        ]
        row = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        numbers = " | ".join(f"{row[k]:.4g}" for k in ("bound", "product", "attack"))
        times = " | ".join(f"{row[k]:.1f}" for k in ("seconds", "verify", "GiB"))
        print(f"| {name} | {numbers} | {'yes' if row['rigorous'] else 'no'} | {times} |", flush=True)


if __name__ == "__main__":
    main()
