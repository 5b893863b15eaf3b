"""All tests of every metric, each made once: the tables and the page show the same objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from ldlt.bench.stats.overall import outcomes, standings
from ldlt.bench.stats.pairwise import compare_all
from ldlt.bench.stats.ranks import Friedman, average_ranks, critical_difference, friedman, rank_groups
from ldlt.bench.stats.scores import check_frames

__all__ = ["MetricResult", "metric_results"]


@dataclass(frozen=True)
class MetricResult:
    """Tests of one metric; what needs more families or data sets than there are is ``None``.

    Attributes:
        ranks: Average ranks, best first.
        test: Friedman's and Iman and Davenport's tests.
        cd: Nemenyi's critical difference.
        groups: Families that are not distinguished.
        pairs: Wilcoxon tests of the pairs, smallest p first.
        standings: Significant wins and losses.
        outcomes: Winner of every pair, row against column.
    """

    ranks: pd.Series
    test: Friedman | None = None
    cd: float | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    pairs: pd.DataFrame | None = None
    standings: pd.DataFrame | None = None
    outcomes: pd.DataFrame | None = None


def metric_results(frames: Mapping[str, pd.DataFrame]) -> dict[str, MetricResult]:
    """Tests of every metric, over the same data sets and algorithms.

    Args:
        frames: Metric -> scores, one row per data set and one column per algorithm.

    Raises:
        ScoreError: If there is no metric, or the tables do not have the same rows and columns.
    """
    frames = check_frames(frames)
    n, k = next(iter(frames.values())).shape
    if k < 2:
        return {metric: MetricResult(average_ranks(frame)) for metric, frame in frames.items()}
    pairs = compare_all(frames)
    cd = critical_difference(k, n) if n > 1 else None
    results = {}
    for metric, frame in frames.items():
        means = average_ranks(frame)
        one = pairs[pairs["metric"] == metric].reset_index(drop=True)
        results[metric] = MetricResult(
            ranks=means,
            test=friedman(frame) if n > 1 else None,
            cd=cd,
            groups=tuple(rank_groups(means, cd)) if cd is not None else (),
            pairs=one,
            standings=standings(means, one),
            outcomes=outcomes(one, [str(name) for name in means.index]),
        )
    return results
