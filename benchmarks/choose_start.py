"""Choose the start values of LDLT networks for the benchmark, by validation rows alone.

    python benchmarks/choose_start.py [--data ARCHIVE] [--workers 2] [--protocol paper] [--families LDLT-L LDLT-R]

Trains LDLT-L and LDLT-R under a protocol on data sets of at most 1000 rows, for each of the widths 32, 64, 128 and 256
the first five of the archive (in alphabetical order), improves one setting after the other over a small grid (two
rounds), and prints the mean over data sets and folds of the validation score: the mean of accuracy and certified
accuracy at 36, 72, 108 and 255 over 255, for every width and for all. No test row is looked at.
``ldlt.bench.protocol.Start`` holds one choice for both protocols.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import torch

from ldlt.bench.data import Archive, UnavailableSetError, locate
from ldlt.bench.protocol import PROTOCOLS, Start, network_width
from ldlt.bench.unit import Unit, run_unit

GRID = {
    "alpha": (3e-2, 1e-1, 1e-2, 3e-3),
    "growth": (2.0, 1.0, 0.0),
    "init": ("default", "orthogonal"),
    "bias_scale": (1.0, 10.0),
    "gain": (1.0, 0.7),
}


WIDTHS = (32, 64, 128, 256)


def chosen_sets(archive: Archive, each: int) -> dict[str, int]:
    """Names of data sets and the width of their networks."""
    found: dict[int, list[str]] = {width: [] for width in WIDTHS}
    for name in archive.names():
        try:
            dataset = archive.load(name)
        except UnavailableSetError:
            continue
        width = network_width(dataset.columns, len(dataset.classes))
        if dataset.rows <= 1000 and width in found and len(found[width]) < each:
            found[width].append(name)
    return {name: width for width, names in found.items() for name in names}


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
    parser.add_argument("--families", nargs="+", default=["LDLT-L", "LDLT-R"], help="compare others by their own start")
    parser.add_argument("--sets", type=int, default=5, help="data sets per width")
    arguments = parser.parse_args()
    path = locate(arguments.data)
    if path is None:
        parser.error("no archive; run `ldlt data fetch` or pass --data")
    sets = chosen_sets(Archive(path), arguments.sets)
    widths = np.array(list(sets.values()))
    print(f"protocol {arguments.protocol}, {arguments.families}, validation rows of {', '.join(sets)}\n")
    print("alpha   growth init        bias  gain   " + "".join(f"{w:>7}" for w in WIDTHS) + "    all")
    known: dict[Start, float] = {}
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:

        def evaluate(settings: Start) -> float:
            if settings in known:
                return known[settings]
            tasks = [
                (str(path), arguments.protocol, name, family, settings)
                for family in arguments.families
                for name in sets
            ]
            scores = np.array(list(pool.map(work, tasks))).reshape(len(arguments.families), -1).mean(0)
            known[settings] = float(scores.mean())
            print(
                f"{settings.alpha:<7g} {settings.growth:<6g} {settings.init:<11} {settings.bias_scale:<5g} "
                f"{settings.gain:<5g} {''.join(f'{scores[widths == w].mean():7.4f}' for w in WIDTHS)} "
                f"{known[settings]:7.4f}",
                flush=True,
            )
            return known[settings]

        best = Start(**{key: values[0] for key, values in GRID.items()})
        for _ in range(2):  # one coordinate after the other, twice
            for key, values in GRID.items():
                best = max((replace(best, **{key: value}) for value in values), key=evaluate)
    print(f"\nbest: {best} ({known[best]:.4f}); in use: {PROTOCOLS[arguments.protocol].start}")


if __name__ == "__main__":
    main()
