"""A convolutional network on Fashion-MNIST whose predictions come with certified radii.

Run:  python examples/fashion_mnist.py --minutes 5 --out fashion      (needs the extra `figures` for the pictures)
      python examples/fashion_mnist.py --digits --epochs 20           (8 × 8 digits of scikit-learn, in seconds)

The network is 1-Lipschitz in each of its outputs, whatever its weights. Pixels are numbers in [0, 1], so that a radius
of 36/255 means: no change of the picture by less than 36 grey levels, spread over all pixels, changes the class.

Training ends after a number of epochs or minutes; Ctrl-C ends it earlier. In either case the weights that were best on
rows held out from the training rows are kept, and are judged on the test rows.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

import ldlt
from ldlt.activations import MaxMin
from ldlt_bench.data.images import ImageSet, Splits, fashion_mnist
from ldlt_bench.study.training import margin_loss

RADII = {"clean": 0.0, "36/255": 36 / 255, "72/255": 72 / 255, "108/255": 108 / 255, "1": 1.0}
BATCH = 256
LEAST_STEPS = 20  # per epoch, with smaller batches if need be
HELD_OUT = 1 / 20  # share of the training rows on which the best weights are chosen
CHUNK = 500  # rows that are classified at once


class Recipe(NamedTuple):
    """How the network starts and is trained: chosen on held-out training rows of Fashion-MNIST."""

    alpha: float = 0.1
    rate: float = 1e-2
    offset: float = math.sqrt(2)
    temperature: float = 0.25


def load_digits(seed: int) -> Splits:
    """The digits of scikit-learn, 8 × 8 pixels of 17 grey levels, which are spread over 0 … 255."""
    from sklearn import datasets  # noqa: PLC0415 (an extra)

    found = datasets.load_digits()
    images = np.rint(found.images * (255 / 16)).astype(np.uint8)[:, None]
    order = np.random.default_rng(seed).permutation(len(images))
    whole = ImageSet(images[order], found.target[order], tuple("0123456789"))
    return Splits(whole.take(slice(0, 1300)), whole.take(slice(1300, None)))


def conv(inputs: int, outputs: int) -> nn.Conv2d:
    """A convolution of the image's size; circular padding is what the rule for convolutions needs."""
    return nn.Conv2d(inputs, outputs, 3, padding=1, padding_mode="circular")


def network(shape: tuple[int, int, int], width: int, classes: int, mean: float, recipe: Recipe) -> ldlt.Lipschitz:
    """Three convolutions on the image of half the size, one on a quarter, and unit rows as the head."""
    channels, height, rows = shape
    module = nn.Sequential(
        ldlt.nn.Standardise(mean, 1.0),  # centred; the units stay
        nn.PixelUnshuffle(2),
        *(conv(4 * channels, width), MaxMin()),
        *(conv(width, width), MaxMin()),
        *(conv(width, width), MaxMin()),
        nn.PixelUnshuffle(2),
        *(conv(4 * width, 2 * width), MaxMin()),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 4) * (rows // 4), classes),
    )
    return ldlt.Lipschitz(module, bound=1.0, input_shape=shape, head="rows", alpha=recipe.alpha)


def classify(net: ldlt.Lipschitz, x: Tensor) -> Tensor:
    """Logits (n, k) for pixels in [0, 1], (n, c, h, w), from the frozen network."""
    with torch.no_grad():
        frozen = net.freeze().eval()
        return torch.cat([frozen(part) for part in x.split(CHUNK)])


def score(net: ldlt.Lipschitz, x: Tensor, y: Tensor) -> dict[str, float]:
    """Certified accuracy by radius; the constant of each pair of outputs is used."""
    found = ldlt.certified_accuracy(classify(net, x), y, net, list(RADII.values()))
    return {name: found[radius] for name, radius in RADII.items()}


class Budget:
    """What training may cost: epochs, minutes, or whichever ends first."""

    def __init__(self, epochs: float, minutes: float) -> None:
        self.epochs, self.seconds, self.start = epochs, 60 * minutes, time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def used(self, epochs: float) -> float:
        """Which share of it is used up after so many epochs, 0 … 1."""
        return min(1.0, max(epochs / self.epochs, self.elapsed / self.seconds))


