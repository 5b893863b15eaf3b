r"""Statistics that compare algorithms over many data sets; the formulas are in ``docs/statistics.md``.

The input is a table of scores, higher is better, with one row per data set and one column per algorithm, or a
dictionary from a metric to such a table; :func:`score_frames` makes them from the rows of a study. With average ranks
:math:`R_j` of k algorithms on N data sets,

.. math::

    \chi^2 = \frac{12 N}{k(k+1)} \sum_j \Big(R_j - \frac{k+1}{2}\Big)^2 \frac1c, \qquad
    F = \frac{(N-1)\chi^2}{N(k-1) - \chi^2}, \qquad
    \mathrm{CD} = q_\alpha \sqrt{\frac{k(k+1)}{6N}},

with the correction c for equal scores, and for the m non-zero differences of a pair, W the smaller sum of ranks,

.. math::

    |z| = \frac{m(m+1)/4 - W - 1/2}{\sqrt{m(m+1)(2m+1)/24 - \sum_g (t_g^3 - t_g)/48}},
    \qquad r = |z| / \sqrt{m} .

References:
    J. Demšar, *Statistical comparisons of classifiers over multiple data sets*, JMLR 7 (2006) 1-30.
    R. L. Iman and J. M. Davenport, *Approximations of the critical region of the Friedman statistic*,
    Communications in Statistics A9 (1980) 571-595.
    S. Holm, *A simple sequentially rejective multiple test procedure*, Scandinavian Journal of Statistics 6
    (1979) 65-70.
    A. Benavoli, G. Corani, J. Demšar and M. Zaffalon, *Time for a change: a tutorial for comparing multiple classifiers
    through Bayesian analysis*, JMLR 18 (2017) 1-36.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ldlt_bench import require_extra

require_extra()  # before the imports that need it

import numpy as np
import pandas as pd
import scikit_posthocs
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from ldlt.errors import LdltError, OptionError
from ldlt_bench.study.protocol import RADII

__all__ = [
    "DECIMALS",
    "METRICS",
    "RANGES",
    "Friedman",
    "MetricResult",
    "ScoreError",
    "Scores",
    "average_ranks",
    "bayesian_signed_rank",
    "check_scores",
    "compare",
    "critical_difference",
    "friedman",
    "friedman_from_ranks",
    "holm",
    "metric_results",
    "model_ranges",
    "nemenyi",
    "normal_signed_rank",
    "outcomes",
    "rank_groups",
    "score_frames",
    "signed_rank",
    "standings",
    "summarise",
]

METRICS = ("accuracy", *RADII)
"""Metrics of the study: accuracy, and accuracy with a margin for the radii 36, 72, 108 and 255 over 255."""

RANGES = ("width", "depth", "parameters", "padding", "input_dim", "output_dim")
"""Columns whose ranges :func:`model_ranges` reports."""

DECIMALS = 12
"""Scores, and differences of scores, are equal if they agree to this many decimals. Means over folds carry rounding
errors of about 1e-16, which must not turn a tie into a win; distinct scores differ by far more."""

EXACT = 50
"""Up to this many non-zero differences the p-value of a pair is exact."""

ROPE, DRAWS = 0.01, 5000
"""Differences of at most one point are practically none; draws from the posterior of a pair."""

POSTERIOR = ("p_a_better", "p_equal", "p_b_better")
"""Columns of the probabilities of :func:`bayesian_signed_rank`."""

_KEYS = ["dataset", "family", "fold", "seed"]


class ScoreError(LdltError, ValueError):
    """A table of scores or runs that cannot be compared: missing values, repeated names, too few rows."""


def check_scores(scores: pd.DataFrame, algorithms: int = 1, datasets: int = 1) -> pd.DataFrame:
    """Return scores (one row per data set, one column per algorithm) in float64, rounded to :data:`DECIMALS`.

    Raises:
        ScoreError: If a score is missing or not finite, a name is repeated, or there are fewer than asked for.
    """
    if not isinstance(scores, pd.DataFrame) or scores.shape[0] < datasets or scores.shape[1] < algorithms:
        raise ScoreError(f"scores must be a DataFrame of at least {datasets} data sets and {algorithms} algorithms")
    if not (scores.index.is_unique and scores.columns.is_unique):
        raise ScoreError("names of data sets and of algorithms must be unique")
    try:
        values = scores.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise ScoreError(f"scores must be numbers: {error}") from error
    if not np.isfinite(values).all():
        i, j = np.argwhere(~np.isfinite(values))[0]
        raise ScoreError(f"a score is missing or not finite: {scores.columns[j]} on {scores.index[i]}")
    # + 0.0 turns -0.0 into 0.0
    return pd.DataFrame(np.round(values, DECIMALS) + 0.0, index=scores.index, columns=scores.columns)


def _check_frames(frames: Mapping[str, pd.DataFrame], algorithms: int = 1) -> dict[str, pd.DataFrame]:
    """Check every metric, with the data sets and algorithms of the first one in all."""
    checked = {metric: check_scores(frame, algorithms) for metric, frame in frames.items()}
    if not checked:
        raise ScoreError("at least one metric is needed")
    first, *_ = checked.values()
    for metric, frame in checked.items():
        if set(frame.index) != set(first.index) or set(frame.columns) != set(first.columns):
            raise ScoreError(f"metric '{metric}' has other data sets or algorithms than the first metric")
    return {metric: frame.loc[first.index, first.columns] for metric, frame in checked.items()}


@dataclass(frozen=True)
class Scores:
    """Metric -> scores (data sets × algorithms) over the sets that all completed; set left out -> the reason."""

    frames: dict[str, pd.DataFrame]
    dropped: dict[str, str]


def score_frames(
    runs: pd.DataFrame, metrics: Sequence[str] = METRICS, *, algorithms: Sequence[str] | None = None
) -> Scores:
    """Average the rows of a study over folds and seeds, one table per metric.

    A data set counts only if every algorithm has the same (fold, seed) runs on it, as means over different
    folds are not paired. The others are left out and reported. A run with a missing or infinite metric counts as
    missing.

    Args:
        runs: One row per run, with the columns ``dataset``, ``family``, ``fold``, ``seed`` and the metrics.
        metrics: Names of the metric columns.
        algorithms: Families to compare, in the order of the columns. All by default, in alphabetical order.

    Example:
        >>> runs = pd.DataFrame(
        ...     [("iris", "A", 0, 0, 0.9), ("iris", "A", 1, 0, 0.8), ("iris", "B", 0, 0, 0.7),
        ...      ("iris", "B", 1, 0, 0.7), ("wine", "A", 0, 0, 0.9)],
        ...     columns=["dataset", "family", "fold", "seed", "accuracy"])
        >>> scores = score_frames(runs, ["accuracy"])
        >>> scores.frames["accuracy"].round(6).to_dict("index"), scores.dropped
        ({'iris': {'A': 0.85, 'B': 0.7}}, {'wine': 'B: 1 of 1 runs missing'})
    """
    missing = [name for name in (*_KEYS, *metrics) if name not in runs.columns]
    if missing or runs[_KEYS].isna().any(axis=None) or runs.duplicated(_KEYS).any():
        raise ScoreError(f"a column or key is missing or a run is repeated {missing or _KEYS}")
    numbers = runs[list(metrics)].apply(pd.to_numeric, errors="coerce")
    table = pd.concat([runs[_KEYS], numbers], axis=1)[np.isfinite(numbers).all(axis=1)]
    families = sorted(runs["family"].unique(), key=str.casefold) if algorithms is None else list(algorithms)
    table = table[table["family"].isin(families)]
    planned = runs[runs["family"].isin(families)].groupby("dataset")[["fold", "seed"]]
    dropped: dict[str, str] = {}
    for dataset, part in planned:
        units = len(part.drop_duplicates())
        counts = table[table["dataset"] == dataset]["family"].value_counts()
        gaps = {name: units - int(counts.get(name, 0)) for name in families}
        if any(gaps.values()):
            dropped[dataset] = "; ".join(f"{name}: {gap} of {units} runs missing" for name, gap in gaps.items() if gap)
    table = table[~table["dataset"].isin(dropped)]
    if table.empty:
        some = "; ".join(f"{name} ({reason})" for name, reason in list(dropped.items())[:3])
        raise ScoreError(f"no data set has all runs of all algorithms: {some or 'there are no runs'}")
    means = table.sort_values(_KEYS).groupby(["dataset", "family"])[list(metrics)].mean()
    return Scores(
        {
            m: check_scores(means[m].unstack("family")[families].rename_axis(None, axis=0).rename_axis(None, axis=1))
            for m in metrics
        },
        dropped,
    )


def summarise(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Mean and sample standard deviation (divisor ``N - 1``) over data sets of every algorithm and metric.

    ``best`` marks the highest mean of a metric. The deviation says how much data sets differ; it is no error bar.
    """
    parts = []
    for metric, frame in _check_frames(frames).items():
        mean = frame.mean().round(DECIMALS)
        part = {"algorithm": frame.columns, "metric": metric, "n": len(frame), "mean": mean, "sd": frame.std(ddof=1)}
        parts.append(pd.DataFrame({**part, "best": mean == mean.max()}))
    return pd.concat(parts, ignore_index=True)


