"""From the long table of runs to the results that the page shows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from ldlt.bench.family import AS_PRINTED
from ldlt.bench.protocol import CURVE
from ldlt.bench.stats import METRICS, MetricResult, ScoreError, Scores, metric_results, score_frames, summarise
from ldlt.bench.stats.scores import need_columns

__all__ = ["RADII", "Study", "analyse", "embed", "family_order"]

RADII = np.array(CURVE)
"""Radii of the curves of certified accuracy."""

_KEYS = ["protocol", "dataset", "family", "fold", "seed"]
_PROTOCOLS = ("paper", "tuned")
_FAMILIES = ("LDLT-R", "LDLT-L", "Sandwich", "SLL", "AOL", "Orthogonal", "CPL", "Spectral", AS_PRINTED)


@dataclass(frozen=True)
class Study:
    """All results of one protocol.

    Attributes:
        protocol: Its name.
        runs: Runs with all metrics, of all families.
        families: Certified families, in the order of the page.
        uncertified: Families without a certificate; they enter no statistic.
        datasets: Names of all data sets, begun or planned.
        failed: Number of runs left out because a metric is missing or not finite.
        scores: Scores over complete data sets, or ``None`` if no data set is complete.
        dropped: Incomplete data set -> what is missing.
        summary: Mean and deviation of the certified families, then of the others over the same data sets.
        metrics: Metric -> its tests.
    """

    protocol: str
    runs: pd.DataFrame
    families: list[str]
    uncertified: list[str]
    datasets: list[str]
    failed: int
    scores: Scores | None
    dropped: dict[str, str]
    summary: pd.DataFrame
    metrics: dict[str, MetricResult]

    @property
    def complete(self) -> list[str]:
        """Data sets that enter the statistics."""
        return [] if self.scores is None else [str(name) for name in self.scores.frames[METRICS[0]].index]


def family_order(names: Iterable[str]) -> list[str]:
    """Known families in a fixed order, so that a family keeps its colour; others behind, alphabetically."""
    known = {name: index for index, name in enumerate(_FAMILIES)}
    return sorted(set(names), key=lambda name: (known.get(name, len(known)), name.casefold(), name))


def _flag(value: Any) -> bool:
    """Truth of a cell; a missing cell or one read from text is judged by what it says."""
    if isinstance(value, str):
        return value.strip().casefold() in {"true", "1", "yes"}
    return not pd.isna(value) and bool(value)


def _curve(value: Any) -> np.ndarray | None:
    """A curve as an array, or ``None`` if it is missing, not finite or of another length."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, (list, tuple, np.ndarray)) or len(value) != len(RADII):
        return None
    try:
        curve = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        return None
    return curve if curve.shape == RADII.shape and np.isfinite(curve).all() else None


def _units(part: pd.DataFrame) -> set[tuple[Any, Any]]:
    return set(zip(part["fold"], part["seed"], strict=True))


def _summary(runs: pd.DataFrame, scores: Scores, uncertified: list[str]) -> pd.DataFrame:
    """Means of the certified families; below them each other family, over those data sets that it has in full."""
    parts = [summarise(scores.frames)]
    complete = list(scores.frames[METRICS[0]].index)
    here = runs[runs["dataset"].isin(complete)]
    wanted = {name: _units(part) for name, part in here[~here["family"].isin(uncertified)].groupby("dataset")}
    for family in uncertified:
        own = here[here["family"] == family]
        full = [name for name, part in own.groupby("dataset") if _units(part) == wanted[name]]
        if full:
            part = summarise(score_frames(own[own["dataset"].isin(full)]).frames)
            parts.append(part.assign(best=False))
    return pd.concat(parts, ignore_index=True)