class Training:
    """Adam with a step size that falls to zero over the budget; the best weights on held-out rows are kept."""

    def __init__(self, net: ldlt.Lipschitz, train: ImageSet, recipe: Recipe, seed: int) -> None:
        x, y = train.tensors()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        held = max(1, round(HELD_OUT * len(x)))
        self.held = x[order[:held]], y[order[:held]]
        self.x, self.y = x[order[held:]], y[order[held:]]
        self.net, self.recipe = net, recipe
        self.batch = min(BATCH, math.ceil(len(self.x) / LEAST_STEPS))
        self.best, self.weights = -1.0, copy.deepcopy(net.state_dict())

    def run(self, budget: Budget) -> None:
        """Train until the budget is used up or Ctrl-C is pressed, and go back to the best weights."""
        optimiser = torch.optim.Adam(self.net.parameters(), self.recipe.rate)
        epoch = 0
        try:
            while budget.used(epoch) < 1:
                loss = self._epoch(optimiser, epoch, budget)
                epoch += 1
                self._judge(epoch, loss, budget.elapsed)
        except KeyboardInterrupt:  # the epoch that was cut short is judged, too: it may be the first
            print("\nstopped; the best weights so far are kept", flush=True)
            self._judge(epoch + 1, None, budget.elapsed)
        self.net.load_state_dict(self.weights)

    def _epoch(self, optimiser: torch.optim.Optimizer, epoch: int, budget: Budget) -> float:
        """One pass over the training rows, or as much of it as the budget allows; returns the mean loss."""
        offset, temperature = torch.tensor(self.recipe.offset), torch.tensor(self.recipe.temperature)
        batches = torch.randperm(len(self.x)).split(self.batch)
        losses, shown = [], time.monotonic()
        for step, rows in enumerate(batches):
            used = budget.used(epoch + step / len(batches))
            if used >= 1:
                break
            for group in optimiser.param_groups:
                group["lr"] = self.recipe.rate * min(1.0, (1 - used) / 0.7)
            optimiser.zero_grad()
            loss = margin_loss(self.net(self.x[rows]), self.y[rows], offset, temperature).mean()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                print(f"  step {step + 1} of {len(batches)}, loss {losses[-1]:.3f}, {used:.0%} done", flush=True)
        return sum(losses) / max(len(losses), 1)

    def _judge(self, epoch: int, loss: float | None, seconds: float) -> None:
        """Keep the weights if they are the best on the held-out rows, by the mean over the radii."""
        found = score(self.net, *self.held)
        value = sum(found.values()) / len(found)
        kept = value > self.best
        if kept:
            self.best, self.weights = value, copy.deepcopy(self.net.state_dict())
        line = "  ".join(f"{name} {share:.3f}" for name, share in found.items())
        trained = "" if loss is None else f"loss {loss:.3f}  "
        print(f"epoch {epoch:3d}  {seconds:5.0f} s  {trained}held out: {line}{'  *' * kept}", flush=True)


def draw_curve(curve: ldlt.Curve, file: Path) -> None:
    """Certified accuracy over the radius, with the usual radii marked."""
    import matplotlib.pyplot as plt  # noqa: PLC0415 (an extra)

    figure, axes = plt.subplots(figsize=(7.5, 4), layout="constrained")
    end = max(1.2, float(curve.radii[curve.accuracy < 0.01][0]))
    radii = sorted({*curve.radii.tolist(), end})
    axes.step(radii, [100 * curve.at(r) for r in radii], where="post", color="#1b5e8c", linewidth=2)
    for radius in RADII.values():
        height = 100 * curve.at(radius)
        axes.plot([radius], [height], "o", color="#1b5e8c", markersize=5)
        axes.annotate(
            f"{height:.1f} %", (radius, height), (6, 5), textcoords="offset points", fontsize=9, color="#333333"
        )
    axes.set(
        xlim=(0, end),
        ylim=(0, 100),
        xlabel="radius (Euclidean; 1 = 255 grey levels)",
        ylabel="certified test accuracy (%)",
    )
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def draw_samples(test: ImageSet, predicted: Tensor, radius: Tensor, file: Path, rows: int = 4) -> None:
    """The first test images of every class: the radius of those that are right, the wrong class of the others."""
    import matplotlib.pyplot as plt  # noqa: PLC0415 (an extra)

    figure, axes = plt.subplots(
        rows, len(test.classes), figsize=(1.25 * len(test.classes), 1.62 * rows), layout="constrained"
    )
    for column, name in enumerate(test.classes):
        for row, index in enumerate(np.flatnonzero(test.labels == column)[:rows]):
            cell = axes[row, column]
            cell.imshow(test.images[index, 0], cmap="gray_r", vmin=0, vmax=255)
            right = int(predicted[index]) == column
            text = f"r = {float(radius[index]):.2f}" if right else f"{test.classes[int(predicted[index])]}?"
            cell.set_xlabel(text, fontsize=9, color="#1b5e8c" if right else "#b3261e")
        axes[0, column].set_title(name, fontsize=9)
    for cell in axes.flat:
        cell.set(xticks=[], yticks=[])
    figure.savefig(file, dpi=150)
    plt.close(figure)