def model_ranges(runs: pd.DataFrame, quantities: Sequence[str] = RANGES) -> pd.DataFrame:
    """Smallest and largest sizes of the models over all runs: ``algorithm``, ``quantity``, ``min``, ``max``."""
    if missing := [name for name in ("family", *quantities) if name not in runs.columns]:
        raise ScoreError(f"the table of runs lacks the columns {missing}")
    long = runs.melt("family", list(quantities), "quantity").groupby(["family", "quantity"], sort=False)["value"]
    return long.agg(["min", "max"]).reset_index().rename(columns={"family": "algorithm"})


@dataclass(frozen=True)
class Friedman:
    """Result of the Friedman and the Iman–Davenport test.

    Attributes:
        datasets: Number N of data sets.
        algorithms: Number k of algorithms.
        chi2: Friedman's statistic, and ``chi2_p`` its p-value (from the χ² distribution with k − 1 degrees of freedom).
        f: Iman and Davenport's statistic; infinite if all data sets rank the algorithms alike.
        f_df: Its degrees of freedom, ``(k - 1, (k - 1)(N - 1))``.
        f_p: Its p-value (approximate, from the F distribution; exact if ``f`` is infinite).
    """

    datasets: int
    algorithms: int
    chi2: float
    chi2_p: float
    f: float
    f_df: tuple[int, int]
    f_p: float