def analyse(frame: pd.DataFrame, planned: Iterable[str] = ()) -> list[Study]:
    """Compute all results, one :class:`Study` per protocol.

    Args:
        frame: One row per protocol, data set, family, fold and seed. The metrics are needed; any other column
            may be missing.
        planned: Data sets that were to be run; those without runs count as incomplete.

    Raises:
        ScoreError: If the table is empty, lacks a needed column or has a run twice.
    """
    need_columns(frame, [*_KEYS, *METRICS], "the table of runs")
    if frame.empty:
        raise ScoreError("the table of runs is empty")
    if frame[_KEYS].isna().any(axis=None):
        raise ScoreError(f"the table of runs has missing entries in {_KEYS}")
    table = frame.astype({"protocol": str, "dataset": str, "family": str}).reset_index(drop=True)
    if table.duplicated(_KEYS).any():
        first = table[table.duplicated(_KEYS)].iloc[0]
        raise ScoreError(f"repeated run: {', '.join(f'{key} {first[key]}' for key in _KEYS)}")
    flags = table["certified"].map(_flag) if "certified" in table.columns else pd.Series(True, index=table.index)
    refused = {AS_PRINTED, *table.loc[~flags.astype(bool), "family"]}
    for metric in METRICS:
        table[metric] = pd.to_numeric(table[metric], errors="coerce")
    usable = np.isfinite(table[list(METRICS)].to_numpy(dtype=np.float64)).all(axis=1)

    order = {name: index for index, name in enumerate(_PROTOCOLS)}
    protocols = sorted(table["protocol"].unique(), key=lambda name: (order.get(name, len(order)), name))
    studies = []
    for protocol in protocols:
        mine = table["protocol"] == protocol
        runs = table[mine & usable].reset_index(drop=True)
        # A family all of whose runs failed still belongs to the comparison: without it, data sets would pass
        # for complete.
        names = family_order(table.loc[mine, "family"])
        families = [name for name in names if name not in refused]
        uncertified = [name for name in names if name in refused]
        datasets = sorted({*table.loc[mine, "dataset"], *planned}, key=lambda name: (name.casefold(), name))
        scores, dropped = _scores(runs, families, datasets)
        empty = pd.DataFrame(columns=["algorithm", "metric", "n", "mean", "sd", "best"])
        studies.append(
            Study(
                protocol=protocol,
                runs=runs,
                families=families,
                uncertified=uncertified,
                datasets=datasets,
                failed=int((mine & ~usable).sum()),
                scores=scores,
                dropped=dropped,
                summary=empty if scores is None else _summary(runs, scores, uncertified),
                metrics={} if scores is None else metric_results(scores.frames),
            )
        )
    return studies


def _scores(runs: pd.DataFrame, families: list[str], datasets: list[str]) -> tuple[Scores | None, dict[str, str]]:
    """Scores of complete data sets, and the reason why each of the others is not."""
    present = set(runs["family"])
    if families and all(name in present for name in families):
        try:
            scores = score_frames(runs, algorithms=families)
        except ScoreError:  # columns, values and repetitions are checked: no data set is complete
            pass
        else:
            lost = {name: "no runs" for name in datasets if name not in scores.frames[METRICS[0]].index}
            return scores, {**lost, **scores.dropped}
    if not families:
        return None, dict.fromkeys(datasets, "no certified family")
    dropped = {}
    for name in datasets:
        part = runs[runs["dataset"] == name]
        if part.empty:
            dropped[name] = "no runs"
            continue
        units = _units(part)
        missing = [family for family in families if _units(part[part["family"] == family]) != units]
        dropped[name] = f"runs missing: {', '.join(missing or families)}"
    return None, dropped


def embed(studies: list[Study], order: list[str]) -> list[dict[str, Any]]:
    """Means over folds and seeds per protocol, data set and family, as the page needs them.

    Args:
        studies: Results of all protocols.
        order: All families; values are listed in this order.

    Returns:
        Per protocol its ``sets``: ``n`` (name), ``ok`` (whether it enters the statistics), ``v`` (per family the
        metrics, in millionths, or ``None``) and ``c`` (per family the curve, in ten-thousandths, or ``None``).
        Whole numbers keep the page small.
    """
    result = []
    for study in studies:
        complete = set(study.complete)
        runs = study.runs[["dataset", "family", "fold", "seed", *METRICS]].assign(
            _curve=study.runs["curve"].map(_curve) if "curve" in study.runs.columns else None
        )
        groups = dict(iter(runs.groupby(["dataset", "family"])))
        sets = []
        begun = set(runs["dataset"])
        for name in (name for name in study.datasets if name in begun):
            values: list[list[int] | None] = []
            curves: list[list[int] | None] = []
            wanted = [_units(groups[name, family]) for family in study.families if (name, family) in groups]
            for family in order:
                part = groups.get((name, family))
                # Without all folds, a family that enters no statistic would look paired with the others.
                if part is None or (family in study.uncertified and wanted and _units(part) != wanted[0]):
                    values.append(None)
                    curves.append(None)
                    continue
                means = part[list(METRICS)].to_numpy(dtype=np.float64).mean(axis=0)
                values.append([round(float(value) * 1e6) for value in means])
                found = list(part["_curve"])
                whole = bool(found) and all(curve is not None for curve in found)
                curves.append([round(float(v) * 1e4) for v in np.mean(found, axis=0)] if whole else None)
            sets.append({"n": name, "ok": name in complete, "v": values, "c": curves})
        result.append({"name": study.protocol, "sets": sets})
    return result
