"""Choose the start values of LDLT networks for the benchmark, by validation rows alone.

    python benchmarks/choose_start.py [--data ARCHIVE] [--workers 2] [--protocol paper]

Trains LDLT-L and LDLT-R under a protocol on the first 20 data sets of the archive (in alphabetical order) that have at
most 1000 rows and networks of width 32 or 64, improves one setting after the other over a small grid (two rounds), and
prints the mean over data sets and folds of the validation score: the mean of accuracy and certified accuracy at 36, 72,
108 and 255 over 255. No test row is looked at. The winner is what ``ldlt.bench.protocol.Start`` holds.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import torch

from ldlt.bench.data import Archive, locate
from ldlt.bench.protocol import PROTOCOLS, Start, network_width
from ldlt.bench.unit import Unit, run_unit

GRID = {
    "alpha": (3e-3, 1e-2, 1e-3),
    "init": ("default", "orthogonal"),
    "bias_scale": (1.0, 10.0),
    "gain": (1.0, 0.7),
}


def chosen_sets(archive: Archive, count: int) -> list[str]:
    found = []
    for name in archive.names():
        dataset = archive.load(name)
        if dataset.rows <= 1000 and network_width(dataset.columns, len(dataset.classes)) <= 64:
            found.append(name)
        if len(found) == count:
            break
    return found


def work(task: tuple[str, str, str, str, Start]) -> float:
    path, protocol, name, family, settings = task
    torch.set_num_threads(1)
    how = replace(PROTOCOLS[protocol], start=settings)
    rows = run_unit(Unit(protocol, name, family), how, Archive(path).load(name), [0])
    return float(np.mean([row["validation_score"] for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the archive; default: LDLT_UCI or the user's cache")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--protocol", default="paper", choices=sorted(PROTOCOLS))
    parser.add_argument("--sets", type=int, default=20)
    arguments = parser.parse_args()
    path = locate(arguments.data)
    if path is None:
        parser.error("no archive; run `ldlt data fetch` or pass --data")
    names = chosen_sets(Archive(path), arguments.sets)
    print(f"protocol {arguments.protocol}, validation rows of {len(names)} sets: {', '.join(names)}\n")
    print("alpha   init        bias  gain   LDLT-L  LDLT-R   mean")
    known: dict[Start, float] = {}
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:

        def evaluate(settings: Start) -> float:
            if settings in known:
                return known[settings]
            tasks = [
                (str(path), arguments.protocol, name, family, settings)
                for family in ("LDLT-L", "LDLT-R")
                for name in names
            ]
            scores = np.array(list(pool.map(work, tasks))).reshape(2, -1).mean(1)
            known[settings] = float(scores.mean())
            print(
                f"{settings.alpha:<7g} {settings.init:<11} {settings.bias_scale:<5g} {settings.gain:<5g}  "
                f"{scores[0]:.4f}  {scores[1]:.4f}  {known[settings]:.4f}",
                flush=True,
            )
            return known[settings]

        best = Start(**{key: values[0] for key, values in GRID.items()})
        for _ in range(2):  # one coordinate after the other, twice
            for key, values in GRID.items():
                best = max((replace(best, **{key: value}) for value in values), key=evaluate)
    print(f"\nbest: {best} ({known[best]:.4f}); in use: {PROTOCOLS['paper'].start}")


if __name__ == "__main__":
    main()