def _ranks(scores: pd.DataFrame) -> pd.DataFrame:
    """Rank of every algorithm on every data set: 1 is the highest score, equal scores share the mean rank."""
    return (-scores).rank(axis=1)


def average_ranks(scores: pd.DataFrame) -> pd.Series:
    """Mean rank over data sets, best first; equal means keep the order of the columns.

    Example:
        >>> average_ranks(pd.DataFrame({"A": [0.7, 0.8], "B": [0.9, 0.8]})).to_dict()
        {'B': 1.25, 'A': 1.75}
    """
    return _ranks(check_scores(scores)).mean().sort_values(kind="stable")


def friedman(scores: pd.DataFrame, *, tie_correction: bool = True) -> Friedman:
    """Friedman's and Iman and Davenport's tests that all algorithms perform alike.

    If all scores of every data set are equal, the statistics are zero and the p-values one. If all data sets
    rank the algorithms alike, F is infinite and its p-value is exact: the chance of that agreement.

    Args:
        scores: One row per data set (at least two), one column per algorithm (at least two).
        tie_correction: Divide χ² by c, as ``scipy.stats.friedmanchisquare`` does. Without it the tests are
            conservative when there are ties.
    """
    ranks = _ranks(check_scores(scores, 2, 2)).to_numpy()
    n, k = ranks.shape
    correction = float(np.mean([stats.tiecorrect(row) for row in ranks])) if tie_correction else 1.0
    chi2 = _plain_chi2(ranks.mean(axis=0), n) / correction if correction > 0 else 0.0
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
    k = len(values)
    if k < 2 or datasets < 2 or not abs(values.sum() - k * (k + 1) / 2) <= 0.01 * k:
        raise ScoreError(f"these are not the average ranks of 2 or more algorithms on 2 or more data sets: {values}")
    return _test(_plain_chi2(values, datasets), datasets, k, 1 / math.factorial(k))


