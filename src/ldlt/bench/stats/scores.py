"""From the long table of runs to tables of scores, and the checks that every table of scores passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ldlt.bench.protocol import RADII
from ldlt.errors import LdltError, OptionError

__all__ = [
    "DECIMALS",
    "METRICS",
    "ScoreError",
    "Scores",
    "check_alpha",
    "check_frames",
    "check_scores",
    "need_columns",
    "score_frames",
]

METRICS = ("accuracy", *RADII)
"""Metrics of the benchmark: accuracy, and certified accuracy at the radii 36, 72, 108 and 255 over 255."""

DECIMALS = 12
"""Scores, and differences of scores, are equal if they agree to this many decimals. Means over folds carry
rounding errors of about 1e-16, which must not turn a tie into a win; distinct scores differ by far more."""

_KEYS = ["dataset", "family", "fold", "seed"]


class ScoreError(LdltError, ValueError):
    """A table of scores or runs that cannot be compared: missing values, repeated names, too few rows."""


@dataclass(frozen=True)
class Scores:
    """Scores of all metrics over the data sets that every algorithm completed.

    Attributes:
        frames: Metric -> ``DataFrame``, one row per data set and one column per algorithm.
        dropped: Data set that was left out -> the reason, in words.
    """

    frames: dict[str, pd.DataFrame]
    dropped: dict[str, str]


def check_alpha(alpha: float) -> float:
    """Return a level of significance strictly between zero and one, or refuse it."""
    if not 0.0 < alpha < 1.0:
        raise OptionError(f"alpha must lie strictly between 0 and 1, not {alpha}")
    return float(alpha)


def need_columns(frame: pd.DataFrame, columns: Sequence[str], what: str) -> None:
    """Refuse a table that lacks one of the columns."""
    if not isinstance(frame, pd.DataFrame):
        raise ScoreError(f"{what} must be a pandas DataFrame, not {type(frame).__name__}")
    missing = [column for column in columns if column not in frame.columns]
    if missing:
        raise ScoreError(f"{what} lacks the columns {missing}")


def check_scores(scores: pd.DataFrame, *, algorithms: int = 1, datasets: int = 1) -> pd.DataFrame:
    """Return the scores in float64, rounded to :data:`DECIMALS`, with names that are strings.

    Args:
        scores: One row per data set, one column per algorithm.
        algorithms: Smallest number of columns.
        datasets: Smallest number of rows.

    Raises:
        ScoreError: If a score is missing or not finite, a name is repeated, or the table is too small.
    """
    if not isinstance(scores, pd.DataFrame):
        raise ScoreError(f"scores must be a pandas DataFrame, not {type(scores).__name__}")
    rows, columns = [str(name) for name in scores.index], [str(name) for name in scores.columns]
    for names, kind, least in ((columns, "algorithm", algorithms), (rows, "data set", datasets)):
        if len(names) < least:
            raise ScoreError(f"at least {least} {kind}{'s' * (least > 1)} needed, {len(names)} given")
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ScoreError(f"{kind} names must be unique, repeated: {repeated}")
    try:
        values = scores.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise ScoreError(f"scores must be numbers: {error}") from error
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        cells = ", ".join(f"{columns[j]} on {rows[i]}" for i, j in bad[:5])
        raise ScoreError(f"{len(bad)} scores are missing or not finite: {cells}{', ...' * (len(bad) > 5)}")
    # + 0.0 turns -0.0 into 0.0
    return pd.DataFrame(np.round(values, DECIMALS) + 0.0, index=rows, columns=columns)


def check_frames(
    frames: Mapping[str, pd.DataFrame], *, algorithms: int = 1, datasets: int = 1
) -> dict[str, pd.DataFrame]:
    """Apply :func:`check_scores` to every metric and demand the same data sets and algorithms in all.

    Rows and columns take the order of the first metric.
    """
    if not isinstance(frames, Mapping) or not frames:
        raise ScoreError("frames must be a non-empty dictionary from a metric to a table of scores")
    checked = {
        str(metric): check_scores(frame, algorithms=algorithms, datasets=datasets) for metric, frame in frames.items()
    }
    first, *_ = checked.values()
    for metric, frame in checked.items():
        for ours, theirs, kind in (
            (first.index, frame.index, "data sets"),
            (first.columns, frame.columns, "algorithms"),
        ):
            differing = sorted(set(ours) ^ set(theirs))
            if differing:
                raise ScoreError(f"metric '{metric}' has other {kind} than the first metric: {differing}")
    return {metric: frame.loc[first.index, first.columns] for metric, frame in checked.items()}


def score_frames(
    runs: pd.DataFrame, metrics: Sequence[str] = METRICS, *, algorithms: Sequence[str] | None = None
) -> Scores:
    """Average a long table of runs over folds and seeds, one table per metric.

    A data set counts only if every algorithm has the same (fold, seed) runs on it, as means over different
    folds are not paired. The others are left out and reported.

    Args:
        runs: One row per run, with the columns ``dataset``, ``family``, ``fold``, ``seed`` and the metrics.
        metrics: Names of the metric columns.
        algorithms: Families to compare, in the order of the columns. All by default, in alphabetical order.

    Raises:
        ScoreError: If a column or a value is missing, a run is repeated, or no data set is complete.

    Example:
        >>> runs = pd.DataFrame(
        ...     [("iris", "A", 0, 0, 0.9), ("iris", "A", 1, 0, 0.8), ("iris", "B", 0, 0, 0.7),
        ...      ("iris", "B", 1, 0, 0.7), ("wine", "A", 0, 0, 0.9)],
        ...     columns=["dataset", "family", "fold", "seed", "accuracy"])
        >>> scores = score_frames(runs, ["accuracy"])
        >>> scores.frames["accuracy"]
                 A    B
        iris  0.85  0.7
        >>> scores.dropped
        {'wine': 'B: 1 of 1 runs missing'}
    """
    need_columns(runs, [*_KEYS, *metrics], "the table of runs")
    if runs[_KEYS].isna().any(axis=None):
        raise ScoreError(f"the table of runs has missing entries in {_KEYS}")
    table = runs[[*_KEYS, *metrics]].astype({"dataset": str, "family": str}).reset_index(drop=True)
    present = sorted(table["family"].unique(), key=lambda name: (name.casefold(), name))
    families = present if algorithms is None else [str(name) for name in algorithms]
    unknown = [name for name in families if name not in present]
    if unknown:
        raise ScoreError(f"no runs of the algorithms {unknown}")
    table = table[table["family"].isin(families)].copy()
    if table.duplicated(_KEYS).any():
        first = table[table.duplicated(_KEYS)].iloc[0]
        raise ScoreError(f"repeated run: {', '.join(f'{key} {first[key]}' for key in _KEYS)}")
    try:
        values = table[list(metrics)].to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise ScoreError(f"metrics must be numbers: {error}") from error
    bad = np.argwhere(~np.isfinite(values))
    if len(bad):
        row = table.iloc[bad[0][0]]
        where = ", ".join(f"{key} {row[key]}" for key in _KEYS)
        raise ScoreError(f"{len(bad)} metric values are missing or not finite, first: {metrics[bad[0][1]]} of {where}")
    table[list(metrics)] = values
    table = table.sort_values(_KEYS)

    dropped: dict[str, str] = {}
    for dataset, part in table.groupby("dataset"):
        units = len(part[["fold", "seed"]].drop_duplicates())
        counts = part["family"].value_counts()
        lacking = {name: units - int(counts.get(name, 0)) for name in families}
        reason = "; ".join(f"{name}: {gap} of {units} runs missing" for name, gap in lacking.items() if gap)
        if reason:
            dropped[dataset] = reason
    table = table[~table["dataset"].isin(dropped)]
    if table.empty:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in list(dropped.items())[:3])
        raise ScoreError(f"no data set has all runs of all algorithms: {reasons or 'the table of runs is empty'}")
    means = table.groupby(["dataset", "family"])[list(metrics)].mean()
    frames = {
        metric: means[metric].unstack("family")[families].rename_axis(index=None, columns=None) for metric in metrics
    }
    return Scores({metric: check_scores(frame) for metric, frame in frames.items()}, dropped)
