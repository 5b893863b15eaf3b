"""From an ordinary trained network to a fifth of its certified bound.

Run:  python examples/lower_the_bound.py

1. Train a plain multi-layer perceptron on handwritten digits (8 × 8 pixels, shipped inside scikit-learn).
2. Certify it: the best bound for its weights, proven.
3. Start a constrained network at exactly these weights and train on while the bound goes down to a fifth.

Dividing the bound by five divides the logits by five and changes no prediction and no radius. What the schedule does is
make the loss ask for margins again, which under the smaller bound means larger radii.
"""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import ldlt

RADII = (0.0, 0.25, 0.5, 1.0)


def data(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test inputs (rows, 64) in [0, 1], and labels."""
    digits = load_digits()
    parts = train_test_split(digits.data / 16, digits.target, test_size=0.3, random_state=seed, stratify=digits.target)
    inputs = [torch.tensor(p, dtype=torch.float32) for p in parts[:2]]
    labels = [torch.tensor(p) for p in parts[2:]]
    return inputs[0], inputs[1], labels[0], labels[1]


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float, before: object = None) -> None:
    """Adam on cross-entropy, batches of 128; ``before(share)`` is called with the share of training done."""
    optimiser = torch.optim.Adam(net.parameters(), rate)
    for epoch in range(epochs):
        if callable(before):
            before(epoch / max(epochs - 1, 1))
        for rows in torch.randperm(len(x)).split(128):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimiser.step()


def report(name: str, model: nn.Module, certificate: ldlt.Certificate, x: Tensor, y: Tensor) -> dict[float, float]:
    """Print one line of the table."""
    with torch.no_grad():
        found = ldlt.certified_accuracy(model(x), y, certificate, RADII)
    print(f"{name:34s} {certificate.bound:8.3f} " + " ".join(f"{found[r]:8.3f}" for r in RADII), flush=True)
    return found


def main(seed: int = 0, epochs: int = 60) -> dict[str, dict[float, float]]:
    """Run the three steps; returns certified accuracies by line of the table."""
    torch.manual_seed(seed)
    x, x_test, y, y_test = data(seed)
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    train(plain, x, y, epochs // 2, 1e-3)
    print(f"{'share right and certified beyond':34s} {'bound':>8s} " + " ".join(f"{r:8g}" for r in RADII))
    certificate = ldlt.certify(plain, 64)
    lines = {"plain": report("ordinary training", plain, certificate, x_test, y_test)}

    net = ldlt.Lipschitz.from_trained(plain, certificate=certificate)
    start = net.bound
    frozen, proof = ldlt.certificates.freeze_certified(net)
    lines["start"] = report("constrained, same weights", frozen, proof, x_test, y_test)

    longer = copy.deepcopy(plain)  # the same number of steps without a bound, for comparison
    train(longer, x, y, epochs, 1e-3)
    lines["longer"] = report("ordinary training, as long", longer, ldlt.certify(longer, 64), x_test, y_test)

    # Down to a fifth during the first half, then train on.
    train(net, x, y, epochs, 1e-3, before=lambda share: net.set_bound(start * 0.2 ** min(1.0, 2 * share)))
    frozen, proof = ldlt.certificates.freeze_certified(net)
    lines["fifth"] = report("constrained, a fifth of the bound", frozen, proof, x_test, y_test)
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=60)
    main(**vars(parser.parse_args()))
