"""The pictures of the site, and what the examples print.

Run:  python docs/figures.py                      (the page "The idea in pictures", and all examples: some minutes)
      python docs/figures.py idea wasserstein     (only these)

Everything goes into docs/pictures: the site is built from there, so that building it trains nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle
from PIL import Image
from torch import Tensor, nn

import ldlt

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
LIVE, NEW, GONE = "#4c78c8", "#f28e2b", "#d8d8d8"


def cone(path: Path) -> None:
    """A function of bounded slope stays in a cone; the place where the cone meets zero is the radius."""
    torch.manual_seed(0)
    net = ldlt.nn.FeedForward(1, [16, 16], 1, bound=1.0, dtype=torch.float64)
    x = torch.linspace(-3, 3, 241, dtype=torch.float64)[:, None]
    target = torch.sin(1.3 * x) * 0.7 + 0.15
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.mse_loss(net(x), target).backward()
        optimiser.step()
    with torch.no_grad():
        y, start = net(x)[:, 0], 1.0
        value = float(net(torch.tensor([[start]], dtype=torch.float64)))
    line, radius = x[:, 0], abs(value) / net.bound
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(line, value - (line - start).abs(), value + (line - start).abs(), color=LIVE, alpha=0.15, lw=0)
    axes.plot(line, y, color="k", label="the network")
    axes.plot([start], [value], "o", color=NEW)
    axes.axhline(0, color="0.5", lw=0.8)
    axes.plot([start - radius, start + radius], [0, 0], color=NEW, lw=4, solid_capstyle="butt")
    axes.text(start - 0.1, -0.75, "within this interval the sign cannot change", fontsize=9, ha="center")
    axes.text(-2.9, 1.5, "slope at most L: never outside the cone", fontsize=9, color=LIVE)
    axes.set(ylim=(-1.6, 2), xlim=(-3, 3), xlabel="input", ylabel="output")
    figure.savefig(path, dpi=150)


def moons(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two interleaved half circles."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.pi * torch.rand(count, generator=generator)
    label = torch.arange(count) % 2
    sign = 1.0 - 2 * label
    points = torch.stack([sign * angle.cos() + label - 0.5, sign * angle.sin() + 0.4 * label - 0.2], 1)
    return points + 0.08 * torch.randn(count, 2, generator=generator), label


def balls(path: Path) -> dict[str, float]:
    """Certified discs of a plain and of a constrained classifier; returns their median radii."""
    x, label = moons(200, 0)
    points, classes = moons(40, 1)
    figure = Figure(figsize=(9, 3.9), layout="constrained")
    found = {}
    for axes, name in zip(figure.subplots(1, 2), ("plain", "constrained"), strict=True):
        torch.manual_seed(0)
        net: nn.Module = ldlt.nn.feed_forward_module(2, [32, 32], 2)
        if name == "constrained":
            net = ldlt.Lipschitz(net, bound=1.0, input_shape=2)
        optimiser = torch.optim.Adam(net.parameters(), 0.01)
        for _ in range(250):
            optimiser.zero_grad()
            nn.functional.cross_entropy(8 * net(x), label).backward()
            optimiser.step()
        frozen = net.freeze() if isinstance(net, ldlt.Lipschitz) else net
        certificate = ldlt.certify(frozen, 2)
        axis = torch.linspace(-2.2, 2.2, 161)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(-1, 2)
        with torch.no_grad():
            side = (frozen(grid)[:, 1] - frozen(grid)[:, 0]).reshape(161, 161)
            radius = ldlt.certified_radius(frozen(points), certificate)
        axes.contourf(axis, axis, side, levels=[-1e9, 0, 1e9], colors=["#dfe8f7", "#fbe5cf"])
        for point, c, r in zip(points.tolist(), classes.tolist(), radius.tolist(), strict=True):
            color = (LIVE, NEW)[c]
            axes.add_patch(Circle((point[0], point[1]), r, facecolor=color, edgecolor=color, alpha=0.35))
            axes.plot(*point, ".", ms=4, color=color)
        found[name] = float(radius.median())
        axes.set(aspect="equal", xticks=[], yticks=[])
        axes.set_title(f"{name}: bound {certificate.bound:.1f}, median radius {found[name]:.3f}", fontsize=10)
    figure.savefig(path, dpi=150)
    return found


def _graph(axes: Axes, states: str) -> None:
    """Nodes x, w₁, w₂, y of a residual network, coloured by state: l(ive), n(ew), g(one), or not there yet."""
    colors = {"l": LIVE, "n": NEW, "g": GONE, "-": "white"}
    for index, (name, state) in enumerate(zip(("x", "w₁", "w₂", "y"), states, strict=True)):
        axes.add_patch(Circle((index, 0), 0.27, facecolor=colors[state], edgecolor="k", lw=0.8))
        axes.text(index, 0, name, ha="center", va="center", color="white" if state in "ln" else "k")
        if index:
            axes.add_patch(FancyArrowPatch((index - 0.72, 0), (index - 0.28, 0), arrowstyle="->", mutation_scale=9))
    axes.add_patch(
        FancyArrowPatch((0.15, 0.24), (2.85, 0.24), connectionstyle="arc3,rad=-0.35", arrowstyle="->", mutation_scale=9)
    )
    axes.set(xlim=(-0.5, 3.5), ylim=(-0.5, 1), aspect="equal")
    axes.axis("off")


def _matrix(axes: Axes, states: str) -> None:
    """Blocks of the covariance of (x, w₁, w₂): of variables that are live, new or forgotten."""
    colors = {"l": LIVE, "n": NEW, "g": GONE}
    for row, first in enumerate(states):
        for column, second in enumerate(states):
            if "-" in (first, second):
                continue
            color = "n" if "n" in (first, second) else "g" if "g" in (first, second) else "l"
            axes.add_patch(Rectangle((column, 2 - row), 0.94, 0.94, facecolor=colors[color], alpha=0.9))
    for index, name in enumerate(("x", "w₁", "w₂")):
        axes.text(-0.25, 2.47 - index, name, ha="right", va="center", fontsize=9)
    axes.set(xlim=(-0.9, 3.1), ylim=(-0.1, 3.1), aspect="equal")
    axes.axis("off")


def sweep(path: Path) -> None:
    """The rule run over a residual network: attach, forget, attach the output."""
    steps = [
        ("start: cov(x) = I/ℓ²", "l---", "l--"),
        ("attach w₁: ‖U₁‖ < 1", "ln--", "ln-"),
        ("attach w₂: ‖U₂‖ < 1", "lln-", "lln"),
        ("w₁ is read no more", "lgl-", "lgl"),
        ("output: ‖U‖ ≤ 1", "lgln", "lgl"),
    ]
    figure = Figure(figsize=(9, 3.3), layout="constrained")
    axes = figure.subplots(2, len(steps), height_ratios=(1, 1.8))
    for column, (title, nodes, blocks) in enumerate(steps):
        _graph(axes[0, column], nodes)
        axes[0, column].set_title(title, fontsize=9)
        _matrix(axes[1, column], blocks)
    axes[1, 0].set_title("covariance:", fontsize=9)
    figure.savefig(path, dpi=150)


def idea(folder: Path) -> dict[str, float]:
    """Draw all three; returns the median radii of the second."""
    cone(folder / "idea-cone.png")
    sweep(folder / "idea-sweep.png")
    return balls(folder / "idea-balls.png")


def example(name: str, folder: Path) -> None:
    """Run an example; keep its picture and what it prints."""
    path = ROOT / "examples" / f"{name}.py"
    draws = ["--out", str(folder)] if '"--out"' in path.read_text(encoding="utf-8") else []
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, str(path), *draws], check=True, stdout=subprocess.PIPE, env=environment)
    (folder / f"{name}.txt").write_bytes(done.stdout)


def shrink(folder: Path) -> None:
    """Pictures with a palette: a quarter of the size, and no difference that one could see."""
    for path in folder.glob("*.png"):
        with Image.open(path) as picture:
            if picture.mode != "P":
                small = picture.convert("RGB").quantize(96, dither=Image.Dither.NONE)
                small.save(path, optimize=True)


def main(names: list[str], folder: Path = PICTURES) -> None:
    """Make the pictures of the given pages, or of all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ["idea", *sorted(p.stem for p in (ROOT / "examples").glob("*.py"))]:
        print(name, flush=True)
        if name == "idea":
            idea(folder)
        else:
            example(name, folder)
    shrink(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="examples, or idea; all if none is given")
    main(parser.parse_args().names)
