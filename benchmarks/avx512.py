"""What `scripts/avx512` gains on AMD processors: MKL's AVX-512 code against what it chooses by itself.

    python benchmarks/avx512.py [--rounds 3] [--widths 64 256 512]

Every round starts two processes, one with and one without, with one thread each: products and factorisations of w × w
matrices in float32, and a training step of a feed-forward network (batch 256, four hidden layers of width w). Prints
the median times and their ratio. On processors that are not AMD's, or have no AVX-512, both are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

import ldlt
from _measure import interleave, machine

ROOT = Path(__file__).resolve().parent.parent


def measure(width: int) -> dict[str, float]:
    """Milliseconds by operation, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a = torch.randn(width, width)
    spd = a @ a.mT + width * torch.eye(width)
    net = ldlt.nn.FeedForward(64, [width] * 4, 10)
    optimiser = torch.optim.AdamW(net.parameters(), 1e-3)
    x = torch.randn(256, 64)

    def step() -> None:
        optimiser.zero_grad()
        net(x).square().mean().backward()
        optimiser.step()

    jobs = {
        "product": lambda: a @ spd,
        "triangular solve": lambda: torch.linalg.solve_triangular(spd, a, upper=True, left=False),
        "LU": lambda: torch.linalg.lu_factor(spd),
        "Cholesky": lambda: torch.linalg.cholesky(spd),
        "training step": step,
    }
    return interleave(jobs, 15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    print(machine())
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    for width in arguments.widths:
        command = [sys.executable, __file__, "--one", str(width)]
        found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for _ in range(arguments.rounds):
            for shim, rows in found.items():
                whole = [str(ROOT / "scripts" / "avx512"), *command] if shim else command
                text = subprocess.run(whole, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
                rows.append(json.loads(text))
        print(f"\nwidth {width}{'':12}      plain   avx512    ratio")
        for name in found[False][0]:
            plain, fast = (statistics.median(row[name] for row in found[shim]) for shim in (False, True))
            print(f"  {name:20} {plain:8.3f} {fast:8.3f} {plain / fast:8.2f}")


if __name__ == "__main__":
    main()