def _plain_chi2(means: NDArray[np.float64], n: int) -> float:
    return float(12 * n / (len(means) * (len(means) + 1)) * ((means - means.mean()) ** 2).sum())


def _test(chi2: float, n: int, k: int, same_order: float) -> Friedman:
    """Complete the tests from χ²; ``same_order`` is the chance that two data sets rank alike by luck."""
    gap, df = n * (k - 1) - chi2, (k - 1, (k - 1) * (n - 1))
    agree = gap <= 1e-9 * n * (k - 1)
    f = math.inf if agree else (n - 1) * chi2 / gap
    f_p = same_order ** (n - 1) if agree else float(stats.f.sf(f, *df))
    return Friedman(n, k, chi2, float(stats.chi2.sf(chi2, k - 1)), f, df, f_p)


def critical_difference(algorithms: int, datasets: int, alpha: float = 0.05) -> float:
    """Nemenyi's critical difference: average ranks that differ by at least this much differ significantly.

    ``q_α`` is the quantile of the studentized range for infinitely many degrees of freedom, divided by √2.

    Example:
        >>> round(critical_difference(6, 121), 3)
        0.685
    """
    if algorithms < 2 or datasets < 1 or not 0 < alpha < 1:
        raise OptionError(f"at least 2 algorithms, 1 data set, 0 < α < 1, not {algorithms}, {datasets}, {alpha}")
    q = stats.studentized_range.ppf(1 - alpha, algorithms, np.inf) / math.sqrt(2)
    return float(q * math.sqrt(algorithms * (algorithms + 1) / (6 * datasets)))


def nemenyi(scores: pd.DataFrame) -> pd.DataFrame:
    """Nemenyi's p-values of all pairs, a symmetric table with ones on the diagonal."""
    frame = check_scores(scores, 2, 2)
    table = scikit_posthocs.posthoc_nemenyi_friedman(frame.to_numpy()).to_numpy()
    return pd.DataFrame(table, index=frame.columns, columns=frame.columns)


def rank_groups(means: pd.Series, cd: float) -> list[tuple[str, ...]]:
    """Maximal sets of two or more algorithms whose average ranks all lie within less than ``cd``, best first.

    Example:
        >>> rank_groups(pd.Series({"A": 1.0, "B": 1.6, "C": 2.2, "D": 4.0}), 0.7)
        [('A', 'B'), ('B', 'C')]
    """
    ordered = means.sort_values(kind="stable")
    values = ordered.to_numpy(dtype=np.float64)
    found: list[tuple[str, ...]] = []
    last = 0
    for start in range(len(values)):
        stop = int(np.searchsorted(values - values[start], cd, side="left"))
        if stop - start > 1 and stop > last:
            found.append(tuple(str(name) for name in ordered.index[start:stop]))
            last = stop
    return found


