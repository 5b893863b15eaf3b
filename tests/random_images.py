"""Random modules on images: convolutions, skips, shuffles, pools, dense ends."""

from __future__ import annotations

import copy
import math
import random

import torch
from torch import nn

import ldlt
from ldlt.images.convolutions import CircularConv
from random_graphs import ACTIVATIONS

IMAGE_ACTIVATIONS = [a for a in ACTIVATIONS if a is not ldlt.activations.MaxMin]


def conv(inputs: int, outputs: int, dims: int, size: int = 3, **options) -> nn.Module:
    layer = [nn.Conv1d, nn.Conv2d][dims - 1]
    return layer(inputs, outputs, size, padding="same" if "stride" not in options else size // 2,
                 padding_mode="circular", **options)  # fmt: skip


class RandomImages(nn.Module):
    """A module whose forward follows a random list of operations on images.

    Args:
        seed: Determines everything but the weights.
        nodes: Largest number of operations.
    """

    def __init__(self, seed: int, nodes: int = 6) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.dims = dims = rng.choice([1, 2, 2])
        size = tuple(rng.randint(4, 9) for _ in range(dims))
        area = math.prod(size)
        self.shape = (rng.randint(1, 6 if area <= 20 else 3), *size)
        nodes = min(nodes, max(3, 150 // area))  # the dense matrix stays small
        self.layers = nn.ModuleDict()
        self.program: list[tuple] = []
        shapes = {0: self.shape}
        for i in range(1, rng.randint(1, nodes) + 1):
            p = rng.choice(list(shapes)) if rng.random() < 0.3 else i - 1
            c, *s = shapes[p]
            same = [q for q in shapes if shapes[q] == shapes[p]]
            alike = [q for q in shapes if shapes[q][1:] == shapes[p][1:]]
            even = all(n % 2 == 0 for n in s)
            kinds = ["act", "act", "act", "conv", "scale", "postact", "skipact", "cat", "sum", "slice", "roll"]
            kinds += ["average", "max", "stride", "patch"] * 2 if even else []
            kinds += ["nearest", "transposed"] * 2 if max(s) <= 4 else []
            shuffles = ["shuffle"] if c % 4 == 0 and max(s) <= 6 else []
            shuffles += ["unshuffle"] if even and c * 4 <= 12 else []
            kind = rng.choice(shuffles if dims == 2 and shuffles and rng.random() < 0.4 else kinds)
            out, chosen, extra = (c, *s), [p], rng.choice([-2.0, 0.5, 3.0])
            width = rng.choice([1, 2, 3, 4, 4, 5, 6] if area <= 30 else [1, 2, 3, 4])
            if kind in ("act", "conv"):
                chosen = list(dict.fromkeys([p, rng.choice(alike)]))
                for q in chosen:
                    size_k = rng.choice([k for k in (1, 3, 3, 2, 5) if k // 2 <= min(s)])
                    groups = 2 if shapes[q][0] % 2 == 0 and width % 2 == 0 and rng.random() < 0.3 else 1
                    self.layers[f"l{i}_{q}"] = conv(shapes[q][0], width, dims, size_k, groups=groups)
                out = (width, *s)
                if kind == "act":
                    self.layers[f"a{i}"] = self._activation(rng, width)
            elif kind in ("postact", "skipact"):
                self.layers[f"a{i}"] = self._activation(rng, c)
                if kind == "skipact":
                    self.layers[f"l{i}_{p}"] = conv(c, c, dims)
            elif kind in ("cat", "sum"):
                chosen = list(dict.fromkeys([p, rng.choice(alike if kind == "cat" else same)]))
                out = (sum(shapes[q][0] for q in chosen), *s) if kind == "cat" else out
            elif kind == "slice":
                extra = rng.randrange(c)
                out = (c - extra, *s)
            elif kind == "roll":
                extra = rng.randrange(1, 3)
            elif kind == "stride":
                self.layers[f"l{i}_{p}"] = conv(c, width, dims, 3, stride=2)
                self.layers[f"a{i}"] = self._activation(rng, width)
                out = (width, *(n // 2 for n in s))
            elif kind == "patch":
                self.layers[f"l{i}_{p}"] = [nn.Conv1d, nn.Conv2d][dims - 1](c, width, 2, stride=2)
                out = (width, *(n // 2 for n in s))
            elif kind == "transposed":
                layer = [nn.ConvTranspose1d, nn.ConvTranspose2d][dims - 1]
                self.layers[f"l{i}_{p}"] = layer(c, min(width, 2), 2, stride=2)
                self.layers[f"a{i}"] = self._activation(rng, min(width, 2))
                out = (min(width, 2), *(2 * n for n in s))
            else:
                self.layers[f"m{i}"], out = self._resize(kind, (c, *s))
            shapes[i] = out
            self.program.append((kind, i, chosen, extra))
        self.last = max(shapes)
        self.end = rng.choice(["flatten", "flatten", "image", "mean", "both"])
        c = shapes[self.last][0]
        if self.end == "image":
            self.layers["out"] = conv(c, rng.randint(1, 3), dims)
        else:
            features = torch.Size(shapes[self.last]).numel()
            self.layers["out"] = nn.Linear(c if self.end == "mean" else features, 3)
            if self.end == "both":  # the input is flattened beside it
                self.layers["skip"] = nn.Linear(torch.Size(self.shape).numel(), 3)

    def _resize(self, kind, shape):
        c, *s = shape
        half, double = [n // 2 for n in s], [2 * n for n in s]
        return {
            "average": ([nn.AvgPool1d, nn.AvgPool2d][self.dims - 1](2), (c, *half)),
            "max": ([nn.MaxPool1d, nn.MaxPool2d][self.dims - 1](2), (c, *half)),
            "nearest": (nn.Upsample(scale_factor=2), (c, *double)),
            "unshuffle": (nn.PixelUnshuffle(2), (4 * c, *half)),
            "shuffle": (nn.PixelShuffle(2), (c // 4, *double)),
            "scale": (nn.Identity(), (c, *s)),
        }[kind]

    def _activation(self, rng, width):
        convolves = any(hasattr(layer, "groups") for layer in self.layers.values())  # what makes features an image
        if width % 2 == 0 and convolves and rng.random() < 0.2:
            return ldlt.activations.MaxMin()
        return rng.choice(IMAGE_ACTIVATIONS)()

    def forward(self, x):
        values = {0: x}
        for kind, i, chosen, extra in self.program:
            first = values[chosen[0]]
            if kind in ("act", "conv", "stride", "patch", "transposed"):
                total = self.layers[f"l{i}_{chosen[0]}"](first)
                for q in chosen[1:]:
                    total = total + self.layers[f"l{i}_{q}"](values[q])
                values[i] = self.layers[f"a{i}"](total) if f"a{i}" in self.layers else total
            elif kind == "postact":
                values[i] = self.layers[f"a{i}"](first)
            elif kind == "skipact":
                values[i] = self.layers[f"a{i}"](first + self.layers[f"l{i}_{chosen[0]}"](first))
            elif kind == "cat":
                values[i] = torch.cat([values[q] for q in chosen], 1)
            elif kind == "sum":
                values[i] = 2 * first if len(chosen) == 1 else first + 2 * values[chosen[1]]
            elif kind == "slice":
                values[i] = first[:, extra:]
            elif kind == "roll":
                values[i] = torch.roll(first, extra, 2)
            elif kind == "scale":
                values[i] = extra * first
            else:
                values[i] = self.layers[f"m{i}"](first)
        last = values[self.last]
        if self.end == "image":
            return self.layers["out"](last)
        if self.end == "mean":
            return self.layers["out"](last.flatten(2).mean(2) if self.dims == 1 else last.mean((2, 3)))
        y = self.layers["out"](last.flatten(1))
        return y + self.layers["skip"](x.flatten(1)) if self.end == "both" else y


class Unrolled(nn.Module):
    """A layer on images, written as a dense layer on flattened ones; found from the images of unit vectors."""

    def __init__(self, layer: nn.Module, inputs: torch.Size) -> None:
        super().__init__()
        count = inputs.numel()
        with torch.no_grad():
            bias = layer(torch.zeros(1, *inputs))
            columns = layer(torch.eye(count).reshape(count, *inputs)) - bias
            self.outputs = tuple(bias.shape[1:])
            self.dense = nn.Linear(count, bias.numel())
            self.dense.weight.copy_(columns.flatten(1).T)
            self.dense.bias.copy_(bias.flatten())

    def forward(self, x):
        return self.dense(x.flatten(1)).unflatten(1, self.outputs)


def dense_twin(module: nn.Module, shape: tuple[int, ...]) -> nn.Module:
    """A copy in which every convolution, frozen or not, is a dense layer between flattened images."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d, CircularConv)
    twin, seen = copy.deepcopy(module), {}
    layers = {name: layer for name, layer in twin.named_modules() if isinstance(layer, kinds)}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _, args, name=name: seen.__setitem__(name, args[0].shape[1:]))
    twin(torch.zeros(1, *shape))
    for name, inputs in seen.items():
        parent, _, own = name.rpartition(".")
        layers[name]._forward_pre_hooks.clear()
        setattr(twin.get_submodule(parent), own, Unrolled(layers[name], inputs))
    return twin
