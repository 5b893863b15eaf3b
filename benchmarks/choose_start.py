"""Choose the start values of LDLT networks for the benchmark, without a look at the test rows of a fold.

    python benchmarks/choose_start.py [--data ARCHIVE] [--workers 2] [--protocol paper] [--families LDLT-L LDLT-R]

Trains LDLT-L and LDLT-R under a protocol on data sets of 100 to 1000 rows, for each of the widths 32, 64, 128 and 256
the first four of the archive (in alphabetical order; ``--sets 100`` takes all), improves one setting after the other
over a small grid, and prints the mean over data sets and folds of accuracy and certified accuracy at 36, 72, 108 and
255 over 255, for every width and for all, with the five metrics behind it.

A quarter of the training rows of every fold is held out for that (:class:`Inner`); the test rows of the fold are left
out altogether. The validation rows would not do: they have already chosen the epoch and the settings, so that what is
measured on them favours whatever fluctuates most. One choice serves all folds, and the archive's four splits overlap:
rows that are held out in one fold are test rows of another in most sets.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from multiprocessing import get_context

import numpy as np
import torch

from ldlt_bench.data import Archive, Dataset, locate
from ldlt_bench.data.dataset import Split
from ldlt_bench.data.folds import Stream, stratified_sample
from ldlt_bench.study.protocol import PROTOCOLS, RADII, Start, network_width
from ldlt_bench.study.unit import Unit, run_unit

GRID = {
    "contraction": ("cholesky", "symmetric", "cayley"),
    "alpha": (1e-1, 1e-2, 1.0, 4.0),
    "growth": (2.0, 1.0, 0.0),
    "placing": (1.0, 0.5, 0.0),
    "init": ("default", "orthogonal"),
    "bias_scale": (1.0, 3.0),
    "gain": (1.0, 0.6, 1.5),
}
WIDTHS = (32, 64, 128, 256)
METRICS = ("accuracy", *RADII)


class Inner(Dataset):
    """A data set whose test rows are a quarter of the training rows; its own test rows are not used at all."""

    def split(self, fold: int) -> Split:
        """Training and validation rows of the fold, less the quarter that is held out."""
        outer = super().split(fold)
        held = stratified_sample(self.labels, outer.train, 0.25, Stream("held out", self.name, fold))
        train = np.setdiff1d(outer.train, held, assume_unique=True)
        return Split(train, outer.validation, held, outer.absent, outer.fallback)


def chosen_sets(archive: Archive, each: int, names: Sequence[str]) -> dict[str, int]:
    """Names of data sets and the width of their networks."""
    found: dict[int, list[str]] = {width: [] for width in WIDTHS}
    for name in archive.names():
        dataset = archive.load(name)
        width = network_width(dataset.columns, len(dataset.classes))
        if 100 <= dataset.rows <= 1000 and width in found and len(found[width]) < each:
            found[width].append(name)
        elif name in names:
            found.setdefault(width, []).append(name)
    return {name: width for width, names in found.items() for name in names}


def work(task: tuple[str, str, str, str, Start]) -> list[float]:
    path, protocol, name, family, settings = task
    torch.set_num_threads(1)
    how = replace(PROTOCOLS[protocol], start=settings)
    whole = Archive(path).load(name)
    inner = Inner(*(getattr(whole, field.name) for field in fields(whole)))
    rows = run_unit(Unit(protocol, name, family), how, inner, [0])
    return [float(np.mean([row[metric] for row in rows])) for metric in METRICS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="the archive; default: LDLT_UCI or the user's cache")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--protocol", default="paper", choices=sorted(PROTOCOLS))
    parser.add_argument("--families", nargs="+", default=["LDLT-L", "LDLT-R"], help="compare others by their own start")
    parser.add_argument("--sets", type=int, default=4, help="data sets per width")
    parser.add_argument("--names", nargs="+", default=[], help="these data sets besides, of any size")
    arguments = parser.parse_args()
    path = locate(arguments.data)
    if path is None:
        parser.error("no archive; run `ldlt data fetch` or pass --data")
    sets = chosen_sets(Archive(path), arguments.sets, arguments.names)
    widths = np.array(list(sets.values()))
    print(f"protocol {arguments.protocol}, {arguments.families}, held-out rows of {', '.join(sets)}\n")
    heads = "".join(f"{text:>9}" for text in (*WIDTHS, *METRICS, "all"))
    print("contraction  alpha   growth placing init        bias  gain  " + heads)
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
            scores = np.array(list(pool.map(work, tasks)))
            scores = scores.reshape(len(arguments.families), len(sets), len(METRICS)).mean(0)
            known[settings] = float(scores.mean())
            means = [
                *(scores[widths == w].mean() if (widths == w).any() else np.nan for w in WIDTHS),
                *scores.mean(0),
                known[settings],
            ]
            print(
                f"{settings.contraction:<12} {settings.alpha:<7g} {settings.growth:<6g} {settings.placing:<7g} "
                f"{settings.init:<11} {settings.bias_scale:<5g} "
                f"{settings.gain:<5g} {''.join(f'{mean:9.4f}' for mean in means)}",
                flush=True,
            )
            return known[settings]

        best = Start(**{key: values[0] for key, values in GRID.items()})
        for key, values in GRID.items():  # one coordinate after the other
            if best.contraction == "cayley" and key in ("alpha", "growth"):  # it has no α
                continue
            best = max((replace(best, **{key: value}) for value in values), key=evaluate)
    print(f"\nbest: {best} ({known[best]:.4f}); in use: {PROTOCOLS[arguments.protocol].start}")


if __name__ == "__main__":
    main()