def signed_rank(a: ArrayLike, b: ArrayLike, *, method: str = "auto") -> dict[str, float]:
    """Wilcoxon's signed-rank test of two algorithms on the same data sets, two-sided.

    Args:
        a: Scores of A, one per data set.
        b: Scores of B.
        method: How p is found. ``normal``: from z. ``exact``: from the distribution of W when every sign is a
            fair coin, given the sizes of the differences, equal ones included. ``auto``: exact for at most 50
            non-zero differences, else normal.

    Returns:
        ``n`` data sets, ``wins_a``, ``wins_b``, ``ties``, ``win_rate_a`` (wins and half the ties), ``median_diff`` of A
        − B, ``w`` (smaller sum of ranks), ``z`` (positive if A is better), ``p``, effect size ``r`` and ``sign`` (of
        the better one by ranks).

    Example:
        >>> result = signed_rank([0.9, 0.8, 0.7, 0.6, 0.5], [0.8, 0.6, 0.4, 0.2, 0.5])
        >>> result["wins_a"], result["ties"], result["w"], result["p"]
        (4, 1, 0.0, 0.125)
    """
    if method not in ("auto", "normal", "exact"):
        raise OptionError(f"method must be auto, normal or exact, not '{method}'")
    frame = check_scores(pd.DataFrame({"a": np.asarray(a), "b": np.asarray(b)}))
    diff = np.round((frame["a"] - frame["b"]).to_numpy(), DECIMALS) + 0.0
    moved = diff[diff != 0]
    n, m = len(diff), len(moved)
    wins, losses = int((diff > 0).sum()), int((diff < 0).sum())
    w, z, p, sign = 0.0, 0.0, 1.0, 0
    if m:
        ranks = stats.rankdata(np.abs(moved))
        sign = int(np.sign(ranks[moved > 0].sum() - ranks[moved < 0].sum()))
        normal = stats.wilcoxon(moved, correction=True, method="asymptotic")
        w, z, p = float(normal.statistic), sign * abs(float(normal.zstatistic)), float(normal.pvalue)
        if method == "exact" or (method == "auto" and m <= EXACT):
            p = _exact_p(ranks, w)
    return {
        "n": n,
        "wins_a": wins,
        "wins_b": losses,
        "ties": n - m,
        "win_rate_a": (wins + (n - m) / 2) / n,
        "median_diff": float(np.median(diff)),
        "w": w,
        "z": z,
        "p": p,
        "r": abs(z) / math.sqrt(m) if m else 0.0,
        "sign": sign,
    }


def _exact_p(ranks: NDArray[np.float64], w: float) -> float:
    """Two-sided p-value of W given the ranks, equal ones included (scipy enumerates all signs then)."""
    chance = np.zeros(round(2 * ranks.sum()) + 1)  # of every sum of doubled ranks, which are whole numbers
    chance[0] = 1.0
    for step in np.rint(2 * ranks).astype(int):
        moved = np.zeros_like(chance)
        moved[step:] = chance[:-step]
        chance = (chance + moved) / 2
    return min(1.0, 2 * float(chance[: round(2 * w) + 1].sum()))


def normal_signed_rank(w: float, m: int) -> tuple[float, float, float]:
    """``(|z|, p, r)`` of W over m non-zero differences of distinct sizes, by the normal approximation.

    Example:
        >>> _, p, r = normal_signed_rank(412, 121)
        >>> f"{p:.1e} {r:.4f}"
        '2.3e-17 0.7708'
    """
    if m < 1 or not 0 <= w <= m * (m + 1) / 4:
        raise ScoreError(f"W lies between 0 and m(m+1)/4 for m >= 1, not W = {w}, m = {m}")
    z = max(m * (m + 1) / 4 - w - 0.5, 0.0) / math.sqrt(m * (m + 1) * (2 * m + 1) / 24)
    return z, float(2 * stats.norm.sf(z)), z / math.sqrt(m)