def draw(test: ImageSet, logits: Tensor, net: ldlt.Lipschitz, out: Path) -> list[Path]:
    """The two pictures; without matplotlib a sentence."""
    try:
        import matplotlib  # noqa: PLC0415 (an extra)
    except ImportError:
        print("no pictures: they need matplotlib, pip install 'ldlt[figures]'")
        return []
    matplotlib.use("agg")
    files = [out / "certified_accuracy.png", out / "samples.png"]
    labels = torch.from_numpy(test.labels.copy())
    curve = ldlt.certified_curve(logits, labels, net)
    draw_curve(curve, files[0])
    draw_samples(test, logits.argmax(1), ldlt.certified_radius(logits, net), files[1])
    return files


def main(
    data: str | None = None,
    digits: bool = False,
    epochs: float | None = None,
    minutes: float | None = None,
    limit: int | None = None,
    width: int = 8,
    out: str | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """Train, certify, draw; returns certified accuracy on the test rows by radius."""
    torch.manual_seed(seed)
    train, test = load_digits(seed) if digits else fashion_mnist(data)
    for name, value in {"epochs": epochs, "minutes": minutes, "limit": limit}.items():
        if value is not None and not value > 0:
            raise ldlt.OptionError(f"--{name} must be positive, not {value}")
    train = train if limit is None else train.take(slice(0, limit))
    if minutes is None:
        minutes = math.inf if epochs is not None else 5.0
    recipe = Recipe()
    mean = float(train.images.mean()) / 255
    net = network(train.shape, width, len(train.classes), mean, recipe)
    size = sum(p.numel() for p in net.parameters())
    print(f"{len(train):,} training and {len(test):,} test images, {size:,} parameters", flush=True)
    training = Training(net, train, recipe, seed)
    training.run(Budget(math.inf if epochs is None else epochs, minutes))

    x, y = test.tensors()
    logits = classify(net, x)
    accuracy = ldlt.certified_accuracy(logits, y, net, list(RADII.values()))
    found = {name: accuracy[radius] for name, radius in RADII.items()}
    print(f"\ntest rows right and certified beyond a radius (pairs of outputs: ≤ {net.pair_bounds().max():.3f})")
    print("  ".join(f"{name:>8s}" for name in found))
    print("  ".join(f"{100 * share:7.2f}%" for share in found.values()), flush=True)
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        for file in draw(test, logits, net, folder):
            print(f"wrote {file}")
    return found


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with the IDX files; default $LDLT_FASHION_MNIST or the Debian package's")
    parser.add_argument("--digits", action="store_true", help="the digits of scikit-learn instead")
    parser.add_argument("--epochs", type=float, help="end after this many passes")
    parser.add_argument("--minutes", type=float, help="end after this time; 5 unless --epochs is given")
    parser.add_argument("--limit", type=int, help="use only this many training rows")
    parser.add_argument("--width", type=int, default=8, help="channels of the convolutions")
    parser.add_argument("--out", help="folder for the two pictures")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    try:
        main(**vars(arguments().parse_args()))
    except ldlt.LdltError as error:
        raise SystemExit(f"{error}\nOr run with --digits, which needs no files.") from None
