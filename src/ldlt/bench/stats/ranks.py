r"""Average ranks and the tests on them: Friedman, Iman–Davenport, Nemenyi.

With ranks :math:`r_i^j` of k algorithms on N data sets, 1 the best, equal scores sharing the mean rank, and
average ranks :math:`R_j = \frac1N \sum_i r_i^j`,

.. math::

    \chi^2 = \frac{12 N}{k(k+1)} \Big(\sum_j R_j^2 - \frac{k(k+1)^2}{4}\Big) \frac1c, \qquad
    F = \frac{(N-1)\chi^2}{N(k-1) - \chi^2}, \qquad
    \mathrm{CD} = q_\alpha \sqrt{\frac{k(k+1)}{6N}},

with :math:`c = 1 - \sum_i \sum_g (t_{ig}^3 - t_{ig}) / (N(k^3 - k))` over the groups of :math:`t_{ig}` equal
scores. F has :math:`k-1` and :math:`(k-1)(N-1)` degrees of freedom and is the analysis-of-variance F of the
ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from ldlt.bench.stats.scores import ScoreError, check_alpha, check_scores

__all__ = [
    "Friedman",
    "average_ranks",
    "critical_difference",
    "friedman",
    "friedman_from_ranks",
    "nemenyi",
    "rank_groups",
    "rank_table",
]


@dataclass(frozen=True)
class Friedman:
    """Result of the Friedman and the Iman–Davenport test.

    Attributes:
        datasets: Number N of data sets.
        algorithms: Number k of algorithms.
        chi2: Friedman's statistic.
        chi2_df: Its degrees of freedom, ``k - 1``.
        chi2_p: Its p-value (approximate, from the χ² distribution).
        f: Iman and Davenport's statistic; infinite if all data sets rank the algorithms alike.
        f_df: Its degrees of freedom, ``(k - 1, (k - 1)(N - 1))``.
        f_p: Its p-value (approximate, from the F distribution; exact if ``f`` is infinite).
    """

    datasets: int
    algorithms: int
    chi2: float
    chi2_df: int
    chi2_p: float
    f: float
    f_df: tuple[int, int]
    f_p: float


def rank_table(scores: pd.DataFrame) -> pd.DataFrame:
    """Rank of every algorithm on every data set: 1 is the highest score, equal scores share the mean rank."""
    frame = check_scores(scores)
    return pd.DataFrame(stats.rankdata(-frame.to_numpy(), axis=1), index=frame.index, columns=frame.columns)


def average_ranks(scores: pd.DataFrame) -> pd.Series:
    """Mean rank over data sets, best first; equal means keep the order of the columns.

    Example:
        >>> average_ranks(pd.DataFrame({"A": [0.7, 0.8], "B": [0.9, 0.8]})).to_dict()
        {'B': 1.25, 'A': 1.75}
    """
    return rank_table(scores).mean().rename("average_rank").sort_values(kind="stable")


def _test(chi2: float, n: int, k: int, same_order: float) -> Friedman:
    """Complete the tests from χ²; ``same_order`` is the chance that two data sets rank alike by luck."""
    gap = n * (k - 1) - chi2
    df = (k - 1, (k - 1) * (n - 1))
    if gap <= 1e-9 * n * (k - 1):
        f, f_p = math.inf, same_order ** (n - 1)
    else:
        f = (n - 1) * chi2 / gap
        f_p = float(stats.f.sf(f, *df))
    return Friedman(n, k, chi2, k - 1, float(stats.chi2.sf(chi2, k - 1)), f, df, f_p)


def _plain_chi2(means: np.ndarray, n: int) -> float:
    k = len(means)
    # centred form of Σ R_j² − k(k+1)²/4: no cancellation, never negative
    return float(12 * n / (k * (k + 1)) * ((means - means.mean()) ** 2).sum())


def friedman(scores: pd.DataFrame, *, tie_correction: bool = True) -> Friedman:
    """Friedman's and Iman and Davenport's tests that all algorithms perform alike.

    If all scores of every data set are equal, the statistics are zero and the p-values one. If all data sets
    rank the algorithms alike, F is infinite and its p-value is exact: the chance of that agreement.

    Args:
        scores: One row per data set (at least two), one column per algorithm (at least two).
        tie_correction: Divide χ² by c, as ``scipy.stats.friedmanchisquare`` does. Without it the tests are
            conservative when there are ties.

    Example:
        >>> round(friedman(pd.DataFrame({"A": [3, 3, 1], "B": [2, 2, 3], "C": [1, 1, 2]})).chi2, 6)
        2.0
    """
    frame = check_scores(scores, algorithms=2, datasets=2)
    n, k = frame.shape
    ranks = rank_table(frame).to_numpy()
    chi2 = _plain_chi2(ranks.mean(axis=0), n)
    correction = float(np.mean([stats.tiecorrect(row) for row in ranks])) if tie_correction else 1.0
    chi2 = chi2 / correction if correction > 0 else 0.0
    sizes = np.unique(ranks[0], return_counts=True)[1]
    return _test(chi2, n, k, math.prod(math.factorial(int(t)) for t in sizes) / math.factorial(k))


def friedman_from_ranks(means: Sequence[float] | pd.Series, datasets: int) -> Friedman:
    """The same tests from average ranks alone, without the correction for ties (the ranks do not show them).

    Args:
        means: Average ranks; they may be rounded.
        datasets: Number of data sets.

    Example:
        >>> round(friedman_from_ranks([2.434, 2.566, 3.438, 3.624, 3.831, 5.107], 121).f, 1)
        44.3
    """
    values = np.asarray(means, dtype=np.float64)
    k = len(values) if values.ndim == 1 else 0
    if k < 2 or datasets < 2:
        raise ScoreError(f"at least 2 algorithms and 2 data sets needed, {k} and {datasets} given")
    if not abs(values.sum() - k * (k + 1) / 2) <= 0.01 * k:
        raise ScoreError(f"average ranks of {k} algorithms sum to {k * (k + 1) / 2}, not {values.sum()}")
    return _test(_plain_chi2(values, datasets), datasets, k, 1 / math.factorial(k))


def critical_difference(algorithms: int, datasets: int, alpha: float = 0.05) -> float:
    """Nemenyi's critical difference: average ranks that differ by at least this much differ significantly.

    ``q_α`` is the quantile of the studentized range for infinitely many degrees of freedom, divided by √2.

    Example:
        >>> round(critical_difference(6, 121), 3)
        0.685
    """
    if algorithms < 2 or datasets < 1:
        raise ScoreError(f"at least 2 algorithms and 1 data set needed, {algorithms} and {datasets} given")
    q = stats.studentized_range.ppf(1 - check_alpha(alpha), algorithms, np.inf) / math.sqrt(2)
    return float(q * math.sqrt(algorithms * (algorithms + 1) / (6 * datasets)))


def nemenyi(scores: pd.DataFrame) -> pd.DataFrame:
    """Nemenyi's p-values of all pairs, a symmetric table with ones on the diagonal."""
    frame = check_scores(scores, algorithms=2)
    n, k = frame.shape
    means = rank_table(frame).mean().to_numpy()
    q = np.abs(means[:, None] - means[None, :]) / math.sqrt(k * (k + 1) / (6 * n))
    p = stats.studentized_range.sf(q * math.sqrt(2), k, np.inf)
    return pd.DataFrame(np.where(q == 0, 1.0, np.clip(p, 0.0, 1.0)), index=frame.columns, columns=frame.columns)


def rank_groups(means: pd.Series, cd: float) -> list[tuple[str, ...]]:
    """Maximal sets of algorithms whose average ranks all lie within less than ``cd``.

    They are the bars of a critical-difference diagram. Only sets of two or more are listed, best first.

    Example:
        >>> rank_groups(pd.Series({"A": 1.0, "B": 1.6, "C": 2.2, "D": 4.0}), 0.7)
        [('A', 'B'), ('B', 'C')]
    """
    ordered = means.sort_values(kind="stable")
    names, values = [str(name) for name in ordered.index], ordered.to_numpy(dtype=np.float64)
    if not np.isfinite(values).all():
        raise ScoreError("average ranks must be finite")
    found: list[tuple[str, ...]] = []
    last = 0
    for start in range(len(names)):
        stop = int(np.searchsorted(values - values[start], cd, side="left"))
        if stop - start > 1 and stop > last:
            found.append(tuple(names[start:stop]))
            last = stop
    return found