def bayesian_signed_rank(
    a: ArrayLike, b: ArrayLike, *, rope: float = ROPE, strength: float = 0.5, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float, float]:
    r"""Probabilities that A is better, that there is practically no difference, and that B is better.

    The Bayesian signed-rank test (Benavoli et al., 2017). The distribution of differences :math:`z_1, \dots, z_n` has a
    Dirichlet process as prior, of some strength s at :math:`z_0 = 0`: weights :math:`w \sim \mathrm{Dir}(s, 1, \dots,
    1)`. With r the half width of the region of practical equivalence,

    .. math::

        \theta_A = \sum_{ij} w_i w_j\,[z_i + z_j > 2r], \quad \theta_B = \sum_{ij} w_i w_j\,[z_i + z_j < -2r], \quad
        \theta_= = 1 - \theta_A - \theta_B ,

    and each probability is the share of draws of w in which that θ is the largest.

    Args:
        a: Scores of A, one per data set.
        b: Scores of B.
        rope: Half width r of the region of practical equivalence.
        strength: Strength s of the prior.
        draws: Number of draws.
        seed: Seed of the draws.

    Example:
        >>> bayesian_signed_rank([0.9, 0.8, 0.7, 0.9, 0.8], [0.5, 0.6, 0.4, 0.7, 0.5])[1] < 0.05
        True
    """
    if not (rope >= 0 and strength > 0 and draws >= 1):
        raise OptionError(f"rope ≥ 0, strength > 0 and draws ≥ 1 are needed, not {rope}, {strength}, {draws}")
    frame = check_scores(pd.DataFrame({"a": np.asarray(a), "b": np.asarray(b)}))
    z = np.concatenate([[0.0], (frame["a"] - frame["b"]).to_numpy()])
    sums = np.round(np.add.outer(z, z), DECIMALS)
    w = np.random.default_rng(seed).dirichlet([strength, *[1.0] * len(frame)], draws)
    better, worse = (((w @ side) * w).sum(1) for side in (sums > 2 * rope, sums < -2 * rope))
    first = np.argmax([better, 1 - better - worse, worse], axis=0)
    share = np.bincount(first, minlength=3) / draws
    return float(share[0]), float(share[1]), float(share[2])


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """Holm's adjusted p-values, in the order given.

    Example:
        >>> holm([0.01, 0.04, 0.03]).round(10).tolist()
        [0.03, 0.06, 0.06]
    """
    values = np.asarray(p, dtype=np.float64)
    if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
        raise ScoreError("p-values must be a list of numbers between 0 and 1")
    order = np.argsort(values, kind="stable")
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1)), 1.0)
    return adjusted


def compare(frames: Mapping[str, pd.DataFrame], *, method: str = "auto") -> pd.DataFrame:
    """Test every pair of algorithms for every metric.

    Args:
        frames: Metric -> scores, with the same data sets and algorithms (at least two).
        method: See :func:`signed_rank`.

    Returns:
        One row per metric and pair, smallest p of a metric first: ``metric``, ``a``, ``b``, the results of
        :func:`signed_rank` and :func:`bayesian_signed_rank`, ``p_holm`` (corrected over the pairs of the metric) and
        ``p_holm_global`` (over all).
    """
    parts = []
    for metric, frame in _check_frames(frames, 2).items():
        part = pd.DataFrame(
            [
                {"metric": metric, "a": a, "b": b, **signed_rank(frame[a], frame[b], method=method)}
                | dict(zip(POSTERIOR, bayesian_signed_rank(frame[a], frame[b]), strict=True))
                for a, b in combinations(frame.columns, 2)
            ]
        )
        part.insert(part.columns.get_loc("p") + 1, "p_holm", holm(part["p"]))
        parts.append(part.sort_values(["p", "w"], kind="stable"))
    table = pd.concat(parts, ignore_index=True)
    table.insert(table.columns.get_loc("p_holm") + 1, "p_holm_global", holm(table["p"]))
    return table


