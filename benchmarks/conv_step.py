"""One training step of a convolution layer, beside plain ``Conv2d`` and the layers of the installed peers.

Run:  python benchmarks/conv_step.py       (needs the extra `peers` for the peers' rows)

Two sizes: 32 channels on images of 32 × 32 and 64 channels on 16 × 16, batch 64, kernel 3. A network is ``depth``
layers with activations between them; a step is forward, squared sum, backward and SGD. Time is divided by the depth, so
that the figures are those of a layer. The times are process times of one thread, medians of interleaved rounds. A
frozen network is trained like any other here: its kernels are as large as the image.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import nn

import ldlt
from _measure import machine

SIZES = [(32, 32), (64, 16)]
BATCH = 64
Make = Callable[[int, int, int], nn.Module]  # from channels, size and depth


def stack(layer: Callable[[int], nn.Module], activation: Callable[[], nn.Module]) -> Make:
    """Layers of so many channels with activations between them."""

    def make(channels: int, size: int, depth: int) -> nn.Module:
        layers = [part for _ in range(depth) for part in (layer(channels), activation())]
        return nn.Sequential(*layers[:-1])

    return make


CIRCULAR = {"padding": 1, "padding_mode": "circular"}
PLAIN = "plain Conv2d, circular padding"
plain = stack(lambda c: nn.Conv2d(c, c, 3, **CIRCULAR), nn.ReLU)


def constrained(channels: int, size: int, depth: int) -> ldlt.Lipschitz:
    return ldlt.Lipschitz(plain(channels, size, depth), input_shape=(channels, size, size))


def candidates() -> dict[str, Make]:
    found: dict[str, Make] = {
        PLAIN: plain,
        "plain Conv2d, zeros": stack(lambda c: nn.Conv2d(c, c, 3, padding=1), nn.ReLU),
        "ldlt": constrained,
        "ldlt, frozen": lambda *args: constrained(*args).freeze(),
    }
    if importlib.util.find_spec("deel") is not None:
        from deel import torchlip

        found["deel-torchlip SpectralConv2d"] = stack(
            lambda c: torchlip.SpectralConv2d(c, c, 3, **CIRCULAR), torchlip.GroupSort2
        )
        found["deel-torchlip FrobeniusConv2d"] = stack(
            lambda c: torchlip.FrobeniusConv2d(c, c, 3, **CIRCULAR), torchlip.GroupSort2
        )
    if importlib.util.find_spec("orthogonium") is not None:
        from orthogonium.layers.conv.AOC import AdaptiveOrthoConv2d
        from orthogonium.layers.conv.AOL.aol import AOLConv2D
        from orthogonium.layers.conv.SLL.sll_layer import SDPBasedLipschitzResBlock

        found["orthogonium AdaptiveOrthoConv2d"] = stack(
            lambda c: AdaptiveOrthoConv2d(c, c, kernel_size=3, **CIRCULAR), nn.ReLU
        )
        found["orthogonium AOLConv2D"] = stack(lambda c: AOLConv2D(c, c, 3, **CIRCULAR), nn.ReLU)
        # A residual block: two convolutions, and the activation is inside.
        found["orthogonium SLL block"] = stack(lambda c: SDPBasedLipschitzResBlock(c, 1.0), nn.Identity)
        if importlib.util.find_spec("einops") is not None:
            from orthogonium.legacy.cayley_ortho_conv import Cayley

            found["orthogonium Cayley"] = stack(lambda c: Cayley(c, c, kernel_size=3), nn.ReLU)
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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--depth", type=int, default=4)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{machine()}; batch {BATCH}, {args.depth} layers, per layer")
    found: dict[tuple[int, int], dict[str, float]] = {}
    for channels, size in SIZES:
        torch.manual_seed(0)
        models = {}
        for name, make in candidates().items():
            try:
                models[name] = make(channels, size, args.depth).train()
            except Exception as error:  # a peer that does not build is a row without a figure
                print(f"{name}: {error}")
        times = measure(models, torch.randn(BATCH, channels, size, size), args.rounds)
        found[channels, size] = {name: value / args.depth for name, value in times.items()}
    print("\n| layer | " + " | ".join(f"{c} channels, {n}×{n}" for c, n in SIZES) + " |")
    print("|---" + "|---:" * len(SIZES) + "|")
    for name in found[SIZES[0]]:
        cells = [
            f"{times[name]:.0f} ms, {times[name] / times[PLAIN]:.2f}×" if name in times else "–"
            for times in found.values()
        ]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
