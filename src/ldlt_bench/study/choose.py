"""The choice of start values: the same search for every family, without a look at the rows that results are of.

For each family one setting after the other of :data:`~ldlt_bench.study.family.GRIDS` is improved, on a fixed third of
the data sets (:func:`chosen_on`) and there on a quarter of the training rows of every fold, which is held out
(:class:`Inner`); the test rows of the fold are left out altogether. The validation rows would not do: they have already
chosen the epoch and the step size, so that what is measured on them favours whatever fluctuates most. One choice serves
all folds, and the archive's four splits overlap: rows that are held out in one fold are test rows of another in most
sets. Therefore results are told for the other two thirds apart.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

import joblib
import numpy as np
import pandas as pd

from ldlt.errors import OptionError
from ldlt_bench.data import Archive, Collection, Dataset, Embedded, Split
from ldlt_bench.data.folds import Stream, stratified_sample
from ldlt_bench.study.family import GRIDS, Start, find_family
from ldlt_bench.study.protocol import RADII, Protocol
from ldlt_bench.study.run import call_alone, cluster
from ldlt_bench.study.unit import Unit, run_unit

__all__ = ["Choice", "Inner", "choose", "chosen_on"]


def chosen_on(dataset: str) -> bool:
    """Whether start values are chosen on a data set: a third of all, by a hash of the name."""
    return hashlib.sha256(dataset.encode()).digest()[0] % 3 == 0


class Inner(Dataset):
    """A data set whose test rows are a quarter of the training rows; its own test rows are not used at all."""

    def split(self, fold: int) -> Split:
        """Training and validation rows of the fold, less the quarter that is held out."""
        outer = super().split(fold)
        held = stratified_sample(self.labels, outer.train, 0.25, Stream("held out", self.name, fold))
        train = np.setdiff1d(outer.train, held, assume_unique=True)
        return Split(train, outer.validation, held, outer.absent, outer.fallback)


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Attributes:
        starts: Family -> its start.
        tried: One row per family and setting: ``family``, ``knob``, ``value``, ``score`` (mean of the five metrics over
            data sets and folds), the five metrics, ``kept``.
        sets: The data sets it was chosen on.
    """

    starts: dict[str, Start]
    tried: pd.DataFrame
    sets: tuple[str, ...]


def choose(
    protocol: Protocol,
    families: Sequence[str],
    source: Collection,
    *,
    most_rows: int = 1000,
    backend: str = "loky",
    workers: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Choice:
    """Choose the starts of families, all by the same search.

    Args:
        protocol: How to train; its own starts are not looked at.
        families: Names of families.
        source: Where the data come from.
        most_rows: Larger data sets take no part.
        backend: Who computes, as in :meth:`ldlt_bench.study.run.Study.run`.
        workers: Trainings at a time; None for one per processor.
        say: Is told every setting that was tried.
    """
    names = [find_family(name).name for name in families]
    if any(name not in GRIDS for name in names):
        raise OptionError(f"starts are chosen for {', '.join(GRIDS)}, not for {', '.join(names)}")
    sets = tuple(name for name in source.names() if chosen_on(name) and source.summary(name).rows <= most_rows)
    if not sets:
        raise OptionError(f"none of the data sets that starts are chosen on is there with at most {most_rows} rows")
    archive = str(source.path.resolve()) if isinstance(source, Archive) else None
    best = {name: Start(**{knob: values[0] for knob, values in GRIDS[name].items()}) for name in names}  # type: ignore[arg-type]
    known: dict[tuple[str, Start], Mapping[str, float]] = {}
    tried: list[dict[str, object]] = []

    def measure(trials: Sequence[tuple[str, Start]]) -> None:
        new = [trial for trial in dict.fromkeys(trials) if trial not in known]
        jobs = [
            joblib.delayed(call_alone)(os.getpid(), _score, family, start, protocol, archive, name)
            for family, start in new
            for name in sets
        ]
        scores = np.array(joblib.Parallel(batch_size=1)(jobs)).reshape(len(new), len(sets), -1)
        for trial, found in zip(new, scores.mean(1), strict=True):
            known[trial] = {
                "score": float(found.mean()),
                **dict(zip(("accuracy", *RADII), found.tolist(), strict=True)),
            }
            say(f"{trial[0]}: {known[trial]['score']:.4f} with {_differs(trial[1])}")

    with cluster(backend), joblib.parallel_config(backend, n_jobs=workers or -1):
        for at in range(max(len(GRIDS[name]) for name in names)):  # the families side by side, to keep workers busy
            trials = {}
            for name in names:
                knobs = list(GRIDS[name].items())
                for value in knobs[at][1] if at < len(knobs) else ():
                    trials[name, knobs[at][0], value] = replace(best[name], **{knobs[at][0]: value})  # type: ignore[arg-type]
            measure([(name, start) for (name, *_), start in trials.items()])
            for name in names:
                mine = {key: start for key, start in trials.items() if key[0] == name}
                if mine:
                    best[name] = max(mine.values(), key=lambda start: known[name, start]["score"])
                for (_, knob, value), start in mine.items():
                    found = known[name, start]
                    kept = start == best[name]
                    tried.append({"family": name, "knob": knob, "value": str(value), **found, "kept": kept})
    return Choice(best, pd.DataFrame(tried), sets)


def _score(family: str, start: Start, protocol: Protocol, archive: str | None, name: str) -> list[float]:
    """The five metrics on the held-out rows of a data set, mean over folds."""
    whole = (Embedded() if archive is None else Archive(archive)).load(name)
    inner = Inner(*(getattr(whole, field.name) for field in fields(whole)))
    how = replace(protocol, starts={family: start})
    rows = run_unit(Unit(protocol.name, name, family), how, inner, [0])
    return [float(np.mean([row[metric] for row in rows])) for metric in ("accuracy", *RADII)]


def _differs(start: Start) -> str:
    """Settings that are not as published."""
    plain = asdict(Start())
    return ", ".join(f"{k} {v}" for k, v in asdict(start).items() if v != plain[k]) or "nothing changed"
