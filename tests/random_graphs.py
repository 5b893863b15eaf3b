"""Random acyclic modules: the raw material of the property tests."""

from __future__ import annotations

import random

import torch
from torch import nn

import ldlt

ACTIVATIONS = [
    nn.ReLU,
    nn.Tanh,
    nn.GELU,  # m < 0
    nn.SiLU,  # m < 0
    lambda: nn.LeakyReLU(0.2),  # m > 0
    lambda: nn.LeakyReLU(-0.5),  # m < 0
    nn.Softplus,
    nn.Sigmoid,
    lambda: nn.PReLU(init=0.3),
    ldlt.activations.MaxMin,
    ldlt.activations.Abs,  # c = 0
]


class RandomGraph(nn.Module):
    """A module whose forward follows a random list of operations.

    Args:
        seed: Determines everything but the weights.
        nodes: Number of operations.
        parents: Largest number of parents of a node.
    """

    def __init__(self, seed: int, nodes: int = 12, parents: int = 4, width: int = 6, activations=None) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.width_in = rng.randint(1, width)
        self.layers = nn.ModuleDict()
        self.program: list[tuple] = []
        sizes = {0: self.width_in}
        table = ACTIVATIONS if activations is None else activations
        for i in range(1, rng.randint(1, nodes) + 1):
            kind = rng.choice(
                [
                    "act",
                    "act",
                    "act",
                    "linear",
                    "sum",
                    "cat",
                    "slice",
                    "scale",
                    "postact",
                    "skipact",
                    "constant",
                ]
            )
            count = min(rng.randint(1, parents), len(sizes))
            chosen = sorted(rng.sample(sorted(sizes), count))
            if rng.random() < 0.7 and i - 1 not in chosen:
                chosen[-1] = i - 1
            if kind in ("act", "linear"):  # a sum of free maps
                out = 2 * rng.randint(1, max(1, width // 2))
                for p in chosen:
                    self.layers[f"l{i}_{p}"] = nn.Linear(sizes[p], out)
                if kind == "act":
                    self.layers[f"a{i}"] = rng.choice(table)()
                sizes[i] = out
            elif kind == "cat":
                sizes[i] = sum(sizes[p] for p in chosen)
            elif kind == "sum":
                same = [p for p in sizes if sizes[p] == sizes[chosen[-1]]]
                chosen = rng.sample(same, min(len(same), 3))
                sizes[i] = sizes[chosen[0]]
            elif kind == "slice":
                chosen = chosen[-1:]
                start = rng.randrange(sizes[chosen[0]])
                stop = rng.randint(start + 1, sizes[chosen[0]])
                self.program.append(("slice", i, chosen, (start, stop)))
                sizes[i] = stop - start
                continue
            elif kind == "constant":
                chosen = chosen[-1:]
                out = rng.randint(1, width)
                self.register_buffer(f"c{i}", torch.randn(sizes[chosen[0]], out))
                sizes[i] = out
            elif kind in ("postact", "skipact"):  # activation of something that is not a free map
                chosen = chosen[-1:]
                if sizes[chosen[0]] % 2:
                    self.layers[f"a{i}"] = nn.ReLU()
                else:
                    self.layers[f"a{i}"] = rng.choice(table)()
                if kind == "skipact":
                    self.layers[f"l{i}_{chosen[0]}"] = nn.Linear(sizes[chosen[0]], sizes[chosen[0]])
                sizes[i] = sizes[chosen[0]]
            else:
                chosen = chosen[-1:]
                sizes[i] = sizes[chosen[0]]
            self.program.append((kind, i, chosen, rng.choice([-2.0, 0.5, 3.0])))
        self.ends = sorted({max(sizes), *rng.sample(sorted(sizes), min(2, len(sizes)))})
        self.out = rng.randint(1, width)
        for p in self.ends:
            self.layers[f"out_{p}"] = nn.Linear(sizes[p], self.out)

    def forward(self, x):
        values = {0: x}
        for kind, i, chosen, number in self.program:
            first = values[chosen[0]]
            if kind in ("act", "linear"):
                total = self.layers[f"l{i}_{chosen[0]}"](first)
                for p in chosen[1:]:
                    total = total + self.layers[f"l{i}_{p}"](values[p])
                values[i] = self.layers[f"a{i}"](total) if kind == "act" else total
            elif kind == "cat":
                values[i] = torch.cat([values[p] for p in chosen], 1)
            elif kind == "sum":
                total = first
                for p in chosen[1:]:
                    total = total - values[p]
                values[i] = total
            elif kind == "slice":
                values[i] = first[:, number[0] : number[1]]
            elif kind == "scale":
                values[i] = number * first
            elif kind == "constant":
                values[i] = first @ getattr(self, f"c{i}")
            elif kind == "postact":
                values[i] = self.layers[f"a{i}"](first)
            else:
                values[i] = self.layers[f"a{i}"](first + self.layers[f"l{i}_{chosen[0]}"](first))
        total = self.layers[f"out_{self.ends[0]}"](values[self.ends[0]])
        for p in self.ends[1:]:
            total = total + self.layers[f"out_{p}"](values[p])
        return total


def randomise(net: ldlt.Lipschitz, seed: int, scale: float = 1.0) -> None:
    """Random free parameters, biases and multipliers included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in net.named_parameters():
            spread = 0.5 if name.startswith(("log_", "margin")) else scale
            p.copy_(spread * torch.randn(p.shape, generator=generator, dtype=torch.float64))
