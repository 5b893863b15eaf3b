"""A classifier of irises that knows how far each measurement may be off.

Run:  python examples/certified_tabular.py --out pictures

The four columns of the iris data are lengths in centimetres, so a Euclidean ball around a flower means something: all
four measurements may be wrong at once, as long as the root of the sum of their squared errors stays below the radius.

1. Train a classifier. `standardise="scale"` divides all columns by one number, because they share a unit.
2. Print accuracy, and the share of test flowers that are classified correctly and certified beyond some radii.
3. Train a second one that asks for a much larger radius: it gives up flowers near the borders of the classes for larger
   radii far from them.

Certificates are rigorous: they hold for the stored weights, and the rounding of the outputs is taken off the radii.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_iris
from sklearn.model_selection import train_test_split

import ldlt

RADII = (0.0, 0.1, 0.2, 0.4, 0.8, 1.2)
ASKED = (0.25, 2.0)
PETAL = (2, 3)  # columns of the picture: petal length and width


@dataclass(frozen=True)
class Result:
    """What one classifier reached on the test flowers.

    Attributes:
        accuracy: Share of flowers that are classified correctly.
        certified: Share that is correct and certified beyond each of ``RADII``, in centimetres.
        radius: Certified radius of every test flower, in centimetres.
    """

    accuracy: float
    certified: NDArray[np.float64]
    radius: NDArray[np.float64]


def fit(asked: float, data: list[NDArray[np.float64]], epochs: int, seed: int) -> tuple[Result, object]:
    """Train for the given radius (in units of the common scale) and measure on the test rows."""
    x, x_test, y, y_test = data
    model = ldlt.LipschitzClassifier(radius=asked, standardise="scale", epochs=epochs, random_state=seed).fit(x, y)
    if not model.certificate_.rigorous:
        raise RuntimeError("the certificate was not proven")
    certified = model.certified_accuracy(x_test, y_test, radii=RADII)
    return Result(float(model.score(x_test, y_test)), certified, model.certified_radius(x_test)), model


def draw(path: Path, results: dict[float, Result], models: dict[float, object], data: list[NDArray]) -> None:
    """Left: test flowers with their certified discs. Right: certified accuracy against the radius."""
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Circle  # noqa: PLC0415

    _, x_test, _, y_test = data
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    least = min(results)
    for row, label, radius in zip(x_test[:, PETAL], y_test, results[least].radius, strict=True):
        left.add_patch(Circle(tuple(row), radius, color=f"C{label}", alpha=0.1))
    for label, name in enumerate(load_iris().target_names):
        rows = y_test == label
        left.plot(*x_test[rows][:, PETAL].T, "o", ms=3, color=f"C{label}", label=name)
    left.set(
        xlabel="petal length (cm)",
        ylabel="petal width (cm)",
        aspect="equal",
        title=f"test flowers and their radii, radius={least:g}",
    )
    left.legend(fontsize=8, loc="upper left")
    for asked, model in models.items():
        radii = np.linspace(0, 1.6, 201)
        right.step(
            radii, model.certified_accuracy(x_test, y_test, radii=radii), where="post", label=f"radius={asked:g}"
        )
    right.set(xlabel="radius (cm)", ylabel="correct and certified", ylim=(0, 1.02), title="certified accuracy")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(seed: int = 0, epochs: int = 100, out: Path | None = None) -> dict[float, Result]:
    """Train for two radii; returns the results by radius."""
    x, y = load_iris(return_X_y=True)
    data = train_test_split(x, y, test_size=0.3, random_state=seed, stratify=y)
    print(f"{'radius':>6s} {'accuracy':>9s} {'median radius':>14s}   correct and certified beyond (cm)")
    print(f"{'':33s} " + " ".join(f"{r:6g}" for r in RADII))
    results, models = {}, {}
    for asked in ASKED:
        result, models[asked] = fit(asked, data, epochs, seed)
        results[asked] = result
        shares = " ".join(f"{s:6.3f}" for s in result.certified)
        print(f"{asked:6g} {result.accuracy:9.3f} {np.median(result.radius):11.3f} cm {shares}", flush=True)
    if out is not None:
        draw(out / "certified_tabular.png", results, models, data)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--out", type=Path, help="folder for the picture (needs matplotlib)")
    main(**vars(parser.parse_args()))
