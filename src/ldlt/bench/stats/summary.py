"""Means over data sets, and the ranges of the model sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ldlt.bench.stats.scores import DECIMALS, ScoreError, check_frames, need_columns

__all__ = ["RANGES", "model_ranges", "summarise"]

RANGES = ("width", "depth", "parameters", "padding", "input_dim", "output_dim")
"""Columns of the table of runs whose ranges :func:`model_ranges` reports."""


def summarise(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Mean and sample standard deviation (divisor ``N - 1``) over data sets.

    The deviation says how much data sets differ; it is no error bar of a comparison. It is NaN for one data
    set.

    Args:
        frames: Metric -> scores, one row per data set and one column per algorithm.

    Returns:
        One row per algorithm and metric: ``algorithm``, ``metric``, ``n`` (data sets), ``mean``, ``sd`` and
        ``best`` (whether the mean is the highest of its metric).

    Example:
        >>> summarise({"accuracy": pd.DataFrame({"A": [0.5, 0.7], "B": [0.5, 0.5]})})
          algorithm    metric  n  mean        sd   best
        0         A  accuracy  2   0.6  0.141421   True
        1         B  accuracy  2   0.5  0.000000  False
    """
    checked = check_frames(frames)
    parts = []
    for metric, frame in checked.items():
        mean = frame.mean().round(DECIMALS)
        parts.append(
            pd.DataFrame(
                {
                    "algorithm": frame.columns,
                    "metric": metric,
                    "n": len(frame),
                    "mean": mean.to_numpy(),
                    "sd": frame.std(ddof=1).to_numpy() if len(frame) > 1 else np.nan,
                    "best": (mean == mean.max()).to_numpy(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def model_ranges(
    runs: pd.DataFrame, quantities: Sequence[str] = RANGES, *, algorithms: Sequence[str] | None = None
) -> pd.DataFrame:
    """Smallest and largest value of sizes of the models over all runs, per algorithm.

    Args:
        runs: One row per run, with the columns ``family`` and the quantities.
        quantities: Names of the columns.
        algorithms: Families to report, in this order. All by default, in alphabetical order.

    Returns:
        One row per algorithm and quantity: ``algorithm``, ``quantity``, ``min``, ``max``.

    Example:
        >>> model_ranges(pd.DataFrame({"family": ["A", "A"], "width": [32, 512]}), ["width"])
          algorithm quantity  min  max
        0         A    width   32  512
    """
    need_columns(runs, ["family", *quantities], "the table of runs")
    table = runs[["family", *quantities]].astype({"family": str})
    if table.isna().any(axis=None):
        raise ScoreError("the table of runs has missing model sizes")
    present = sorted(table["family"].unique(), key=lambda name: (name.casefold(), name))
    families = present if algorithms is None else [str(name) for name in algorithms]
    unknown = [name for name in families if name not in present]
    if unknown or not families:
        raise ScoreError(f"no runs of the algorithms {unknown}" if unknown else "the table of runs is empty")
    parts = []
    for name in families:
        part = table.loc[table["family"] == name, list(quantities)]
        parts.append(
            pd.DataFrame(
                {
                    "algorithm": name,
                    "quantity": list(quantities),
                    "min": part.min().to_numpy(),
                    "max": part.max().to_numpy(),
                }
            )
        )
    return pd.concat(parts, ignore_index=True)
