"""One training step of dense 1-Lipschitz networks, beside a plain MLP and the installed peers.

Run:  python benchmarks/step.py            (all widths; needs the extra `peers` for the peers' rows)
      python benchmarks/step.py --widths 512 --rounds 40

Every network maps 64 inputs through four hidden layers to 10 outputs. A step is forward, cross-entropy, backward and
AdamW on a batch of 256. Frozen inference is the forward pass alone, against that of the plain MLP.
"""

from __future__ import annotations

import argparse
import importlib.util
import warnings
from itertools import pairwise

import torch
from torch import nn

import ldlt
from _measure import interleave, machine
from ldlt_bench.families import FamilyNetwork

INPUTS, OUTPUTS, DEPTH, BATCH = 64, 10, 4, 256


def sequential(layer, activation) -> nn.Module:
    def make(width: int) -> nn.Module:
        sizes = [INPUTS] + [width] * DEPTH
        layers: list[nn.Module] = []
        for i, o in pairwise(sizes):
            layers += [layer(i, o), activation()]
        return nn.Sequential(*layers, layer(width, OUTPUTS))

    return make


def candidates() -> dict:
    found = {
        "plain MLP": lambda w: ldlt.nn.feed_forward_module(INPUTS, [w] * DEPTH, OUTPUTS),
        "ldlt FeedForward cholesky": lambda w: ldlt.nn.FeedForward(INPUTS, [w] * DEPTH, OUTPUTS),
        "ldlt Residual cholesky": lambda w: ldlt.nn.Residual(INPUTS, [w] * DEPTH, OUTPUTS),
        "ldlt FeedForward cayley": lambda w: ldlt.nn.FeedForward(INPUTS, [w] * DEPTH, OUTPUTS, contraction="cayley"),
        "ldlt FeedForward symmetric": lambda w: ldlt.nn.FeedForward(
            INPUTS, [w] * DEPTH, OUTPUTS, contraction="symmetric"
        ),
    }
    for family in ("aol", "sll", "sandwich", "orthogonal"):
        found[f"our {family}"] = lambda w, f=family: FamilyNetwork(f, INPUTS, [w] * DEPTH, OUTPUTS)
    if importlib.util.find_spec("deel") is not None:
        from deel import torchlip

        found["deel-torchlip SpectralLinear"] = sequential(torchlip.SpectralLinear, torchlip.GroupSort2)
    if importlib.util.find_spec("orthogonium") is not None:
        from orthogonium.layers import OrthoLinear

        found["orthogonium OrthoLinear"] = sequential(OrthoLinear, nn.ReLU)
    return found


def step_of(net: nn.Module, x: torch.Tensor, labels: torch.Tensor):
    optimiser = torch.optim.AdamW(net.parameters(), 1e-3)
    net.train()

    def step() -> None:
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimiser.step()

    return step


def table(width: int, rounds: int) -> None:
    torch.manual_seed(0)
    x, labels = torch.randn(BATCH, INPUTS), torch.randint(0, OUTPUTS, (BATCH,))
    nets = {}
    for name, make in candidates().items():
        try:
            nets[name] = make(width)
        except Exception as error:
            print(f"{name}: could not be built ({error})")
    times = interleave({n: step_of(net, x, labels) for n, net in nets.items()}, rounds)
    plain = times["plain MLP"]
    print(f"\nwidth {width}: one training step, median of {rounds} rounds")
    print("| network | ms | × plain |\n|---|---:|---:|")
    for name, value in times.items():
        print(f"| {name} | {value:.2f} | {value / plain:.2f} |")
    chain, skip = times["ldlt FeedForward cholesky"], times["ldlt Residual cholesky"]
    print(f"residual / feed-forward: {skip / chain:.2f}")
    print(f"symmetric / cholesky: {times['ldlt FeedForward symmetric'] / chain:.2f}")
    for name in ("our sandwich", "our sll"):
        print(f"{name} / cholesky: {times[name] / chain:.2f}")
    frozen = nets["ldlt FeedForward cholesky"].freeze().eval()
    with torch.no_grad():
        inference = interleave(
            {"plain": lambda: nets["plain MLP"](x), "frozen": lambda: frozen(x)}, 10 * rounds, warm=20
        )
    print(f"frozen inference / plain inference: {inference['frozen'] / inference['plain']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    print(machine())
    for width in arguments.widths:
        table(width, max(5, arguments.rounds // (1 + width // 512)))


if __name__ == "__main__":
    main()