def outcomes(
    pairs: pd.DataFrame, algorithms: Sequence[str], *, alpha: float = 0.05, p_column: str = "p_holm"
) -> pd.DataFrame:
    """Square table, row against column: 1 a significant win, −1 a significant loss, 0 neither.

    The winner is the one that the ranks of the differences speak for, not the one with the better median.

    Args:
        pairs: Tests of one metric, as made by :func:`compare`.
        algorithms: Order of rows and columns.
        alpha: Level of significance: a pair is significant if its p-value is at most α.
        p_column: ``p``, ``p_holm`` or ``p_holm_global``.
    """
    if p_column not in ("p", "p_holm", "p_holm_global") or not 0 < alpha < 1:
        raise OptionError(f"p_column is p, p_holm or p_holm_global and 0 < α < 1, not '{p_column}', {alpha}")
    names = list(algorithms)
    if {*pairs["a"], *pairs["b"]} != set(names) or len(pairs) != len(names) * (len(names) - 1) // 2:
        raise ScoreError("every two algorithms must be paired once: give the pairs of one metric and all their names")
    table = pd.DataFrame(0, index=names, columns=names)
    for row in pairs[pairs[p_column] <= alpha].itertuples():
        table.loc[row.a, row.b], table.loc[row.b, row.a] = row.sign, -row.sign
    return table


def standings(means: pd.Series, pairs: pd.DataFrame, *, alpha: float = 0.05, p_column: str = "p_holm") -> pd.DataFrame:
    """Average rank, significant wins and losses, and their strength, best average rank first.

    ``win_share`` is wins over the k − 1 opponents, ``mean_r`` the mean effect size of the significant wins, zero
    without any. ``means`` as made by :func:`average_ranks`, the rest as in :func:`outcomes`.
    """
    ordered = means.sort_values(kind="stable")
    table = outcomes(pairs, list(ordered.index), alpha=alpha, p_column=p_column)
    effect = pairs.pivot(index="a", columns="b", values="r").reindex(index=ordered.index, columns=ordered.index)
    effect = effect.fillna(0.0).to_numpy()
    won, lost = table.to_numpy() > 0, table.to_numpy() < 0
    wins, losses = won.sum(axis=1), lost.sum(axis=1)
    return pd.DataFrame(
        {
            "algorithm": ordered.index,
            "average_rank": ordered.to_numpy(),
            "wins": wins,
            "losses": losses,
            "net_wins": wins - losses,
            "win_share": wins / (len(ordered) - 1),
            "mean_r": (won * (effect + effect.T)).sum(axis=1) / np.maximum(wins, 1),
        }
    )


@dataclass(frozen=True)
class MetricResult:
    """Tests of one metric; what needs more families or data sets than there are is ``None``.

    ``ranks``: average ranks, best first; ``cd``, ``groups``: Nemenyi's critical difference, and the families that it
    does not tell apart; ``outcomes``: winner of every pair, row against column.
    """

    ranks: pd.Series
    test: Friedman | None = None
    cd: float | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    pairs: pd.DataFrame | None = None
    standings: pd.DataFrame | None = None
    outcomes: pd.DataFrame | None = None


def metric_results(frames: Mapping[str, pd.DataFrame]) -> dict[str, MetricResult]:
    """Tests of every metric, over the same data sets and algorithms."""
    frames = _check_frames(frames)
    n, k = next(iter(frames.values())).shape
    if k < 2 or n < 2:
        return {metric: MetricResult(average_ranks(frame)) for metric, frame in frames.items()}
    pairs, cd = compare(frames), critical_difference(k, n)
    results = {}
    for metric, frame in frames.items():
        means, one = average_ranks(frame), pairs[pairs["metric"] == metric].reset_index(drop=True)
        groups, winners = tuple(rank_groups(means, cd)), outcomes(one, list(means.index))
        results[metric] = MetricResult(means, friedman(frame), cd, groups, one, standings(means, one), winners)
    return results
