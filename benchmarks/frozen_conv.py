"""Three ways to apply a frozen convolution, and which of them ``freeze`` chooses.

Run:  python benchmarks/frozen_conv.py

The explicit kernel is as large as the image. Fourier domain, unrolled matrix, and ``conv2d`` on the circularly padded
image compute the same; times are process times of one thread in milliseconds, the least of several. The choice is made
by ``ldlt.images.convolutions.unrolls`` from shapes alone. The last column is the time of the choice over the best
of the first two.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from _measure import machine
from ldlt.images.convolutions import CircularConv

SIZES = [(8, 8, 4), (64, 64, 4), (128, 128, 4), (32, 64, 7), (4, 4, 8), (16, 16, 8), (64, 64, 8)]
SIZES += [(4, 8, 14), (8, 8, 14), (16, 16, 14), (64, 64, 16), (3, 16, 32), (32, 32, 32)]


def least(run: Callable[[], Tensor], rounds: int) -> float:
    run()
    times = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def large_kernel(layer: CircularConv, x: Tensor) -> Tensor:
    """``y[i] = Σ_d K[d] x[i − d]``: correlation with the kernel turned round, on an image that is continued."""
    side = layer.cells[0]
    return F.conv2d(F.pad(x, (side - 1, 0, side - 1, 0), mode="circular"), layer.weight.flip(2, 3), layer.bias)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(machine())
    print(f"{'channels':>10s} {'image':>6s} {'batch':>5s} {'Fourier':>9s} {'matrix':>9s} {'conv2d':>9s}  choice")
    for inputs, outputs, side in SIZES:
        kernel = torch.randn(outputs, inputs, side, side) / (inputs**0.5 * side)
        layer = CircularConv(kernel, (inputs, side, side), (outputs, side, side))
        chosen = layer.unrolled
        small = inputs * outputs * side**4 <= 1 << 24  # a larger matrix is not worth its memory
        for batch in (1, 16, 128):
            x = torch.randn(batch, inputs, side, side)
            times, results = {}, []
            for unrolled in (False, True):
                layer.unrolled = unrolled
                if small or not unrolled:
                    times[unrolled] = least(lambda: layer(x), args.rounds)  # noqa: B023
                    results.append(layer(x))
            other = least(lambda: large_kernel(layer, x), 1 if side > 14 else args.rounds)  # noqa: B023
            results.append(large_kernel(layer, x))
            assert all(float((r - results[0]).abs().max()) < 1e-4 for r in results)
            matrix = f"{times[True]:9.3f}" if True in times else f"{'–':>9s}"
            print(
                f"{inputs:4d} → {outputs:3d} {side:6d} {batch:5d} {times[False]:9.3f} {matrix} {other:9.3f}  "
                f"{'matrix ' if chosen else 'Fourier'} {times[chosen] / min(times.values()):5.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
