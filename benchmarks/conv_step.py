"""One training step of a convolution layer, beside plain ``Conv2d`` and the layers of the installed peers.

Run:  python benchmarks/conv_step.py       (needs the extra `peers` for the peers' rows)

Two sizes: 32 channels on images of 32 × 32 and 64 channels on 16 × 16, batch 64, kernel 3. A network is ``depth``
layers with activations between them; a step is forward, squared sum, backward and SGD. Time is divided by the depth, so
that the figures are those of a layer. The times are process times of one thread, medians of interleaved rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
import warnings

import torch
from torch import nn

import ldlt
from _measure import machine

SIZES = [(32, 32), (64, 16)]
BATCH = 64


def plain(channels: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Conv2d(channels, channels, 3, padding=1, padding_mode="circular"), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stack(layer, activation):
    def make(channels: int, size: int, depth: int) -> nn.Module:
        layers: list[nn.Module] = []
        for _ in range(depth):
            layers += [layer(channels), activation()]
        return nn.Sequential(*layers[:-1])

    return make


def candidates() -> dict:
    found = {
        "plain Conv2d": lambda c, n, d: plain(c, d),
        "ldlt": lambda c, n, d: ldlt.Lipschitz(plain(c, d), input_shape=(c, n, n)),
        "ldlt, frozen (inference in training mode)": lambda c, n, d: ldlt.Lipschitz(
            plain(c, d), input_shape=(c, n, n)
        ).freeze(),
    }
    if importlib.util.find_spec("deel") is not None:
        from deel import torchlip

        found["deel-torchlip SpectralConv2d"] = stack(
            lambda c: torchlip.SpectralConv2d(c, c, 3, padding=1, padding_mode="circular"), torchlip.GroupSort2
        )
    if importlib.util.find_spec("orthogonium") is not None:
        from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d

        found["orthogonium AdaptiveOrthoConv2d"] = stack(
            lambda c: AdaptiveOrthoConv2d(c, c, kernel_size=3, padding=1, padding_mode="circular"), nn.ReLU
        )
    return found


def measure(models: dict[str, nn.Module], x: torch.Tensor, rounds: int) -> dict[str, float]:
    """Median process time of a step in milliseconds, every model once per round."""
    times: dict[str, list[float]] = {name: [] for name in models}
    optimisers = {
        name: torch.optim.SGD([p for p in m.parameters() if p.requires_grad], 1e-6) for name, m in models.items()
    }
    for r in range(rounds + 1):
        for name, model in models.items():
            start = time.process_time()
            optimisers[name].zero_grad()
            model(x).square().sum().backward()
            optimisers[name].step()
            if r:
                times[name].append(time.process_time() - start)
    return {name: 1e3 * statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(machine())
    for channels, size in SIZES:
        torch.manual_seed(0)
        models = {}
        for name, make in candidates().items():
            try:
                models[name] = make(channels, size, args.depth).train()
            except Exception as error:  # a peer that does not build is a row without a figure
                print(f"{name}: {error}")
        found = measure(models, torch.randn(BATCH, channels, size, size), args.rounds)
        print(f"\n{channels} channels, {size}x{size}, batch {BATCH}, {args.depth} layers, per layer:")
        for name, value in found.items():
            print(f"  {name:44s} {value / args.depth:8.1f} ms   {value / found['plain Conv2d']:5.2f} x plain")


if __name__ == "__main__":
    main()
