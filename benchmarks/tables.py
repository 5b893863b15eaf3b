"""Our estimators on tables beside scikit-learn's: clean accuracy, certified accuracy, seconds.

Run:  python benchmarks/tables.py FOLDER     (data sets in the layout of docs/data.md; needs the extra `bench`)

Every model gets the same 70 % of the rows of a set, at most ``--rows`` of them, and is measured on the same others, at
most 10,000; the split depends on the seed. Features are standardised with the mean and deviation of the training rows:
ours do that inside, the others get it. Certified accuracy is that of rigorous certificates, at radii in standard
deviations, with the multipliers of the construction (no search). Seconds are processor time of training on one thread.

The defaults were chosen on the sets in ``CHOSEN_ON``; the table is about ``REPORTED``, which played no part in that.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from sklearn.datasets import fetch_california_housing, load_diabetes
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import ldlt
from _measure import machine
from ldlt_bench.data.archive import Archive

CHOSEN_ON = (
    "abalone",
    "cardiotocography-10clases",
    "chess-krvk",
    "contrac",
    "pendigits",
    "plant-margin",
    "statlog-landsat",
    "wall-following",
    "yeast",
)
REPORTED = (
    "car",
    "letter",
    "magic",
    "molec-biol-splice",
    "nursery",
    "optical",
    "ringnorm",
    "spambase",
    "steel-plates",
    "waveform-noise",
    "wine-quality-white",
)
RADII = (0.14, 0.28, 1.0)
TESTED = 10_000


def standardised(model: Callable[..., Any], seed: int) -> Any:
    return make_pipeline(StandardScaler(), model(random_state=seed))


MODELS: dict[str, Callable[[int], Any]] = {
    "radius=0": lambda seed: ldlt.LipschitzClassifier(radius=0, certify_seconds=0, random_state=seed),
    "default": lambda seed: ldlt.LipschitzClassifier(certify_seconds=0, random_state=seed),
    "radius=1": lambda seed: ldlt.LipschitzClassifier(radius=1, certify_seconds=0, random_state=seed),
    "MLPClassifier": partial(standardised, MLPClassifier),
    "HistGradientBoosting": partial(standardised, HistGradientBoostingClassifier),
}
REGRESSORS: dict[str, Callable[[int], Any]] = {
    "default": lambda seed: ldlt.LipschitzRegressor(certify_seconds=0, random_state=seed),
    "MLPRegressor": partial(standardised, MLPRegressor),
    "HistGradientBoosting": partial(standardised, HistGradientBoostingRegressor),
}


def split(x: np.ndarray, y: np.ndarray, rows: int, seed: int) -> tuple[np.ndarray, ...]:
    order = np.random.default_rng(seed).permutation(len(y))
    cut = int(0.7 * len(y))
    train, test = order[:cut][:rows], order[cut:][:TESTED]
    return x[train], y[train], x[test], y[test]


def timed(model: Any, x: np.ndarray, y: np.ndarray) -> float:
    begin = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-learn's networks say that they could be trained for longer
        model.fit(x, y)
    return time.process_time() - begin


def classify(archive: Archive, sets: list[str], models: list[str], seeds: int, rows: int) -> None:
    found: dict[str, list[list[float]]] = {name: [] for name in models}
    for name in sets:
        data = archive.load(name)
        lines = {}
        for label in models:
            runs = []
            for seed in range(seeds):
                x, y, x_test, y_test = split(data.features, data.labels, rows, seed)
                model = MODELS[label](seed)
                seconds = timed(model, x, y)
                certified = [float("nan")] * len(RADII)
                if hasattr(model, "certified_accuracy"):
                    certified = model.certified_accuracy(x_test, y_test, RADII, "standard").tolist()
                runs.append([float(model.score(x_test, y_test)), *certified, seconds])
            lines[label] = np.mean(runs, axis=0).tolist()
            found[label].append(lines[label])
        shown = "  ".join(f"{label} " + "/".join(f"{v:.3f}" for v in line) for label, line in lines.items())
        print(f"{name:20s} {shown}", flush=True)
    print(f"\nmean of {len(sets)} sets, {seeds} seeds\n")
    print(f"| | accuracy | {' | '.join(f'certified at {r:g}' for r in RADII)} | seconds |")
    print("|---|---:|" + "---:|" * (len(RADII) + 1))
    for label, runs in found.items():
        *shares, seconds = np.mean(runs, axis=0).tolist()
        print(f"| {label} | " + " | ".join("" if np.isnan(v) else f"{v:.3f}" for v in shares) + f" | {seconds:.1f} |")


def regress(seeds: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8000, 8))
    steps = np.where(x[:, 0] > 0.3, x[:, 1], -x[:, 2]) + np.sin(2 * x[:, 3]) + 0.3 * rng.normal(size=len(x))
    problems = {"diabetes": load_diabetes(return_X_y=True), "made up, 8,000 rows with steps": (x, steps)}
    try:
        problems["california housing"] = fetch_california_housing(return_X_y=True, download_if_missing=False)
    except OSError:
        print("california housing is not at hand (sklearn.datasets.fetch_california_housing fetches it)")
    print("\n| set | model | R² | constant, standardised | seconds |\n|---|---|---:|---:|---:|")
    for name, (features, target) in problems.items():
        for label, make in REGRESSORS.items():
            runs = []
            for seed in range(seeds):
                x, y, x_test, y_test = split(features, target, 20_000, seed)
                model = make(seed)
                seconds = timed(model, x, y)
                bound = model.standard_certificate_.bound if label == "default" else float("nan")
                runs.append([model.score(x_test, y_test), bound, seconds])
            score, bound, seconds = np.mean(runs, axis=0)
            print(f"| {name} | {label} | {score:.3f} | {'' if np.isnan(bound) else f'{bound:.2f}'} | {seconds:.1f} |")


def large(rows: int, columns: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, columns))
    y = (x[:, :8] @ rng.normal(size=(8, 7)) + np.abs(x[:, 8:15])).argmax(1)
    print(f"{rows} x {columns}: {timed(MODELS['default'](0), x, y):.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", help="folder or zip file of the data sets")
    parser.add_argument("--sets", nargs="+", default=REPORTED)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--large", action="store_true", help="only the time of a fit on 100,000 x 54 made-up numbers")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    if given.large:
        large(100_000, 54)
        raise SystemExit
    if given.models:
        classify(Archive(given.archive), list(given.sets), given.models, given.seeds, given.rows)
    regress(given.seeds)
