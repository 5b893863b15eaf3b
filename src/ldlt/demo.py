"""The main job on embedded data: train certified classifiers on a small real data set and report what they certify."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ldlt import attack, lmi
from ldlt import nn as networks
from ldlt_bench.data import Embedded
from ldlt.engine.network import Lipschitz
from ldlt.radius import certified_accuracy

__all__ = ["RADII", "Outcome", "format_outcomes", "run"]

RADII = {"clean": 0.0, "36/255": 36 / 255, "72/255": 72 / 255, "108/255": 108 / 255, "255/255": 1.0}

NETWORKS: dict[str, Callable[..., Lipschitz]] = {"LDLT-L": networks.FeedForward, "LDLT-R": networks.Residual}


@dataclass(frozen=True)
class Outcome:
    """What one network achieved.

    Attributes:
        name: Its name.
        accuracy: Radius label -> share of test points that are right and certified beyond that radius.
        bound: Certified constant of the whole map.
        attacked: The steepest slope that an attack found.
        residual: Smallest eigenvalue of the matrix inequality, relative.
        seconds: Training time.
    """

    name: str
    accuracy: dict[str, float]
    bound: float
    attacked: float
    residual: float
    seconds: float


def _train(net: nn.Module, x: Tensor, labels: Tensor, epochs: int, tick: Callable[[int], None]) -> None:
    optimiser = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=1e-4)
    for epoch in range(epochs):
        for index in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(net(x[index]), labels[index]).backward()
            optimiser.step()
        tick(epoch + 1)


def run(
    name: str = "breast-cancer-wisc-diag",
    *,
    epochs: int = 40,
    width: int = 64,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Train LDLT-L and LDLT-R on fold 0 of an embedded data set.

    Args:
        name: Name of the set (``ldlt data list`` shows them).
        epochs: Passes over the training rows.
        width: Neurons in each of the four hidden layers.
        seed: Determines everything.
        progress: Called with a line of text after every epoch.
    """
    data = Embedded().load(name)
    fold = data.standardise(0)
    x, labels = torch.tensor(fold.train[0], dtype=torch.float32), torch.tensor(fold.train[1])
    test_x, test_labels = torch.tensor(fold.test[0], dtype=torch.float32), torch.tensor(fold.test[1])
    outcomes = []
    for title, kind in NETWORKS.items():
        torch.manual_seed(seed)
        net = kind(data.columns, [width] * 4, len(data.classes), bound=1.0, head="rows")
        start = time.perf_counter()
        _train(net, x, labels, epochs, lambda e, t=title: progress(f"{t}: epoch {e}/{epochs}"))  # type: ignore[misc]
        seconds = time.perf_counter() - start
        plain = net.freeze().eval()
        with torch.no_grad():
            found = certified_accuracy(plain(test_x), test_labels, net.pair_bounds(), list(RADII.values()))
        steep = attack.lipschitz_lower_bound(plain, data.columns, starts=32, steps=60, x=test_x[:32])
        accuracy = {label: found[radius] for label, radius in RADII.items()}
        outcomes.append(Outcome(title, accuracy, net.bound, steep.value, lmi.residual(net), seconds))
    return outcomes


def format_outcomes(outcomes: list[Outcome]) -> str:
    """A table for people."""
    head = ["network", *RADII, "bound", "attack", "LMI", "train s"]
    rows = []
    for o in outcomes:
        shares = [f"{a:.3f}" for a in o.accuracy.values()]
        rows.append([o.name, *shares, f"{o.bound:.4f}", f"{o.attacked:.4f}", f"{o.residual:+.0e}", f"{o.seconds:.1f}"])
    widths = [max(len(r[k]) for r in [head, *rows]) for k in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells))
    return "\n".join(lines)
