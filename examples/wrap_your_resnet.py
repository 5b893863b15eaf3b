"""Your own residual network, wrapped: the same class, trained the same way, with and without a bound.

Run:  python examples/wrap_your_resnet.py --out pictures

`Mine` is an ordinary module with two residual branches and a concatenation. It is trained twice on handwritten digits
(8 × 8 pixels, shipped inside scikit-learn): as it is, and wrapped by `ldlt.Lipschitz` with bound 1. While it trains, an
attack looks for the steepest pair of inputs. The plain network gets steeper and steeper; the wrapped one comes close to
its bound and never passes it. In the end both are certified, the plain one after the fact by `ldlt.certify`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import ldlt

RADII = (0.0, 0.1, 0.25, 0.5)


class Mine(nn.Module):
    """Two pre-activation residual blocks; the head reads the input again."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.inner = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.outer = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(64 + width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 64) to (batch, 10)."""
        h = self.stem(x)
        for inner, outer in zip(self.inner, self.outer, strict=True):
            h = h + outer(torch.relu(inner(h)))
        return self.head(torch.cat([x, torch.tanh(h)], dim=1))


@dataclass
class Result:
    """One training.

    Attributes:
        bound: Certified constant at the end.
        slopes: Steepest slope that the attack found after each epoch.
        certified: Share of test digits that are right and certified beyond each of ``RADII``.
        curve: The same share as a function of the radius.
    """

    bound: float
    slopes: list[float] = field(default_factory=list)
    certified: dict[float, float] = field(default_factory=dict)
    curve: ldlt.Curve | None = None


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int, seed: int) -> list[float]:
    """Adam on cross-entropy with the logits scaled up, since a bound of 1 keeps them small; returns attacked slopes."""
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(seed)
    slopes = []
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(8 * net(x[rows]), y[rows]).backward()
            optimiser.step()
        slopes.append(ldlt.attack.lipschitz_lower_bound(net, 64, starts=16, steps=15, x=x[:16]).value)
    return slopes


def draw(path: Path, results: dict[str, Result]) -> None:
    """Left: attacked slopes during training. Right: certified accuracy."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, (name, result) in zip(("C3", "C0"), results.items(), strict=True):
        left.plot(range(1, len(result.slopes) + 1), result.slopes, color=color, label=f"{name}, attacked")
        left.axhline(result.bound, color=color, ls="--", lw=1, label=f"{name}, certified at the end")
        if result.curve is not None:
            right.step(result.curve.radii, result.curve.accuracy, where="post", color=color, label=name)
    left.set(ylim=(0, None), xlabel="epoch", ylabel="slope", title="steepest slope found, and the bound")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.0, 0.93))
    right.set(
        xlabel="radius", ylabel="correct and certified", ylim=(0, 1.02), title="certified accuracy on test digits"
    )
    right.legend(fontsize=8)
    right.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(seed: int = 0, epochs: int = 20, out: Path | None = None) -> dict[str, Result]:
    """Train both; returns their results by name."""
    digits = load_digits()
    parts = train_test_split(digits.data / 16, digits.target, test_size=0.3, random_state=seed, stratify=digits.target)
    x, x_test = (torch.tensor(p, dtype=torch.float32) for p in parts[:2])
    y, y_test = (torch.tensor(p) for p in parts[2:])
    print(f"{'network':8s} {'bound':>8s} {'attack':>8s}   right and certified beyond")
    print(f"{'':27s} " + " ".join(f"{r:6g}" for r in RADII))
    results = {}
    for name in ("plain", "wrapped"):
        torch.manual_seed(seed)
        net: nn.Module = Mine()
        if name == "wrapped":
            net = ldlt.Lipschitz(net, bound=1.0, input_shape=64)
        slopes = train(net, x, y, epochs, seed)
        if isinstance(net, ldlt.Lipschitz):
            frozen, certificate = ldlt.certificates.freeze_certified(net)  # a `Mine` with ordinary weights, and a proof
        else:
            frozen, certificate = net, ldlt.certify(net, 64)
        with torch.no_grad():
            logits = frozen(x_test)
        certified = ldlt.certified_accuracy(logits, y_test, certificate, RADII)
        curve = ldlt.certified_curve(logits, y_test, certificate)
        results[name] = Result(certificate.bound, slopes, certified, curve)
        shares = " ".join(f"{certified[r]:6.3f}" for r in RADII)
        print(f"{name:8s} {certificate.bound:8.4f} {slopes[-1]:8.4f}   {shares}", flush=True)
    if out is not None:
        draw(out / "wrap_your_resnet.png", results)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, help="folder for the picture (needs matplotlib)")
    main(**vars(parser.parse_args()))
